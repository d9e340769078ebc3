"""Tiny models of the common family with packed, joined linears, and their steps.

For decoding (tests/contract, tests/gpu).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from architectures import tiny_model
from torch import Tensor

from quantkit.core import affine
from quantkit.core.kvscheme import KVPlan, KVScheme
from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.runtime.kernels.reference import PackedWeight
from quantkit.runtime.kernels.triton.layout import TritonWeight
from quantkit.runtime.kv_cache.transformers_cache import transformers_cache
from quantkit.runtime.layers.fused import fuse_linears
from quantkit.runtime.layers.linear import QuantLinear, pack
from quantkit.runtime.model import Model


class Words:
    """Stands for a tokenizer: a token is its number."""

    def decode(self, ids: list[int], **options: Any) -> str:
        return " ".join(map(str, ids))


def tiny(
    kind: str,
    kv_bits: int | str = 16,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    graphs: bool = False,
    **changes: Any,
) -> Model:
    """Few layers, 64 wide, on a device; decoded by the definition unless ``graphs``."""
    layers = 3 if kind == "gemma3_text" else 2
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "max_position_embeddings": 256,
        **changes,
    }
    module: Any = tiny_model(kind, **sizes).eval().to(torch.float32)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
        if parameter.dim() > 1:  # the usual initialisation gives logits that are nearly equal
            torch.nn.init.normal_(parameter, std=0.15, generator=torch.Generator().manual_seed(parameter.numel()))
    module = module.to(device, dtype)
    return Model(
        module, module.config.to_dict(), device=torch.device(device), dtype=dtype, read_tokenizer=Words,
        kv_plan=KVPlan(KVScheme.of(kv_bits)), fast_step=graphs, graphs=graphs,
    )  # fmt: skip


def replace_linears(model: Any, scheme: Scheme, make: Callable[[QuantTensor], PackedWeight]) -> None:
    """Round the linears of the blocks, in place, wherever the model is."""
    for name, layer in list(model.module.named_modules()):
        if isinstance(layer, torch.nn.Linear) and "layers." in name:
            weight = layer.weight.float().cpu()
            scales, zeros = affine.minmax_params(weight, scheme)
            q = QuantTensor(affine.quantize(weight, scales, zeros, scheme), scales, zeros, scheme)
            owner, _, local = name.rpartition(".")
            setattr(model.module.get_submodule(owner), local, QuantLinear(make(q), layer.bias))


def requantize(model: Any, scheme: Scheme) -> None:
    """Packed as quantkit chooses on the model's device."""
    replace_linears(model, scheme, lambda q: pack(q, device=model.device))


def packed(model: Model, scheme: Scheme | None) -> Model:
    """The linears of the blocks as bricks, those of one input fused; None leaves them dense."""
    if scheme is not None:
        replace_linears(model, scheme, lambda q: TritonWeight(q, model.device))
        fuse_linears(model.module, model.device)
    return model


@torch.inference_mode()
def greedy_logits(model: Model, ids: Tensor, prompt: int, counts: Sequence[int] | None = None) -> Tensor:
    """Logits of every token after the prompt, one step each.

    counts: tokens of each sequence's prompt, the last ones (None: all).
    """
    seam = transformers_cache(model.new_cache(8))
    model.step(ids[:, :prompt], seam, counts)
    steps = [model.step(ids[:, i : i + 1], seam) for i in range(prompt, ids.shape[1])]
    return model.head(torch.cat(steps, dim=1))
