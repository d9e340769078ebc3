"""Static ranges of the KV cache, the observer behind them, and what a cache gives back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.algorithms.kv import KVObserver, LayerRanges, as_cached, fit_range, full_range
from quantkit.core.kvpages import quantize, rotate
from quantkit.core.kvscheme import KVScheme, LayerScales
from quantkit.errors import NumericsError, RequestError

WIDTHS = (8, 4, 3, 2)


def sample(tokens: int = 300, heads: int = 2, dim: int = 32, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, heads, tokens, dim, generator=torch.Generator().manual_seed(seed))


def ranges(observer: KVObserver, bits: int | str = 4) -> LayerScales:
    scheme = KVScheme.of(bits)
    return observer.ranges([scheme]).scales(scheme)


def error(x: torch.Tensor, scale: torch.Tensor, low: torch.Tensor, bits: int) -> torch.Tensor:
    back = quantize(x, scale[..., None], low[..., None], bits) * scale[..., None] + low[..., None]
    return (back - x).square().sum(-1)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([2, 3, 4, 8]), st.floats(-50, 50), st.floats(0.001, 20))
def test_the_fit_is_never_worse_than_the_full_range(seed: int, bits: int, shift: float, spread: float) -> None:
    x = torch.randn(3, 2, 200, generator=torch.Generator().manual_seed(seed)) ** 3 * spread + shift * spread
    full = full_range(x.amin(-1), x.amax(-1), bits)
    assert bool((error(x, *fit_range(x, bits), bits) <= error(x, *full, bits) * (1 + 1e-5)).all())


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("power", [1, 3], ids=["normal", "heavy tails"])
def test_the_fit_is_near_the_best_of_a_fine_grid(bits: int, power: int) -> None:
    x = torch.randn(6, 2000, generator=torch.Generator().manual_seed(bits)) ** power + 2
    low, high, centre = x.amin(-1), x.amax(-1), x.mean(-1)
    best = torch.full_like(low, torch.inf)
    for left in torch.linspace(0.05, 1, 30):
        for right in torch.linspace(0.05, 1, 30):
            tried = full_range(centre + (low - centre) * left, centre + (high - centre) * right, bits)
            best = torch.minimum(best, error(x, *tried, bits))
    found = error(x, *fit_range(x, bits), bits)
    assert bool((found <= best * 1.25).all())
    assert float(found.sum()) <= 1.06 * float(best.sum())


def test_levels_that_the_sample_lies_on_are_found() -> None:
    codes = torch.randint(4, (5, 300), generator=torch.Generator().manual_seed(0)).float()
    x = codes * torch.tensor([0.1, 1, 3, 50, 1e-3])[:, None] - 7
    assert bool((error(x, *fit_range(x, 2), 2) < 1e-6 * x.square().sum(-1)).all())


@pytest.mark.parametrize("bits", WIDTHS)
def test_constant_and_zero_channels_come_back_as_they_are(bits: int) -> None:
    x = torch.zeros(1, 1, 50, 8)
    x[..., 1] = 123.456
    observer = KVObserver()
    observer.add(x, x)
    found = ranges(observer, bits)
    back = (
        quantize(x, found.k_scale[:, None], found.k_low[:, None], bits) * found.k_scale[:, None] + found.k_low[:, None]
    )
    torch.testing.assert_close(back, x, rtol=1e-6, atol=1e-9)


def test_eight_bits_clip_no_token_however_few_are_kept() -> None:
    x = sample(tokens=500)
    observer = KVObserver(first=0, sample_tokens=50)
    observer.add(x, x)
    found = ranges(observer, 8)
    by_channel = x.transpose(0, 1).flatten(1, 2)
    torch.testing.assert_close(found.k_low, by_channel.amin(1))
    torch.testing.assert_close(found.k_low + 255 * found.k_scale, by_channel.amax(1))


def test_values_are_rotated_before_their_ranges() -> None:
    x = sample(dim=16)
    observer = KVObserver(first=0)
    observer.add(rotate(x), rotate(x))
    found = ranges(observer, 3)
    turned = fit_range(x.transpose(0, 1).flatten(1, 2).transpose(1, 2), 3)
    torch.testing.assert_close(found.v_scale, turned[0], rtol=1e-4, atol=1e-6)
    assert not torch.allclose(found.k_scale, turned[0], rtol=0.01)


def test_the_first_tokens_of_each_sequence_do_not_count() -> None:
    x = sample(tokens=40)
    extreme = x.clone()
    extreme[:, :, :4] = 1e4
    plain, sunk = KVObserver(), KVObserver()
    plain.add(x, x)
    sunk.add(extreme, extreme)
    assert plain.tokens == sunk.tokens == 2 * 36
    a, b = ranges(plain), ranges(sunk)
    assert torch.equal(a.k_scale, b.k_scale)
    assert torch.equal(a.v_low, b.v_low)


def test_fp8_has_one_scale_for_all_keys_and_covers_the_first_tokens_too() -> None:
    k, v = sample(tokens=40), sample(tokens=40, seed=1)
    k[1, 1, 2, 5] = -896.0
    observer = KVObserver()
    observer.add(k, v)
    found = ranges(observer, "fp8")
    assert bool((found.k_scale == 2.0).all())
    torch.testing.assert_close(found.v_scale, torch.full((2, 32), float(v.abs().max()) / 448))
    assert not bool(found.k_low.any() or found.v_low.any())


def test_a_side_of_16_bits_needs_no_range() -> None:
    observer = KVObserver()
    observer.add(sample(), sample(seed=1))
    found = observer.ranges([KVScheme.of("k4v16")])
    assert (sorted(found.keys), sorted(found.values)) == ([4], [])
    scales = found.scales(KVScheme.of("k4v16"))
    assert bool((scales.v_scale == 1).all())
    torch.testing.assert_close(scales.k_scale, ranges(observer, 4).k_scale)


def test_every_width_that_is_asked_for_is_there() -> None:
    observer = KVObserver()
    observer.add(sample(), sample(seed=1))
    found = observer.ranges([KVScheme(keys, values) for keys in WIDTHS for values in WIDTHS])
    assert sorted(found.keys) == sorted(found.values) == sorted(WIDTHS)
    mixed = found.scales(KVScheme.of("k8v2"))
    assert torch.equal(mixed.k_scale, found.keys[8][0])
    assert torch.equal(mixed.v_low, found.values[2][1])


def test_the_sample_is_bounded_and_the_same_however_the_text_is_split() -> None:
    x = sample(tokens=500)
    whole, halves = (KVObserver(first=0, sample_tokens=100) for _ in range(2))
    whole.add(x, -x)
    for part in (x[:1], x[1:]):
        halves.add(part, -part)
    assert whole.tokens == halves.tokens == 1000
    assert whole._sides[0].sample.shape == (2, 100, 32)
    assert torch.equal(whole._sides[0].sample, halves._sides[0].sample)
    a, b = ranges(whole), ranges(halves)
    assert torch.equal(a.k_scale, b.k_scale)
    assert torch.equal(a.v_low, b.v_low)


def test_tokens_that_are_not_finite_are_left_out_and_counted() -> None:
    clean, dirty = KVObserver(first=0), KVObserver(first=0)
    x = torch.randn(2, 3, 50, 8, generator=torch.Generator().manual_seed(5))
    clean.add(x[:1], x[:1])
    clean.add(x[1:, :, 2:], x[1:, :, 2:])
    keys, values = x.clone(), x.clone()
    keys[1, 0, 0, 3], values[1, 2, 1, 7] = float("nan"), float("inf")
    dirty.add(keys[:1], values[:1])
    dirty.add(keys[1:], values[1:])
    assert (dirty.tokens, dirty.dropped) == (98, 2)
    a, b = ranges(clean), ranges(dirty)
    assert torch.equal(a.k_scale, b.k_scale)
    assert torch.equal(a.v_low, b.v_low)
    dirty.add(torch.full_like(x[:, :, :9], float("nan")), x[:, :, :9])
    with pytest.raises(NumericsError, match=r"20 of 118.*--kv-bits 16"):
        ranges(dirty)


def test_nothing_to_calibrate_from_is_refused() -> None:
    observer = KVObserver()
    x = sample()
    with pytest.raises(NumericsError, match="shapes"):
        observer.add(x, x[..., :8])
    with pytest.raises(RequestError, match="no keys"):
        ranges(observer)
    observer.add(x[:, :, :4], x[:, :, :4])
    with pytest.raises(RequestError, match="--seq-len"):
        ranges(observer)


@pytest.mark.parametrize("bits", [8, "k8v2", "k3v16", "fp8"])
@pytest.mark.parametrize("scales", ["online", "static"])
def test_only_whole_old_pages_are_rounded(bits: int | str, scales: str) -> None:
    k, v = sample(tokens=250, dim=8), sample(tokens=250, dim=8, seed=1)
    scheme = KVScheme.of(bits, scales)  # type: ignore[arg-type]
    observer = KVObserver()
    observer.add(k, v)
    found = as_cached(k, v, scheme, observer.ranges([scheme]).scales(scheme))
    for x, back, width in zip((k, v), found, (scheme.keys, scheme.values), strict=True):
        changed = (x != back).any(-1).any(1).all(0)
        old = torch.zeros(250, dtype=torch.bool)
        old[4:128] = width < 16  # 250 - 64 = 186: two pages
        assert torch.equal(changed, old)
        relative = float((back - x)[:, :, 4:128].norm() / x[:, :, 4:128].norm())
        assert relative < {8: 0.05, 3: 0.3, 2: 0.6, 16: 1e-9}[width]


def test_more_bits_give_back_more() -> None:
    k, v = sample(tokens=256, dim=16), sample(tokens=256, dim=16, seed=1)
    found = [as_cached(k, v, KVScheme(bits, bits)) for bits in WIDTHS]
    for side, x in enumerate((k, v)):
        errors = [float((back[side] - x).norm()) for back in found]
        assert errors == sorted(errors)
        assert errors[0] > 0


def test_a_sequence_without_an_old_page_comes_back_as_it_is() -> None:
    k = sample(tokens=64 + 127)
    assert as_cached(k, -k, KVScheme.of(2))[0] is k  # 128 newest tokens stay exact with 2-bit keys
    assert as_cached(k, -k, KVScheme.of(3))[0] is not k


def test_a_query_with_tokens_behind_it_finds_fewer_packed_pages() -> None:
    k = sample(tokens=256, dim=8)
    for behind, end in ((0, 192), (1, 128), (63, 128), (64, 128), (65, 64), (192, 0)):
        changed = (as_cached(k, k, KVScheme.of(3), behind=behind)[0] != k).any(-1).any(1).all(0)
        assert int(changed.sum()) == max(0, end - 4), behind


def test_pages_are_what_the_cache_stores() -> None:
    from quantkit.core.kvpages import decode_keys, encode_keys

    k, v = sample(tokens=64 + 64, dim=8), sample(tokens=128, dim=8, seed=1)
    scheme = KVScheme.of(3)
    page = decode_keys(*encode_keys(k[:, :, :64], 3, scheme.first), 3)
    assert torch.equal(as_cached(k, v, scheme)[0][:, :, 4:64], page[:, :, 4:])


def test_ranges_without_the_asked_width_say_so() -> None:
    with pytest.raises(KeyError):
        LayerRanges({4: (torch.ones(1, 2), torch.zeros(1, 2))}, {}).scales(KVScheme.of(4))
