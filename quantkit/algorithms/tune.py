"""Learn rounding: codes and scales of one block move together until its output is that of the original block.

GPTQ and AWQ lower the error of each linear. Here it is the error of a whole block, each channel of its output weighted
by its importance to the model's output (after BRECQ, section 3.3, where every element of every sample has a weight of
its own): a weight's code is that of a latent number, which gradients may move so that it rounds the other way
(AdaRound, Nagel et al., arXiv 2004.10568; of whole blocks: BRECQ, arXiv 2102.05426). Gradients pass the rounding as if
it were not there, and only their signs count, at a rate that falls to 0 linearly (SignRound, Cheng et al., arXiv
2309.05516, equations 3 to 5). Scales are learned beside them, as factors, by Adam (TesseraQ, Li et al., arXiv
2410.19103, section 3.3).

Unlike in SignRound, the start is not rounding to the nearest: latent numbers start in the cells of the codes that
another algorithm chose, as near to the weight as those allow, and a scale that changes takes its codes along. Zeros
stay. Codes are whole and scales rounded to their stored dtype in every step, so what is measured is what will be
written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.core import affine
from quantkit.core.interrupt import raise_if_interrupted
from quantkit.core.qtensor import QuantTensor
from quantkit.core.rounding import scales as floats

Forward = Callable[[Mapping[str, Tensor], Tensor], Tensor]
"""The linears' weights by name, inputs ``[1, tokens, hidden]`` -> the block's output, of the same shape.

