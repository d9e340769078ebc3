"""``quantkit.convert``: from options to a finished folder and its report. The command line calls it, too."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from quantkit.checkpoint.open import open_source
from quantkit.checkpoint.regular import given_path
from quantkit.convert.options.checks import refuse_without_effect
from quantkit.convert.options.gguf_request import require_gguf_type
from quantkit.convert.options.resolve import renamed, resolve_options
from quantkit.convert.plan.plan import Plan, make_plan
from quantkit.convert.progress import Listener
from quantkit.convert.repack.checks import refuse_forms, refuse_preset
from quantkit.convert.repack.dequantize import DequantizePlan, plan_dequantize, run_dequantize
from quantkit.convert.repack.plan import RepackPlan, plan_repack
from quantkit.convert.repack.request import seen_for
from quantkit.convert.repack.run import run_repack
from quantkit.convert.report import dry_run
from quantkit.convert.report.report import ConvertReport
from quantkit.convert.run import run
from quantkit.core.interrupt import interruptible

AnyPlan = Plan | RepackPlan | DequantizePlan


@interruptible()
def convert(
    source: str | Path,
    out: str | Path,
    *,
    preset: str | None = None,
    on_progress: Listener | None = None,
    **options: Any,
) -> ConvertReport:
    """Quantize a model and write a complete checkpoint folder; a quantized source is repacked.

    The folder appears under its name only when it is complete and was read back; it is never half-written.

    source: named model, folder, hub id or GGUF file.
    out: the output folder.
    preset: "fast", "balanced" or "best", see ``options.presets.PRESETS``; an option that is given wins.
    on_progress: called with a ``Progress`` before every step.
    options: the fields of ``ConvertOptions`` (method, bits, group_size, symmetric, format, kv_bits, calibration,
        samples, seq_len, seed, ...).

    Raises QuantkitError children. What a later call with ``resume=True`` can go on from is kept in the work folder
    then, also on Ctrl-C or a kill; the error's note names the folder.
    """
    started = time.perf_counter()
    planned = plan_request(source, out, preset=preset, **options)
    return execute(planned, on_progress or (lambda progress: None), started)


def plan_request(source: str | Path, out: str | Path, *, preset: str | None = None, **typed: Any) -> AnyPlan:
    """Plan what ``convert`` would do with the same arguments: a conversion, a repack, a dense copy.

    The source is opened here, once.

    source: named model, folder, hub id or GGUF file.
    out: the output folder.
    preset: as for ``convert``.
    typed: the options that were written out, and no others.

    Raises QuantkitError for what makes planning itself impossible; everything else is in the plan's ``problems``.
    """
    typed = renamed(typed)
    where = given_path(out)
    options = resolve_options(source, out, preset, typed)
    if options.dequantize:
        refuse_preset(str(source), preset)
        return plan_dequantize(open_source(source), where, typed)
    opened = seen_for(open_source(source), typed)
    refuse_forms(opened, typed)
    repacking = plan_repack(opened, where, typed)
    if repacking is not None:
        refuse_preset(str(source), preset)
        return repacking
    require_gguf_type(options)
    refuse_without_effect(typed, options)
    return make_plan(options, opened)


def execute(planned: AnyPlan, listen: Listener, started: float | None = None) -> ConvertReport:
    """Execute a plan.

    planned: what ``plan_request`` returned.
    listen: called with a ``Progress`` before every step.
    started: ``time.perf_counter()`` when the request came, so that planning counts in the report's seconds.

    Raises QuantkitError if the plan has problems.
    """
    if isinstance(planned, DequantizePlan):
        return run_dequantize(planned, listen, started)
    return run(planned, listen, started) if isinstance(planned, Plan) else run_repack(planned, listen, started)


def describe(planned: AnyPlan) -> str:
    """Return the plan in words: what ``--dry-run`` prints."""
    return dry_run.describe(planned) if isinstance(planned, Plan) else planned.describe()


def plan_json(planned: AnyPlan) -> dict[str, Any]:
    """Return the plan as JSON: what ``--dry-run --json`` prints."""
    return dry_run.plan_json(planned) if isinstance(planned, Plan) else planned.to_json()
