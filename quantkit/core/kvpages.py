"""Quantize pages of the KV cache: how keys and values are packed and decoded. Kernels are tested against this file.

A page is 64 tokens of one head. Keys, which have channels far larger than others (KIVI, arXiv 2402.02750, section 3),
share a scale along the tokens of the page, channel by channel; values share one along the channels of a token, after a
Hadamard rotation of the head that spreads what is large (QuaRot, arXiv 2404.00456, section 4), in groups of at most 64.
Both are asymmetric::

    code = clamp(round((x - low) / scale), 0, 2**bits - 1)        x ~ code * scale + low         scale, low: float16

The range that a group spans is narrowed from either end where that lowers its squared error, for values of up to 3 bits
and keys of 2. Attention over rotated values gives a rotated result, which is turned back once: H is orthonormal and
symmetric.

Codes of a token lie side by side, the first in the lowest bits of a byte. Three bits are two planes, the low two bits
and then the high one::

    8 bits   c0            c1            ...                      1 byte a channel
    4 bits   c0 | c1 << 4  c2 | c3 << 4  ...                      2 channels a byte
    2 bits   c0 | c1 << 2 | c2 << 4 | c3 << 6   ...               4 channels a byte
    3 bits   (c & 3) as 2 bits, ceil(n / 4) bytes;  then (c >> 2), 8 channels a byte, ceil(n / 8) bytes
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

# Up to so many bits the range is searched. The squared error clips what attention needs of keys with more bits
# (docs/adr/013).
SEARCHED_KEYS, SEARCHED_VALUES = 2, 3
# What is tried, as shares of the range cut off below and above: the first of the best is taken.
CUTS = tuple(
    (left * cut, right * cut) for cut in (0.1, 0.2, 0.3) for left, right in ((0.5, 0.5), (1.0, 0.0), (0.0, 1.0))
)
SEARCHED_AT_ONCE = 1 << 22  # numbers rounded together in a search: 16 MB of float32
SMALLEST_SCALE = 2.0**-20  # a float16 that is not 0
LARGEST = 65504.0  # of float16
FP8_MOST = 448.0  # of E4M3


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 codes ``[..., n]`` into bytes ``[..., row_bytes(n, bits)]``."""
    if bits == 8:
        return codes
    if bits == 3:
        return torch.cat([_pack(codes & 3, 2), _pack(codes >> 2, 1)], dim=-1)
    return _pack(codes, bits)


def _pack(codes: Tensor, bits: int) -> Tensor:
    per = 8 // bits
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % per)).unflatten(-1, (-1, per))
    packed = codes[..., 0].clone()
    for i in range(1, per):
        packed |= codes[..., i] << (bits * i)
    return packed


