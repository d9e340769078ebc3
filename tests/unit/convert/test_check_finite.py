"""Every weight is looked at before work begins, however it is stored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from architectures import tiny_model

from quantkit.checkpoint.open import open_source
from quantkit.checkpoint.source import Source
from quantkit.convert.stages.check_finite import refuse_non_finite
from quantkit.errors import NumericsError
from quantkit.model.rotate import RotatedSource
from quantkit.model.skeleton import build_skeleton
from quantkit.model.weights import Weights


def look(source: Source) -> list[tuple[int, int]]:
    """Where the scan stood."""
    heard: list[tuple[int, int]] = []
    refuse_non_finite(Weights(build_skeleton(source.config), source), lambda *where: heard.append(where))
    return heard


@pytest.mark.parametrize(
    ("architecture", "parameter"),
    [
        ("llama", "model.layers.1.mlp.up_proj.weight"),
        ("mixtral", "model.layers.2.mlp.experts.down_proj"),
        ("gpt_oss", "model.layers.2.mlp.experts.gate_up_proj"),
    ],
)
def test_one_number_that_is_not_finite_is_named(architecture: str, parameter: str, tmp_path: Path) -> None:
    model = tiny_model(architecture)
    model.save_pretrained(tmp_path / "good")
    heard = look(open_source(tmp_path / "good"))
    assert heard[-1] == (heard[-1][1], heard[-1][1])
    with torch.no_grad():
        model.get_parameter(parameter).view(-1)[-1] = float("inf")
    model.save_pretrained(tmp_path / "bad")
    with pytest.raises(NumericsError, match=r"(up_proj|w2|down_proj|gate_up_proj).* holds NaN or infinite"):
        look(open_source(tmp_path / "bad"))


def test_a_rotated_source_is_looked_at_as_it_is_stored(tmp_path: Path) -> None:
    model = tiny_model("llama", hidden_size=32)
    with torch.no_grad():
        model.get_parameter("model.layers.0.self_attn.v_proj.weight")[3, 5] = float("nan")
    model.save_pretrained(tmp_path)
    with pytest.raises(NumericsError, match=r"tensor 'model\.layers\.0\.self_attn\.v_proj\.weight' holds NaN"):
        look(RotatedSource(open_source(tmp_path)))
