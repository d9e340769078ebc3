"""Sequences of different lengths in one batch.

In every architecture that masks, or counts positions, in a way of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from architectures import VOCAB, tiny_config
from torch import Tensor

from quantkit.core.kvscheme import KVPlan, KVScheme
from quantkit.runtime.generate.prefill import pad_left
from quantkit.runtime.kv_cache.transformers_cache import transformers_cache
from quantkit.runtime.model import Model

LENGTHS = (230, 150, 3)
PIECES = (100, 30, 64, 1, 1, 34)
# attention sinks, soft caps, windows beside full layers, alibi, one key head for all, no rotary on full layers
KINDS = ["gpt_oss", "gemma2", "gemma3_text", "cohere2", "starcoder2", "falcon-alibi", "falcon", "gpt_neox", "opt"]


def module_of(kind: str) -> tuple[Any, dict[str, Any]]:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = tiny_config(kind, max_position_embeddings=512)
    if "sliding_window" in config:
        config["sliding_window"] = 20
    data = dict(config)
    torch.manual_seed(0)
    module: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(data.pop("model_type"), **data))
    for parameter in module.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return module.eval(), config


@torch.inference_mode()
def run(model: Model, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Final hidden states of each prompt, read in ``PIECES`` from its own beginning."""
    seam, found, at = transformers_cache(model.new_cache()), [[] for _ in prompts], 0  # type: ignore[var-annotated]
    for size in PIECES:
        pieces = [prompt[at : at + size] for prompt in prompts]
        at += size
        if not any(pieces):
            break
        ids, counts = pad_left(pieces, model.device)
        hidden = model.step(ids, seam, counts)
        for b, piece in enumerate(pieces):
            found[b].append(hidden[b, ids.shape[1] - len(piece) :])
    return [torch.cat(parts) for parts in found]


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_gives_in_a_ragged_batch_what_it_gives_alone(kind: str) -> None:
    module, config = module_of(kind)
    chance = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, VOCAB, (n,), generator=chance).tolist() for n in LENGTHS]
    for bits in (16, 4):
        model = Model(
            module, config, device=torch.device("cpu"), dtype=torch.float32, read_tokenizer=lambda: None,
            kv_plan=KVPlan(KVScheme.of(bits)), fast_step=False,
        )  # fmt: skip
        together = run(model, prompts)
        for found, prompt in zip(together, prompts, strict=True):
            torch.testing.assert_close(found, run(model, [prompt])[0], rtol=1e-4, atol=1e-4)
        if bits == 16:
            torch.testing.assert_close(together[0], model.hidden(torch.tensor(prompts[:1]))[0], rtol=1e-4, atol=1e-4)
