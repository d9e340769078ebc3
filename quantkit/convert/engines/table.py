"""The table of engines: version, formats that are read, and what is refused, with the line of source that decides.

Lines are of vLLM 0.33.0, SGLang 0.5.23, lmdeploy 0.18.0, transformers 5.23 with compressed-tensors 0.20, GPTQModel 7.6
and llama.cpp's converter of November 2026. A reader that changes makes its line wrong: read it again when raising a
version.
"""

from __future__ import annotations

from quantkit.convert.engines.rules import (
    TRANSPOSED,
    Checkpoint,
    Engine,
    EngineRule,
    Mixtures,
    Splits,
    first,
    fused_rows,
    heads,
    last_name,
    not_shown,
    quantizes_experts,
    unseen,
    whole_groups,
)
from quantkit.convert.options.rules import split_fused

CT, GPTQ, AWQ, NATIVE = "compressed-tensors", "gptq", "awq", "native"
MARLIN_GROUPS = (None, 32, 64, 128)


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
        known = " and ".join(str(bits) for bits in allowed)
        return f"{weight.name} has {weight.scheme.bits} bits; without extra packages its kernels take {known}."

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
    """Object to group sizes other than Marlin's; the Triton kernel, 4 bits only, knows 256 too."""
    known = {4: (*MARLIN_GROUPS, 256)}
    weight = first(c, lambda w: w.scheme.group_size not in known.get(w.scheme.bits, MARLIN_GROUPS))
    return (
        None
        if weight is None
        else f"{weight.name} has {weight.scheme.describe()}; its kernels know groups of 32, 64, 128 and per channel."
    )


def asymmetric_eight(c: Checkpoint) -> str | None:
    """Object to asymmetric weights of 8 bits."""
    weight = first(c, lambda w: w.scheme.bits == 8 and not w.scheme.symmetric)
    if weight is None:
        return None
    return (
        f"{weight.name}: 8 bits with zero points; Marlin takes zero points with 4 bits only (Machete, on Hopper, both)."
    )


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

    Its dense loading knows one scheme, its compressed loading no zero points. Run: zero points in groups of two sizes
    fail ("size of tensor a must match"), beside whole rows they load (eval/readers/matrix.toml, ct-mixed-*).
    """
    if len({(scheme.bits, scheme.symmetric, scheme.activations) for scheme in c.schemes()}) == 1:
        sizes = {scheme.group_size for scheme in c.schemes() if not scheme.symmetric and scheme.group_size}
        return None if len(sizes) < 2 else f"zero points in groups of {' and of '.join(map(str, sorted(sizes)))}."
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


def packed_zeros(c: Checkpoint, ranks: int) -> str | None:
    """Object if zero points, packed along the rows, do not give a rank whole words."""
    if all(weight.scheme.symmetric for weight in c.linears):
        return None
    for name, bits, rows, _ in fused_rows(c, ranks):
        if rows % (32 // bits):
            return f"{name}: {rows:g} rows a rank do not fill whole words of zero points."
    return None


def marlin_tiles(c: Checkpoint, ranks: int) -> str | None:
    """Object to shapes that do not fill Marlin's tiles: SGLang checks them and does not pad."""
    if int8_activations(c):
        return None
    for name, _, rows, inputs in fused_rows(c, ranks):
        if rows % 64:
            return f"{name}: {rows:g} rows a rank (with its siblings) are no multiple of 64."
        if inputs % 128:
            return f"{name}: {inputs:g} inputs a rank are no multiple of 128."
    return None


def divisible(c: Checkpoint, ranks: int) -> str | None:
    """Object to a matrix that cannot be split evenly."""
    for name, _, rows, inputs in fused_rows(c, ranks):
        if rows % 1 or inputs % 1:
            return f"{name} cannot be split evenly."
    return None


def int8_tiles(c: Checkpoint, ranks: int) -> str | None:
    """Object to shapes that SGLang's int8_scaled_mm does not take: rows of whole 16 bytes, 8 outputs at a time."""
    if not int8_activations(c):
        return None
    for name, _, rows, inputs in fused_rows(c, ranks):
        if rows % 8 or inputs % 16:
            return f"{name}: {rows:g} rows and {inputs:g} inputs a rank are no multiples of 8 and 16."
    return None


def int8_activations(c: Checkpoint) -> bool:
    """Tell whether activations are quantized."""
    return any(weight.scheme.activations is not None for weight in c.weights)


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


# Families whose experts transformers was seen to gather from per-expert tensors: symmetric, logits within 6e-4 of
# quantkit's.
TRANSFORMERS_EXPERTS = ("mixtral", "qwen3_moe")


