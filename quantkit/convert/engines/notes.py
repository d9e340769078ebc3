"""What an engine does differently with a checkpoint that it loads: in one phrase each."""

from __future__ import annotations

from quantkit.convert.engines.conditions import CT, HUMMING, int8_activations
from quantkit.convert.engines.rules import Checkpoint


def bfloat16_scales(c: Checkpoint) -> str | None:
    """Scales of W8A8 weights are kept in float32 (vLLM: schemes/compressed_tensors_w8a8_int8.py, create_weights)."""
    integers = [weight.scheme for weight in c.weights if weight.scheme.number == "integer"]
    cast = [scheme for scheme in integers if scheme.activations is None]
    if not c.bfloat16 or all(scheme.scale_dtype == "bfloat16" for scheme in cast):
        return None
    return "casts scales to bf16"


def int8_units(c: Checkpoint) -> str | None:
    """csrc/quantization/w8a8/cutlass/scaled_mm_c3x_sm100.cu: 'int8 not supported on SM100'."""
    return (
        "not on GPUs of compute capability 10 or newer, whose kernels multiply no int8" if int8_activations(c) else None
    )


def float_activations(c: Checkpoint) -> str | None:
    """Note that activations stay in 16 bits, where they are quantized."""
    return "leaves activations in 16 bits: better than measured here, and no faster" if int8_activations(c) else None


def rounds_slowly(c: Checkpoint) -> str | None:
    """compressed_tensors/quantization/utils/helpers.py, calculate_qparams: (127 + 128) / 2."""
    return (
        "rounds activations by max|x| / 127.5 and multiplies floats: slow"
        if int8_activations(c) and c.format == CT
        else None
    )


def humming(c: Checkpoint) -> str | None:
    """Name the package whose kernels vLLM takes where Marlin has none: 2, 3, 5, 6, 7 bits, and 8 with zero points.

    vLLM: kernels/linear/__init__.py, _POSSIBLE_KERNELS (last of CUDA's), mixed_precision/humming.py. Its pull request
    46389 shows 2, 3, 5 and 7 bits; nothing of it was run here.
    """
    if c.format != CT:
        return None
    packed = [weight.scheme for weight in c.weights if weight.scheme.activations is None]
    odd = {scheme.bits for scheme in packed if scheme.bits not in (4, 8)}
    words = [", ".join(map(str, sorted(odd))) + " bits"] if odd else []
    if any(scheme.bits == 8 and not scheme.symmetric for scheme in packed):
        words.append("8 bits with zero points")
    if not words:
        return None
    return f"{' and '.join(words)} by {HUMMING}, which its wheel for CUDA requires; read, not run"
