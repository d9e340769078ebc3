"""The look-up in inline PTX gives the tables' numbers: its instructions are carried out here, one by one."""

from __future__ import annotations

import re

import pytest
import torch

from quantkit.runtime.kernels.triton.fp4_tables import ORDERS, RENAMED, UNITS, VALUES, entries, known_table, look_up

CASES = [(kind, dtype) for kind in VALUES for dtype in (torch.bfloat16, torch.float16)]
OFF = {"nf4": {torch.bfloat16: 1.9e-3, torch.float16: 2.1e-4}, "fp4": {torch.bfloat16: 1e-7, torch.float16: 1e-7}}


def permute(a: int, b: int, selectors: int) -> int:
    """``prmt.b32`` as the PTX manual defines it: 4 selectors, whose bit 3 replaces a byte by its sign."""
    source = (a | b << 32).to_bytes(8, "little")
    picked = []
    for place in range(4):
        selector = selectors >> 4 * place & 15
        byte = source[selector & 7]
        picked.append((0xFF if byte & 0x80 else 0) if selector & 8 else byte)
    return int.from_bytes(bytes(picked), "little")


def carried_out(text: str, word: int) -> list[int]:
    """Registers $0 to $3 after the instructions, from $4."""
    registers = {"$4": word}

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    for line in text.strip("{} ").split(";"):
        if not line.strip() or ".reg" in line:
            continue
        name, target, *operands = re.findall(r"[$\w.]+", line)
        numbers = [value(operand) for operand in operands]
        if name == "prmt.b32":
            registers[target] = permute(*numbers)
        elif name == "xor.b32":
            registers[target] = numbers[0] ^ numbers[1]
        elif name == "shr.u32":
            registers[target] = numbers[0] >> numbers[1]
        else:
            assert name == "mov.b32", line
            registers[target] = numbers[0]
    return [registers[f"${index}"] for index in range(4)]


@pytest.mark.parametrize(("kind", "dtype"), CASES, ids=str)
def test_the_instructions_give_the_entries_of_eight_codes(kind: str, dtype: torch.dtype) -> None:
    text, table = look_up(kind, dtype), entries(kind, dtype)
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(0, 1 << 32, (64,), generator=generator).tolist()
    for word in (*words, 0, 0x01234567, 0x89ABCDEF, 0xFFFFFFFF):
        found = torch.tensor(carried_out(text, word)).to(torch.int32).view(torch.int16).view(dtype).view(4, 2)
        expected = [[table[word >> 4 * plane & 15], table[word >> 16 + 4 * plane & 15]] for plane in range(4)]
        assert torch.equal(found.float(), torch.tensor(expected))


@pytest.mark.parametrize(("kind", "dtype"), CASES, ids=str)
def test_entries_are_the_table_in_another_order_and_as_close_as_said(kind: str, dtype: torch.dtype) -> None:
    table = torch.tensor(VALUES[kind])[list(ORDERS[kind])]
    assert torch.equal(torch.tensor(entries(kind, torch.float32)), table)
    assert [ORDERS[kind][place] for place in RENAMED[kind]] == list(range(16))
    scaled = torch.tensor(entries(kind, dtype))
    assert bool(((scaled / UNITS[kind, dtype] - table).abs() <= OFF[kind][dtype] * table.abs()).all())


def test_only_the_two_tables_are_known() -> None:
    assert known_table(torch.tensor(VALUES["nf4"])) == "nf4"
    assert known_table(torch.tensor(VALUES["fp4"])) == "fp4"
    assert known_table(torch.tensor(VALUES["nf4"]) * 2) == ""
