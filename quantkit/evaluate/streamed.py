"""Evaluate a model that does not fit into memory: every window goes through one decoder block, then the next.

At any time the embeddings, the final norm, the head and one block are in memory; the hidden states of all windows lie
beside them (in a temporary file above 256 MB). Each block sees exactly the arguments that the model's own forward
would give it (``quantkit.model.stepper``), one window at a time as in the unstreamed evaluation, so the results are
the same bits.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.open import open_source
from quantkit.checkpoint.source import Source
from quantkit.core.host import choose_device
from quantkit.errors import RequestError
from quantkit.evaluate.divergence import allocate
from quantkit.evaluate.perplexity import OnProgress
from quantkit.evaluate.windows import EvaluationWindows
from quantkit.model.arguments import BlockArguments, same_call
from quantkit.model.skeleton import build_skeleton, find_blocks
from quantkit.model.stepper import record, run_block, run_norm
from quantkit.runtime.layers.build import dense_weights, load_parameters
from quantkit.runtime.layers.dense_source import stored_experts
from quantkit.runtime.layers.head import head_only
from quantkit.runtime.load import choose_dtype

SHARE = 0.8  # of the memory that is free: a model that needs more than this is streamed


class StreamedModel:
    """What ``evaluate`` measures in place of a whole ``Model``: ``hidden`` knows the windows it was made with.

    Quantized weights are dequantized, the KV cache stays at 16 bits.
    """

    kv_bits = 16

    def __init__(
        self, module: Any, windows: EvaluationWindows, states: Tensor, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.config, self.device, self.dtype = module.config, device, dtype
        self._head, self._states = head_only(module), states
        self._place = {_key(ids): i for i, ids in enumerate(windows.ids)}

    def hidden(self, input_ids: Tensor) -> Tensor:
        """Return the final hidden states ``[1, tokens, hidden]`` of one of the windows, int64 ``[1, tokens]``.

        Raises RequestError for tokens that were not streamed.
        """
        place = self._place.get(_key(input_ids[0]))
        if place is None:
            raise RequestError("These tokens were not among the windows that the model was streamed over.")
        return self._states[place : place + 1].to(self.device)

    def scored(self, windows: EvaluationWindows) -> Tensor:
        """Return the states behind the scored tokens of all windows, ``[windows, scored, hidden]``, not copied."""
        return self._states[:, windows.first : -1]

    def head(self, hidden: Tensor) -> Tensor:
        """Return logits ``[batch, tokens, vocab]`` of hidden states, by the model's own head."""
        logits: Tensor = self._head(inputs_embeds=hidden, use_cache=False).logits
        return logits


def _key(ids: Tensor) -> bytes:
    return ids.cpu().numpy().tobytes()


@torch.inference_mode()
def stream(
    ref: str | Path | Source,
    windows: EvaluationWindows,
    *,
    dtype: str = "float32",
    device: str = "auto",
    what: str = "streaming",
    progress: OnProgress | None = None,
) -> StreamedModel:
    """Run all windows through a model, floating point or quantized, with one block in memory at a time.

    Raises what ``quantkit.load`` raises.
    """
    source = stored_experts(open_source(ref))
    where = choose_device(device)
    number = choose_dtype(dtype, where)
    module = build_skeleton(source.config, number)
    blocks = find_blocks(module)
    weights, quantized = dense_weights(module, source, number)
    head_embeddings = [name for name in weights.names if not name.startswith(f"{blocks.prefix}.")]
    load_parameters(module, weights, head_embeddings, where, quantized)
    for name, buffer in list(module.named_buffers()):
        owner, _, local = name.rpartition(".")
        module.get_submodule(owner)._buffers[local] = buffer.to(where)
    states, calls = _embed(module, blocks, windows, where)
    for index, block in enumerate(blocks.modules):
        weights.load(blocks.name(index))
        block.to(where)
        for window in range(windows.count):
            hidden = states[window : window + 1].to(where)
            states[window] = run_block(block, hidden, calls[window][index])[0].to(states.device)
        weights.release(blocks.name(index))
        gc.collect()
        if progress is not None:
            progress(what, index + 1, len(blocks))
    for window in range(windows.count):
        ids = windows.ids[window : window + 1].to(where)
        states[window] = run_norm(module, blocks, ids, states[window : window + 1].to(where))[0].to(states.device)
    return StreamedModel(module, windows, states, where, number)


def _embed(
    module: Any, blocks: Any, windows: EvaluationWindows, device: torch.device
) -> tuple[Tensor, list[list[BlockArguments]]]:
    """Return the states before the first block ``[windows, tokens, hidden]``, and each window's block arguments.

    Windows of one length nearly always share their arguments; those are kept once.
    """
    states: Tensor | None = None
    calls: list[list[BlockArguments]] = []
    for window in range(windows.count):
        recording = record(module, blocks, windows.ids[window : window + 1].to(device))
        if states is None:
            states = allocate((windows.count, *recording.hidden.shape[1:]), recording.hidden.dtype)
        states[window] = recording.hidden[0].to(states.device)
        first = calls[0] if calls else recording.calls
        same = all(same_call(a, b) for a, b in zip(first, recording.calls, strict=True))
        calls.append(first if same else recording.calls)
    assert states is not None  # make_windows never returns zero windows
    return states, calls


def dense_bytes(source: Source, dtype: torch.dtype) -> int:
    """Count the bytes of the whole model with every weight in this dtype; a tied head counts once."""
    from quantkit.evaluate.sizes import count_parameters

    return count_parameters(source) * dtype.itemsize


def must_stream(source: Source, dtype: str, device: str, asked: bool | None) -> bool:
    """Return whether a model is streamed.

    As asked, else when its dense weights take more than 80 % of the memory that is free.
    """
    if asked is not None:
        return asked
    where = choose_device(device)
    return dense_bytes(source, choose_dtype(dtype, where)) > SHARE * free_bytes(where)


def free_bytes(device: torch.device) -> int:
    """Return the memory free without swapping: the GPU's, or the host's within the limit of this process's group."""
    from quantkit.core.host import available_bytes

    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else available_bytes()
