"""Reader: llama.cpp through llama-cpp-python, on the CPU. It rounds activations before quantized matrices to 8 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from reading import log_softmax, serve


def read(folder: str, ids: list[int], new_tokens: int, dtype: str) -> tuple[Any, list[int], dict[str, Any]]:
    """One pass over the whole text, then a token at a time with its cache, in float32 (dtype is that of the cache)."""
    (path,) = Path(folder).glob("*.gguf")
    kind = {"float32": llama_cpp.GGML_TYPE_F32, "float16": llama_cpp.GGML_TYPE_F16}[dtype]
    model = llama_cpp.Llama(
        str(path), n_ctx=len(ids) + new_tokens + 8, n_threads=1, n_threads_batch=1, verbose=True, logits_all=True,
        type_k=kind, type_v=kind, flash_attn=False,
    )  # fmt: skip
    model.eval(ids)
    logits = np.array(model.scores[: len(ids)])
    greedy = []
    for _ in range(new_tokens):
        greedy.append(int(np.argmax(model.scores[model.n_tokens - 1])))
        model.eval(greedy[-1:])
    return log_softmax(logits), greedy, {}


if __name__ == "__main__":
    serve(read)
