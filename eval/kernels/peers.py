"""Call the kernels of other libraries for a 4-bit weight in groups, for ``gpu_linear.py``: to time, not to check.

Each maker takes (weight, x bf16 ``[tokens, in]``, copies) and returns a call by number of the copy. It raises whatever
its library raises where it is not installed or does not take the weight; the caller notes that by name. Written from
the libraries' sources, not yet run on a GPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from quantkit.core.qtensor import QuantTensor

Maker = Callable[[QuantTensor, Tensor, int], Callable[[int], object]]


def tinygemm(q: QuantTensor, x: Tensor, copies: int) -> Callable[[int], object]:
    """torch's own (``aten::_weight_int4pack_mm``), bf16."""
    if q.scheme.bits != 4:
        raise ValueError("takes 4 bits")
    byte = (q.codes[:, ::2] << 4 | q.codes[:, 1::2]).contiguous()
    packed = torch.ops.aten._convert_weight_to_int4pack(byte, 8)
    zero = 8.0 if q.zeros is None else q.zeros.float()
    both = torch.stack([q.scales.float(), (8 - zero) * q.scales.float()], -1).transpose(0, 1).contiguous().bfloat16()
    weights = [(packed.clone(), both.clone()) for _ in range(copies)]
    group = q.scheme.width(q.shape[1])
    return lambda number: torch.ops.aten._weight_int4pack_mm(x, weights[number][0], group, weights[number][1])


def bitsandbytes(q: QuantTensor, x: Tensor, copies: int) -> Callable[[int], object]:
    """NF4 of bitsandbytes, blocks of 64, of a random weight of this shape."""
    import bitsandbytes as bnb
    from bitsandbytes.functional import quantize_4bit

    dense = torch.randn(q.shape, dtype=torch.bfloat16, device=x.device)
    weights = [quantize_4bit(dense, blocksize=64, quant_type="nf4") for _ in range(copies)]
    return lambda number: bnb.matmul_4bit(x, weights[number][0].t(), weights[number][1])


def gemlite(q: QuantTensor, x: Tensor, copies: int) -> Callable[[int], object]:
    """GemLite's Triton kernels (gemlite.helper, A16W4_HQQ_INT): codes less zeros, times scales."""
    from gemlite.helper import A16W4_HQQ_INT

    zeros = torch.full_like(q.scales, 8.0) if q.zeros is None else q.zeros
    shape = (q.shape[0], -1)
    linears = [
        A16W4_HQQ_INT(device=str(x.device), dtype=x.dtype).from_weights(
            q.codes.clone(), q.scales.to(x.dtype).view(shape), zeros.to(x.dtype).view(shape)
        )
        for _ in range(copies)
    ]
    return lambda number: linears[number](x)


def torchao(q: QuantTensor, x: Tensor, copies: int) -> Callable[[int], object]:
    """torchao's int4 weight-only linear, in its default packing."""
    from torchao.quantization import Int4WeightOnlyConfig, quantize_

    linears = []
    for _ in range(copies):
        linear = torch.nn.Linear(q.shape[1], q.shape[0], bias=False, device=x.device, dtype=x.dtype)
        quantize_(linear, Int4WeightOnlyConfig(group_size=q.scheme.width(q.shape[1])))
        linears.append(linear.requires_grad_(False))
    return lambda number: linears[number](x)


def marlin(q: QuantTensor, x: Tensor, copies: int) -> Callable[[int], object]:
    """Marlin as vLLM carries it, symmetric, groups as here.

    Arguments came and went between versions: those that are there are given.
    """
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_make_workspace_new
    from vllm.scalar_type import scalar_types

    rows, width = q.shape
    none = torch.empty(0, dtype=torch.int32, device=x.device)
    packed = torch.randint(-(2**31), 2**31 - 1, (width // 8, rows), dtype=torch.int32, device=x.device)
    weights = [ops.gptq_marlin_repack(packed, none, width, rows, 4) for _ in range(copies)]
    scales = q.scales.t().contiguous().to(x.dtype)
    gemm = getattr(ops, "marlin_gemm", None) or ops.gptq_marlin_gemm
    given = {
        "a": x, "c": None, "b_bias": None, "b_scales": scales, "a_scales": None, "global_scale": None, "b_zeros": none,
        "g_idx": none,
        "perm": none, "workspace": marlin_make_workspace_new(x.device), "b_q_type": scalar_types.uint4b8,
        "size_m": x.shape[0], "size_n": rows,
        "size_k": width, "is_k_full": True, "use_atomic_add": False, "use_fp32_reduce": True, "is_zp_float": False,
    }  # fmt: skip
    known = {name: value for name, value in given.items() if name in inspect.signature(gemm).parameters}
    return lambda number: gemm(b_q_weight=weights[number], **known)


PEERS: dict[str, Maker] = {
    "tinygemm": tinygemm,
    "bitsandbytes": bitsandbytes,
    "gemlite": gemlite,
    "torchao": torchao,
    "marlin": marlin,
}