Records for gradients.
"""

INSIDE = 0.499  # of a step around its code: where a latent number may start
DECAYS = (0.9, 0.99)  # Adam's


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """How codes and scales learn.

    steps: of ``windows`` windows each, drawn without repetition until all had their turn.
    held: one window of so many is never learned from.
    reach: how far a latent number may move, in codes; signs that always agree get it there.
    scale_rate: Adam's, of the logarithm of scales, falling to 0.
    checks: how often the windows held back are evaluated.
    """

    steps: int = 60
    windows: int = 2
    held: int = 8
    reach: float = 0.5
    scale_rate: float = 5e-3
    checks: int = 4
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Tuned:
    """The block's quantized linears, and how learning went.

    quantized: by name.
    before, after: error on the windows held back (``block_error``), of the start and of the result.
    step: after how many steps the result stood; 0 is the start.
    trouble: why learning did not take place or ended early, or None.
    """

    quantized: dict[str, QuantTensor]
    before: float
    after: float
    step: int
    trouble: str | None = None


def tune(
    forward: Forward, weights: Mapping[str, Tensor], start: Mapping[str, QuantTensor],
    inputs: Sequence[Tensor], targets: Sequence[Tensor], options: TuneOptions | None = None,
    channels: Tensor | float = 1.0,
) -> Tuned:  # fmt: skip
    """Learn codes and scales of a block's linears for a small ``block_error``.

    Never worse than ``start`` on the windows held back. Deterministic where ``forward`` is. Besides what ``forward``
    takes for one window, memory is about ``COPIES`` float32 numbers per weight.

    weights: float32 [out, in], what the linears would compute with unrounded.
    inputs, targets: per window, float32 [1, tokens, hidden], on any device. Windows that are not finite are left out.
    channels: channel importance, float32 [hidden] where the weights are: what an error in each output channel counts.
    """
    options = options or TuneOptions()
    usable = [i for i, pair in enumerate(zip(inputs, targets, strict=True)) if all(_finite(x) for x in pair)]
    held = usable[:: options.held]
    learned = [i for i in usable if i not in held]
    if not learned:
        few = f"{len(usable)} windows of text can be used, and one is held back: nothing to learn from"
        return Tuned(dict(start), math.nan, math.nan, 0, few)
    linears = {name: _Latent(weights[name].float(), start[name]) for name in start}
    device = next(iter(linears.values())).origin.device

    def pair(index: int) -> tuple[Tensor, Tensor]:
        return inputs[index].to(device), targets[index].to(device)

    def measure(quantized: Mapping[str, QuantTensor]) -> float:
        rounded = {name: q.dequantize() for name, q in quantized.items()}
        with torch.no_grad():
            errors = [float(block_error(forward(rounded, x), y, channels)) for x, y in map(pair, held)]
        return sum(errors) / len(errors)

    best = dict(start)
    before = after = measure(best)
    if not math.isfinite(before):
        return Tuned(best, before, after, 0, "the block's error is not finite on the windows held back")
    at, draws = 0, _draws(learned, options.seed)
    looks = {options.steps * look // options.checks for look in range(1, options.checks + 1)}
    for step in range(1, options.steps + 1):
        raise_if_interrupted()
        batch = [pair(next(draws)) for _ in range(min(options.windows, len(learned)))]
        if not _step(forward, linears, batch, channels, step, options):
            return Tuned(best, before, after, at, f"learning ended at step {step}: the block's error is not finite")
        if step in looks:
            quantized = {name: linear.quantized() for name, linear in linears.items()}
            error = measure(quantized)
            if error < after:
                best, after, at = quantized, error, step
    return Tuned(best, before, after, at)


# origin, shift, rounded, its gradient and its step at work; codes and the best ones; the start's; temporaries
COPIES = 9


def block_error(output: Tensor, target: Tensor, channels: Tensor | float = 1.0) -> Tensor:
    """Compute the squared error of each token's output relative to its target's size, mean over tokens.

    channels: channel importance, by which the error is weighted. Being relative, a few tokens with huge entries count
        no more than others.
    """
    size = target.square().sum(-1)  # not weighted: it is what the next norm divides by
    return (((output - target).square() * channels).sum(-1) / size.clamp(min=1e-30)).mean()


def _step(
    forward: Forward,
    linears: Mapping[str, _Latent],
    batch: Sequence[tuple[Tensor, Tensor]],
    channels: Tensor | float,
    step: int,
    options: TuneOptions,
) -> bool:
    """One step of learning; False if the error was not finite, and nothing has moved."""
    now = {name: linear.quantized() for name, linear in linears.items()}
    rounded = {name: q.dequantize().requires_grad_() for name, q in now.items()}
    for x, y in batch:  # one window at a time: gradients add up
        with torch.enable_grad():
            error = block_error(forward(rounded, x), y, channels)
        if not bool(torch.isfinite(error)):
            return False
        error.backward()
    for name, linear in linears.items():
        gradient = rounded.pop(name).grad
        if gradient is not None:
            linear.learn(gradient, now[name], step, options)
    return True


class _Latent:
    """The latent numbers of one linear, and the factors of its scales.

    A latent number of 3.4 rounds to the fourth code by value. Between floating-point numbers, which are not
    equidistant, it is what linear interpolation says.
    """

    def __init__(self, weight: Tensor, start: QuantTensor) -> None:
        self.start, self.scheme = start, start.scheme
        step = affine.expand_groups(start.scales.float(), weight.shape[1], self.scheme)
        self.numbers = None if self.scheme.number == "integer" else floats.ordered(self.scheme).to(weight.device)
        if self.numbers is None:
            codes = start.codes.float()
            self.origin = weight / step + self._offset()
        else:
            codes = torch.searchsorted(self.numbers, affine.steps(start.codes, None, self.scheme)).float()
            self.origin = _places(weight / step, self.numbers)
        self.origin = torch.minimum(torch.maximum(self.origin, codes - INSIDE), codes + INSIDE)
        self.shift = torch.zeros_like(self.origin)
        self.factor = torch.zeros_like(start.scales, dtype=torch.float32)  # logarithm
        self.moments = [torch.zeros_like(self.factor) for _ in DECAYS]

    def _offset(self) -> Tensor | float:
        zeros = self.start.zeros
        if zeros is None:
            return float(self.scheme.midpoint)
        return affine.expand_groups(zeros.float(), self.start.codes.shape[1], self.scheme)

    def quantized(self) -> QuantTensor:
        scales = affine.store_scale(self.start.scales.float() * self.factor.exp(), self.scheme)
        place = (self.origin + self.shift).round_()
        if self.numbers is None:
            codes = place.clamp_(0, self.scheme.levels - 1).to(torch.uint8)
        else:
            codes = floats.encode(self.numbers[place.clamp_(0, len(self.numbers) - 1).long()], self.scheme)
        return QuantTensor(codes, scales, self.start.zeros, self.scheme)

    def learn(self, gradient: Tensor, now: QuantTensor, step: int, options: TuneOptions) -> None:
        """Move latent numbers and scales one step.

        gradient: of the dequantized ``now``. Of a latent number it has the same sign, for a step of the scale is
            positive.
        """
        left = 1 - (step - 1) / options.steps
        rate = 2 * options.reach / (options.steps + 1) * left  # all rates add up to ``reach``
        self.shift.sub_(gradient.sign(), alpha=rate).clamp_(-options.reach, options.reach)
        if self.scheme.number == "mxfp4" or self.scheme.rows is None:
            return  # powers of two cannot move a little; the one scale of a matrix is shared with others
        steps = affine.steps(now.codes, now.zeros, self.scheme)
        by_group = affine.split_groups(gradient * steps, self.scheme).sum(-1)
        by_group = floats.tie(by_group, self.scheme.rows, "sum")
        slope = by_group * now.scales.float()
        first, second = self.moments
        first.lerp_(slope, 1 - DECAYS[0])
        second.lerp_(slope.square(), 1 - DECAYS[1])
        mean, square = first / (1 - DECAYS[0] ** step), second / (1 - DECAYS[1] ** step)
        self.factor.sub_(options.scale_rate * left * mean / square.sqrt().clamp(min=1e-30))


def _places(values: Tensor, numbers: Tensor) -> Tensor:
    """Return where values lie among ascending numbers: the index of the number below, and the share of the gap.

    >>> _places(torch.tensor([-9.0, 0.5, 3.0]), torch.tensor([-1.0, 0.0, 2.0]))
    tensor([0.0000, 1.2500, 2.0000])
    """
    values = values.clamp(float(numbers[0]), float(numbers[-1]))
    below = (torch.searchsorted(numbers, values, right=True) - 1).clamp_(0, len(numbers) - 2)
    left = numbers[below]
    return below + (values - left) / (numbers[below + 1] - left)


def _draws(learned: Sequence[int], seed: int) -> Iterator[int]:
    """Windows in random order, again and again."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from (learned[i] for i in torch.randperm(len(learned), generator=generator).tolist())


def _finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x).all())
