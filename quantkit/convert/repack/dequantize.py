"""``--dequantize``: the weights of a quantized folder or GGUF file as floating-point numbers, a dense checkpoint.

Read, written and read back tensor by tensor. What the dtype rounds is measured for each weight.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.gguf_files.source import GGUFSource
from quantkit.checkpoint.source import SeenSource, Source, TensorInfo
from quantkit.checkpoint.writer import CheckpointWriter, check_output
from quantkit.convert.output.side_files import write_beside
from quantkit.convert.output.smoke_test import continue_prompt
from quantkit.convert.output.verify import verify_folder
from quantkit.convert.plan.paths import lacks_room
from quantkit.convert.plan.plan import refuse_same_place
from quantkit.convert.plan.random_tokens import fallback
from quantkit.convert.progress import Listener, Progress
from quantkit.convert.repack.batch import Batch
from quantkit.convert.repack.checks import no_effect
from quantkit.convert.repack.fused_experts import fused_stacks
from quantkit.convert.repack.memory import LIBRARIES, PART_BYTES, SAMPLE_BYTES, TOO_LARGE
from quantkit.convert.report.report import ConvertReport
from quantkit.core.host import current_rss, map_large_blocks, peak_rss
from quantkit.core.interrupt import raise_if_interrupted
from quantkit.errors import NumericsError, RequestError, SourceError
from quantkit.formats.floats import gpt_oss
from quantkit.formats.reader import QuantizedReader
from quantkit.runtime.layers.dense_source import DTYPES, DenseSource, named_dtype
from quantkit.version import __version__

FREE = ("source", "out", "overwrite", "device", "dequantize", "dtype")


class Dequantized(SeenSource):
    """A quantized source seen as the dense model that it means, in one dtype.

    Tensors that are not quantized stay as they are stored unless the dtype was asked for; all those of a GGUF file get
    the dtype. Experts that transformers reads fused alone are fused.

    error: of each tensor that the dtype rounded, relative to its size (of a fused one, its worst part's); grows as they
    are read.
    """

    def __init__(self, source: Source, dtype: torch.dtype, *, asked: bool = True) -> None:
        """Open a source.

        dtype: of all tensors. asked: it was asked for; else the config's, which other tensors need not have.

        Raises RequestError for a source that is not quantized, CheckpointError for damage that headers tell.
        """
        super().__init__(source)
        self.dtype = dtype
        self.error: dict[str, float] = {}
        self._asked = asked
        config = source.quantization()
        self._file = source if isinstance(source, GGUFSource) else None
        self._dense: DenseSource | None = None
        if config is not None:
            whole = config.get("quant_method") == gpt_oss.METHOD  # too large for float32, and exact without
            if whole and dtype == torch.float16 and asked:
                raise RequestError(
                    f"--dtype float16: {source.path} holds powers of two that are no float16 numbers. Use"
                    " bfloat16, which holds every weight exactly."
                )
            reader = None if whole else QuantizedReader(source)
            self._dense = DenseSource(source, reader, dtype if whole else torch.float32)
        elif self._file is None:
            raise RequestError(f"--dequantize: {source.path} is not quantized. Copy it as it is.")
        named = str(dtype).removeprefix("torch.")
        left = {key: value for key, value in source.config.items() if key not in ("quantization_config", "torch_dtype")}
        self.config: dict[str, Any] = {**left, "dtype": named}
        self._stacks = fused_stacks(self._unfused(), self.config)

    def _unfused(self) -> list[str]:
        return self.original.names() if self._dense is None else self._dense.names()

    def names(self) -> list[str]:
        fused = {name for stack in self._stacks.values() for one in stack.parts for name in one}
        return [*(name for name in self._unfused() if name not in fused), *self._stacks]

    def info(self, name: str) -> TensorInfo:
        stack = self._stacks.get(name)
        if stack is not None:
            part = self.info(stack.parts[0][0])
            return TensorInfo(part.dtype, stack.shape(part.shape))
        info = self.original.info(name) if self._dense is None else self._dense.info(name)
        return TensorInfo(self.dtype, info.shape) if self._casts(name) else info

    def working_bytes(self, name: str) -> int:
        """Count the bytes that it takes at most to make and write a tensor.

        A matrix is there as codes, as float32 twice, and in the dtype; of a fused one that is a part, beside the whole.
        """
        info = self.info(name)
        numbers = torch.Size(info.shape).numel()
        if name not in self._stacks:
            return 14 * numbers
        return 2 * info.nbytes + 14 * (numbers // len(self._stacks[name].parts))

    def _casts(self, name: str) -> bool:
        if self._dense is None:
            return True
        return self._dense.is_packed(name) or (self._asked and self._dense.info(name).dtype.is_floating_point)

    def read(self, name: str) -> Tensor:
        """Return a tensor. Raises NumericsError for a number that is too large for the dtype."""
        stack = self._stacks.get(name)
        if stack is None:
            return self._read(name, name)
        return stack.read(lambda part: self._read(part, name))

    def _read(self, name: str, told: str) -> Tensor:
        """Return a tensor that is not fused. told: under which name its error is kept."""
        if self._file is not None:
            value, self_error = self._file.read_as(name, self.dtype)
        else:
            assert self._dense is not None
            exact = self._dense.read(name)
            value = exact.to(self.dtype) if self._casts(name) else exact
            self_error = relative_error(value, exact.float()) if value.dtype != exact.dtype else 0.0
        if value.is_floating_point() and self._casts(name) and not bool(torch.isfinite(value).all()):
            raise NumericsError(f"{self.path}: {name} holds more than {self.dtype} can. Use --dtype bfloat16.")
        if self_error:
            self.error[told] = max(self_error, self.error.get(told, 0.0))
        return value

    def quantization(self) -> dict[str, Any] | None:
        return None

    def stored_as(self) -> str:
        """Return the name of the format that it is stored in."""
        if self._file is not None:
            return "gguf"
        assert self._dense is not None
        return self._dense.format


def relative_error(value: Tensor, exact: Tensor) -> float:
    """Return the size of a difference, relative to that of ``exact``."""
    size = float(exact.square().sum())
    return (float((value.float() - exact).square().sum()) / size) ** 0.5 if size else 0.0


@dataclass(frozen=True, kw_only=True)
class DequantizePlan:
    """A dense checkpoint, ready to be written unless ``problems`` has an entry. Sizes in bytes."""

    source: Dequantized
    out: Path
    overwrite: bool
    output: int
    host: int
    generates: bool
    problems: tuple[str, ...]
    warnings: tuple[str, ...]

    def raise_problems(self) -> None:
        """Raise RequestError that lists every problem at once, if there are any."""
        if self.problems:
            raise RequestError("This cannot run:\n" + "\n".join(f"  - {problem}" for problem in self.problems))

    def to_json(self) -> dict[str, Any]:
        """Return the plan for ``--dry-run --json``."""
        return {
            "out": str(self.out), "dequantized_from": self.source.stored_as(), "dtype": self.source.config["dtype"],
            "peak_host_bytes": self.host, "peak_device_bytes": 0, "peak_disk_bytes": 2 * self.output,
            "output_bytes": self.output, "warnings": list(self.warnings), "problems": list(self.problems),
        }  # fmt: skip

    def describe(self) -> str:
        """Describe the plan in words: what ``--dry-run`` prints."""
        lines = [
            f"{self.source.path} -> {self.out}",
            f"  dense     {self.source.stored_as()} -> {self.source.config['dtype']}, no text is read",
            (
                f"  needs     host {self.host / 1e6:.0f} MB, disk {2 * self.output / 1e6:.1f} MB while running; output"
                f" {self.output / 1e6:.1f} MB"
            ),
            *(f"  note      {warning}" for warning in self.warnings),
            *(f"  PROBLEM   {problem}" for problem in self.problems),
        ]
        return "\n".join(lines)


def plan_dequantize(source: Source, out: Path, requested: Mapping[str, Any]) -> DequantizePlan:
    """Plan to write a quantized source as a dense checkpoint.

    source: as it is stored. out: the output folder. requested: the options of convert that were given.

    Raises RequestError for a source that is not quantized, and for an option that has no effect.
    """
    for name, value in requested.items():
        if name not in FREE:
            raise RequestError(no_effect(name, value, "--dequantize rounds to no codes"))
    dtype = _dtype(source, str(requested.get("dtype", "auto")))
    check_output(out, bool(requested.get("overwrite", False)))
    refuse_same_place(out, source)
    dense = Dequantized(source, dtype, asked=str(requested.get("dtype", "auto")) != "auto")
    infos = [dense.info(name) for name in dense.names()]
    output = sum(info.nbytes for info in infos)
    working = 2 * PART_BYTES + max(map(dense.working_bytes, dense.names()))  # parts of files beside the largest tensor
    numbers = sum(torch.Size(info.shape).numel() for info in infos)
    generates = 4 * numbers <= max(SAMPLE_BYTES, working)
    host = current_rss() + LIBRARIES + max(working, 8 * numbers if generates else 0)
    kept = "how the KV cache is kept (quantkit_kv.safetensors) belongs to the quantized model: left out"
    has_cache = source.path.is_dir() and (source.path / "quantkit_kv.safetensors").exists()
    return DequantizePlan(
        source=dense, out=out, overwrite=bool(requested.get("overwrite", False)), output=output,
        host=max(peak_rss(), host), generates=generates,
        problems=tuple(lacks_room(out.parent, 2 * output, "an --out")), warnings=(kept,) if has_cache else (),
    )  # fmt: skip


def _dtype(source: Source, name: str) -> torch.dtype:
    """Return the dtype of a name; ``auto``: the config's own."""
    if name == "auto":
        return named_dtype(source.config)
    if name not in DTYPES:
        raise RequestError(f"--dtype {name}: choose auto, {', '.join(DTYPES)}.")
    return DTYPES[name]


def run_dequantize(plan: DequantizePlan, listen: Listener, started: float | None = None) -> ConvertReport:
    """Write a dense checkpoint and read it back.

    plan: what ``plan_dequantize`` returned. listen: called with a ``Progress`` before every step.
    started: ``time.perf_counter()`` when the request came.

    Raises QuantkitError if the plan has problems, or for a damaged source. Nothing is left behind then.
    """
    plan.raise_problems()
    map_large_blocks()
    started = time.perf_counter() if started is None else started
    writer = CheckpointWriter(plan.out, overwrite=plan.overwrite)
    with writer.whole():
        report = _write(plan, writer, listen)
    report.seconds = time.perf_counter() - started
    report.peak_host_bytes = peak_rss()
    report.output_bytes = sum(file.stat().st_size for file in plan.out.glob("*.safetensors"))
    return report


def _write(plan: DequantizePlan, writer: CheckpointWriter, listen: Listener) -> ConvertReport:
    source, names = plan.source, plan.source.names()
    named = str(source.config["dtype"])
    report = ConvertReport(
        out=plan.out, method="dequantize", format=source.stored_as(), scheme=named, kv_bits=16,
        warnings=list(plan.warnings), predicted_host_bytes=plan.host, source_bytes=source.file_bytes(),
    )  # fmt: skip
    batch = Batch(writer)
    for done, name in enumerate(names):
        raise_if_interrupted()
        listen(Progress("copy", done, len(names), name))
        batch.add({name: source.read(name)})
    batch.flush()
    if source.error:
        worst = max(source.error, key=lambda name: source.error[name])
        report.notes.append(
            f"{named} rounds {len(source.error)} of {len(names)} tensors, {worst} most, by {source.error[worst]:.1e} of"
            " its size; --dtype float32 keeps every number"
        )
    manifest = {
        "quantkit_version": __version__,
        "dequantized_from": {"format": source.stored_as(), "sha256": source.digest()},
        "options": {"dtype": named},
        "rounded": {name: float(f"{error:.3g}") for name, error in source.error.items()},
    }
    write_beside(source, writer.folder, quantization=None, manifest=manifest, tokenizer=True)
    writer.assemble()
    listen(Progress("verify", len(names), len(names)))
    report.verified_tensors = verify_folder(writer.folder, {}, writer.entries)
    sample = _sample(plan, writer.folder)
    if isinstance(sample, str):
        report.notes.append(sample)
    else:
        report.sample = sample
    return report


def _sample(plan: DequantizePlan, folder: Path) -> dict[str, str] | str:
    """Return the written model's continuation of a prompt, or why it is not run."""
    from quantkit.checkpoint.tokenizer import load_tokenizer

    if not plan.generates:
        return TOO_LARGE
    try:
        tokenizer = load_tokenizer(plan.source.original)
    except SourceError as error:
        return f"no sample was generated: {error}"
    return continue_prompt(folder, fallback(tokenizer), tokenizer, str(plan.out), "please report it")
