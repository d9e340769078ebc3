"""Where a checkpoint that loads does: on which GPUs, on a CPU, and why not there.

vLLM 0.33.0, ``vllm/model_executor/kernels/linear/__init__.py``: ``_POSSIBLE_KERNELS[PlatformEnum.CPU]`` are kernels
for 4 bits, ``_POSSIBLE_INT8_KERNELS[PlatformEnum.CPU]`` one for W8A8. Its 0.32 for CPUs was run: compressed-tensors W4
with and without zero points and W8A8, gptq W4 sym and awq W4 give quantkit's log-probabilities, groups of 16 too, which
no kernel for a GPU takes; 8 bits for weights only end in "Failed to find a kernel".
"""

from __future__ import annotations

from quantkit.convert.engines.rules import Checkpoint, first, fused_rows

MARLIN_GROUPS = (None, 32, 64, 128)
BITSANDBYTES_ROWS = 32  # functional.py, _convert_weight_packed_for_cpu: block_n
CPU_TILE = 32  # mixed_precision/cpu.py, can_implement: inputs and outputs are multiples of it


def on_nvidia_or_cpu(c: Checkpoint) -> tuple[str, ...]:
    """Return where vLLM loads a checkpoint of integers: kernels for a GPU take some, those for a CPU others."""
    gpu, cpu = no_vllm_gpu(c), no_vllm_cpu(c)
    if gpu is not None:
        return ("on a CPU", f"on an NVIDIA GPU no: {gpu}")
    return ("on an NVIDIA GPU or a CPU",) if cpu is None else ("on an NVIDIA GPU", f"on a CPU no: {cpu}")


def on_any(c: Checkpoint) -> tuple[str, ...]:
    """Return where an engine runs that has code for both."""
    return ("on a GPU or a CPU",)


def by_gptqmodel(c: Checkpoint) -> tuple[str, ...]:
    """Return where transformers runs a checkpoint: gptq on a CPU by the kernel that gptqmodel 7.6 chose when run."""
    whole = first(c, lambda w: c.format == "gptq" and w.scheme.bits == 4 and w.scheme.group_size is None)
    if whole is None:
        return on_any(c)
    return ("on a GPU", "on a CPU no: 4 bits in groups of 32, 64, 128 or 256 only")


def not_run_on_cpu(c: Checkpoint) -> tuple[str, ...]:
    """Return where an engine runs whose CPU kernels for these numbers depend on the processor, and were not run."""
    return ("on an NVIDIA GPU", "on a CPU not tried")


def by_bitsandbytes(c: Checkpoint) -> tuple[str, ...]:
    """Return where bitsandbytes computes a checkpoint rightly, empty where it does on every device that was run.

    0.50 was run on Zen 4: where the processor has AVX512, its 4-bit kernel begins a block with every row, though the
    blocks run across the ends of rows, and with AVX512-BF16 it asks for outputs that 32 divides.
    """
    block = 64  # formats/bitsandbytes_library.py
    weight = first(
        c, lambda w: w.scheme.bits == 4 and bool(w.in_features % block or w.out_features % BITSANDBYTES_ROWS)
    )
    if c.format != "bitsandbytes" or weight is None:
        return ()
    size = f"{weight.name} has {weight.out_features} outputs and {weight.in_features} inputs"
    return ("on a GPU", f"on a CPU with AVX512 no: {size}, no multiples of {BITSANDBYTES_ROWS} and {block}")


def no_vllm_gpu(c: Checkpoint) -> str | None:
    """Return why vLLM's kernels for a GPU do not take a compressed-tensors checkpoint's group sizes, None if they do.

    Marlin's, and 256 by the Triton kernel for 4 bits.
    """
    if c.format != "compressed-tensors":
        return None  # gptq and awq have rules of their own
    known = {4: (*MARLIN_GROUPS, 256)}
    weight = first(c, lambda w: w.scheme.group_size not in known.get(w.scheme.bits, MARLIN_GROUPS))
    if weight is None:
        return None
    return f"{weight.name} has {weight.scheme.describe()}; its kernels know groups of 32, 64, 128 and per channel"


def no_vllm_cpu(c: Checkpoint) -> str | None:
    """Return why vLLM's CPU kernels do not take a checkpoint that its kernels for a GPU take, None if they do."""
    packed = [weight for weight in c.weights if weight.scheme.activations is None]
    if any(weight.scheme.bits != 4 for weight in packed):
        return "4 bits only, or int8 with int8 activations"
    if first(c, lambda w: w.kind in ("embedding", "tied")) is not None:
        return "quantized embeddings are looked up by a Triton kernel"
    names = {weight.name for weight in packed}
    for name, _, rows, inputs in fused_rows(c, 1):
        if name in names and (rows % CPU_TILE or inputs % CPU_TILE):
            return f"{name} has {rows:g} outputs and {inputs:g} inputs, no multiples of {CPU_TILE}"
    return None
