"""Every kernel agrees with the reference, over a grid of schemes and shapes."""

from __future__ import annotations

import pytest
import torch

from quantkit.core import affine
from quantkit.core.qtensor import BlockTensor, QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import RequestError
from quantkit.runtime.kernels.cpu import Int4Weight, Int8Weight, int4_fits
from quantkit.runtime.kernels.reference import BlockWeight, WordsWeight, linear_reference
from quantkit.runtime.linear import KERNELS, QuantLinear, choose, linear, pack

CPU = torch.device("cpu")
SHAPES = [(32, 64), (80, 320), (16, 576), (208, 192), (30, 70)]
SCHEMES = [
    Scheme(bits, group, symmetric)
    for bits in (3, 4, 5, 8)
    for group in (32, 128, None)
    for symmetric in (True, False)
]


def quantized(scheme: Scheme, shape: tuple[int, int], seed: int = 0) -> QuantTensor:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + (0.0 if scheme.symmetric else 0.7)
    scales, zeros = affine.minmax_params(weight, scheme)
    if zeros is not None:
        zeros[0, 0] = scheme.levels  # the largest zero that is allowed, one above the largest code
    return QuantTensor(affine.quantize(weight, scales, zeros, scheme), scales, zeros, scheme)


def bound(x: torch.Tensor, q: QuantTensor) -> torch.Tensor:
    """What kernels/cpu.py derives: n * 2**-23 * sum |x_i| * (largest product before cancellation)."""
    step = affine.expand_groups(q.scales.float(), q.shape[1], q.scheme)
    span = torch.maximum(q.dequantize().abs(), 256 * step)
    return q.shape[1] * 2**-23 * (x.abs().float() @ span.T) + 1e-7


@pytest.mark.parametrize("scheme", SCHEMES, ids=Scheme.describe)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_kernel_agrees_with_the_reference(scheme: Scheme, shape: tuple[int, int]) -> None:
    q = quantized(scheme, shape)
    x = torch.randn(5, shape[1], generator=torch.Generator().manual_seed(1))
    expected = x @ q.dequantize().T
    tried = 0
    for name, kernel in KERNELS.items():
        try:
            packed = pack(q, device=CPU, dtype=torch.float32, kernel=name)
        except RequestError:
            continue
        tried += 1
        assert torch.equal(packed.dequantize(), q.dequantize()) or packed.layout == "int8"
        torch.testing.assert_close(packed.dequantize(), q.dequantize(), rtol=1e-5, atol=1e-5)
        assert bool(((linear(x, packed, kernel=kernel) - expected).abs() <= bound(x, q)).all()), name
        assert bool(((linear(x, packed) - expected).abs() <= bound(x, q)).all()), packed.layout
        few = KERNELS["dequantize"](x, packed, None)  # the path of many tokens, from the same buffers
        assert bool(((few - expected).abs() <= bound(x, q)).all()), packed.layout
    assert tried >= 2


@pytest.mark.parametrize("tokens", [1, 3, 17, 64, 300])
@pytest.mark.parametrize(
    "scheme", [Scheme(4, 64, False), Scheme(4, 128), Scheme(8, None), Scheme(8, 64, False)], ids=Scheme.describe
)
def test_any_number_of_tokens_strides_and_bias(scheme: Scheme, tokens: int) -> None:
    q = quantized(scheme, (96, 192))
    bias = torch.randn(96)
    packed = pack(q, device=CPU, dtype=torch.float32)
    rows = torch.randn(192, tokens).T  # not contiguous
    expected = linear_reference(rows, packed, bias)
    assert bool(((linear(rows, packed, bias) - expected).abs() <= bound(rows, q)).all())
    nested = torch.randn(2, 3, 192)
    assert linear(nested, packed).shape == (2, 3, 96)
    assert linear(nested[:0], packed).shape == (0, 3, 96)


