"""KL divergence, top-1 agreement and paired perplexity of a model against its original, on identical tokens.

The original runs first. Only its hidden states behind the scored tokens are kept (in memory up to 256 MB, above that in
a temporary file) together with its head; its decoder blocks are let go before the other model is opened, so that two
whole models never share the memory. Logits of both are made again per chunk of tokens.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quantkit.errors import NumericsError, RequestError
from quantkit.evaluate.perplexity import (
    LanguageModel,
    OnProgress,
    check_finite,
    chosen,
    chunks,
    log_probs,
    logit_columns,
    mean_and_stderr,
    scored_hidden,
)
from quantkit.evaluate.windows import EvaluationWindows

STATES_IN_MEMORY = 256 * 2**20


@dataclass(slots=True)
class Baseline:
    """An original, reduced to what the comparison needs.

    model: its head is used, its blocks may be gone. states: ``[windows, scored, hidden]`` in the original's dtype on
    the host. windows: the tokens that made them. name: for reports. streamed: its blocks never were in memory together.
    """

    model: LanguageModel
    states: Tensor
    windows: EvaluationWindows
    name: str
    streamed: bool = False


@dataclass(frozen=True, slots=True)
class Comparison:
    """Losses and divergence of each scored token; every tensor is ``[windows, scored]``.

    baseline_losses, losses: nats (float64). kl: KL(original || model) in nats (float64). same_top: whether both rank
    the same token first (bool).
    """

    baseline_losses: Tensor
    losses: Tensor
    kl: Tensor
    same_top: Tensor

    def summary(self) -> dict[str, float | None]:
        """Return mean, standard error over windows and quantiles, by the names of ``eval --json``."""
        kl_mean, kl_stderr = mean_and_stderr(self.kl)
        delta, delta_stderr = mean_and_stderr(self.losses - self.baseline_losses)
        flat = self.kl.flatten()
        agreement, agreement_stderr = mean_and_stderr(self.same_top)
        return {
            "delta_ln_ppl": delta,
            "delta_ln_ppl_stderr": delta_stderr,
            "kl_mean": kl_mean,
            "kl_stderr": kl_stderr,
            "kl_median": quantile(flat, 0.5),
            "kl_p99": quantile(flat, 0.99),
            "kl_max": float(flat.max()),
            "top1_agreement": agreement,
            "top1_agreement_stderr": agreement_stderr,
        }


def quantile(values: Tensor, q: float) -> float:
    """Return the linear-interpolated quantile of a vector of any length.

    (torch.quantile refuses more than 2**24 values.)
    """
    return float(np.quantile(values.double().cpu().numpy(), q))


@torch.inference_mode()
def record_baseline(
    model: LanguageModel,
    windows: EvaluationWindows,
    name: str,
    *,
    release: Callable[[], None] | None = None,
    progress: OnProgress | None = None,
) -> Baseline:
    """Run the original over the windows and keep its hidden states; then ``release`` its decoder blocks."""
    states: Tensor | None = None
    for window in range(windows.count):
        hidden = scored_hidden(model, windows, window)
        if states is None:
            states = allocate((windows.count, *hidden.shape), hidden.dtype)
        states[window] = hidden.to(states.device)
        if progress is not None:
            progress("original", window + 1, windows.count)
    if release is not None:
        release()
    assert states is not None  # make_windows never returns zero windows
    return Baseline(model=model, states=states, windows=windows, name=name)


@torch.inference_mode()
def compare(model: LanguageModel, baseline: Baseline, progress: OnProgress | None = None) -> Comparison:
    """Run the model over the same windows and compare each scored token's whole distribution.

    Raises NumericsError when a loss or a divergence is not finite.
    """
    windows = baseline.windows
    shape = (windows.count, windows.scored)
    result = Comparison(
        baseline_losses=torch.empty(shape, dtype=torch.float64),
        losses=torch.empty(shape, dtype=torch.float64),
        kl=torch.empty(shape, dtype=torch.float64),
        same_top=torch.empty(shape, dtype=torch.bool),
    )
    for window in range(windows.count):
        hidden, targets = scored_hidden(model, windows, window), windows.targets(window)
        vocab = _same_columns(baseline, model, hidden)
        for part in chunks(windows.scored, vocab):
            kept = baseline.states[window, part].to(hidden.device)
            _compare_chunk(
                log_probs(baseline.model, kept), log_probs(model, hidden[part]), targets[part], result, window, part
            )
        check_finite(result.baseline_losses[window], window, "the baseline")
        check_finite(result.losses[window], window, "the model")
        if not bool(torch.isfinite(result.kl[window]).all()):
            raise NumericsError(
                f"Window {window} has a KL divergence that is not finite: one model gives a token -inf. Evaluate with"
                " --dtype float32."
            )
        if progress is not None:
            progress("evaluating", window + 1, windows.count)
    return result


def _same_columns(baseline: Baseline, model: LanguageModel, hidden: Tensor) -> int:
    """Return the columns of the logits. Raises RequestError where the two models differ in them."""
    vocab = logit_columns(model, hidden)
    original = logit_columns(baseline.model, baseline.states[0, :1].to(hidden.device))
    if vocab != original:
        raise RequestError(
            f"{baseline.name} gives {original} logits per token and the model {vocab}. "
            "A comparison needs the same vocabulary; name the original that this model was converted from."
        )
    return vocab


def _compare_chunk(p: Tensor, q: Tensor, targets: Tensor, result: Comparison, window: int, part: slice) -> None:
    """Fill in one chunk of ``result``.

    p, q: log-probabilities of original and model, float32 ``[tokens, vocab]``; both are used up.
    """
    result.baseline_losses[window, part] = chosen(p, targets)
    result.losses[window, part] = chosen(q, targets)
    result.same_top[window, part] = (p.argmax(-1) == q.argmax(-1)).cpu()
    difference = torch.sub(p, q, out=q)
    result.kl[window, part] = torch.linalg.vecdot(p.exp_(), difference).double().cpu()


def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Make room for hidden states: memory when small, else a file that the system deletes with the last reference."""
    size = int(np.prod(shape)) * dtype.itemsize
    if size <= STATES_IN_MEMORY:
        return torch.empty(shape, dtype=dtype)
    with tempfile.TemporaryFile(prefix="quantkit-states-") as file:
        file.truncate(size)
        raw = np.memmap(file, dtype=np.uint8, mode="r+", shape=(size,))
    return torch.from_numpy(raw).view(dtype).reshape(shape)
