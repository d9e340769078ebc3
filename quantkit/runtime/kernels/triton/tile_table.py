"""Choose the Triton kernel and its tiles for a weight and a number of tokens: from a measured table, else derived.

Looked up in this order, the first time a shape is met (nothing is read at import):

1. ``override(table)``: what a program or a test sets;
2. ``$QUANTKIT_CACHE/tiles/DEVICE.json``: what ``eval/kernels/gpu_linear.py --tune`` measured on this machine;
3. ``derive``: arithmetic on the shape, below.

A table is ``{"4096x4096 4b g128 asym": {"16": {"kernel": "gemm", ...}}}``: the layer, then the number of tokens,
rounded up to a power of two.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from quantkit.checkpoint.fetch import cache_dir
from quantkit.core.scheme import Scheme
from quantkit.errors import RequestError

Table = Mapping[str, Mapping[str, "Tile"]]
LARGEST = 8192  # tokens; more are looked up as this many


class Layer(Protocol):
    """The shape of a weight and how it is stored: what a tile is chosen by.

    ``layout.TritonWeight`` explains each name.
    """

    in_features: int
    out_features: int
    scheme: Scheme
    held: int
    group: int
    pair: int
    table: str
    bricks: Tensor

    @property
    def k_bricks(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Tile:
    """One kernel and the sizes of its tiles.

    kernel: "gemv", "gemm" or "dequantize". block_n: rows of the weight. block_m: tokens. split: parts of K. scale_w:
    see gemm.py.
    """

    kernel: str
    block_n: int = 64
    block_m: int = 16
    split: int = 1
    warps: int = 4
    stages: int = 3
    scale_w: bool = False

    def __post_init__(self) -> None:
        if self.kernel not in ("gemv", "gemm", "dequantize"):
            raise RequestError(f"kernel={self.kernel!r}: a tile is for gemv, gemm or dequantize.")


_override: dict[str, Mapping[str, Tile]] = {}


def override(table: Table | None) -> None:
    """Put a table before all others, for this process; None takes it away."""
    _override.clear()
    _override.update(table or {})


def key(weight: Layer) -> str:
    """The layer's name in a table: ``4096x4096 4b g128 asym`` (out x in), with the two matrices of a pair as ``+``."""
    return _name(f"{weight.pair}+{weight.pair}" if weight.pair else str(weight.out_features), weight)


def _name(rows: str, weight: Layer) -> str:
    kind = weight.table or ("sym" if weight.scheme.symmetric else "asym")
    return f"{rows}x{weight.in_features} {weight.held}b g{weight.group or 'channel'} {kind}"


def bucket(tokens: int) -> int:
    """Round ``tokens`` up to a power of two, at most ``LARGEST``."""
    return min(1 << max(tokens - 1, 0).bit_length(), LARGEST)


def choose_tile(weight: Layer, tokens: int, dtype: torch.dtype) -> Tile:
    """Choose the tile for this call. float32 goes to kernels that compute in float32."""
    if dtype == torch.float32:
        return Tile("gemv", block_n=32) if tokens <= 4 else Tile("dequantize")
    device = weight.bricks.device
    names, number = [key(weight)], str(bucket(tokens))
    if weight.pair:  # what was measured for the same matrix without an activation serves too
        names.append(_name(str(weight.out_features), weight))
    for table in (_override, measured(device_name(device))):
        for name in names:
            tile = table.get(name, {}).get(number)
            if tile is not None:
                return tile
    return derive(weight, tokens, processors(device), hopper(device))


@cache
def measured(device: str) -> dict[str, dict[str, Tile]]:
    """The table in the cache for a device; empty if there is none. Raises RequestError for one that cannot be read."""
    path = table_path(device)
    if not path.exists():
        return {}
    try:
        stored = json.loads(path.read_text())["tiles"]
        return {layer: {tokens: Tile(**tile) for tokens, tile in rows.items()} for layer, rows in stored.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise RequestError(f"{path}: not a table of tiles ({error}). Delete it, or measure again.") from error


def table_path(device: str) -> Path:
    """Where the measured table of a device is kept."""
    return cache_dir() / "tiles" / f"{device.lower().replace(' ', '-')}.json"


def save(device: str, table: Table, facts: Mapping[str, object]) -> Path:
    """Add a measured table to the one in the cache, with what it was measured with; returns the path.

    Raises as ``measured`` does.
    """
    path = table_path(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    known = {**measured(device)}
    for layer, measurements in table.items():
        known[layer] = {**known.get(layer, {}), **measurements}
    tiles = {layer: {tokens: asdict(tile) for tokens, tile in rows.items()} for layer, rows in known.items()}
    path.write_text(json.dumps({**facts, "tiles": tiles}, indent=1) + "\n")
    measured.cache_clear()
    return path


@cache
def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"


@cache
def processors(device: torch.device) -> int:
    """Count the multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@cache
def hopper(device: torch.device) -> bool:
    """Whether a device is of sm_90 to sm_110, whose matrix units and shared memory the larger tiles are made for.

    There matrix units take the left operand from registers without copies in between (``wgmma`` and what followed it),
    and a block may have more than 200 KB of shared memory. sm_120 has neither.
    """
    return device.type != "cuda" or 9 <= torch.cuda.get_device_capability(device)[0] <= 11


def derive(weight: Layer, tokens: int, sms: int, wide: bool = True) -> Tile:
    """Derive tiles from the shape alone.

    Not measured yet: eval/kernels/gpu_linear.py --tune replaces them where a GPU is.

    Enough programs for two on each multiprocessor, K split only where the rows do not give them; at least two bricks a
    part. wide: ``hopper``; in the registers of older devices a second accumulator of 32 tokens takes 8 warps, of 64
    none hold it. From 384 tokens on the matrix units are the limit (2 * 384 / 790 TFLOP/s a weight against 0.6 ps for
    dequantizing it once).
    """
    if tokens > 384:
        return Tile("dequantize")
    if tokens <= 1:
        small = weight.out_features < 64 * sms
        return Tile("gemv", block_n=32 if small else 64, split=_split(weight, 32 if small else 64, 4 * sms), stages=4)
    table = bool(weight.table)  # rounded numbers already; a second accumulator beside looked up ones spills
    warps = 4 if wide or table else 8
    if tokens <= 16:
        return Tile("gemm", 64, 16, _split(weight, 64, 2 * sms), warps, 4)
    if tokens <= 32:
        return Tile("gemm", 64, 32, _split(weight, 64, 2 * sms), warps, 3, scale_w=table)
    # a stage holds the x of a whole brick, 512 inputs: 64 tokens and two stages are what shared memory and registers
    # hold
    if tokens <= 64:
        fine = 0 < weight.group <= 64  # scaling 64 weights is less work than 64 sums, and needs no second accumulator
        if table or fine or wide:
            return Tile("gemm", 64, 64, _split(weight, 64, sms), 8, 2, scale_w=table or fine)
        return Tile("gemm", 64, 32, _split(weight, 64, sms), 8, 3)
    return Tile("gemm", 128, 64, max(1, _split(weight, 128, sms) * 64 // tokens), 8, 2, scale_w=True)


def _split(weight: Layer, block_n: int, programs: int) -> int:
    tiles = -(-weight.out_features // block_n)
    split = 1
    while tiles * split * 2 <= programs and weight.k_bricks >= split * 4:
        split *= 2
    return split
