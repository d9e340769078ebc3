"""Every Triton kernel agrees with the reference, in Triton's interpreter on the CPU.

The interpreter is chosen when kernels are imported, and other tests compile them: so this file runs itself in a process
of its own.
"""

from __future__ import annotations

import pytest
import torch
from triton_cases import (
    INTERPRETED,
    ROUNDING,
    SCHEMES,
    SHAPES,
    TOKENS,
    allowed,
    check,
    inputs,
    looked_up,
    passes_in_the_interpreter,
    quantized,
)

from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import RequestError
from quantkit.runtime.kernels.triton.layout import TritonWeight, join_rows
from quantkit.runtime.kernels.triton.tile_table import Tile
from quantkit.runtime.layers.linear import QuantLinear, use_packed_kernels

GEMM, SPLIT, GEMV = Tile("gemm", 64, 16), Tile("gemm", 32, 16, split=3), Tile("gemv", 32, split=2)

if not INTERPRETED:

    def test_in_the_interpreter() -> None:
        pytest.importorskip("triton")
        passes_in_the_interpreter(__file__)

else:

    @pytest.mark.parametrize("index", range(len(SCHEMES)), ids=lambda index: SCHEMES[index].describe())
    def test_kernels_agree_over_schemes_and_shapes(index: int) -> None:
        scheme, shape = SCHEMES[index], SHAPES[index % len(SHAPES)]  # all pairs on a device: tests/gpu
        q = quantized(scheme, shape)
        packed = TritonWeight(q)
        for tile in (GEMM, SPLIT, GEMV):
            check(q, packed, inputs(2, shape[1], torch.bfloat16, "cpu"), tile)

    @pytest.mark.parametrize("tokens", TOKENS)
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    @pytest.mark.parametrize("bits", [4, 8])
    def test_kernels_agree_over_tokens_and_dtypes(tokens: int, dtype: torch.dtype, bits: int) -> None:
        q = quantized(Scheme(bits, 64, False), (70, 192))
        bias = torch.randn(70, generator=torch.Generator().manual_seed(2)).to(dtype)
        tiles = [GEMV, Tile("dequantize")] + (
            [GEMM, Tile("gemm", 32, 16, scale_w=True)] if dtype != torch.float32 else []
        )
        for tile in tiles:
            check(q, TritonWeight(q), inputs(tokens, 192, dtype, "cpu"), tile, bias)

    def test_packed_kernels_of_an_evaluation_do_not_dequantize_for_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
        """They stand for what decodes: a product of dequantized, rounded weights would be other numbers."""
        from quantkit.runtime.kernels.triton import launch
        from quantkit.runtime.kernels.triton.tile_table import choose_tile

        q = quantized(Scheme(4, 64, False), (64, 128))
        layer, x = QuantLinear(TritonWeight(q)), inputs(400, 128, torch.bfloat16, "cpu")
        assert choose_tile(layer.packed, 400, x.dtype).kernel == "dequantize"
        use_packed_kernels(layer)
        run, tiles = launch.run, []
        monkeypatch.setattr(launch, "run", lambda *given: tiles.append(given[3]) or run(*given))
        y = layer(x).double()
        (tile,) = tiles
        assert (tile.kernel, tile.block_m, tile.scale_w) == ("gemm", 64, True)  # scale_w: groups of 64 are that fine
        expected = x.double() @ q.dequantize().double().T
        assert bool(((y - expected).abs() <= allowed(x, q, expected, tile)).all())

    @pytest.mark.parametrize(
        ("kind", "shape", "group", "dtype"),
        [
            ("nf4", (70, 192), 64, torch.bfloat16),
            ("nf4", (3, 256), 128, torch.float16),
            ("nf4", (130, 200), None, torch.float32),
            ("fp4", (64, 192), 64, torch.bfloat16),
            ("fp4", (70, 256), 64, torch.float16),
        ],
        ids=str,
    )
    def test_numbers_of_a_table_are_multiplied(
        kind: str, shape: tuple[int, int], group: int | None, dtype: torch.dtype
    ) -> None:
        q = looked_up(kind, shape, group)
        bias = torch.randn(shape[0], generator=torch.Generator().manual_seed(2)).to(dtype)
        wide = [] if dtype == torch.float32 else [SPLIT, Tile("gemm", 64, 16, scale_w=True)]
        for tile in (GEMV, Tile("dequantize"), *wide):
            check(q, TritonWeight(q), inputs(3, shape[1], dtype, "cpu"), tile, bias)

    def test_dequantized_rows_of_a_table_are_exact_in_float32_and_close_below() -> None:
        from quantkit.runtime.kernels.triton.dequant import dequantize_rows

        for kind, off in (("nf4", 2.1e-4), ("fp4", 0.0)):
            q = looked_up(kind, (70, 192), 64)
            packed, expected = TritonWeight(q), q.dequantize()
            found = dequantize_rows(packed, torch.full((6, 192), float("nan")), start=64)
            assert torch.equal(found, expected[64:])
            for dtype in (torch.bfloat16, torch.float16):
                rows = dequantize_rows(packed, torch.empty(6, 192, dtype=dtype), start=64).float()
                slack = expected[64:].abs() * (ROUNDING[dtype] + off) + 1e-7  # fp16 has no smaller steps than 2^-24
                assert bool(((rows - expected[64:]).abs() <= slack).all())

    def test_a_split_sum_is_the_same_every_time_and_leaves_its_counters_at_zero() -> None:
        from quantkit.runtime.kernels.triton import launch

        q = quantized(Scheme(4, 32), (64, 1024))
        packed, x = TritonWeight(q), inputs(2, 1024, torch.bfloat16, "cpu")
        first = launch.run(x, packed, None, SPLIT)
        assert torch.equal(first, launch.run(x, packed, None, SPLIT))
        assert all(not bool(lock.any()) for lock in launch._locks.values())
        assert launch._locks

    @pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
    @pytest.mark.parametrize("tile", [GEMM, GEMV, Tile("dequantize")], ids=lambda tile: tile.kernel)
    def test_a_pair_is_activated_in_the_same_kernel(activation: str, tile: Tile) -> None:
        from quantkit.runtime.kernels.triton.launch import run

        q = join_rows([quantized(Scheme(4, 64, False), (64, 192), seed) for seed in (1, 2)])
        x, bias = (
            inputs(3, 192, torch.float16, "cpu"),
            torch.randn(128, generator=torch.Generator().manual_seed(3)).half(),
        )
        both = x.double() @ q.dequantize().double().T + bias.double()
        gate, up = both[:, :64], both[:, 64:]
        expected = {
            "silu": lambda: torch.nn.functional.silu(gate),
            "gelu": lambda: torch.nn.functional.gelu(gate),
            "gelu_tanh": lambda: torch.nn.functional.gelu(gate, approximate="tanh"),
        }[activation]() * up
        y = run(x, TritonWeight(q, pair=64), bias, tile, activation)
        assert float((y.double() - expected).abs().max()) < 2e-3 * float(expected.abs().max())

    def test_dequantized_and_looked_up_rows_are_those_of_the_reference() -> None:
        from quantkit.runtime.kernels.triton.dequant import dequantize_rows

        for scheme in (Scheme(4, 64, False), Scheme(8, 64, False), Scheme(2, None)):
            q = quantized(scheme, (70, 200))
            packed, index = TritonWeight(q), torch.tensor([69, 3, 3])
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                expected = q.dequantize()
                found = dequantize_rows(packed, torch.full((6, 200), float("nan"), dtype=dtype), start=64)
                looked = dequantize_rows(packed, torch.full((3, 200), float("nan"), dtype=dtype), index=index)
                for rows, wanted in ((found, expected[64:]), (looked, expected[index])):
                    assert bool(((rows.float() - wanted).abs() <= ROUNDING[dtype] * wanted.abs()).all())

    def test_what_the_kernels_do_not_take_is_refused() -> None:
        from quantkit.runtime.kernels.triton.launch import run

        q: QuantTensor = quantized(Scheme(4, 64), (64, 128))
        with pytest.raises(RequestError, match="float64"):
            run(torch.zeros(1, 128, dtype=torch.float64), TritonWeight(q), None, GEMM)
        with pytest.raises(RequestError, match="other weights take none"):
            run(torch.zeros(1, 128), TritonWeight(q), None, GEMV, "silu")
