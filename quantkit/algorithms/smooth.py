"""SmoothQuant: move outliers of the activations into the weights before rounding (Xiao et al., arXiv 2211.10438).

Channel j of an input, whose largest entry over the calibration text is ``max|X_j|``, is divided by equation 4's factor

    s_j = max|X_j|**alpha / max|W_j|**(1 - alpha)

and column j of every weight that reads it is multiplied by it. alpha is the paper's 0.5. Beyond the paper, which
smooths what follows a norm, every accepted fold (``quantkit.model.folds``) is done, linear to linear too: the rows of a
producer are divided, which its scales per row absorb without any rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALPHA = 0.5


@dataclass(frozen=True)
class FoldReader:
    """A weight that reads a fold.

    inputs: largest |x| per column, float ``[in]``.
    weights: largest |w| per column, float ``[in]``.
    channels: the fold's channel in each column, int64 ``[in]``.
    """

    inputs: Tensor
    weights: Tensor
    channels: Tensor


def smooth_factors(readers: Sequence[FoldReader], channels: int, alpha: float = ALPHA) -> Tensor:
    """Compute equation 4 over everything that reads the fold: float32 ``[channels]``, geometric mean 1.

    A factor common to all channels changes neither rounding (both scales absorb it), so the mean is taken out: norms
    and weights keep the size they had. A channel that is never used, by text or weights, keeps factor 1.
    """
    inputs, weights = torch.zeros(2, channels, device=readers[0].inputs.device)
    for reader in readers:
        inputs.scatter_reduce_(0, reader.channels, reader.inputs.float(), "amax")
        weights.scatter_reduce_(0, reader.channels, reader.weights.float(), "amax")
    used = (inputs > 0) & (weights > 0)
    log = alpha * inputs.clamp(min=1e-30).log() - (1 - alpha) * weights.clamp(min=1e-30).log()
    if not bool(used.any()):
        return torch.ones_like(log)
    return torch.where(used, (log - log[used].mean()).exp(), 1.0)
