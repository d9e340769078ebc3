"""What fits into memory, beside sums made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from scripts import script

from quantkit.core.kvscheme import KVScheme

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def kv_memory() -> Any:
    return script(ROOT / "eval" / "kv_memory.py")


def test_four_bits_with_scales_take_0_281_of_sixteen(kv_memory: Any) -> None:
    """4 bits and two fp16 numbers for 64 of them: 4.5 of 16."""
    line = next(line for line in kv_memory.token_table().splitlines() if line.startswith("| 4 bits |"))
    assert line == "| 4 bits | 4.500 | 36,864 | 0.281 |"
    assert 36_864 == 32 * 2 * 8 * 128 * 4.5 / 8


def test_a_batch_fits_and_one_sequence_more_does_not(kv_memory: Any) -> None:
    llama = next(shape for shape in kv_memory.SHAPES if shape.name == "Llama-3.1-8B")
    room = 0.9 * 24e9 - llama.weight_bytes
    assert llama.weight_bytes == pytest.approx(6.03e9, rel=0.01)
    exact = 32 * 32768 * 2 * 8 * 128 * 2
    assert llama.batch(24, 32768, KVScheme()) == room // exact == 3
    # pages of 64 tokens, all but the newest 64 tokens packed at 4.5 bits, and 4 first tokens
    page = 2 * 8 * 128 * 64
    packed = 32 * ((32768 // 64 - 1) * page * 4.5 / 8 + page * 2 + 4 * 2 * 8 * 128 * 2)
    assert llama.cache_bytes(32768, KVScheme.of(4)) == packed
    assert llama.batch(24, 32768, KVScheme.of(4)) == room // packed == 12


def test_what_does_not_fit_at_all_is_a_dash_and_no_context_is_longer_than_the_models(kv_memory: Any) -> None:
    lines = [line for line in kv_memory.batch_table().splitlines() if "Llama-2-13B" in line]
    assert len(lines) == 1
    assert lines[0].startswith("| Llama-2-13B (7.8 GB) | 4k | - | ")
