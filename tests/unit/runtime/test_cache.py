"""The paged cache: what is appended is what is read.

Packed pages are what the numbers say, in the bytes that the formula says.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantkit.core.kvpages import decode_keys, decode_values, encode_keys, encode_values, rotate
from quantkit.core.kvscheme import PAGE_TOKENS, KVPlan, KVScheme, LayerScales
from quantkit.errors import CheckpointError, RequestError
from quantkit.runtime.kv_cache.cache import KVCache
from quantkit.runtime.kv_cache.paged_layer import LayerSpec, PagedLayer, layer_spec
from quantkit.runtime.kv_cache.reserve_ahead import commit, reserve_ahead
from quantkit.runtime.kv_cache.sequences import fork, park, truncate, unpark

CPU = torch.device("cpu")
HEADS, DIM = 2, 16


def layer(bits: int | str = 16, window: int | None = None, capacity: int = 0) -> PagedLayer:
    return PagedLayer(layer_spec(KVScheme.of(bits), None, torch.float32, CPU, window), capacity)


def states(batch: int, tokens: int, dim: int = DIM, seed: int = 0) -> tuple[Tensor, Tensor]:
    k, v = torch.randn(2, batch, HEADS, tokens, dim, generator=torch.Generator().manual_seed(seed))
    k[..., 3] += 5.0  # a channel unlike the others
    k[:, :, :4] *= 3.0  # sinks
    return k, v


def fill(cache: PagedLayer, k: Tensor, v: Tensor, steps: list[int]) -> None:
    for part_k, part_v in zip(k.split(steps, 2), v.split(steps, 2), strict=True):
        cache.append(part_k, part_v)
        cache.trim()


def expected(k: Tensor, v: Tensor, scheme: KVScheme, packed: int) -> tuple[Tensor, Tensor]:
    """One sequence ``[heads, tokens, dim]`` with so many packed pages, page by page from the definition."""
    k, v = k.clone(), v.clone()
    for page in range(packed):
        part = slice(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS)
        skip = scheme.first if page == 0 else 0
        keys, values = k[:, part].clone(), v[:, part].clone()
        if scheme.keys < 16:
            k[:, part] = decode_keys(*encode_keys(keys, scheme.keys, skip), scheme.keys)
        if scheme.values < 16:
            stored = encode_values(values, scheme.values, scheme.groups(v.shape[-1]))
            v[:, part] = rotate(decode_values(*stored, scheme.values, v.shape[-1]))
        k[:, part][:, :skip], v[:, part][:, :skip] = keys[:, :skip], values[:, :skip]
    return k, v


@pytest.mark.parametrize("bits", [16, 8, 4, 3, 2, "k4v2", "k16v4", "k8v16"])
@pytest.mark.parametrize("dim", [7, 96])
@pytest.mark.parametrize("steps", [[200], [1] * 70 + [130], [63, 1, 1, 64, 65, 6]])
def test_pages_older_than_the_newest_tokens_are_packed_and_all_others_exact(
    bits: int | str, dim: int, steps: list[int]
) -> None:
    cache = layer(bits)
    k, v = states(3, 200, dim)
    fill(cache, k, v, steps)
    scheme = cache.spec.scheme
    packed = (200 + 1 - scheme.recent) // PAGE_TOKENS if scheme.quantized else 0
    assert [row.packed for row in cache.sequences] == [packed] * 3
    keys, values = cache.read()
    for b in range(3):
        for found, wanted in zip((keys[b], values[b]), expected(k[b], v[b], scheme, packed), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    bits=st.sampled_from([16, 4, 2]),
    window=st.sampled_from([None, 100]),
    chunk=st.sampled_from([64, 130]),
)
def test_what_a_sequence_gives_does_not_depend_on_its_batch(
    lengths: list[int], bits: int, window: int | None, chunk: int
) -> None:
    longest = max(lengths)
    k, v = states(len(lengths), longest)  # the last lengths[b] tokens of each are real
    together = layer(bits, window)
    for first in range(0, longest, chunk):
        last = min(first + chunk, longest)
        together.expect([max(0, min(last - first, last - longest + n)) for n in lengths], last - first)
        together.append(k[:, :, first:last], v[:, :, first:last])
        together.trim()
    together.append(k[:, :, :1], v[:, :, :1])
    keys, values = together.read()
    for b, n in enumerate(lengths):
        alone = layer(bits, window)
        for first in range(longest % chunk - chunk if longest % chunk else 0, longest, chunk):
            begin, end = max(first, longest - n), first + chunk
            begin, end = max(begin, 0), min(end, longest)
            if begin < end:
                alone.append(k[b : b + 1, :, begin:end], v[b : b + 1, :, begin:end])
                alone.trim()
        alone.append(k[b : b + 1, :, :1], v[b : b + 1, :, :1])
        for found, wanted in zip((keys, values), alone.read(), strict=True):
            kept = min(found.shape[2], wanted.shape[2])
            assert kept >= min(n + 1, window or n + 1)
            torch.testing.assert_close(found[b, :, -kept:], wanted[0, :, -kept:], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bits", [16, 8, 4, 3, 2, "k4v2"])
def test_measured_bytes_are_the_formula(bits: int | str) -> None:
    cache = KVCache([layer(bits).spec] * 3, capacity=500)
    scheme = KVScheme.of(bits)
    for one in cache.layers:
        fill(one, *states(4, 1000), [500, 500])
    formula = 3 * 4 * scheme.cache_bytes(1000, HEADS, DIM, torch.float32)
    assert cache.nbytes() == formula == 4 * cache.sequence_bytes(1000)
    packed = 1000 * 3 * 4 * scheme.bytes_per_token(HEADS, DIM, torch.float32)
    tail = 3 * 4 * (scheme.recent + PAGE_TOKENS) * 2 * HEADS * DIM * 4 if scheme.quantized else 0
    assert packed <= cache.nbytes() + PAGE_TOKENS * packed / 1000
    assert cache.nbytes() <= packed * 1.05 + tail + 3 * 4 * PAGE_TOKENS * 2 * HEADS * DIM * 4
    assert sum(f.nbytes for one in cache.layers for f in one.pool().fields.values()) <= cache.reserved_bytes()


def test_four_bits_with_groups_of_64_take_the_share_that_is_promised() -> None:
    assert KVScheme.of(4).bytes_per_token(8, 128, torch.bfloat16) / (2 * 8 * 128 * 2) == 4.5 / 16


def test_a_sliding_window_frees_the_pages_it_has_left() -> None:
    for bits in (16, 4):
        cache = layer(bits, window=100)
        k, v = states(2, 700)
        fill(cache, k, v, [1] * 200 + [250, 250])
        assert cache.start == (700 - 99) // 64 * 64
        keys, _ = cache.read()
        assert keys.shape[2] == 700 - cache.start
        torch.testing.assert_close(keys[:, :, -60:], k[:, :, -60:])
        pools = [pool for pool in (cache.exact, cache.packed) if pool is not None]
        assert sum(pool.in_use() for pool in pools) == sum(
            len(row.exact_pages) + len(row.packed_pages) for row in cache.sequences
        )


def test_select_keeps_sequences_and_frees_the_pages_of_the_others() -> None:
    cache = layer(4)
    k, v = states(3, 200)
    fill(cache, k, v, [200])
    before, used = cache.read(), cache.nbytes()
    cache.select([2, 0])
    for old, new in zip(before, cache.read(), strict=True):
        assert torch.equal(old[[2, 0]], new)
    assert cache.nbytes() == used // 3 * 2


@pytest.mark.parametrize("bits", [16, 4])
def test_a_fork_shares_full_pages_and_writes_into_its_own(bits: int) -> None:
    cache = layer(bits)
    fill(cache, *states(1, 300), [300])
    used, before, row = cache.nbytes(), cache.read(), cache.sequences[0]
    assert row.packed == (3 if bits == 4 else 0)
    twins = fork(cache, [0, 0, 0])
    more = states(3, 100, seed=1)
    fill(twins, *more, [100])
    for old, new in zip(before, cache.read(), strict=True):
        assert torch.equal(old, new)
    for b in range(3):
        alone = layer(bits)
        fill(alone, *states(1, 300), [300])
        fill(alone, more[0][b : b + 1], more[1][b : b + 1], [100])
        for found, wanted in zip(twins.read(), alone.read(), strict=True):
            assert torch.equal(found[b], wanted[0])
    for twin in twins.sequences:
        assert twin.packed_pages[: row.packed] == row.packed_pages
        assert set(row.exact_pages[:-1]) & set(twin.exact_pages) or bits == 4
    assert cache.nbytes() == used


@pytest.mark.parametrize("bits", [16, 4, 2])
def test_tokens_of_the_tail_are_taken_back_without_a_trace(bits: int) -> None:
    cache, k, v = layer(bits), *states(2, 260)
    fill(cache, k[:, :, :220], v[:, :, :220], [220])
    before = cache.read()
    fill(cache, *states(2, 20, seed=3), [20])
    truncate(cache, [220, 220])
    for old, new in zip(before, cache.read(), strict=True):
        assert torch.equal(old, new)
    fill(cache, k[:, :, 220:], v[:, :, 220:], [40])
    straight = layer(bits)
    fill(straight, k, v, [220, 40])
    for found, wanted in zip(cache.read(), straight.read(), strict=True):
        torch.testing.assert_close(found, wanted)


def test_taking_back_beyond_the_tail_opens_a_packed_page_with_what_it_held() -> None:
    cache, k, v = layer(4), *states(2, 300)
    fill(cache, k, v, [300])
    before = cache.read()
    truncate(cache, [100, 30])
    keys, values = cache.read()
    assert cache.lengths == [100, 30]
    for found, old in ((keys, before[0]), (values, before[1])):
        torch.testing.assert_close(found[0], old[0, :, :100])
        torch.testing.assert_close(found[1, :, 70:], old[1, :, :30])
    pools = cache.pool(), cache.packed
    assert [pool.in_use() for pool in pools if pool is not None] == [2, 1]


def test_a_window_refuses_to_go_back_to_what_it_has_dropped() -> None:
    cache = layer(4, window=100)
    fill(cache, *states(1, 600), [200, 200, 200])
    with pytest.raises(RequestError, match="sliding window of 100"):
        truncate(cache, [500])


@pytest.mark.parametrize("bits", [16, 4])
def test_a_parked_sequence_comes_back_as_it_was(bits: int) -> None:
    cache = KVCache([layer(bits).spec] * 2)
    for one in cache.layers:
        fill(one, *states(3, 200), [200])
    before = [one.read() for one in cache.layers]
    free = [one.pool().in_use() for one in cache.layers]
    parked = cache.park(1)
    assert all(one.pool().in_use() < n for one, n in zip(cache.layers, free, strict=True))
    cache.unpark(parked)
    for one, old in zip(cache.layers, before, strict=True):
        for found, wanted in zip(one.read(), old, strict=True):
            assert torch.equal(found, wanted[[0, 2, 1]])
    assert park(cache.layers[0], 2).sequence.length == 200
    unpark(cache.layers[0], park(cache.layers[0], 0))
    assert cache.layers[0].batch == 4


def test_static_scales_are_used_and_their_absence_is_refused() -> None:
    ones = torch.ones(HEADS, DIM)
    found = LayerScales(ones * 0.5, ones * -4, ones * 0.25, ones * -2)
    spec = layer_spec(KVScheme.of(4, "static"), found, torch.float32, CPU, None)
    cache = PagedLayer(spec)
    k, v = states(1, 128)
    fill(cache, k, v, [128])
    keys, values = cache.read()
    inside = k[0, :, 4:64].clamp(-4, 3.5)
    torch.testing.assert_close(keys[0, :, 4:64], ((inside + 4) / 0.5).round() * 0.5 - 4)
    turned = rotate(v[0, :, 4:64]).clamp(-2, 1.75)
    torch.testing.assert_close(
        rotate(values[0, :, 4:64]), ((turned + 2) / 0.25).round() * 0.25 - 2, rtol=1e-5, atol=1e-5
    )
    with pytest.raises(RequestError, match="no calibrated scales"):
        layer_spec(KVScheme.of(4, "static"), None, torch.float32, CPU, None)
    with pytest.raises(
        CheckpointError, match=rf"for \[{HEADS}, {DIM}\] heads and channels, this model caches \[{HEADS}, 8\]"
    ):
        PagedLayer(spec).append(k[..., :8], v[..., :8])


def test_fp8_rounds_to_three_bits_of_mantissa() -> None:
    ones = torch.ones(HEADS, DIM)
    spec = layer_spec(KVScheme.of("fp8"), LayerScales(ones, ones * 0, ones, ones * 0), torch.float32, CPU, None)
    cache = PagedLayer(spec)
    k, v = states(1, 128)
    fill(cache, k, v, [128])
    keys, _ = cache.read()
    assert torch.equal(keys[0, :, 4:64], k[0, :, 4:64].to(torch.float8_e4m3fn).float())


def test_an_fp8_cache_read_as_other_engines_do_keeps_no_token_exact() -> None:
    ones = torch.ones(HEADS, DIM)
    plan = KVPlan(KVScheme.of("fp8")).rounded_at_once()
    cache = PagedLayer(layer_spec(plan.scheme, LayerScales(ones, ones * 0, ones, ones * 0), torch.float32, CPU, None))
    k, v = states(1, 130)
    fill(cache, k, v, [70, *[1] * 60])  # a page that is packed, and the beginning of the next
    for read, x in zip(cache.read(), (k, v), strict=True):
        assert torch.equal(read, x.to(torch.float8_e4m3fn).float())
    with pytest.raises(RequestError, match="Add --kv-bits fp8"):
        KVPlan(KVScheme.of(4)).rounded_at_once()


@pytest.mark.parametrize("bits", [16, 4, 2])
@pytest.mark.parametrize("window", [None, 70, 200])
@pytest.mark.parametrize("begin", [[3, 90], [200, 130]])
def test_leased_pages_hold_what_single_steps_would(bits: int, window: int | None, begin: list[int]) -> None:
    """A kernel that goes ahead, as ``reserve_ahead`` asks it to: it packs, then writes, by page numbers alone."""
    steps, longest = 150, max(begin)
    k, v = states(2, longest + steps)
    caches = [layer(bits, window) for _ in range(2)]
    for cache in caches:
        cache.expect(begin, longest)
        cache.append(k[:, :, :longest], v[:, :, :longest])
        cache.trim()
    single, ahead = caches
    before = [row.packed for row in ahead.sequences]
    tables = reserve_ahead(ahead, [n + steps for n in begin])
    for i in range(steps):
        new = k[:, :, longest + i, None], v[:, :, longest + i, None]
        single.append(*new)
        single.trim()
        for b, n in enumerate(begin):
            _step_by_table(ahead, b, n + i, before[b], tables, (new[0][b, :, 0], new[1][b, :, 0]))
    commit(ahead, [n + steps for n in begin])
    assert ahead.lengths == single.lengths
    assert [(r.packed, r.dropped) for r in ahead.sequences] == [(r.packed, r.dropped) for r in single.sequences]
    for found, wanted in zip(ahead.read(), single.read(), strict=True):
        torch.testing.assert_close(found, wanted)
    pools = [pool for pool in (ahead.exact, ahead.packed) if pool is not None]
    assert sum(p.in_use() for p in pools) == sum(len(r.exact_pages) + len(r.packed_pages) for r in ahead.sequences)


def _step_by_table(
    cache: PagedLayer, b: int, n: int, before: int, tables: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]
) -> None:
    exact, packing = cache.pool(), cache.spec.packing
    if packing is not None and cache.packed is not None:
        page, at_end = divmod(n + 1 - packing.scheme.recent, PAGE_TOKENS)
        if at_end == 0 and page > before:
            source, target = int(tables[0][b, page - 1]), int(tables[1][b, page - 1])
            k, v = (exact.fields[name][[source]] for name in ("keys", "values"))
            for name, x in packing.encode(k, v, packing.scheme.first if page == 1 else 0).items():
                cache.packed.fields[name][target] = x[0]
    if cache.first is not None and n < cache.spec.scheme.first:
        cache.first[0][b, :, n], cache.first[1][b, :, n] = new
    page = int(tables[0][b, n // PAGE_TOKENS])
    exact.fields["keys"][page, :, n % PAGE_TOKENS], exact.fields["values"][page, :, n % PAGE_TOKENS] = new


def test_an_empty_layer_has_no_pages() -> None:
    with pytest.raises(RequestError, match="holds nothing"):
        PagedLayer(LayerSpec(torch.float32)).nbytes()


@pytest.mark.parametrize("bits", [16, 4])
def test_taking_back_into_a_shared_page_leaves_the_other_sequence_alone(bits: int) -> None:
    cache = layer(bits)
    fill(cache, *states(1, 128), [128])
    before, twin = cache.read(), fork(cache, [0])
    truncate(twin, [120])
    fill(twin, *states(1, 4, seed=9), [4])
    for old, new in zip(before, cache.read(), strict=True):
        assert torch.equal(old, new)
    assert cache.pool().in_use() == len({*cache.sequences[0].exact_pages, *twin.sequences[0].exact_pages})


@pytest.mark.parametrize(("bits", "window"), [(4, None), (4, 70), (2, 200), (16, 70)])
def test_leased_pages_that_come_round_belong_to_one_sequence(bits: int, window: int | None) -> None:
    """Sequences that share their beginning, each going on by other tokens, a step at a time by page numbers alone."""
    begin = layer(bits, window)
    fill(begin, *states(1, 192), [192])
    single, ahead = fork(begin, [0, 0]), fork(begin, [0, 0])
    before = [row.packed for row in ahead.sequences]
    tables = reserve_ahead(ahead, [192 + 200] * 2)
    k, v = states(2, 200, seed=4)
    for i in range(200):
        new = k[:, :, i, None], v[:, :, i, None]
        single.append(*new)
        single.trim()
        for b in range(2):
            _step_by_table(ahead, b, 192 + i, before[b], tables, (new[0][b, :, 0], new[1][b, :, 0]))
    commit(ahead, [192 + 200] * 2)
    for found, wanted in zip(ahead.read(), single.read(), strict=True):
        torch.testing.assert_close(found, wanted)


def test_a_cache_that_cannot_be_taken_back_is_unchanged_in_every_layer() -> None:
    cache = KVCache([layer(16).spec, layer(16, window=100).spec])
    for one in cache.layers:
        fill(one, *states(1, 600), [600])
    with pytest.raises(RequestError, match="sliding window of 100"):
        cache.truncate([500])
    assert [one.lengths for one in cache.layers] == [[600], [600]]


@pytest.mark.parametrize(("bits", "window"), [(16, None), (16, 100), (4, None), (2, 100)])
def test_what_a_long_step_needed_is_given_back(bits: int, window: int | None) -> None:
    cache = layer(bits, window, capacity=600)
    fill(cache, *states(2, 600), [600])
    before, exact = cache.read(), cache.pool()
    assert (exact.pages > exact.in_use() + 2) == (bits < 16 or window is not None)
    cache.compact()
    for old, new in zip(before, cache.read(), strict=True):
        assert torch.equal(old, new)
    assert exact.pages <= exact.in_use() + 2
    twins = fork(cache, [0, 1])
    fill(cache, *states(2, 100, seed=1), [100])
    pages = exact.pages
    cache.compact()  # the pages of the twins keep their numbers
    assert exact.pages == pages
    for old, new in zip(before, twins.read(), strict=True):
        assert torch.equal(old, new)


def test_a_fork_has_packed_pages_for_all_that_its_sequences_may_become() -> None:
    cache = layer(4, capacity=1000)
    fill(cache, *states(1, 512), [512])
    twins = fork(cache, [0, 0, 0])
    assert twins.packed is not None
    pages = twins.packed.pages
    for step in range(8):
        fill(twins, *states(3, 61, seed=step), [61])
    assert twins.packed.pages == pages
