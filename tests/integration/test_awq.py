"""``--method awq`` through the whole pipeline, on tiny random models: written weights compute what was measured."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import tiny_model as tiny_architecture

from quantkit.calibrate.stats import Hessian
from quantkit.checkpoint.open import open_source
from quantkit.checkpoint.source import FolderSource
from quantkit.convert import run
from quantkit.convert.api import convert
from quantkit.convert.options.options import ConvertOptions
from quantkit.convert.plan.plan import Plan, make_plan
from quantkit.convert.results import BlockResult, InputGroup
from quantkit.convert.stages import observe as observe_stage
from quantkit.convert.stages.fold import Folding, fold_block, missing_folds, take_tokens
from quantkit.formats.kv_scales import read_kv_plan
from quantkit.model.arguments import BlockArguments
from quantkit.model.stepper import input_groups, run_block
from quantkit.runtime.load import load

TEXT = dict(samples=8, seq_len=32, group_size=32)


def plant_outliers(folder: Path) -> None:
    """Norms that make a few channels large, as trained models have them.

    The function of the model changes, but stays sane.
    """
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if name.endswith("layernorm.weight"):
            size = torch.ones(len(tensor))
            size[torch.randperm(len(size), generator=generator)[:4]] = 12.0
            tensors[name] = (tensor.float() * size).to(tensor.dtype)
    save_file(tensors, file, metadata={"format": "pt"})


def logits(folder: Path) -> torch.Tensor:
    ids = torch.randint(0, 300, (4, 24), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return load(str(folder), device="cpu", dtype="float32")(ids).float()


def divergence(original: torch.Tensor, other: torch.Tensor) -> float:
    p, q = original.log_softmax(-1), other.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def test_awq_is_closer_to_the_original_than_rounding(tiny_model: Path, tmp_path: Path, calibration_text: Path) -> None:
    plant_outliers(tiny_model)
    original = logits(tiny_model)
    kl = {}
    for method in ("rtn", "awq"):
        text: dict[str, Any] = {"calibration": str(calibration_text), **TEXT} if method == "awq" else {"group_size": 32}
        report = convert(tiny_model, tmp_path / method, method=method, **text)
        assert report.verified_tensors == len(open_source(tmp_path / method).names())
        kl[method] = divergence(original, logits(tmp_path / method))
    assert kl["awq"] < 0.8 * kl["rtn"]


def test_norms_are_written_in_their_stored_dtype_and_carry_the_factors(
    tiny_model: Path, tmp_path: Path, calibration_text: Path
) -> None:
    plant_outliers(tiny_model)
    convert(tiny_model, tmp_path / "out", method="awq", bits=8, calibration=str(calibration_text), **TEXT)
    before, after = FolderSource(tiny_model), FolderSource(tmp_path / "out")
    name = "model.layers.1.input_layernorm.weight"
    assert after.info(name).dtype == before.info(name).dtype == torch.float16
    assert not torch.equal(before.read(name), after.read(name))
    for kept in ("model.norm.weight", "model.embed_tokens.weight"):
        assert torch.equal(before.read(kept), after.read(kept))
    # eight bits lose next to nothing, so anything inconsistent between norms and weights would show
    assert divergence(logits(tiny_model), logits(tmp_path / "out")) < 1e-4


@pytest.mark.parametrize("form", ["native", "compressed-tensors", "awq", "gptq"])
def test_every_format_computes_the_same(tiny_model: Path, tmp_path: Path, calibration_text: Path, form: str) -> None:
    plant_outliers(tiny_model)
    common: dict[str, Any] = dict(method="awq", calibration=str(calibration_text), **TEXT)
    convert(tiny_model, tmp_path / "native", format="native", **common)
    convert(tiny_model, tmp_path / "other", format=form, **common)
    assert torch.equal(logits(tmp_path / "native"), logits(tmp_path / "other"))


def test_the_kv_cache_is_calibrated_on_scaled_values(tiny_model: Path, tmp_path: Path, calibration_text: Path) -> None:
    plant_outliers(tiny_model)
    text = dict(kv_bits=8, calibration=str(calibration_text), **TEXT)
    convert(tiny_model, tmp_path / "out", method="awq", bits=8, **text)
    assert divergence(logits(tiny_model), logits(tmp_path / "out")) < 1e-3
    asked = {name: value for name, value in text.items() if name != "group_size"}
    convert(tmp_path / "out", tmp_path / "written", **asked)  # calibrates what was written, factors and all
    found, written = read_kv_plan(tmp_path / "out"), read_kv_plan(tmp_path / "written")
    assert found is not None
    assert written is not None
    for name, scales in found.static.items():
        for part in ("k_scale", "v_scale"):
            ratio = getattr(scales, part) / getattr(written.static[name], part)
            assert float(ratio.log().abs().max()) < 0.1, (name, part)


def test_a_kept_linear_is_scaled_with_its_siblings(tiny_model: Path, tmp_path: Path, calibration_text: Path) -> None:
    plant_outliers(tiny_model)
    rules = ("*.mlp.*=keep", "*.v_proj=keep")
    common: dict[str, Any] = dict(method="awq", bits=8, calibration=str(calibration_text), **TEXT)
    # native: other formats are for engines that run q, k, v as one matrix with one scheme
    convert(tiny_model, tmp_path / "out", rules=rules, format="native", **common)
    before, after = FolderSource(tiny_model), FolderSource(tmp_path / "out")
    name = "model.layers.1.self_attn.v_proj.weight"
    assert after.info(name).dtype == before.info(name).dtype
    assert not torch.equal(before.read(name), after.read(name))
    assert divergence(logits(tiny_model), logits(tmp_path / "out")) < 1e-4


def folding(plan: Plan) -> Folding:
    return Folding(method="awq", weights=plan.weights, targets=plan.targets, rewritten=plan.rewritten)


def first_block(
    model: Path, out: Path, text: Path
) -> tuple[Plan, torch.nn.Module, list[InputGroup], torch.Tensor, BlockArguments]:
    """The first block of a plan, loaded, with made-up statistics of its inputs."""
    plant_outliers(model)
    options = ConvertOptions(str(model), out, method="awq", calibration=str(text), **TEXT)  # type: ignore[arg-type]
    plan = make_plan(options)
    block = plan.blocks.modules[0]
    plan.weights.load(plan.blocks.name(0))
    torch.manual_seed(0)
    hidden = torch.randn(1, 8, 64)
    positions = plan.model.model.rotary_emb(hidden, torch.arange(8)[None])  # type: ignore[union-attr,operator]
    call = BlockArguments((), {"position_embeddings": positions})
    groups = []
    for names in input_groups(block, hidden, call):
        width: Any = block.get_submodule(names[0]).in_features
        x = torch.randn(200, width).double() * torch.logspace(-1, 1, width)
        groups.append(InputGroup(names, x.t() @ x / 200, 200))
    return plan, block, groups, hidden, call


def test_folding_a_block_leaves_its_function_unchanged(
    tiny_model: Path, tmp_path: Path, calibration_text: Path
) -> None:
    plan, block, groups, hidden, call = first_block(tiny_model, tmp_path / "out", calibration_text)
    prefix = plan.blocks.name(0)
    before = run_block(block, hidden, call)
    old = {group.names: group.hessian.clone() for group in groups if group.hessian is not None}
    result = BlockResult()
    done = fold_block(folding(plan), prefix, block, groups, hidden, call, result)
    after = run_block(block, hidden, call)
    assert float((after - before).norm() / before.norm()) < 1e-5
    assert len(done) == len(groups) == 4
    for group in groups:
        fold, factors = next(item for item in done if group.names[0] in item[0].consumers)
        columns = fold.columns(group.names[0], factors).double()
        torch.testing.assert_close(group.hessian, old[group.names] / torch.outer(columns, columns))
    assert set(result.parts) == {plan.weights.names[n] for n in plan.rewritten if n.startswith(prefix)}
    assert not result.notes


def test_statistics_that_are_not_finite_leave_one_fold_alone_and_are_noted(
    tiny_model: Path, tmp_path: Path, calibration_text: Path
) -> None:
    plan, block, groups, hidden, call = first_block(tiny_model, tmp_path / "out", calibration_text)
    bad = next(group for group in groups if group.names == ("mlp.down_proj",))
    assert bad.hessian is not None
    bad.hessian[2, 2] = float("inf")
    weight = block.get_parameter("mlp.down_proj.weight").clone()
    result = BlockResult()
    done = fold_block(folding(plan), plan.blocks.name(0), block, groups, hidden, call, result)
    assert "mlp.up_proj" not in {fold.producer for fold, _ in done}
    assert len(done) == 3
    assert torch.equal(block.get_parameter("mlp.down_proj.weight"), weight)
    assert result.notes == [
        f"{plan.blocks.name(0)}.mlp.up_proj: the loss of this fold is not finite; its channels are not scaled"
    ]


def test_a_spoiled_token_costs_no_fold(
    tiny_model: Path, tmp_path: Path, calibration_text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embed = run.embed

    def spoiled(*args: Any) -> Any:
        found = embed(*args)
        found.states[0][0, 5, 3] = float("nan")  # among the tokens that folds would be found with
        return found

    monkeypatch.setattr(run, "embed", spoiled)
    common: dict[str, Any] = dict(TEXT, samples=16, method="awq", format="native", calibration=str(calibration_text))
    plant_outliers(tiny_model)
    report = convert(tiny_model, tmp_path / "out", **common)
    before, after = FolderSource(tiny_model), FolderSource(tmp_path / "out")
    for i in range(3):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            name = f"model.layers.{i}.{norm}.weight"
            assert not torch.equal(before.read(name), after.read(name)), name
    assert "1 of 512 calibration tokens" in report.table()
    assert not [note for note in report.notes if "scaled" in note]


def test_tokens_for_trying_folds_are_usable_tokens_only() -> None:
    states = [torch.randn(2, 6, 4), torch.randn(2, 6, 4)]
    assert torch.equal(take_tokens(states, 3), states[0][:1, :3])
    states[0][:, 1, 2] = float("nan")
    assert torch.equal(take_tokens(states, 3), states[1][:1, :3])  # the first window that begins with usable tokens
    states[1][:, 0, 0] = 1e30
    assert torch.equal(take_tokens(states, 3)[0], states[0][0, [0, 2, 3]])
    for state in states:
        state[:] = float("inf")
    assert take_tokens(states, 3).shape == (1, 3, 4)


def test_blocks_with_fewer_folds_than_their_like_are_noted() -> None:
    usual = {"norm": True, "v_proj": True, "k_proj": False}
    found = {"b0": usual, "b1": {**usual, "v_proj": False}, "b2": {"norm": False, "other": False}, "b3": usual}
    assert missing_folds(found) == ["b1: the channels of v_proj are not scaled, unlike in other blocks"]


def test_a_block_without_folds_is_noted_with_the_reasons(
    tiny_model: Path, tmp_path: Path, calibration_text: Path
) -> None:
    plan, block, groups, hidden, call = first_block(tiny_model, tmp_path / "out", calibration_text)
    result = BlockResult()
    hidden[0, 3] = float("nan")
    assert fold_block(folding(plan), plan.blocks.name(0), block, groups, hidden, call, result) == []
    assert [note.partition("(")[0] for note in result.notes] == ["model.layers.0: no channels can be scaled "]
    assert "input_layernorm" in result.notes[0]


def test_an_expert_that_no_token_reaches_is_scaled_like_the_others(
    tiny_original: Path, tmp_path: Path, calibration_text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, idle = tmp_path / "source", "mlp.experts.2."
    vocab = json.loads((tiny_original / "config.json").read_text())["vocab_size"]
    small: dict[str, Any] = dict(num_hidden_layers=1, moe_intermediate_size=32, mlp_only_layers=[])
    model = tiny_architecture("qwen3_moe", vocab_size=vocab, max_position_embeddings=128, **small)
    model.half().save_pretrained(source)
    for file in tiny_original.glob("*token*"):
        shutil.copy(file, source / file.name)
    observe, fold, done = observe_stage.observe, run.fold_block, []

    def unreached(block: Any, states: Any, call: Any, groups: Any, *rest: Any, **named: Any) -> Any:
        found = zip(groups, observe(block, states, call, groups, *rest, **named), strict=True)
        return [Hessian(h.sum.shape[0]) if names[0].startswith(idle) else h for names, h in found]

    monkeypatch.setattr(observe_stage, "observe", unreached)
    monkeypatch.setattr(run, "fold_block", lambda *args: done.extend(fold(*args)))
    report = convert(source, tmp_path / "out", method="awq", format="native", calibration=str(calibration_text), **TEXT)
    assert [layer.tokens for layer in report.layers if idle in layer.name] == [0, 0, 0]
    factors = next(values for one, values in done if one.producer == f"{idle}up_proj")
    assert bool((factors != 1).any())
    assert not [note for note in report.notes if "finite" in note]


def test_the_command_line_offers_awq(
    quantkit: Callable[..., Any], tiny_model: Path, tmp_path: Path, calibration_text: Path
) -> None:
    done = quantkit("convert", tiny_model, "--out", tmp_path / "out", "--method", "awq", "--group-size", 32,
                    "--samples", 4, "--seq-len", 32, "--calibration", calibration_text, "--damping", 0.05,
                    "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["method"] == "awq"
