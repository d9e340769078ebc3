"""Whether a source is repacked or quantized, and how it is seen then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantkit.checkpoint.gguf_files.source import GGUFSource
from quantkit.checkpoint.source import Source
from quantkit.convert.repack.gguf_source import PackedGGUF
from quantkit.errors import RequestError
from quantkit.formats import writer_format
from quantkit.formats.floats import gpt_oss
from quantkit.runtime.layers.dense_source import as_original


def seen_for(source: Source, requested: Mapping[str, Any]) -> Source:
    """Return a source as the request means it: to be repacked if it is quantized, else to be quantized.

    Integers with scales are always repacked. FP8, NVFP4, MXFP4 and GGUF files are often the only form that a model is
    published in: they are quantized like any original, unless ``repack`` asks for the same numbers in another format.

    source: as it is stored.
    requested: the options of convert that were given.

    Raises RequestError for ``repack`` of a source that is not quantized, or that is not repacked here.
    """
    asked = bool(requested.get("repack"))
    if not asked:
        return as_original(source)
    if isinstance(source, GGUFSource):
        form = str(requested.get("format", "compressed-tensors"))
        if form == "gguf":
            raise RequestError(f"{source.path}: is a GGUF file already. Copy it, or choose another --format.")
        return PackedGGUF(source, writer_format(form))
    config = source.quantization()
    if config is None:
        raise RequestError(f"--repack: {source.path} is not quantized. Leave it out to quantize it.")
    if config.get("quant_method") == gpt_oss.METHOD:
        raise RequestError(
            f"--repack: {source.path} stores all experts of a layer in one tensor, and is not repacked as it lies."
            " --format gguf --gguf-type mxfp4 --method rtn gives the experts the same numbers (attention becomes Q8_0);"
            " --dequantize writes them all in bfloat16."
        )
    return source
