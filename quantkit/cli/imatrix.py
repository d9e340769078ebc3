"""``quantkit imatrix SOURCE -o FILE``"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from quantkit.cli.output import print_json, print_lines
from quantkit.cli.progress import bar


@click.command()
@click.argument("source")
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path), help="File to create; must not exist.")
@click.option("--calibration", default="wikipedia-sample", show_default=True, metavar="TEXT", help="As for convert.")
@click.option("--samples", type=int, default=128, show_default=True, help="Calibration windows.")
@click.option("--seq-len", type=int, default=1024, show_default=True, help="Tokens per window.")
@click.option("--seed", type=int, default=0, show_default=True, help="Which windows of the text are drawn.")
@click.option("--device", default="auto", show_default=True, metavar="DEVICE", help="auto, cpu or cuda.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(source: str, out: Path, as_json: bool, **options: Any) -> None:
    """Write llama.cpp's importance matrix of SOURCE: how large the inputs of each linear are on a text.

    Read by llama-quantize --imatrix, and by `quantkit convert --format gguf --imatrix`. (A conversion that reads a text
    itself needs none.)
    """
    from quantkit.convert.imatrix import imatrix

    with bar() as listen:
        done = imatrix(
            source,
            out,
            lambda progress: listen(progress.stage, progress.done, progress.total, progress.note),
            **options,
        )
    if as_json:
        print_json(done)
        return
    print_lines(f"{done['out']}: {done['entries']} weights, {done['tokens']} tokens of {done['text']}")
