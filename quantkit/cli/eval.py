"""``quantkit eval MODEL``"""

from __future__ import annotations

import sys
from typing import Any

import click

from quantkit.cli.option_groups import GroupedCommand, grouped
from quantkit.cli.output import print_json
from quantkit.cli.progress import bar
from quantkit.errors import RequestError


@click.command(cls=GroupedCommand, context_settings={"token_normalize_func": lambda token: token.replace("_", "-")})
@click.argument("model")
@grouped(
    "Basic",
    "--baseline",
    metavar="SOURCE",
    help="The 16- or 32-bit original: adds KL divergence and the paired difference.",
)
@grouped(
    "Basic",
    "--data",
    default="wikipedia-sample",
    show_default=True,
    metavar="TEXT",
    help="NAME, FILE (.txt, .jsonl, .parquet) or hub:dataset[:config[:split]]; never the calibration text.",
)
@grouped("Basic", "--seq-len", type=int, help="Tokens per window, BOS counted.  [default: 1024; llama.cpp: 512]")
@grouped(
    "Basic",
    "--tokens",
    type=int,
    help="Windows x seq-len, rounded down to full windows.  [default: every full window of the text]",
)
@grouped("Basic", "--protocol", default="gptq", show_default=True, metavar="NAME", help="gptq or llama.cpp.")
@grouped(
    "Basic",
    "--by-position",
    "bands",
    is_flag=True,
    help="Also show the figures by position in the window (--json has them always).",
)
@grouped("Basic", "--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.option("--html", hidden=True)
@grouped(
    "KV cache",
    "--kv-bits",
    metavar="BITS",
    help=(
        "Read the KV cache at 16, 8, 4, 3 or 2 bits, fp8, or keys and values apart: k4v2.  [default: what the"
        " checkpoint says]"
    ),
)
@grouped(
    "KV cache",
    "--kv-scales",
    type=click.Choice(["online", "static"]),
    help=(
        "Scales of the cache: online for any model, static as convert calibrated them.  [default: what the checkpoint"
        " says, else online]"
    ),
)
@grouped(
    "KV cache",
    "--kv-exact",
    type=int,
    metavar="0",
    help="0: round every token of an fp8 cache as it is stored, as other engines do.  [default: the newest stay exact]",
)
@grouped(
    "KV cache",
    "--planted-fact",
    is_flag=True,
    help="Also ask for facts planted in long texts, with the quantized cache and with a 16-bit one.",
)
@grouped(
    "KV cache",
    "--greedy",
    type=int,
    metavar="TOKENS",
    help=(
        "Also write TOKENS tokens after the beginnings of up to 8 windows, with either cache, and tell how many are"
        " equal."
    ),
)
@grouped(
    "Running",
    "--dtype",
    metavar="DTYPE",
    help="float32, bfloat16 or float16.  [default: float32; with --runtime: the runtime's]",
)
@grouped("Running", "--runtime", is_flag=True, help="Measure the packed kernels instead of dequantized weights.")
@grouped(
    "Running",
    "--stream/--no-stream",
    default=None,
    help="One decoder block in memory at a time; same figures.  [default: only for models that do not fit]",
)
@grouped("Running", "--device", default="auto", show_default=True, metavar="DEVICE", help="auto, cpu or cuda.")
def command(model: str, as_json: bool, bands: bool, html: str | None, **given: Any) -> None:
    """Measure MODEL on a text: perplexity with its standard error and, with --baseline, what quantization cost.

    A quantized KV cache (--kv-bits) is really read: tokens go through in chunks of 64, each attending to the packed
    pages before it. --baseline always has a 16-bit cache; to see what the cache alone costs, name MODEL itself.

    MODEL is a folder that `quantkit convert` wrote, any model it reads, or a bitsandbytes checkpoint.
    """
    if html is not None:
        raise RequestError("--html has not landed yet. Use --json and make the page from it.")
    if bands and as_json:
        raise RequestError("--by-position has no effect on --json, which always holds by_position. Leave it out.")
    from quantkit.evaluate.api import evaluate

    with bar() as progress:
        evaluation = evaluate(model, progress=progress, **given)
    (
        print_json(evaluation.to_json())
        if as_json
        else click.echo(evaluation.table(color=sys.stdout.isatty(), bands=bands))
    )
