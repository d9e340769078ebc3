"""Round weights with the bitsandbytes library itself, and name its tensors as its modules store them.

bitsandbytes 0.50: ``functional.quantize_4bit`` (what ``nn.Params4bit`` calls; ``QuantState.as_dict`` gives the names),
``functional.int8_vectorwise_quant`` (``nn.Int8Params``, from float16). The bytes are those of transformers loading the
float32 weights with a ``BitsAndBytesConfig`` and saving them (tests/integration/test_bitsandbytes_out.py).
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import MissingExtra, NumericsError
from quantkit.formats.bitsandbytes import DOUBLE, FOUR_BIT_BLOCK


def require_library() -> None:
    """Raise MissingExtra if bitsandbytes is not installed."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise MissingExtra("bitsandbytes", "bnb", "--format bitsandbytes")


def encode_weight(weight: Tensor, number: str) -> dict[str, Tensor]:
    """Round a weight and return its tensors by local name, on the CPU.

    weight: float32 ``[out, in]``, finite.
    number: one of ``core.scheme.OF_BITSANDBYTES``.

    Raises NumericsError for a weight that float16 cannot hold, from which LLM.int8 is rounded.
    """
    functional: Any = importlib.import_module("bitsandbytes.functional")
    if number == "llm-int8":
        half = weight.half()
        if not bool(torch.isfinite(half).all()):
            raise NumericsError("a weight is beyond float16, from which LLM.int8 rounds. Use --scheme nf4.")
        codes, scales, _ = functional.int8_vectorwise_quant(half)
        layout = torch.tensor(0, dtype=torch.uint8)  # rows lie as they are
        return {"weight": codes.cpu(), "SCB": scales.cpu(), "weight_format": layout}
    packed, state = functional.quantize_4bit(
        weight.contiguous(),
        blocksize=FOUR_BIT_BLOCK,
        compress_statistics=number.endswith(DOUBLE),
        quant_type=number.removesuffix(DOUBLE),
    )
    named = {f"weight.{name}": value.cpu().contiguous() for name, value in state.as_dict(packed=True).items()}
    return {"weight": packed.cpu(), **named}
