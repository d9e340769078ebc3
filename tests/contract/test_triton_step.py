"""The kernels between a step's matrices agree with their definitions, in Triton's interpreter; in a process of its own, as in test_triton.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from step_cases import check_rotary, noise, pages_of
from triton_cases import INTERPRETED, passes_in_the_interpreter

from quantkit.runtime.kernels import step
from quantkit.runtime.kernels.step import Heads

F32, BF16 = torch.float32, torch.bfloat16
CLOSE = {
    F32: dict(rtol=1e-5, atol=1e-5),
    BF16: dict(rtol=2.0**-6, atol=2.0**-7),
}  # the interpreter cuts off, not rounds

if not INTERPRETED:

    def test_in_the_interpreter() -> None:
        pytest.importorskip("triton")
        passes_in_the_interpreter(__file__)

else:

    @pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
    @pytest.mark.parametrize("kind", ["first", "added", "sandwich"])
    def test_an_addition_and_its_norm(kind: str, dtype: torch.dtype) -> None:
        from quantkit.runtime.kernels.triton_step import add_norm

        residual = noise(3, 200)
        delta = None if kind == "first" else noise(3, 230, seed=1).to(dtype)[:, :200]
        after = noise(200, seed=2) if kind == "sandwich" else None
        expected_sum = residual.clone()
        expected = step.add_norm(expected_sum, delta, after, noise(200, seed=3), 1e-5, dtype)
        found = add_norm(residual, delta, after, noise(200, seed=3), 1e-5, dtype)
        assert found.dtype == dtype
        torch.testing.assert_close(residual, expected_sum, **CLOSE[F32])
        torch.testing.assert_close(found, expected, **CLOSE[dtype])

    @pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
    def test_an_activation(act: str) -> None:
        from quantkit.runtime.kernels.triton_step import activated

        both = 3 * noise(3, 2500)
        torch.testing.assert_close(
            activated(both[:, :1250], both[:, 1250:], act),
            step.activated(both[:, :1250], both[:, 1250:], act),
            **CLOSE[F32],
        )

    @pytest.mark.parametrize("bits", [16, 8, 4])
    @pytest.mark.parametrize(("dim", "width", "norm"), [(32, 32, True), (48, 24, False)], ids=["normed", "partial"])
    def test_rotary_and_the_cache_write(bits: int, dim: int, width: int, norm: bool) -> None:
        check_rotary(dim, width, norm, bits, F32, "cpu", CLOSE[F32])

    def test_nothing_is_written_where_there_is_no_sequence() -> None:
        from quantkit.runtime.kernels.triton_step import rotary_and_cache

        heads = Heads(2, 1, 16, 1.0)
        pages, pools = pages_of([0, 0], 5, heads, F32, "cpu")
        before = pools[0].clone()
        pages.pads.fill_(-1)
        angles = noise(8, 16), noise(8, 16)
        rotary_and_cache(noise(2, 32), noise(2, 16), noise(2, 16), (None, None), angles, pages, heads, 1e-5)
        assert torch.equal(pools[0], before)

    @pytest.mark.parametrize(
        ("length", "window", "start", "bits", "dtype"),
        [(0, 0, 0, 16, F32), (63, 0, 0, 4, BF16), (300, 0, 0, 16, BF16), (300, 0, 0, 8, F32), (300, 0, 0, 4, F32), (400, 100, 4, 16, F32)],
        ids=["one", "page", "long", "long8", "long4", "window"],
    )  # fmt: skip
    def test_attention_over_pages(length: int, window: int, start: int, bits: int, dtype: torch.dtype) -> None:
        from quantkit.runtime.kernels.triton_attention import Workspace, attend

        heads = Heads(3, 1, 48, 48**-0.5)
        pages, pools = pages_of(
            [0, min(length, 190)], length, heads, dtype, "cpu", window=window, bits=bits, start=start
        )
        q = noise(2, 3, 48, seed=1).to(dtype)
        expected = step.attend(q, pages, heads, pools)
        space = Workspace(2, heads, 4, q.device)
        assert space.parts == 4
        found = attend(q, pages, heads, space)
        close = CLOSE[F32] if dtype == F32 else dict(rtol=2.0**-6, atol=2.0**-5)  # values up to 8, in bf16, that cancel
        torch.testing.assert_close(found, expected, **close)
        assert torch.equal(attend(q, pages, heads, space), found)
        assert not bool(space.lock.any())

    def test_attention_leaves_alone_what_is_no_sequence() -> None:
        from quantkit.runtime.kernels.triton_attention import Workspace, attend

        heads = Heads(2, 2, 16, 0.25)
        pages, pools = pages_of([-1, 3], 70, heads, F32, "cpu")
        q = noise(2, 2, 16)
        found = attend(q, pages, heads, Workspace(2, heads, 4, q.device))
        alone = replace(pages, pads=pages.pads[1:], table=pages.table[1:])
        torch.testing.assert_close(found[1:], step.attend(q[1:], alone, heads, pools), **CLOSE[F32])
        assert not bool(found[0].any())
