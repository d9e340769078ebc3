"""Loss and divergence by position in the window: what a cache loses may grow with what it holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from quantkit.evaluate.perplexity import mean_and_stderr, perplexity_of

if TYPE_CHECKING:
    from quantkit.evaluate.divergence import Comparison

FIRST_EDGES = (0, 256, 1024)  # then every power of two


@dataclass(frozen=True, slots=True)
class Band:
    """The tokens predicted from positions ``start <= position < stop`` of their windows.

    A token at ``position`` attends to so many before it. The rest as in ``Evaluation``: nats, standard errors over
    windows, None without a baseline (or for one window).
    """

    start: int
    stop: int
    scored_tokens: int
    perplexity: float
    stderr: float | None
    delta_ln_ppl: float | None = None
    delta_ln_ppl_stderr: float | None = None
    kl_mean: float | None = None
    kl_stderr: float | None = None
    top1_agreement: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object with every field."""
        return asdict(self)


def edges(end: int) -> Iterator[tuple[int, int]]:
    """Yield ``(start, stop)`` of bands that cover positions below ``end``: 0-256, 256-1k, 1k-2k, 2k-4k, 4k-8k and on.

    >>> list(edges(1500))
    [(0, 256), (256, 1024), (1024, 1500)]
    """
    start = 0
    while start < end:
        beyond = next((edge for edge in FIRST_EDGES if edge > start), 2 * start)
        yield start, min(beyond, end)
        start = beyond


def by_position(losses: Tensor, first: int, comparison: Comparison | None = None) -> list[Band]:
    """Sum up the losses by position in the window.

    losses: float64 ``[windows, scored]``. first: the position from which the first of them is predicted.
    """
    bands = []
    for start, stop in edges(first + losses.shape[1]):
        part = slice(max(start - first, 0), max(stop - first, 0))
        own = losses[:, part]
        if not own.numel():  # before the first scored token
            continue
        compared: dict[str, Any] = {}
        if comparison is not None:
            compared["delta_ln_ppl"], compared["delta_ln_ppl_stderr"] = mean_and_stderr(
                own - comparison.baseline_losses[:, part]
            )
            compared["kl_mean"], compared["kl_stderr"] = mean_and_stderr(comparison.kl[:, part])
            compared["top1_agreement"] = mean_and_stderr(comparison.same_top[:, part])[0]
        perplexity, stderr = perplexity_of(own)
        bands.append(Band(start, stop, own.numel(), perplexity, stderr, **compared))
    return bands
