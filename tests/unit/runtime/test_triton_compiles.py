"""Every Triton kernel compiles for sm_90 and sm_80 without a GPU, at the tiles that are used, and spills no registers.

ptxas, which Triton carries, says how many registers, how much stack and shared memory each takes.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
triton = pytest.importorskip("triton")

POINTERS = {"words": "*i32", "scales": "*fp16", "zeros": "*u8", "work": "*fp32", "lock": "*i32", "index": "*i64",
            "codes": "*i8", "weights": "*i8", "x_scales": "*fp32", "w_scales": "*fp16", "eps": "fp32",
            "scaling": "fp32", **dict.fromkeys(("pads", "length", "done"), "*i32"), "turn": "*fp16", "scratch": "*fp32",
            **dict.fromkeys(("table", "packed", "pools", "fields"), "*i64"),
            **dict.fromkeys(("sums", "residual", "after", "weight"), "*fp32"),
            **dict.fromkeys(("q_norm", "k_norm", "cos", "sin"), "*fp32")}  # fmt: skip
ALIGNED = (
    "codes",
    "weights",
    "K",
    "x",
    "words",
    "scales",
    "zeros",
    "y",
    "base",
    "out",
    "work",
    "lock",
    "stride_x",
    "stride_y",
    "stride_out",
    "q",
    "k",
    "v",
    "delta",
    "residual",
    "weight",
    "gate",
    "up",
    "pads",
    "length",
    "table",
    "pools",
    "sums",
)
LAYOUT = {"HELD": 4, "WIDTH": 64, "GROUP": 128, "RECORD": 192, "ASYM": True, "EVEN": True, "TABLE": 0}
FUSED = {**LAYOUT, "FLUSH": 2, "BIAS": False, "PAIR": 0, "ACT": "", "SPLIT": True, "STAGES": 3}
GPTQ = dict.fromkeys(("rest", "upper", "step", "offset", "errors"), "*fp32") | {"codes": "*u8"}
SHARED = {90: 227 << 10, 80: 163 << 10}  # bytes of shared memory a block may have


def compiled(kernel: Any, constants: dict[str, Any], arch: int, warps: int, dtype: str = "bf16") -> dict[str, Any]:
    """Registers, stack and spilled bytes, shared memory and machine code of a kernel."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    kinds = {**POINTERS, **dict.fromkeys(("x", "y", "bias", "out", "q", "k", "v", "delta", "gate", "up"), f"*{dtype}")}
    if constants.get("TABLE"):
        kinds["scales"] = "*fp32"
    if constants.get("HELD") == 8:
        kinds.update(words="*i8", zeros="*i16")
    if "BLOCK_C" in constants:
        kinds = GPTQ
    if "windows" in names:
        kinds.update(index="*i32", exact="*i64", windows="*i32")
    if "base" in names:
        kinds["base"] = f"*{dtype}"
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in ALIGNED if name in names},
    )
    options = {
        "num_warps": warps,
        "num_stages": constants.get("STAGES", 3),
        "enable_fp_fusion": "BLOCK_C" not in constants,
    }
    result = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    usage = _tool("cuobjdump", ["-res-usage"], result.asm["cubin"])
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage)
    assert found is not None, usage
    registers, stack, local = map(int, found.groups())
    return {"registers": registers, "spilled": stack + local, "shared": result.metadata.shared, "asm": result.asm}


def _tool(name: str, options: list[str], cubin: bytes) -> str:
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "kernel.cubin"
        path.write_bytes(cubin)
        return subprocess.run([folder / name, *options, path], capture_output=True, text=True, check=True).stdout


def check(result: dict[str, Any], arch: int) -> None:
    assert result["spilled"] == 0, result["registers"]
    assert result["registers"] <= 255
    assert result["shared"] <= SHARED[arch]


def derived(layer: Any, tokens: int, arch: int, dtype: str = "bf16") -> dict[str, Any]:
    """What runs on a large layer of this kind before anything was tuned."""
    from quantkit.runtime.kernels.triton.dequant import layout_constants
    from quantkit.runtime.kernels.triton.gemm import gemm_kernel
    from quantkit.runtime.kernels.triton.gemv import gemv_kernel
    from quantkit.runtime.kernels.triton.tile_table import derive

    tile = derive(layer, tokens, 132, arch >= 90)
    constants = {
        **FUSED,
        **layout_constants(layer),
        "FLUSH": layer.flush,
        "BLOCK_N": tile.block_n,
        "STAGES": tile.stages,
    }
    if tile.kernel == "gemv":
        return compiled(gemv_kernel, {**constants, "EXACT": False, "ASM": True}, arch, tile.warps, dtype)
    assert tile.kernel == "gemm"
    constants.update(BLOCK_M=tile.block_m, SCALE_W=tile.scale_w, ASM=True)
    return compiled(gemm_kernel, constants, arch, tile.warps, dtype)


