"""The loop over blocks: load, observe, quantize, advance, write, free."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantkit import __version__
from quantkit.algorithms import Scales, Solution
from quantkit.algorithms.gptq import GPTQOptions, gptq, proxy_loss
from quantkit.algorithms.kv import KVObserver
from quantkit.algorithms.rtn import rtn
from quantkit.calibrate.capture import advance, observe
from quantkit.calibrate.stats import Hessian
from quantkit.checkpoint.tokenizer import write_tokenizer
from quantkit.checkpoint.writer import CheckpointWriter, disk, write_json
from quantkit.convert.memory import BATCH_TOKENS, map_large_blocks, peak_rss, release_free_memory
from quantkit.convert.options import ConvertOptions
from quantkit.convert.plan import Plan, Target, before_blocks, make_plan
from quantkit.convert.report import ConvertReport, LayerReport
from quantkit.convert.verify import decision_sha256, verify_folder, verify_kv
from quantkit.core.affine import SMALLEST_SCALE
from quantkit.core.kvscheme import KVScales, KVScheme
from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import NumericsError, UnsupportedModel
from quantkit.formats.kv_scales import write_kv_scales
from quantkit.model.skeleton import block_linears
from quantkit.model.stepper import Call, input_groups, record, same_call
from quantkit.runtime.attention import attention_modules


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a conversion stands: for a bar, or a line per block."""

    stage: str
    done: int
    total: int
    note: str = ""


SHORT = 2  # tokens that show which linears share an input

Listener = Callable[[Progress], None]


def convert(
    source: str | Path, out: str | Path, *, on_progress: Listener | None = None, **options: Any
) -> ConvertReport:
    """Quantize a model and write a complete checkpoint folder ``out``.

    options: the fields of ``ConvertOptions`` (method, bits, group_size, symmetric, format, kv_bits, calibration,
    samples, seq_len, seed, ...). The folder appears under its name only when it is complete and was read back.
    Raises QuantkitError children; nothing is left behind then, nor on Ctrl-C.
    """
    known = set(ConvertOptions.__dataclass_fields__)
    unknown = sorted(set(options) - known)
    if unknown:
        raise TypeError(f"convert() got an unexpected option {unknown[0]!r}; known: {', '.join(sorted(known))}")
    started = time.perf_counter()
    plan = make_plan(ConvertOptions(source=str(source), out=Path(out), **options))
    return run(plan, on_progress or (lambda progress: None), started)


def run(plan: Plan, listen: Listener, started: float | None = None) -> ConvertReport:
    """Execute a plan. Raises QuantkitError if it has problems."""
    plan.raise_problems()
    map_large_blocks()
    started = time.perf_counter() if started is None else started
    writer = CheckpointWriter(plan.options.out, overwrite=plan.options.overwrite, stem=plan.format.stem)
    try:
        report = _Conversion(plan, writer, listen).run()
        writer.commit()
    except BaseException:
        writer.abandon()
        raise
    report.seconds = time.perf_counter() - started
    report.peak_host_bytes = peak_rss()
    report.output_bytes = sum(file.stat().st_size for file in plan.options.out.glob("*.safetensors"))
    return report


