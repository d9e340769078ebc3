"""Searched scales of ggml's block formats: better than simple rounding, and better still with error feedback."""

from __future__ import annotations

import gguf
import pytest
import torch
from torch import Tensor

from quantkit.algorithms.kquant import kquant
from quantkit.algorithms.kquant_feedback import kquant_feedback
from quantkit.core.blocks import KINDS, BlockCodes
from quantkit.formats.ggml.blocks import encode

LIBRARY = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")  # what the gguf library rounds itself


def weight(rows: int = 24, width: int = 512, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=draw) * (0.02 + 0.1 * torch.rand(rows, 1, generator=draw))


def importance(width: int = 512) -> Tensor:
    return torch.rand(width, generator=torch.Generator().manual_seed(7)) ** 4


def loss(blocks: BlockCodes | Tensor, original: Tensor, gain: Tensor) -> float:
    values = blocks if isinstance(blocks, Tensor) else blocks.dequantize()
    return float(((values - original).square() * gain).sum())


def hessian(width: int = 512) -> Tensor:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(900, width, generator=draw) @ (torch.randn(width, width, generator=draw) / width**0.5)
    x = x * (0.3 + torch.rand(width, generator=draw) ** 3 * 3)
    return (x.t() @ x / len(x)).double()


@pytest.mark.parametrize("name", LIBRARY)
def test_search_loses_less_than_the_librarys_rounding(name: str) -> None:
    original, kind = weight(), gguf.GGMLQuantizationType[name]
    theirs = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(original.numpy(), kind), kind))
    gain = importance()
    assert loss(kquant(original, KINDS[name], gain), original, gain) < loss(theirs, original, gain)
    assert loss(kquant(original, KINDS[name]), original, torch.ones(1)) < loss(theirs, original, torch.ones(1))


@pytest.mark.parametrize("name", KINDS)
def test_important_inputs_are_nearer(name: str) -> None:
    original, gain = weight(), importance()
    assert loss(kquant(original, KINDS[name], gain), original, gain) <= loss(
        kquant(original, KINDS[name]), original, gain
    )


def test_more_bits_lose_less() -> None:
    original, one = weight(), torch.ones(1)
    for names in (("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"), ("MXFP4", "Q4_0", "Q5_0", "Q8_0"), ("Q4_1", "Q5_1")):
        losses = [loss(kquant(original, KINDS[name]), original, one) for name in names]
        assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("name", KINDS)
def test_error_feedback_loses_less_at_the_output(name: str) -> None:
    original, h = weight(), hessian()

    def at_output(blocks: BlockCodes) -> float:
        lost = (blocks.dequantize() - original).double()
        return float(((lost @ h) * lost).sum())

    found, damping = kquant_feedback(original, h, KINDS[name])
    assert damping == 0.01
    assert at_output(found) < 0.95 * at_output(kquant(original, KINDS[name], h.diagonal()))


@pytest.mark.parametrize("name", KINDS)
def test_zeros_and_constants_stay_finite(name: str) -> None:
    kind = KINDS[name]
    for fill in (0.0, 0.25, -3.0):
        blocks = kquant(torch.full((2, 512), fill), kind)
        assert torch.isfinite(blocks.dequantize()).all()
        assert (blocks.dequantize() - fill).abs().max() <= 0.26 * abs(fill)
        assert encode(blocks).shape == (2, kind.row_bytes(512))


def test_inputs_that_nobody_uses_still_get_scales() -> None:
    gain = torch.zeros(512)
    gain[:256] = 1.0
    blocks = kquant(weight(), KINDS["Q4_K"], gain)
    assert loss(blocks, weight(), 1 - gain) < 0.01 * loss(torch.zeros(24, 512), weight(), 1 - gain)


def test_a_hessian_that_cannot_be_factorised_is_said() -> None:
    broken = torch.full((256, 256), float("nan"), dtype=torch.float64)
    broken.diagonal().fill_(1.0)
    found, damping = kquant_feedback(weight(4, 256), broken, KINDS["Q4_K"])
    assert damping is None
    assert torch.equal(found.codes, kquant(weight(4, 256), KINDS["Q4_K"], torch.ones(256)).codes)
