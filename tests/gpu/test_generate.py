"""Models on a GPU say what they say on the CPU: packed linears, cache and attention on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import tiny_model
from step_models import requantize

from quantkit.core.scheme import Scheme
from quantkit.runtime.kv_cache.transformers_cache import transformers_cache
from quantkit.runtime.layers.linear import QuantLinear
from quantkit.runtime.load import load

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@torch.inference_mode()
def greedy(model: Any, ids: torch.Tensor, count: int) -> list[int]:
    seam = transformers_cache(model.new_cache(ids.shape[1] + count))
    found: list[int] = []
    step = ids.to(model.device)
    for _ in range(count):
        step = model.head(model.step(step, seam)[:, -1:]).argmax(-1)
        found.append(int(step))
    return found


@pytest.mark.filterwarnings("ignore:decoding on the GPU runs the transformers definition")  # gemma2, mixtral
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "gemma3_text", "gemma2", "mixtral"])
@pytest.mark.parametrize("scheme", [Scheme(4, 32, False), Scheme(8, None)], ids=Scheme.describe)
def test_logits_and_greedy_tokens_equal_those_of_the_cpu(name: str, scheme: Scheme, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny_model(name, hidden_size=64, intermediate_size=128).save_pretrained(folder)
    models = [load(folder, device=device, dtype="float32") for device in ("cpu", "cuda")]
    for model in models:
        requantize(model, scheme)
    packed = [m.packed.layout for m in models[1].module.modules() if isinstance(m, QuantLinear)]
    assert set(packed) == {"triton"}
    ids = torch.randint(3, 100, (1, 9), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(models[1](ids).cpu(), models[0](ids), rtol=1e-4, atol=1e-4)
    assert greedy(models[1], ids, 20) == greedy(models[0], ids, 20)


@pytest.mark.real
def test_bf16_logits_of_a_real_model_stay_near_those_of_float32(smollm2: Path) -> None:
    logits = []
    for device, dtype in (("cpu", "float32"), ("cuda", "bfloat16")):
        model = load(smollm2, device=device, dtype=dtype)
        requantize(model, Scheme(4, 64, False))
        ids = torch.tensor([model.encode("The history of the river begins")])
        logits.append(model(ids).float().cpu().log_softmax(-1))
    divergence = (logits[0].exp() * (logits[0] - logits[1])).sum(-1)
    assert float(divergence.max()) < 0.02  # 30 layers, each rounded to 8 bits a few times
