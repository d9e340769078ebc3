"""Codes of 8 and 4 bits that are floating-point numbers: E4M3, E2M1, and the powers of two of E8M0.

E4M3 (``float8_e4m3fn``; Micikevicius et al., arXiv 2209.05433, table 1), a byte ``s eeee mmm``, bias 7::

    e = 0       (-1)**s * 2**-6 * m / 8            subnormal: down to 2**-9
    e = 1..15   (-1)**s * 2**(e-7) * (1 + m / 8)   largest 448; s1111111 is NaN, there is no infinity

E2M1 (OCP Microscaling Formats v1.0, section 5.3.3), four bits ``s ee m``, bias 1::

    code 0..7   0  0.5  1  1.5  2  3  4  6         code 8..15: the same, negative

E8M0 (same, section 5.4.1), a byte e: ``2**(e-127)``; 255 is NaN.

Rounding is to the nearest number, ties to the even code, and what lies beyond the largest number becomes it.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST_E4M3, LARGEST_E2M1 = 448.0, 6.0
NAN_E4M3 = 0x7F  # and 0xFF
BIAS_E8M0, NAN_E8M0 = 127, 255
_E2M1_CODE = {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 6: 5, 8: 6, 12: 7}  # of twice the magnitude


def round_e4m3(x: Tensor) -> Tensor:
    """Round to the nearest E4M3 number; float32 of the same shape. NaN stays NaN."""
    return x.float().clamp(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn).float()


def encode_e4m3(x: Tensor) -> Tensor:
    """Return the bytes of the nearest E4M3 numbers, uint8.

    >>> encode_e4m3(torch.tensor([0.0, 1.0, -448.0, 1000.0])).tolist()
    [0, 56, 254, 126]
    """
    return (x.float() + 0.0).clamp(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn).view(torch.uint8)


def decode_e4m3(codes: Tensor) -> Tensor:
    """Return the numbers of uint8 codes, float32."""
    return codes.view(torch.float8_e4m3fn).float()


def round_e2m1(x: Tensor) -> Tensor:
    """Round to the nearest E2M1 number; float32 of the same shape.

    >>> round_e2m1(torch.tensor([0.25, 0.75, 2.5, -5.0, 9.0])).tolist()      # ties to even codes
    [0.0, 1.0, 2.0, -4.0, 6.0]
    """
    x = x.float()
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return (x / step).round_().mul_(step).clamp_(-LARGEST_E2M1, LARGEST_E2M1).add_(0.0)  # no negative zero


def encode_e2m1(x: Tensor) -> Tensor:
    """Return the codes of the nearest E2M1 numbers, uint8, 0 to 15; zero is code 0."""
    number = round_e2m1(x)
    twice = torch.zeros(13, dtype=torch.uint8, device=x.device)
    for index, code in _E2M1_CODE.items():
        twice[index] = code
    return twice[(2 * number.abs()).long()] | ((number < 0).to(torch.uint8) << 3)


def decode_e2m1(codes: Tensor) -> Tensor:
    """Return the numbers of uint8 codes 0 to 15, float32."""
    exponent, mantissa = (codes >> 1) & 3, codes & 1
    twice = torch.where(exponent == 0, mantissa, (2 + mantissa) << (exponent - 1).clamp(min=0))
    return torch.where(codes >= 8, -0.5, 0.5) * twice


def encode_e8m0(scales: Tensor) -> Tensor:
    """Return the bytes of powers of two, uint8. Raises ValueError for another number, which is never rounded here."""
    mantissa, exponent = torch.frexp(scales.float())
    if not bool((mantissa == 0.5).all()):
        raise ValueError("a scale is no power of two: E8M0 holds no other number")
    return (exponent.to(torch.int32) - 1 + BIAS_E8M0).to(torch.uint8)


def decode_e8m0(codes: Tensor) -> Tensor:
    """Return ``2**(code - 127)`` of uint8 codes, float32; 255 is NaN."""
    bits = torch.where(codes == 0, 1 << 22, codes.to(torch.int32) << 23)  # 2**-127 is subnormal
    return torch.where(codes == NAN_E8M0, torch.nan, bits.to(torch.int32).view(torch.float32))


def power_of_two(exponent: Tensor) -> Tensor:
    """Return ``2**exponent`` exactly, float32, for whole numbers from -126 to 127; others are the nearest of those."""
    return decode_e8m0((exponent.to(torch.int32) + BIAS_E8M0).clamp(1, 254).to(torch.uint8))