def transformers_experts(c: Checkpoint) -> tuple[str, str] | None:
    """Object to zero points of experts: its conversion of expert tensors collects only packed codes and scales."""
    if c.format == NATIVE:
        return "transformers holds experts as one tensor.", "quantkit/hf.py, _module_names"
    if c.format != CT or not quantizes_experts(c):
        return not_shown(c)
    where = "transformers/integrations/compressed_tensors.py"
    if any(not weight.scheme.symmetric for weight in c.weights):
        return "experts with zero points raise 'Asymmetric quant requires zero-point values'.", f"{where}:128"
    if c.family == "gpt_oss":
        return "the experts' tensors are not recognised: they stay random, with a warning only.", f"{where}:63"
    if len(c.schemes()) > 1:
        return "not shown to load mixtures of experts with several schemes.", ""
    return None if c.family in TRANSFORMERS_EXPERTS else not_shown(c)


def transformers_layers(c: Checkpoint) -> tuple[str, str] | None:
    """Object to layers that quantkit's own reader does not replace, or that no other format was shown with."""
    if c.format == NATIVE and not any(last_name(weight) in TRANSPOSED for weight in c.linears):
        return None
    return unseen(c)


def marlin_experts(reader: str) -> Mixtures:
    """vLLM and SGLang fuse the experts: their methods assert symmetric weights; the symmetric ones were not run."""

    def test(c: Checkpoint) -> tuple[str, str] | None:
        if c.format == CT and quantizes_experts(c) and any(not weight.scheme.symmetric for weight in c.weights):
            return "asserts 'Only symmetric quantization is supported for MoE'.", reader
        return not_shown(c)

    return test


def at(reader: str, rule: EngineRule, *formats: str) -> EngineRule:
    """Return a general rule with the line of this engine that enforces it.

    reader: the file and line.
    rule: the general rule.
    formats: those that it applies to; none for all.
    """
    return EngineRule(formats, reader, rule.test)


V = "vllm/model_executor/layers/quantization/"
K = "vllm/model_executor/kernels/linear/mixed_precision/"
S = "sglang/srt/layers/quantization/"

VLLM = Engine(
    "vLLM",
    "0.33.0",
    (CT, GPTQ, AWQ),
    f"{V}__init__.py:114",
    (
        at(f"{K}humming.py:33, marlin.py:41", odd_bits(4, 8), CT),
        EngineRule((CT,), f"{V}utils/marlin_utils.py:48, {K}machete.py:33", asymmetric_eight),
        EngineRule((CT,), f"{K}marlin.py:49, triton_w4a16.py:340", vllm_groups),
        at(f"{V}utils/marlin_utils.py:143", odd_groups(*MARLIN_GROUPS), GPTQ),
        EngineRule((CT,), f"{V}compressed_tensors/schemes/compressed_tensors_wNa16.py:168", ragged),
        EngineRule((CT,), f"{V}compressed_tensors/utils.py:67, 176 (takes the first sibling's)", fused_schemes),
        EngineRule((CT,), f"{V}compressed_tensors/compressed_tensors_embedding.py:51", asymmetric_embedding),
        EngineRule(
            (CT,), "vllm/model_executor/models/llama.py: VocabParallelEmbedding(without prefix)", unnamed_embedding
        ),
        at(f"{V}auto_gptq.py:99", odd_bits(4, 8), GPTQ),
        EngineRule((GPTQ,), f"{V}auto_gptq.py:152", asymmetric),
        EngineRule((GPTQ,), f"{V}utils/gptq_utils.py:161", fused_schemes),
        at(f"{V}auto_gptq.py:259", kinds("embedding", "tied"), GPTQ, AWQ),
        at(f"{V}auto_awq.py:182", odd_bits(4), AWQ),
        EngineRule((AWQ,), f"{V}auto_awq.py:186", several_schemes),
    ),
    (
        ("vllm/model_executor/models/llama.py:145-155", heads),
        ("vllm/model_executor/layers/linear.py:497, 1708", divisible),
        (f"{K}marlin.py:58", whole_groups),
        (f"{V}compressed_tensors/schemes/compressed_tensors_wNa16.py:199", packed_zeros),
    ),
    (bfloat16_scales, int8_units),
    marlin_experts(f"{V}compressed_tensors/compressed_tensors_moe/compressed_tensors_moe_wna16.py, __init__"),
)

SGLANG = Engine(
    "SGLang",
    "0.5.23",
    (CT, GPTQ, AWQ),
    f"{S}__init__.py:165",
    (
        at(f"{S}compressed_tensors/schemes/compressed_tensors_wNa16.py:84", odd_bits(4, 8), CT),
        EngineRule((CT,), f"{S}marlin_utils.py:95", asymmetric_eight),
        at(f"{S}marlin_utils.py:130", odd_groups(*MARLIN_GROUPS), CT, GPTQ),
        EngineRule((CT,), f"{S}compressed_tensors/schemes/compressed_tensors_wNa16.py:125", ragged),
        EngineRule((CT, GPTQ), f"{S}compressed_tensors/utils.py:63", fused_schemes),
        at(f"{S}compressed_tensors/compressed_tensors.py:182", kinds("embedding", "tied")),
        at(f"{S}gptq/gptq.py:298", odd_bits(4, 8), GPTQ),
        EngineRule((GPTQ,), f"{S}gptq/gptq.py:298", asymmetric),
        at(f"{S}awq/awq.py:249", odd_bits(4), AWQ),
        EngineRule((AWQ,), f"{S}awq/awq.py:254", several_schemes),
    ),
    (
        ("sglang/srt/models/llama.py:183-193", heads),
        (f"{S}marlin_utils.py:187", whole_groups),
        (f"{S}marlin_utils.py:168, 178", marlin_tiles),
        ("sgl-kernel/csrc/gemm/int8_gemm_kernel.cu, int8_scaled_mm", int8_tiles),
    ),
    (bfloat16_scales, int8_units),
    marlin_experts(f"{S}compressed_tensors/schemes/compressed_tensors_wNa16_moe.py, __init__"),
)

