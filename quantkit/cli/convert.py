"""``quantkit convert SOURCE --out DIR``"""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Any

import click

from quantkit.algorithms import LATER as LATER_METHODS
from quantkit.algorithms import METHODS
from quantkit.cli.output import print_json, print_lines
from quantkit.cli.progress import bar
from quantkit.errors import RequestError
from quantkit.formats import WRITABLE


class GroupSize(click.ParamType):  # type: ignore[type-arg]  # generic only since click 8.4
    """A number of inputs, 'channel' for one scale per output row, or 'auto': chosen with the bits."""

    name = "size|channel|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str | None:
        if value in (None, "channel", "-1", -1):
            return None
        if value == "auto":
            return "auto"
        try:
            return int(value)
        except ValueError:
            raise RequestError(
                f"--group-size {value}: a positive number of inputs, 'channel', or 'auto' with --target-bpw or --target-size."
            ) from None


@click.command(context_settings={"token_normalize_func": lambda token: token.replace("_", "-")})
@click.argument("source")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to create; must not exist.")
@click.option(
    "--method",
    default="gptq",
    show_default=True,
    metavar="METHOD",
    help=f"{', '.join(METHODS[:-1])} or {METHODS[-1]}. ({', '.join(LATER_METHODS)}: later)",
)
@click.option(
    "--preset",
    metavar="NAME",
    help="fast (hqq, no text), balanced (gptq, channels scaled, tokens weighed) or best (tune, then --distil 128); an option given wins.",
)
@click.option("--bits", type=int, default=4, show_default=True, help="2 to 8.")
@click.option(
    "--group-size",
    type=GroupSize(),
    default="128",
    show_default=True,
    metavar="SIZE|channel|auto",
    help="Inputs per scale, or 'channel'; auto: chosen with the bits (only with --target-*, and the default there).",
)
@click.option(
    "--target-bpw",
    type=float,
    metavar="BITS",
    help="Instead of --bits: bits and group size of each layer by measured damage, at most so many bits per weight of the whole model (all "
    "tensors counted; head and embeddings are quantized, too, where the format can).",
)
@click.option("--target-size", metavar="SIZE", help="The same in bytes of all tensors: 3.5GB, 700MB, 1.2GiB.")
@click.option("--sym/--asym", "symmetric", default=False, help="Fixed zero point, or one per group. [default: asym]")
@click.option(
    "--activations",
    default="none",
    show_default=True,
    metavar="none|int8",
    help="int8: inputs of the quantized linears are rounded per token at run time (W8A8); sets --bits 8 --group-size channel --sym.",
)
@click.option(
    "--rule",
    "rules",
    multiple=True,
    metavar="GLOB=SETTINGS",
    help="Other settings for some modules: '*.down_proj=bits:8,group:64', 'lm_head=bits:8', '*.v_proj=keep'. Repeatable; first match wins.",
)
@click.option(
    "--scales",
    default="search",
    show_default=True,
    metavar="HOW",
    help="search: smallest squared error; minmax: the extremes.",
)
@click.option("--scale-dtype", default="float16", show_default=True, metavar="DTYPE", help="float16 or bfloat16.")
@click.option(
    "--format",
    "format_",
    default="compressed-tensors",
    show_default=True,
    metavar="FORMAT",
    help=f"{', '.join(WRITABLE[:-1])} or {WRITABLE[-1]}.",
)
@click.option(
    "--kv-bits",
    default="16",
    show_default=True,
    metavar="BITS",
    help="KV cache: 16, 8, 4, 3, 2, fp8, or keys and values apart: k4v2. Calibrated and stored.",
)
@click.option(
    "--kv-scales",
    default="online",
    show_default=True,
    metavar="HOW",
    help="online: each page of the cache has its own; static: calibrated, one per channel.",
)
@click.option(
    "--kv-budget",
    type=float,
    metavar="BITS",
    help="Instead of --kv-bits: 8, 4, 3 or 2 for keys and for values of each layer, by measured damage; at most so many bits a number "
    "on average (codes; scales come on top and are reported).",
)
@click.option(
    "--calibration",
    default="wikipedia-sample",
    show_default=True,
    metavar="TEXT",
    help="NAME, FILE (.txt, .jsonl, .parquet), hub:dataset[:config[:split]], or self: the model writes it.",
)
@click.option("--samples", type=int, default=128, show_default=True, help="Calibration windows.")
@click.option("--seq-len", type=int, default=1024, show_default=True, help="Tokens per window.")
@click.option(
    "--damping",
    type=float,
    default=0.01,
    show_default=True,
    help="gptq, awq: share of the Hessian's mean diagonal that is added to it.",
)
@click.option(
    "--tune-steps",
    type=int,
    default=120,
    show_default=True,
    help="tune: steps of learning per block; time grows with them.",
)
@click.option(
    "--distil",
    type=int,
    default=0,
    show_default=True,
    metavar="WINDOWS",
    help="After the blocks: scales and norms learn the original's distribution on so many windows, codes stay. 0: no.",
)
@click.option(
    "--fold/--no-fold",
    default=False,
    help="gptq: scale channels by AWQ's search first; norms and biases change too. (preset balanced; --no-fold takes it out)",
)
@click.option(
    "--guided/--no-guided",
    default=False,
    help="gptq: tokens count by what they mean to the model's output, measured first in one pass forward and back. (preset balanced; --no-guided takes it out)",
)
@click.option(
    "--rotate/--no-rotate",
    default=False,
    help="Rotate residual stream and values first (Hadamard, folded into the weights; llama, mistral, qwen3). A tied head becomes a matrix of its own.",
)
@click.option(
    "--gptaq/--no-gptaq",
    default=False,
    help="gptq: aim at the outputs that the original model's inputs give; another pass over the text, another stream of states.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Which windows of the text are drawn.")
