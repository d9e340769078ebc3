"""Memory of the end-to-end pass: what the plan foretells for it against what the process took."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from architectures import tiny_model
from memory_peak import least_of_three, own_bytes, peak_taken

import quantkit
from quantkit.convert import finish, run
from quantkit.convert.stages import distil as distil_pass
from quantkit.core.host import release_free_memory

VOCABULARY, HIDDEN = 1 << 17, 256  # a matrix of 134 MB in float32: all else is small beside it


@pytest.fixture(scope="module")
def wide(tiny_original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is mostly head and embeddings."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("wide")
    sizes = dict(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=256,
        num_hidden_layers=2,
        max_position_embeddings=512,
    )
    tiny_model("llama", **sizes, tie_word_embeddings=False).half().save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_original).save_pretrained(folder)
    return folder


def watch(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, phase: str) -> list[float]:
    """Bytes that ``where.name`` takes from now on, as a share of what the plan (its first argument) foretold."""
    shares: list[float] = []
    whole: Callable[..., Any] = getattr(where, name)

    def watched(plan: Any, *rest: Any) -> Any:
        taken: list[int] = []
        with peak_taken(taken):
            result = whole(plan, *rest)
        shares.append(taken[0] / plan.prediction.phases[phase])
        return result

    monkeypatch.setattr(where, name, watched)
    return shares


@pytest.mark.parametrize("rules", [(), ("lm_head=bits:8", "*.embed_tokens=bits:8")], ids=["16 bit", "8 bit"])
def test_the_plan_foretells_what_distilling_takes_with_and_without_a_quantized_head(
    rules: tuple[str, ...], wide: Path, calibration_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = watch(monkeypatch, finish, "_distil", "distil")

    def share() -> float:
        quantkit.convert(
            wide, tmp_path / f"out-{len(shares)}", method="rtn", scales="minmax", format="native", rules=rules,
            distil=8, seq_len=32, calibration=str(calibration_text),
        )  # fmt: skip
        return shares[-1]

    # the least of three runs is 0.76: packing and rounding in small pieces take less than the plan still counts
    assert 0.7 <= least_of_three(share, 1.25) <= 1.25, shares


def test_a_step_gives_back_what_it_took(
    tiny_original: Path, calibration_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What learns lies in the heap between what a step needs and frees: without care each step leaves it more torn."""
    from transformers import AutoTokenizer

    sizes = dict(vocab_size=512, hidden_size=256, intermediate_size=1024, num_hidden_layers=12)
    tiny_model("llama", **sizes).half().save_pretrained(tmp_path / "deep")
    AutoTokenizer.from_pretrained(tiny_original).save_pretrained(tmp_path / "deep")
    seen: list[int] = []
    step: Callable[..., Any] = distil_pass._Pass._step

    def measured(self: Any, index: int) -> None:
        if not seen:
            release_free_memory()
            seen.append(own_bytes())
        step(self, index)
        seen.append(own_bytes())

    monkeypatch.setattr(distil_pass._Pass, "_step", measured)
    quantkit.convert(
        tmp_path / "deep", tmp_path / "out", method="rtn", scales="minmax", distil=24, seq_len=64, group_size=32,
        calibration=str(calibration_text),
    )  # fmt: skip
    assert len(seen) > 6
    assert max(seen[1:]) - seen[0] < 24 << 20, [held >> 20 for held in seen]


def test_the_plan_foretells_what_measuring_takes(
    wide: Path, calibration_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = watch(monkeypatch, run, "decide_plan", "measure")

    def share() -> float:
        quantkit.convert(
            wide, tmp_path / f"out-{len(shares)}", method="tune", tune_steps=1, format="native", samples=8, seq_len=512,
            group_size=32, calibration=str(calibration_text),
        )  # fmt: skip
        return shares[-1]

    assert 0.7 <= least_of_three(share, 1.15) <= 1.15, shares
