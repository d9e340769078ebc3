"""The paged cache: what is appended is what is read, in the bytes that the formula says."""

from __future__ import annotations

import pytest
import torch

from quantkit.core.kvscheme import KVScheme, LayerScales, kv_dequantize, kv_quantize
from quantkit.errors import RequestError
from quantkit.runtime.cache import IntCodec, KVCache, LayerSpec, PagedLayer, PlainCodec, layer_spec

CPU = torch.device("cpu")


def scales(heads: int, dim: int, bits: int) -> LayerScales:
    one = torch.full((heads, 1), 6.0 / (1 << bits))
    zero = torch.full((heads, 1), float(1 << (bits - 1)))
    return LayerScales(one, zero, one * 1.1, zero, dim)


def layer(bits: int, heads: int, dim: int, window: int | None = None, capacity: int = 0) -> PagedLayer:
    found = scales(heads, dim, bits) if bits < 16 else None
    return PagedLayer(layer_spec(found, bits, torch.float32, CPU, window), capacity)


def states(batch: int, heads: int, tokens: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    k, v = torch.randn(2, batch, tokens, heads, dim, generator=generator).transpose(2, 3)
    return k, v


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("dim", [16, 7])
@pytest.mark.parametrize("steps", [[200], [1] * 70, [63, 1, 1, 64, 65, 3]])
def test_read_returns_what_was_appended_after_its_rounding(bits: int, dim: int, steps: list[int]) -> None:
    cache = layer(bits, 2, dim)
    k, v = states(3, 2, sum(steps), dim)
    for part_k, part_v in zip(k.split(steps, 2), v.split(steps, 2), strict=True):
        cache.append(part_k, part_v)
    keys, values = cache.read()
    if bits == 16:
        assert torch.equal(keys, k)
        assert torch.equal(values, v)
        return
    found = scales(2, dim, bits)
    assert torch.equal(
        keys, kv_dequantize(kv_quantize(k, found.k_scale, found.k_zero, 1 << bits), found.k_scale, found.k_zero)
    )
    assert torch.equal(
        values, kv_dequantize(kv_quantize(v, found.v_scale, found.v_zero, 1 << bits), found.v_scale, found.v_zero)
    )


@pytest.mark.parametrize(("bits", "token_bytes"), [(16, 2 * 2 * 16 * 4), (8, 2 * 2 * 16), (4, 2 * 2 * 8)])
def test_measured_bytes_are_the_formula(bits: int, token_bytes: int) -> None:
    cache = KVCache([layer(bits, 2, 16).spec] * 3, capacity=130)
    for one in cache.layers:
        one.append(*states(4, 2, 100, 16))
    assert KVScheme(bits).bytes_per_token(2, 16, torch.float32) == token_bytes
    assert cache.nbytes() == 3 * 4 * 128 * token_bytes  # 100 tokens lie in 2 pages
    assert cache.reserved_bytes() == 3 * 4 * 192 * token_bytes  # 130 tokens were asked for


def test_two_codes_share_a_byte_even_channel_low() -> None:
    codec = IntCodec(4, torch.ones(1, 1), torch.zeros(1, 1), torch.float32)
    stored = codec.encode(torch.tensor([[[[1.0, 2.0, 15.0, 7.0, 9.0]]]]))
    assert stored.flatten().tolist() == [0x21, 0x7F, 0x09]


def test_a_sliding_window_frees_the_pages_it_has_left() -> None:
    cache = layer(8, 2, 16, window=80)
    k, v = states(2, 2, 500, 16)
    whole = layer(8, 2, 16)
    whole.append(k, v)
    for at in range(0, 500, 10):
        cache.append(k[:, :, at : at + 10], v[:, :, at : at + 10])
        keys, _ = cache.read()
        assert cache.start <= max(0, at - 79)  # the first token of this step still sees its window
        assert torch.equal(keys, whole.read()[0][:, :, cache.start : at + 10])
        cache.trim()
    assert cache.length == 500
    assert cache.table.shape[1] == 2
    assert cache.key_pool.shape[0] <= 2 * 4  # pages are used again


def test_select_keeps_sequences_and_frees_the_pages_of_the_others() -> None:
    cache = layer(4, 2, 16)
    k, v = states(3, 2, 70, 16)
    cache.append(k, v)
    before = cache.read()[0]
    cache.select(torch.tensor([2, 0]))
    assert torch.equal(cache.read()[0], before[[2, 0]])
    assert cache.nbytes() == 2 * 2 * cache.page_bytes()
    pool = cache.key_pool.shape[0]
    more = states(2, 2, 64, 16)
    cache.append(*more)
    assert cache.key_pool.shape[0] == pool  # the freed pages were enough
    assert torch.equal(cache.read()[0][:, :, :70], before[[2, 0]])


def test_a_quantized_layer_without_scales_is_refused() -> None:
    with pytest.raises(RequestError, match="calibrated"):
        layer_spec(None, 4, torch.float32, CPU, None)


@pytest.mark.parametrize("window", [None, 1, 64, 65, 70, 200])
@pytest.mark.parametrize("stops", [(1, 2), (100, 101), (130, 400), (255, 256, 600)], ids=str)
def test_leased_pages_hold_what_single_steps_would(window: int | None, stops: tuple[int, ...]) -> None:
    """A kernel that writes through the lease leaves the cache as appending does: what is read, and how many pages are held."""
    spec = LayerSpec(PlainCodec(torch.float32), PlainCodec(torch.float32), window)
    known, leased = PagedLayer(spec, 0), PagedLayer(spec, 0)
    tokens = (
        torch.arange(700.0)[None, None, :, None].expand(2, 1, 700, 2) + torch.tensor([0.0, 1000.0])[:, None, None, None]
    )
    for layer in (known, leased):
        layer.append(tokens[:, :, : stops[0]], -tokens[:, :, : stops[0]])
        layer.trim()
    for stop in stops[1:]:
        for at in range(known.length, stop):
            known.append(tokens[:, :, at : at + 1], -tokens[:, :, at : at + 1])
            known.trim()
        table = leased.lease(stop + 90)  # more than is needed
        for at in range(leased.length, stop):
            page = table[:, at // 64 - leased.dropped]
            leased.key_pool[page, :, at % 64] = tokens[:, :, at]
            leased.value_pool[page, :, at % 64] = -tokens[:, :, at]
        assert leased.nbytes(stop) == known.nbytes()
        leased.settle(stop)
        assert (leased.length, leased.dropped) == (known.length, known.dropped)
        assert leased.nbytes() == known.nbytes()
        for found, expected in zip(leased.read(), known.read(), strict=True):
            assert torch.equal(found, expected)
        held = leased.table.flatten().tolist() + leased._free
        assert sorted(held) == list(range(len(leased.key_pool)))  # every page is in use once, or free
    leased.select(torch.tensor([1]))
    assert torch.equal(leased.read()[0], known.read()[0][1:])
