"""How much a token counts for the model's output, at each input of a block's linears: told from the state in front of the block.

With g the gradient of the log-probability of a label drawn from the model, at a linear's output, an error e of that output costs (g . e)^2 / 2 nats
(``calibrate.sensitivity``). So tokens do not count alike: queries and keys of a window's first token count nothing, what its value is for a lot.
GuidedQuant (Kim et al., arXiv 2505.07004, section 3.2, equation 7) weighs each token's x xᵀ by the mean of g^2 over a part of the rows. That takes a pass back over the whole text, and a
mean of squares is that of a few tokens. Here |g| is measured on a few windows; its logarithm is fitted by ridge regression to the direction and the size of the state
in front of the block, and every token of the text counts by the |g| that is expected of it: the first power, so that more tokens have a say.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

RIDGE = 0.1  # of the number of tokens, added to each coefficient's sum of squares: 0.03 and 0.3 give the same KL
FLOOR = 0.1  # of the first percentile: a gradient is taken for at least that; those of a first token's queries are zero but for rounding


@dataclass(frozen=True, slots=True)
class Guide:
    """Of one block. linears: its linears (names inside it), ``outputs`` their rows; the rest float64, F = hidden + 1 numbers that are known of a token.

    center, spread: [F], of the text it was fitted on. slopes: [linears, F], means, lowest, highest: [linears]: of log |g|, |g|^2 the mean over rows.
    """

    linears: tuple[str, ...]
    outputs: tuple[int, ...]
    center: Tensor
    spread: Tensor
    slopes: Tensor
    means: Tensor
    lowest: Tensor
    highest: Tensor

    def knows(self, names: Sequence[str]) -> bool:
        """Whether all of these linears were seen (experts are not)."""
        return set(names) <= set(self.linears)

    def weights(self, names: Sequence[str], states: Tensor) -> Tensor:
        """float32 [tokens], positive: what each token counts for linears that read one tensor; expected |g|, its square the mean over all their rows.

        states: [..., hidden], in front of the block. A state that is not finite counts as an average one (its statistics drop it).
        """
        picked = [self.linears.index(name) for name in names]
        at = states.device
        z = (_features(states) - self.center.to(at)) / self.spread.to(at)
        logs = z @ self.slopes[picked].t().to(at) + self.means[picked].to(at)
        logs = torch.clamp(logs, self.lowest[picked].to(at), self.highest[picked].to(at))
        rows = torch.tensor([self.outputs[i] for i in picked], dtype=torch.float64, device=at)
        found = ((2 * logs).exp() @ (rows / rows.sum())).sqrt()
        known = torch.isfinite(found)
        return torch.where(known, found, found[known].mean() if bool(known.any()) else 1.0).float()

    def on_host(self) -> Guide:
        """The same, its numbers on the host."""
        return Guide.restore(self.linears, self.outputs, self.to_store())

    def to_store(self) -> dict[str, Tensor]:
        """Its numbers by name; ``restore`` takes them."""
        return {name: getattr(self, name).cpu().contiguous() for name in _NUMBERS}

    @classmethod
    def restore(cls, linears: Sequence[str], outputs: Sequence[int], numbers: Mapping[str, Tensor]) -> Guide:
        return cls(tuple(linears), tuple(outputs), *(numbers[name] for name in _NUMBERS))


_NUMBERS = ("center", "spread", "slopes", "means", "lowest", "highest")


@contextlib.contextmanager
def listening(block: nn.Module, names: Sequence[str], tokens: int) -> Iterator[dict[str, Tensor]]:
    """Inside, a pass forward and back through ``block`` fills the dictionary: by linear, the mean of its outputs' squared gradients, float32 [tokens].

    Linears that do not run, or on other than ``tokens`` tokens, are left out.
    """
    found: dict[str, Tensor] = {}

    def hook(name: str, output: Tensor) -> None:
        def keep(gradient: Tensor) -> None:
            found[name] = gradient.detach().flatten(0, -2).float().square().mean(-1)

        if output.requires_grad and output[..., 0].numel() == tokens:
            output.register_hook(keep)

    handles = [
        block.get_submodule(name).register_forward_hook(lambda module, args, output, name=name: hook(name, output))
        for name in names
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def fit_guide(block: nn.Module, states: Sequence[Tensor], squares: Sequence[Mapping[str, Tensor]]) -> Guide | None:
    """states: in front of the block, [1, tokens, hidden] each; squares: what ``listening`` found in each. Tokens whose state or gradients are not finite are left out; with less than two
    left every token counts the same. None if no linear ran in all of them."""
    names = tuple(sorted(set.intersection(*(set(one) for one in squares))))
    if not names:
        return None
    outputs = tuple(block.get_parameter(f"{name}.weight").shape[0] for name in names)
    x = torch.cat([_features(state) for state in states])
    y = torch.stack([torch.cat([one[name] for one in squares]).double().sqrt() for name in names], 1)
    usable = torch.isfinite(x).all(1) & torch.isfinite(y).all(1)
    x, y = x[usable], y[usable]
    if len(x) < 2:
        zero = x.new_zeros(len(names))
        features = x.shape[1]
        return Guide(names, outputs, x.new_zeros(features), x.new_ones(features), x.new_zeros(len(names), features), zero, zero, zero)  # fmt: skip
    floor = FLOOR * y.quantile(0.01, dim=0)
    logs = y.maximum(floor).clamp(min=torch.finfo(torch.float32).tiny).log()
    center, spread = x.mean(0), x.std(0).clamp(min=1e-6)
    z = (x - center) / spread
    gram = z.t() @ z
    gram.diagonal().add_(RIDGE * len(z))
    slopes = torch.linalg.solve(gram, z.t() @ (logs - logs.mean(0))).t()
    return Guide(names, outputs, center, spread, slopes, logs.mean(0), logs.amin(0), logs.amax(0))


def _features(states: Tensor) -> Tensor:
    """float64 [tokens, hidden + 1]: each state divided by its root mean square, and the logarithm of that."""
    flat = states.flatten(0, -2).double()
    size = flat.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-12)
    return torch.cat([flat / size, size.log()], 1)


def bytes_to_fit(hidden: int, linears: int, tokens: int) -> int:
    """What ``fit_guide`` takes: features thrice, gradients, and the matrix of the regression with its factors."""
    features = hidden + 1
    return 8 * (4 * tokens * features + 3 * tokens * linears + 3 * features * features)
