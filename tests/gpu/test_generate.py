"""Models on a GPU say what they say on the CPU: packed linears, cache and attention on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import tiny_model

from quantkit.core import affine
from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.runtime.attention import transformers_cache
from quantkit.runtime.linear import QuantLinear, pack
from quantkit.runtime.load import load

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def quantize(model: Any, scheme: Scheme) -> None:
    """Replace the linears of the blocks by packed ones, in place, wherever the model is."""
    for name, layer in list(model.module.named_modules()):
        if isinstance(layer, torch.nn.Linear) and "layers." in name:
            weight = layer.weight.float().cpu()
            scales, zeros = affine.minmax_params(weight, scheme)
            q = QuantTensor(affine.quantize(weight, scales, zeros, scheme), scales, zeros, scheme)
            owner, _, local = name.rpartition(".")
            setattr(model.module.get_submodule(owner), local, QuantLinear(pack(q, device=model.device), layer.bias))


@torch.inference_mode()
def greedy(model: Any, ids: torch.Tensor, count: int) -> list[int]:
    seam = transformers_cache(model.new_cache(ids.shape[1] + count))
    found: list[int] = []
    step = ids.to(model.device)
    for _ in range(count):
        step = model.head(model.step(step, seam)[:, -1:]).argmax(-1)
        found.append(int(step))
    return found


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "gemma3_text", "gemma2", "mixtral"])
@pytest.mark.parametrize("scheme", [Scheme(4, 32, False), Scheme(8, None)], ids=Scheme.describe)
def test_logits_and_greedy_tokens_equal_those_of_the_cpu(name: str, scheme: Scheme, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny_model(name, hidden_size=64, intermediate_size=128).save_pretrained(folder)
    models = [load(folder, device=device, dtype="float32") for device in ("cpu", "cuda")]
    for model in models:
        quantize(model, scheme)
    packed = [m.packed.layout for m in models[1].module.modules() if isinstance(m, QuantLinear)]
    assert set(packed) == {"triton"}
    ids = torch.randint(3, 100, (1, 9), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(models[1](ids).cpu(), models[0](ids), rtol=1e-4, atol=1e-4)
    assert greedy(models[1], ids, 20) == greedy(models[0], ids, 20)


@pytest.mark.real
def test_two_hundred_greedy_tokens_of_a_real_model_equal_those_of_the_cpu(smollm2: Path) -> None:
    answers = []
    for device in ("cpu", "cuda"):
        model = load(smollm2, device=device, dtype="float32")
        quantize(model, Scheme(4, 64, False))
        answers.append(model.generate("The history of the river begins", max_tokens=200, ignore_eos=True).tokens)
    assert len(answers[0]) == 200
    assert answers[1] == answers[0]


@pytest.mark.real
def test_bf16_logits_of_a_real_model_stay_near_those_of_float32(smollm2: Path) -> None:
    logits = []
    for device, dtype in (("cpu", "float32"), ("cuda", "bfloat16")):
        model = load(smollm2, device=device, dtype=dtype)
        quantize(model, Scheme(4, 64, False))
        ids = torch.tensor([model.encode("The history of the river begins")])
        logits.append(model(ids).float().cpu().log_softmax(-1))
    divergence = (logits[0].exp() * (logits[0] - logits[1])).sum(-1)
    assert float(divergence.max()) < 0.02  # 30 layers, each rounded to 8 bits a few times
