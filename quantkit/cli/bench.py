"""``quantkit bench MODEL``"""

from __future__ import annotations

import sys
from typing import Any

import click

from quantkit.cli.option_groups import GroupedCommand, grouped
from quantkit.cli.output import print_json
from quantkit.cli.progress import bar


@click.command(cls=GroupedCommand)
@click.argument("model")
@grouped(
    "Basic", "--batch", default="1", show_default=True, metavar="N,N", help="Sequences at once; commas make a grid."
)
@grouped(
    "Basic",
    "--prompt",
    default="128",
    show_default=True,
    metavar="N,N",
    help="Tokens of the prompt; commas make a grid.",
)
@grouped("Basic", "--new-tokens", type=int, default=64, show_default=True, help="Tokens of each answer.")
@grouped(
    "Basic",
    "--repeat",
    type=int,
    default=3,
    show_default=True,
    help="Runs of each cell, after one that is not counted.",
)
@grouped("Basic", "--seed", type=int, default=0, show_default=True, help="Of the random prompts.")
@grouped("Basic", "--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@grouped(
    "KV cache", "--kv-bits", metavar="BITS", help="16, 8, 4, 3, 2, fp8 or k4v2.  [default: what the checkpoint says]"
)
@grouped(
    "KV cache",
    "--kv-scales",
    type=click.Choice(["online", "static"]),
    help="Scales made on the way, or those that convert stored.",
)
@grouped("Running", "--threads", type=int, help="CPU threads.  [default: what torch takes]")
@grouped("Running", "--device", default="auto", show_default=True, metavar="DEVICE", help="auto, cpu or cuda.")
@grouped("Running", "--dtype", default="auto", show_default=True, help="auto, float32, bfloat16 or float16 (GPU only).")
@grouped(
    "Running",
    "--kernel",
    metavar="NAME",
    help=(
        "One kernel for every quantized layer: numba, int4, int8, w8a8, dequantize, reference; GPU: triton,"
        " triton-gemv, triton-gemm, triton-w8a8.  [default: the measured choice]"
    ),
)
@grouped(
    "Running", "--head-bits", type=int,
    help="Bits of a dense head: 16 (as stored), 8 or 4.  [default: 8 on a CPU beside weights of at most 6, else 16]",
)  # fmt: skip
@grouped("Running", "--keep-dense", is_flag=True, help="CPU: hold floats beside the packed weights, for prompts.")
@grouped("Running", "--no-graphs", is_flag=True, help="GPU: launch decode steps kernel by kernel, not as CUDA graphs.")
def command(model: str, as_json: bool, no_graphs: bool, **given: Any) -> None:
    """Time MODEL: first token, tokens/s, bytes read per token and the share of the memory's bandwidth that is reached.

    Prompts are random tokens; decoding is greedy, through the runtime that `quantkit generate` uses.
    """
    from quantkit.evaluate.speed.bench import bench

    with bar() as progress:
        speed = bench(model, progress=progress, graphs=not no_graphs, **given)
    print_json(speed.to_json()) if as_json else click.echo(speed.table(color=sys.stdout.isatty()))
