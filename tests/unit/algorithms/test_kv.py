"""KV scales: the search, the observer and the numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.algorithms.kv import KVObserver, search_range
from quantkit.core.kvscheme import KVScheme, LayerScales, kv_dequantize, kv_quantize
from quantkit.errors import CheckpointError, NumericsError, RequestError


def error(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int) -> float:
    return float((kv_dequantize(kv_quantize(x, scale, zero, 1 << bits), scale, zero) - x).square().mean())


def sample(tokens: int = 300, heads: int = 2, dim: int = 32, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, heads, tokens, dim, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("head_dim", "group_size", "width"),
    [(64, 64, 64), (80, 64, 40), (96, 64, 48), (256, 64, 64), (24, 1, 1), (7, 64, 7)],
)
def test_groups_are_the_largest_divisor_that_fits(head_dim: int, group_size: int, width: int) -> None:
    scheme = KVScheme(4, group_size)
    assert (scheme.width(head_dim), scheme.groups(head_dim)) == (width, head_dim // width)


@pytest.mark.parametrize("bad", [{"bits": 3}, {"bits": True}, {"bits": 4, "group_size": 0}])
def test_a_scheme_outside_its_range_is_refused(bad: dict[str, int]) -> None:
    with pytest.raises(RequestError):
        KVScheme(**bad)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group_size", [64, 8, 1])
def test_codes_lie_within_half_a_step_where_nothing_is_clipped(bits: int, group_size: int) -> None:
    x = sample()
    observer = KVObserver()
    observer.add(x, x + 30)  # values wholly on one side of 0
    found = observer.result(KVScheme(bits, group_size))
    for value, scale, zero in ((x, found.k_scale, found.k_zero), (x + 30, found.v_scale, found.v_zero)):
        codes = kv_quantize(value, scale, zero, 1 << bits)
        inside = (codes > 0) & (codes < (1 << bits) - 1)
        steps = scale.repeat_interleave(32 // scale.shape[1], 1)[:, None, :]
        off = (kv_dequantize(codes, scale, zero) - value).abs()
        assert bool((off <= steps * 0.5001 + 1e-5)[inside].all())
        assert float(inside.float().mean()) > 0.5


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([16, 256]), st.floats(-50, 50), st.floats(0.001, 20))
def test_the_search_is_never_worse_than_the_full_range(seed: int, levels: int, shift: float, spread: float) -> None:
    values = torch.randn(3, 2, 200, generator=torch.Generator().manual_seed(seed)) * spread + shift * spread
    low, high = values.amin(-1), values.amax(-1)
    scale, zero = search_range(values, low, high, levels)
    full = (high - low) / (levels - 1)
    full_zero = torch.round(-low / full)

    def cubed(s: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        codes = torch.round(values / s[..., None] + z[..., None]).clamp(0, levels - 1)
        return ((codes - z[..., None]) * s[..., None] - values).abs().pow(3).sum(-1)

    assert bool((cubed(scale, zero) <= cubed(full, full_zero) * (1 + 1e-4)).all())


def test_an_outlier_is_clipped_and_the_rest_gains() -> None:
    x = sample(dim=64)
    x[0, 0, 0, 0] = 60.0
    observer = KVObserver()
    observer.add(x, x)
    found = observer.result(KVScheme(4))
    full = (x.amax() - x.amin()) / 15
    assert float(found.k_scale[0, 0]) < 0.7 * float(full)
    naive = (
        torch.full_like(found.k_scale, float(full)),
        torch.full_like(found.k_zero, float(torch.round(-x.amin() / full))),
    )
    assert error(x, found.k_scale, found.k_zero, 4) < 0.8 * error(x, *naive, 4)


def test_the_sample_is_bounded_and_the_same_however_the_text_is_split() -> None:
    x = sample(tokens=500)
    whole, halves = KVObserver(sample_tokens=100), KVObserver(sample_tokens=100)
    whole.add(x, -x)
    for part in (x[:1], x[1:]):
        halves.add(part, -part)
    assert whole.tokens == halves.tokens == 1000
    assert whole._sides[0].sample.shape == (2, 100, 32)
    assert torch.equal(whole._sides[0].sample, halves._sides[0].sample)
    a, b = whole.result(KVScheme(4)), halves.result(KVScheme(4))
    assert torch.equal(a.k_scale, b.k_scale)
    assert torch.equal(a.v_zero, b.v_zero)


def test_constant_and_zero_channels_get_a_usable_scale() -> None:
    x = torch.zeros(1, 1, 50, 8)
    x[..., 1] = 123.456
    observer = KVObserver()
    observer.add(x, x)
    found = observer.result(KVScheme(4, group_size=1))
    back = kv_dequantize(kv_quantize(x, found.k_scale, found.k_zero, 16), found.k_scale, found.k_zero)
    torch.testing.assert_close(back, x, rtol=1e-4, atol=1e-9)


def test_tokens_that_are_not_finite_are_left_out_and_counted() -> None:
    clean, dirty = KVObserver(), KVObserver()
    x = torch.randn(2, 3, 50, 8, generator=torch.Generator().manual_seed(5))
    clean.add(x[:1], x[:1])
    clean.add(x[1:, :, 2:], x[1:, :, 2:])
    keys, values = x.clone(), x.clone()
    keys[1, 0, 0, 3], values[1, 2, 1, 7] = float("nan"), float("inf")
    dirty.add(keys[:1], values[:1])
    dirty.add(keys[1:], values[1:])
    assert (dirty.tokens, dirty.dropped) == (98, 2)
    a, b = clean.result(KVScheme(4)), dirty.result(KVScheme(4))
    assert torch.equal(a.k_scale, b.k_scale)
    assert torch.equal(a.v_zero, b.v_zero)
    dirty.add(torch.full_like(x[:, :, :9], float("nan")), x[:, :, :9])
    with pytest.raises(NumericsError, match=r"20 of 118.*--kv-bits 16"):
        dirty.result(KVScheme(4))


def test_bad_keys_are_refused() -> None:
    observer = KVObserver()
    x = sample()
    with pytest.raises(NumericsError, match="shapes"):
        observer.add(x, x[..., :8])
    with pytest.raises(RequestError, match="no keys"):
        KVObserver().result(KVScheme(4))
    with pytest.raises(RequestError, match="16-bit"):
        observer.result(KVScheme(16))


@pytest.mark.parametrize(
    "change",
    [
        {"k_scale": torch.zeros(2, 1)},
        {"v_zero": torch.full((2, 1), 0.5)},
        {"k_zero": torch.zeros(2, 2)},
        {"head_dim": 0},
    ],
)
def test_scales_that_cannot_be_right_are_refused(change: dict[str, torch.Tensor]) -> None:
    good = {
        "k_scale": torch.ones(2, 1),
        "k_zero": torch.zeros(2, 1),
        "v_scale": torch.ones(2, 1),
        "v_zero": torch.zeros(2, 1),
        "head_dim": 8,
    }
    LayerScales(**good)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError):
        LayerScales(**{**good, **change})  # type: ignore[arg-type]
