"""The kernels between a step's matrices agree with their definitions, in Triton's interpreter.

In a process of its own, as in test_triton.py.
"""

from __future__ import annotations

import pytest
import torch
from step_cases import check_pack, check_rotary, noise, packed_of, pages_of
from triton_cases import INTERPRETED, passes_in_the_interpreter

from quantkit.core.kvscheme import KVScheme
from quantkit.runtime.kernels import decode_reference
from quantkit.runtime.kernels.decode_reference import Heads

F32, BF16 = torch.float32, torch.bfloat16
CLOSE = {
    F32: dict(rtol=1e-5, atol=1e-5),
    BF16: dict(rtol=2.0**-6, atol=2.0**-7),
}  # the interpreter cuts off, not rounds

if not INTERPRETED:

    @pytest.mark.parametrize("chosen", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
    def test_in_the_interpreter(chosen: str) -> None:
        pytest.importorskip("triton")
        passes_in_the_interpreter(__file__, "-m", chosen)

else:

    @pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
    @pytest.mark.parametrize("kind", ["first", "added", "sandwich"])
    def test_an_addition_and_its_norm(kind: str, dtype: torch.dtype) -> None:
        from quantkit.runtime.kernels.triton.step import add_norm

        residual = noise(3, 200)
        delta = None if kind == "first" else noise(3, 230, seed=1).to(dtype)[:, :200]
        after = noise(200, seed=2) if kind == "sandwich" else None
        expected_sum = residual.clone()
        expected = decode_reference.add_norm(expected_sum, delta, after, noise(200, seed=3), 1e-5, dtype)
        found = add_norm(residual, delta, after, noise(200, seed=3), 1e-5, dtype)
        assert found.dtype == dtype
        torch.testing.assert_close(residual, expected_sum, **CLOSE[F32])
        torch.testing.assert_close(found, expected, **CLOSE[dtype])

    @pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
    def test_an_activation(act: str) -> None:
        from quantkit.runtime.kernels.triton.step import activated

        both = 3 * noise(3, 2500)
        torch.testing.assert_close(
            activated(both[:, :1250], both[:, 1250:], act),
            decode_reference.activated(both[:, :1250], both[:, 1250:], act),
            **CLOSE[F32],
        )

    @pytest.mark.parametrize(("dim", "width", "norm"), [(32, 32, True), (48, 24, False)], ids=["normed", "partial"])
    def test_rotary_and_the_cache_write(dim: int, width: int, norm: bool) -> None:
        check_rotary(dim, width, norm, F32, "cpu", CLOSE[F32])

    def test_nothing_is_written_where_there_is_no_sequence() -> None:
        from quantkit.runtime.kernels.triton.step import rotary_and_cache

        heads = Heads(2, 1, 16, 1.0)
        pages, stored = pages_of([0, 0], 5, heads, F32, "cpu")
        before = stored.keys.clone()
        pages.pads.fill_(-1)
        angles = noise(8, 16), noise(8, 16)
        rotary_and_cache(noise(2, 32), noise(2, 16), noise(2, 16), (None, None), angles, pages, heads, 1e-5)
        torch.testing.assert_close(stored.keys, before, rtol=0, atol=0, equal_nan=True)

    @pytest.mark.parametrize(
        ("length", "window", "dtype"),
        [(0, 0, F32), (63, 0, BF16), (300, 0, BF16), (300, 0, F32), (400, 100, F32)],
        ids=["one", "page", "long16", "long", "window"],
    )
    def test_attention_over_pages(length: int, window: int, dtype: torch.dtype) -> None:
        from quantkit.runtime.kernels.triton.attention import Workspace, attend

        heads = Heads(3, 1, 48, 48**-0.5)
        pages, stored = pages_of([0, min(length, 190)], length, heads, dtype, "cpu", window=window)
        q = noise(2, 3, 48, seed=1).to(dtype)
        expected = decode_reference.attend(q, pages, heads, stored)
        space = Workspace(2, heads, 4, q.device)
        assert space.parts == 4
        found = attend(q, pages, heads, space)
        torch.testing.assert_close(found, expected, **CLOSE[dtype])
        assert torch.equal(attend(q, pages, heads, space), found)
        assert not bool(space.lock.any())

    @pytest.mark.parametrize(
        ("bits", "dim", "length", "window", "dtype"),
        [
            (4, 48, 200, 0, F32), ("k4v2", 32, 200, 0, BF16), (4, 16, 260, 100, F32),
            *(pytest.param(*more, marks=pytest.mark.slow) for more in (
                (8, 48, 300, 0, F32), (3, 32, 300, 0, F32), (2, 64, 400, 0, F32), ("k16v4", 32, 200, 0, F32),
                ("k8v16", 32, 200, 0, F32), (4, 128, 300, 0, BF16), (4, 32, 130, 0, F32), (3, 64, 300, 0, BF16),
                (8, 64, 300, 0, BF16),
            )),
        ],
    )  # fmt: skip
    def test_attention_over_packed_pages(
        bits: int | str, dim: int, length: int, window: int, dtype: torch.dtype
    ) -> None:
        from quantkit.runtime.kernels.triton.attention import Workspace, attend

        heads = Heads(6, 2, dim, dim**-0.5)
        scheme = KVScheme.of(bits)
        pages, stored = packed_of([0, 70, -1], length, heads, dtype, "cpu", scheme, window=window)
        q = noise(3, 6, dim, seed=1).to(dtype)
        expected = decode_reference.attend(q, pages, heads, stored)
        space = Workspace(3, heads, 6, q.device, scheme.groups(dim))
        assert space.parts == 4
        found = attend(q, pages, heads, space)
        torch.testing.assert_close(found, expected, **CLOSE[dtype])
        assert torch.equal(attend(q, pages, heads, space), found)
        assert not bool(space.lock.any())

    @pytest.mark.parametrize(
        ("bits", "dim", "dtype"),
        [
            (4, 48, F32), (3, 16, F32),
            *(pytest.param(*more, marks=pytest.mark.slow) for more in (
                (8, 32, BF16), ("k4v2", 32, F32), (3, 32, F32), (2, 128, BF16), ("k16v4", 32, F32), ("k8v16", 32, F32),
            )),
        ],
    )  # fmt: skip
    def test_the_page_that_becomes_old_is_packed(bits: int | str, dim: int, dtype: torch.dtype) -> None:
        check_pack(KVScheme.of(bits), dim, dtype, "cpu")

    def test_attention_leaves_alone_what_is_no_sequence() -> None:
        from quantkit.runtime.kernels.triton.attention import Workspace, attend

        heads = Heads(2, 2, 16, 0.25)
        pages, stored = pages_of([-1, 3], 70, heads, F32, "cpu")
        q = noise(2, 2, 16)
        found = attend(q, pages, heads, Workspace(2, heads, 4, q.device))
        torch.testing.assert_close(found, decode_reference.attend(q, pages, heads, stored), **CLOSE[F32])
        assert not bool(found[0].any())
        assert bool(found[1].any())
