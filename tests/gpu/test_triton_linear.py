"""The Triton kernels on a real device: the whole grid of the contract, and the shapes of real models."""

from __future__ import annotations

import pytest
import torch
from triton_cases import SCHEMES, SHAPES, TOKENS, check, inputs, looked_up, quantized

from quantkit.core.scheme import Scheme
from quantkit.runtime.kernels.triton.layout import TritonWeight, join_rows
from quantkit.runtime.kernels.triton.tile_table import Tile, choose_tile
from quantkit.runtime.layers.linear import linear, pack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CUDA = torch.device("cuda")
TILES = [
    Tile("gemm", 64, 16),
    Tile("gemm", 32, 16, split=3),
    Tile("gemm", 64, 64, split=2, stages=2),
    Tile("gemm", 128, 64, warps=8, stages=2, scale_w=True),
    Tile("gemv", 32, split=2),
    Tile("dequantize"),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=Scheme.describe)
@pytest.mark.parametrize("shape", [*SHAPES, (192, 2048)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_kernels_agree_with_float64(scheme: Scheme, shape: tuple[int, int], dtype: torch.dtype) -> None:
    q = quantized(scheme, shape)
    packed = TritonWeight(q, CUDA)
    bias = torch.randn(shape[0], generator=torch.Generator().manual_seed(2)).to(dtype).to(CUDA)
    for tokens in (*TOKENS, 200):
        x = inputs(tokens, shape[1], dtype, "cuda")
        for tile in TILES:
            if tile.kernel != "gemm" or dtype != torch.float32:
                check(q, packed, x, tile, bias)


@pytest.mark.parametrize("shape", [(4096, 4096), (28672, 8192)], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048])
def test_chosen_tiles_agree_at_real_shapes(shape: tuple[int, int], tokens: int) -> None:
    generator = torch.Generator(CUDA).manual_seed(0)
    scheme = Scheme(4, 128, False)
    q = random_weight(scheme, shape, generator)
    packed = pack(q, device=CUDA)
    assert isinstance(packed, TritonWeight)
    x = torch.randn(tokens, shape[1], device=CUDA, dtype=torch.bfloat16, generator=generator)
    expected = x.float() @ q.dequantize().T
    y = linear(x, packed).float()
    limit = 1e-2 if choose_tile(packed, tokens, x.dtype).kernel == "dequantize" else 5e-3
    assert float((y - expected).norm() / expected.norm()) < limit


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize(
    ("shape", "group"), [((70, 192), 64), ((192, 2048), 64), ((130, 256), 128), ((130, 200), None)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_numbers_of_a_table_are_multiplied(
    kind: str, shape: tuple[int, int], group: int | None, dtype: torch.dtype
) -> None:
    q = looked_up(kind, shape, group)
    packed = TritonWeight(q, CUDA)
    assert torch.equal(packed.dequantize().cpu(), q.dequantize())
    bias = torch.randn(shape[0], generator=torch.Generator().manual_seed(2)).to(dtype).to(CUDA)
    for tokens in (1, 3, 17, 200):
        x = inputs(tokens, shape[1], dtype, "cuda")
        for tile in (*TILES, choose_tile(packed, tokens, dtype)):
            if tile.kernel != "gemm" or dtype != torch.float32:
                check(q, packed, x, tile, bias)


def test_a_bitsandbytes_weight_is_laid_out_for_the_kernels() -> None:
    from quantkit.core.qtensor import BlockTensor

    q = looked_up("nf4", (192, 256), 64)
    block = BlockTensor("nf4", {"x": q.codes}, q.shape, 0, lambda raw: q.dequantize(), lambda raw: q)
    packed = pack(block, device=CUDA)
    assert isinstance(packed, TritonWeight)
    assert torch.equal(packed.dequantize().cpu(), q.dequantize())


def test_dequantized_rows_are_bit_for_bit() -> None:
    for scheme in SCHEMES:
        q = quantized(scheme, (130, 576))
        packed = TritonWeight(q, CUDA)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            expected = q.dequantize().to(dtype)
            assert torch.equal(packed.columns(64, 130, dtype).T.cpu(), expected[64:])
            index = torch.tensor([129, 0, 64, 64], device=CUDA)
            assert torch.equal(packed.rows(index, dtype).cpu(), expected[index.cpu()])


@pytest.mark.parametrize("tile", [Tile("gemm", 128, 16, split=2), Tile("gemv", 64), Tile("dequantize")], ids=str)
def test_a_pair_is_activated_in_the_same_kernel(tile: Tile) -> None:
    from quantkit.runtime.kernels.triton.launch import run

    q = join_rows([quantized(Scheme(4, 64, False), (192, 1024), seed) for seed in (1, 2)])
    x = inputs(3, 1024, torch.bfloat16, "cuda")
    both = x.double().cpu() @ q.dequantize().double().T
    expected = torch.nn.functional.silu(both[:, :192]) * both[:, 192:]
    y = run(x, TritonWeight(q, CUDA, pair=192), None, tile, "silu").double().cpu()
    assert float((y - expected).norm() / expected.norm()) < 1e-2


def test_split_sums_repeat_bit_for_bit_and_in_a_graph() -> None:
    q = quantized(Scheme(4, 128), (256, 4096))
    packed, x = TritonWeight(q, CUDA), inputs(4, 4096, torch.bfloat16, "cuda").contiguous()
    from quantkit.runtime.kernels.triton.launch import run

    tile = Tile("gemm", 32, 16, split=4)
    first = run(x, packed, None, tile)
    assert all(torch.equal(first, run(x, packed, None, tile)) for _ in range(50))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = run(x, packed, None, tile)
    for _ in range(3):
        again.zero_()
        graph.replay()
        assert torch.equal(first, again)


def random_weight(scheme: Scheme, shape: tuple[int, int], generator: torch.Generator):  # type: ignore[no-untyped-def]
    """Random codes: quantizing matrices of this size would take longer than what is tested."""
    from quantkit.core.qtensor import QuantTensor

    groups = scheme.groups(shape[1])
    codes = torch.randint(0, scheme.levels, shape, dtype=torch.uint8, device=CUDA, generator=generator)
    scales = (torch.rand(shape[0], groups, device=CUDA, generator=generator) * 0.01 + 0.001).half()
    zeros = torch.randint(0, scheme.levels + 1, (shape[0], groups), device=CUDA, generator=generator).to(torch.int16)
    return QuantTensor(codes, scales, None if scheme.symmetric else zeros, scheme)
