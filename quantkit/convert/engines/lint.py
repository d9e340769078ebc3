"""Tell which engines load a planned checkpoint, or a quantized folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from quantkit.checkpoint.gguf_files.architectures import ARCHITECTURES
from quantkit.checkpoint.gguf_files.out_names import FAMILIES
from quantkit.checkpoint.source import Source
from quantkit.convert.engines import commands, devices
from quantkit.convert.engines.conditions import BITSANDBYTES, GPTQ
from quantkit.convert.engines.float_schemes import has_floats, judge_floats
from quantkit.convert.engines.notes import bfloat16_scales
from quantkit.convert.engines.rules import Checkpoint, judge
from quantkit.convert.engines.table import ENGINES, FLOAT_SPLITS
from quantkit.convert.engines.verdict import Verdict
from quantkit.convert.plan.targets import Target
from quantkit.core.scheme import Scheme
from quantkit.formats import WRITABLE
from quantkit.formats.bitsandbytes import scheme_of
from quantkit.formats.common import signed_scales
from quantkit.formats.reader import QuantizedReader
from quantkit.model.attention_shape import kv_heads, query_heads
from quantkit.model.language import name_of, output_embeddings, text_config
from quantkit.model.skeleton import build_skeleton
from quantkit.model.weights import tied_parameters


def lint_plan(
    form: str,
    targets: Mapping[str, Target],
    config: Any,
    stored: Mapping[str, Any],
    *,
    folder: str,
    fp8_cache: bool = False,
) -> list[Verdict]:
    """Tell which engines will load a checkpoint that is not written yet.

    form: name of its format.
    targets: quantized weights, by module name of the skeleton.
    config: of the skeleton.
    stored: the source's config.json.
    folder: where it will lie, as commands name it; the file, for GGUF.
    fp8_cache: it will hold the scales of an fp8 KV cache for other engines.
    """
    checkpoint = _checkpoint(form, list(targets.values()), config, stored)
    return lint(replace(checkpoint, folder=folder, fp8_cache=fp8_cache))


def casts_scales(form: str, targets: Mapping[str, Target], config: Any, stored: Mapping[str, Any]) -> bool:
    """Tell whether engines will compute in bfloat16 while the scales are stored with more precision.

    form: name of the format.
    targets: quantized weights, by module name of the skeleton.
    config: of the skeleton.
    stored: the source's config.json.
    """
    return bfloat16_scales(_checkpoint(form, list(targets.values()), config, stored)) is not None


def _as_engines_see_it(reader: QuantizedReader, name: str) -> Scheme | None:
    """Return a module's scheme as the config tells it to engines; None for packings that have no rules."""
    scheme = reader.scheme(name)
    if isinstance(scheme, str):
        return scheme_of(scheme, reader.modules[name]) if reader.format == BITSANDBYTES else None
    if reader.format == GPTQ and signed_scales(reader.config):  # their kernels multiply by negative scales, too
        return replace(scheme, symmetric=bool((reader.config or {}).get("sym", True)))
    return scheme


def lint_folder(source: Source, shown: str | None = None) -> list[Verdict]:
    """Tell which engines load a quantized folder, from its headers and config.

    The list is empty for formats that quantkit does not write.

    source: the quantized folder.
    shown: how commands name it, None for its path: a folder that is still to be moved there.

    Raises CheckpointError for a folder that is incomplete.
    """
    from quantkit.runtime.layers.build import find_modules

    reader = QuantizedReader(source)
    if reader.format not in WRITABLE:
        return []
    model: Any = build_skeleton(source.config)
    embed, head = model.get_input_embeddings(), output_embeddings(model)
    weights, module_names = [], find_modules(model, reader, str(source.path))
    for name, place in module_names.items():
        scheme = _as_engines_see_it(reader, name)
        if scheme is None:
            return []
        module: Any = model.get_submodule(place)
        kind = "linear"
        if isinstance(module, nn.Embedding) and module is embed:
            kind = (
                "tied"
                if head is not None and f"{name_of(model, head)}.weight" in tied_parameters(model)
                else "embedding"
            )
        elif module is head:
            kind = "head"
        out_features, in_features = module.weight.shape
        weights.append(Target(name, f"{name}.weight", out_features, in_features, scheme, kind))
    checkpoint = _checkpoint(str(reader.format), weights, model.config, source.config)
    said = source.quantization() or {}
    fp8_cache = bool(said.get("kv_cache_scheme"))
    dequantized = bool(said.get("dequantize")) or said.get("run_compressed") is False
    folder = shown or str(source.path)
    return lint(replace(checkpoint, folder=folder, fp8_cache=fp8_cache, dequantized=dequantized))


def _checkpoint(form: str, weights: list[Target], config: Any, stored: Mapping[str, Any]) -> Checkpoint:
    """Build the checkpoint's facts for the rules.

    config: of the skeleton.
    stored: config.json as it is.
    """
    weights = sorted(weights, key=lambda weight: weight.name)  # a file and a plan give the same reasons
    family, config = str(getattr(config, "model_type", "")), text_config(config)
    heads = query_heads(config)
    dtype = str(stored.get("dtype") or stored.get("torch_dtype") or "")
    mixture = any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    return Checkpoint(
        format=form,
        weights=weights,
        heads=heads,
        kv_heads=kv_heads(config),
        bfloat16=dtype.endswith("bfloat16"),
        family=family,
        mixture=mixture,
        auto_class=_auto_class(stored),
    )


def _auto_class(stored: Mapping[str, Any]) -> str:
    """Return the class of transformers that loads a model of this config.json: one with images has another."""
    named = stored.get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else ""
    return "AutoModelForImageTextToText" if name.endswith("ForConditionalGeneration") else "AutoModelForCausalLM"


LLAMA_CPP_PYTHON = "0.3.36 of llama-cpp-python"  # what files of every family were loaded with


def gguf_readers(checkpoint: Checkpoint) -> list[Verdict]:
    """Return who loads a GGUF file of a model type.

    checkpoint: its ``family`` is the model type, its ``folder`` the file.
    """
    family = checkpoint.family
    architecture = FAMILIES[family].architecture if family in FAMILIES else family
    known = architecture in ARCHITECTURES
    why = "" if known else f"does not read GGUF files of {architecture}."
    where = "quantkit/checkpoint/gguf_files/architectures.py"
    size = 1 if known else None
    ours = Verdict("quantkit", "this version", known, size, why, where, ("dequantized to 16 bit",))
    anywhere = devices.on_any(checkpoint)
    return [
        replace(ours, devices=anywhere, command=commands.quantkit(checkpoint)) if known else ours,
        Verdict(
            "llama.cpp", LLAMA_CPP_PYTHON, True, 1, "", "src/llama-model.cpp", devices=anywhere,
            command=commands.llama_server(checkpoint),
        ),
    ]  # fmt: skip


def lint(checkpoint: Checkpoint) -> list[Verdict]:
    """Return every engine's verdict, in the order of ``ENGINES``."""
    if checkpoint.format == "gguf":
        return gguf_readers(checkpoint)
    return [
        judge_floats(engine, checkpoint, FLOAT_SPLITS)
        if has_floats(checkpoint) and checkpoint.format in engine.formats
        else judge(engine, checkpoint)
        for engine in ENGINES
    ]
