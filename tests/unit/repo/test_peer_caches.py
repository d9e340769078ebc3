"""Peers' caches, as far as they run without the peers: KIVI's recipe."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import script

EVAL = Path(__file__).resolve().parents[3] / "eval"


@pytest.fixture(scope="module")
def kivi() -> Any:
    return script(EVAL / "peers" / "kivi.py")


def fed(layer: Any, k: torch.Tensor, v: torch.Tensor, chunk: int = 64) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [layer.update(*parts) for parts in zip(k.split(chunk, 2), v.split(chunk, 2), strict=True)]


def exact_from(seen: torch.Tensor, given: torch.Tensor) -> int:
    """First token from which on all are as they were given."""
    wrong = (seen != given[:, :, : seen.shape[2]]).flatten(3).any(3).any(1)[0].nonzero()
    return int(wrong.max()) + 1 if len(wrong) else 0


def test_kivi_keeps_what_its_paper_says_exact(kivi: Any) -> None:
    """Keys leave 128 at a time, values one by one when 128 newer ones are there.

    A step sees its own tokens as they are.
    """
    k, v = (torch.randn(1, 2, 64 * 7, 64, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    seen = fed(kivi.KiviLayer(2), k, v)
    assert [exact_from(keys, k) for keys, _ in seen] == [0, 0, 128, 128, 256, 256, 384]
    assert [exact_from(values, v) for _, values in seen] == [0, 0, 0, 64, 128, 192, 256]
    assert [keys.shape[2] for keys, _ in seen] == [64 * (i + 1) for i in range(7)]


def test_kivis_keys_share_a_scale_along_tokens_and_values_along_channels(kivi: Any) -> None:
    """So a channel, or a token, a hundred times larger costs the others nothing."""
    k, v = (torch.randn(1, 1, 512, 64, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    k[..., 5] *= 100
    v[:, :, 7] *= 100
    keys, values = fed(kivi.KiviLayer(2), k, v)[-1]
    others = [i for i in range(64) if i != 5]
    assert (keys - k)[:, :, :384, others].abs().max() < 1.5
    assert (values - v)[:, :, 8:320].abs().max() < 1.5
    assert (keys - k)[..., 5].abs().max() > 10
    codes = {x for group in k.transpose(2, 3)[0, 0, 0, :32][None] for x in keys[0, 0, :32, 0].tolist()}
    assert len(codes) <= 4, "two bits"


def test_kivi_answers_like_a_cache_of_transformers(kivi: Any) -> None:
    """Before anything is quantized it gives what no cache gives."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=50, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.arange(300)[None] % 50
    with torch.inference_mode():
        whole = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        cache = kivi.kivi_cache(2, bits=2)
        known = inspect.signature(type(model.base_model).forward).parameters
        name = "cache" if "cache" in known else "past_key_values"  # since transformers 5.24, and before
        parts = [
            model.base_model(input_ids=part, use_cache=True, **{name: cache}).last_hidden_state
            for part in ids.split(64, 1)
        ]
    found = torch.cat(parts, 1)
    torch.testing.assert_close(found[:, :128], whole[:, :128], rtol=1e-4, atol=1e-4)
    assert (found[:, 128:] - whole[:, 128:]).abs().max() > 1e-3
