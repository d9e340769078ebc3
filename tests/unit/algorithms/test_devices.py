"""Algorithms, statistics and folds keep to the device of their tensors and compute there what they compute on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import pretend
import pytest
import torch
from torch import Tensor

from quantkit.algorithms import Solution
from quantkit.algorithms.awq import Consumer, awq, search_factors
from quantkit.algorithms.gptq import gptq, proxy_loss
from quantkit.algorithms.rtn import rtn
from quantkit.calibrate.stats import Hessian
from quantkit.core.scheme import Scheme
from quantkit.formats import writer_format

SOLVE: dict[str, Callable[[Tensor, Tensor, Scheme], Solution]] = {
    "gptq": gptq,
    "awq": awq,
    "rtn": lambda weight, hessian, scheme: rtn(weight, scheme, "search", hessian.diagonal()),
}


def problem() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 96, generator=generator) @ torch.randn(96, 96, generator=generator)
    x[:, 5] = 0  # an input that is never there
    return torch.randn(24, 96, generator=generator), (x.t() @ x / len(x)).double()


@pytest.mark.parametrize("method", SOLVE)
@pytest.mark.parametrize("scheme", [Scheme(4, 64, False), Scheme(3, None, True)], ids=Scheme.describe)
def test_the_same_is_decided_on_a_device(method: str, scheme: Scheme) -> None:
    weight, hessian = problem()
    here = SOLVE[method](weight, hessian, scheme).quantized
    form = writer_format("native")
    with pretend.pretending() as device:
        there = SOLVE[method](weight.to(device), hessian.to(device), scheme).quantized
        assert there.codes.device == there.scales.device == device
        encoded = {name: part.cpu() for name, part in form.encode(there).items()}
        assert proxy_loss(weight.to(device), there.dequantize(), hessian.to(device)) == proxy_loss(
            weight, here.dequantize(), hessian
        )
        assert there.to("cpu").equal(here)
    assert all(torch.equal(encoded[name], part) for name, part in form.encode(here).items())


def test_factors_of_channels_are_searched_on_a_device() -> None:
    weight, hessian = problem()
    scheme, channels = Scheme(4, 32, False), torch.arange(96)
    here = search_factors([Consumer(weight, hessian, channels, scheme)], 96)
    with pretend.pretending() as device:
        moved = Consumer(weight.to(device), hessian.to(device), channels.to(device), scheme)
        there = search_factors([moved], 96)
        assert torch.equal(there.values.cpu(), here.values)
    assert there.loss == here.loss


def test_statistics_are_summed_in_float32_on_a_device() -> None:
    x = torch.randn(50, 40, generator=torch.Generator().manual_seed(1))
    x[3, 7] = float("nan")
    here = Hessian(40)
    here.add(x)
    with pretend.pretending() as device:
        there = Hessian(40, device)
        there.add(x.to(device))
        assert there.sum.device == device
        assert there.sum.dtype == torch.float32
        result = there.result().cpu()
    assert (there.tokens, there.dropped) == (49, 1)
    torch.testing.assert_close(result.double(), here.result(), rtol=1e-5, atol=1e-6)


def test_the_pretended_device_refuses_what_a_gpu_refuses() -> None:
    with pretend.pretending() as device:
        with pytest.raises(pretend.Mixed):
            torch.ones(3, device=device) + torch.ones(3)
        assert float((torch.ones(3, device=device) * torch.tensor(2.0)).sum()) == 6  # numbers may come from the host
