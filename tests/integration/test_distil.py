"""``--distil``: scales and norms learn end to end, codes stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import tiny_model as tiny_architecture
from safetensors.torch import load_file
from written import digest

import quantkit
from quantkit.algorithms import distil as algorithm
from quantkit.algorithms.distil import DistilOptions
from quantkit.calibrate.matmul_precision import WORDS
from quantkit.convert.options.options import ConvertOptions
from quantkit.convert.plan.calibration_text import unused_windows
from quantkit.convert.plan.plan import make_plan
from quantkit.convert.report.dry_run import describe
from quantkit.convert.stages import distil as distil_pass
from quantkit.convert.stages import embed, student
from quantkit.convert.stages.student import is_norm
from quantkit.core import affine
from quantkit.errors import RequestError

OPTIONS: dict[str, Any] = {"method": "rtn", "bits": 3, "group_size": 32, "format": "native", "seq_len": 64, "distil": 8}
PLAIN = {name: value for name, value in OPTIONS.items() if name not in ("seq_len", "distil")}


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger steps over fewer tokens: a random model learns in a moment."""
    monkeypatch.setattr(distil_pass, "DistilOptions", lambda: DistilOptions(rate=0.005, warmup=2))
    monkeypatch.setattr(algorithm, "ADAM_STEP_TOKENS", 64)


