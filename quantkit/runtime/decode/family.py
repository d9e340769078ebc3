"""The common decoder family, recognised in a transformers model by the modules of its blocks, not by name.

::

    x += [after_attention](o(attention(rotary([q_norm] q(n)), rotary([k_norm] k(n)), v(n))))     n = norm_in(x)
    x += [after_mlp](down(act(gate(m)) * up(m)))                                                 m = norm_mid(x)

llama, mistral, qwen2, qwen3, gemma3 and others. A model whose blocks have any other module is not taken; one that has
the same modules but connects them otherwise is found by the proof on its twin (``proof.py``).
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SILU, GELU_TANH = 0, 1
POSITIONS = 1024  # whose angles are computed together
STATIC_ROTARY = ("default", "linear", "llama3", "yarn", "proportional")  # angles that do not depend on the length


@dataclass(frozen=True)
class Block:
    """The tensors and linear modules of one decoder block.

    Norm weights are the factors (``1 + w`` resolved), float32 ``[hidden]`` or None.

    linears: the seven, by name.
    rotary: the block's kind of rotary embedding.
    """

    norm_in: Tensor
    norm_mid: Tensor
    after_attention: Tensor | None
    after_mlp: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    linears: dict[str, nn.Module]
    rotary: str | None


@dataclass(frozen=True)
class Family:
    """A recognised model.

    rotary: gives cos and sin for positions, by the block's kind.
    """

    blocks: list[Block]
    last_norm: Tensor
    embedding: nn.Module
    rotary: nn.Module
    heads: int
    kv_heads: int
    head_dim: int
    scaling: float
    eps: float
    act: int

    def angles(self, kind: str | None, positions: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin, float32 ``[positions, rotary width]``, on the model's device.

        kind: of the block's rotary embedding.
        positions: how many.
        """
        device = self.last_norm.device
        like = torch.zeros(1, 1, dtype=torch.float32, device=device)
        pieces = []
        # always so many: what torch computes for a position may depend, in the last bit, on how many there are
        for first in range(0, positions, POSITIONS):
            at = torch.arange(first, first + POSITIONS, device=device)[None]
            pieces.append(self.rotary(like, at) if kind is None else self.rotary(like, at, kind))
        cos, sin = (torch.cat([part[0].float() for part in parts])[:positions] for parts in zip(*pieces, strict=True))
        return cos, sin


def recognise(module: Any) -> Family | None:
    """Return the family's view of a model, None for any other structure."""
    base = module.base_model
    layers, norm = getattr(base, "layers", None), getattr(base, "norm", None)
    embedding: Any = getattr(base, "embed_tokens", None)
    rotary: Any = getattr(base, "rotary_emb", None)
    if not isinstance(layers, nn.ModuleList) or norm is None or embedding is None or not _static(rotary):
        return None
    if not _parts(base) <= {"layers", "norm", "embed_tokens", "rotary_emb"} or _loose(base):
        return None
    takes_kind = "layer_type" in inspect.signature(type(rotary).forward).parameters
    kinds = getattr(module.config, "layer_types", None) or [None] * len(layers)
    blocks = [_block(layer, kind if takes_kind else None) for layer, kind in zip(layers, kinds, strict=True)]
    last = effective_norm(norm)
    if last is None or any(block is None for block in blocks):
        return None
    numbers = {_numbers(layer) for layer in layers}
    if len(numbers) != 1:
        return None
    (shape,) = numbers
    if shape is None:
        return None
    heads, kv_heads, head_dim, scaling, act = shape
    eps = {_eps(m) for m in base.modules() if _eps(m) is not None}
    if len(eps) != 1:
        return None
    return Family(
        [block for block in blocks if block is not None], last, embedding, rotary,
        heads, kv_heads, head_dim, scaling, float(eps.pop() or 0), act,
    )  # fmt: skip


def _parts(module: Any) -> set[str]:
    return {name for name, child in module.named_children() if child is not None and _holds(child)}


def _holds(module: Any) -> bool:
    """Tell whether a module computes anything: dropout and identities do not, at run time."""
    return not isinstance(module, (nn.Dropout, nn.Identity))


def _loose(module: Any) -> bool:
    """Tell whether a module holds tensors of its own, used in a way unknown here (a scalar per layer, sinks)."""
    return any(t is not None for t in (*module._parameters.values(), *module._buffers.values()))


