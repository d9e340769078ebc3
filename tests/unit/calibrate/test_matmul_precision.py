"""Six bf16 products are a float32 product, three one to a few 1e-6, one to a few 1e-3.

That holds where they are asked for, and only there.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quantkit.calibrate.capture import _ObservingCache
from quantkit.calibrate.matmul_precision import FEW, choose_precision, matmul_precision, model_runs, split_product
from quantkit.calibrate.stats import Hessian
from quantkit.core.precision import cpu_has_amx, exact_products

CPU = torch.device("cpu")
MKLDNN: Any = torch.backends.mkldnn  # torch's types do not know its parts


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    """Entries of very different sizes, as activations have them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.randn(shape[-1], generator=generator).mul(2).exp()


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(("mode", "lost"), [("bf16x6", 2.0**-26), ("bf16x3", 2.0**-18)])
def test_the_products_are_a_float32_product_within_what_the_parts_lose(mode: str, lost: float) -> None:
    left, right = noise(96, 700), noise(700, 80, seed=1)
    found, exact = split_product(left, right, mode), left.double() @ right.double()
    assert found.dtype == torch.float32
    sizes = left.double().abs() @ right.double().abs()
    assert bool(((found.double() - exact).abs() <= (3 * lost + 700 * 2.0**-24) * sizes).all())
    assert error(found, exact) < (2 * error(left @ right, exact) if mode == "bf16x6" else 1e-5)
    assert error(left.bfloat16().float() @ right.bfloat16().float(), exact) > 1e-3  # what one product gives


@pytest.mark.parametrize("mode", ["bf16x6", "bf16x3"])
def test_a_transposed_weight_is_joined_as_it_lies(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turning six copies of it round in memory, for every batch, would cost more than splitting it."""
    left, weight, given = noise(96, 700), noise(80, 700, seed=1), []

    def multiply(lefts: torch.Tensor, rights: torch.Tensor) -> torch.Tensor:
        given.append(rights)
        return lefts.float() @ rights.float()

    monkeypatch.setattr("quantkit.calibrate.matmul_precision.multiply", multiply)
    turned = split_product(left, weight.t().contiguous(), mode)
    as_it_lies = split_product(left, weight.t(), mode)
    assert [rights.stride(0) for rights in given] == [80, 1]
    assert torch.equal(given[0], given[1])
    torch.testing.assert_close(as_it_lies, turned, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["bf16x6", "bf16x3"])
def test_linears_of_a_model_that_runs_and_hessians_use_it_inside_and_not_outside(mode: str) -> None:
    x, weight, bias = noise(3, FEW, 600), noise(50, 600, seed=1), noise(50, seed=2)
    plain = torch.nn.functional.linear(x, weight, bias)
    with matmul_precision(mode):
        assert torch.equal(torch.nn.functional.linear(x, weight, bias), plain)
    with matmul_precision(mode), model_runs(CPU):
        inside = torch.nn.functional.linear(x, weight, bias)
        few = torch.nn.functional.linear(x[:1, :3], weight, bias)
        hessian = Hessian(600)
        hessian.add(x)
    exact = x.double() @ weight.double().t() + bias.double()
    assert inside.shape == plain.shape
    assert error(inside, exact) < 1e-5
    assert not torch.equal(inside, plain)
    assert torch.equal(few, torch.nn.functional.linear(x[:1, :3], weight, bias))
    assert torch.equal(torch.nn.functional.linear(x, weight, bias), plain)
    rows = x.reshape(-1, 600).double()
    assert error(hessian.result(), rows.t() @ rows / len(rows)) < 1e-5
    again = Hessian(600)
    again.add(x)
    assert not torch.equal(again.sum, hessian.sum)


def test_other_dtypes_are_left_alone() -> None:
    x, weight = noise(FEW, 40).bfloat16(), noise(8, 40, seed=1).bfloat16()
    plain = torch.nn.functional.linear(x, weight)
    with matmul_precision("bf16x3"), model_runs(CPU):
        assert torch.equal(torch.nn.functional.linear(x, weight), plain)


@pytest.mark.parametrize("mode", ["float32", "bf16x6", "bf16x3", "bf16"])
def test_nothing_of_torch_goes_through_python_outside_a_model_that_runs(mode: str) -> None:
    """Rounding is many small operations; a mode that looked at each would double what they take."""
    with matmul_precision(mode):
        assert not torch.overrides._get_current_function_mode_stack()
        with model_runs(CPU):
            seen = torch.overrides._get_current_function_mode_stack()
        assert len(seen) == mode.startswith("bf16x")


def test_one_product_is_what_sixteen_bits_give() -> None:
    left, right = noise(96, 700), noise(700, 80, seed=1)
    expected = left.bfloat16().float() @ right.bfloat16().float()
    torch.testing.assert_close(split_product(left, right, "bf16"), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("mode", ["float32", "bf16x6", "bf16x3", "bf16"])
def test_only_the_mode_bf16_touches_a_model_that_runs_and_only_there(mode: str) -> None:
    """What a product outside sees, rounding's among them, is float32, after an error too."""
    with exact_products(), matmul_precision(mode):
        assert MKLDNN.matmul.fp32_precision == "ieee"
        with model_runs(CPU):
            assert MKLDNN.matmul.fp32_precision == ("bf16" if mode == "bf16" else "ieee")
        with pytest.raises(ZeroDivisionError), model_runs(CPU):
            raise ZeroDivisionError
        assert MKLDNN.matmul.fp32_precision == "ieee"
        with model_runs(torch.device("cuda")):
            assert MKLDNN.matmul.fp32_precision == "ieee"


def test_bf16_reaches_linears_gradients_and_hessians_inside_a_model_that_runs() -> None:
    x, weight = noise(4 * FEW, 600), noise(512, 600, seed=1).requires_grad_()
    y = torch.nn.functional.linear(x, weight)
    (exact,) = torch.autograd.grad(y.square().sum(), weight)
    with matmul_precision("bf16"):
        assert torch.equal(torch.nn.functional.linear(x, weight), y)
        with model_runs(CPU):
            rounded = torch.nn.functional.linear(x, weight)
            (gradient,) = torch.autograd.grad(rounded.square().sum(), weight)
            hessian = Hessian(600)
            hessian.add(x)
    gram = x.double().t() @ x.double() / len(x)
    for found, true in ((rounded, y), (gradient, exact), (hessian.result(), gram)):
        lost = error(found.detach(), true.detach().double())
        assert lost < 1e-2
        assert lost > 1e-4 or not cpu_has_amx()  # without the units oneDNN may well stay with float32


def test_a_sink_of_keys_and_values_computes_in_float32() -> None:
    seen = []

    class Sink:
        def add(self, keys: torch.Tensor, values: torch.Tensor) -> None:
            seen.append(MKLDNN.matmul.fp32_precision)

    with matmul_precision("bf16"), model_runs(CPU):
        _ObservingCache(Sink()).update(torch.zeros(1), torch.zeros(1))
        assert MKLDNN.matmul.fp32_precision == "bf16"
    assert seen == ["ieee"]


@pytest.mark.parametrize("amx", [False, True])
@pytest.mark.parametrize("mode", ["auto", "float32", "bf16x3", "bf16x6", "bf16"])
def test_a_cpu_multiplies_in_bf16_where_it_has_units_for_it_unless_told_otherwise(
    mode: str, amx: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.calibrate.matmul_precision.cpu_has_amx", lambda: amx)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    automatic = "bf16" if amx else "float32"
    assert choose_precision(mode, CPU) == (automatic if mode == "auto" else mode)
