"""Token-importance weights, at each input of a block's linears, predicted from the hidden state in front of the block.

With g the gradient of the log-probability of a label drawn from the model, at a linear's output, an error e of that
output costs (g . e)^2 / 2 nats (``calibrate.sensitivity``). So tokens are not equally important: queries and keys of a
window's first token count nothing, its value counts a lot. GuidedQuant (Kim et al., arXiv 2505.07004, section 3.2,
equation 7) weighs each token's x xᵀ by the mean of g^2 over a part of the rows. That takes a backward pass over the
whole text, and a mean of squares is that of a few tokens. Here |g| is measured on a few windows; its logarithm is
fitted by ridge regression to the direction and the size of the hidden state in front of the block, and every token of
the text is weighted by the |g| that is predicted for it: the first power, so that more tokens have a say.

Whether the regression is used is found by cross-validation, linear by linear, with half of the tokens left out: the
weakest ridge that predicts something of the other half is taken. Not the one that predicts most: the more it shrinks,
the more alike token importance becomes, and KL is better the less it does (ADR 019).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# of the number of tokens, added to each coefficient's sum of squares; else no coefficients at all
RIDGES = (0.1, 1.0, 10.0)
# of the mean: a gradient is taken for at least that; those of a first token's queries are zero but for rounding
FLOOR = 5e-3


@dataclass(frozen=True, slots=True)
class Guide:
    """The regression of one block: hidden state to log |g|, |g|^2 the mean over a linear's rows.

    Numbers are float64 and on one device; F = hidden + 1 features of a token.

    linears: the block's linears (names inside it).
    outputs: out_features of each linear.
    center, spread: [F], of the text it was fitted on.
    slopes: [linears, F].
    means, lowest, highest: [linears], of log |g|.
    """

    linears: tuple[str, ...]
    outputs: tuple[int, ...]
    center: Tensor
    spread: Tensor
    slopes: Tensor
    means: Tensor
    lowest: Tensor
    highest: Tensor

    def only(self, names: Collection[str]) -> Guide:
        """Return the guide of some of its linears; names that it does not know are passed over."""
        kept = [i for i, name in enumerate(self.linears) if name in names]
        by_linear = {name: getattr(self, name)[kept] for name in ("slopes", "means", "lowest", "highest")}
        linears, outputs = tuple(self.linears[i] for i in kept), tuple(self.outputs[i] for i in kept)
        return replace(self, linears=linears, outputs=outputs, **by_linear)

    def knows(self, names: Sequence[str]) -> bool:
        """Tell whether the guide knows any of these linears, which read one tensor.

        The tensor's tokens are weighted by the known linears alone.
        """
        return any(name in self.linears for name in names)

    def weights(self, groups: Sequence[Sequence[str]], states: Tensor) -> list[Tensor | None]:
        """Predict token importance for each group of linears that read one tensor: float32 [tokens], positive.

        That is the expected |g|, its square the mean over the group's rows; None for a group of which the guide knows
        no linear. A state that is not finite counts as an average one (its statistics drop it).

        states: [..., hidden], in front of the block, on any device; the weights are there, too.
        """
        at = states.device
        z = (_features(states) - self.center.to(at)) / self.spread.to(at)
        logs = z @ self.slopes.t().to(at) + self.means.to(at)
        squares = (2 * torch.clamp(logs, self.lowest.to(at), self.highest.to(at))).exp()
        return [self._group(squares, names) if self.knows(names) else None for names in groups]

    def _group(self, squares: Tensor, names: Sequence[str]) -> Tensor:
        picked = [i for i, name in enumerate(self.linears) if name in names]
        rows = torch.tensor([self.outputs[i] for i in picked], dtype=torch.float64, device=squares.device)
        importance = (squares[:, picked] @ (rows / rows.sum())).sqrt()
        known = torch.isfinite(importance)
        return torch.where(known, importance, importance[known].mean() if bool(known.any()) else 1.0).float()

    def is_whole(self) -> bool:
        """Tell whether its numbers are float64, finite, and of the shapes that belong together."""
        shapes = {
            "center": self.center.shape,
            "spread": self.center.shape,
            "slopes": (*self.means.shape, *self.center.shape),
        }
        rows = (len(self.linears),)
        return (
            len(self.outputs) == len(self.linears)
            and min(self.outputs, default=1) > 0
            and self.center.dim() == 1
            and all(
                getattr(self, name).dtype == torch.float64
                and tuple(getattr(self, name).shape) == tuple(shapes.get(name, rows))
                and bool(torch.isfinite(getattr(self, name)).all())
                for name in NUMBERS
            )
        )

    def on_host(self) -> Guide:
        """Return the same guide with its numbers on the host."""
        return Guide.restore(self.linears, self.outputs, self.to_store())

    def to_store(self) -> dict[str, Tensor]:
        """Return its numbers by name, float64, each in memory of its own on the host; ``restore`` takes them."""
        return {name: getattr(self, name).cpu().clone(memory_format=torch.contiguous_format) for name in NUMBERS}

    @classmethod
    def restore(cls, linears: Sequence[str], outputs: Sequence[int], numbers: Mapping[str, Tensor]) -> Guide:
        """Build a guide from stored numbers. Raises KeyError if one of them is missing.

        linears, outputs: as in the guide that was stored.
        """
        return cls(tuple(linears), tuple(outputs), *(numbers[name] for name in NUMBERS))


NUMBERS = ("center", "spread", "slopes", "means", "lowest", "highest")


@torch.no_grad()
def fit_guide(
    rows: Mapping[str, int], states: Sequence[Tensor], squares: Sequence[Mapping[str, Tensor]]
) -> Guide | None:
    """Fit a block's guide on a few windows.

    Returns None if no linear is in all of ``squares``, or less than two tokens are left. Tokens whose state or
    gradients are not finite are left out. Inputs are not modified.

    rows: out_features of each linear.
    states: in front of the block, [1, tokens, hidden] each, any float dtype.
    squares: beside each of the states, by linear, the mean of its outputs' squared gradients, [tokens]
        (``calibrate.gradients.listening``).

    Raises KeyError if ``rows`` lacks a linear.
    """
    names = tuple(sorted(set.intersection(*(set(window) for window in squares))))
    if not names:
        return None
    outputs = tuple(rows[name] for name in names)
    x = torch.cat([_features(state) for state in states])
    y = torch.stack([torch.cat([window[name] for window in squares]).double().sqrt() for name in names], 1)
    half = torch.arange(len(x), device=x.device) // states[0].shape[1] % 2 == 0
    if len(states) == 1:
        half = torch.arange(len(x), device=x.device) < len(x) // 2
    usable = torch.isfinite(x).all(1) & torch.isfinite(y).all(1)
    x, y, half = x[usable], y[usable], half[usable]
    if len(x) < 2:
        return None
    logs = y.maximum(FLOOR * y.mean(0)).clamp(min=torch.finfo(torch.float32).tiny).log()
    center, spread = x.mean(0), x.std(0).clamp(min=1e-6)
    slopes = _believed((x - center) / spread, logs - logs.mean(0), half)
    return Guide(names, outputs, center, spread, slopes, logs.mean(0), logs.amin(0), logs.amax(0))


def _believed(z: Tensor, y: Tensor, half: Tensor) -> Tensor:
    """Slopes [linears, F], cross-validated: the first of ``RIDGES`` that predicts something, or zeros.

    For each linear it is fitted on one half of the tokens and must tell something of the other.

    z: features [tokens, F].
    y: log |g| minus its mean, [tokens, linears].
    """
    missed = torch.zeros(len(RIDGES) + 1, y.shape[1], dtype=y.dtype, device=y.device)
    missed[-1] = y.square().sum(0)
    for mine in (half, ~half):
        if bool(mine.any()) and not bool(mine.all()):
            for i, slopes in enumerate(_ridge(z[mine], y[mine])):
                missed[i] += (y[~mine] - z[~mine] @ slopes).square().sum(0)
        else:
            missed[:-1] = torch.inf  # nothing to judge by
    best = (missed <= missed[-1]).int().argmax(0)  # the last always is
    choices = torch.stack([*_ridge(z, y), torch.zeros(z.shape[1], y.shape[1], dtype=y.dtype, device=y.device)])
    return choices[best, :, torch.arange(y.shape[1], device=y.device)]


def _ridge(z: Tensor, y: Tensor) -> Iterator[Tensor]:
    """Slopes [F, linears] for each of ``RIDGES``: by the matrix of features or that of tokens, whichever is smaller."""
    tall = len(z) >= z.shape[1]
    gram = z.t() @ z if tall else z @ z.t()
    for ridge in RIDGES:
        damped = gram.clone()
        damped.diagonal().add_(ridge * len(z))
        yield torch.linalg.solve(damped, z.t() @ y) if tall else z.t() @ torch.linalg.solve(damped, y)


def _features(states: Tensor) -> Tensor:
    """Features of tokens, float64 [tokens, hidden + 1]: the state over its root mean square, and the log of that."""
    flat = states.flatten(0, -2).double()
    size = flat.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-12)
    return torch.cat([flat / size, size.log()], 1)


def bytes_to_fit(hidden: int, linears: int, tokens: int) -> int:
    """Predict the memory that ``fit_guide`` takes, in bytes.

    Features five times, logarithms of gradients, the matrix of the regression thrice and all coefficients twice.
    """
    features, smaller = hidden + 1, min(hidden + 1, tokens)
    coefficients = (len(RIDGES) + 1) * features * linears
    return 8 * (5 * tokens * features + 6 * tokens * linears + 3 * smaller * smaller + 2 * coefficients)
