"""GPTQ, AWQ and folds round to FP8, NVFP4 and MXFP4 as they do to integers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantkit.algorithms.awq import Consumer, awq, search_factors
from quantkit.algorithms.gptq import GPTQOptions, gptq, proxy_loss
from quantkit.algorithms.rtn import rtn
from quantkit.core import affine
from quantkit.core.scheme import Scheme

SCHEMES = ("fp8", "fp8-block", "fp8-tensor", "nvfp4", "mxfp4")


def problem(rows: int = 128, width: int = 256) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(400, width, generator=generator) @ torch.randn(width, width, generator=generator) / 16
    x = x * (0.2 + 4 * torch.rand(width, generator=generator) ** 4)
    return torch.randn(rows, width, generator=generator) * 0.05, x.T @ x / len(x)


def loss(w: Tensor, q: Tensor, h: Tensor) -> float:
    return proxy_loss(w, q, h)[0]


@pytest.mark.parametrize("name", SCHEMES)
def test_gptq_loses_less_than_rounding_and_scales_can_be_stored(name: str) -> None:
    w, h = problem()
    scheme = Scheme.of(name)
    simple = rtn(w, scheme, "search", h.diagonal()).quantized
    found = gptq(w, h, scheme).quantized
    assert loss(w, found.dequantize(), h) < (0.8 if scheme.bits == 4 else 0.9) * loss(w, simple.dequantize(), h)
    assert torch.equal(affine.store_scale(found.scales, found.scheme), found.scales)
    if scheme.rows != 1:
        assert bool((found.scales == found.scales[:1]).all())  # 128 rows are one block


def test_gptq_keeps_the_scales_of_the_extremes_when_told() -> None:
    w, h = problem()
    scheme = affine.fixed(w, Scheme.of("nvfp4"))
    found = gptq(w, h, scheme, GPTQOptions(scales="minmax")).quantized
    kept = found.scales == affine.minmax_params(w, scheme)[0]
    assert float(kept.float().mean()) > 0.99  # rows where rounding was better have others


@pytest.mark.parametrize("name", SCHEMES)
def test_awq_is_not_worse_than_rounding_with_searched_scales(name: str) -> None:
    w, h = problem()
    scheme = Scheme.of(name)
    damped = h + 0.01 * h.diagonal().mean() * torch.eye(len(h))
    simple = rtn(w, scheme, "search", damped.diagonal()).quantized
    assert loss(w, awq(w, h, scheme).quantized.dequantize(), damped) <= loss(w, simple.dequantize(), damped) * (
        1 + 1e-6
    )


@pytest.mark.parametrize("name", ["fp8", "nvfp4", "mxfp4"])
def test_the_search_for_channel_factors_finds_some(name: str) -> None:
    w, h = problem()
    found = search_factors([Consumer(w, h, torch.arange(256), Scheme.of(name))], 256)
    assert found.fallback is None
    assert found.loss <= found.plain_loss
