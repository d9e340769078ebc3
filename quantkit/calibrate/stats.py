"""Collect statistics of inputs: one per distinct input, not per linear.

A Hessian, or (``InputRoot``) a few inputs themselves where nobody reads correlations."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.calibrate.matmul_precision import gram_factors, multiply
from quantkit.errors import NumericsError

LARGEST_NORM = 1e17  # its square, summed over a batch, still fits float32
MIRRORED = 1024  # rows of a Hessian whose columns are filled in at a time
NON_FINITE_LIMIT = 0.1  # share of dropped tokens above which the job stops: the statistics would mean nothing


class InputStatistics:
    """What is counted of every input: its tokens, and the largest |x| of each channel.

    Tokens with a NaN, an infinite entry or one whose square is infinite are dropped and counted: one would spoil
    everything.

    mass: the sum of token importance, if ``add`` is given that; else None, and each token counts 1.
    """

    def __init__(self, in_features: int, device: torch.device | str = "cpu") -> None:
        self.largest = torch.zeros(in_features, device=device)
        self.mass: Tensor | None = None
        self.tokens = 0
        self.dropped = 0

    def add(self, x: Tensor, exact: Tensor | None = None, weights: Tensor | None = None) -> None:
        """Add tokens x [..., in_features]. ``exact`` and ``weights`` are each always or never given.

        exact: the same of the original model; a token is dropped if either is not finite.
        weights: token importance, [tokens], positive.
        """
        rows = x.reshape(-1, x.shape[-1]).float()
        finite = torch.linalg.vector_norm(rows, dim=-1) < LARGEST_NORM  # False for NaN too
        beside = None if exact is None else exact.reshape(rows.shape).float()
        if beside is not None:
            finite &= torch.linalg.vector_norm(beside, dim=-1) < LARGEST_NORM
        if not bool(finite.all()):
            self.dropped += int((~finite).sum())
            rows = rows[finite]
            beside = None if beside is None else beside[finite]
            weights = None if weights is None else weights[finite]
        self.tokens += rows.shape[0]
        if rows.shape[0]:
            torch.maximum(self.largest, rows.abs().amax(0), out=self.largest)
        if weights is not None:
            total = weights.sum(dtype=torch.float64)
            self.mass = total if self.mass is None else self.mass + total
            root = weights.sqrt()[:, None]
            rows = rows * root
            beside = None if beside is None else beside * root
        self._accumulate(rows, beside)

    def _accumulate(self, rows: Tensor, beside: Tensor | None) -> None:
        """Take finite inputs [tokens, in], multiplied by the roots of their importance."""
        raise TypeError(f"{type(self).__name__} accumulates nothing")

    def check(self, name: str = "input") -> None:
        """Raise NumericsError if too many tokens were dropped or none was seen."""
        total = self.tokens + self.dropped
        if self.dropped > NON_FINITE_LIMIT * total:
            raise NumericsError(
                f"{name}: {self.dropped} of {total} calibration tokens give NaN or infinite activations; more than"
                f" {NON_FINITE_LIMIT:.0%} would make the statistics worthless. The model overflows or is damaged: check"
                " it with `quantkit eval`, or use --method rtn, which needs no activations."
            )
        if self.tokens == 0:
            raise NumericsError(f"{name}: no calibration token reached this layer.")

    def count(self) -> float:
        """Count the tokens, weighted by importance if that was given."""
        return self.tokens if self.mass is None else float(self.mass)


class InputRoot(InputStatistics):
    """A few inputs themselves, in the place of a larger Hessian, for methods that read no correlations."""

    def __init__(self, in_features: int, device: torch.device | str = "cpu") -> None:
        super().__init__(in_features, device)
        self._rows: list[Tensor] = []

    def _accumulate(self, rows: Tensor, beside: Tensor | None) -> None:
        self._rows.append(rows.clone())

    def result(self, name: str = "input") -> Tensor:
        """Return R, float32 [tokens, in], with Rᵀ R the Hessian. Raises NumericsError as ``check``."""
        self.check(name)
        return torch.cat(self._rows).div_(self.count() ** 0.5)


class Hessian(InputStatistics):
    """Running mean of x xᵀ over tokens.

    Products in float32 (``calibrate.matmul_precision``), the sum in float64 on a CPU, in float32 elsewhere (half the
    memory; a few hundred batches are added, whose products carry more rounding than their sum does); symmetric.

    cross: the running sum of (y - x) xᵀ, if ``add`` is given what the original model has (y) in the place of each x;
        else None.
    """

    def __init__(self, in_features: int, device: torch.device | str = "cpu") -> None:
        super().__init__(in_features, device)
        dtype = torch.float64 if torch.device(device).type == "cpu" else torch.float32
        self.sum = torch.zeros(in_features, in_features, dtype=dtype, device=device)
        self.cross: Tensor | None = None

    def _accumulate(self, rows: Tensor, beside: Tensor | None) -> None:
        self._add_product(rows)
        if beside is not None:
            self.cross = torch.zeros_like(self.sum) if self.cross is None else self.cross
            left, right = gram_factors(beside - rows, rows)
            self.cross += multiply(left.t(), right)

    def _add_product(self, rows: Tensor) -> None:
        # Only blocks on and above the diagonal are multiplied: 56% of the work for wide inputs.
        width = self.sum.shape[0]
        size = max(256, -(-width // 8))
        lefts, rights = gram_factors(rows)
        for i in range(0, width, size):
            left = lefts[:, i : i + size].t()
            for j in range(i, width, size):
                self.sum[i : i + size, j : j + size] += multiply(left, rights[:, j : j + size])

    def result(self, name: str = "input") -> Tensor:
        """Return the mean of x xᵀ, weighted by token importance if that was given, [in, in], in the dtype of the sum.

        Raises NumericsError as ``check``.
        """
        self.check(name)
        mean = self.sum / self.count()
        for i in range(0, len(mean), MIRRORED):  # in pieces: a second copy of a wide one would be the job's peak
            rows = slice(i, i + MIRRORED)
            corner = torch.triu(mean[rows, rows])
            mean[rows, rows] = corner + torch.triu(corner, 1).t()
            mean[i + MIRRORED :, rows] = mean[rows, i + MIRRORED :].t()
        return mean

    def mean_cross(self) -> Tensor | None:
        """Return the mean of (y - x) xᵀ, [in, in]; the sum is given away."""
        return None if self.cross is None else self.cross.div_(self.count())
