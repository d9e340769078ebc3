"""The texts of a conversion as tokens: for statistics, for measuring bits, for the end-to-end pass; and whether they are enough."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from quantkit.algorithms.distil import window_batch
from quantkit.calibrate.data import Windows, load_windows
from quantkit.checkpoint.tokenizer import check_vocabulary
from quantkit.convert import selftext
from quantkit.convert.drawn import draw
from quantkit.convert.options import ConvertOptions
from quantkit.convert.probe import TOKENS, WINDOWS
from quantkit.convert.sample import fallback
from quantkit.errors import QuantkitError
from quantkit.model.experts import expert_linears
from quantkit.model.skeleton import Blocks, block_linears


def read_probe(options: ConvertOptions, tokenizer: Any, model: nn.Module, problems: list[str]) -> Windows | None:
    """Text to measure damage on, for a method that reads none itself."""
    if not options.allocates:
        return None
    if options.calibration == selftext.NAME:
        problems.append(
            f"--calibration self with --method {options.method}: {options.target} measures on a text. Name one."
        )
        return None
    few = replace(options, samples=min(options.samples, WINDOWS), seq_len=min(options.seq_len, TOKENS))
    return _read_windows(few, tokenizer, model, problems)


def read_windows(options: ConvertOptions, tokenizer: Any, model: nn.Module, problems: list[str]) -> Windows | None:
    """The calibration text as tokens, None if none is needed or a problem was added."""
    config: Any = model.config
    limit = getattr(config, "max_position_embeddings", None)
    if not options.needs_data:
        try:
            check_vocabulary(fallback(tokenizer), config.to_dict(), options.source)
            return draw(tokenizer, config.vocab_size, limit, options.seed) if options.draws else None
        except QuantkitError as error:
            problems.append(str(error))
        return None
    return _read_windows(options, tokenizer, model, problems)


def _read_windows(
    options: ConvertOptions, tokenizer: Any, model: nn.Module, problems: list[str], after: int = 0
) -> Windows | None:
    config: Any = model.config
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and options.seq_len > limit:
        problems.append(
            f"--seq-len {options.seq_len} exceeds the model's context of {limit}. Use --seq-len {limit} or less."
        )
    try:
        if options.calibration == selftext.NAME:
            return selftext.planned(options, tokenizer)
        return load_windows(
            options.calibration,
            tokenizer,
            samples=options.samples,
            seq_len=options.seq_len,
            seed=options.seed,
            vocab_size=config.vocab_size,
            after=after,
        )
    except QuantkitError as error:
        problems.append(str(error))
        return None


def distil_windows(
    options: ConvertOptions, windows: Windows | None, tokenizer: Any, model: nn.Module, problems: list[str]
) -> Windows | None:
    """The windows of the end-to-end pass: none that the method learned from, or those kept back would judge too kindly."""
    if not options.distil:
        return None
    if options.calibration == selftext.NAME:
        return None if windows is None else replace(windows, ids=windows.ids.new_empty(options.distil, options.seq_len))
    if options.needs_data and windows is None:  # what is wrong with the text was said
        return None
    asked = replace(options, samples=options.distil)
    return _read_windows(asked, tokenizer, model, problems, after=options.samples if options.needs_data else 0)


def few_tokens(tokens: int, blocks: Blocks) -> list[str]:
    """A note if there are fewer tokens than the widest linear has inputs: its Hessian cannot have full rank then, and what is left is
    decided by the damping. Experts, which see a share of the tokens, are counted when they have run."""
    experts = {name for block in blocks.modules for name in expert_linears(block)}
    widths = [
        linear.in_features
        for block in blocks.modules
        for name, linear in block_linears(block).items()
        if name not in experts
    ]
    widest = max(widths, default=0)
    if tokens >= widest:
        return []
    return [
        f"{tokens} calibration tokens are fewer than the {widest} inputs of the widest linear: the result will be poor, and the errors "
        "that are reported (measured on these very tokens) too small. Use more --samples or a longer --seq-len"
    ]


def unused_windows(options: ConvertOptions) -> list[str]:
    """A note if the last windows of the end-to-end pass do not fill a step: they are left out."""
    if not options.distil:
        return []
    step = window_batch(options.distil, options.seq_len)
    left = options.distil % step
    if not left:
        return []
    return [f"--distil {options.distil}: a step takes {step} windows, {options.distil - left} of them are used"]
