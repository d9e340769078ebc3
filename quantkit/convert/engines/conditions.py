"""Reasons not to load a checkpoint, as rules of engines share them: bits, groups, zero points, which weights."""

from __future__ import annotations

from collections import Counter

from quantkit.convert.engines.devices import no_vllm_cpu, no_vllm_gpu
from quantkit.convert.engines.rules import Checkpoint, EngineRule, first
from quantkit.convert.options.rules import split_fused

CT, GPTQ, AWQ, NATIVE, BITSANDBYTES = "compressed-tensors", "gptq", "awq", "native", "bitsandbytes"
HUMMING = "humming-kernels 0.1.19"  # vllm-0.33.0's METADATA: Requires-Dist: humming-kernels[cu13]==0.1.19


def fused_schemes(c: Checkpoint) -> str | None:
    """Object to fused linears with different schemes."""
    problems = split_fused({weight.name: weight.scheme for weight in c.weights})
    return problems[0] if problems else None


def ragged(c: Checkpoint) -> str | None:
    """Object to weights whose last group is short."""
    weight = first(c, lambda w: bool(w.scheme.group_size) and w.in_features % (w.scheme.group_size or 1) != 0)
    return None if weight is None else f"{weight.name} ends in a short group."


def odd_bits(*allowed: int) -> EngineRule:
    """Make a rule against bits other than the allowed ones."""

    def test(c: Checkpoint) -> str | None:
        weight = first(c, lambda w: w.scheme.bits not in allowed)
        if weight is None:
            return None
        *most, last = map(str, allowed)
        known = f"{', '.join(most)} and {last}" if most else last
        return f"{weight.name} has {weight.scheme.bits} bits; its kernels take {known}."

    return EngineRule((), "", test)


def asymmetric(c: Checkpoint) -> str | None:
    """Object to asymmetric weights."""
    weight = first(c, lambda w: not w.scheme.symmetric)
    return None if weight is None else f"{weight.name} is asymmetric; it reads gptq files with sym only."


def odd_groups(*allowed: int | None) -> EngineRule:
    """Make a rule against group sizes other than the allowed ones; None is per channel."""

    def test(c: Checkpoint) -> str | None:
        weight = first(c, lambda w: w.scheme.group_size not in allowed)
        if weight is None:
            return None
        known = ", ".join("channel" if size is None else str(size) for size in allowed)
        return f"{weight.name} has {weight.scheme.describe()}; its kernels know groups of {known}."

    return EngineRule((), "", test)


def vllm_groups(c: Checkpoint) -> str | None:
    """Object to group sizes that vLLM has a kernel for on no device."""
    reason = no_vllm_gpu(c)
    return None if reason is None or no_vllm_cpu(c) is None else f"{reason}."


def packed_zero_points(c: Checkpoint) -> str | None:
    """Object to zero points that transformers would have to unpack while it runs.

    transformers 5.24 with compressed-tensors 0.20 was run: it makes unpacked ones, which the stored ones do not fit.
    """
    weight = None if c.dequantized else first(c, lambda w: w.kind == "linear" and not w.scheme.symmetric)
    if weight is None:
        return None
    return (
        f"{weight.name} has zero points, which it reads only where it dequantizes: add '\"dequantize\": true' to"
        " quantization_config in config.json."
    )


def asymmetric_eight(c: Checkpoint) -> str | None:
    """Object to asymmetric weights of 8 bits."""
    weight = first(c, lambda w: w.scheme.bits == 8 and not w.scheme.symmetric)
    if weight is None:
        return None
    return f"{weight.name}: 8 bits with zero points; Marlin takes zero points with 4 bits only."


def gptq_bits(c: Checkpoint) -> str | None:
    """Object to bits that vLLM's GPTQ kernels lack, and name the option that may read them.

    vLLM: quantization/humming.py, override_quantization_method; humming/schema/gptq.py. It was not run.
    """
    weight = first(c, lambda w: w.scheme.bits not in (4, 8))
    if weight is None:
        return None
    return (
        f"{weight.name} has {weight.scheme.bits} bits; its kernels take 4 and 8. `--quantization humming`"
        f" ({HUMMING}, which its wheel for CUDA requires) may read it: not tried."
    )


