"""One file is one on-disk format, a stateless encode/decode pair. Imports core.

``WRITABLE`` is what convert can write; ``READABLE`` maps the ``quant_method`` of a config.json to the format that reads
it. What a format is: ``quantkit.formats.interface``.
"""

from __future__ import annotations

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


def reader_format(config: Mapping[str, Any]) -> Reader:
    """Return the format that reads a ``quantization_config``. Raises CheckpointError for a method that is not read."""
    method = config.get("quant_method")
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
