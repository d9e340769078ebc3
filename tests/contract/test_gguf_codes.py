"""Integer codes as ggml's blocks and back: the same weights bit by bit, or a refusal; the gguf library agrees."""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch

from quantkit.core import affine
from quantkit.core.blocks import KINDS
from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError
from quantkit.formats.ggml import blocks as gguf_blocks
from quantkit.formats.ggml.codes import block_kind_for, from_blocks, turned, whole_minima, widest_kind
from quantkit.formats.gguf import GGUF, encode_as


def quantized(scheme: Scheme, shape: tuple[int, int] = (16, 192), seed: int = 0) -> QuantTensor:
    w = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.1
    scales, zeros = affine.minmax_params(w, scheme)
    return QuantTensor(affine.quantize(w, scales, zeros, scheme), scales, zeros, scheme)


def of_llama_cpp(kind: str, rows: int = 8, width: int = 128) -> torch.Tensor:
    """What the gguf library makes of random numbers: uint8 [rows, row bytes]."""
    w = np.random.default_rng(0).normal(size=(rows, width)).astype(np.float32)
    w[1, :32] = 0
    return torch.from_numpy(gguf.quants.quantize(w, gguf.GGMLQuantizationType[kind]))


def theirs(packed: torch.Tensor, kind: str) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(packed.numpy(), gguf.GGMLQuantizationType[kind]))


SYMMETRIC = {2: "Q4_0", 3: "Q4_0", 4: "Q4_0", 5: "Q5_0", 6: "Q8_0", 7: "Q8_0", 8: "Q8_0"}
EXACT = {2: "Q4_0", 3: "Q4_0", 4: "Q5_0", 5: "Q8_0", 6: "Q8_0", 7: "Q8_0"}


@pytest.mark.parametrize("group", [32, 64, 128, None], ids=str)
@pytest.mark.parametrize(
    ("bits", "symmetric", "kind"),
    [*((b, True, k) for b, k in SYMMETRIC.items()), *((b, False, k) for b, k in EXACT.items())],
)
def test_the_gguf_library_reads_the_weights_that_the_codes_mean(
    bits: int, symmetric: bool, kind: str, group: int | None
) -> None:
    q = quantized(Scheme(bits, group, symmetric))
    ((name, packed),) = GGUF.encode(q).items()
    assert name == f"blocks.{kind}"
    assert torch.equal(theirs(packed, kind), q.dequantize())
    assert packed.nbytes <= GGUF.stored_bytes(q.scheme, *q.shape)
    back = GGUF.decode({name: packed}, q.scheme)
    assert torch.equal(back.dequantize(), q.dequantize())
    if group == 32 and bits in (4, 5, 8) and symmetric:
        assert back.equal(q)


@pytest.mark.parametrize("bits", [4, 5])
def test_minima_that_are_float16_numbers_need_no_wider_blocks(bits: int) -> None:
    q = quantized(Scheme(bits, 32, symmetric=False))
    q = replace(q, scales=torch.exp2(q.scales.float().log2().round()).half())
    ((name, packed),) = GGUF.encode(q).items()
    assert name == f"blocks.Q{bits}_1"
    assert torch.equal(theirs(packed, f"Q{bits}_1"), q.dequantize())
    assert GGUF.decode({name: packed}, q.scheme).equal(q)


def test_rounded_minima_are_taken_only_when_asked_for() -> None:
    q = quantized(Scheme(4, 32, symmetric=False))
    assert block_kind_for(q) == "Q5_0"
    assert block_kind_for(q, rounding=True) == "Q4_1"
    (packed,) = encode_as(q, "Q4_1").values()
    step = q.scales.float().repeat_interleave(32, 1)
    off = (theirs(packed, "Q4_1") - q.dequantize()).abs() / step
    assert 0 < float(off.max()) <= 16 / 2048


