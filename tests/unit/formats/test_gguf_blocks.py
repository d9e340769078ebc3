"""Bytes of ggml's blocks: the gguf library reads in them what we mean, and we read them back."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from quantkit.core.blocks import KINDS, BlockCodes, BlockKind
from quantkit.errors import CheckpointError
from quantkit.formats.ggml.blocks import decode, encode


def random_blocks(kind: BlockKind, rows: int = 3, blocks: int = 2, seed: int = 0) -> BlockCodes:
    """Any codes, scales and minima that the kind can hold."""
    draw = torch.Generator().manual_seed(seed)
    width, subs = blocks * kind.width, blocks * kind.width // kind.sub
    codes = torch.randint(0, kind.top + 1, (rows, width), generator=draw).to(torch.uint8)
    d = torch.randn(rows, blocks, generator=draw).half()
    if kind.exponent:
        d = torch.randint(100, 140, (rows, blocks), generator=draw).to(torch.uint8)
    low, high = kind.scale_range
    ints = torch.randint(low, high + 1, (rows, subs), generator=draw).to(torch.int16) if kind.scale_bits else None
    dmin = torch.randn(rows, blocks, generator=draw).half() if kind.minima else None
    minima = None if ints is None or not kind.minima else ints.flip(1)
    return BlockCodes(kind, codes, d, ints, dmin, minima)


@pytest.mark.parametrize("name", KINDS)
def test_the_gguf_library_reads_the_numbers_we_mean(name: str) -> None:
    blocks = random_blocks(KINDS[name])
    packed = encode(blocks)
    kind = gguf.GGMLQuantizationType[name]
    assert gguf.GGML_QUANT_SIZES[kind] == (blocks.kind.width, blocks.kind.nbytes)
    theirs = torch.from_numpy(gguf.quants.dequantize(packed.numpy(), kind))
    assert torch.equal(theirs, blocks.dequantize())


@pytest.mark.parametrize("name", KINDS)
def test_decoding_gives_back_every_field(name: str) -> None:
    blocks = random_blocks(KINDS[name], seed=1)
    again = decode(encode(blocks), blocks.kind)
    for field in ("codes", "d", "scales", "dmin", "minima"):
        ours, back = getattr(blocks, field), getattr(again, field)
        assert (ours is None and back is None) or torch.equal(ours, back), field


@pytest.mark.parametrize("name", KINDS)
def test_any_bytes_are_read_as_the_library_reads_them(name: str) -> None:
    kind = KINDS[name]
    data = np.random.default_rng(2).integers(0, 256, (4, 3 * kind.nbytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        theirs = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name])
    ours = decode(torch.from_numpy(data), kind).dequantize().numpy()
    finite = np.isfinite(theirs)
    assert np.array_equal(theirs[finite], ours[finite])
    assert not np.isfinite(ours[~finite]).any()


def test_rows_that_end_within_a_block_are_refused() -> None:
    with pytest.raises(CheckpointError, match="blocks of 18 bytes"):
        decode(torch.zeros(2, 19, dtype=torch.uint8), KINDS["Q4_0"])


def test_fields_of_another_shape_are_refused() -> None:
    with pytest.raises(CheckpointError, match="Q4_K: scales is None"):
        BlockCodes(KINDS["Q4_K"], torch.zeros(1, 256, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.float16))


def test_the_example_of_the_page_is_what_it_says() -> None:
    packed = bytes.fromhex("083081899199a1a9b1b9c0c8d0d8e0e8f0f8000810182028303840474f575f676f77")
    blocks = decode(torch.tensor([list(packed)], dtype=torch.uint8), KINDS["Q8_0"])
    assert torch.allclose(blocks.dequantize()[0], torch.arange(-16.0, 16.0), atol=0.07)
    assert bytes(encode(blocks)[0].tolist()) == packed
