"""The definition of our numbers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.core import affine
from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError, RequestError

SCHEMES = st.builds(
    Scheme,
    bits=st.integers(2, 8),
    group_size=st.sampled_from([None, 1, 7, 32, 64, 128]),
    symmetric=st.booleans(),
    scale_dtype=st.sampled_from(["float16", "bfloat16"]),
)


def weight(rows: int, cols: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * scale


@settings(max_examples=80, deadline=None)
@given(scheme=SCHEMES, rows=st.integers(1, 8), cols=st.integers(1, 150), seed=st.integers(0, 999))
def test_every_value_lands_within_a_step_of_itself(scheme: Scheme, rows: int, cols: int, seed: int) -> None:
    """|w - q(w)| <= scale / 2 inside the range; rounding scale and zero to storage can move the range's end by one step
    more (the zero by half a step, the scale by its relative rounding times the largest code)."""
    w = weight(rows, cols, seed)
    scales, zeros = affine.minmax_params(w, scheme)
    codes = affine.quantize(w, scales, zeros, scheme)
    assert int(codes.max()) < scheme.levels
    error = (w - affine.dequantize(codes, scales, zeros, scheme)).abs()
    rounding = torch.finfo(scheme.torch_scale_dtype).eps * scheme.levels
    assert bool((error <= affine.expand_groups(scales.float(), cols, scheme) * (1.01 + rounding)).all())


@settings(max_examples=40, deadline=None)
@given(scheme=SCHEMES, seed=st.integers(0, 999))
def test_quantizing_twice_changes_nothing(scheme: Scheme, seed: int) -> None:
    w = weight(4, 100, seed)
    scales, zeros = affine.minmax_params(w, scheme)
    codes = affine.quantize(w, scales, zeros, scheme)
    again = affine.quantize(affine.dequantize(codes, scales, zeros, scheme), scales, zeros, scheme)
    assert torch.equal(codes, again)


@settings(max_examples=30, deadline=None)
@given(scheme=SCHEMES, seed=st.integers(0, 999), weighted=st.booleans())
def test_searched_scales_are_never_worse_than_the_extremes(scheme: Scheme, seed: int, weighted: bool) -> None:
    w = weight(6, 90, seed) ** 3
    gain = torch.rand(90, generator=torch.Generator().manual_seed(seed)) if weighted else torch.ones(90)

    def loss(params: tuple[torch.Tensor, torch.Tensor | None]) -> torch.Tensor:
        q = affine.dequantize(affine.quantize(w, *params, scheme), *params, scheme)
        return ((w - q).square() * gain).sum()

    assert loss(affine.searched_params(w, scheme, gain)) <= loss(affine.minmax_params(w, scheme)) * (1 + 1e-5)


def test_zero_is_exact_when_asymmetric() -> None:
    w = weight(8, 256, 0) + 3
    w[:, ::2] = 0
    scheme = Scheme(4, 64, symmetric=False)
    scales, zeros = affine.minmax_params(w, scheme)
    q = affine.dequantize(affine.quantize(w, scales, zeros, scheme), scales, zeros, scheme)
    assert bool((q[:, ::2] == 0).all())


@pytest.mark.parametrize("symmetric", [True, False])
def test_groups_and_rows_of_zeros_stay_zero(symmetric: bool) -> None:
    w = weight(4, 130, 1)
    w[0] = 0
    w[1, 64:128] = 0
    scheme = Scheme(4, 64, symmetric)
    scales, zeros = affine.minmax_params(w, scheme)
    q = affine.dequantize(affine.quantize(w, scales, zeros, scheme), scales, zeros, scheme)
    assert bool(torch.isfinite(scales).all())
    assert bool((scales > 0).all())
    assert bool((q[0] == 0).all())
    assert bool((q[1, 64:128] == 0).all())


def test_scales_are_rounded_before_codes_are_chosen() -> None:
    w = torch.tensor([[0.1, 0.2, 0.3, 1.0]])
    scheme = Scheme(8, None, symmetric=False)
    scales, zeros = affine.minmax_params(w, scheme)
    assert scales.dtype == torch.float16
    expected = torch.round(w / scales.float() + zeros.float()).clamp(0, 255)  # type: ignore[union-attr]
    assert torch.equal(affine.quantize(w, scales, zeros, scheme).float(), expected)


def test_tiny_scales_are_raised_to_the_smallest_normal_half() -> None:
    scales, _ = affine.minmax_params(torch.full((1, 4), 1e-7), Scheme(4, None))
    assert scales.item() == affine.SMALLEST_SCALE


def test_a_short_last_group_uses_only_its_own_values() -> None:
    w = weight(3, 576, 2)
    w[:, 512:] *= 100
    scheme = Scheme(4, 128, symmetric=False)
    scales, _ = affine.minmax_params(w, scheme)
    alone, _ = affine.minmax_params(w[:, 512:].contiguous(), Scheme(4, 64, symmetric=False))
    assert scales.shape == (3, 5)
    assert torch.equal(scales[:, 4:], alone)


def test_permuting_rows_permutes_codes() -> None:
    w, order = weight(16, 96, 3), torch.randperm(16, generator=torch.Generator().manual_seed(0))
    scheme = Scheme(3, 32, symmetric=False)
    for params in (affine.minmax_params, affine.searched_params):
        s, z = params(w, scheme)
        s2, z2 = params(w[order], scheme)
        assert torch.equal(affine.quantize(w, s, z, scheme)[order], affine.quantize(w[order], s2, z2, scheme))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(bits=9), "2, 3, 4"),
        (dict(bits=1), "bits=1"),
        (dict(bits=4, group_size=-5), "group_size=-5"),
        (dict(bits=4, group_size=0), "group_size=0"),
        (dict(bits=4, scale_dtype="float32"), "float16 or bfloat16"),
    ],
)
def test_a_scheme_outside_the_range_is_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Scheme(**wrong)  # type: ignore[arg-type]


@given(scheme=SCHEMES)
def test_scheme_survives_json(scheme: Scheme) -> None:
    assert Scheme.from_json(scheme.to_json()) == scheme


def test_unknown_scheme_keys_are_refused() -> None:
    with pytest.raises(RequestError, match="colour"):
        Scheme.from_json({"bits": 4, "colour": "red"})


def test_quant_tensor_refuses_parts_that_do_not_fit() -> None:
    codes = torch.zeros(2, 96, dtype=torch.uint8)
    good = torch.ones(2, 2, dtype=torch.float16)
    QuantTensor(codes, good, None, Scheme(4, 64))
    with pytest.raises(CheckpointError, match="needs float16"):
        QuantTensor(codes, good[:, :1], None, Scheme(4, 64))
    with pytest.raises(CheckpointError, match="zeros must be present"):
        QuantTensor(codes, good, None, Scheme(4, 64, symmetric=False))
    with pytest.raises(CheckpointError, match="uint8"):
        QuantTensor(codes.float(), good, None, Scheme(4, 64))
