"""Reader: transformers, on the CPU, with what it finds installed (compressed-tensors, gptqmodel, bitsandbytes)."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from reading import log_softmax, serve
from transformers import AutoModelForCausalLM


def read(folder: str, ids: list[int], new_tokens: int, dtype: str) -> tuple[Any, list[int], dict[str, Any]]:
    """One forward pass of the whole text, then greedy tokens by ``generate``."""
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].float().numpy()
        text = torch.tensor([ids])
        for _ in range(new_tokens):  # no cache: what is compared is the weights
            text = torch.cat((text, model(text, use_cache=False).logits[:, -1:].argmax(-1)), 1)
    return log_softmax(logits), text[0, len(ids) :].tolist(), {}


if __name__ == "__main__":
    serve(read, fork=find_spec("gptqmodel") is None)  # which starts threads