def unpack_bits(stored: Tensor, bits: int, channels: int) -> Tensor:
    """Unpack bytes into uint8 codes ``[..., channels]``."""
    if bits == 8:
        return stored
    if bits == 3:
        low = -(-channels // 4)
        return _unpack(stored[..., :low], 2, channels) | _unpack(stored[..., low:], 1, channels) << 2
    return _unpack(stored, bits, channels)


def _unpack(stored: Tensor, bits: int, channels: int) -> Tensor:
    most = (1 << bits) - 1
    parts = [stored >> (bits * i) & most for i in range(8 // bits)]
    return torch.stack(parts, dim=-1).flatten(-2)[..., :channels]


@lru_cache(maxsize=32)
def hadamard(channels: int, device: torch.device) -> Tensor:
    """Build the orthonormal symmetric Hadamard matrix, float32 ``[channels, channels]``.

    Sylvester's matrix, or blocks of the largest power of two that divides ``channels``.
    """
    size = channels & -channels
    with torch.inference_mode(False):  # it is kept, and autograd takes no tensor that was made in inference mode
        h = torch.ones(1, 1, device=device)
        while h.shape[0] < size:
            h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
        whole: Tensor = torch.block_diag(*[h / size**0.5] * (channels // size))
    return whole


def rotate(x: Tensor) -> Tensor:
    """Compute ``x H`` along the last dimension in float32; applied twice it gives x back."""
    return x.float() @ hadamard(x.shape[-1], x.device)


def choose_range(x: Tensor, bits: int, search: bool) -> tuple[Tensor, Tensor]:
    """Choose scale and low of groups along the last dimension: ``[..., n]`` -> ``[..., 1]`` each.

    Both are float32 with values of float16.
    """
    if not search:
        return _as_stored(x.amin(-1, keepdim=True), x.amax(-1, keepdim=True), bits)
    rows = x.flatten(0, -2)
    some = max(1, SEARCHED_AT_ONCE // (rows.shape[1] * (len(CUTS) + 1)))
    ranges = [_search(part, bits) for part in rows.split(some)]
    scale, low = (torch.cat(parts).view(*x.shape[:-1], 1) for parts in zip(*ranges, strict=True))
    return scale, low


def _search(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Search the best range of each row of x ``[rows, n]``.

    All ranges at once: on a page of a few heads the calls cost more than the numbers.
    """
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    span = high - low
    lows = torch.stack([low, *(low + below * span for below, _ in CUTS)])
    highs = torch.stack([high, *(high - above * span for _, above in CUTS)])
    scales, lows = _as_stored(lows, highs, bits)
    errors = _error(x, scales, lows, bits).nan_to_num(nan=torch.inf)
    best = errors.min(0, keepdim=True).indices  # the first of equals
    return scales.gather(0, best)[0], lows.gather(0, best)[0]


def _as_stored(low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    scale = ((high - low) / ((1 << bits) - 1)).clamp(SMALLEST_SCALE, LARGEST)
    return scale.half().float(), low.clamp(-LARGEST, LARGEST).half().float()


def _error(x: Tensor, scale: Tensor, low: Tensor, bits: int) -> Tensor:
    return quantize(x, scale, low, bits).mul_(scale).add_(low).sub_(x).square_().sum(-1, keepdim=True)


def quantize(x: Tensor, scale: Tensor, low: Tensor, bits: int) -> Tensor:
    """Compute codes, as floats; all arguments broadcast against each other."""
    return ((x - low) / scale).round_().clamp_(0, (1 << bits) - 1)


def encode_keys(x: Tensor, bits: int, skip: int = 0) -> tuple[Tensor, Tensor]:
    """Encode a page of keys: float ``[..., 64, head_dim]`` -> bytes ``[..., 64, row]`` and scales.

    skip: tokens at the front that are kept elsewhere; they do not count for the range.
    Returns the scales as float16 ``[..., 2, head_dim]``: scale, low.
    """
    by_channel = x.float().transpose(-1, -2)
    scale, low = choose_range(by_channel[..., skip:], bits, bits <= SEARCHED_KEYS)
    codes = quantize(by_channel, scale, low, bits).to(torch.uint8).transpose(-1, -2)
    return pack_bits(codes, bits), torch.cat([scale, low], -1).transpose(-1, -2).half()


def decode_keys(stored: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Decode a page of keys: float32 ``[..., 64, head_dim]``."""
    codes = unpack_bits(stored, bits, scales.shape[-1]).float()
    scale, low = scales.float().split(1, dim=-2)
    return codes.mul_(scale).add_(low)


def encode_values(x: Tensor, bits: int, groups: int) -> tuple[Tensor, Tensor]:
    """Encode values: float ``[..., tokens, head_dim]`` -> bytes ``[..., tokens, row]`` and scales.

    Returns the scales as float16 ``[..., tokens, groups, 2]``: scale, low.
    """
    grouped = rotate(x).unflatten(-1, (groups, -1))
    scale, low = choose_range(grouped, bits, bits <= SEARCHED_VALUES)
    codes = quantize(grouped, scale, low, bits).to(torch.uint8).flatten(-2)
    return pack_bits(codes, bits), torch.cat([scale, low], -1).half()


def decode_values(stored: Tensor, scales: Tensor, bits: int, channels: int) -> Tensor:
    """Decode values: float32 ``[..., tokens, head_dim]``, still rotated."""
    codes = unpack_bits(stored, bits, channels).float().unflatten(-1, (scales.shape[-2], -1))
    scale, low = scales.float().split(1, dim=-1)
    x: Tensor = codes.mul_(scale).add_(low).flatten(-2)
    return x


def encode_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """Round ``x / scale`` to E4M3 floats, as bytes; beyond 448 they are clipped.

    scale: float32 ``[kv_heads, head_dim]``.
    """
    rounded: Tensor = (x.float() / scale[:, None]).clamp(-FP8_MOST, FP8_MOST).to(torch.float8_e4m3fn)
    return rounded.view(torch.uint8)


def decode_fp8(stored: Tensor, scale: Tensor) -> Tensor:
    """Decode E4M3 bytes: float32 of the shape of ``stored``."""
    return stored.view(torch.float8_e4m3fn).to(torch.float32) * scale[:, None]


def encode_static(x: Tensor, scale: Tensor, low: Tensor, bits: int) -> Tensor:
    """Encode ``[..., kv_heads, tokens, head_dim]`` into bytes with one scale per channel.

    scale, low: float32 ``[kv_heads, head_dim]``.
    """
    return pack_bits(quantize(x.float(), scale[:, None], low[:, None], bits).to(torch.uint8), bits)


def decode_static(stored: Tensor, scale: Tensor, low: Tensor, bits: int) -> Tensor:
    """Decode what ``encode_static`` packed: float32 ``[..., kv_heads, tokens, head_dim]``."""
    codes = unpack_bits(stored, bits, scale.shape[-1]).float()
    return codes.mul_(scale[:, None]).add_(low[:, None])
