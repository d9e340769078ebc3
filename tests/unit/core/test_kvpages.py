"""The numbers of the quantized cache: bits come back, errors are bounded, ranges and rotations do what they say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.core import kvpages
from quantkit.core.kvscheme import KVPlan, KVScheme, LayerScales, row_bytes
from quantkit.errors import CheckpointError, RequestError


@settings(max_examples=60, deadline=None)
@given(bits=st.sampled_from([8, 4, 3, 2]), channels=st.integers(1, 70), seed=st.integers(0, 99))
def test_codes_come_back_from_the_bytes_that_the_formula_says(bits: int, channels: int, seed: int) -> None:
    codes = torch.randint(0, 1 << bits, (3, channels), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    stored = kvpages.pack_bits(codes, bits)
    assert stored.shape == (3, row_bytes(channels, bits, torch.float16))
    assert torch.equal(kvpages.unpack_bits(stored, bits, channels), codes)


def test_the_first_code_has_the_lowest_bits() -> None:
    codes = torch.tensor([1, 2, 3, 0, 7, 4, 0, 1], dtype=torch.uint8)
    assert kvpages.pack_bits(codes, 4).tolist() == [0x21, 0x03, 0x47, 0x10]
    assert kvpages.pack_bits(codes & 3, 2).tolist() == [0b00111001, 0b01000011]
    assert kvpages.pack_bits(codes, 3).tolist() == [0b00111001, 0b01000011, 0b00110000]


@pytest.mark.parametrize("channels", [1, 7, 24, 64, 80, 96, 256])
def test_the_rotation_is_its_own_inverse_and_keeps_lengths(channels: int) -> None:
    h = kvpages.hadamard(channels, torch.device("cpu"))
    assert torch.equal(h, h.T)
    torch.testing.assert_close(h @ h, torch.eye(channels), rtol=0, atol=1e-6)
    x = torch.randn(5, channels)
    torch.testing.assert_close(kvpages.rotate(kvpages.rotate(x)), x)


def test_a_rotation_first_made_for_generating_also_serves_autograd() -> None:
    with torch.inference_mode():
        kvpages.rotate(torch.ones(1, 56))
    x = torch.ones(1, 56, requires_grad=True)
    weights = torch.arange(56.0)
    (kvpages.rotate(x) * weights).sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(x.grad, kvpages.rotate(weights[None]))  # the rotation is its own transpose


@settings(max_examples=40, deadline=None)
@given(
    bits=st.sampled_from([8, 4, 3, 2]),
    shift=st.sampled_from([0.0, 300.0, -40.0]),
    spread=st.sampled_from([1e-3, 1.0, 50.0]),
    seed=st.integers(0, 99),
)
def test_no_number_is_further_off_than_half_a_step_and_the_rounding_of_its_offset(
    bits: int, shift: float, spread: float, seed: int
) -> None:
    x = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(seed)) * spread + shift
    keys = kvpages.decode_keys(*kvpages.encode_keys(x, bits), bits)
    span = x.amax(1, keepdim=True) - x.amin(1, keepdim=True)
    cut = 0.3 if bits <= kvpages.SEARCHED_KEYS else 0.0  # what the search may clip
    bound = span * (0.5 / ((1 << bits) - 1) * 1.01 + cut) + (abs(shift) + 5 * spread) * 2.0**-10 + 2.0**-12
    assert bool(((keys - x).abs() <= bound).all())


def test_the_search_is_never_worse_than_the_full_range() -> None:
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(0)) ** 3
    for bits in (2, 3):
        scale, low = kvpages.choose_range(x, bits, True)
        searched = kvpages._error(x, scale, low, bits)
        full = kvpages._error(x, *kvpages._as_stored(x.amin(-1, keepdim=True), x.amax(-1, keepdim=True), bits), bits)
        assert bool((searched <= full).all())
        assert float(searched.sum()) < 0.9 * float(full.sum())


def test_a_search_in_parts_finds_the_same_and_one_bad_group_spoils_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 7, 64, generator=torch.Generator().manual_seed(3)) ** 3
    whole = kvpages.choose_range(x, 2, True)
    x[1, 2, 5], x[2, 3, 5] = torch.inf, torch.nan
    monkeypatch.setattr(kvpages, "SEARCHED_AT_ONCE", 1)  # a group at a time
    parts = kvpages.choose_range(x, 2, True)
    good = x.isfinite().all(-1)
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one[good], other[good])
    assert float(parts[0][1, 2]) == kvpages.LARGEST, "the full range, as far as float16 goes"


def test_tokens_kept_elsewhere_do_not_widen_the_range_of_keys() -> None:
    x = torch.randn(1, 64, 8, generator=torch.Generator().manual_seed(1))
    x[:, :4] *= 100
    skipped = kvpages.decode_keys(*kvpages.encode_keys(x, 4, skip=4), 4)[:, 4:]
    whole = kvpages.decode_keys(*kvpages.encode_keys(x, 4), 4)[:, 4:]
    assert float((skipped - x[:, 4:]).norm()) < 0.1 * float((whole - x[:, 4:]).norm())


def test_a_channel_that_never_changes_comes_back() -> None:
    x = torch.full((1, 64, 8), 3.25)
    assert torch.equal(kvpages.decode_keys(*kvpages.encode_keys(x, 2), 2), x)
    zero = torch.zeros(1, 64, 8)
    assert torch.equal(kvpages.decode_values(*kvpages.encode_values(zero, 2, 1), 2, 8), zero)


def test_the_rotation_helps_values_with_an_outlying_channel() -> None:
    v = torch.randn(1, 64, 64, generator=torch.Generator().manual_seed(2))
    v[..., 5] *= 30
    back = kvpages.rotate(kvpages.decode_values(*kvpages.encode_values(v, 4, 1), 4, 64))
    grouped = v.unflatten(-1, (1, -1))
    scale, low = kvpages.choose_range(grouped, 4, False)
    plain = (kvpages.quantize(grouped, scale, low, 4) * scale + low).flatten(-2)
    assert float((back - v).norm()) < 0.6 * float((plain - v).norm())


@pytest.mark.parametrize(
    ("bits", "keys", "values", "recent", "label"),
    [
        ("8", 8, 8, 64, 8),
        (4, 4, 4, 64, 4),
        ("k4v2", 4, 2, 64, "k4v2"),
        ("K2V2", 2, 2, 128, 2),
        ("fp8", 8, 8, 64, "fp8"),
    ],
)
def test_bits_are_read_as_the_command_line_gives_them(
    bits: int | str, keys: int, values: int, recent: int, label: int | str
) -> None:
    scheme = KVScheme.of(bits)
    assert (scheme.keys, scheme.values, scheme.recent, scheme.label) == (keys, values, recent, label)


@pytest.mark.parametrize("bad", ["5", "k4", "v2k4", "", "int4", "k4v5", -4, 4.0])
def test_other_bits_are_refused(bad: object) -> None:
    with pytest.raises(RequestError, match="16, 8, 4, 3, 2"):
        KVScheme.of(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "bad",
    [{"scales": "dynamic"}, {"group_size": 0}, {"recent": 0}, {"first": 64}, {"scales": "fp8", "keys": 4, "values": 4}],
)
def test_a_scheme_outside_its_range_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(RequestError):
        KVScheme(**bad)  # type: ignore[arg-type]


def test_a_plan_of_unequal_layers_says_their_average() -> None:
    plan = KVPlan(KVScheme.of(4), {"a": KVScheme.of("k4v2"), "b": KVScheme.of(2)})
    assert plan.label == "2.50 on average"
    assert plan.of("a").label == "k4v2"
    assert KVPlan(KVScheme.of(4), {"a": KVScheme.of(4)}).label == 4


def test_static_scales_that_cannot_be_right_are_refused() -> None:
    good = torch.ones(2, 8)
    for bad in (good.double(), good[0], good * torch.nan, good * 0):
        with pytest.raises(CheckpointError, match="k_scale"):
            LayerScales(bad, good, good, good)
