"""One file is one algorithm, a pure function on tensors. Imports core.

Every algorithm takes one weight, or several that read the same input stacked along their rows, and returns a Solution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from quantkit.core.qtensor import QuantTensor


@dataclass(frozen=True, slots=True)
class Solution:
    """What an algorithm decided, and how it went."""

    quantized: QuantTensor
    # share of the Hessian's mean diagonal that it took to factorise it
    damping: float | None = None
    # why a simpler method was used instead; None if it was not
    fallback: str | None = None
    # d H dᵀ of every row's error d, [out], where the algorithm knows it
    losses: Tensor | None = None


Scales = Literal["minmax", "search"]
# of a channel: factors stay within 1/64 .. 64 around their geometric mean, for fp16 norms and scales must hold them
LARGEST_FACTOR = 64.0
# what convert offers; calibrated ones first
METHODS = ("gptq", "awq", "tune", "smooth", "kquant", "hqq", "rtn")
CALIBRATED = ("gptq", "awq", "tune", "smooth", "kquant")
# those of ggml's block formats; kquant is for nothing else
OF_BLOCKS = ("gptq", "kquant", "rtn")
# they read no text, but see what random tokens do
DRAWN = ("hqq",)
# they always scale channels before rounding: norms and biases change too
FOLDING = ("awq", "tune", "smooth", "hqq")
# they solve on correlations between inputs
CORRELATED = ("gptq", "awq", "tune")
# the factors of their channels come from the size of inputs alone
SIZES_ALONE = ("smooth", "hqq")
# They compare with the original model's hidden states (so does gptq with --gptaq): convert keeps those beside the
# quantized model's.
PAIRED: tuple[str, ...] = ("tune",)
LATER: tuple[str, ...] = ()
# what other tools call it: what it is here
ELSEWHERE = {"autoround": "tune", "signround": "tune", "dwq": "rtn --distil 128"}
