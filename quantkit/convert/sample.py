"""A short generation from the folder that was written, before it gets its name: proof that it loads and computes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quantkit.convert.memory import GENERATE_BYTES
from quantkit.errors import NumericsError, UnsupportedModel

if TYPE_CHECKING:
    from quantkit.convert.plan import Plan

PROMPT_TOKENS, NEW_TOKENS = 16, 16
TOO_LARGE = (
    f"no sample was generated: the whole model would need more than the {GENERATE_BYTES / 1e9:.0f} GB that this "
    "check may take; `quantkit generate` does it"
)
FALLBACK = "The first time that"  # where there is no calibration text


def prompt_of(plan: Plan) -> list[int]:
    """The first tokens of the calibration text, or of a fixed phrase where there is none."""
    if plan.windows is None or plan.options.draws:
        return fallback(plan.tokenizer)
    return [int(token) for token in plan.windows.ids[0, :PROMPT_TOKENS]]


def fallback(tokenizer: Any) -> list[int]:
    """The fixed phrase as tokens."""
    return [int(token) for token in tokenizer(FALLBACK)["input_ids"]]


def generate_sample(plan: Plan, folder: Path) -> dict[str, str] | str:
    """Load ``folder`` and let it continue a prompt greedily: ``{"prompt": ..., "text": ...}``; or, why that was left out.

    Raises NumericsError if a logit is not finite, CheckpointError or SourceError if the folder does not load. Left out,
    and said: a model larger than memory.GENERATE_BYTES that the job's other phases do not need anyway, and an
    architecture whose cache quantkit's run time does not know.
    """
    if "generate" not in plan.prediction.phases:
        return TOO_LARGE
    return run_sample(folder, prompt_of(plan), plan.tokenizer, f"{plan.options.out}", "convert with more bits")


def run_sample(folder: Path, ids: list[int], tokenizer: Any, out: str, remedy: str) -> dict[str, str] | str:
    """Load ``folder`` and continue ``ids``; ``out`` and ``remedy`` are what a failure is told with. Raises as above."""
    from quantkit.runtime.load import load

    try:
        model = load(folder, device="cpu")
    except UnsupportedModel as error:
        return f"no sample was generated: {error}"
    from quantkit.checkpoint.tokenizer import check_vocabulary
    from quantkit.runtime.attention import transformers_cache

    check_vocabulary(ids, model.config, out)

    tokens: list[int] = []
    cache, fed = transformers_cache(model.new_cache(len(ids) + NEW_TOKENS)), ids
    while len(tokens) < NEW_TOKENS:
        with torch.inference_mode():
            logits = model.head(model.step(torch.tensor([fed]), cache))
        if not bool(torch.isfinite(logits).all()):
            raise NumericsError(
                f"{out}: the quantized model gives logits that are not finite. Evaluate the source with `quantkit eval`; "
                f"if that is sound, {remedy}."
            )
        fed = [int(logits[0, -1].argmax())]
        tokens += fed
    return {"prompt": tokenizer.decode(ids), "text": tokenizer.decode(tokens)}
