"""Calibrating the KV cache of a model that is quantized already: its weights are read, one block at a time, and none is changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantkit.algorithms.kv import KVObserver, LayerRanges
from quantkit.calibrate.capture import advance, observe
from quantkit.calibrate.data import Windows
from quantkit.calibrate.products import choose_products
from quantkit.checkpoint.source import Source
from quantkit.checkpoint.tokenizer import load_tokenizer
from quantkit.convert import selftext
from quantkit.convert.device import release_memory, working_on
from quantkit.convert.embed import embed
from quantkit.convert.memory import batch_tokens
from quantkit.convert.options import ConvertOptions
from quantkit.convert.sizes import kv_sample_bytes
from quantkit.convert.windows import read_windows
from quantkit.core.host import release_free_memory
from quantkit.model.skeleton import block_linears, build_skeleton, find_blocks, widest_input
from quantkit.runtime.attention import attention_modules
from quantkit.runtime.load import choose_device, dense_weights

ASKED = ("kv_bits", "kv_scales", "kv_budget")
OPTIONS = (*ASKED, "calibration", "samples", "seq_len", "seed", "products")


@dataclass
class CachePlan:
    """A calibration, ready to run. host: bytes that it takes."""

    options: ConvertOptions
    model: nn.Module
    windows: Windows | None
    host: int
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def products(self) -> str:
        """In which the model runs, see ``calibrate.products``."""
        return choose_products(self.options.products, choose_device(self.options.device))

    def identity(self) -> dict[str, Any]:
        """What decides its result, for the manifest."""
        w, o = self.windows, self.options
        assert w is not None
        return {
            "kv_bits": o.kv_bits,
            "kv_scales": o.kv_scales,
            "kv_budget": o.kv_budget,
            "text": w.name,
            "text_sha256": w.text_sha256,
            "tokens_sha256": w.digest(),
            "bos": w.bos,
            "products": self.products,
        }


def plan_cache(source: Source, out: Path, requested: Mapping[str, Any], problems: list[str]) -> CachePlan | None:
    """None if no cache is asked for. requested: the options of convert that were given.

    Raises RequestError for an option that cannot be; what is wrong with text and model is added to ``problems``.
    """
    given = {name: requested[name] for name in (*OPTIONS, "device") if requested.get(name) is not None}
    options = ConvertOptions(str(source.path), out, method="rtn", **given)
    if not options.cache.wanted:
        return None
    model = build_skeleton(source.config)
    windows = read_windows(options, load_tokenizer(source), model, problems)
    plan = CachePlan(options, model, windows, _host_bytes(model, options))
    if windows is not None and windows.ids.is_meta:
        whole = selftext.bytes_needed(model.config, sum(p.numel() for p in model.parameters()), options)
        plan.host = max(plan.host, whole)
        plan.warnings.append(selftext.note(options, whole))
    return plan


def _host_bytes(model: nn.Module, options: ConvertOptions) -> int:
    """The embedding, the states, one block and its activations in float32, and the sample of keys and values."""
    config: Any = model.config
    blocks = find_blocks(model)
    largest = max(sum(p.numel() for p in block.parameters()) for block in blocks.modules)
    widths = sum(one.in_features + one.out_features for one in block_linears(blocks.modules[0]).values())
    on_cpu = choose_device(options.device).type == "cpu"
    batch = max(batch_tokens(widest_input(blocks), on_cpu), options.seq_len)
    embedding = 2 * sum(p.numel() for p in model.get_input_embeddings().parameters())  # type: ignore[operator]
    states = options.samples * options.seq_len * config.hidden_size
    return int(4 * (states + max(embedding, largest + batch * widths)) + kv_sample_bytes(config, options))


@torch.no_grad()
def calibrate_cache(plan: CachePlan, source: Source, listen: Callable[[str, int, int], None]) -> dict[str, LayerRanges]:
    """Ranges, and with a budget damages, of each attention module. listen: what ("self": text written, or "blocks"), done, in all."""
    assert plan.windows is not None
    device = choose_device(plan.options.device)
    if plan.windows.ids.is_meta:
        plan.windows = _own_text(plan, source, listen, device)
    blocks, names = find_blocks(plan.model), attention_modules(plan.model)
    weights, _ = dense_weights(plan.model, source, torch.float32)
    found: dict[str, LayerRanges] = {}
    with working_on(device, plan.products):
        states, calls, *_ = embed(plan.model, blocks, weights, plan.windows.ids, device, None)
        for index, block in enumerate(blocks.modules):
            listen("blocks", index, len(blocks))
            weights.load(blocks.name(index), device)
            call, observer = calls[index].to(device), KVObserver()
            observe(block, states, call, [], observer)
            found[names[index]] = plan.options.cache.finish(names[index], observer, block, states, call, plan.notes)
            if index + 1 < len(blocks):
                advance(block, states, call)
            weights.release(blocks.name(index))
            release_memory(device)
    return found


def _own_text(
    plan: CachePlan, source: Source, listen: Callable[[str, int, int], None], device: torch.device
) -> Windows:
    """``--calibration self``: the quantized model writes, and is let go before the first block is loaded."""
    windows = selftext.write(
        source, load_tokenizer(source), plan.options, lambda done, total: listen("self", done, total), device
    )
    release_free_memory()
    return windows
