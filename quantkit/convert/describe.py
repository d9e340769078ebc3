"""A plan in words and in JSON: what ``--dry-run`` prints."""

from __future__ import annotations

from typing import Any

from quantkit.calibrate.products import WORDS
from quantkit.convert.engines import stranger_lines, verdict_lines
from quantkit.convert.lint import lint_plan
from quantkit.convert.options import method_words
from quantkit.convert.plan import Plan
from quantkit.convert.probe import TOKENS, WINDOWS
from quantkit.convert.tuning import SIGN_STEP_TOKENS
from quantkit.core.host import size_text


def describe(plan: Plan) -> str:
    """The decisions, the need for memory and disk, and every problem, before anything runs."""
    o, p = plan.options, plan.prediction
    config: Any = plan.model.config
    count = sum(t.out_features * t.in_features for t in plan.targets.values())
    lines = [
        f"{o.source} -> {o.out}",
        f"  model     {config.model_type}, {len(plan.blocks)} blocks, {len(plan.targets)} linears with {count / 1e6:.1f} M weights",
        f"  method    {method_words(o.method, o.method_options, o.preset)}, {o.target if o.allocates else o.scheme.describe()}, scales by {o.scales}; format {o.format}"
        + (
            f"; {o.cache.words()}, {'calibrated' if o.kv_bits == 'fp8' else o.kv_scales} scales"
            if o.cache.wanted
            else ""
        ),
    ]
    if plan.windows is not None:
        w = plan.windows
        lines.append(f"  text      {w.name}: {w.words()}, seed {w.seed}, {'with' if w.bos else 'no'} BOS")
    if plan.products is not None:
        lines.append(f"  runs on   {plan.device}, in {WORDS[plan.products]}{_why(plan)}; rounds in float32")
    if plan.allocation is not None:
        text = plan.probe or plan.windows
        lines += plan.allocation.describe("" if text is None else text.name)
    if o.guided:
        lines.append(
            f"  weighs    each token by what it means to the model's output (one pass forward and back on up to {WINDOWS} windows of {TOKENS} tokens)"
        )
    if o.method == "tune":
        tokens = max(1, SIGN_STEP_TOKENS // o.seq_len) * o.seq_len
        lines.append(
            f"  learns    block by block, {o.tune_steps} steps of {tokens} tokens; before that, which channels of a block's output count "
            f"(one pass forward and back on up to {WINDOWS} windows of {TOKENS} tokens)"
        )
    if plan.distilled_on is not None:
        w = plan.distilled_on
        lines.append(f"  distil    {w.words()} of {w.name}, seed {w.seed}: scales and norms learn, codes stay")
    for (shape, scheme), names in sorted(_schemes(plan).items()):
        lines.append(f"  linears   {len(names):4d} x {shape:<14} {scheme}")
    lines += [
        f"  keeps     {len(plan.plain)} tensor{'' if len(plan.plain) == 1 else 's'} {'unrounded (norms learn)' if o.distil else 'unchanged'}{_kept_words(plan)}",
        f"  needs     host {size_text(p.host)}, device {size_text(p.device)}, disk {size_text(p.disk)} while running; output {size_text(p.output)}",
    ]
    if plan.allocation is None:
        lines += [f"  loads in  {line}" for line in verdict_lines(lint_plan(plan))]
    else:  # the rest depends on the bits
        lines += [f"  loads in  {line}" for line in stranger_lines(lint_plan(plan))]
        lines.append("  loads in  which of the others, the report says: it depends on the bits that are chosen")
    lines.append(f"  works in  {o.work_folder} (finished blocks; a stopped job goes on with --resume)")
    lines += [f"  note      {warning}" for warning in plan.warnings]
    lines += [f"  PROBLEM   {problem}" for problem in plan.problems]
    return "\n".join(lines)


def plan_json(plan: Plan) -> dict[str, Any]:
    free = _free(plan)
    return {
        "out": str(plan.options.out),
        "work_dir": str(plan.options.work_folder),
        "preset": plan.options.preset,
        "options": plan.options.for_manifest(),
        **plan.prediction.to_json(),
        "phases": plan.prediction.phases,
        "products": plan.products,
        "allocation": None if plan.allocation is None else plan.allocation.to_json(),
        "layers": [{"name": t.name, "shape": [t.out_features, t.in_features], "scheme": None if name in free else t.scheme.describe()} for name, t in plan.targets.items()],
        "engines": [verdict.to_json() for verdict in lint_plan(plan)] if plan.allocation is None else [],
        "warnings": plan.warnings,
        "problems": plan.problems,
    }  # fmt: skip


def _why(plan: Plan) -> str:
    """Why not float32, where nobody asked for that."""
    if plan.options.products != "auto" or plan.products != "bf16":
        return ""
    return " (auto: this processor has units for them; --products float32 is slower and exact)"


def _kept_words(plan: Plan) -> str:
    """That head and embeddings are among what is kept: a rule `*` does not reach them."""
    if plan.outside() or plan.allocation is not None:
        return ""
    return ", head and embeddings among them (rules reach those by their own names only)"


def _free(plan: Plan) -> set[str]:
    """Modules whose scheme is not chosen yet."""
    return set() if plan.allocation is None else {name for unit in plan.allocation.units for name in unit.members}


def _schemes(plan: Plan) -> dict[tuple[str, str], list[str]]:
    found: dict[tuple[str, str], list[str]] = {}
    free = _free(plan)
    for name, t in plan.targets.items():
        words = "to be chosen" if name in free else t.scheme.describe()
        found.setdefault((f"{t.out_features}x{t.in_features}", words), []).append(t.name)
    return found
