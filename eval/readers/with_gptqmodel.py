"""Reader: GPTQModel with its kernels of plain torch, on the CPU; it runs half precision only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from gptqmodel import BACKEND, GPTQModel
from reading import log_softmax, serve

BACKENDS = {"gptq": "GPTQ_TORCH", "awq": "AWQ_TORCH"}


def read(folder: str, ids: list[int], new_tokens: int, dtype: str) -> tuple[Any, list[int], dict[str, Any]]:
    """One forward pass; greedy tokens by forward passes too."""
    torch.set_num_threads(1)
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    form = config.get("quantization_config", {}).get("quant_method")
    backend = {"backend": getattr(BACKEND, BACKENDS[form])} if form in BACKENDS else {}
    model: Any = GPTQModel.load(folder, device="cpu", dtype=getattr(torch, dtype), **backend).model
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].float().numpy()
        text = torch.tensor([ids])
        for _ in range(new_tokens):
            text = torch.cat((text, model(text, use_cache=False).logits[:, -1:].argmax(-1)), 1)
    return log_softmax(logits), text[0, len(ids) :].tolist(), {}


if __name__ == "__main__":
    serve(read, fork=False)
