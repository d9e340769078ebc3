"""Types of transformers' models, made tiny, from end to end: one for every mechanism, and all of them (slow).

``eval/architectures.py`` tries them in processes of their own; here its results are compared with what is known.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scripts import script

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "eval" / "architectures.py"

MECHANISMS = {
    "causal:gpt2": "linears stored transposed",
    "causal:bert": "an encoder that decodes",
    "causal:bart": "a decoder cut from an encoder-decoder",
    "causal:mamba": "state space",
    "causal:falcon_h1": "state space and attention in one block",
    "causal:jamba": "state space, attention and experts in turn",
    "causal:nemotron_h": "experts without a gate",
    "causal:zamba2": "weights that several blocks share",
    "causal:recurrent_gemma": "a linear recurrence",
    "causal:lfm2": "convolutions",
    "causal:qwen3_next": "linear attention, a shared expert with a gate",
    "causal:kimi_linear": "linear and latent attention",
    "causal:minimax": "a cache of its own",
    "causal:deepseek_v3": "latent attention, a stored correction of the router",
    "causal:deepseek_v32": "a sparse indexer's keys",
    "causal:deepseek_v4": "hyper-connections",
    "causal:longcat_flash": "two attentions in one block, choices that are no experts",
    "causal:llama4_text": "every expert at once",
    "causal:jetmoe": "tokens sorted by expert, a router nested deeper",
    "causal:dbrx": "experts' matrices one after another in two dimensions",
    "causal:gemma3n_text": "several hidden states, inputs that depend on tokens",
    "causal:gemma4_text": "keys and values of an earlier block",
    "causal:hrm_text": "linears joined from stored tensors",
    "causal:xlstm": "a memory of matrices",
    "image-text:gemma3": "a tower and a projector",
    "image-text:qwen2_5_vl": "positions in three dimensions",
    "image-text:qwen3_5": "a tower beside linear attention",
    "image-text:step3p7": "one projection of all experts in a tensor",
    "image-text:mllama": "blocks that attend to images only",
}

# How types end that do not pass yet. A type that ends in another way must leave, or change its entry.
NOT_YET = {
    "causal:hrm_text": "refused",
    "image-text:mllama": "refused",
}

# The least that pass, of all.
CAUSAL, IMAGE_TEXT = 150, 70


def try_types(out: Path, *arguments: str) -> dict[str, Any]:
    """The script's result for the types that the arguments choose; all without any."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), "--out", str(out), *arguments]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    types: dict[str, Any] = json.loads(out.read_text())["types"]
    return types


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One result for each entry of MECHANISMS."""
    return try_types(tmp_path_factory.mktemp("types") / "types.json", "--only", ",".join(MECHANISMS))


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_type_of_every_mechanism_passes(name: str, tried: dict[str, Any]) -> None:
    result = tried[name]
    assert result["end"] == NOT_YET.get(name, "passed"), f"{MECHANISMS[name]}: {result}"


def test_what_does_not_pass_yet_is_known_to_transformers() -> None:
    architectures = script(SCRIPT)
    assert len(architectures.chosen(",".join(NOT_YET))) == len(NOT_YET)


def test_shards_hold_every_type_once() -> None:
    architectures = script(SCRIPT)
    kinds = architectures.chosen(None)
    parts = [kind for index in range(3) for kind in architectures.shard(kinds, f"{index}/3")]
    assert sorted(map(str, parts)) == sorted(map(str, kinds))
    with pytest.raises(SystemExit, match="3/3 is not i/n"):
        architectures.shard(kinds, "3/3")


def test_the_table_has_a_row_for_each_type_that_does_not_pass() -> None:
    architectures = script(SCRIPT)
    types = {
        "causal:llama": {"end": "passed"},
        "causal:blt": {"end": "refused", "stage": "load", "message": "no | of layers"},
        "image-text:git": {"end": "all but the check", "check": {"message": "twin"}},
    }
    text = architectures.table({"versions": {"transformers": "5", "torch": "2"}, "types": types})
    assert "1 of 2 causal (1 refused); 0 of 1 image-text (1 all but the check)" in text
    assert "Pass, causal (1): llama." in text
    assert "| causal:blt | refused | load | no \\| of layers |  |" in text
    assert "| image-text:git | all but the check |  |  | twin |" in text


@pytest.mark.slow
def test_every_type_passes_or_is_known_not_to(tmp_path: Path) -> None:
    """20 minutes on one core. None is wrong, none crashes; none that the page names as passing is lost."""
    types = try_types(tmp_path / "types.json")
    ends = {name: result["end"] for name, result in types.items()}
    worst = {name: types[name] for name, end in ends.items() if end in ("wrong", "crashed", "not built")}
    assert not worst
    changed = {name: ends[name] for name, end in NOT_YET.items() if ends[name] != end}
    assert not changed, "these no longer end as NOT_YET says"
    passed = [name for name, end in ends.items() if end == "passed"]
    assert sum(name.startswith("causal:") for name in passed) >= CAUSAL
    assert sum(name.startswith("image-text:") for name in passed) >= IMAGE_TEXT
    published = json.loads((ROOT / "eval" / "results" / "architectures.json").read_text())["types"]
    lost = {name: types[name] for name, result in published.items() if result["end"] == "passed" != ends.get(name)}
    assert not lost