def test_experts_of_one_tensor_get_one_kind_by_scheme_alone() -> None:
    q = quantized(Scheme(4, 32, symmetric=False))
    centred = replace(q, zeros=torch.full_like(q.zeros, 8))
    assert block_kind_for(centred) == "Q4_0"
    assert block_kind_for(centred, alone=False) == block_kind_for(q, alone=False) == "Q5_0"
    assert widest_kind(q.scheme) == "Q5_0"


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "Q8_0"])
def test_files_of_llama_cpp_come_back_byte_by_byte(kind: str) -> None:
    """Their scales are negative in half of the blocks: such blocks turn over, and their zero point says so."""
    packed = of_llama_cpp(kind)
    blocks = gguf_blocks.decode(packed, KINDS[kind])
    assert turned(blocks) == (kind != "Q8_0")
    q = from_blocks(blocks, symmetric=False)
    assert torch.equal(q.dequantize(), theirs(packed, kind))
    assert bool((q.scales > 0).all())
    ((name, again),) = GGUF.encode(q).items()
    assert name == f"blocks.{kind}"
    assert torch.equal(theirs(again, kind), theirs(packed, kind))
    kept = torch.ones(packed.shape[0], dtype=torch.bool)
    kept[1] = False  # whose first block is zeros: its scale, 0, becomes the smallest
    assert torch.equal(again[kept], packed[kept])


def test_symmetric_codes_refuse_a_negative_scale() -> None:
    blocks = gguf_blocks.decode(of_llama_cpp("Q4_0"), KINDS["Q4_0"])
    with pytest.raises(CheckpointError, match="negative"):
        from_blocks(blocks, symmetric=True)


def test_minima_of_other_tools_are_no_zero_points() -> None:
    blocks = gguf_blocks.decode(of_llama_cpp("Q4_1"), KINDS["Q4_1"])
    assert not whole_minima(blocks)
    with pytest.raises(CheckpointError, match="--dequantize"):
        from_blocks(blocks, symmetric=False)


def test_mxfp4_is_the_same_bytes_in_another_order() -> None:
    packed = of_llama_cpp("MXFP4")
    blocks = gguf_blocks.decode(packed, KINDS["MXFP4"])
    q = from_blocks(blocks, symmetric=True)
    assert q.scheme == Scheme.of("mxfp4")
    assert torch.equal(q.dequantize(), theirs(packed, "MXFP4"))
    assert torch.equal(GGUF.encode(q)["blocks.MXFP4"], packed)


@pytest.mark.parametrize(
    ("scheme", "width", "words"),
    [
        (Scheme(4, 48), 192, "groups of 48"),
        (Scheme(4, 32), 40, "rows of 40"),
        (Scheme.of("fp8"), 64, "fp8"),
        (Scheme.of("nvfp4"), 64, "nvfp4"),
        (Scheme(8, None, True, activations="int8"), 64, "activations"),
    ],
    ids=str,
)
def test_what_no_block_holds_is_refused_with_the_remedy(scheme: Scheme, width: int, words: str) -> None:
    refusal = GGUF.supports(scheme, 8, width)
    assert refusal is not None
    assert words in str(refusal)
    assert "16-bit original" in str(refusal)


def test_asymmetric_eight_bits_are_refused_where_they_reach_too_far() -> None:
    q = quantized(Scheme(8, 32, symmetric=False))
    q = replace(q, zeros=torch.zeros_like(q.zeros), stored=torch.full_like(q.codes, 255))
    with pytest.raises(CheckpointError, match="Q8_0"):
        GGUF.encode(q)


def test_scales_that_are_not_finite_are_refused() -> None:
    packed = of_llama_cpp("Q8_0").clone()
    packed[0, :2] = torch.tensor([float("inf")]).half().view(torch.uint8)
    with pytest.raises(CheckpointError, match="not finite"):
        from_blocks(gguf_blocks.decode(packed, KINDS["Q8_0"]), symmetric=False)
    packed = of_llama_cpp("MXFP4").clone()
    packed[0, 0] = 255
    with pytest.raises(CheckpointError, match="NaN"):
        from_blocks(gguf_blocks.decode(packed, KINDS["MXFP4"]), symmetric=True)
