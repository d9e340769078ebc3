"""A stopped job goes on with --resume and ends with the same bytes: one architecture of each mechanism.

What a block hands on differs: keys and values for later blocks, several hidden states, inputs that depend on tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from scripts import script
from written import digest

import quantkit

EVAL = Path(__file__).resolve().parents[2] / "eval"
MECHANISMS = {
    "causal:gpt2": "linears stored transposed",
    "causal:falcon_h1": "state space and attention in one block",
    "causal:qwen3_next": "linear attention, a shared expert with a gate",
    "causal:deepseek_v3": "latent attention, experts, a stored correction of the router",
    "causal:glm_moe_dsa": "the sparse indexer's choice is handed to the next block",
    "causal:gemma4_text": "keys and values of an earlier block",
    "causal:gemma3n_text": "several hidden states, inputs that depend on tokens",
    "causal:deepseek_v4": "hyper-connections",
    "image-text:qwen3_vl": "a tower beside the language model",
}


# What finished blocks handed on is not kept: the job runs through them again before it goes on.
HANDED_ON = ("causal:glm_moe_dsa", "causal:gemma4_text", "causal:gemma3n_text")


class Stopped(Exception):
    """What a test raises in the middle of a job."""


@pytest.fixture
def source(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model of the type, with a tokenizer of numbers."""
    monkeypatch.syspath_prepend(str(EVAL))
    group, model_type = request.param.split(":")
    tiny = script(EVAL / "tiny_models.py")
    tiny.tiny_model(tiny.Kind(group, model_type)).save_pretrained(tmp_path / "source")
    script(EVAL / "architecture_trial.py").write_tokenizer(tmp_path / "source")
    return tmp_path / "source"


@pytest.mark.filterwarnings("ignore:generation computes the whole text again")  # of the report's sample
@pytest.mark.usefixtures("states_after_each_block")
@pytest.mark.parametrize("source", MECHANISMS, indirect=True)
def test_a_stopped_job_ends_with_the_same_bytes(source: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    options = dict(method="gptq", group_size=32, calibration=str(source / "calibration.txt"), samples=2, seq_len=48)

    def convert(out: str, **more: Any) -> None:
        quantkit.convert(source, out=tmp_path / out, **options, **more)

    def stop_after_the_first_block(progress: Any) -> None:
        if (progress.stage, progress.done) == ("blocks", 1):
            raise Stopped

    convert("wanted")
    with pytest.raises(Stopped):
        convert("out", on_progress=stop_after_the_first_block)
    seen: list[tuple[str, int]] = []
    convert("out", resume=True, on_progress=lambda progress: seen.append((progress.stage, progress.done)))
    assert seen[0] == ("blocks", 0 if request.node.callspec.params["source"] in HANDED_ON else 1)
    assert digest(tmp_path / "out") == digest(tmp_path / "wanted")
