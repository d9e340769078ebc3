"""Every reader gets seeded damage to its real files: what comes of it is a QuantkitError or a model, and nothing else.

QUANTKIT_HOSTILE_INPUTS says how many inputs, QUANTKIT_HOSTILE_SEED from which seed. An input that is not dealt with is
kept, and the failure names it: seed, number, file and what was done to it.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from hostile.limits import Limited, Outcome
from hostile.originals import make_originals
from hostile.readers import FILES, READERS, draw
from hostile.same_numbers import wrong as wrong_numbers

Originals = tuple[Path, Path]

SEED = int(os.environ.get("QUANTKIT_HOSTILE_SEED", "0"))
INPUTS = int(os.environ.get("QUANTKIT_HOSTILE_INPUTS", "600"))
MODULES = (
    "torch",
    "transformers",
    "quantkit.convert.api",
    "quantkit.runtime.load",
    "quantkit.checkpoint.texts",
    "hostile.readers",
)
FRESH = 1000  # inputs for one child: what its heap has lost to fragments should not count as an input's memory


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Originals:
    """The originals, and where to put them to be damaged: where they were made, since a work folder knows its place."""
    scratch = tmp_path_factory.mktemp("originals") / "files"
    kept = scratch.with_name("kept")
    scratch.mkdir()
    make_originals(scratch)
    shutil.copytree(scratch, kept)
    return kept, scratch


def run(originals: Originals, numbers: range, seed: int) -> tuple[Counter[str], list[str]]:
    """Read the inputs of these numbers; returns how many ended in what way, and those that should not have."""
    child, counts, wrong = Limited(*MODULES), Counter[str](), list[str]()
    try:
        for done, number in enumerate(numbers):
            if done % FRESH == FRESH - 1:
                child.close()
            outcome = _read(child, originals, seed, number)
            if outcome.kind in ("memory", "hang", "signal"):  # again in a child of its own, to be sure
                child.close()
                outcome = _read(child, originals, seed, number)
                child.close()
            changed = _changed(originals, seed, number, outcome)
            if changed:
                outcome.kind, outcome.message = "wrong numbers", ", ".join(changed)
            counts[outcome.kind] += 1
            if outcome.kind not in ("passed", "refused"):
                wrong.append(_words(originals, seed, number, outcome))
    finally:
        child.close()
    return counts, wrong


def _read(child: Limited, originals: Originals, seed: int, number: int) -> Outcome:
    kept, scratch = originals
    outcome = child("hostile.readers:read", str(kept), str(scratch), seed, number)
    if outcome.kind in ("memory", "hang", "signal"):  # it could not put the original back
        shutil.rmtree(scratch)
        shutil.copytree(kept, scratch)
    return outcome


def _changed(originals: Originals, seed: int, number: int, outcome: Outcome) -> list[str]:
    """Return the tensors of an input that was read whose numbers changed, though their bytes were not touched."""
    if outcome.kind != "passed" or outcome.value is None:
        return []
    kept = originals[0]
    name, content, _ = draw(str(kept), seed, number)
    return wrong_numbers(kept / name, content, _hashes(kept / name, FILES[name][1]), outcome.value)


@cache
def _hashes(path: Path, reader: str) -> dict[str, str]:
    """The hashes of an undamaged file's numbers."""
    value: dict[str, str] = READERS[reader](path)
    return value


def _words(originals: Originals, seed: int, number: int, outcome: Outcome) -> str:
    """Keep an input, and say all that is known of it."""
    name, content, done = draw(str(originals[0]), seed, number)
    path = originals[1].with_name(f"input-{seed}-{number}-{Path(name).name}")
    path.write_bytes(content)
    return f"input {number} of seed {seed}, {name}, {done}: {outcome.kind}, {outcome.message}\n(kept as {path})"


@pytest.mark.filterwarnings("ignore:.*store a fixed scale:quantkit.errors.QuantkitWarning")
def test_the_originals_are_read(originals: Originals) -> None:
    """What is damaged below is whole before, and every reader gets to its end."""
    for name, (_, reader, _) in FILES.items():
        READERS[reader](originals[1] / name)


def test_a_number_that_changes_without_its_bytes_is_found(originals: Originals) -> None:
    kept = originals[0]
    for name, reader in [("gptq/model.safetensors", "folder"), ("model.gguf", "gguf")]:
        path, before = kept / name, _hashes(kept / name, reader)
        content = path.read_bytes()
        module = next(
            name for name in before if name.endswith(("layers.1.mlp.down_proj", "layers.1.mlp.down_proj.weight"))
        )
        assert wrong_numbers(path, content, before, before) == []
        assert wrong_numbers(path, content, before, before | {module: "0"}) == [module]
        assert wrong_numbers(path, content, before, {"heads": before["heads"]})
        touched = wrong_numbers(path, content[:-1] + bytes([content[-1] ^ 1]), before, {"heads": before["heads"]})
        assert len(touched) == len(before) - 2  # all but the last tensor, and the heads


@pytest.mark.filterwarnings("ignore:.*store a fixed scale:quantkit.errors.QuantkitWarning")
def test_damaged_files_are_refused_or_read(originals: Originals) -> None:
    counts, wrong = run(originals, range(INPUTS), SEED)
    assert not wrong, f"{dict(counts)}\n" + "\n\n".join(wrong[:20])
    assert counts["refused"] > INPUTS // 10
    assert counts["passed"] > INPUTS // 20


@pytest.mark.slow
def test_many_damaged_files_are_refused_or_read(originals: Originals) -> None:
    counts, wrong = run(originals, range(INPUTS, INPUTS + 50_000), SEED)
    print(dict(counts))  # for docs/security.md, with -s
    assert not wrong, f"{dict(counts)}\n" + "\n\n".join(wrong[:20])
