"""What a job keeps is what it gets back, to the bit; what is damaged is not taken."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quantkit.algorithms.guide import Guide
from quantkit.algorithms.kv import LayerRanges
from quantkit.convert.job import states
from quantkit.convert.job.records import NUMBERS, RECORD, keep_measured, kept_measured, restored_result, result_record
from quantkit.convert.job.states import StateStore
from quantkit.convert.results import BlockResult, LayerReport, Measured


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def guide(seed: int) -> Guide:
    parts = [
        numbers(seed + i, *shape, dtype=torch.float64) for i, shape in enumerate([(5,), (5,), (2, 5), (2,), (2,), (2,)])
    ]
    return Guide(("up", "down"), (6, 4), *parts)


def measured(guides: bool = True) -> Measured:
    return Measured(
        [[0.1, 1e-17], [2 / 3]], [numbers(1, 7), numbers(2, 7).abs()], [guide(10), None, guide(20)] if guides else None
    )


def same(a: Measured, b: Measured) -> bool:
    def facts(one: Guide | None) -> object:
        return None if one is None else (one.linears, one.outputs, {k: v.tolist() for k, v in one.to_store().items()})

    return (
        a.sensitivity == b.sensitivity
        and all(torch.equal(x, y) for x, y in zip(a.channels, b.channels, strict=True))
        and (None if a.guides is None else [facts(g) for g in a.guides])
        == (None if b.guides is None else [facts(g) for g in b.guides])
    )


@pytest.mark.parametrize("guides", [False, True])
def test_what_was_measured_comes_back_to_the_bit(guides: bool, tmp_path: Path) -> None:
    assert kept_measured(tmp_path) is None
    keep_measured(tmp_path, measured(guides))
    found = kept_measured(tmp_path)
    assert found is not None
    assert same(found, measured(guides))
    assert (tmp_path / NUMBERS).exists() == guides


@pytest.mark.parametrize("file", [RECORD, NUMBERS])
@pytest.mark.parametrize("how", ["flip", "cut", "remove"])
def test_what_is_damaged_is_measured_again(file: str, how: str, tmp_path: Path) -> None:
    keep_measured(tmp_path, measured())
    data = bytearray((tmp_path / file).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / file).write_bytes(data if how == "flip" else data[:-9])
    if how == "remove":
        (tmp_path / file).unlink()
    assert kept_measured(tmp_path) is None


def test_numbers_of_another_job_are_not_taken(tmp_path: Path) -> None:
    """A kill between the two files leaves the numbers of the job before, or none."""
    (tmp_path / "a").mkdir()
    keep_measured(tmp_path / "a", Measured([], [], [guide(99)]))
    keep_measured(tmp_path, measured())
    (tmp_path / "a" / NUMBERS).replace(tmp_path / NUMBERS)
    assert kept_measured(tmp_path) is None


def result() -> BlockResult:
    ranges = LayerRanges(
        {4: (numbers(1, 2, 8), numbers(2, 2, 8)), 2: (numbers(3, 2, 8), numbers(4, 2, 8))},
        {4: (numbers(5, 2, 8), numbers(6, 2, 8))},
        {4: 1 / 3, 2: 1e-9},
        {4: 0.0},
    )
    distilled = dict(
        steps=7, windows_learned=14, tokens_learned=140, windows_kept_back=2, kl_before=1 / 3, kl_after=None, kept=False
    )  # fmt: skip
    layer = LayerReport("a.b", "W4 g32 asym", 0.1, None, 64, 300, 0.01, "rtn", 2, 40, 1)
    return BlockResult(
        {"a.b.weight": torch.zeros(1)}, {"a.b": "digest"}, [layer], {"a.attn": ranges}, ["a note"],
        {"a": {"norm": True}}, {"a": {"before": 0.2, "after": 1 / 7, "step": 3.0}}, distilled,
    )  # fmt: skip


def test_a_blocks_result_goes_through_json_and_comes_back_without_its_tensors() -> None:
    given = result()
    found = restored_result(json.loads(json.dumps(result_record(given))), Path("block.json"))
    assert found.parts == {}
    for field in dataclasses.fields(BlockResult):
        if field.name not in ("parts", "kv"):
            assert getattr(found, field.name) == getattr(given, field.name), field.name
            assert getattr(given, field.name), f"{field.name}: give it something that can be lost"
    (ranges,), (wanted,) = found.kv.values(), given.kv.values()
    assert (ranges.key_sensitivity, ranges.value_sensitivity) == (wanted.key_sensitivity, wanted.value_sensitivity)
    for side in ("keys", "values"):
        mine, theirs = getattr(ranges, side), getattr(wanted, side)
        assert list(mine) == list(theirs)
        assert all(torch.equal(x, y) for bits in mine for x, y in zip(mine[bits], theirs[bits], strict=True))


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StateStore:
    """It keeps whenever it is asked to."""
    monkeypatch.setattr(states, "EVERY", 0.0)
    monkeypatch.setattr(states, "SHARE", 0)
    return StateStore(tmp_path)


SHAPES = [torch.Size((2, 3, 4)), torch.Size((1, 3, 4))]


def hidden(seed: int) -> list[Tensor]:
    return [numbers(seed, 2, 3, 4), numbers(seed + 1, 1, 3, 4)]


def test_the_youngest_states_up_to_a_block_come_back(store: StateStore) -> None:
    assert store.latest(9, SHAPES.__eq__) is None
    for block in (1, 2, 3):
        assert store.keep(block, hidden(block))
    for limit, wanted in ((9, 3), (3, 3), (2, 2)):
        found = store.latest(limit, SHAPES.__eq__)
        assert found is not None
        assert found[0] == wanted
        assert all(torch.equal(x, y) for x, y in zip(found[1], hidden(wanted), strict=True))
    assert store.latest(1, SHAPES.__eq__) is None  # two are kept, the oldest was written over
    store.clear()
    assert store.latest(9, SHAPES.__eq__) is None
    assert list(store.folder.iterdir()) == []


def test_the_older_states_stand_in_for_damaged_ones(store: StateStore) -> None:
    for block in (1, 2):
        store.keep(block, hidden(block))
    young = next(
        s for s in (0, 1) if json.loads((store.folder / f"states-{s}.json").read_text().split("\n")[1])["block"] == 2
    )
    file = store.folder / f"states-{young}.bin"
    whole = file.read_bytes()
    for damaged in (whole[:-4], bytes([whole[0] ^ 1]) + whole[1:]):
        file.write_bytes(damaged)
        found = store.latest(2, SHAPES.__eq__)
        assert found is not None
        assert found[0] == 1
    file.unlink()
    assert store.latest(2, SHAPES.__eq__)[0] == 1  # type: ignore[index]
    file.write_bytes(whole)
    assert store.latest(2, SHAPES.__eq__)[0] == 2  # type: ignore[index]


def test_states_are_not_written_more_often_than_time_allows(tmp_path: Path) -> None:
    assert not StateStore(tmp_path).keep(1, hidden(1))  # less than ``EVERY`` seconds have gone by
    assert list(tmp_path.iterdir()) == []
