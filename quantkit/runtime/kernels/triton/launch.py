"""Launchers of the Triton kernels: what each assumes is checked here, next to the call.

Kernels of ``linear()``: ``linear_triton`` chooses by ``tile_table.choose_tile``; ``linear_gemv`` and ``linear_gemm``
insist. For many tokens ``linear_dequantize`` (reference.py) runs on ``TritonWeight.columns``, which calls
``dequantize_rows`` (dequant.py) on a GPU.

Tolerance against the reference, x and y rounded to their dtype by u (2^-8 in bf16, 2^-11 in fp16): codes, zeros and
scales are exact, products are exact in float32, so ``|error| <= u |y| + K 2^-24 sum |x_i| (|w_i| + carrier scale_i)``,
carrier 0 on matrix units, 2056 for the gemv in bf16 and fp16; with ``scale_w`` weights are rounded twice: ``+ 2 u sum
|x_i w_i|``. A table's entries are rounded as ``fp4_tables.py`` says: ``+ r sum |x_i w_i|``, r = 1.9e-3 in the gemm with
bf16 (NF4), 2.1e-4 otherwise, 0 for float32 and FP4.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quantkit.errors import RequestError
from quantkit.runtime.kernels.reference import PackedWeight, linear_dequantize
from quantkit.runtime.kernels.triton.dequant import INTERPRETED, layout_constants
from quantkit.runtime.kernels.triton.gemm import gemm_kernel
from quantkit.runtime.kernels.triton.gemv import gemv_kernel
from quantkit.runtime.kernels.triton.layout import TritonWeight
from quantkit.runtime.kernels.triton.tile_table import Tile, choose_tile, derive, hopper, processors

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
_locks: dict[tuple[torch.device, int], Tensor] = {}


def linear_triton(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """Run the kernel that the table of tiles names for this many tokens."""
    return run(x, _own(weight), bias, choose_tile(_own(weight), x.shape[0], x.dtype))


def linear_gemv(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """Run the kernel for one token, once per token."""
    tile = choose_tile(_own(weight), 1, x.dtype)
    return run(x, _own(weight), bias, tile if tile.kernel == "gemv" else Tile("gemv", block_n=32))


def linear_gemm(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """Run the kernel on matrix units. x: bf16 or fp16; float32 is computed by the gemv, exactly."""
    if x.dtype == torch.float32:
        return linear_gemv(x, weight, bias)
    own, tokens = _own(weight), x.shape[0]
    tile = choose_tile(own, tokens, x.dtype)
    if tile.kernel != "gemm":  # one token, or so many that dequantizing is faster
        device = own.bricks.device
        tile = replace(derive(own, min(max(tokens, 2), 64), processors(device), hopper(device)), split=1)
    return run(x, own, bias, tile)


def run(x: Tensor, weight: TritonWeight, bias: Tensor | None, tile: Tile, activation: str = "") -> Tensor:
    """Run one kernel with one tile. x ``[tokens, in]`` -> ``[tokens, out]``.

    With an activation (a ``pair`` weight's) the result is ``[tokens, out / 2]``. Raises RequestError for an activation
    or a dtype that the weight or the kernels do not take.
    """
    if bool(activation) != bool(weight.pair) or (activation and activation not in ACTIVATIONS):
        raise RequestError(
            f"activation={activation!r}: a pair takes one of {', '.join(ACTIVATIONS)}, other weights take none."
        )
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise RequestError(f"activations of {x.dtype}: the Triton kernels take bfloat16, float16 and float32.")
    if tile.kernel == "dequantize" or (tile.kernel == "gemm" and x.dtype == torch.float32):
        y = linear_dequantize(x, weight, bias)
        return _activate(y, weight.pair, activation) if activation else y
    x = x if x.stride(1) == 1 else x.contiguous()
    y = x.new_empty(x.shape[0], weight.pair or weight.out_features)
    rows = tile.block_n // 2 if weight.pair else tile.block_n
    tiles_n = -(-(weight.pair or weight.out_features) // rows)
    split = min(tile.split, weight.k_bricks)
    gemm = tile.kernel == "gemm"
    tiles_m = -(-x.shape[0] // tile.block_m) if gemm else x.shape[0]
    work = _workspace(x, tiles_m * tiles_n, split, tile.block_n * (tile.block_m if gemm else 1))
    arguments = {**_arguments(x, weight, bias, y, work, activation), "parts": split}
    shared = {"SPLIT": split > 1, "BLOCK_N": tile.block_n, "STAGES": tile.stages}
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True}
    with torch.cuda.device_of(x):
        if gemm:
            gemm_kernel[(tiles_m * tiles_n, split)](
                **arguments, **shared, BLOCK_M=tile.block_m, SCALE_W=tile.scale_w, ASM=not INTERPRETED, **options
            )
        else:
            gemv_kernel[(tiles_n, split, tiles_m)](
                **arguments, **shared, EXACT=x.dtype == torch.float32, ASM=not INTERPRETED, **options
            )
    return y


def linear_pair(x: Tensor, weight: TritonWeight, bias: Tensor | None, activation: str) -> Tensor:
    """Compute ``activation(gate) * up`` of a weight that holds both, one above the other, in one kernel.

    x ``[..., in]`` -> ``[..., out / 2]``.
    """
    flat = x.reshape(-1, weight.in_features)
    if not flat.shape[0]:
        return x.new_empty(*x.shape[:-1], weight.pair)
    y = run(flat, weight, bias, choose_tile(weight, flat.shape[0], x.dtype), activation)
    return y.view(*x.shape[:-1], weight.pair)


def _own(weight: PackedWeight) -> TritonWeight:
    assert isinstance(weight, TritonWeight)
    return weight


def _arguments(
    x: Tensor, weight: TritonWeight, bias: Tensor | None, y: Tensor, work: tuple[Tensor, Tensor], activation: str
) -> dict[str, object]:
    return {
        "x": x,
        "words": weight.words,
        "scales": weight.scales,
        "zeros": weight.zeros,
        "bias": x if bias is None else bias,
        "y": y,
        "work": work[0],
        "lock": work[1],
        "M": x.shape[0],
        "N": weight.out_features,
        "K": weight.in_features,
        "bricks": weight.k_bricks,
        "groups": weight.groups,
        "stride_x": x.stride(0),
        "stride_y": y.stride(0),
        **layout_constants(weight),
        "FLUSH": weight.flush,
        "BIAS": bias is not None,
        "PAIR": weight.pair,
        "ACT": activation,
    }


def _workspace(x: Tensor, tiles: int, split: int, size: int) -> tuple[Tensor, Tensor]:
    """Float32 partial sums, and a zeroed counter per tile (kept per device and stream: every launch leaves zeros)."""
    if split == 1:
        return x, x  # not touched
    stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
    lock = _locks.get((x.device, stream))
    if lock is None or lock.numel() < tiles:
        lock = _locks[x.device, stream] = torch.zeros(max(tiles, 1 << 16), dtype=torch.int32, device=x.device)
    return torch.empty(tiles * split * size, dtype=torch.float32, device=x.device), lock


def _activate(y: Tensor, pair: int, activation: str) -> Tensor:
    gate, up = y[:, :pair], y[:, pair:]
    if activation == "silu":
        return torch.nn.functional.silu(gate).mul_(up)
    return torch.nn.functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none").mul_(up)
