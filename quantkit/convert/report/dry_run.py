"""A plan in words and in JSON: what ``--dry-run`` prints."""

from __future__ import annotations

from typing import Any

from quantkit.calibrate.matmul_precision import WORDS
from quantkit.convert.engines.lint import lint_plan
from quantkit.convert.engines.verdict import Verdict, unread_format_lines, verdict_lines
from quantkit.convert.options.options import method_words
from quantkit.convert.output.gguf_file import written
from quantkit.convert.plan.plan import Plan
from quantkit.convert.plan.targets import head_embeddings
from quantkit.convert.report.left_at_16_bit import LeftOut, left_at_16_bit
from quantkit.convert.results import SIGN_STEP_TOKENS, TOKENS, WINDOWS
from quantkit.core.host import size_text


def describe(plan: Plan) -> str:
    """Describe the plan in words: the decisions, the need for memory and disk, and every problem."""
    lines = [*_request_lines(plan), *_preparation_lines(plan)]
    for (shape, scheme), names in sorted(_schemes(plan).items()):
        lines.append(f"  linears   {len(names):4d} x {shape:<14} {scheme}")
    copied, need = len(plan.unquantized.copied), plan.prediction
    lines += [
        (
            f"  keeps     {copied} tensor{'' if copied == 1 else 's'}"
            f" {'unrounded (norms learn)' if plan.options.distil else 'unchanged'}{_kept_words(plan)}"
        ),
        *(f"    16 bit  {line}" for line in _left_lines(plan)),
        (
            f"  needs     host {size_text(need.host)}, device {size_text(need.device)}, disk {size_text(need.disk)}"
            f" while running; output {size_text(need.output)}"
        ),
        f"  takes     {plan.duration_words()}",
    ]
    verdicts = _verdicts(plan)
    if plan.budget is None:
        lines += verdict_lines(verdicts)
    else:  # the rest depends on the bits
        lines += unread_format_lines(verdicts)
        lines.append("  loads in  which of the others, the report says: it depends on the bits that are chosen")
    lines.append(f"  works in  {plan.options.work_folder} (finished blocks; a stopped job goes on with --resume)")
    lines += [f"  note      {warning}" for warning in plan.warnings]
    lines += [f"  PROBLEM   {problem}" for problem in plan.problems]
    return "\n".join(lines)


def _request_lines(plan: Plan) -> list[str]:
    """Describe source, model, method and format."""
    options = plan.options
    config: Any = plan.model.config
    weights = sum(target.out_features * target.in_features for target in plan.targets.values())
    cache = ""
    if options.cache.wanted:
        scales = "calibrated" if options.kv_bits == "fp8" else options.kv_scales
        cache = f"; {options.cache.words()}, {scales} scales"
    return [
        f"{options.source} -> {options.out}",
        (
            f"  model     {config.model_type}, {len(plan.blocks)} blocks, {len(plan.targets)} linears with"
            f" {weights / 1e6:.1f} M weights"
        ),
        (
            f"  method    {method_words(options.method, options.method_options, options.preset)},"
            f" {options.scheme_words}{'' if options.format == 'bitsandbytes' else f', scales by {options.scales}'};"
            f" format {options.format}{cache}"
        ),
    ]


def _preparation_lines(plan: Plan) -> list[str]:
    """Describe the texts, the device, and what is measured and learned."""
    options, inputs, lines = plan.options, plan.inputs, []
    if inputs.calibration is not None:
        text = inputs.calibration
        bos = "with" if text.bos else "no"
        lines.append(f"  text      {text.name}: {text.words()}, seed {text.seed}, {bos} BOS")
    if plan.matmul_precision is not None:
        lines.append(f"  runs on   {plan.device}, in {WORDS[plan.matmul_precision]}{_why(plan)}; rounds in float32")
    if plan.budget is not None:
        lines += plan.budget.describe("" if inputs.for_sensitivity is None else inputs.for_sensitivity.name)
    if options.guided:
        lines.append(
            "  weighs    each token by what it means to the model's output (one pass forward and back on up to"
            f" {WINDOWS} windows of {TOKENS} tokens)"
        )
    if options.method == "tune":
        tokens = max(1, SIGN_STEP_TOKENS // options.seq_len) * options.seq_len
        lines.append(
            f"  learns    block by block, {options.tune_steps} steps of {tokens} tokens; before that, which channels of"
            f" a block's output count (one pass forward and back on up to {WINDOWS} windows of {TOKENS} tokens)"
        )
    if inputs.distil is not None:
        text = inputs.distil
        lines.append(f"  distil    {text.words()} of {text.name}, seed {text.seed}: scales and norms learn, codes stay")
    return lines


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return the plan for ``--dry-run --json``."""
    free = _free(plan)
    return {
        "out": str(plan.options.out),
        "work_dir": str(plan.options.work_folder),
        "preset": plan.options.preset,
        "options": plan.options.for_manifest(),
        **plan.prediction.to_json(),
        "seconds": round(plan.seconds, 1),
        "phases": plan.prediction.phases,
        "products": plan.matmul_precision,
        "allocation": None if plan.budget is None else plan.budget.to_json(),
        "layers": [{"name": t.name, "shape": [t.out_features, t.in_features],
        "scheme": None if name in free else t.words} for name, t in plan.targets.items()],
        "engines": [verdict.to_json() for verdict in _verdicts(plan)] if plan.budget is None else [],
        "warnings": list(plan.warnings),
        "problems": list(plan.problems),
    }  # fmt: skip


def _verdicts(plan: Plan) -> list[Verdict]:
    return lint_plan(
        plan.format.name,
        plan.targets,
        plan.model.config,
        plan.source.config,
        folder=str(written(plan.options)),
        fp8_cache=plan.stores_cache_scales,
    )


def _why(plan: Plan) -> str:
    """Explain a matmul precision other than float32 where nobody asked for it."""
    if plan.options.matmul_precision != "auto" or plan.matmul_precision != "bf16":
        return ""
    return " (auto: this processor has units for them; --matmul-precision float32 is slower and exact)"


def _kept_words(plan: Plan) -> str:
    """Tell that head and embeddings are among the weights in 16 bit: a rule `*` does not reach them."""
    if head_embeddings(plan.targets) or plan.budget is not None:
        return ""
    return ", head and embeddings among them (rules reach those by their own names only)"


def _left_lines(plan: Plan) -> list[str]:
    """Return a line for each reason for which matrices stay: how many weights, and of which tensors the first."""
    quantized = {target.parameter for target in plan.targets.values()}
    reasons: dict[str, list[LeftOut]] = {}
    for left in left_at_16_bit(plan.weights, plan.blocks, quantized):
        if left.reason:
            reasons.setdefault(left.reason, []).append(left)
    lines = []
    for reason, group in reasons.items():
        more = f" and {len(group) - 1} more" if len(group) > 1 else ""
        lines.append(f"{group[0].name}{more} ({reason}, {sum(left.weights for left in group):,} weights)")
    return lines


def _free(plan: Plan) -> set[str]:
    """Return the modules whose scheme is not chosen yet."""
    return set() if plan.budget is None else {name for unit in plan.budget.units for name in unit.members}


def _schemes(plan: Plan) -> dict[tuple[str, str], list[str]]:
    """Return stored names of the weights by shape and scheme, in words."""
    names: dict[tuple[str, str], list[str]] = {}
    free = _free(plan)
    for module, target in plan.targets.items():
        scheme = "to be chosen" if module in free else target.words
        names.setdefault((f"{target.out_features}x{target.in_features}", scheme), []).append(target.name)
    return names
