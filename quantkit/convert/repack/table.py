"""What becomes of each kind of stored weight in each format: the table of docs/formats/README.md.

``python -m quantkit.convert.repack.table`` prints it. Every cell asks the format itself (``supports``) and the code
that fits a weight to it (``fit``), with a weight of that kind; nothing is said here that the code does not do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from quantkit.convert.repack.fit import fit, written_scheme
from quantkit.core import affine
from quantkit.core.blocks import KINDS
from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError
from quantkit.formats import PACKED, writer_format
from quantkit.formats.ggml import codes as gguf_codes

BEGIN, END = "<!-- begin: repack table -->", "<!-- end: repack table -->"
SHAPE = (256, 384)

TARGETS = (*PACKED, "gguf")  # bitsandbytes rounds anew: no repack


@dataclass(frozen=True, slots=True)
class Stored:
    """A row: words for people, and a weight of that kind; without one nothing but a dense checkpoint is possible."""

    words: str
    weight: QuantTensor | None


def rows() -> list[Stored]:
    """Return the kinds of weights that are read."""
    return [
        Stored("4 bits sym, groups of 32, 64, 128 or a channel", _made(Scheme(4, 128))),
        Stored("4 bits asym", _made(Scheme(4, 128, symmetric=False))),
        Stored("8 bits sym", _made(Scheme(8, 128))),
        Stored("8 bits asym", _made(Scheme(8, 128, symmetric=False))),
        Stored("2, 3 bits sym or asym", _made(Scheme(3, 128, symmetric=False))),
        Stored("5 bits asym", _made(Scheme(5, 128, symmetric=False))),
        Stored("6, 7 bits", _made(Scheme(6, 128))),
        Stored("groups that 32 does not divide", _made(Scheme(4, 40))),
        Stored("scales in bfloat16 that float16 does not hold", _extreme()),
        Stored("8 bits with int8 activations", _made(Scheme(8, None, activations="int8"))),
        Stored("Q4_0 of GGUF", _blocks("Q4_0")),
        Stored("Q5_0 of GGUF", _blocks("Q5_0")),
        Stored("Q8_0 of GGUF", _blocks("Q8_0")),
        Stored("fp8 per channel or matrix (compressed-tensors, fp8, ModelOpt)", _made(Scheme.of("fp8"))),
        Stored("fp8 in whole blocks of 128 x 128 (DeepSeek)", _made(Scheme.of("fp8-block"))),
        Stored("nvfp4 of compressed-tensors", _made(Scheme.of("nvfp4"))),
        Stored("nvfp4 of ModelOpt, its factor no power of two", _modelopt()),
        Stored("mxfp4 of compressed-tensors or GGUF", _made(Scheme.of("mxfp4"))),
        Stored("mxfp4 experts of gpt-oss", None),
        Stored("act-order gptq; NF4, FP4, LLM.int8 of bitsandbytes", None),
        Stored("Q4_1, Q5_1 whose minima are no whole steps; K-quants, IQ4_NL of GGUF", None),
    ]


def _noise() -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)) * 0.05


def _made(scheme: Scheme) -> QuantTensor:
    weight = _noise()
    scheme = affine.fixed(weight, scheme)
    scales, zeros = affine.minmax_params(weight, scheme)
    return QuantTensor(affine.quantize(weight, scales, zeros, scheme), scales, zeros, scheme)


def _extreme() -> QuantTensor:
    q = _made(Scheme(4, 128, scale_dtype="bfloat16"))
    return replace(q, scales=q.scales * 2.0**-16)


def _blocks(kind: str) -> QuantTensor:
    """A weight as llama.cpp stores it: scales of both signs, but for 8 bits."""
    half = KINDS[kind].offset
    q = _made(Scheme(KINDS[kind].bits, 32))
    blocks = gguf_codes.to_blocks(q, kind)
    signs = torch.where(torch.arange(blocks.d.shape[1]) % 2 == 0, 1.0, -1.0 if half < 128 else 1.0)
    return gguf_codes.from_blocks(replace(blocks, d=blocks.d * signs.half()), symmetric=half == 128)


def _modelopt() -> QuantTensor:
    q = _made(Scheme.of("nvfp4"))
    assert q.scheme.global_scale is not None
    factor = torch.tensor(1.7 / q.scheme.global_scale)
    scheme = replace(q.scheme, global_scale=float(1 / factor))
    return replace(q, scales=q.scales * 1.7, scheme=scheme)


def cell(stored: Stored, form_name: str) -> str:
    """Return what becomes of a stored weight in a format: exact (and as what), near, or no."""
    q, form = stored.weight, writer_format(form_name)
    if q is None or form.supports(written_scheme(form, q.scheme), *q.shape) is not None:
        return "no"
    try:
        (name, *_) = fit(q, form, rounding=False).parts
    except CheckpointError:
        return "near" if _rounds(q, form_name) else "no"
    if form_name != "gguf":
        return "exact"
    kind, near = name.rpartition(".")[2], next(iter(fit(q, form, rounding=True).parts)).rpartition(".")[2]
    return f"exact ({kind})" + ("" if near == kind else f", near ({near})")


def _rounds(q: QuantTensor, form_name: str) -> bool:
    try:
        return fit(q, writer_format(form_name), rounding=True).error > 0
    except CheckpointError:
        return False


def table() -> str:
    """Return the table, as Markdown between its markers."""
    lines = [
        BEGIN,
        f"| stored | {' | '.join(TARGETS)} | --dequantize |",
        "|---" * (len(TARGETS) + 2) + "|",
        *(f"| {row.words} | {' | '.join(cell(row, name) for name in TARGETS)} | yes |" for row in rows()),
        END,
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
