"""Every kernel agrees with the reference, over a grid of schemes and shapes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quantkit.core import affine
from quantkit.core.packing import PackedCodes, pack_rows
from quantkit.core.qtensor import BlockTensor, QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import RequestError
from quantkit.runtime.kernels import reference
from quantkit.runtime.kernels.cpu_layouts import (
    GEMM_TOKENS,
    HalfWeight,
    PlanarWeight,
    block_size,
    linear_gemm,
    linear_gemv,
    linear_numba,
)
from quantkit.runtime.kernels.cpu_torch import Int4Weight, Int8Weight, int4_fits
from quantkit.runtime.kernels.numba import threads
from quantkit.runtime.kernels.reference import BlockWeight, Kernel, WordsWeight, linear_reference
from quantkit.runtime.layers.linear import KERNELS, NUMBA, QuantLinear, choose, linear, pack

CPU = torch.device("cpu")
# Those on Triton have test_triton.py; "w8a8" rounds activations too and has tests/unit/runtime/test_w8a8.py.
CPU_KERNELS = [name for name in KERNELS if not name.startswith("triton") and name not in ("w8a8", "float")]
SHAPES = [(32, 64), (80, 320), (16, 576), (208, 192), (30, 70)]
SCHEMES = [
    Scheme(bits, group, symmetric) for bits in (3, 4, 5, 8) for group in (32, 128, None) for symmetric in (True, False)
]


def quantized(scheme: Scheme, shape: tuple[int, int], seed: int = 0) -> QuantTensor:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + (0.0 if scheme.symmetric else 0.7)
    scales, zeros = affine.minmax_params(weight, scheme)
    if zeros is not None:
        zeros[0, 0] = scheme.levels  # the largest zero that is allowed, one above the largest code
    return QuantTensor(affine.quantize(weight, scales, zeros, scheme), scales, zeros, scheme)


def bound(kernel: str, x: torch.Tensor, q: QuantTensor) -> torch.Tensor:
    """The tolerances that kernels/cpu_torch.py and cpu_layouts.py derive, elementwise.

    Sums are float32 for those that compute in float32.
    """
    size, weight = x.abs().float(), q.dequantize()
    step = affine.expand_groups(q.scales.float(), q.shape[1], q.scheme)
    exact = q.shape[1] * 2**-23 * (size @ weight.abs().T) + 1e-7
    if kernel == "int4":
        return 2**-9 * (size @ (3 * weight.abs() + 8 * step).T) + exact
    if kernel in NUMBA:
        block = block_size(q.scheme, q.shape[1])
        assert block is not None
        pairs = zip(size.split(block, 1), weight.abs().split(block, 1), strict=True)
        return exact + sum(2**-16 * x.amax(1, keepdim=True) * w.sum(1) for x, w in pairs)
    if kernel == "int8":
        signed = q.codes.float() - 128
        return 2**-8 * (size @ (signed.abs() * step).T) + q.shape[1] * 2**-23 * (size @ (256 * step).T) + 1e-7
    return exact


@pytest.mark.parametrize("scheme", SCHEMES, ids=Scheme.describe)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_kernel_agrees_with_the_reference(scheme: Scheme, shape: tuple[int, int]) -> None:
    q = quantized(scheme, shape)
    x = torch.randn(5, shape[1], generator=torch.Generator().manual_seed(1))
    expected = x @ q.dequantize().T
    tried = set()
    for name in KERNELS:
        try:
            packed = pack(q, device=CPU, kernel=name)
        except RequestError:
            continue
        tried.add(name)
        assert torch.equal(packed.dequantize(), q.dequantize())
        assert bool(((linear(x, packed, kernel=KERNELS[name]) - expected).abs() <= bound(name, x, q)).all()), name
        many = KERNELS["dequantize"](x, packed, None)  # the path of many tokens, from the same buffers
        assert bool(((many - expected).abs() <= bound("dequantize", x, q)).all()), packed.layout
    assert {"reference", "dequantize"} <= tried
    if threads.available():
        assert set(NUMBA) <= tried
    if scheme.bits > 4 and shape[0] % 4 == shape[1] % 32 == 0:
        assert "int8" in tried
    elif shape[0] % 16 == 0:
        assert "int4" in tried


def skip_without_numba(kernel: str) -> None:
    if kernel in NUMBA and not threads.available():
        pytest.skip("numba is not installed (extra [cpu])")


@pytest.mark.parametrize("tokens", [1, 3, 17, 64, 300])
@pytest.mark.parametrize("kernel", CPU_KERNELS)
@pytest.mark.parametrize("bits", [4, 8])
def test_any_number_of_tokens_strides_and_bias(kernel: str, bits: int, tokens: int) -> None:
    if kernel in ("int4", "int8") and kernel != f"int{bits}":
        return
    skip_without_numba(kernel)
    q = quantized(Scheme(bits, 64, False), (96, 192))
    bias = torch.randn(96)
    packed = pack(q, device=CPU, kernel=kernel)
    rows = torch.randn(192, tokens).T  # not contiguous
    expected = linear_reference(rows, packed, bias)
    assert bool(((linear(rows, packed, bias, kernel=KERNELS[kernel]) - expected).abs() <= bound(kernel, rows, q)).all())
    nested = torch.randn(2, 3, 192)
    assert linear(nested, packed).shape == (2, 3, 96)
    assert linear(nested[:0], packed).shape == (0, 3, 96)


@pytest.mark.parametrize("kernel", CPU_KERNELS)
@pytest.mark.parametrize("bits", [4, 8])
def test_bfloat16_activations_stay_within_their_rounding(kernel: str, bits: int) -> None:
    if kernel in ("int4", "int8") and kernel != f"int{bits}":
        return
    skip_without_numba(kernel)
    q = quantized(Scheme(bits, 64, False), (64, 192))
    x = torch.randn(4, 192).bfloat16()
    packed = pack(q, device=CPU, kernel=kernel)
    expected = x.float() @ q.dequantize().T
    y = linear(x, packed, kernel=KERNELS[kernel])
    assert y.dtype == torch.bfloat16
    # weights and result are rounded to bf16, each by 2**-9, beside what the kernel itself rounds
    allowed = bound(kernel, x, q) + 2**-8 * (x.float().abs() @ q.dequantize().abs().T)
    assert bool(((y.float() - expected).abs() <= allowed).all())


def test_layouts_take_about_the_bits_of_the_scheme() -> None:
    q4 = quantized(Scheme(4, 128), (256, 512))
    q8 = quantized(Scheme(8, None), (256, 512))
    elements = 256 * 512
    assert WordsWeight(q4).nbytes() * 8 / elements == 4 + 16 / 128
    assert Int4Weight(q4).nbytes() * 8 / elements == 4 + (32 + 16) / 128
    assert Int8Weight(q8).nbytes() * 8 / elements == 8 + (32 + 16) / 512
    layer = QuantLinear(Int4Weight(q4))
    assert sum(b.nbytes for b in layer.buffers()) == layer.packed.nbytes()
    assert not list(layer.parameters())


def test_fast_layouts_are_chosen_where_they_apply_and_refused_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "available", lambda: False)

    def layout(scheme: Scheme, shape: tuple[int, int]) -> str:
        return pack(quantized(scheme, shape), device=CPU).layout

    assert int4_fits(Scheme(4, 128), 576, 576)  # 4 groups of 128 and a tail of 64
    assert layout(Scheme(4, 128), (32, 576)) == "int4"
    assert layout(Scheme(3, 64), (32, 128)) == "int4"
    assert layout(Scheme(4, 64), (24, 128)) == "words"  # 24 rows: not a multiple of 16
    assert layout(Scheme(4, 16), (32, 128)) == "words"
    assert layout(Scheme(8, None), (36, 96)) == "int8"
    assert layout(Scheme(8, 128), (36, 160)) == "int8"  # a tail of 32
    assert layout(Scheme(8, None), (30, 96)) == "words"
    assert layout(Scheme(8, None), (36, 90)) == "words"
    with pytest.raises(RequestError, match="int4"):
        pack(quantized(Scheme(4, 64), (24, 128)), device=CPU, kernel="int4")
    with pytest.raises(RequestError, match="known kernels"):
        pack(quantized(Scheme(4, 64), (24, 128)), device=CPU, kernel="warp")
    with pytest.raises(RequestError, match=r"needs numba \(pip install 'quantkit\[cpu\]'\)"):
        pack(quantized(Scheme(4, 64), (24, 128)), device=CPU, kernel="numba")
    with pytest.raises(RequestError, match=r"runs on a GPU, not on cpu.* choose from int4, dequantize, reference"):
        pack(quantized(Scheme(4, 64), (32, 128)), device=CPU, kernel="triton-gemv")
    with pytest.raises(RequestError, match=r"cannot take W4 g64 sym over .* choose from int4, dequantize"):
        pack(quantized(Scheme(4, 64), (32, 128)), device=CPU, kernel="int8")


def test_a_scratch_buffer_made_in_inference_mode_serves_outside_it() -> None:
    packed = pack(quantized(Scheme(4, 64), (32, 64)), device=CPU)
    vars(reference._buffers).clear()
    with torch.inference_mode():
        inside = packed.dequantize()
    assert torch.equal(packed.dequantize(), inside)


def test_the_choice_follows_the_number_of_tokens() -> None:
    packed = Int4Weight(quantized(Scheme(4, 64), (32, 64)))
    assert choose(packed, 1) is KERNELS["int4"]
    assert choose(packed, 10_000) is KERNELS["dequantize"]


def test_a_foreign_format_is_run_by_its_own_decoder() -> None:
    weight = torch.randn(6, 10)
    block = BlockTensor("twice", {"a.b": weight / 2}, (6, 10), 60 * 32, lambda raw: raw["a.b"] * 2)
    packed = pack(block, device=CPU)
    assert isinstance(packed, BlockWeight)
    x = torch.randn(3, 10)
    torch.testing.assert_close(linear(x, packed), x @ weight.T)
    with pytest.raises(RequestError, match="twice"):
        pack(block, device=CPU, kernel="int4")


def test_a_wide_layer_is_dequantized_slice_by_slice() -> None:
    q = quantized(Scheme(4, 64, False), (1024, 704))
    packed = pack(q, device=CPU)
    assert len(packed.slices()) > 1
    assert torch.equal(packed.dequantize(), q.dequantize())


needs_numba = pytest.mark.skipif(not threads.available(), reason="numba is not installed (extra [cpu])")


@needs_numba
def test_planar_layouts_take_any_rows_and_their_rows_can_be_looked_up() -> None:
    for scheme, shape in ((Scheme(4, 64), (24, 128)), (Scheme(4, 128), (7, 576)), (Scheme(8, None), (30, 90))):
        q = quantized(scheme, shape)
        packed = pack(q, device=CPU)
        assert isinstance(packed, PlanarWeight)
        index = torch.tensor([5, 0, 5])
        assert torch.equal(packed.rows(index, torch.float32), q.dequantize()[index])
    assert pack(quantized(Scheme(4, 16), (32, 128)), device=CPU).layout == "words"
    assert pack(quantized(Scheme(4, 96), (32, 192)), device=CPU).layout == "planar4"  # three blocks of 32 a group
    assert PlanarWeight(quantized(Scheme(4, 128), (256, 512))).nbytes() * 8 / (256 * 512) == pytest.approx(
        4 + 16 / 128, abs=1e-3
    )


@needs_numba
@pytest.mark.parametrize("kernel", [linear_gemv, linear_gemm])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tokens", [11, 200])
def test_numba_gives_the_same_bits_with_any_number_of_threads_and_tokens(
    bits: int, kernel: Kernel, tokens: int
) -> None:
    """Also over the borders of chunks, tiles and panels of the matrix product: 11 tokens, 200 tokens, 200 rows."""
    packed = PlanarWeight(quantized(Scheme(bits, 64, False), (200, 320)))
    x = torch.randn(tokens, 320, generator=torch.Generator().manual_seed(3))
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found += [kernel(x, packed, None) for _ in range(20)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(y, found[0]) for y in found)
    assert torch.equal(torch.cat([kernel(row[None], packed, None) for row in x]), found[0])


@needs_numba
@pytest.mark.parametrize("columns", [320, 300])
@pytest.mark.parametrize("bits", range(2, 9))
def test_words_of_a_file_give_the_planar_layout_that_their_codes_give(bits: int, columns: int) -> None:
    q = quantized(Scheme(bits, None, False), (37, columns))
    words = PackedCodes(pack_rows(q.codes, bits), bits, columns)
    from_words, from_codes = PlanarWeight(replace(q, stored=words)), PlanarWeight(q)
    assert torch.equal(from_words.codes, from_codes.codes)
    assert torch.equal(from_words.dequantize(), q.dequantize())


@needs_numba
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [64, 70])
def test_half_weights_compute_with_exactly_what_is_stored(dtype: torch.dtype, columns: int) -> None:
    weight = torch.randn(40, columns).to(dtype)
    weight[0, :4] = torch.tensor([0.0, -0.0, 2.0**-24, -(2.0**-14)]).to(dtype)  # subnormal in fp16
    packed = HalfWeight(weight)
    assert torch.equal(packed.dequantize(), weight.float())
    assert HalfWeight.dtype_of(weight.float()) == dtype
    assert HalfWeight.dtype_of(torch.full((2, 2), 1 / 3)) is None
    x = torch.randn(3, columns)
    expected = x.double() @ weight.double().T
    allowed = columns * 2**-23 * (x.double().abs() @ weight.double().abs().T) + 1e-12
    assert bool(((linear_numba(x, packed, None).double() - expected).abs() <= allowed).all())
    unit = torch.eye(columns)[:4]
    assert torch.equal(linear_numba(unit, packed, None), weight.float().T[:4])


@needs_numba
@pytest.mark.parametrize("kernel", [linear_gemv, linear_gemm])
def test_numba_does_not_swallow_what_is_not_finite(kernel: Kernel) -> None:
    packed = PlanarWeight(quantized(Scheme(4, 64, False), (32, 128)))
    for bad in (float("nan"), float("inf")):
        x = torch.ones(2, 128)
        x[1, 100] = bad
        y = kernel(x, packed, None)
        assert bool(y[0].isfinite().all())
        assert bool(y[1].isnan().all())
    tiny = torch.full((1, 128), 1e-42)
    assert bool(kernel(tiny, packed, None).isfinite().all())
    assert bool((kernel(torch.zeros(1, 128), packed, None) == 0).all())


@needs_numba
@pytest.mark.parametrize("tokens", [GEMM_TOKENS - 1, GEMM_TOKENS, 130])
def test_few_tokens_go_row_by_row_and_many_in_panels(tokens: int) -> None:
    packed = PlanarWeight(quantized(Scheme(4, 64, False), (48, 128)))
    x = torch.randn(tokens, 128)
    kernel = linear_gemm if tokens >= GEMM_TOKENS else linear_gemv
    assert torch.equal(linear_numba(x, packed, None), kernel(x, packed, None))


@needs_numba
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_the_matrix_product_takes_the_largest_integers(scale: float) -> None:
    """Sums of a block stay within int32: the largest activations against the largest codes and zeros, either sign."""
    for bits in (4, 8):
        scheme = Scheme(bits, 128, False)
        codes = torch.full((20, 256), scheme.levels - 1, dtype=torch.uint8)
        codes[1::2] = 0
        zeros = torch.zeros(20, 2, dtype=torch.int16)
        zeros[1::2] = scheme.levels
        q = QuantTensor(codes, torch.full((20, 2), 0.5, dtype=torch.float16), zeros, scheme)
        x = torch.full((9, 256), scale)
        x[::2] *= -1
        found, expected = linear_gemm(x, PlanarWeight(q), None), x @ q.dequantize().T
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)


@needs_numba
def test_more_tokens_than_are_rounded_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = PlanarWeight(quantized(Scheme(4, 64, False), (48, 128)))
    x, bias = torch.randn(50, 128), torch.randn(48)
    whole = linear_gemm(x, packed, bias)
    monkeypatch.setattr("quantkit.runtime.kernels.cpu_layouts.MOST_TOKENS", 16)
    assert torch.equal(linear_gemm(x, packed, bias), whole)


@needs_numba
@pytest.mark.parametrize("processor", ["znver4", "sapphirerapids"])
def test_processors_with_vnni_multiply_and_add_in_one_instruction(processor: str, tmp_path: Path) -> None:
    """Compiled for them here, not run: 16 products of vectors a step, their sums in registers, nothing spilled."""
    loop = inner_loop(processor, tmp_path)
    assert sum("vpdpwssd" in line for line in loop) == 16
    assert not [line for line in loop if "rsp" in line or "rbp" in line]


def inner_loop(processor: str, folder: Path) -> list[str]:
    """The assembly of the innermost loop of a tile, as numba compiles it for a processor."""
    features = "+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512vnni,+avx2,+fma,+f16c"
    environment = os.environ | {
        "NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": features, "NUMBA_CACHE_DIR": str(folder)
    }  # fmt: skip
    script = Path(__file__).with_name("tile_assembly.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    last = max(index for index, line in enumerate(lines) if "vpdpwssd" in line)
    label = next(line.split()[-1] for line in lines[last:] if line.strip().startswith("j"))
    return lines[lines.index(f"{label}:") : last + 3]
