"""Calibrate the KV cache of a model that is quantized already.

Its weights are read one block at a time, and none is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantkit.algorithms.kv import LayerRanges
from quantkit.calibrate.capture import advance
from quantkit.calibrate.data import CalibrationWindows
from quantkit.calibrate.matmul_precision import choose_precision
from quantkit.checkpoint.source import Source
from quantkit.checkpoint.tokenizer import load_tokenizer
from quantkit.convert.options.options import ConvertOptions
from quantkit.convert.plan import self_calibration
from quantkit.convert.plan.calibration_text import read_windows, unread_text
from quantkit.convert.plan.memory import batch_tokens
from quantkit.convert.plan.memory_inputs import kv_sample_bytes
from quantkit.convert.results import BlockResult
from quantkit.convert.stages.device import working_on
from quantkit.convert.stages.embed import embed
from quantkit.convert.stages.loaded_block import loaded
from quantkit.convert.stages.observe import observe_cache
from quantkit.core.host import choose_device
from quantkit.model.language import text_config
from quantkit.model.skeleton import block_linears, build_skeleton, find_blocks, widest_input
from quantkit.runtime.kv_cache.transformers_cache import attention_modules
from quantkit.runtime.layers.build import dense_weights

ASKED = ("kv_bits", "kv_scales", "kv_budget")
OPTIONS = (*ASKED, "calibration", "samples", "seq_len", "seed", "matmul_precision")


@dataclass(frozen=True, kw_only=True)
class CachePlan:
    """A calibration of the KV cache, ready to run."""

    options: ConvertOptions
    model: nn.Module
    # None if the text has a problem; on the meta device if the model writes its own
    windows: CalibrationWindows | None
    # bytes of host memory that the calibration takes
    host: int
    warnings: tuple[str, ...] = ()

    @property
    def matmul_precision(self) -> str:
        """The precision in which the model runs, see ``calibrate.matmul_precision``."""
        return choose_precision(self.options.matmul_precision, choose_device(self.options.device))


@dataclass(frozen=True, kw_only=True)
class CalibratedCache:
    """The result of a calibration."""

    # by attention module: ranges, and with a budget the sensitivity to every width
    layers: dict[str, LayerRanges]
    # the tokens it ran on
    windows: CalibrationWindows
    # for the report
    notes: list[str]


def plan_cache(source: Source, out: Path, requested: Mapping[str, Any], problems: list[str]) -> CachePlan | None:
    """Plan to calibrate the KV cache of a quantized source; None if no cache is asked for.

    source: the quantized source.
    out: the output folder.
    requested: the options of convert that were given.
    problems: gets what is wrong with text and model.

    Raises RequestError for an option out of range.
    """
    given = {name: requested[name] for name in (*OPTIONS, "device") if requested.get(name) is not None}
    options = ConvertOptions(str(source.path), out, method="rtn", **given)
    if not options.cache.wanted:
        return None
    model = build_skeleton(source.config)
    windows = read_windows(options, load_tokenizer(source), model, problems)
    host, warnings = _host_bytes(model, options), unread_text(windows)
    if windows is not None and windows.ids.is_meta:
        whole = self_calibration.model_and_cache_bytes(
            text_config(model), sum(p.numel() for p in model.parameters()), options
        )
        host = max(host, whole)
        warnings.append(self_calibration.note(options, whole))
    return CachePlan(options=options, model=model, windows=windows, host=host, warnings=tuple(warnings))


def manifest_entry(plan: CachePlan, windows: CalibrationWindows) -> dict[str, Any]:
    """Return what decides the calibration's result, for the manifest."""
    options = plan.options
    return {
        "kv_bits": options.kv_bits,
        "kv_scales": options.kv_scales,
        "kv_budget": options.kv_budget,
        "text": windows.name,
        "text_sha256": windows.text_sha256,
        "tokens_sha256": windows.digest(),
        "bos": windows.bos,
        "products": plan.matmul_precision,
    }


def _host_bytes(model: nn.Module, options: ConvertOptions) -> int:
    """Return the bytes of embedding, states, one block and its activations in float32, and the observer's sample."""
    config = text_config(model)
    blocks = find_blocks(model)
    largest = max(sum(p.numel() for p in block.parameters()) for block in blocks.modules)
    widths = sum(linear.in_features + linear.out_features for linear in block_linears(blocks.modules[0]).values())
    on_cpu = choose_device(options.device).type == "cpu"
    batch = max(batch_tokens(widest_input(blocks), on_cpu), options.seq_len)
    embedding = 2 * sum(p.numel() for p in model.get_input_embeddings().parameters())  # type: ignore[operator]
    states = options.samples * options.seq_len * config.hidden_size
    return int(4 * (states + max(embedding, largest + batch * widths)) + kv_sample_bytes(config, options))


@torch.no_grad()
def calibrate_cache(plan: CachePlan, source: Source, listen: Callable[[str, int, int], None]) -> CalibratedCache:
    """Run the quantized model over the calibration text, block by block, and observe its keys and values.

    plan: the calibration.
    source: the quantized source.
    listen: called with the step ("self": the model writes its text; "blocks"), how much of it is done, and of how much.
    """
    assert plan.windows is not None
    device, windows = choose_device(plan.options.device), plan.windows
    if windows.ids.is_meta:
        windows = self_calibration.write(
            source, load_tokenizer(source), plan.options, lambda done, total: listen("self", done, total), device
        )
    blocks, names = find_blocks(plan.model), attention_modules(plan.model)
    weights, _ = dense_weights(plan.model, source, torch.float32)
    result = BlockResult()
    with working_on(device, plan.matmul_precision):
        hidden = embed(plan.model, blocks, weights, windows.ids, device, None)
        states = hidden.states
        for index in range(len(blocks)):
            listen("blocks", index, len(blocks))
            with loaded(weights, blocks, index, device) as block:
                call = hidden.calls[index].to(device)
                observe_cache(plan.options.cache, names[index], block, states, call, result)
                if index + 1 < len(blocks):
                    advance(block, states, call)
    return CalibratedCache(layers=result.kv, windows=windows, notes=result.notes)