@click.option("--strict-groups", is_flag=True, help="Refuse a group size that does not divide, instead of adapting it.")
@click.option("--overwrite", is_flag=True, help="Replace an existing model folder.")
@click.option("--resume", is_flag=True, help="Go on with a job that was killed or stopped.")
@click.option("--work-dir", type=click.Path(path_type=Path), help="Where finished blocks are kept. [beside --out]")
@click.option(
    "--device",
    default="auto",
    show_default=True,
    metavar="DEVICE",
    help="auto (a GPU if torch sees one), cpu, or cuda.",
)
@click.option(
    "--products",
    default="auto",
    show_default=True,
    metavar="HOW",
    help="Calibration's matrix products: float32, bf16x6 (six bf16 products, as exact), bf16x3 (less so), bf16 (one), auto: bf16x6 on a GPU, bf16 on a CPU with AMX.",
)
@click.option("--dry-run", is_flag=True, help="Print the plan and what it needs, then stop.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(source: str, out: Path, format_: str, dry_run: bool, as_json: bool, **given: Any) -> None:
    """Quantize SOURCE into the folder --out: a complete checkpoint with config, tokenizer and manifest.

    SOURCE is a Hugging Face folder, a .gguf file, a hub id (org/name[@revision]), or a name that `quantkit fetch` knows.
    A SOURCE that is quantized already is repacked into --format: the same codes; with --kv-bits its cache is calibrated too.
    """
    from quantkit.convert.options import (
        ConvertOptions,
        apply_activations,
        apply_preset,
        apply_target,
    )
    from quantkit.convert.plan import make_plan
    from quantkit.convert.refusals import refuse_without_effect
    from quantkit.convert.repack import plan_repack
    from quantkit.convert.repack_request import refuse_preset
    from quantkit.convert.run import run

    preset = given.pop("preset")
    given.update(apply_preset(preset, _typed(given)))
    given.update(apply_activations({**_typed(given), "activations": given["activations"]}))
    given.update(apply_target(_typed(given)))
    started = time.perf_counter()
    options = ConvertOptions(source=source, out=out, preset=preset, format=format_, **given)
    repacking = plan_repack(source, out, _typed({**given, "format": format_}))
    if repacking is not None:
        refuse_preset(source, preset)
        _run_repack(repacking, started, dry_run=dry_run, as_json=as_json)
        return
    refuse_without_effect(_typed(given), options)
    plan = make_plan(options)
    if dry_run:
        from quantkit.convert.describe import describe, plan_json

        print_json(plan_json(plan)) if as_json else print_lines(describe(plan))
        _end_dry_run(plan)
        return
    plan.raise_problems()
    if not as_json:
        for warning in plan.warnings:
            print_lines(f"note: {warning}", err=True)
    with bar() as listen:

        def heard(progress: Any) -> None:
            if progress.stage != "chosen":
                listen(progress.stage, progress.done, progress.total, progress.note)
            elif not as_json:  # while there is still time to ask for something else
                print_lines(progress.note, err=True)

        report = run(plan, heard, started)
    if as_json:
        print_json(report.to_json())
        return
    print_lines(report.table(warned=True))
    print_lines(
        f"  next      {shlex.join(['quantkit', 'eval', str(report.out), '--baseline', str(plan.options.source)])}"
    )


def _end_dry_run(plan: Any) -> None:
    """Exit with an error if the plan, which was just printed, cannot run."""
    count = len(plan.problems)
    if count:
        click.echo(f"This cannot run: {count} problem{'s' if count > 1 else ''}, see above.", err=True)
        raise SystemExit(2)


def _typed(given: dict[str, Any]) -> dict[str, Any]:
    """The options that stand on the command line."""
    from click.core import ParameterSource

    context = click.get_current_context()
    parameter = {"format": "format_"}
    return {
        name: value
        for name, value in given.items()
        if context.get_parameter_source(parameter.get(name, name)) is ParameterSource.COMMANDLINE
    }


def _run_repack(plan: Any, started: float, *, dry_run: bool, as_json: bool) -> None:
    from quantkit.convert.repack import run_repack

    if dry_run:
        print_json(plan.to_json()) if as_json else print_lines(plan.describe())
        _end_dry_run(plan)
        return
    plan.raise_problems()
    with bar() as listen:
        report = run_repack(plan, lambda p: listen(p.stage, p.done, p.total, p.note), started)
    print_json(report.to_json()) if as_json else print_lines(report.table())
