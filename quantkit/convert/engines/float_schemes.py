"""Which engines read FP8, NVFP4 and MXFP4 as compressed-tensors holds them, and what bitsandbytes writes.

What was not read or run is not said: no.

vLLM: compressed_tensors.py (_get_scheme_from_parts) and schemes/compressed_tensors_{w8a8_fp8,w4a4_nvfp4,w4a16_mxfp4}.py
with their get_min_capability, read in its repository. transformers 5.23 with compressed-tensors 0.20 was run:
tests/integration/test_float_schemes.py; with bitsandbytes 0.50: tests/interop/test_bitsandbytes_transformers.py.
SGLang, lmdeploy and llama.cpp: from the formats that they list; vLLM 0.33 reads bitsandbytes no longer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quantkit.convert.engines.devices import by_bitsandbytes, not_run_on_cpu
from quantkit.convert.engines.rules import Checkpoint, Engine, Splits, has_experts, largest_split, loading
from quantkit.convert.engines.verdict import Verdict
from quantkit.core.scheme import OF_BITSANDBYTES, Scheme

C = "vllm/model_executor/layers/quantization/compressed_tensors/"


@dataclass(frozen=True, slots=True)
class Read:
    """An engine reads a scheme: the file that decides, and the notes of the answer."""

    reader: str
    notes: tuple[str, ...] = ()


CT = "with compressed-tensors 0.20"
FP8_CT = ("W8A8 fp8 channel", "W8A8 fp8 tensor", "W8A8 fp8 128x128", "W8 fp8 channel")  # run: docs/formats/readers.md
FP8_VLLM = "multiplies fp8 on GPUs of compute capability 8.9 or newer; older ones leave activations in 16 bits"
READS: dict[str, dict[str, Read]] = {
    "vLLM": {
        "W8A8 fp8 channel": Read(f"{C}schemes/compressed_tensors_w8a8_fp8.py", (FP8_VLLM,)),
        "W8A8 fp8 tensor": Read(f"{C}schemes/compressed_tensors_w8a8_fp8.py", (FP8_VLLM,)),
        "W8A8 fp8 128x128": Read(
            f"{C}schemes/compressed_tensors_w8a8_fp8.py", ("on GPUs of compute capability 8.9 or newer",)
        ),
        "W8 fp8 channel": Read(f"{C}compressed_tensors.py, _is_fp8_w8a16"),
        "W8 fp8 tensor": Read(f"{C}compressed_tensors.py, _is_fp8_w8a16"),
        "W4 nvfp4": Read(f"{C}schemes/compressed_tensors_w4a16_nvfp4.py", ("weights only: no faster products",)),
        "W4A4 nvfp4": Read(
            f"{C}schemes/compressed_tensors_w4a4_nvfp4.py", ("multiplies 4 bits on Blackwell GPUs only",)
        ),
        "W4 mxfp4": Read(
            f"{C}schemes/compressed_tensors_w4a16_mxfp4.py", ("on GPUs of compute capability 8.0 or newer",)
        ),
    },
    "SGLang": {"W8A8 fp8 channel": Read(""), "W8A8 fp8 tensor": Read("")},
    "transformers": {
        **{name: Read("", (CT,)) for name in FP8_CT},
        **{name: Read("", (CT, "in bfloat16 only")) for name in ("W4 nvfp4", "W4 mxfp4")},
        **{Scheme.of(name).describe(): Read("", ("needs accelerate and bitsandbytes",)) for name in OF_BITSANDBYTES},
    },
    "llama.cpp (convert_hf_to_gguf)": {
        name: Read("", ("dequantizes: the GGUF file is 16 bit until llama-quantize rounds it again",))
        for name in ("W8A8 fp8 channel", "W8 fp8 channel")
    },
}


def has_floats(checkpoint: Checkpoint) -> bool:
    """Tell whether some weights are floating-point numbers."""
    return any(scheme.number != "integer" for scheme in checkpoint.schemes())


def judge_floats(engine: Engine, checkpoint: Checkpoint, splits: Splits) -> Verdict:
    """Return one engine's verdict on weights that are floating-point numbers.

    splits: what is asked of every tensor-parallel size, as ``Engine.splits``.
    """

    def no(reason: str, reader: str = "") -> Verdict:
        return Verdict(engine.name, engine.version, False, None, reason, reader)

    if engine.name == "quantkit":
        ours = Verdict(engine.name, engine.version, True, 1, "does not split a model.", "")
        return loading(engine, checkpoint, ours)
    names = sorted({scheme.describe() for scheme in checkpoint.schemes()})
    if len(names) > 1:
        return no(f"not shown to load {' beside '.join(names)}.")
    found = READS.get(engine.name, {}).get(names[0])
    if found is None:
        return no(f"not shown to load {names[0]}.")
    objection = engine.layers(checkpoint)
    if has_experts(checkpoint):
        objection = ("not shown to load mixtures of experts in this scheme.", "")
    if objection is not None:
        return no(*objection)
    block = "128x128" in names[0]
    largest, reason, reader = largest_split(splits if engine.splits and not block else (), checkpoint)
    verdict = Verdict(engine.name, engine.version, True, largest, reason, reader or found.reader, found.notes)
    verdict = loading(engine, checkpoint, verdict)
    where = {"vLLM": not_run_on_cpu, "transformers": by_bitsandbytes}.get(engine.name)
    return verdict if where is None else replace(verdict, devices=where(checkpoint))
