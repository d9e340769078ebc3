"""Structures are built within bounds, and the buffers that nobody stores are those of transformers."""

from __future__ import annotations

import pytest
import torch
from architectures import ARCHITECTURES, tiny_config
from torch import nn

from quantkit.core import empty_build
from quantkit.core.empty_build import MOST_TENSOR, parameters_on_meta
from quantkit.errors import UnsupportedModel
from quantkit.model.language import auto_class
from quantkit.model.skeleton import build_skeleton


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_buffers_are_those_of_a_model_that_is_built_whole(name: str) -> None:
    from transformers import AutoConfig

    config = tiny_config(name)
    whole = auto_class(config["model_type"], config).from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    found = dict(build_skeleton(config, unfuse=False).named_buffers())
    assert set(found) == {name for name, _ in whole.named_buffers()}
    for buffer, expected in whole.named_buffers():
        assert torch.equal(found[buffer], expected), buffer


TOO_LARGE = [
    lambda: torch.arange(MOST_TENSOR),
    lambda: torch.arange(0, 1, 1e-8),
    lambda: torch.full((MOST_TENSOR,), 1.0),
    lambda: torch.linspace(0, 1, MOST_TENSOR),
    lambda: torch.eye(1 << 14),
    lambda: torch.diag(torch.ones(1 << 14)),
    lambda: torch.outer(torch.ones(1 << 14), torch.ones(1 << 14)),
    lambda: torch.einsum("i,j->ij", torch.ones(1 << 14), torch.ones(1 << 14)),
    lambda: torch.ones(1, 1 << 14) * torch.ones(1 << 14, 1),
    lambda: torch.cat([torch.ones(1 << 23)] * 8),
    lambda: torch.ones(1 << 10).repeat(1 << 16),
    lambda: torch.ones(1 << 10).repeat_interleave(1 << 16),
    lambda: torch.ones(1 << 10).expand(1 << 16, 1 << 10).contiguous(),
    lambda: torch.ones(4).new_full((1 << 26,), 1.0),
    lambda: torch.nn.functional.one_hot(torch.zeros(4, dtype=torch.long), 1 << 26),
]


@pytest.mark.parametrize("made", TOO_LARGE, ids=range(len(TOO_LARGE)))
def test_a_tensor_of_more_than_any_model_computes(made) -> None:
    with parameters_on_meta(), pytest.raises(UnsupportedModel, match=r"config\.json asks for a table"):
        made()


def test_buffers_that_are_too_much_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(empty_build, "MOST_BUFFERS", 4 << 10)
    module = nn.Module()
    with parameters_on_meta():
        same = torch.arange(512)  # 4 KB
        module.register_buffer("one", same)
        module.register_buffer("again", same[:7])
        with pytest.raises(UnsupportedModel, match="tables of"):
            module.register_buffer("two", torch.arange(1))


def test_too_many_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(empty_build, "MOST_MODULES", 3)
    with parameters_on_meta(), pytest.raises(UnsupportedModel, match="modules"):
        nn.ModuleList([nn.Identity() for _ in range(4)])
    nn.ModuleList([nn.Identity() for _ in range(4)])


def test_a_mask_is_real_and_a_mask_of_all_positions_is_refused() -> None:
    config = dict(hidden_size=32, num_heads=4, num_layers=1, attention_types=[[["global"], 1]], vocab_size=9)
    model = build_skeleton({"model_type": "gpt_neo", **config, "max_position_embeddings": 5000})
    assert not any(buffer.is_meta for buffer in model.buffers())
    with pytest.raises(UnsupportedModel, match="a table of"):
        build_skeleton({"model_type": "gpt_neo", **config, "max_position_embeddings": 50_000})
