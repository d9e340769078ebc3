"""Peer: llama.cpp's mixes, by its own llama_model_quantize, with or without an importance matrix. Run by run.py.

The original goes into a GGUF file in 16 bits, the library makes the mix of it, and gguf's own code reads the result
back. The file is for the quantizer only: it has no tokenizer, Gemma's norms lack the 1 that llama.cpp adds (norms stay
float32, whatever the mix), and the rows of Llama's queries and keys stand in transformers' order (every type quantizes
row by row). Method f16 quantizes nothing: its weights are the original's, which proves the way there and back.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from worker import Stopwatch, arguments, block_linears, finish, load_model, only_default_dtype, token_ids

# enum llama_ftype
MIXES = {"f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q3_k_m": 12, "q4_k_s": 14, "q4_k_m": 15, "iq4_xs": 30}
ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "gemma3_text": gguf.MODEL_ARCH.GEMMA3}
PACKAGE = Path(sys.prefix) / "node_modules" / "@node-llama-cpp" / "linux-x64"
LIBRARIES = PACKAGE / "bins" / "linux-x64"


class ImportanceEntry(ctypes.Structure):
    """llama_model_imatrix_data."""

    _fields_ = (("name", ctypes.c_char_p), ("data", ctypes.POINTER(ctypes.c_float)), ("size", ctypes.c_size_t))


class Parameters(ctypes.Structure):
    """llama_model_quantize_params, with room for fields that a later version adds."""

    _fields_ = (
        ("nthread", ctypes.c_int32),
        ("ftype", ctypes.c_int32),
        ("output_tensor_type", ctypes.c_int32),
        ("token_embedding_type", ctypes.c_int32),
        ("allow_requantize", ctypes.c_bool),
        ("quantize_output_tensor", ctypes.c_bool),
        ("only_copy", ctypes.c_bool),
        ("pure", ctypes.c_bool),
        ("keep_split", ctypes.c_bool),
        ("dry_run", ctypes.c_bool),
        ("imatrix", ctypes.POINTER(ImportanceEntry)),
        ("kv_overrides", ctypes.c_void_p),
        ("tt_overrides", ctypes.c_void_p),
        ("prune_layers", ctypes.c_void_p),
        ("later", ctypes.c_byte * 128),
    )


class Names:
    """GGUF's names of an architecture's tensors."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.map = gguf.get_tensor_name_map(ARCHITECTURES[config["model_type"]], config["num_hidden_layers"])

    def __getitem__(self, name: str) -> str:
        """By Hugging Face name. Raises SystemExit if the architecture has none for it."""
        found = self.map.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise SystemExit(f"{name}: GGUF has no tensor for it in this architecture")
        return str(found)


def write_gguf(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], names: Names) -> None:
    """The original as GGUF: matrices in float16, vectors in float32 (as llama.cpp's own converter does)."""
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[ARCHITECTURES[config["model_type"]]])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for name, tensor in tensors.items():
        value = tensor.to(torch.float16 if tensor.dim() == 2 else torch.float32)
        if not torch.equal(value.float(), tensor.float()):
            raise SystemExit(f"{name}: float16 does not hold its values; give a model whose weights it holds")
        writer.add_tensor(names[name], value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@torch.no_grad()
def importance(args: Any) -> dict[str, np.ndarray]:
    """What llama-imatrix collects: the mean of x² per input channel of every linear of the blocks.

    Returns float32 ``[in]`` by Hugging Face name.
    """
    model = load_model(args, torch.float32)
    sums: dict[str, Tensor] = {}

    def collect(name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            squares = inputs[0].square().sum((0, 1), dtype=torch.float64)
            sums[name] = sums[name] + squares if name in sums else squares

        return hook

    for name, linear in block_linears(model).items():
        linear.register_forward_pre_hook(collect(f"{name}.weight"))
    ids = token_ids(args)
    for window in ids:
        model.base_model(window[None], use_cache=False)
    return {name: (total / ids.numel()).float().numpy() for name, total in sums.items()}


def library() -> ctypes.CDLL:
    """The library, with its processor's backend loaded."""
    ggml = ctypes.CDLL(str(next(LIBRARIES.glob("libggml.*so"))), mode=ctypes.RTLD_GLOBAL)
    ggml.ggml_backend_load_all_from_path(str(LIBRARIES).encode())
    llama = ctypes.CDLL(str(next(LIBRARIES.glob("libllama.*so"))), mode=ctypes.RTLD_GLOBAL)
    llama.llama_model_quantize_default_params.restype = Parameters
    llama.llama_model_quantize.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(Parameters))
    llama.llama_model_quantize.restype = ctypes.c_uint32
    return llama


def quantize(original: Path, out: Path, mix: str, entries: Mapping[str, np.ndarray]) -> None:
    """Write the mix of a GGUF file. ``entries``: mean squares by GGUF name, none for no importance matrix."""
    llama = library()
    llama.llama_backend_init()
    parameters = llama.llama_model_quantize_default_params()
    parameters.ftype, parameters.nthread = MIXES[mix], torch.get_num_threads()
    table = (ImportanceEntry * (len(entries) + 1))()  # an empty entry ends it
    for entry, (name, squares) in zip(table, entries.items(), strict=False):
        data = squares.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        entry.name, entry.data, entry.size = name.encode(), data, squares.size
    if entries:
        parameters.imatrix = table
    if llama.llama_model_quantize(str(original).encode(), str(out).encode(), ctypes.byref(parameters)):
        raise SystemExit(f"llama_model_quantize failed on {original.name}; its own messages stand above")


def read_back(path: Path, originals: Iterable[str], names: Names) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Float32 tensors by Hugging Face name, and the sizes and types that the mix really has."""
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    dense: dict[str, Tensor] = {}
    types: dict[str, Counter[str]] = {}
    packed = 0
    for name in originals:
        tensor = stored[names[name]]
        dense[name] = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        if dense[name].dim() == 2:
            kind = re.sub(r".*layers\.\d+\.|model\.|\.weight", "", name)
            types.setdefault(kind, Counter())[tensor.tensor_type.name] += 1
            packed += int(tensor.n_bytes) if ".layers." in name else 0
    total = sum(int(tensor.n_bytes) for tensor in stored.values())
    return dense, {"quantized_bytes": packed, "checkpoint_bytes": total, "types": types}


def main() -> None:
    args = arguments(__doc__)
    only_default_dtype(args)
    mix, _, matrix = args.method.partition("-")
    config = json.loads((args.source / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] not in ARCHITECTURES:
        raise SystemExit(f"{config['model_type']}: this script writes {' and '.join(ARCHITECTURES)} as GGUF")
    tensors = {k: v for file in sorted(args.source.glob("*.safetensors")) for k, v in load_file(file).items()}
    names = Names(config)
    original, out = Path("original.gguf"), Path("quantized.gguf")  # run.py starts this in a folder that it removes
    watch = Stopwatch(args)
    with watch:
        write_gguf(original, config, tensors, names)
        squares = importance(args) if matrix else {}
        quantize(original, out, mix, {names[name]: value for name, value in squares.items()})
    dense, facts = read_back(out, tensors, names)
    build = json.loads((LIBRARIES / "_nlcBuildMetadata.json").read_text(encoding="utf-8"))
    finish(
        args,
        watch,
        ["gguf"],
        dense,
        **facts,
        llama_cpp=build["buildOptions"]["llamaCpp"]["release"],
        **dict.fromkeys(("bits", "group_size", "symmetric")),  # the mix has its own
    )


if __name__ == "__main__":
    main()
