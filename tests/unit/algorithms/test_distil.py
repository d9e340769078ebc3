"""End-to-end distillation: its pieces against plain autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantkit.algorithms.distil import DistilOptions, LearnedNorm, LearnedScales, divergence, rate_at
from quantkit.algorithms.rtn import rtn
from quantkit.core import affine
from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme

SCHEMES = [
    Scheme(4, 16, False),
    Scheme(3, 16, True),
    Scheme(8, None, True),
    Scheme(2, 40, False),
]  # 40: a short last group


@pytest.mark.parametrize("scheme", SCHEMES, ids=Scheme.describe)
def test_scales_start_as_the_weight_is_and_get_the_gradient_of_its_formula(scheme: Scheme) -> None:
    torch.manual_seed(0)
    q = rtn(torch.randn(6, 64), scheme).quantized
    learned, wanted = LearnedScales(q.scales), torch.randn(6, 64)
    weight = learned.weight(q)
    assert torch.equal(weight, q.dequantize())
    (weight * wanted).sum().backward()
    delta = torch.zeros(q.scales.shape, requires_grad=True)
    zero = torch.full(q.scales.shape, float(scheme.midpoint)) if q.zeros is None else q.zeros.float()
    centred = q.codes.float() - affine.expand_groups(zero, 64, scheme)
    plain = centred * affine.expand_groups(q.scales.float() * delta.exp(), 64, scheme)
    (plain * wanted).sum().backward()
    torch.testing.assert_close(learned.delta.grad, delta.grad)


def learned_by_adam(q: QuantTensor, wanted: Tensor, x: Tensor, steps: int) -> Tensor:
    """Scales that make outputs ``x Qᵀ`` alike to ``x Wᵀ``, after so many steps."""
    learned = LearnedScales(q.scales)
    adam = torch.optim.Adam([learned.delta], lr=3e-3)
    for _ in range(steps):
        adam.zero_grad()
        ((learned.weight(q) - wanted) @ x.t()).square().sum().backward()
        adam.step()
    return learned.scales * learned.delta.detach().exp()


def test_scales_learn_to_be_the_least_squares_answer() -> None:
    """Oracle: of one group ``(c - z) s`` the best s is ``<X(c - z), Xw> / |X(c - z)|^2``."""
    torch.manual_seed(2)
    x, weight = torch.randn(50, 16), torch.randn(5, 16)
    q = rtn(weight, Scheme(3, None, False)).quantized
    assert q.zeros is not None
    centred = (q.codes.float() - q.zeros.float()) @ x.t()
    best = (centred * (weight @ x.t())).sum(1, keepdim=True) / centred.square().sum(1, keepdim=True)
    assert not torch.allclose(q.scales.float(), best, rtol=1e-3)
    torch.testing.assert_close(learned_by_adam(q, weight, x, 400), best, rtol=1e-4, atol=0)


def test_permuting_outputs_permutes_learned_scales() -> None:
    torch.manual_seed(3)
    x, weight, rows = torch.randn(50, 32), torch.randn(6, 32), torch.randperm(6)
    plain, moved = (rtn(one, Scheme(4, 16, True)).quantized for one in (weight, weight[rows]))
    torch.testing.assert_close(learned_by_adam(moved, weight[rows], x, 20), learned_by_adam(plain, weight, x, 20)[rows])


def test_learned_scales_are_stored_in_their_dtype_beside_the_same_codes() -> None:
    torch.manual_seed(1)
    q = rtn(torch.randn(4, 32), Scheme(4, 16, False)).quantized
    learned = LearnedScales(q.scales)
    with torch.no_grad():
        learned.delta.normal_(0, 0.01)
    found = learned.result(q)
    assert found.scales.dtype == torch.float16
    assert torch.equal(found.codes, q.codes)
    assert not torch.equal(found.scales, q.scales)
    learned.round_(q.scheme)
    torch.testing.assert_close(learned.weight(q), found.dequantize(), rtol=1e-6, atol=0)


def test_a_norm_starts_as_it_is_and_can_be_stored_again() -> None:
    weight = torch.tensor([0.0, 1.5, -2.0]).half()
    norm = LearnedNorm(weight, torch.float16)
    assert torch.equal(norm.result(), weight)
    with torch.no_grad():
        norm.delta.fill_(0.01)
    moved = norm.value()
    assert bool((moved != weight.float()).all())  # an entry that is 0 learns too
    norm.round_()
    torch.testing.assert_close(norm.value(), moved.half().float(), rtol=1e-6, atol=1e-7)


def test_divergence_in_parts_is_that_of_whole_logits_and_so_is_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    student, teacher = torch.randn(7, 5), torch.randn(7, 5)
    head, original = torch.randn(11, 5), torch.randn(11, 5)
    leaf = student.clone().requires_grad_()
    target = (teacher @ original.t()).log_softmax(-1)
    whole = torch.nn.functional.kl_div(
        (leaf @ head.t()).log_softmax(-1), target, log_target=True, reduction="batchmean"
    )
    whole.backward()
    monkeypatch.setattr("quantkit.algorithms.distil.CHUNK_TOKENS", 1)
    monkeypatch.setattr("quantkit.algorithms.distil.CHUNK_ELEMENTS", 3 * 11)  # parts of 3, 3 and 1 tokens
    found, grad = divergence(student, teacher, lambda x: x @ head.t(), lambda x: x @ original.t(), 11)
    assert found == pytest.approx(whole.item(), rel=1e-6)
    torch.testing.assert_close(grad, leaf.grad)


def test_a_model_has_no_divergence_from_itself() -> None:
    torch.manual_seed(3)
    hidden, head = torch.randn(4, 5), torch.randn(9, 5)
    found, grad = divergence(hidden, hidden, lambda x: x @ head.t(), lambda x: x @ head.t(), 9)
    assert found == pytest.approx(0.0, abs=1e-7)
    assert float(grad.abs().max()) < 1e-7


def test_the_rate_rises_to_its_largest_and_falls_to_nearly_nothing() -> None:
    options = DistilOptions(rate=1.0, warmup=5)
    rates = [rate_at(step, 100, options) for step in range(100)]
    assert rates[0] == pytest.approx(0.2, rel=1e-3)
    assert max(rates) == rates[4] > 0.99
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] < 0.001