def large_layer(bits: int, group: int | None, symmetric: bool = False, table: str = "") -> Any:
    """A weight as bricks, 8192 inputs wide, with rows to spare."""
    import torch

    from quantkit.core.qtensor import QuantTensor, TableTensor
    from quantkit.core.scheme import Scheme
    from quantkit.runtime.kernels.triton.fp4_tables import VALUES
    from quantkit.runtime.kernels.triton.layout import TritonWeight

    scheme = Scheme(bits, group, symmetric)
    groups = scheme.groups(8192)
    codes = torch.zeros(64, 8192, dtype=torch.uint8)
    if table:
        layer = TritonWeight(TableTensor(codes, torch.ones(64, groups), torch.tensor(VALUES[table]), group))
    else:
        zeros = None if symmetric else torch.zeros(64, groups, dtype=torch.int16)
        layer = TritonWeight(QuantTensor(codes, torch.ones(64, groups, dtype=torch.float16), zeros, scheme))
    layer.out_features = 64 * 132  # what derive sees: enough rows for its wide tiles
    return layer


@pytest.mark.parametrize("arch", [90, 80])
@pytest.mark.parametrize("tokens", [16, 32, 64, 200])
def test_the_derived_tiles_of_the_matrix_kernel_compile_without_spills(tokens: int, arch: int) -> None:
    result = derived(large_layer(4, 128), tokens, arch)
    check(result, arch)
    ptx = result["asm"]["ptx"]
    assert ("wgmma" in ptx) == (arch == 90)  # Hopper's own matrix instruction, weights from registers
    assert "lop3.b32 t, t, 0x000f000f, 0x43004300" in ptx
    assert re.search(r"cp\.async\.cg\.shared\.global .*, 0x10", ptx)  # 16 bytes at a time, ahead of their use


@pytest.mark.parametrize(
    ("bits", "group", "table", "tokens", "arch"),
    [(8, 64, "", 16, 90), (8, None, "", 32, 80), (4, 64, "", 64, 80), (4, 64, "nf4", 16, 90), (4, 64, "nf4", 32, 80)],
)
def test_other_layouts_compile_without_spills(bits: int, group: int | None, table: str, tokens: int, arch: int) -> None:
    """Those of the slow grid below that come nearest to the limit, one of each kind."""
    result = derived(large_layer(bits, group, bool(table), table), tokens, arch)
    check(result, arch)
    assert "prmt.b32" in result["asm"]["ptx"] or not (table or bits == 8)


GRID = [
    (bits, group, symmetric, "", dtype)
    for bits in (4, 8)
    for group in (32, 64, 128, None)
    for symmetric, dtype in ((False, "bf16"), (True, "fp16"))
] + [(4, 64, True, table, dtype) for table in ("nf4", "fp4") for dtype in ("bf16", "fp16")]


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "group", "symmetric", "table", "dtype"), GRID)
@pytest.mark.parametrize("arch", [90, 80])
def test_no_layout_spills_at_its_derived_tiles(
    bits: int, group: int | None, symmetric: bool, table: str, dtype: str, arch: int
) -> None:
    layer = large_layer(bits, group, symmetric, table)
    for tokens in (1, 16, 32, 64, 200):
        check(derived(layer, tokens, arch, dtype), arch)
    layer.out_features = 64  # a small layer's vector tile
    check(derived(layer, 1, arch, dtype), arch)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_matrix_kernel_compiles_with_an_activation(dtype: str) -> None:
    from quantkit.runtime.kernels.triton.gemm import gemm_kernel

    more = {"PAIR": 14336, "ACT": "silu", "BIAS": True}
    constants = {**FUSED, "BLOCK_N": 64, "BLOCK_M": 16, "SCALE_W": False, "ASM": True, **more}
    check(compiled(gemm_kernel, constants, 90, 4, dtype), 90)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_plain_twin_compiles(dtype: str) -> None:
    """It compiles: that is all that is asked.

    It spills (float32 products without matrix units) and runs in the interpreter only.
    """
    from quantkit.runtime.kernels.triton.gemm import gemm_kernel

    twin = {"ASM": False, "EVEN": False, "STAGES": 2, "BLOCK_N": 64, "BLOCK_M": 16, "SCALE_W": False}
    assert compiled(gemm_kernel, {**FUSED, **twin}, 90, 4, dtype)["registers"] > 0


