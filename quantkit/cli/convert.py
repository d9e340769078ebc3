"""``quantkit convert SOURCE --out DIR``"""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Any

import click

from quantkit.algorithms import METHODS
from quantkit.cli.option_groups import GroupedCommand, GroupSize, grouped
from quantkit.cli.output import print_json, print_lines
from quantkit.cli.progress import bar
from quantkit.formats import WRITABLE

FORMER_NAMES = {"products": "matmul_precision"}  # as in convert.options.resolve, which is loaded only when it is needed


WORTH_SAYING = 30.0  # seconds: a shorter conversion is not announced


def _normalize(token: str) -> str:
    """Underscores are hyphens, and an option's former name is its name of today."""
    name = token.replace("_", "-")
    return {old.replace("_", "-"): new.replace("_", "-") for old, new in FORMER_NAMES.items()}.get(name, name)


class ConvertCommand(GroupedCommand):
    """Refuses an option that is given under its former name and today's: click would drop the first of them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = {token.partition("=")[0].lstrip("-").replace("-", "_") for token in args if token.startswith("--")}
        if given & set(FORMER_NAMES):
            from quantkit.convert.options.resolve import renamed

            renamed(dict.fromkeys(given))
        return super().parse_args(ctx, args)


@click.command(cls=ConvertCommand, context_settings={"token_normalize_func": _normalize})
@click.argument("source")
@grouped("Basic", "--out", required=True, type=click.Path(path_type=Path), help="Folder to create; must not exist.")
@grouped(
    "Basic",
    "--preset",
    metavar="NAME",
    help=(
        "fast (hqq, no text), balanced (gptq, channels scaled, tokens weighed) or best (tune, then --distil 128); an"
        " option given wins."
    ),
)
@grouped(
    "Basic",
    "--method",
    default="gptq",
    show_default=True,
    metavar="METHOD",
    help=f"{', '.join(METHODS[:-1])} or {METHODS[-1]}. (kquant: with --format gguf)",
)
@grouped(
    "Basic",
    "--scheme",
    metavar="NAME",
    help=(
        "Floating-point numbers instead of integers: fp8 (one scale per channel, activations fp8 per token), fp8-block"
        " (128 x 128), fp8-tensor, nvfp4, mxfp4. With --format bitsandbytes: nf4, nf4-double, fp4, llm-int8."
    ),
)
@grouped("Basic", "--bits", type=int, default=4, show_default=True, help="2 to 8.")
@grouped(
    "Basic",
    "--group-size",
    type=GroupSize(),
    default="128",
    show_default=True,
    metavar="SIZE|channel|auto",
    help="Inputs per scale, or 'channel'; auto: chosen with the bits (only with --target-*, and the default there).",
)
@grouped(
    "Basic", "--sym/--asym", "symmetric", default=False, help="Fixed zero point, or one per group. [default: asym]"
)
@grouped(
    "Basic",
    "--format",
    "format_",
    default="compressed-tensors",
    show_default=True,
    metavar="FORMAT",
    help=f"{', '.join(WRITABLE[:-1])} or {WRITABLE[-1]}.",
)
@grouped(
    "GGUF",
    "--gguf-type",
    metavar="TYPE",
    help=(
        "With --format gguf: q4_k_m, q5_k_m, q6_k, q8_0, q4_0, f16, ...: block formats by tensor as llama.cpp mixes"
        " them; or leave it out and give --target-bpw. Methods: gptq, kquant (scales weighed by importance), rtn."
    ),
)
@grouped(
    "GGUF",
    "--imatrix",
    metavar="FILE",
    help="With --format gguf: an importance matrix of llama.cpp or `quantkit imatrix`, instead of a text.",
)
@grouped(
    "Basic",
    "--calibration",
    default="wikipedia-sample",
    show_default=True,
    metavar="TEXT",
    help="NAME, FILE (.txt, .jsonl, .parquet), hub:dataset[:config[:split]], or self: the model writes it.",
)
@grouped("Basic", "--samples", type=int, default=128, show_default=True, help="Calibration windows.")
@grouped("Basic", "--seq-len", type=int, default=1024, show_default=True, help="Tokens per window.")
@grouped(
    "KV cache",
    "--kv-bits",
    default="16",
    show_default=True,
    metavar="BITS",
    help="KV cache: 16, 8, 4, 3, 2, fp8, or keys and values apart: k4v2. Calibrated and stored.",
)
@grouped(
    "KV cache",
    "--kv-scales",
    default="online",
    show_default=True,
    metavar="HOW",
    help="online: each page of the cache has its own; static: calibrated, one per channel.",
)
@grouped(
    "KV cache",
    "--kv-budget",
    type=float,
    metavar="BITS",
    help=(
        "Instead of --kv-bits: 8, 4, 3 or 2 for keys and for values of each layer, by measured sensitivity; at most so"
        " many bits a number on average (codes; scales come on top and are reported)."
    ),
)
@grouped(
    "Choosing bits",
    "--target-bpw",
    type=float,
    metavar="BITS",
    help=(
        "Instead of --bits: bits and group size of each layer by measured sensitivity, at most so many bits per weight"
        " of the whole model (all tensors counted; head and embeddings are quantized, too, where the format can). With"
        " --format gguf: its block formats by tensor."
    ),
)
@grouped(
    "Choosing bits", "--target-size", metavar="SIZE", help="The same in bytes of all tensors: 3.5GB, 700MB, 1.2GiB."
)
@grouped(
    "Choosing bits",
    "--rule",
    "rules",
    multiple=True,
    metavar="GLOB=SETTINGS",
    help=(
        "Other settings for some modules: '*.down_proj=bits:8,group:64', 'lm_head=bits:8', '*.v_proj=keep'; with"
        " --format gguf a type: '*.v_proj=q6_k'. Repeatable; first match wins."
    ),
)
@grouped(
    "Method details",
    "--scales",
    default="search",
    show_default=True,
    metavar="HOW",
    help="search: smallest squared error; minmax: the extremes.",
)
@grouped(
    "Method details",
    "--scale-dtype",
    default="float16",
    show_default=True,
    metavar="DTYPE",
    help="float16 or bfloat16.",
)
@grouped(
    "Method details",
    "--activations",
    default="none",
    show_default=True,
    metavar="KIND",
    help=(
        "none; int8: inputs of the quantized linears are rounded per token at run time (W8A8), sets --bits 8"
        " --group-size channel --sym; fp8 (what the fp8 schemes have), nvfp4 and mxfp4 go with --scheme."
    ),
)
@grouped(
    "Method details",
    "--damping",
    type=float,
    default=0.01,
    show_default=True,
    help="gptq, awq: share of the Hessian's mean diagonal that is added to it.",
)
@grouped(
    "Method details",
    "--fold/--no-fold",
    default=False,
    help=(
        "gptq: scale channels by AWQ's search first; norms and biases change too. (preset balanced; --no-fold takes it"
        " out)"
    ),
)
@grouped(
    "Method details",
    "--guided/--no-guided",
    default=False,
    help=(
        "gptq: tokens count by what they mean to the model's output, measured first in one pass forward and back."
        " (preset balanced; --no-guided takes it out)"
    ),
)
@grouped(
    "Method details",
    "--gptaq/--no-gptaq",
    default=False,
    help=(
        "gptq: aim at the outputs that the original model's inputs give; another pass over the text, another stream of"
        " states."
    ),
)
@grouped(
    "Method details",
    "--rotate/--no-rotate",
    default=False,
    help=(
        "Rotate residual stream and values first (Hadamard, folded into the weights; llama, mistral, qwen3). A tied"
        " head becomes a matrix of its own."
    ),
)
@grouped(
    "Method details",
    "--quantize-mtp",
    is_flag=True,
    help="Quantize layers that predict further tokens (MTP), too: rounded, as no calibration text runs through them.",
)
@grouped(
    "Method details",
    "--tune-steps",
    type=int,
    default=120,
    show_default=True,
    help="tune: steps of learning per block; time grows with them.",
)
@grouped(
    "Method details",
    "--distil",
    type=int,
    default=0,
    show_default=True,
    metavar="WINDOWS",
    help="After the blocks: scales and norms learn the original's distribution on so many windows, codes stay. 0: no.",
)
@grouped(
    "Method details",
    "--strict-groups",
    is_flag=True,
    help="Refuse a group size that does not divide, instead of adapting it.",
)
@grouped(
    "Repack",
    "--repack",
    is_flag=True,
    help=(
        "Keep the numbers of a GGUF file, or of an FP8, NVFP4 or MXFP4 folder, and write them in --format, instead of"
        " quantizing them anew. (integers with scales are always repacked)"
    ),
)
@grouped(
    "Repack",
    "--allow-rounding",
    is_flag=True,
    help="Round what --format cannot keep (scales, minima); how much is measured for each weight, in quantkit.json.",
)
@grouped(
    "Repack",
    "--dequantize",
    is_flag=True,
    help="Write a quantized folder or GGUF file as a dense checkpoint that plain transformers loads.",
)
@grouped(
    "Repack",
    "--dtype",
    default="auto",
    show_default=True,
    metavar="DTYPE",
    help="With --dequantize: float16, bfloat16, float32 (keeps every number), or auto: the config's.",
)
@grouped("Running", "--dry-run", is_flag=True, help="Print the plan and what it needs, then stop.")
@grouped("Running", "--overwrite", is_flag=True, help="Replace an existing model folder.")
@grouped("Running", "--resume", is_flag=True, help="Go on with a job that was killed or stopped.")
@grouped(
    "Running", "--work-dir", type=click.Path(path_type=Path), help="Where finished blocks are kept. [beside --out]"
)
@grouped(
    "Running",
    "--device",
    default="auto",
    show_default=True,
    metavar="DEVICE",
    help="auto (a GPU if torch sees one), cpu, or cuda.",
)
@grouped(
    "Running",
    "--matmul-precision",
    default="auto",
    show_default=True,
    metavar="HOW",
    help=(
        "Calibration's matrix products: float32, bf16x6 (six bf16 products, as exact), bf16x3 (less so), bf16 (one),"
        " auto: bf16x6 on a GPU, bf16 on a CPU with AMX."
    ),
)
@grouped("Running", "--seed", type=int, default=0, show_default=True, help="Which windows of the text are drawn.")
@grouped("Running", "--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(source: str, out: Path, format_: str, dry_run: bool, as_json: bool, **given: Any) -> None:
    """Quantize SOURCE into the folder --out: a complete checkpoint with config, tokenizer and manifest.

    SOURCE is a Hugging Face folder, a .gguf file, a hub id (org/name[@revision]), or a name that `quantkit fetch`
    knows. A SOURCE that is quantized already is repacked into --format: the same codes; with --kv-bits its cache is
    calibrated too.
    """
    from quantkit.convert import api
    from quantkit.convert.plan.plan import Plan

    started = time.perf_counter()
    typed = _typed({**given, "format": format_})
    planned = api.plan_request(source, out, preset=given["preset"], **typed)
    if dry_run:
        print_json(api.plan_json(planned)) if as_json else print_lines(api.describe(planned))
        _end_dry_run(planned)
        return
    planned.raise_problems()
    repacking = not isinstance(planned, Plan)
    if not as_json and isinstance(planned, Plan):
        if planned.seconds > WORTH_SAYING:
            print_lines(f"This takes {planned.duration_words()}.", err=True)
        for warning in planned.warnings:
            print_lines(f"note: {warning}", err=True)
    with bar() as listen:

        def heard(progress: Any) -> None:
            if progress.stage != "chosen":
                listen(progress.stage, progress.done, progress.total, progress.note)
            elif not as_json:  # while there is still time to ask for something else
                print_lines(progress.note, err=True)

        report = api.execute(planned, heard, started)
    if as_json:
        print_json(report.to_json())
        return
    print_lines(report.table(warned=not repacking))
    if not repacking:
        print_lines(f"  next      {shlex.join(['quantkit', 'eval', str(report.out), '--baseline', source])}")


def _end_dry_run(plan: Any) -> None:
    """Exit with an error if the plan, which was just printed, cannot run."""
    count = len(plan.problems)
    if count:
        click.echo(f"This cannot run: {count} problem{'s' if count > 1 else ''}, see above.", err=True)
        raise SystemExit(2)


def _typed(given: dict[str, Any]) -> dict[str, Any]:
    """Return the options that stand on the command line, but for the preset."""
    from click.core import ParameterSource

    context = click.get_current_context()
    parameter = {"format": "format_"}
    return {
        name: value
        for name, value in given.items()
        if name != "preset" and context.get_parameter_source(parameter.get(name, name)) is ParameterSource.COMMANDLINE
    }
