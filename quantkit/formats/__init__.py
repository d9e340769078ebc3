"""One file is one on-disk format, a stateless encode/decode pair. Imports core.

``WRITABLE`` is what convert can write; ``READABLE`` maps the ``quant_method`` of a config.json to the format that reads
it. What a format is: ``quantkit.formats.interface``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quantkit.errors import CheckpointError, RequestError
from quantkit.formats.awq import AWQ
from quantkit.formats.bitsandbytes import BitsAndBytes
from quantkit.formats.compressed_tensors import CompressedTensors
from quantkit.formats.floats.fp8 import FP8
from quantkit.formats.floats.modelopt import ModelOpt
from quantkit.formats.gguf import GGUF
from quantkit.formats.gptq import GPTQ
from quantkit.formats.interface import Format, Reader
from quantkit.formats.native import Native

_ALL: tuple[Any, ...] = (CompressedTensors, GPTQ, AWQ, Native, GGUF, BitsAndBytes, FP8, ModelOpt)
FORMATS: dict[str, Any] = {form.name: form for form in _ALL}
# folders of safetensors with integer codes; then all that convert can write
PACKED = ("compressed-tensors", "gptq", "awq", "native")
WRITABLE = (*PACKED, "gguf", "bitsandbytes")
READABLE = {
    "compressed-tensors": "compressed-tensors",
    "gptq": "gptq",
    "awq": "awq",
    "quantkit": "native",
    "bitsandbytes": "bitsandbytes",
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "modelopt": "modelopt",
}


def writer_format(name: str) -> Format:
    """Return the format convert writes under ``name``.

    Raises RequestError for one that is unknown or only read.
    """
    if name not in WRITABLE:
        known = f"'{name}' is read, not written" if name in FORMATS else f"no format is called '{name}'"
        raise RequestError(f"--format {name}: {known}. Formats that can be written: {', '.join(WRITABLE)}.")
    form: Format = FORMATS[name]
    return form


# what some tools call a packing that others have too: AutoRound's names, after their colon
PACKINGS = {"auto_gptq": "gptq", "gptq": "gptq", "gptqmodel": "gptq", "auto_awq": "awq", "awq": "awq"}
AUTO_ROUND = ("auto-round", "intel/auto-round")
# formats of other tools that are not read, by the name that people know, and what to do
ORIGINAL = "Give the 16-bit original."
REFUSED = {
    "mlx": ("MLX", "Its groups have a float offset and no zero point. mlx_lm.convert -d makes a dense model of it;"),
    "hqq": ("HQQ", "Its zero points are no whole numbers. hqq's own dequantize() makes a dense model of it;"),
    "exl3": ("EXL3", "Its weights are paths through a trellis. Only exllamav3 reads it."),
    "exl2": ("EXL2", "Only exllamav2 reads it."),
    "quanto": ("quanto", "optimum-quanto's dequantize makes a dense model of it;"),
    "torchao": ("torchao", "torchao reads it."),
    "aqlm": ("AQLM", "Its weights are sums of codebook entries. Only aqlm reads it."),
    "vptq": ("VPTQ", "Its weights are codebook entries. Only vptq reads it."),
    "quark": ("Quark", "Export it from Quark as safetensors in AutoAWQ's or FP8's layout;"),
    "marlin": ("Marlin", "It is laid out for one kernel: the same model mostly exists as gptq;"),
}


def labelled(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ``quantization_config`` under the name of its packing, where a tool has a label of its own.

    AutoRound says ``packing_format: auto_round:auto_gptq`` and settings of single modules in ``extra_config``; MLX says
    ``bits`` and ``group_size`` and no method. Any other config is returned as it is.

    Raises CheckpointError for a packing that is not read.
    """
    method = config.get("quant_method")
    if method is None and {"bits", "group_size"} <= set(config):
        return {**config, "quant_method": "mlx"}
    if method not in AUTO_ROUND:
        return dict(config)
    packing = str(config.get("packing_format") or "")
    name = PACKINGS.get(packing.rpartition(":")[2])
    if name is None:
        raise CheckpointError(
            f"packing_format {packing[:60]!r} of AutoRound is not read; auto_round:auto_gptq and auto_round:auto_awq"
            f" are. {ORIGINAL}"
        )
    symmetric = config.get("sym", True)
    if name == "awq":
        return {**config, "quant_method": name, "zero_point": not symmetric, "version": "gemm"}
    rules: dict[str, dict[str, Any]] = {}
    for module, own in (config.get("extra_config") or {}).items():
        pattern = module if re.search(r"[*+?|\\\[(^$]", module) else f"^{re.escape(module)}$"
        dense = own.get("bits", 0) >= 16
        changed = {key: own[key] for key in ("bits", "group_size", "sym") if key in own}
        rules[f"{'-' if dense else '+'}:{pattern}"] = {} if dense else changed
    return {**config, "quant_method": name, "checkpoint_format": "gptq", "dynamic": rules or None}


def reader_format(config: Mapping[str, Any]) -> Reader:
    """Return the format that reads a ``quantization_config``. Raises CheckpointError for a method that is not read."""
    method = config.get("quant_method")
    if isinstance(method, str) and method in REFUSED:
        known, why = REFUSED[method]
        raise CheckpointError(f"quantized by {known}, which quantkit does not read. {why} {ORIGINAL}")
    if not isinstance(method, str) or method not in READABLE:
        raise CheckpointError(
            f"quantization_config says quant_method {repr(method)[:60]}, which quantkit does not read. Readable:"
            f" {', '.join(READABLE)}."
        )
    form: Reader = FORMATS[READABLE[method]]
    return form


def side_files(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return JSON files, by name, that readers of this ``quantization_config`` look for beside config.json."""
    form: Format = FORMATS[READABLE[str(config["quant_method"])]]
    return form.side_files(config)