def _static(rotary: Any) -> bool:
    kinds = getattr(rotary, "rope_type", None)
    if kinds is None:
        return False
    names = kinds.values() if isinstance(kinds, dict) else [kinds]
    return all(name in STATIC_ROTARY for name in names)


def _block(layer: Any, kind: str | None) -> Block | None:
    parts = _parts(layer)
    norms = {"input_layernorm", "post_attention_layernorm"}
    four = norms | {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
    if parts not in ({"self_attn", "mlp"} | norms, {"self_attn", "mlp"} | four):
        return None
    attention, mlp = layer.self_attn, layer.mlp
    if _loose(layer) or _loose(attention) or _loose(mlp):
        return None
    inner = {name for name in _parts(attention) if not name.startswith("rotary")}
    if inner not in (ATTENTION, ATTENTION | {"q_norm", "k_norm"}) or not MLP <= _parts(mlp) <= MLP | {"act_fn"}:
        return None
    if getattr(attention, "attn_logit_softcapping", None) is not None or getattr(attention, "sinks", None) is not None:
        return None
    sandwich = parts > {"pre_feedforward_layernorm"}
    pieces: dict[str, Any] = {
        "norm_in": effective_norm(layer.input_layernorm),
        "norm_mid": effective_norm(layer.pre_feedforward_layernorm if sandwich else layer.post_attention_layernorm),
        "after_attention": effective_norm(layer.post_attention_layernorm) if sandwich else None,
        "after_mlp": effective_norm(layer.post_feedforward_layernorm) if sandwich else None,
        "q_norm": effective_norm(attention.q_norm) if "q_norm" in inner else None,
        "k_norm": effective_norm(attention.k_norm) if "k_norm" in inner else None,
    }
    wanted = {"norm_in", "norm_mid"} | ({"after_attention", "after_mlp"} if sandwich else set())
    wanted |= {"q_norm", "k_norm"} & inner
    if any(pieces[name] is None for name in wanted):
        return None
    if any(pieces[n] is not None and pieces[n].shape[0] != attention.head_dim for n in ("q_norm", "k_norm")):
        return None
    linears = {name: getattr(attention if name in ATTENTION else mlp, name) for name in MATRICES}
    return Block(**pieces, linears=linears, rotary=kind)


def _numbers(layer: Any) -> tuple[int, int, int, float, int] | None:
    """Return heads, kv heads, head_dim, scaling of the scores, activation; None if they are unknown."""
    attention, mlp = layer.self_attn, layer.mlp
    dim, scaling = getattr(attention, "head_dim", None), getattr(attention, "scaling", None)
    act = _activation(getattr(mlp, "act_fn", None))
    if dim is None or scaling is None or act is None:
        return None
    heads, kv_heads = attention.q_proj.out_features // dim, attention.k_proj.out_features // dim
    if attention.q_proj.out_features % dim or attention.k_proj.out_features % dim or heads % kv_heads:
        return None
    return heads, kv_heads, int(dim), float(scaling), act


def _activation(function: Any) -> int | None:
    if function is None:
        return None
    x = torch.linspace(-6, 6, 97)
    y = function(x)
    if torch.allclose(y, nn.functional.silu(x), atol=1e-6):
        return SILU
    return GELU_TANH if torch.allclose(y, nn.functional.gelu(x, approximate="tanh"), atol=1e-6) else None


def _eps(module: Any) -> float | None:
    if "norm" not in type(module).__name__.lower():
        return None
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return None if eps is None else float(eps)


def effective_norm(norm: Any) -> Tensor | None:
    """Return the factors of an RMS norm, float32: its weight, or ``1 + weight``; None if it is no such norm."""
    weight, eps = getattr(norm, "weight", None), _eps(norm)
    if weight is None or eps is None or getattr(norm, "bias", None) is not None:
        return None
    exact = weight.detach().float().cpu()
    alone = copy.copy(norm)  # in float32 on the host, wherever and whatever the model is
    alone.__dict__["_parameters"] = {**norm._parameters, "weight": exact}
    x = torch.linspace(-1, 2, exact.shape[0])[None]
    y = alone(x)
    root = x / (x.square().mean() + eps).sqrt()
    for candidate in (exact, 1 + exact):
        if torch.allclose(root * candidate, y, atol=1e-4, rtol=1e-4):
            scale: Tensor = candidate.contiguous().to(weight.device)
            return scale
    return None