@pytest.mark.parametrize("held", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_the_vector_kernel_compiles_without_spills(held: int) -> None:
    from quantkit.runtime.kernels.triton.gemv import gemv_kernel

    eight = {"HELD": 8, "WIDTH": 128, "RECORD": 256, "FLUSH": 1} if held == 8 else {}
    result = compiled(gemv_kernel, {**FUSED, **eight, "BLOCK_N": 32, "EXACT": False, "ASM": True, "STAGES": 4}, 90, 4)
    check(result, 90)
    if held == 4:
        assert "cvt.rn.f32.s32" not in result["asm"]["ptx"]  # codes become numbers where they stand


def test_the_dequantizing_kernel_compiles_without_spills() -> None:
    from quantkit.runtime.kernels.triton.dequant import dequantize_kernel

    constants = {**LAYOUT, "LOOKUP": False, "BLOCK_R": 16, "BF16": True, "EXACT": False, "ASM": True}
    table = {"TABLE": 1, "GROUP": 64, "RECORD": 256, "ASYM": False, "BF16": False}
    for more in ({}, table, {**table, "EXACT": True}):
        result = compiled(dequantize_kernel, {**constants, **more}, 90, 4, "fp32" if "EXACT" in more else "bf16")
        check(result, 90)
        assert re.search(r"ld\.global[.\w]*\.v4\.b32", result["asm"]["ptx"])


@pytest.mark.parametrize("arch", [90, 80])
@pytest.mark.parametrize("tile", range(3))
def test_the_int8_kernel_compiles_to_integer_matrix_units(tile: int, arch: int) -> None:
    from quantkit.runtime.kernels.triton.w8a8 import TILES, product_kernel

    block_m, block_n, block_k, warps, stages = TILES[tile]
    constants = {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "STAGES": stages,
        "BIAS": True,
        "EVEN": True,
    }
    result = compiled(product_kernel, constants, arch, warps)
    check(result, arch)
    assert re.search(r"(wgmma|mma)[.\w]*\.s32\.s8\.s8", result["asm"]["ptx"])


def test_the_kernel_that_rounds_activations_compiles_and_divides_as_torch_does() -> None:
    from quantkit.runtime.kernels.triton.w8a8 import round_kernel

    result = compiled(round_kernel, {"BLOCK": 2048}, 90, 4)
    check(result, 90)
    assert "div.rn.f32" in result["asm"]["ptx"]


@pytest.mark.parametrize("arch", [90, 80])
def test_a_block_of_gptq_columns_stays_in_registers(arch: int) -> None:
    from quantkit.runtime.kernels.triton.gptq import COLUMNS, LANES, columns_kernel

    result = compiled(columns_kernel, {"BLOCK_C": COLUMNS, "BLOCK_R": LANES}, arch, 1)
    check(result, arch)
    ptx = result["asm"]["ptx"]
    assert "shfl" not in ptx  # a lane finds its row's column in its own registers
    assert "div.rn.f32" in ptx  # as the CPU divides
    assert not re.search(r"fma\.rn\.f32", ptx)  # as the CPU multiplies and subtracts


@pytest.mark.parametrize("arch", [90, 80])
def test_norms_and_activations_of_a_step_stay_in_registers(arch: int) -> None:
    from quantkit.runtime.kernels.triton.step import activate_kernel, add_norm_kernel, warps_for

    for width in (4096, 8192):
        norm = {"DELTA": True, "AFTER": True, "BLOCK": width}
        check(compiled(add_norm_kernel, norm, arch, warps_for(width)), arch)
    check(compiled(activate_kernel, {"ACT": "silu", "BLOCK": 1024}, arch, 4), arch)


HEADS = {"HEADS": 32, "KV_HEADS": 8}
# bytes that are known: 256 channels on sm_80; 32 queries for one key head (64 rows)
SPILLED = {(80, 256, 16): 128, (80, 128, 1): 300, (90, 128, 1): 300, (90, 128, 8): 8}


@pytest.mark.parametrize("arch", [90, 80])
def test_rotary_and_the_cache_write_stay_in_registers(arch: int) -> None:
    from quantkit.runtime.kernels.triton.step import rotary_cache_kernel

    for dim in (64, 128, 256):
        more = {"DIM": dim, "TURN": dim, "NORM": True, "FIRST": 4, "BLOCK": dim}
        check(compiled(rotary_cache_kernel, {**HEADS, **more}, arch, 1), arch)


def attention(
    dim: int, dtype: str, arch: int, kb: int = 0, vb: int = 0, kv_heads: int = 8
) -> tuple[dict[str, Any], str]:
    """What runs on 32 query heads."""
    import torch

    from quantkit.runtime.kernels.triton.attention import attention_kernel, shape_of_launch

    torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    shared = 32 // kv_heads
    groups = max(1, dim // 64) if 0 < vb < 16 else 1
    warps, stages = shape_of_launch(dim, torch_dtype, kb > 0, max(16, shared * groups))
    constants = {
        "HEADS": 32, "KV_HEADS": kv_heads, "DIM": dim, "GQ": shared, "BLOCK_G": max(16, shared),
        "BLOCK_M": max(16, shared * groups), "WIDE": dim, "PARTS": 32, "KB": kb, "VB": vb, "GROUPS": groups,
        "FIRST": 4 if kb else 0, "TURN": dim**-0.5 if 0 < vb < 16 else 0.0,
        "PRECISION": "tf32x3" if dtype == "fp32" else "", "STAGES": stages,
    }  # fmt: skip
    result = compiled(attention_kernel, constants, arch, warps, dtype)
    return result, result["asm"]["ptx"]


@pytest.mark.parametrize("arch", [90, 80])
@pytest.mark.parametrize(
    ("dim", "dtype"),
    [
        (128, "bf16"),
        *(pytest.param(*more, marks=pytest.mark.slow) for more in (
            (64, "bf16"), (256, "bf16"), (128, "fp16"), (64, "fp32"), (128, "fp32"),
        )),
    ],
)  # fmt: skip
def test_attention_over_pages_compiles_without_spills(dim: int, dtype: str, arch: int) -> None:
    result, ptx = attention(dim, dtype, arch)
    check(result, arch)
    assert re.search(r"mma[.\w]*\.m16n8k", ptx)  # a key head's queries on matrix units
    one = "b32" if dtype == "fp32" else "b16"
    alone = len(re.findall(rf"ld\.global\.{one}\b", ptx))
    assert alone < 16, alone  # 128 and more where pages are loaded element by element


@pytest.mark.parametrize("arch", [90, 80])
@pytest.mark.parametrize(
    ("kb", "vb", "dim", "kv_heads", "dtype"),
    [
        (4, 4, 128, 4, "bf16"),
        *(pytest.param(*more, marks=pytest.mark.slow) for more in (
            (8, 8, 128, 4, "bf16"), (4, 2, 128, 8, "bf16"), (3, 3, 128, 8, "bf16"), (2, 2, 128, 8, "bf16"),
            (4, 16, 128, 8, "bf16"), (16, 4, 128, 8, "bf16"), (4, 4, 64, 8, "bf16"), (4, 4, 256, 16, "bf16"),
            (8, 8, 256, 16, "bf16"), (4, 4, 128, 32, "fp16"), (4, 4, 128, 1, "bf16"),
        )),
    ],
)  # fmt: skip
def test_attention_over_packed_pages_compiles_and_spills_nothing_that_is_not_named(
    kb: int, vb: int, dim: int, kv_heads: int, dtype: str, arch: int
) -> None:
    result, ptx = attention(dim, dtype, arch, kb, vb, kv_heads)
    if result["spilled"] <= SPILLED.get((arch, dim, kv_heads), 0):
        result["spilled"] = 0
    check(result, arch)
    if (kb, vb, dtype) == (4, 4, "bf16"):
        assert "and.b32" in ptx
        assert not re.search(r"cvt\.rn\.f(16|32)\.[su](8|16)|cvt\.rn\.f16\.[su]32", ptx)  # no code is converted
        assert len(re.findall(r"ldmatrix[.\w]*\.trans", ptx)) >= 2


@pytest.mark.parametrize(
    ("kb", "vb", "dim", "arch"),
    [(4, 4, 128, 90), *(pytest.param(*more, marks=pytest.mark.slow) for more in ((3, 2, 128, 90), (16, 4, 64, 80)))],
)
def test_packing_of_a_page_stays_in_registers(kb: int, vb: int, dim: int, arch: int) -> None:
    from quantkit.runtime.kernels.triton.pack_page import pack_kernel

    constants = {
        "KV_HEADS": 8, "DIM": dim, "WIDE": dim, "KB": kb, "VB": vb, "GROUPS": dim // 64, "SPAN": 64, "RECENT": 64,
        "FIRST": 4, "TURN": dim**-0.5, "PRECISION": "",
    }  # fmt: skip
    result = compiled(pack_kernel, constants, arch, 4)
    check(result, arch)
    assert "div.rn.f32" in result["asm"]["ptx"]  # as torch divides