LMDEPLOY = Engine(
    "lmdeploy",
    "0.18.0",
    (CT, GPTQ, AWQ),
    "lmdeploy/turbomind/converter.py:213",
    (
        EngineRule((CT,), "lmdeploy/turbomind/converter.py:201", several_schemes),
        at("lmdeploy/turbomind/converter.py:209", odd_bits(4)),
        at("lmdeploy/turbomind/converter.py:101", odd_groups(32, 128), CT),
        at("lmdeploy/turbomind/converter.py:99-100", odd_groups(128), GPTQ, AWQ),
        EngineRule((GPTQ,), "lmdeploy/turbomind/converter.py:194", asymmetric),
        at("lmdeploy/turbomind/converter.py:234", kinds("head", "embedding", "tied")),
    ),
    (
        ("lmdeploy/turbomind/builders/attention.py:31", heads),
        ("lmdeploy/turbomind/builders/_base.py:353", divisible),
        ("lmdeploy/turbomind/converter.py:107", whole_groups),
    ),
)

TRANSFORMERS = Engine(
    "transformers",
    "5.23",
    (CT, NATIVE, GPTQ, AWQ),
    "transformers/quantizers/auto.py:221",
    (
        EngineRule((CT,), "transformers/integrations/compressed_tensors.py:45", transformers_mixed),
        at("transformers/utils/quantization_config.py:742", odd_bits(2, 3, 4, 8), GPTQ),
        at("transformers/quantizers/quantizer_awq.py:67", odd_bits(4), AWQ),
        at("transformers/quantizers/quantizer_gptq.py:89", kinds("head", "embedding", "tied"), GPTQ, AWQ),
    ),
    (),
    (
        lambda c: {
            GPTQ: "needs gptqmodel and optimum",
            AWQ: "needs gptqmodel",
            NATIVE: "after `import quantkit.hf`",
        }.get(c.format),
        rounds_slowly,
    ),
    transformers_experts,
    transformers_layers,
)

GPTQMODEL = Engine(
    "GPTQModel",
    "7.6",
    (GPTQ, AWQ),
    "gptqmodel/quantization/config.py",
    (
        at("gptqmodel/nn_modules/qlinear/torch.py: SUPPORTS_BITS", odd_bits(2, 3, 4, 8), GPTQ),
        at("gptqmodel/nn_modules/qlinear/torch_awq.py: SUPPORTS_BITS", odd_bits(4), AWQ),
        at("gptqmodel/nn_modules/qlinear/torch.py: SUPPORTS_GROUP_SIZE", odd_groups(None, 16, 32, 64, 128)),
        at("gptqmodel/models/base.py", kinds("embedding", "tied")),
    ),
)

LLAMA_CPP = Engine(
    "llama.cpp (convert_hf_to_gguf)",
    "2026-11",
    (CT, GPTQ),
    "conversion/base.py, dequant_model: 'Quant method is not yet supported'",
    (
        EngineRule((CT,), "conversion/base.py, dequant_model: len(groups) > 1", several_schemes),
        EngineRule((CT,), 'conversion/base.py, dequant_model: strategy == "group"', per_channel),
        at("conversion/base.py, dequant_gptq: bits in (2, 4, 8)", odd_bits(2, 4, 8), GPTQ),
        EngineRule((GPTQ,), "conversion/base.py, dequant_gptq: one quant_config['bits']", several_schemes),
    ),
    (),
    (lambda c: "dequantizes: the GGUF file is 16 bit until llama-quantize rounds it again", float_activations),
)

QUANTKIT = Engine(
    "quantkit", "this version", (CT, NATIVE, GPTQ, AWQ), "quantkit/formats/__init__.py", (), mixtures=lambda c: None,
    layers=lambda c: None,
)  # fmt: skip

FLOAT_SPLITS: Splits = (
    ("vllm/model_executor/models/llama.py:145-155", heads),
    ("vllm/model_executor/layers/linear.py:497, 1708", divisible),
    ("the groups of its scales", whole_groups),
)
ENGINES = (QUANTKIT, VLLM, SGLANG, LMDEPLOY, TRANSFORMERS, GPTQMODEL, LLAMA_CPP)