class _Conversion:
    """One run of a plan: the states between blocks, and what is collected on the way."""

    def __init__(self, plan: Plan, writer: CheckpointWriter, listen: Listener) -> None:
        self.plan, self.writer, self.listen = plan, writer, listen
        o = plan.options
        self.report = ConvertReport(o.out, o.method, o.format, o.scheme.describe(), o.kv_bits, warnings=plan.warnings)
        self.report.predicted_host_bytes = plan.prediction.host
        self.report.source_bytes = sum(plan.source.info(name).nbytes for name in plan.source.names())
        self.decisions: dict[str, str] = {}
        self.kv: dict[str, Any] = {}
        self.kv_scheme = KVScheme(bits=o.kv_bits)

    @torch.no_grad()
    def run(self) -> ConvertReport:
        plan = self.plan
        states, calls, short_calls = self._embed() if plan.windows is not None else ([], [], [])
        for index in range(len(plan.blocks)):
            self.listen(Progress("blocks", index, len(plan.blocks), self._last_error()))
            name = plan.blocks.name(index)
            plan.weights.load(name)
            block = plan.blocks.modules[index]
            if states:
                groups = input_groups(block, states[0][:1, :SHORT].clone(), short_calls[index])
                hessians = self._observe(index, block, groups, states, calls[index])
                self._quantize_block(index, block, groups, hessians)
            else:
                singles: list[tuple[str, ...]] = [(linear,) for linear in block_linears(block)]
                self._quantize_block(index, block, singles, [None] * len(singles))
            if states and index + 1 < len(plan.blocks):
                advance(block, states, calls[index])
            plan.weights.release(name)
            release_free_memory()
        states.clear()
        self.listen(Progress("copy", len(plan.blocks), len(plan.blocks), self._last_error()))
        self._copy_plain()
        self._write_files()
        self.writer.assemble()
        self.listen(Progress("verify", len(plan.blocks), len(plan.blocks), ""))
        self.report.verified_tensors = verify_folder(self.writer.folder, self.decisions, self.writer.entries)
        self.report.verified_tensors += verify_kv(self.writer.folder, self.kv)
        return self.report

    def _last_error(self) -> str:
        layers = self.report.layers
        if not layers or layers[-1].relative_output_error is None:
            return ""
        return f"{layers[-1].name.rpartition('.')[2]} error {layers[-1].relative_output_error:.1%}"

    def _embed(self) -> tuple[list[Tensor], list[Call], list[Call]]:
        """Hidden states in front of block 0, in batches; every block's arguments for a batch, and for a few tokens."""
        plan = self.plan
        assert plan.windows is not None
        names = before_blocks(plan.weights, plan.blocks)
        for name in names:
            plan.weights.load_parameter(name)
        ids = plan.windows.ids
        size = _batch_size(len(ids), max(1, BATCH_TOKENS // ids.shape[1]))
        states: list[Tensor] = []
        calls: list[Call] = []
        for batch in torch.split(ids, size):
            recording = record(plan.model, plan.blocks, batch)
            states.append(recording.hidden.clone())
            if not calls:
                calls = recording.calls
            elif not all(same_call(a, b) for a, b in zip(calls, recording.calls, strict=True)):
                raise UnsupportedModel(
                    f"{plan.source.path}: the arguments of its blocks depend on the tokens, not only on their positions; "
                    "stepping it block by block is not supported."
                )
        short = record(plan.model, plan.blocks, ids[:1, :SHORT]).calls
        for name in names:
            plan.weights.release(name.rpartition(".")[0])
        return states, calls, short

    def _observe(
        self, index: int, block: nn.Module, groups: list[tuple[str, ...]], states: list[Tensor], call: Call
    ) -> list[Hessian]:
        """Statistics of every input, and the scales of the KV cache, in one pass."""
        observer = KVObserver() if self.plan.options.kv_bits < 16 else None
        hessians = observe(block, states, call, groups, observer)
        if observer is not None:
            self.kv[attention_modules(self.plan.model)[index]] = observer.result(self.kv_scheme)
        return hessians

    def _quantize_block(
        self, index: int, block: nn.Module, groups: list[tuple[str, ...]], hessians: Sequence[Hessian | None]
    ) -> None:
        plan, prefix = self.plan, self.plan.blocks.name(index)
        parts: dict[str, Tensor] = {}
        for names, statistic in zip(groups, hessians, strict=True):
            targets = [plan.targets[f"{prefix}.{name}"] for name in names]
            linears = [block.get_submodule(name) for name in names]
            hessian = None
            if statistic is not None:
                hessian = statistic.result(targets[0].name)
                self.report.dropped_tokens += statistic.dropped
            for target, linear, q in self._solve(targets, linears, hessian):
                linear.weight = nn.Parameter(q.dequantize(), requires_grad=False)
                self.decisions[target.name] = decision_sha256(q)
                parts.update({f"{target.name}.{part}": value for part, value in plan.format.encode(q).items()})
        self.writer.add_part(f"block-{index:04d}", parts)

    def _solve(
        self, targets: list[Target], linears: list[nn.Module], hessian: Tensor | None
    ) -> list[tuple[Target, nn.Module, QuantTensor]]:
        """Quantize the linears of one input, stacked; report each."""
        scheme = targets[0].scheme
        weights: Any = [linear.weight for linear in linears]
        weight = torch.cat(weights)
        try:
            solution = self._algorithm(weight, hessian, scheme)
        except NumericsError as error:
            raise NumericsError(f"{targets[0].name}: {error}") from error
        rows = [target.out_features for target in targets]
        q = solution.quantized
        zeros: Any = [None] * len(rows) if q.zeros is None else torch.split(q.zeros, rows)
        result = []
        for target, linear, part, codes, scales, zero in zip(
            targets,
            linears,
            torch.split(weight, rows),
            torch.split(q.codes, rows),
            torch.split(q.scales, rows),
            zeros,
            strict=True,
        ):
            one = QuantTensor(codes, scales, zero, scheme)
            self._report(target, part, one, hessian, solution)
            result.append((target, linear, one))
        return result

    def _algorithm(self, weight: Tensor, hessian: Tensor | None, scheme: Scheme) -> Solution:
        o = self.plan.options
        scales: Scales = "minmax" if o.scales == "minmax" else "search"
        if o.method == "gptq" and hessian is not None:
            return gptq(weight, hessian, scheme, GPTQOptions(damping=o.damping, scales=scales))
        return rtn(
            weight, scheme, scales
        )  # without the statistics, also when the KV cache brought some: rtn is data-free

    def _report(
        self, target: Target, weight: Tensor, q: QuantTensor, hessian: Tensor | None, solution: Solution
    ) -> None:
        dequantized = q.dequantize()
        relative = float((weight - dequantized).norm() / weight.norm().clamp(min=1e-30))
        output = None
        if hessian is not None:
            loss, energy = proxy_loss(weight, dequantized, hessian)
            output = (max(loss, 0.0) / max(energy, 1e-30)) ** 0.5
        raised = int((q.scales.float() <= SMALLEST_SCALE).sum())
        bits = q.bits_stored
        self.report.count(bits, q.codes.numel())
        self.report.layers.append(
            LayerReport(
                target.name, q.scheme.describe(), relative, output, bits / q.codes.numel(), solution.damping, solution.fallback, raised
            )
        )  # fmt: skip

    def _copy_plain(self) -> None:
        """What is not quantized, unchanged, one tensor at a time; small ones share a part."""
        small: dict[str, Tensor] = {}
        for i, name in enumerate(self.plan.plain):
            tensor = self.plan.source.read(name)
            if not bool(torch.isfinite(tensor).all()):
                raise NumericsError(
                    f"{self.plan.source.path}: tensor {name!r} holds NaN or infinite values. The file is damaged."
                )
            if tensor.nbytes > 1 << 22:
                self.writer.add_part(f"plain-{i:05d}", {name: tensor})
            else:
                small[name] = tensor
        self.writer.add_part("plain", small)

    def _write_files(self) -> None:
        """config.json, generation config, tokenizer and chat template, KV scales, manifest."""
        with disk(self.writer.folder):
            self._write_each(self.plan, self.writer.folder)

    def _write_each(self, plan: Plan, folder: Path) -> None:
        config = {key: value for key, value in plan.source.config.items() if key != "_name_or_path"}
        config["quantization_config"] = plan.format.config(plan.layout(), __version__)
        write_json(folder / "config.json", config)
        generation = plan.source.path / "generation_config.json"
        if generation.is_file():
            shutil.copyfile(generation, folder / generation.name)
        else:
            special = {
                key: config[key]
                for key in ("bos_token_id", "eos_token_id", "pad_token_id")
                if config.get(key) is not None
            }
            write_json(folder / generation.name, special)
        write_tokenizer(plan.source, folder)
        if self.kv:
            write_kv_scales(folder, KVScales(self.kv_scheme, self.kv))
        write_json(folder / "quantkit.json", self._manifest())

    def _manifest(self) -> dict[str, Any]:
        """What made these bytes. No times and no paths: the same job gives the same manifest."""
        from importlib.metadata import version

        plan = self.plan
        calibration = None
        if plan.windows is not None:
            w = plan.windows
            calibration = {"text": w.name, "text_sha256": w.text_sha256, "tokens_sha256": w.digest(), "bos": w.bos}
        return {
            "quantkit_version": __version__,
            "source_sha256": plan.source.digest(),
            "options": plan.options.for_manifest(),
            "calibration": calibration,
            "versions": {
                "torch": torch.__version__,
                "transformers": version("transformers"),
                "numpy": version("numpy"),
            },
            "threads": torch.get_num_threads(),
            "layers": [layer.to_json() for layer in self.report.layers],
        }


def _batch_size(windows: int, wanted: int) -> int:
    """The largest batch up to ``wanted`` that divides the windows: every batch then has the arguments of the first."""
    return next(size for size in range(min(wanted, windows), 0, -1) if windows % size == 0)
