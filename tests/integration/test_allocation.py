"""--target-bpw and --target-size through the whole path: measured, chosen, written, counted."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from architectures import tiny_model as tiny_architecture
from stopping import stop_at, watch
from transformers import AutoTokenizer
from written import digest, schemes

import quantkit as qk
from quantkit.algorithms.awq import rough_factors
from quantkit.checkpoint.open import open_source
from quantkit.checkpoint.writer import CheckpointWriter
from quantkit.convert.options.options import ConvertOptions
from quantkit.convert.options.rules import fused_groups
from quantkit.convert.plan.bit_budget import kept_bytes, target_bytes
from quantkit.convert.plan.plan import make_plan
from quantkit.convert.report.bit_budget import summary
from quantkit.convert.results import Measured
from quantkit.convert.run import decide_plan
from quantkit.convert.stages.sensitivity import SensitivityPass, _factors
from quantkit.core.scheme import Scheme
from quantkit.errors import RequestError
from quantkit.evaluate.sizes import checkpoint_bytes, measure_sizes

SMALL: dict[str, Any] = dict(samples=4, seq_len=32)


def convert(source: Path, out: Path, text: Path, **options: Any) -> Any:
    return qk.convert(source, out=out, calibration=str(text), **{**SMALL, **options})


CASES = [
    dict(method="rtn", format="native", target_bpw=4.25),
    dict(method="gptq", format="native", target_bpw=6.5, symmetric=True),
    dict(method="awq", format="native", target_bpw=3.3, kv_bits=4, seq_len=96, samples=2),
    dict(method="gptq", format="compressed-tensors", target_bpw=9.5),
    dict(method="tune", format="native", target_bpw=5, samples=12, tune_steps=4),
    dict(method="rtn", format="gptq", target_bpw=8.5, group_size=32, symmetric=True),
    dict(method="rtn", format="native", target_size="70KB"),
]


@pytest.mark.parametrize("options", CASES, ids=lambda o: f"{o['method']}-{o['format']}-{o.get('target_bpw', 'size')}")
def test_what_is_written_is_what_was_counted_and_just_within_the_target(
    options: dict[str, Any], tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    report = convert(tiny_original, tmp_path / "out", calibration_text, **options)
    source, found = open_source(tmp_path / "out"), report.allocation
    assert checkpoint_bytes(source) == found["bytes"] <= found["budget_bytes"]
    assert measure_sizes(source).model_bits_per_weight == pytest.approx(found["model_bits_per_weight"], abs=1e-5)
    if "target_bpw" in options:
        assert 0.97 * options["target_bpw"] < found["model_bits_per_weight"] <= options["target_bpw"]
    else:
        assert 68_000 < found["bytes"] <= 70_000
    written = schemes(tmp_path / "out")
    for row in found["groups"]:
        assert {written.get(name, "16 bit") for name in row["names"]} == {row["scheme"]}
    shared: dict[tuple[str, str], set[str]] = {}
    for name, scheme in written.items():
        for group in fused_groups(name):
            shared.setdefault(group, set()).add(scheme)
    assert len(shared) == 6
    assert all(len(one) == 1 for one in shared.values())
    assert json.loads((tmp_path / "out" / "quantkit.json").read_text())["allocation"] == found
    assert report.to_json()["allocation"] == found
    assert "<- chosen" in report.table()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", dict(format="compressed-tensors", group_size="auto")),
        ("llama", dict(format="native", rules=("layers.1.*=bits:8,group:32", "*.0.self_attn.v_proj=keep"))),
        ("qwen3_moe", dict(format="gptq", symmetric=True, group_size=32)),
    ],
    ids=["llama", "llama, rules", "experts"],
)
def test_whatever_is_measured_the_size_holds_and_what_is_fused_shares_a_scheme(
    name: str, options: dict[str, Any], tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    """Damage drawn at random, not even smaller for more bits, at 30 budgets.

    They reach from the least to the most that is possible.
    """
    source = tiny_original
    if name != "llama":
        source, vocab = tmp_path / "source", json.loads((tiny_original / "config.json").read_text())["vocab_size"]
        tiny_architecture(name, vocab_size=vocab, moe_intermediate_size=32).half().save_pretrained(source)
        for file in tiny_original.glob("*token*"):
            shutil.copy(file, source / file.name)
    asked = {"method": "rtn", "calibration": str(calibration_text), "target_bpw": 8.5, **options, **SMALL}
    plan = make_plan(ConvertOptions(str(source), tmp_path / "out", **asked))
    assert not plan.problems
    assert plan.budget is not None
    before, free = plan.targets, {name for unit in plan.budget.units for name in unit.members}
    draw = random.Random(0)
    for point in range(30):
        sensitivity = [[draw.random() ** 4 for _ in unit.options] for unit in plan.budget.units]
        budget = plan.budget.least + (plan.budget.most - plan.budget.least) * point // 29
        one = replace(plan, budget=replace(plan.budget, budget=budget))
        measured = Measured(sensitivity, [torch.ones(plan.model.config.hidden_size)] * len(plan.blocks))
        work: Any = SimpleNamespace(finished=None, folder=tmp_path, measured=lambda found=measured: found)
        decisions = decide_plan(one, one.inputs, work, lambda done, total: None)
        assert one.budget is not None
        assert decisions.choice is not None
        size = summary(one.budget, decisions.choice, before)["bytes"]
        written = sum(target_bytes(one.format, target) for target in decisions.targets.values())
        kept = sum(kept_bytes(one.weights, before[name]) for name in free if name not in decisions.targets)
        ruled = sum(target_bytes(one.format, target) for name, target in before.items() if name not in free)
        assert size == plan.budget.fixed - ruled + written + kept <= budget
        assert {name: before[name] for name in before if name not in free}.items() <= decisions.targets.items()
        shared: dict[Any, set[str]] = {}
        for target in (decisions.targets[name] for name in free & decisions.targets.keys()):
            for group in fused_groups(target.name):
                shared.setdefault(group, set()).add(target.scheme.describe())
        assert shared
        assert all(len(schemes) == 1 for schemes in shared.values())


def test_the_curve_falls_and_holds_what_was_chosen(tiny_original: Path, calibration_text: Path, tmp_path: Path) -> None:
    report = convert(tiny_original, tmp_path / "out", calibration_text, method="rtn", format="native", target_bpw=4.25)
    curve = [(row["model_bits_per_weight"], row["predicted_kl"]) for row in report.allocation["curve"]]
    chosen = (report.allocation["model_bits_per_weight"], report.allocation["predicted_kl"])
    assert curve == sorted(curve, key=lambda point: (point[0], -point[1]))
    kl = [cost for _, cost in curve]
    assert kl == sorted(kl, reverse=True)
    assert all(cost >= chosen[1] for bits, cost in curve if bits <= chosen[0])
    assert all(cost <= chosen[1] for bits, cost in curve if bits >= chosen[0])


def test_rules_win_and_the_rest_is_allocated(tiny_original: Path, calibration_text: Path, tmp_path: Path) -> None:
    rules = ["layers.0.mlp.down_proj=bits:8,group:32,sym", "layers.1.*=keep", "*.embed_tokens=bits:5,group:64"]
    report = convert(
        tiny_original, tmp_path / "out", calibration_text, method="rtn", format="native", target_bpw=8, rules=rules
    )
    written = schemes(tmp_path / "out")
    assert written["model.layers.0.mlp.down_proj"] == "W8 g32 sym"
    assert written["model.embed_tokens"] == "W5 g64 asym"
    assert not [name for name in written if ".layers.1." in name]
    named = {name for row in report.allocation["groups"] for name in row["names"]}
    assert len(named) == 13
    assert not named & {"model.layers.0.mlp.down_proj", "model.embed_tokens"}
    assert (
        checkpoint_bytes(open_source(tmp_path / "out"))
        == report.allocation["bytes"]
        <= 8 * report.allocation["parameters"] / 8
    )


def test_a_stopped_job_chooses_the_same_without_measuring_again(
    tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = dict(method="gptq", format="native", target_bpw=4.25)
    convert(tiny_original, tmp_path / "whole", calibration_text, **options)
    with pytest.raises(KeyboardInterrupt):
        convert(tiny_original, tmp_path / "out", calibration_text, on_progress=stop_at("chosen", 1), **options)
    assert set(digest(tmp_path / ".out.work")) == {"job.json", "lock", "measured.json"}
    stages: list[str] = []
    convert(tiny_original, tmp_path / "out", calibration_text, resume=True, on_progress=watch(stages), **options)
    assert "blocks" in stages
    assert "measure" not in stages
    assert digest(tmp_path / "out") == digest(tmp_path / "whole")


def test_states_that_a_killed_job_left_behind_are_not_read(
    tiny_original: Path, calibration_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = dict(method="rtn", format="native", target_bpw=5)
    found = []
    measure = SensitivityPass.measure

    def after_a_kill(self: SensitivityPass, *rest: Any) -> Any:
        self.file.write_bytes(bytes(1000))
        return measure(self, *rest)

    for name in ("whole", "again"):
        found.append(convert(tiny_original, tmp_path / name, calibration_text, **options).allocation)
        monkeypatch.setattr(SensitivityPass, "measure", after_a_kill)
    assert found[0] == found[1]


def test_a_job_stopped_before_its_last_rename_says_what_it_chose(
    tiny_original: Path, calibration_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = dict(method="rtn", format="native", target_bpw=5)
    whole = convert(tiny_original, tmp_path / "whole", calibration_text, **options)
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "commit", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            convert(tiny_original, tmp_path / "out", calibration_text, **options)
    (tmp_path / ".out.work" / "measured.json").unlink()  # as if it was killed while it tidied up
    report = convert(tiny_original, tmp_path / "out", calibration_text, resume=True, **options)
    assert report.allocation == whole.allocation
    found, wanted = ([replace(one, command=None) for one in each.engines] for each in (report, whole))
    assert found == wanted  # commands name the folders


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            dict(target_bpw=1.5, format="native"),
            r"--target-bpw 1\.5: the least that is possible here is --target-bpw 2\.\d{3} or --target-size [\d.]+KB ",
        ),
        (
            dict(target_bpw=17, format="native"),
            r"--target-bpw 17: the most that is possible here is --target-bpw \d+\.\d{3} or",
        ),
        (
            dict(target_bpw=4.25),
            r"least that is possible here is --target-bpw [67]\.\d{3} or --target-size [\d.]+KB .*transformers only",
        ),
        (dict(target_bpw=4.25, format="awq"), r"awq holds one width for the whole model"),
        (dict(target_bpw=4.25, bits=4, format="native"), r"--bits has no effect: --target-bpw 4\.25 chooses the bits"),
        (dict(target_bpw=4.25, target_size="3GB"), "say the same in two ways"),
        (dict(target_size="3 lots"), r"--target-size 3 lots: a size such as 3\.5GB"),
        (dict(target_bpw=4.25, activations="int8"), "there is nothing to choose"),
        (dict(group_size="auto"), "only --target-bpw and --target-size choose group sizes"),
        (dict(target_bpw=9, rules=["*.q_proj=bits:4"]), "a rule takes some of the linears that engines run with it"),
        (
            dict(target_bpw=9, method="rtn", format="native", rules=["*=bits:4", "*.embed_tokens=keep"]),
            "nothing is left to choose",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    options: dict[str, Any], words: str, tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match=words):
        convert(tiny_original, tmp_path / "out", calibration_text, **options)
    assert list(tmp_path.iterdir()) == []


def test_the_least_and_the_most_can_be_asked_for(tiny_original: Path, calibration_text: Path, tmp_path: Path) -> None:
    for asked in (1.0, 17.0):
        with pytest.raises(RequestError, match="is possible here") as refused:
            convert(
                tiny_original,
                tmp_path / f"no-{asked}",
                calibration_text,
                method="rtn",
                format="native",
                target_bpw=asked,
            )
        named = re.search(r"here is --target-bpw ([\d.]+) or --target-size (\S+)", str(refused.value))
        assert named is not None
        bits = float(named[1])
        by_size = ConvertOptions(
            str(tiny_original),
            tmp_path / "size",
            method="rtn",
            format="native",
            target_size=named[2],
            calibration=str(calibration_text),
            seq_len=48,
        )
        assert not make_plan(by_size).problems
        report = convert(
            tiny_original,
            tmp_path / "out",
            calibration_text,
            method="rtn",
            format="native",
            target_bpw=bits,
            overwrite=True,
        )
        assert report.allocation["model_bits_per_weight"] == pytest.approx(bits, abs=0.15)


def test_a_dry_run_says_what_it_would_measure(
    quantkit: Callable[..., Any], tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    common = (
        "convert",
        tiny_original,
        "--out",
        tmp_path / "out",
        "--calibration",
        calibration_text,
        "--samples",
        2,
        "--seq-len",
        32,
    )
    done = quantkit(*common, "--target-bpw", "4.25", "--format", "native", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "--target-bpw 4.25: " in done.stdout
    assert "measures  13 groups of weights" in done.stdout
    assert "to be chosen" in done.stdout
    assert re.search(r"loads in  none of vLLM .*do not read the format native", done.stdout)
    assert "depends on the bits that are chosen" in done.stdout
    refused = quantkit(*common, "--target-bpw", "4.25", "--bits", "4", "--format", "native")
    assert refused.returncode == 2
    assert "--bits has no effect" in refused.stderr


@pytest.mark.parametrize(
    ("form", "scaled", "alike"),
    [
        ("llama", "self_attn.q_proj", {"model.embed_tokens", "lm_head"}),
        ("falcon", "query_key_value",
         {"transformer.word_embeddings", *(f"transformer.h.{i}.mlp.dense_4h_to_h" for i in range(3))}),
    ],
)  # fmt: skip
def test_sensitivity_is_that_of_scaled_channels_where_method_and_block_scale_them(
    form: str, scaled: str, alike: set[str], tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    """A channel thirty times as large as the others costs less with a method that scales it.

    It stands behind a norm; what lies behind a GELU cannot be scaled.
    """
    tokenizer, model = AutoTokenizer.from_pretrained(tiny_original), tiny_architecture(form, vocab_size=512)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("input_layernorm.weight"):
                parameter[3] *= 30
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "source")
    found: list[Measured] = []
    for fold in (False, True):
        options = ConvertOptions(
            str(tmp_path / "source"),
            tmp_path / "out",
            method="gptq",
            fold=fold,
            format="native",
            target_bpw=6,
            calibration=str(calibration_text),
            **SMALL,
        )
        plan, work = make_plan(options), tmp_path / f"work-{fold}"
        work.mkdir()
        assert plan.budget is not None
        kept: Any = SimpleNamespace(finished=None, folder=work, measured=lambda: None, keep_measured=found.append)
        decide_plan(plan, plan.inputs, kept, lambda done, total: None)
    plain, folded = (measured.sensitivity for measured in found)
    totals = [0.0, 0.0]
    for unit, before, after in zip(plan.budget.units, plain, folded, strict=True):
        if unit.members[0].endswith(scaled):
            four = next(i for i, scheme in enumerate(unit.options) if scheme is not None and scheme.bits == 4)
            totals = [totals[0] + before[four], totals[1] + after[four]]
        assert (after == before) is (unit.members[0] in alike)
    assert 0 < totals[1] < 0.7 * totals[0]


def test_columns_that_carry_one_channel_have_one_factor() -> None:
    """Query heads that share a value head: here four columns carry two channels."""
    size, weight = torch.tensor([1.0, 8.0, 3.0, 2.0]), torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    channels = torch.tensor([0, 1, 0, 1])
    found = _factors({"o": weight}, size, {"o": channels}, Scheme(4, None, False))
    assert found is not None
    assert torch.equal(found[:2], found[2:])
    mean = ((size[:2].square() + size[2:].square()) / 2).sqrt()[channels]
    assert torch.equal(found, rough_factors([weight], mean, Scheme(4, None, False)))
    assert _factors({"o": weight, "p": weight}, size, {"o": channels}, Scheme(4, None, False)) is None


def test_the_curve_is_shown_as_soon_as_bits_are_chosen(
    tiny_original: Path, calibration_text: Path, tmp_path: Path, quantkit: Callable[..., Any]
) -> None:
    """Not only behind the work of hours."""
    heard: list[Any] = []
    report = convert(tiny_original, tmp_path / "a", calibration_text, **CASES[0], on_progress=heard.append)
    stages = list(dict.fromkeys(one.stage for one in heard))
    assert stages[:4] == ["read", "measure", "chosen", "blocks"]
    last = [one for one in heard if one.stage == "measure"][-1]
    assert last.done == last.total > 0  # or a bar stands still at 59 of 60
    (chosen,) = [one.note for one in heard if one.stage == "chosen"]
    assert chosen in report.table()
    target = (
        "--calibration", calibration_text, "--samples", 4, "--seq-len", 32, "--format", "native",
        "--target-bpw", "6.5", "--sym",
    )  # fmt: skip
    done = quantkit("convert", tiny_original, "--out", tmp_path / "b", *target)
    assert "<- chosen" in done.stderr
    assert "<- chosen" in done.stdout