@pytest.mark.parametrize("name", ["llama", "gemma2", "falcon", "gpt_neox", "cohere2", "gpt_oss", "qwen3_moe"])
def test_of_what_is_no_matrix_only_norms_learn(name: str) -> None:
    """gpt_oss has attention sinks and biases of its router, which are vectors, too."""
    model = tiny_architecture(name)
    vectors = {n for n, p in model.named_parameters() if p.dim() == 1}
    found = {n for n in vectors if is_norm(model, n)}
    assert found == {n for n in vectors if "norm" in n or "ln_" in n}
    assert found


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("mode", ["float32", "bf16"])
def test_it_learns_in_the_products_asked_for_though_the_method_reads_no_text(
    mode: str, tiny_original: Path, calibration_text: Path, tmp_path: Path, precisions_seen: Any
) -> None:
    seen, angles = precisions_seen(student, "forward_block"), precisions_seen(embed, "record")
    asked: dict[str, Any] = {**OPTIONS, "calibration": str(calibration_text), "matmul_precision": mode}
    report = quantkit.convert(tiny_original, tmp_path / "out", **asked)
    assert seen == {"bf16" if mode == "bf16" else "ieee"}
    assert angles == {"ieee"}  # products of positions, in some versions of transformers
    assert report.matmul_precision == mode
    assert "ran in" in str(report)
    described = describe(make_plan(ConvertOptions(str(tiny_original), tmp_path / "other", **asked)))
    assert WORDS[mode] in described


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def measured(original: Path, folder: Path, asked: dict[str, Any]) -> float:
    """The divergence, mean over the tokens of the window kept back, of the finished folder as an engine runs it."""
    windows = make_plan(ConvertOptions(str(original), folder / "other", **asked)).inputs.distil
    assert windows is not None
    order = torch.randperm(len(windows.ids), generator=torch.Generator().manual_seed(windows.seed))
    ids = windows.ids[order[-max(1, len(windows.ids) // algorithm.HELD) :]]
    with torch.no_grad():
        p, q = (
            quantkit.load(model, device="cpu", dtype="float32", dequantize=model is folder)
            .module(input_ids=ids, use_cache=False)
            .logits.double()
            .log_softmax(-1)
            for model in (original, folder)
        )
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.usefixtures("fast")
def test_distilling_lowers_the_divergence_and_leaves_every_code(
    tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    quantkit.convert(tiny_original, tmp_path / "plain", **PLAIN)
    report = quantkit.convert(tiny_original, tmp_path / "learned", calibration=str(calibration_text), **OPTIONS)
    assert report.distilled is not None
    assert report.distilled["kept"]
    assert report.distilled["kl_after"] < 0.98 * report.distilled["kl_before"]
    counts = {
        name: report.distilled[name] for name in ("steps", "windows_learned", "tokens_learned", "windows_kept_back")
    }
    assert counts == {"steps": 7, "windows_learned": 7, "tokens_learned": 7 * 64, "windows_kept_back": 1}
    before, after = weights(tmp_path / "plain"), weights(tmp_path / "learned")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name.rpartition(".")[2] for name in changed} <= {"scales", "weight"}
    assert {name for name in changed if name.endswith(".weight")} <= {name for name in before if "norm" in name}
    assert sum(name.endswith(".scales") for name in changed) == 3 * 7
    assert any("norm" in name for name in changed)


@pytest.mark.usefixtures("fast")
def test_codes_read_again_for_every_step_give_the_same_bytes(
    tiny_original: Path, calibration_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantkit.convert(tiny_original, tmp_path / "held", calibration=str(calibration_text), **OPTIONS)
    monkeypatch.setattr(algorithm, "RESIDENT", 0.0)
    quantkit.convert(tiny_original, tmp_path / "read", calibration=str(calibration_text), **OPTIONS)
    held, read = weights(tmp_path / "held"), weights(tmp_path / "read")
    assert all(torch.equal(held[name], read[name]) for name in held)


def test_what_makes_the_model_worse_is_thrown_away(
    tiny_original: Path, calibration_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distil_pass, "DistilOptions", lambda: DistilOptions(rate=0.5, warmup=1))
    monkeypatch.setattr(algorithm, "ADAM_STEP_TOKENS", 64)
    options = {**OPTIONS, "bits": 8}
    report = quantkit.convert(tiny_original, tmp_path / "learned", calibration=str(calibration_text), **options)
    assert report.distilled is not None
    assert not report.distilled["kept"]
    assert any("nothing was changed" in note for note in report.notes)
    quantkit.convert(tiny_original, tmp_path / "plain", **{**PLAIN, "bits": 8})
    plain, learned = weights(tmp_path / "plain"), weights(tmp_path / "learned")
    assert all(torch.equal(plain[name], learned[name]) for name in plain)


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize(
    "options",
    [
        {"method": "awq", "samples": 8, "format": "compressed-tensors", "bits": 4, "distil": 24},
        {"samples": 8, "format": "gptq", "kv_bits": 8, "kv_scales": "static"},
        {"rules": ("lm_head=bits:8",)},
        {"calibration": "self", "samples": 8, "distil": 4},
    ],
    ids=["awq, folded norms", "gptq format, static cache", "tied matrix at 8 bits", "its own text"],
)  # fmt: skip
def test_every_way_of_converting_can_be_distilled(
    tiny_original: Path, calibration_text: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    asked = {**OPTIONS, "calibration": str(calibration_text), **options}
    report = quantkit.convert(tiny_original, tmp_path / "out", **asked)
    assert report.distilled is not None
    assert report.distilled["kept"]
    assert report.distilled["kl_after"] < report.distilled["kl_before"]
    if asked["calibration"] != "self":
        assert measured(tiny_original, tmp_path / "out", asked) == pytest.approx(report.distilled["kl_after"], rel=3e-2)


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("name", ["gemma2", "qwen3_moe", "falcon"])
def test_other_architectures_can_be_distilled(
    name: str, tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_original)
    tiny_architecture(name, vocab_size=len(tokenizer)).save_pretrained(tmp_path / "source")
    tokenizer.save_pretrained(tmp_path / "source")
    asked = {**OPTIONS, "calibration": str(calibration_text)}
    report = quantkit.convert(tmp_path / "source", tmp_path / "out", **asked)
    assert report.distilled is not None
    assert report.distilled["kl_after"] < report.distilled["kl_before"]
    found = measured(tmp_path / "source", tmp_path / "out", asked)
    assert found == pytest.approx(report.distilled["kl_after"], rel=3e-2)


def test_requests_that_make_no_sense_are_refused(tiny_original: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="--distil 1"):
        quantkit.convert(tiny_original, tmp_path / "out", distil=1)
    with pytest.raises(RequestError, match="no gradient through rounded activations"):
        quantkit.convert(tiny_original, tmp_path / "out", method="rtn", activations="int8", distil=4)


@pytest.mark.parametrize(("windows", "seq_len", "used"), [(24, 64, None), (25, 64, 24), (9, 64, None), (31, 1024, 30)])
def test_windows_that_fill_no_step_are_left_out_and_the_plan_says_so(
    windows: int, seq_len: int, used: int | None, tmp_path: Path
) -> None:
    notes = unused_windows(ConvertOptions("model", tmp_path / "out", distil=windows, seq_len=seq_len))
    assert len(notes) == (used is not None)
    assert all(f"{used} of them are used" in note for note in notes)


def test_the_pass_is_told_in_report_and_manifest(
    tiny_original: Path, calibration_text: Path, tmp_path: Path, quantkit: Callable[..., Any]
) -> None:
    run = quantkit(
        "convert", tiny_original, "--out", tmp_path / "out", "--method", "rtn", "--bits", 3, "--group-size", 32,
        "--format", "native", "--calibration", calibration_text, "--seq-len", 64, "--distil", 8,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "distilled divergence on windows kept back (1) " in run.stdout
    assert "learned from 7 others (448 tokens) in 7 steps" in run.stdout
    assert '"distilled"' in (tmp_path / "out" / "quantkit.json").read_text()


def test_no_window_that_a_method_learned_from_is_distilled_on_or_judges(tiny_original: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"The engine number {i} waits near gate {i * i}." for i in range(200)))
    options = ConvertOptions(
        str(tiny_original), tmp_path / "out", method="awq", calibration=str(text), samples=12, seq_len=32, distil=10
    )
    plan = make_plan(options)
    assert plan.inputs.calibration is not None
    assert plan.inputs.distil is not None
    learned, distilled = ({tuple(row) for row in w.ids.tolist()} for w in (plan.inputs.calibration, plan.inputs.distil))
    assert len(learned) == 12
    assert len(distilled) == 10
    assert not learned & distilled


def test_a_text_too_short_for_both_is_refused_with_both_numbers(
    tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match="--samples 8 and --distil 5000 more are asked"):
        quantkit.convert(
            tiny_original,
            tmp_path / "out",
            method="awq",
            calibration=str(calibration_text),
            samples=8,
            seq_len=32,
            distil=5000,
        )


@pytest.mark.usefixtures("fast")
def test_a_divergence_that_is_not_finite_leaves_the_blocks_as_they_are_and_is_told(
    tiny_original: Path, calibration_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantkit.convert(tiny_original, tmp_path / "plain", **PLAIN)
    real, calls = distil_pass.divergence, []

    def third_is_infinite(*args: Any) -> Any:
        calls.append(1)
        loss, grad = real(*args)
        return (float("inf") if len(calls) == 3 else loss), grad

    monkeypatch.setattr(distil_pass, "divergence", third_is_infinite)
    report = quantkit.convert(tiny_original, tmp_path / "out", calibration=str(calibration_text), **OPTIONS)
    assert report.distilled is not None
    assert not report.distilled["kept"]
    assert report.distilled["windows_learned"] == report.distilled["steps"] == 1
    assert any("is not finite; nothing was changed" in note for note in report.notes)
    assert "-> unknown" in report.table()
    before, after = weights(tmp_path / "plain"), weights(tmp_path / "out")
    assert all(torch.equal(value, after[name]) for name, value in before.items())


class Seen(Exception):
    """What a test raises when it has seen what it wanted."""


def deltas(work: Any) -> dict[str, Any]:
    """Everything that learns in a ``_Pass``, by the parameter's name."""
    found = dict(work.student.norms)
    for index, block in enumerate(work.student.blocks):
        found |= {
            f"{work.written.blocks.name(index)}.{name}": one for name, one in (block.scales | block.norms).items()
        }
    return found


def whole_model_gradients(work: Any) -> dict[str, torch.Tensor]:
    """The gradients that the pass must have gathered, by the model's own forward, in one graph.

    They are those of the first step's divergence, for every delta.

    Weights are made by the formula: ``(codes - zero) * scale * exp(delta)`` and ``w + unit * delta``.
    """
    student, weights, leaves = work.student, work.written.weights, {}
    blocks = {work.written.blocks.name(i): student._values(i) for i in range(len(student.blocks))}
    stored = {f"{prefix}.{name}": value for prefix, values in blocks.items() for name, value in values.items()}
    found = {
        name: student._plain(name) for name in weights.parameters if name not in student.targets
    } | work.head_embeddings
    for name, one in deltas(work).items():
        delta = leaves[name] = one.delta.detach().clone().requires_grad_()
        if hasattr(one, "unit"):
            found[name] = one.weight + one.unit * delta
            continue
        q = stored[name]
        zero = torch.full(q.scales.shape, float(q.scheme.midpoint)) if q.zeros is None else q.zeros.float()
        step, zero = (
            affine.expand_groups(x, q.codes.shape[1], q.scheme) for x in (q.scales.float() * delta.exp(), zero)
        )
        found[name] = (q.codes.float() - zero) * step
    original = {name: weights.read(name, torch.device("cpu")) for name in weights.parameters}
    for values in (found, original):
        values.update({name: values[twin] for name, twin in weights.tied.items()})

    def logits(values: dict[str, torch.Tensor]) -> torch.Tensor:
        asked = {"input_ids": work.batches[0], "use_cache": False}
        output = torch.func.functional_call(work.written.model, values, kwargs=asked)
        return output.logits.flatten(0, 1).log_softmax(-1)  # type: ignore[no-any-return]

    with torch.no_grad():
        target = logits(original)
    torch.nn.functional.kl_div(logits(found), target, log_target=True, reduction="batchmean").backward()
    return {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}


@pytest.mark.parametrize(
    ("name", "rules"),
    [("llama", ("lm_head=bits:8,group:32",)), ("gemma2", ()), ("falcon", ()), ("qwen3_moe", ())],
    ids=["llama, tied matrix at 8 bits", "gemma2", "falcon", "qwen3_moe"],
)
def test_gradients_gathered_block_by_block_are_those_of_the_whole_model(
    name: str,
    rules: tuple[str, ...],
    tiny_original: Path,
    calibration_text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two windows a step, logits in parts, and deltas that are not 0."""
    from transformers import AutoTokenizer

    monkeypatch.setattr(algorithm, "ADAM_STEP_TOKENS", 64)
    monkeypatch.setattr(algorithm, "CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(algorithm, "CHUNK_TOKENS", 24)  # of 64
    gathered: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def first_step(self: Any, number: int) -> None:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in self.student.parameters():
                p.copy_(0.05 * torch.randn(p.shape, generator=generator))
        self.adam.step = self.adam.zero_grad = lambda: None
        real(self, number)
        wanted = whole_model_gradients(self)
        gathered.update({name: (one.delta.grad, wanted[name]) for name, one in deltas(self).items()})
        raise Seen

    real = distil_pass._Pass._step
    monkeypatch.setattr(distil_pass._Pass, "_step", first_step)
    tokenizer = AutoTokenizer.from_pretrained(tiny_original)
    tiny_architecture(name, vocab_size=len(tokenizer)).save_pretrained(tmp_path / "source")
    tokenizer.save_pretrained(tmp_path / "source")
    asked = {
        **OPTIONS,
        "seq_len": 32,
        "distil": 16,
        "rules": rules,
        "calibration": str(calibration_text),
        "matmul_precision": "float32",
    }
    with pytest.raises(Seen):
        quantkit.convert(tiny_original if name == "llama" else tmp_path / "source", tmp_path / "out", **asked)
    reached = {name for name, (_, wanted) in gathered.items() if bool(wanted.any())}
    assert any("norm" in name for name in reached)
    assert any(name.endswith("_proj.weight") or ".dense" in name for name in reached)
    for name, (mine, wanted) in gathered.items():
        assert float((mine - wanted).norm()) <= 1e-5 * float(wanted.norm()), name


@pytest.mark.usefixtures("fast", "states_after_each_block")
def test_a_pass_that_stopped_goes_on_to_the_same_bytes(
    tiny_original: Path, calibration_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    real = distil_pass._Pass._step

    def stops(self: Any, step: int) -> None:
        seen.append(step)
        if len(seen) == 5:
            raise Seen
        real(self, step)

    def convert(out: Path, **more: Any) -> Any:
        return quantkit.convert(tiny_original, out, calibration=str(calibration_text), **OPTIONS, **more)

    whole = convert(tmp_path / "whole")
    assert whole.distilled["kept"]
    monkeypatch.setattr(distil_pass._Pass, "_step", stops)
    with pytest.raises(Seen):
        convert(tmp_path / "out")
    resumed = convert(tmp_path / "out", resume=True)
    assert whole.distilled["steps"] == 7
    assert seen == [0, 1, 2, 3, 4, 4, 5, 6]
    assert resumed.distilled == whole.distilled
    assert digest(tmp_path / "out") == digest(tmp_path / "whole")
