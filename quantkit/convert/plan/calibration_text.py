"""Calibration texts of a conversion as token windows, and notes if there are too few tokens.

They serve the statistics of the method, the measuring of sensitivity, and the end-to-end pass.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from quantkit.algorithms.distil import window_batch
from quantkit.calibrate.data import CalibrationWindows, load_windows
from quantkit.checkpoint.tokenizer import check_vocabulary
from quantkit.convert.options.options import ConvertOptions
from quantkit.convert.plan import self_calibration
from quantkit.convert.plan.inputs import Inputs
from quantkit.convert.plan.random_tokens import draw, fallback
from quantkit.convert.results import TOKENS, WINDOWS
from quantkit.errors import QuantkitError
from quantkit.model.language import text_config
from quantkit.model.mixture.experts import expert_linears
from quantkit.model.skeleton import Blocks, block_linears


def read_inputs(options: ConvertOptions, tokenizer: Any, model: nn.Module, problems: list[str]) -> Inputs:
    """Tokenize every text that the conversion reads, and add what is wrong with one to ``problems``."""
    calibration = read_windows(options, tokenizer, model, problems)
    sensitivity = None if options.needs_data else _sensitivity_windows(options, tokenizer, model, problems)
    distil = _distil_windows(options, calibration, tokenizer, model, problems)
    return Inputs(calibration=calibration, distil=distil, sensitivity=sensitivity)


def read_windows(
    options: ConvertOptions, tokenizer: Any, model: nn.Module, problems: list[str]
) -> CalibrationWindows | None:
    """Return the calibration windows, None if none are needed or a problem was added.

    Random tokens stand in for a method that reads no text but needs statistics.
    """
    config = text_config(model)
    limit = getattr(config, "max_position_embeddings", None)
    if not options.needs_data:
        try:
            check_vocabulary(fallback(tokenizer), config.to_dict(), options.source)
            return draw(tokenizer, config.vocab_size, limit, options.seed) if options.draws else None
        except QuantkitError as error:
            problems.append(str(error))
        return None
    return _read_windows(options, tokenizer, model, problems)


def _sensitivity_windows(
    options: ConvertOptions, tokenizer: Any, model: nn.Module, problems: list[str]
) -> CalibrationWindows | None:
    """Return the windows that sensitivity is measured on, for a method that reads no text itself."""
    if not options.allocates:
        return None
    if options.calibration == self_calibration.NAME:
        problems.append(
            f"--calibration self with --method {options.method}: {options.target} measures on a text. Name one."
        )
        return None
    few = replace(options, samples=min(options.samples, WINDOWS), seq_len=min(options.seq_len, TOKENS))
    return _read_windows(few, tokenizer, model, problems)


def _read_windows(
    options: ConvertOptions, tokenizer: Any, model: nn.Module, problems: list[str], after: int = 0
) -> CalibrationWindows | None:
    """Return the windows of ``--calibration``, None if a problem was added.

    after: how many windows of the text to pass over first.
    """
    config = text_config(model)
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and options.seq_len > limit:
        problems.append(
            f"--seq-len {options.seq_len} exceeds the model's context of {limit}. Use --seq-len {limit} or less."
        )
    try:
        if options.calibration == self_calibration.NAME:
            return self_calibration.planned(options, tokenizer)
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


def _distil_windows(
    options: ConvertOptions, windows: CalibrationWindows | None, tokenizer: Any, model: nn.Module, problems: list[str]
) -> CalibrationWindows | None:
    """Return the windows of the end-to-end pass, None without one or if the text has a problem.

    They come after those that the method learned from: on those, the windows kept back would judge too kindly.
    """
    if not options.distil:
        return None
    if options.calibration == self_calibration.NAME:
        return None if windows is None else replace(windows, ids=windows.ids.new_empty(options.distil, options.seq_len))
    if options.needs_data and windows is None:  # the problem with the text is listed already
        return None
    asked = replace(options, samples=options.distil)
    return _read_windows(asked, tokenizer, model, problems, after=options.samples if options.needs_data else 0)


def too_few_tokens(tokens: int, blocks: Blocks) -> list[str]:
    """Return a note if there are fewer tokens than the widest linear has inputs.

    Its Hessian cannot have full rank then, and the damping decides the rest. Experts see a share of the tokens only;
    theirs are counted when they have run.
    """
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
        f"{tokens} calibration tokens are fewer than the {widest} inputs of the widest linear: the result will be poor,"
        " and the errors that are reported (measured on these very tokens) too small. Use more --samples or a longer"
        " --seq-len"
    ]


def unused_windows(options: ConvertOptions) -> list[str]:
    """Return a note if the last windows of the end-to-end pass do not fill a step and are left out."""
    if not options.distil:
        return []
    step = window_batch(options.distil, options.seq_len)
    left = options.distil % step
    if not left:
        return []
    return [f"--distil {options.distil}: a step takes {step} windows, {options.distil - left} of them are used"]


def unread_text(*windows: CalibrationWindows | None) -> list[str]:
    """Return a note if the text goes on beyond what was read of it."""
    for one in windows:
        if one is not None and not one.whole:
            return [f"--calibration {one.name}: the text is long; windows are drawn from its beginning alone"]
    return []
