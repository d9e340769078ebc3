"""A short generation from the folder that was written, before it gets its name: proof that it loads and computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from quantkit.calibrate.data import CalibrationWindows
from quantkit.convert.plan.memory import GENERATE_BYTES
from quantkit.convert.plan.random_tokens import fallback
from quantkit.errors import NumericsError, UnsupportedModel

PROMPT_TOKENS, NEW_TOKENS = 16, 16
TOO_LARGE = (
    f"no sample was generated: the whole model would need more than the {GENERATE_BYTES / 1e9:.0f} GB that this "
    "check may take; `quantkit generate` does it"
)


def prompt_of(tokenizer: Any, text: CalibrationWindows | None) -> list[int]:
    """Return the first tokens of a text, or of a fixed phrase where there is none.

    tokenizer: of the model.
    text: the calibration windows, None without any.
    """
    if text is None:
        return fallback(tokenizer)
    return [int(token) for token in text.ids[0, :PROMPT_TOKENS]]


def continue_prompt(folder: Path, ids: list[int], tokenizer: Any, out: str, remedy: str) -> dict[str, str] | str:
    """Load a written folder and continue a prompt greedily.

    Returns ``{"prompt": ..., "text": ...}``, or the reason why not: an architecture that quantkit's runtime cannot
    step. The conversion is finished by then, and stays so.

    folder: the written checkpoint.
    ids: the prompt's tokens.
    tokenizer: of the model.
    out: the folder's name in an error's message.
    remedy: the advice in an error's message.

    Raises NumericsError if a logit is not finite, CheckpointError or SourceError if the folder does not load.
    """
    from quantkit.checkpoint.tokenizer import check_vocabulary
    from quantkit.runtime.decode.states import NOT_TAKEN
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
        try:
            with torch.inference_mode():
                logits = model.head(model.step(torch.tensor([step_ids]), cache))
        except UnsupportedModel as error:
            return f"no sample was generated: {error}"
        except NOT_TAKEN as error:  # out of transformers' own code for this architecture
            return f"no sample was generated: {type(error).__name__} in the model's own code: {str(error)[:200]}"
        if not bool(torch.isfinite(logits).all()):
            raise NumericsError(
                f"{out}: the quantized model gives logits that are not finite. Evaluate the source with `quantkit"
                f" eval`; if that is sound, {remedy}."
            )
        step_ids = [int(logits[0, -1].argmax())]
        tokens += step_ids
    return {"prompt": tokenizer.decode(ids), "text": tokenizer.decode(tokens)}
