"""The table of engines: version, formats that are read, and what is refused, with the line of source that decides.

Lines are of vLLM 0.33.0, SGLang 0.5.23, lmdeploy 0.18.0, transformers 5.23 with compressed-tensors 0.20, GPTQModel 7.6
and llama.cpp's converter of November 2026. A reader that changes makes its line wrong: read it again when raising a
version.
"""

from __future__ import annotations

from quantkit.convert.engines import commands, devices
from quantkit.convert.engines.conditions import (
    AWQ,
    BITSANDBYTES,
    CT,
    GPTQ,
    NATIVE,
    asymmetric,
    asymmetric_eight,
    asymmetric_embedding,
    at,
    fused_schemes,
    gptq_bits,
    kinds,
    odd_bits,
    odd_groups,
    packed_zero_points,
    per_channel,
    ragged,
    several_schemes,
    split_embedding,
    transformers_mixed,
    unnamed_embedding,
    vllm_groups,
)
from quantkit.convert.engines.devices import MARLIN_GROUPS
from quantkit.convert.engines.experts import marlin_experts, transformers_experts, transformers_layers
from quantkit.convert.engines.notes import bfloat16_scales, float_activations, humming, int8_units, rounds_slowly
from quantkit.convert.engines.rules import Engine, EngineRule, Splits, heads, whole_groups
from quantkit.convert.engines.splits import divisible, int8_tiles, marlin_tiles, packed_zeros

V = "vllm/model_executor/layers/quantization/"
K = "vllm/model_executor/kernels/linear/mixed_precision/"
S = "sglang/srt/layers/quantization/"

VLLM = Engine(
    "vLLM",
    "0.33.0",
    (CT, GPTQ, AWQ),
    f"{V}__init__.py:114",
    (
        EngineRule((CT,), f"{K}marlin.py:49, triton_w4a16.py:340", vllm_groups),
        at(f"{V}utils/marlin_utils.py:143", odd_groups(*MARLIN_GROUPS), GPTQ),
        EngineRule((CT,), f"{V}compressed_tensors/schemes/compressed_tensors_wNa16.py:168", ragged),
        EngineRule((CT,), f"{V}compressed_tensors/utils.py:67, 176 (takes the first sibling's)", fused_schemes),
        EngineRule((CT,), f"{V}compressed_tensors/compressed_tensors_embedding.py:51", asymmetric_embedding),
        EngineRule((CT,), f"{V}compressed_tensors/compressed_tensors_embedding.py:96", split_embedding),
        EngineRule((CT,), "vllm/model_executor/models/llama.py (embeddings without prefix)", unnamed_embedding),
        EngineRule((GPTQ,), f"{V}auto_gptq.py:99", gptq_bits),
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
    (humming, bfloat16_scales, int8_units),
    marlin_experts(f"{V}compressed_tensors/compressed_tensors_moe/compressed_tensors_moe_wna16.py, __init__"),
    devices=devices.on_nvidia_or_cpu,
    command=commands.vllm,
)

SGLANG = Engine(
    "SGLang",
    "0.5.23",
    (CT, GPTQ, AWQ, BITSANDBYTES),
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
    command=commands.sglang,
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
    command=commands.lmdeploy,
)

TRANSFORMERS = Engine(
    "transformers",
    "5.23",
    (CT, NATIVE, GPTQ, AWQ, BITSANDBYTES),
    "transformers/quantizers/auto.py:221",
    (
        EngineRule((CT,), "transformers/integrations/compressed_tensors.py:45", transformers_mixed),
        EngineRule((CT,), "transformers/quantizers/quantizer_compressed_tensors.py (run)", packed_zero_points),
        at("transformers/utils/quantization_config.py:742", odd_bits(2, 3, 4, 8), GPTQ),
        EngineRule((GPTQ,), "transformers/quantizers/quantizer_gptq.py:56 (optimum; run)", several_schemes),
        at("transformers/quantizers/quantizer_awq.py:67", odd_bits(4), AWQ),
        at("transformers/quantizers/quantizer_gptq.py:89", kinds("head", "embedding", "tied"), GPTQ, AWQ),
    ),
    (),
    (
        lambda c: {
            GPTQ: "needs gptqmodel and optimum",
            AWQ: "needs gptqmodel",
        }.get(c.format),
        rounds_slowly,
    ),
    transformers_experts,
    transformers_layers,
    devices.by_gptqmodel,
    commands.transformers,
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
    devices=devices.on_any,
    command=commands.gptqmodel,
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
    devices=devices.on_any,
    command=commands.llama_cpp,
)

QUANTKIT = Engine(
    "quantkit", "this version", (CT, NATIVE, GPTQ, AWQ, BITSANDBYTES), "quantkit/formats/__init__.py", (),
    mixtures=lambda c: None, layers=lambda c: None, devices=devices.on_any, command=commands.quantkit,
)  # fmt: skip

FLOAT_SPLITS: Splits = (
    ("vllm/model_executor/models/llama.py:145-155", heads),
    ("vllm/model_executor/layers/linear.py:497, 1708", divisible),
    ("the groups of its scales", whole_groups),
)
ENGINES = (QUANTKIT, VLLM, SGLANG, LMDEPLOY, TRANSFORMERS, GPTQMODEL, LLAMA_CPP)