@pytest.mark.parametrize("scheme", [Scheme(4, 64, False), Scheme(8, None), Scheme(8, 64, False)], ids=Scheme.describe)
def test_bfloat16_stays_within_its_rounding(scheme: Scheme) -> None:
    q = quantized(scheme, (64, 192))
    x = torch.randn(4, 192).bfloat16()
    packed = pack(q, device=CPU, dtype=torch.bfloat16)
    expected = x.float() @ q.dequantize().T
    # x is exact; scales, shifts and results round at 2**-9 each, and a shift (up to 128 steps) may cancel against the codes
    scale = affine.expand_groups(q.scales.float(), 192, q.scheme)
    allowed = (
        3
        * 2**-8
        * (x.float().abs() @ torch.maximum(q.dequantize().abs(), 128 * scale if scheme.bits == 8 else 16 * scale).T)
    )
    for tokens in (x, x.repeat(20, 1)):
        y = linear(tokens, packed)
        assert y.dtype == torch.bfloat16
        assert bool(((y[:4].float() - expected).abs() <= allowed).all())


def test_layouts_take_about_the_bits_of_the_scheme() -> None:
    q4 = quantized(Scheme(4, 128), (256, 512))
    q8 = quantized(Scheme(8, None), (256, 512))
    elements = 256 * 512
    assert WordsWeight(q4).nbytes() * 8 / elements == 4 + 16 / 128
    assert Int4Weight(q4, torch.float32).nbytes() * 8 / elements == 4 + 64 / 128
    assert Int8Weight(q8, torch.float32).nbytes() * 8 / elements == 8 + 32 / 512
    layer = QuantLinear(Int4Weight(q4, torch.float32))
    assert sum(b.nbytes for b in layer.buffers()) == layer.packed.nbytes()
    assert not list(layer.parameters())


def test_fast_layouts_are_chosen_where_they_apply_and_refused_elsewhere() -> None:
    def layout(scheme: Scheme, shape: tuple[int, int]) -> str:
        return pack(quantized(scheme, shape), device=CPU, dtype=torch.float32).layout

    assert int4_fits(Scheme(4, 128), 576, 576)  # 4 groups of 128 and a tail of 64
    assert layout(Scheme(4, 128), (32, 576)) == "int4"
    assert layout(Scheme(3, 64), (32, 128)) == "int4"
    assert layout(Scheme(4, 64), (24, 128)) == "words"  # 24 rows: not a multiple of 16
    assert layout(Scheme(4, 16), (32, 128)) == "words"
    assert layout(Scheme(8, None), (7, 33)) == "int8"
    with pytest.raises(RequestError, match="int4"):
        pack(quantized(Scheme(4, 64), (24, 128)), device=CPU, dtype=torch.float32, kernel="int4")
    with pytest.raises(RequestError, match="known kernels"):
        pack(quantized(Scheme(4, 64), (24, 128)), device=CPU, dtype=torch.float32, kernel="warp")


def test_the_choice_follows_the_number_of_tokens() -> None:
    packed = pack(quantized(Scheme(4, 64), (32, 64)), device=CPU, dtype=torch.float32)
    assert choose(packed, 1) is KERNELS["int4"]
    assert choose(packed, 10_000) is KERNELS["dequantize"]


def test_a_foreign_format_is_run_by_its_own_decoder() -> None:
    weight = torch.randn(6, 10)
    block = BlockTensor("twice", {"a.b": weight / 2}, (6, 10), 60 * 32, lambda raw: raw["a.b"] * 2)
    packed = pack(block, device=CPU, dtype=torch.float32)
    assert isinstance(packed, BlockWeight)
    x = torch.randn(3, 10)
    torch.testing.assert_close(linear(x, packed), x @ weight.T)
    with pytest.raises(RequestError, match="twice"):
        pack(block, device=CPU, dtype=torch.float32, kernel="int4")


def test_a_wide_layer_is_dequantized_slice_by_slice() -> None:
    q = quantized(Scheme(4, 64, False), (1024, 704))
    packed = pack(q, device=CPU, dtype=torch.float32)
    assert len(packed.slices()) > 1
    assert torch.equal(packed.dequantize(), q.dequantize())
