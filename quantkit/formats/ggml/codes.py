"""Integer codes and MXFP4 as ggml's blocks, and back, without a change of any weight.

A block of 32 weights has one float16 scale d, so a group of 32, 64, 128, ... weights, or a whole row, is some blocks
with the same d::

    Q4_0, Q5_0, Q8_0   w = d (q - half)    half 8, 16, 128
    Q4_1, Q5_1         w = d q + m         m = -zero * scale, in float16

d may be negative, and is in about half of the blocks that llama.cpp writes: the weight of largest magnitude becomes
-8 d. A scale here is positive, so such a block turns over: ``code = top - q`` and ``zero = top - half`` (7 where others
have 8). Q4_0 of another tool is therefore read as asymmetric 4 bits, unless no d in the file is negative.

Which block format a weight gets: ``block_kind_for``. What lies where in a block: ``formats.ggml.blocks``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.core.blocks import KINDS, BlockCodes, BlockKind
from quantkit.core.qtensor import QuantTensor
from quantkit.core.rounding.numbers import BIAS_E8M0, NAN_E8M0, decode_e8m0, encode_e8m0
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError

WIDTH = 32  # weights of a block
LARGEST_E8M0 = BIAS_E8M0 + 24  # as formats.floats.compressed has it: beyond any weight's scale
EMPTY = 2.0**-14  # the scale that a block of zeros gets: the smallest normal float16
CENTRED = {4: "Q4_0", 5: "Q5_0", 8: "Q8_0"}  # bits of a code -> the kind without minima
WITH_MINIMA = {4: "Q4_1", 5: "Q5_1"}
READ = (*CENTRED.values(), *WITH_MINIMA.values(), "MXFP4")
_WIDER = {"Q4_0": "Q5_0", "Q5_0": "Q8_0"}


# -- from blocks ------------------------------------------------------------------------------------------------------


def scheme_of(kind: str, symmetric: bool) -> Scheme:
    """Return the scheme that a weight in blocks of one of ``READ`` has."""
    return Scheme.of("mxfp4") if kind == "MXFP4" else Scheme(KINDS[kind].bits, WIDTH, symmetric)


def turned(blocks: BlockCodes) -> bool:
    """Tell whether a block has a negative scale."""
    return not blocks.kind.exponent and bool((blocks.d < 0).any())


def whole_minima(blocks: BlockCodes) -> bool:
    """Tell whether each minimum is minus a whole number of steps, so that a zero point says the same."""
    return blocks.dmin is None or _zero_points(blocks)[1]


def from_blocks(blocks: BlockCodes, *, symmetric: bool) -> QuantTensor:
    """Return the same weights as codes, scales and zero points.

    blocks: of one of the kinds in ``READ``. symmetric: without zero points; only where no scale is negative.

    Raises CheckpointError for a scale that is not finite, and for a minimum that no zero point says.
    """
    kind = blocks.kind
    if kind.exponent:
        return _from_mxfp4(blocks)
    if not bool(torch.isfinite(blocks.d).all()):
        raise CheckpointError(f"a scale of {kind.name} is not finite. Download the file again.")
    if kind.minima:
        return _from_minima(blocks)
    half, negative, empty = kind.offset, blocks.d < 0, blocks.d == 0
    if symmetric and bool(negative.any()):
        raise CheckpointError(f"a scale of {kind.name} is negative, which symmetric codes cannot say.")
    codes = blocks.codes.reshape(*blocks.d.shape, WIDTH)
    zeros = torch.where(negative, kind.top - half, half)
    if not symmetric:
        codes = codes ^ (negative.to(torch.uint8) * kind.top)[..., None]  # top - q
    if bool(empty.any()):
        codes = torch.where(empty[..., None], half, codes)
    scales = torch.where(empty, EMPTY, blocks.d.abs())
    scheme = Scheme(kind.bits, WIDTH, symmetric)
    return QuantTensor(codes.reshape(blocks.shape), scales, None if symmetric else zeros.to(torch.int16), scheme)


def _from_mxfp4(blocks: BlockCodes) -> QuantTensor:
    if bool((blocks.d == NAN_E8M0).any()):
        raise CheckpointError("a scale of MXFP4 is 255, which is no power of two but NaN. Download the file again.")
    if int(blocks.d.max()) > LARGEST_E8M0:
        raise CheckpointError(f"a scale of MXFP4 is 2^{int(blocks.d.max()) - BIAS_E8M0}, no scale. Download it again.")
    return QuantTensor(blocks.codes, decode_e8m0(blocks.d), None, Scheme.of("mxfp4"))


def _zero_points(blocks: BlockCodes) -> tuple[Tensor, bool]:
    """Return the zero points that minima stand for, float32 ``[out, blocks]``, and whether all of them say the same."""
    assert blocks.dmin is not None
    d, m = blocks.d.float(), blocks.dmin.float()
    zeros = torch.where(d > 0, torch.round(-m / torch.where(d > 0, d, 1.0)), 0.0)
    fits = (d > 0) & (zeros >= 0) & (zeros <= blocks.kind.top + 1) & (zeros * d == -m)
    return zeros, bool((fits | ((d == 0) & (m == 0))).all())


def _from_minima(blocks: BlockCodes) -> QuantTensor:
    zeros, same = _zero_points(blocks)
    if not same:
        raise CheckpointError(
            f"minima of {blocks.kind.name} are no whole steps, so no zero point says the same. --dequantize writes such"
            " weights as floating-point numbers; or quantize the 16-bit original."
        )
    empty = blocks.d == 0
    codes = blocks.codes
    if bool(empty.any()):
        codes = torch.where(empty.repeat_interleave(WIDTH, 1), 0, codes)
    scales = torch.where(empty, EMPTY, blocks.d)
    return QuantTensor(codes, scales, zeros.to(torch.int16), Scheme(blocks.kind.bits, WIDTH, symmetric=False))


# -- to blocks --------------------------------------------------------------------------------------------------------


def refusal(scheme: Scheme, in_features: int) -> str | None:
    """Say why no block format holds such a weight (no full stop); None if one does, as far as headers tell."""
    if scheme.number not in ("integer", "mxfp4"):
        return f"ggml has no blocks of {scheme.number} with these scales"
    if scheme.activations is not None:
        return "llama.cpp rounds activations its own way"
    if in_features % WIDTH:
        return f"rows of {in_features} are no multiple of {WIDTH}, the weights of a block"
    if scheme.width(in_features) % WIDTH:
        return f"groups of {scheme.width(in_features)} are no multiple of {WIDTH}, the weights of a block"
    return None


def block_kind_for(q: QuantTensor, *, rounding: bool = False, alone: bool = True) -> str:
    """Return the smallest block format that holds a weight exactly.

    rounding: Q4_1 and Q5_1 are taken although their minima are rounded to float16.
    alone: the weight is a tensor of its own; else it shares one with other experts, and the choice is by scheme alone.

    Raises CheckpointError if none holds it.
    """
    scheme = q.scheme
    if scheme.number == "mxfp4":
        return "MXFP4"
    if q.zeros is None or scheme.bits < 4:  # code - zero runs from -2^bits to 2^bits - 1
        return next(name for bits, name in CENTRED.items() if bits >= scheme.bits)
    if scheme.bits in WITH_MINIMA:
        kind = CENTRED[scheme.bits]
        if alone and _fits(q, KINDS[kind]):
            return kind
        if rounding or (alone and _minima_fit(q)):
            return WITH_MINIMA[scheme.bits]
        return _WIDER[kind]
    if scheme.bits == 8 and not _fits(q, KINDS["Q8_0"]):
        raise CheckpointError(
            "asymmetric 8 bits reach further from zero than Q8_0's codes do, and ggml has no larger ones. Use --format"
            " native, or quantize the 16-bit original with --gguf-type q8_0."
        )
    return "Q8_0"


def widest_kind(scheme: Scheme) -> str:
    """Return the largest block format that ``block_kind_for`` may choose for a scheme."""
    if scheme.number == "mxfp4":
        return "MXFP4"
    kind = next(name for bits, name in CENTRED.items() if bits >= scheme.bits)
    return _WIDER[kind] if not scheme.symmetric and scheme.bits in WITH_MINIMA else kind


def to_blocks(q: QuantTensor, kind: str) -> BlockCodes:
    """Return a weight in a block format; the same numbers but for the rounded minima of Q4_1 and Q5_1.

    Raises CheckpointError for a scale that float16 does not hold.
    """
    block, (rows, columns) = KINDS[kind], q.shape
    if block.exponent:
        return BlockCodes(block, q.codes, encode_e8m0(q.scales))
    every = columns // WIDTH
    times = q.scheme.width(columns) // WIDTH
    scales = half_scales(q.scales).repeat_interleave(times, 1)[:, :every].contiguous()
    zeros = None if q.zeros is None else q.zeros.repeat_interleave(times, 1)[:, :every]
    if block.minima:
        assert zeros is not None
        minima = (-(zeros.float() * scales.float())).half()
        return BlockCodes(block, q.codes, scales, None, minima)
    if zeros is None:
        return BlockCodes(block, q.codes + (block.offset - q.scheme.midpoint), scales)
    centred = q.codes.reshape(rows, every, WIDTH).to(torch.int16) - zeros[..., None]
    turn = _turn(centred, zeros, block)
    codes = torch.where(turn[..., None], -centred, centred) + block.offset
    return BlockCodes(block, codes.to(torch.uint8).reshape(rows, columns), torch.where(turn, -scales, scales))


def half_scales(scales: Tensor) -> Tensor:
    """Return scales as float16. Raises CheckpointError for one that float16 does not hold."""
    half = scales.half()
    if scales.dtype != torch.float16 and not torch.equal(half.float(), scales.float()):
        raise CheckpointError(
            "a scale in bfloat16 is too large or too small for float16. --allow-rounding rounds it; --format"
            " compressed-tensors or native keeps it."
        )
    return half


def _centred(q: QuantTensor) -> tuple[Tensor, Tensor]:
    """Return ``code - zero``, int16 ``[out, in / 32, 32]``, and the zero points of those blocks."""
    assert q.zeros is not None
    rows, columns = q.shape
    zeros = q.zeros.repeat_interleave(q.scheme.width(columns) // WIDTH, 1)[:, : columns // WIDTH]
    return q.codes.reshape(rows, -1, WIDTH).to(torch.int16) - zeros[..., None], zeros


def _turn(centred: Tensor, zeros: Tensor, block: BlockKind) -> Tensor:
    """Tell which blocks have to turn over; those that another tool turned do if they can, so that its bytes return."""
    half = block.offset
    low, high = centred.amin(-1), centred.amax(-1)
    straight, over = (low >= -half) & (high <= half - 1), (low >= 1 - half) & (high <= half)
    return over & (~straight | (zeros == half - 1))


def _fits(q: QuantTensor, block: BlockKind) -> bool:
    centred, _ = _centred(q)
    half = block.offset
    low, high = centred.amin(-1), centred.amax(-1)
    return bool((((low >= -half) & (high <= half - 1)) | ((low >= 1 - half) & (high <= half))).all())


def _minima_fit(q: QuantTensor) -> bool:
    """Tell whether ``zero * scale`` is a float16 number for every group."""
    assert q.zeros is not None
    minima = q.zeros.float() * q.scales.float()
    return bool((minima.half().float() == minima).all())
