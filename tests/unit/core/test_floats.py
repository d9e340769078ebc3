"""E4M3, E2M1 and E8M0 against their definitions, over all codes and all ties; scales of FP8, NVFP4 and MXFP4."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from quantkit.core import affine
from quantkit.core.rounding import float_activations as activations
from quantkit.core.rounding import numbers, scales
from quantkit.core.rounding.activations import input_hook
from quantkit.core.scheme import Scheme
from quantkit.errors import NumericsError, RequestError

SCHEMES = ("fp8", "fp8-block", "fp8-tensor", "nvfp4", "mxfp4")


def small_float(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> Fraction:
    """The number of a code by the textbook: sign, exponent, mantissa; subnormals where the exponent is 0."""
    sign = -1 if code >> (exponent_bits + mantissa_bits) else 1
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = Fraction(code & ((1 << mantissa_bits) - 1), 1 << mantissa_bits)
    if exponent == 0:
        return sign * mantissa * Fraction(2) ** (1 - bias)
    return sign * (1 + mantissa) * Fraction(2) ** (exponent - bias)


E4M3 = {code: small_float(code, 4, 3, 7) for code in range(256) if code & 0x7F != 0x7F}
E2M1 = {code: small_float(code, 2, 1, 1) for code in range(16)}


def test_every_e4m3_code_is_the_number_of_its_definition_and_encodes_back() -> None:
    codes = torch.tensor(list(E4M3), dtype=torch.uint8)
    values = numbers.decode_e4m3(codes)
    assert values.tolist() == [float(value) for value in E4M3.values()]
    back = numbers.encode_e4m3(values)
    assert torch.equal(back[codes != 0x80], codes[codes != 0x80])
    assert int(back[codes == 0x80]) == 0  # negative zero is written as zero
    assert bool(numbers.decode_e4m3(torch.tensor([0x7F, 0xFF], dtype=torch.uint8)).isnan().all())


def test_every_e2m1_code_is_the_number_of_its_definition_and_encodes_back() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    values = numbers.decode_e2m1(codes)
    assert values.tolist() == [float(value) for value in E2M1.values()]
    assert values[:8].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert numbers.encode_e2m1(values).tolist() == [*range(8), 0, *range(9, 16)]


@pytest.mark.parametrize(
    ("table", "encode", "round_"),
    [(E4M3, numbers.encode_e4m3, numbers.round_e4m3), (E2M1, numbers.encode_e2m1, numbers.round_e2m1)],
    ids=["e4m3", "e2m1"],
)
def test_rounding_takes_the_nearest_and_the_even_code_at_every_tie(
    table: dict[int, Fraction],
    encode: Callable[[torch.Tensor], torch.Tensor],
    round_: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    sign = 128 if len(table) > 16 else 8
    positive = sorted((value, code) for code, value in table.items() if code < sign)
    for (low, below), (high, above) in itertools.pairwise(positive):
        middle = float((low + high) / 2)
        even = below if below % 2 == 0 else above
        tie = torch.tensor(middle)
        as_float = torch.stack([torch.nextafter(tie, torch.tensor(0.0)), tie, torch.nextafter(tie, torch.tensor(1e9))])
        assert encode(as_float).tolist() == [below, even, above], middle
        assert int(encode(-as_float)[2]) == above + sign
        assert round_(as_float).tolist()[1] == float(table[even])
    top = float(positive[-1][0])
    assert round_(torch.tensor([top * 1.01, 1e30, -1e30, float("inf")])).tolist() == [top, top, -top, top]


def test_e8m0_holds_powers_of_two_and_nothing_else() -> None:
    codes = torch.arange(1, 255, dtype=torch.uint8)
    values = numbers.decode_e8m0(codes)
    assert values.tolist() == [2.0 ** (code - 127) for code in range(1, 255)]
    assert torch.equal(numbers.encode_e8m0(values), codes)
    assert bool(numbers.decode_e8m0(torch.tensor([255], dtype=torch.uint8)).isnan())
    with pytest.raises(ValueError, match="no power of two"):
        numbers.encode_e8m0(torch.tensor([3.0]))


def weight(rows: int = 256, width: int = 256, seed: int = 0) -> torch.Tensor:
    w = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 0.05
    w[3] = 0
    return w


def rounded(w: torch.Tensor, scheme: Scheme, scale: torch.Tensor) -> torch.Tensor:
    return affine.dequantize(affine.quantize(w, scale, None, scheme), scale, None, scheme)


@pytest.mark.parametrize("name", SCHEMES)
def test_searched_scales_lose_no_more_than_those_of_the_extremes(name: str) -> None:
    w, importance = weight(), torch.rand(256, generator=torch.Generator().manual_seed(1))
    scheme = affine.fixed(w, Scheme.of(name))
    losses = []
    for scale, zeros in (affine.minmax_params(w, scheme), affine.searched_params(w, scheme, importance)):
        assert zeros is None
        assert scale.dtype == torch.float32
        assert torch.equal(affine.store_scale(scale, scheme), scale)  # what the file can hold
        losses.append(float(((rounded(w, scheme, scale) - w).square() * importance).sum()))
    assert losses[1] <= losses[0]
    assert not rounded(w, scheme, scale)[3].any()


@pytest.mark.parametrize(("name", "tied"), [("fp8", 1), ("fp8-block", 128), ("fp8-tensor", 256)])
def test_rows_that_share_a_scale_have_one(name: str, tied: int) -> None:
    scheme = Scheme.of(name)
    for scale in (affine.minmax_params(weight(), scheme)[0], affine.searched_params(weight(), scheme)[0]):
        for part in scale.split(tied):
            assert bool((part == part[0]).all())
    assert scheme.scales_stored(256, 256) == 256 // tied * scheme.groups(256)


def test_nvfp4_weights_are_exact_in_bfloat16_and_the_choice_of_four_over_six_is_made() -> None:
    w = weight()
    scheme = affine.fixed(w, Scheme.of("nvfp4"))
    assert math.log2(scheme.global_scale or 0).is_integer()
    scale, _ = affine.searched_params(w, scheme)
    q = rounded(w, scheme, scale)
    assert torch.equal(q.bfloat16().float(), q)
    assert float(scale.max()) * (scheme.global_scale or 0) <= 448
    block = torch.tensor([[4.0, 3.0, 2.0, 1.0] * 4]) / 64  # exact if the largest becomes 4, and not if 6
    fixed = affine.fixed(block, Scheme.of("nvfp4"))
    chosen, _ = affine.searched_params(block, fixed)
    assert torch.equal(rounded(block, fixed, chosen), block)
    assert not torch.equal(rounded(block, fixed, affine.minmax_params(block, fixed)[0]), block)


def test_mxfp4_scales_are_those_of_its_standard_and_its_weights_round_to_themselves() -> None:
    scheme = Scheme.of("mxfp4")
    largest = torch.tensor([[1.0], [6.0], [7.99], [8.0], [0.3]])
    assert scales.from_largest(largest, scheme).flatten().tolist() == [0.25, 1.0, 1.0, 2.0, 0.0625]
    w = weight()
    once = rounded(w, scheme, affine.searched_params(w, scheme)[0])
    for find in (affine.minmax_params, affine.searched_params):
        assert torch.equal(rounded(once, scheme, find(once, scheme)[0]), once)


def test_activations_are_rounded_per_token_beside_blocks_per_128_inputs_and_in_nvfp4_per_16() -> None:
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(2))
    x[1] = 0
    x[2, 7] = 1000.0
    fp8 = activations.round_fp8(x)
    scale = (x.abs().amax(1, keepdim=True) / 448).clamp(min=1 / (448 * 512))
    assert torch.equal(fp8, numbers.round_e4m3(x / scale) * scale)
    block = activations.round_fp8(x, 128)
    assert torch.equal(block[2, 128:], activations.round_fp8(x[2:3, 128:])[0])
    assert not torch.equal(block[2, 128:], fp8[2, 128:])
    four = activations.round_nvfp4(x, 448 * 6 / float(x.abs().max()))
    assert not four[1].any()
    error = float((four - x)[3:].norm() / x[3:].norm())
    assert 0.05 < error < 0.15
    scheme = replace(Scheme.of("fp8"), activations="fp8")
    (hooked,) = input_hook(scheme)(torch.nn.Identity(), (x.bfloat16(),))
    assert torch.equal(hooked, activations.round_fp8(x.bfloat16()))


def test_a_scheme_says_what_it_cannot_be() -> None:
    for name in SCHEMES:
        scheme = Scheme.of(name)
        assert Scheme.from_json(scheme.to_json()) == scheme
    with pytest.raises(RequestError, match="no such scheme"):
        Scheme.of("fp7")
    with pytest.raises(RequestError, match="nvfp4 has 4 bits, groups of 16"):
        replace(Scheme.of("nvfp4"), group_size=32)
    with pytest.raises(RequestError, match="with mxfp4 weights they are none"):
        replace(Scheme.of("mxfp4"), activations="fp8")
    with pytest.raises(RequestError, match="no shared rows"):
        Scheme(4, 128, global_scale=2.0)
    assert "number" not in Scheme(4, 128).to_json()  # manifests of integers keep their bytes


def test_a_weight_that_is_not_finite_is_refused() -> None:
    broken = weight()
    broken[0, 0] = float("inf")
    for name in ("fp8", "nvfp4"):
        with pytest.raises(NumericsError, match=r"finite|infinite"):
            affine.minmax_params(broken, affine.fixed(broken, Scheme.of(name)))
