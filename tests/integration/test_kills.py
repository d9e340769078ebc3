"""SIGKILL at every rename and at seeded random moments: the resumed job gives the same bytes.

For every method and architecture.
"""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from architectures import ARCHITECTURES, MOE, tiny_model

from quantkit.algorithms import CALIBRATED, METHODS

KILLER = Path(__file__).with_name("killer.py")


class Killer:
    """killer.py, started when first needed: see there."""

    def __init__(self) -> None:
        self.server: subprocess.Popen[str] | None = None

    def __call__(
        self, folder: Path, source: Path, text: Path | str | None, at: str = "renames", *,
        moments: int = 20, again: int = 0, hard: int = 0, seed: int = 0, **options: Any,
    ) -> dict[str, Any]:  # fmt: skip
        if self.server is None or self.server.poll() is not None:
            self.server = subprocess.Popen(
                [sys.executable, KILLER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        asked: dict[str, Any] = {"source": str(source), "group_size": 32, **options}
        if text is not None:
            asked = {"calibration": str(text), "samples": 4, "seq_len": 32, **asked}
        task = {
            "folder": str(folder),
            "options": asked,
            "at": at,
            "moments": moments,
            "again": again,
            "hard": hard,
            "seed": seed,
        }
        print(json.dumps(task), file=self.server.stdin, flush=True)
        found: dict[str, Any] = json.loads(
            self.server.stdout.readline() or '{"failures": "the killer died, see stderr"}'
        )
        assert found["failures"] == []
        print({**found, "events": len(found["events"])})
        return found


@pytest.fixture(scope="module")
def killer() -> Iterator[Killer]:
    found = Killer()
    yield found
    if found.server is not None:
        found.server.communicate("")


def test_a_job_killed_at_each_rename_ends_with_the_same_bytes(
    killer: Killer, tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    found = killer(tmp_path / "k", tiny_original, calibration_text, moments=4, again=2, hard=2, kv_bits=8)
    assert found["events"].count("os.rename") >= 12  # 3 blocks, their records, states, plain tensors, job, output
    assert found["kills"] >= 14
    assert found["states"] >= 12


def test_a_job_that_chooses_bits_killed_at_each_rename_ends_with_the_same_bytes(
    killer: Killer, tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    """What was measured before the first block outlives the kill.

    So do what was chosen by it, and the report that tells both.
    """
    options: dict[str, Any] = dict(method="rtn", target_bpw=6.0, format="native")
    found = killer(tmp_path / "k", tiny_original, calibration_text, moments=0, hard=1, **options)
    assert found["events"].count("os.rename") >= 10  # the measurement, 3 blocks, head and embeddings, job, output
    assert found["kills"] >= 10


@pytest.fixture(scope="module")
def models(tiny_original: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny random model of an architecture, by name, with the tokenizer of the tiny model."""

    @functools.cache
    def model(name: str) -> Path:
        source = tmp_path_factory.mktemp("models") / name
        tiny_model(name, vocab_size=384).save_pretrained(source)
        for file in tiny_original.glob("*token*"):
            shutil.copy(file, source)
        return source

    return model


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_and_method_survives_kills_at_each_rename_and_at_20_random_moments(
    name: str, method: str, killer: Killer, models: Callable[[str], Path], calibration_text: Path, tmp_path: Path
) -> None:
    if method == "tune" and name in MOE:
        pytest.skip("mixtures of experts are refused by --method tune: test_tune.py")
    text = calibration_text if method in CALIBRATED else None
    options: dict[str, Any] = dict(method=method, group_size=None, format="native", bits=8)
    if method == "tune":
        options |= dict(bits=4, tune_steps=4)
    found = killer(tmp_path / "k", models(name), text, again=2, hard=1, seed=len(name), **options)
    assert found["kills"] >= 20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mixtral", dict(method="awq", kv_bits=8)),
        ("gpt_oss", dict(method="gptq", kv_bits=4)),
        ("llama", dict(method="gptq", fold=True, guided=True, gptaq=True)),
        ("llama",
         dict(method="gptq", rules=["lm_head=bits:8", "*.down_proj=bits:8", "*.o_proj=keep"], calibration="self")),
        ("llama",
         dict(method="awq", rules=["lm_head=bits:8", "model.embed_tokens=bits:8"], calibration="self", kv_bits=8)),
    ],
    ids=["mixtral-awq-kv8", "gpt_oss-gptq-kv4", "llama-guided-gptaq", "llama-gptq-rules-self",
         "llama-awq-rules-self-kv8"],
)  # fmt: skip
def test_kv_scales_rules_and_text_of_its_own_survive_kills(
    name: str,
    options: dict[str, Any],
    killer: Killer,
    models: Callable[[str], Path],
    calibration_text: Path,
    tmp_path: Path,
) -> None:
    killer(tmp_path / "k", models(name), calibration_text, again=4, hard=1, group_size=None, format="native", **options)


@pytest.mark.slow
def test_distilled_scales_survive_kills(
    killer: Killer, tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = dict(method="awq", distil=8)
    killer(tmp_path / "k", tiny_original, calibration_text, moments=6, again=2, hard=1, **options)


@pytest.mark.slow
def test_a_kv_budget_survives_kills(
    killer: Killer, tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = dict(method="rtn", kv_budget=3.0, samples=2, seq_len=256)
    killer(tmp_path / "k", tiny_original, calibration_text, moments=3, again=2, hard=1, **options)


@pytest.mark.slow
def test_a_kill_at_any_step(killer: Killer, tiny_original: Path, calibration_text: Path, tmp_path: Path) -> None:
    found = killer(
        tmp_path / "k", tiny_original, calibration_text, "events", moments=0, again=10, kv_bits=4, format="native"
    )
    assert found["kills"] >= len(found["events"]) >= 80
