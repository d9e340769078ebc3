"""RTN: round to nearest (Jacob et al., arXiv 1712.05877, equation 1, per group).

Scales come from the extremes (min-max) or are searched for the smallest squared error; no data needed.
"""

from __future__ import annotations

from torch import Tensor

from quantkit.algorithms import Scales, Solution
from quantkit.algorithms.together import Search, Solver, together
from quantkit.core import affine
from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme


def rtn(weight: Tensor, scheme: Scheme, scales: Scales = "minmax", importance: Tensor | None = None) -> Solution:
    """Round weight [out, in], any float dtype, to the nearest codes. Inputs are not modified.

    importance: see ``affine.searched_params``.
    Returns uint8 codes, scales in the scheme's dtype, int16 zeros (None if symmetric).

    Raises NumericsError if a scale overflows its dtype.
    """
    return together([rtn_steps(weight, scheme, scales, importance)])[0]


def rtn_steps(weight: Tensor, scheme: Scheme, scales: Scales = "minmax", importance: Tensor | None = None) -> Solver:
    """Round as ``rtn`` does, as a solver among others (``algorithms.together``)."""
    scheme = affine.fixed(weight, scheme)
    if scales == "search":
        step, zeros = yield Search(weight, scheme, importance)
    else:
        step, zeros = affine.minmax_params(weight, scheme)
    return Solution(QuantTensor(affine.quantize(weight, step, zeros, scheme), step, zeros, scheme))