def split_embedding(c: Checkpoint) -> str | None:
    """Object to an embedding whose codes lie across words: it is unpacked by ``32 // bits`` codes a word."""
    weight = first(c, lambda w: w.kind in ("embedding", "tied") and 32 % w.scheme.bits != 0)
    return None if weight is None else f"{weight.name} has {weight.scheme.bits} bits; it looks up 2, 4 and 8 bits only."


def several_schemes(c: Checkpoint) -> str | None:
    """Object to more than one scheme."""
    return f"{len(c.schemes())} schemes; it reads one for the whole model." if len(c.schemes()) > 1 else None


def kinds(*refused: str) -> EngineRule:
    """Make a rule against quantized heads or embeddings."""

    def test(c: Checkpoint) -> str | None:
        weight = first(c, lambda w: w.kind in refused)
        if weight is None:
            return None
        return (
            f"{weight.name} is quantized; it reads {'a head' if weight.kind == 'head' else 'embeddings'} at 16 bit"
            " only."
        )

    return EngineRule((), "", test)


def transformers_mixed(c: Checkpoint) -> str | None:
    """Object to mixed schemes and zero points together (``formats/compressed_tensors.py``).

    Its dense loading knows one scheme, its compressed loading no zero points. Run: zero points of a few weights in
    other groups than most have fail ("size of tensor a must match"); only whole rows load beside groups
    (eval/readers/matrix.toml, ct-mixed-*; tests/integration/test_head_and_embeddings.py).
    """
    if len({(scheme.bits, scheme.symmetric, scheme.activations) for scheme in c.schemes()}) == 1:
        sizes = Counter(w.scheme.group_size for w in c.linears if not w.scheme.symmetric and w.scheme.group_size)
        usual = max(sizes, key=lambda size: sizes[size], default=0)
        odd = first(
            c,
            lambda w: w.kind == "linear" and not w.scheme.symmetric and w.scheme.group_size not in (None, usual)
            and w.in_features > (w.scheme.group_size or 0),
        )  # fmt: skip
        if odd is None:
            return None
        return (
            f"{odd.name} has zero points in groups of {odd.scheme.group_size}, where most have {usual}: it reads one"
            " size. --group-size with one that divides every width, or --sym, loads there."
        )
    weight = first(c, lambda w: not w.scheme.symmetric or w.kind == "embedding")
    if weight is None:
        return None
    what = "embeddings" if weight.kind == "embedding" else "zero points"
    return f"{weight.name} has {what}, which it decodes only where all weights have the same bits and symmetry."


def asymmetric_embedding(c: Checkpoint) -> str | None:
    """Object to an asymmetric embedding."""
    weight = first(c, lambda w: w.kind == "embedding" and not w.scheme.symmetric)
    return None if weight is None else f"{weight.name} is asymmetric; it reads no zero points for embeddings."


# Families whose models in vLLM tell the embedding its name, without which it is taken for one in 16 bits. 0.32 was run:
# llama's stops with "no module or parameter named 'embed_tokens.weight_packed'"; qwen3's loads, and stops on a CPU at
# its Triton kernel.
VLLM_EMBEDDINGS = ("qwen2", "qwen3", "qwen3_moe", "gemma3", "gemma3_text")


def unnamed_embedding(c: Checkpoint) -> str | None:
    """Object to a quantized embedding of a family whose embedding vLLM does not name."""
    weight = first(c, lambda w: w.kind in ("embedding", "tied"))
    if weight is None or c.family in VLLM_EMBEDDINGS:
        return None
    return f"{weight.name} is quantized; it reads that of {', '.join(VLLM_EMBEDDINGS)} only."


def per_channel(c: Checkpoint) -> str | None:
    """Object to packed weights with one scale per channel."""
    weight = first(c, lambda w: w.scheme.group_size is None and w.scheme.activations is None)
    return (
        None if weight is None else f"{weight.name} has one scale per channel; it reads groups of packed weights only."
    )


def int8_activations(c: Checkpoint) -> bool:
    """Tell whether activations are quantized."""
    return any(weight.scheme.activations is not None for weight in c.weights)


def at(reader: str, rule: EngineRule, *formats: str) -> EngineRule:
    """Return a general rule with the line of this engine that enforces it.

    reader: the file and line.
    rule: the general rule.
    formats: those that it applies to; none for all.
    """
    return EngineRule(formats, reader, rule.test)
