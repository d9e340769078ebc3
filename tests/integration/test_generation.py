"""A real model answers, alone and in a ragged batch, and its quantized twin of packed linears answers too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quantkit.core import affine
from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.runtime.layers.linear import QuantLinear, pack
from quantkit.runtime.load import load

QUESTIONS = ["What is the capital of France?", "Name the largest planet of our solar system, in one word, please."]


@pytest.mark.real
def test_a_real_model_answers_alone_in_a_batch_and_packed(smollm2: Path) -> None:
    model = load(smollm2, device="cpu", dtype="float32")
    messages = [[{"role": "user", "content": question}] for question in QUESTIONS]
    together = model.generate(messages, max_tokens=12)
    assert "Paris" in together[0].text
    assert [model.generate(m, max_tokens=12).tokens for m in messages] == [answer.tokens for answer in together]
    scheme = Scheme(8, None)
    for name, linear in list(model.module.named_modules()):
        if isinstance(linear, torch.nn.Linear) and "layers." in name:
            scales, zeros = affine.minmax_params(linear.weight, scheme)
            q = QuantTensor(affine.quantize(linear.weight, scales, zeros, scheme), scales, zeros, scheme)
            owner, _, local = name.rpartition(".")
            setattr(model.module.get_submodule(owner), local, QuantLinear(pack(q, device=model.device)))
    assert "Paris" in model.generate(messages[0], max_tokens=12).text
    assert model.memory()["quantized"] > 100e6
