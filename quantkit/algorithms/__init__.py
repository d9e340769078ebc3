"""One file is one algorithm, a pure function on tensors. Imports core.

Every algorithm takes one weight, or several that read the same input stacked along their rows, and returns a Solution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quantkit.core.qtensor import QuantTensor


@dataclass(frozen=True, slots=True)
class Solution:
    """What an algorithm decided, and how it went."""

    quantized: QuantTensor
    damping: float | None = None  # of the Hessian's mean diagonal, what it took to factorise it
    fallback: str | None = None  # why a simpler method was used instead; None if it was not


Scales = Literal["minmax", "search"]
LARGEST_FACTOR = 64.0  # of a channel: factors stay within 1/64 .. 64 around their geometric mean, for fp16 norms and scales must hold them
METHODS = ("gptq", "awq", "tune", "smooth", "hqq", "rtn")  # what convert offers; calibrated ones first
CALIBRATED = ("gptq", "awq", "tune", "smooth")
DRAWN = ("hqq",)  # they read no text, but see what random tokens do
FOLDING = ("awq", "tune", "smooth", "hqq")  # they always scale channels before rounding: norms and biases change too
# They compare with what the original model has (so does gptq with --gptaq): convert keeps its states beside the quantized ones.
PAIRED: tuple[str, ...] = ("tune",)
LATER = ("kquant",)
ELSEWHERE = {
    "autoround": "tune",
    "signround": "tune",
    "dwq": "rtn --distil 128",
}  # what other tools call it: what it is here
