"""A short generation from the folder that was written, before it gets its name: proof that it loads and computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from quantkit.convert.plan.inputs import Inputs
from quantkit.convert.plan.memory import GENERATE_BYTES
from quantkit.convert.plan.plan import Plan
from quantkit.convert.plan.random_tokens import fallback
from quantkit.errors import NumericsError, UnsupportedModel

PROMPT_TOKENS, NEW_TOKENS = 16, 16
TOO_LARGE = (
    f"no sample was generated: the whole model would need more than the {GENERATE_BYTES / 1e9:.0f} GB that this "
    "check may take; `quantkit generate` does it"
)


def prompt_of(plan: Plan, inputs: Inputs) -> list[int]:
    """The first tokens of the calibration text, or of a fixed phrase where there is none."""
    if inputs.calibration is None or plan.options.draws:
        return fallback(plan.tokenizer)
    return [int(token) for token in inputs.calibration.ids[0, :PROMPT_TOKENS]]


def run_smoke_test(plan: Plan, inputs: Inputs, folder: Path) -> dict[str, str] | str:
    """Load ``folder`` and continue a prompt greedily: ``{"prompt": ..., "text": ...}``, or the reason why not.

    Left out, with the reason: a model larger than ``memory.GENERATE_BYTES`` that the job's other phases do not need
    anyway, and an architecture whose cache quantkit's runtime does not know.

    Raises NumericsError if a logit is not finite, CheckpointError or SourceError if the folder does not load.
    """
    if "generate" not in plan.prediction.phases:
        return TOO_LARGE
    ids = prompt_of(plan, inputs)
    return continue_prompt(folder, ids, plan.tokenizer, f"{plan.options.out}", "convert with more bits")


def continue_prompt(folder: Path, ids: list[int], tokenizer: Any, out: str, remedy: str) -> dict[str, str] | str:
    """Load ``folder`` and continue the tokens ``ids``, see ``run_smoke_test``.

    out, remedy: how an error's message names the folder, and what it advises.
    """
    from quantkit.checkpoint.tokenizer import check_vocabulary
    from quantkit.runtime.kv_cache.transformers_cache import transformers_cache
    from quantkit.runtime.load import load

    try:
        model = load(folder, device="cpu")
    except UnsupportedModel as error:
        return f"no sample was generated: {error}"
    check_vocabulary(ids, model.config, out)

    tokens: list[int] = []
    cache, step_ids = transformers_cache(model.new_cache(len(ids) + NEW_TOKENS)), ids
    while len(tokens) < NEW_TOKENS:
        with torch.inference_mode():
            logits = model.head(model.step(torch.tensor([step_ids]), cache))
        if not bool(torch.isfinite(logits).all()):
            raise NumericsError(
                f"{out}: the quantized model gives logits that are not finite. Evaluate the source with `quantkit"
                f" eval`; if that is sound, {remedy}."
            )
        step_ids = [int(logits[0, -1].argmax())]
        tokens += step_ids
    return {"prompt": tokenizer.decode(ids), "text": tokenizer.decode(tokens)}
