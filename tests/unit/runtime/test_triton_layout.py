"""The layout of the Triton kernels holds every weight exactly, in about the bits it should take."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton_cases import looked_up

from quantkit.core import affine
from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.runtime.kernels.reference import PackedWeight, linear_dequantize
from quantkit.runtime.kernels.triton.layout import TritonWeight, brick_span, join_rows, triton_fits

SCHEMES = [
    Scheme(bits, group, symmetric, dtype)
    for bits, dtype in ((2, "float16"), (3, "bfloat16"), (4, "float16"), (5, "float16"), (8, "bfloat16"))
    for group in (32, 64, 96, 128, 256, None)
    for symmetric in (True, False)
]


def quantized(scheme: Scheme, shape: tuple[int, int], seed: int = 0) -> QuantTensor:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + (0.0 if scheme.symmetric else 0.7)
    scales, zeros = affine.minmax_params(weight, scheme)
    if zeros is not None:
        zeros[0, 0], zeros[-1, -1] = scheme.levels, 0  # both ends of what is allowed
    return QuantTensor(affine.quantize(weight, scales, zeros, scheme), scales, zeros, scheme)


@pytest.mark.parametrize("scheme", SCHEMES, ids=Scheme.describe)
@pytest.mark.parametrize("shape", [(64, 512), (30, 70), (130, 576), (1, 1000)], ids=str)
def test_the_layout_gives_back_every_weight_exactly(scheme: Scheme, shape: tuple[int, int]) -> None:
    q = quantized(scheme, shape)
    packed = TritonWeight(q)
    expected = q.dequantize()
    assert torch.equal(packed.dequantize(), expected)
    chosen = torch.tensor([shape[0] - 1, 0, shape[0] // 2])
    assert torch.equal(packed.rows(chosen, torch.float32), expected[chosen])


def test_a_word_holds_its_codes_as_drawn() -> None:
    scheme = Scheme(4, None)
    codes = torch.arange(64 * 128).remainder(16).to(torch.uint8).view(64, 128)
    codes = (codes + torch.arange(64)[:, None].to(torch.uint8)) % 16
    packed = TritonWeight(QuantTensor(codes, torch.ones(64, 1, dtype=torch.float16), None, scheme))
    word = int(packed.words[0, 0, 5, 3])  # row 5, word 3 of 16
    assert [(word >> 4 * plane) & 15 for plane in range(8)] == [int(codes[5, 16 * plane + 3]) for plane in range(8)]


def test_groups_that_cross_planes_are_not_taken() -> None:
    assert not triton_fits(Scheme(4, 40), 160)
    assert triton_fits(Scheme(4, 40), 40)  # one group
    with pytest.raises(ValueError, match="borders of bricks"):
        TritonWeight(quantized(Scheme(4, 40), (8, 160)))


def test_bricks_are_wide_where_little_is_padded() -> None:
    assert brick_span(Scheme(4, 128), 4096) == 512
    assert brick_span(Scheme(4, 128), 11008) == 512  # 2.3% of padding
    assert brick_span(Scheme(4, 128), 576) == 128  # 640 instead of 1024
    assert brick_span(Scheme(4, 32), 4096) == 256
    assert brick_span(Scheme(8, 32), 4096) == 32
    assert brick_span(Scheme(8, None), 4096) == 128
    q = quantized(Scheme(4, 128, False), (128, 1024))
    assert TritonWeight(q).nbytes() * 8 / q.codes.numel() == 4 + (16 + 8) / 128


def test_rows_of_one_scheme_are_joined_and_others_refused() -> None:
    one, two = quantized(Scheme(4, 64, False), (64, 128)), quantized(Scheme(4, 64, False), (64, 128), 1)
    both = TritonWeight(join_rows([one, two]), pair=64)
    assert torch.equal(both.dequantize(), torch.cat([one.dequantize(), two.dequantize()]))
    with pytest.raises(ValueError, match="one scheme"):
        join_rows([one, quantized(Scheme(4, 64), (64, 128))])
    with pytest.raises(ValueError, match="pair=32"):
        TritonWeight(join_rows([one, two]), pair=32)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize(("shape", "group"), [((70, 192), 64), ((64, 1024), 64), ((5, 256), 128), ((130, 70), None)])
def test_numbers_of_a_table_come_back_exactly(kind: str, shape: tuple[int, int], group: int | None) -> None:
    q = looked_up(kind, shape, group)
    packed = TritonWeight(q)
    assert packed.table == kind
    assert torch.equal(packed.dequantize(), q.dequantize())
    assert torch.equal(packed.rows(torch.tensor([shape[0] - 1, 0]), torch.float32), q.dequantize()[[-1, 0]])


def test_a_table_that_no_kernel_knows_is_not_taken() -> None:
    q = looked_up("nf4", (64, 128), 64)
    with pytest.raises(ValueError, match="NF4 and FP4"):
        TritonWeight(replace(q, table=q.table * 2))


def test_threads_take_turns_with_the_scratch_of_a_gpu() -> None:
    """One buffer for all of them: what a thread dequantized must be multiplied before another one overwrites it."""

    class Shared(PackedWeight):
        layout = "words"
        turn, scratch = threading.Lock(), torch.empty(64, 256)

        def __init__(self, value: float) -> None:
            super().__init__(256, 64)
            self.register_buffer("value", torch.tensor(value))

        def alone(self) -> Any:
            return self.turn

        def columns(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
            found = self.scratch[:, : stop - start].fill_(float(self.get_buffer("value")))
            time.sleep(0.002)
            return found

    def wrong(value: float) -> int:
        weight, x = Shared(value), torch.ones(2, 64)
        results = [linear_dequantize(x, weight, None) for _ in range(8)] + [weight.dequantize() * 64 for _ in range(8)]
        return sum(not bool((y == 64 * value).all()) for y in results)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(wrong, [1.0, 2.0])) == [0, 0]


def test_all_weights_on_a_gpu_wait_for_one_another() -> None:
    weights = [TritonWeight(quantized(Scheme(4, 128), (64, 512))) for _ in range(2)]
    assert isinstance(weights[0].alone(), nullcontext)
    for weight in weights:
        weight.__dict__["bricks"] = SimpleNamespace(is_cuda=True)
    assert weights[0].alone() is weights[1].alone()
    with weights[0].alone():
        assert not weights[1].alone().acquire(blocking=False)  # type: ignore[attr-defined]
