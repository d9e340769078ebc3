"""Packing: pure, exact, at any shape."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.core.packing import PackedCodes, pack_rows, packed_width, unpack_rows


@settings(max_examples=60, deadline=None)
@given(bits=st.integers(2, 8), rows=st.integers(1, 9), cols=st.integers(1, 200), seed=st.integers(0, 2**31))
def test_unpack_undoes_pack(bits: int, rows: int, cols: int, seed: int) -> None:
    codes = torch.randint(0, 1 << bits, (rows, cols), generator=torch.Generator().manual_seed(seed))
    words = pack_rows(codes, bits)
    assert words.shape == (rows, packed_width(cols, bits))
    assert torch.equal(unpack_rows(words, bits, cols).long(), codes)


@pytest.mark.parametrize("bits", range(2, 9))
def test_odd_shape_of_830_by_545(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (830, 545), generator=torch.Generator().manual_seed(bits))
    assert torch.equal(unpack_rows(pack_rows(codes, bits), bits, 545).long(), codes)


@pytest.mark.parametrize("bits", range(2, 9))
def test_words_are_one_little_endian_bit_stream(bits: int) -> None:
    """Oracle: the row as one big integer, field i at bit i * bits."""
    codes = torch.randint(0, 1 << bits, (1, 77), generator=torch.Generator().manual_seed(bits))
    stream = sum(int(code) << (i * bits) for i, code in enumerate(codes[0]))
    expected = [stream >> (32 * w) & 0xFFFFFFFF for w in range(packed_width(77, bits))]
    assert [int(w) & 0xFFFFFFFF for w in pack_rows(codes, bits)[0]] == expected


def test_golden_words() -> None:
    def words(codes: torch.Tensor, bits: int) -> list[int]:
        return [int(w) & 0xFFFFFFFF for w in pack_rows(codes[None], bits)[0]]

    assert words(torch.arange(8), 4) == [0x76543210]
    assert words(torch.arange(-8, 0) + 8, 4) == [0x76543210]
    assert words(torch.arange(0, 8) + 8, 4) == [0xFEDCBA98]
    assert words(torch.tensor([-128, -1, 0, 127]) + 128, 8) == [0xFF807F00]
    assert words(torch.arange(8).repeat(4), 3) == [0x88FAC688, 0xC688FAC6, 0xFAC688FA]


def test_codes_outside_the_range_are_refused() -> None:
    with pytest.raises(ValueError, match="4 bits hold 0 to 15"):
        pack_rows(torch.tensor([[0, 16]]), 4)
    with pytest.raises(ValueError, match="from -1"):
        pack_rows(torch.tensor([[-1]]), 4)


def test_a_wrong_width_is_refused() -> None:
    with pytest.raises(ValueError, match="9 codes of 4 bits"):
        unpack_rows(torch.zeros(1, 1, dtype=torch.int32), 4, 9)


def test_packed_codes_have_the_shape_of_their_codes_and_unpack_to_them() -> None:
    codes = torch.randint(0, 8, (5, 45), dtype=torch.uint8)
    held = PackedCodes(pack_rows(codes, 3), 3, 45)
    assert held.shape == (5, 45)
    assert torch.equal(held.unpack(), codes)
    with pytest.raises(ValueError, match="45 codes of 4 bits need int32"):
        PackedCodes(held.words, 4, 45)
