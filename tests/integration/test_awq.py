"""``--method awq`` through the whole pipeline, on tiny random models: written weights compute what was measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.checkpoint.source import FolderSource
from quantkit.convert import options as convert_options
from quantkit.convert.fold import fold_block
from quantkit.convert.plan import make_plan
from quantkit.convert.run import convert
from quantkit.errors import QuantkitError
from quantkit.model.skeleton import block_linears
from quantkit.runtime.load import load

TEXT = dict(samples=8, seq_len=32, group_size=32)


def plant_outliers(folder: Path) -> None:
    """Norms that make a few channels large, as trained models have them; the function of the model changes, but stays sane."""
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
        report = convert(tiny_model, tmp_path / method, method=method, calibration=str(calibration_text), **TEXT)
        assert report.verified_tensors > 0
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
    convert(tiny_model, tmp_path / "out", method="awq", bits=8, kv_bits=8, calibration=str(calibration_text), **TEXT)
    assert divergence(logits(tiny_model), logits(tmp_path / "out")) < 1e-3


def test_a_kept_linear_is_scaled_with_its_siblings(tiny_model: Path, tmp_path: Path, calibration_text: Path) -> None:
    plant_outliers(tiny_model)
    rules = ("*.mlp.*=keep", "*.v_proj=keep")
    try:
        convert(
            tiny_model, tmp_path / "out", method="awq", bits=8, rules=rules, calibration=str(calibration_text), **TEXT
        )
    except QuantkitError:  # engines run q, k, v as one matrix: the rules may demand one scheme
        rules = ("*.mlp.*=keep",)
        convert(
            tiny_model, tmp_path / "out", method="awq", bits=8, rules=rules, calibration=str(calibration_text), **TEXT
        )
    assert divergence(logits(tiny_model), logits(tmp_path / "out")) < 1e-4


def test_folding_a_block_leaves_its_function_unchanged(
    tiny_model: Path, tmp_path: Path, calibration_text: Path
) -> None:
    from quantkit.convert.block import BlockResult, InputGroup
    from quantkit.model.stepper import Call, input_groups, run_block

    plant_outliers(tiny_model)
    plan = make_plan(
        convert_options.ConvertOptions(
            str(tiny_model), tmp_path / "out", method="awq", calibration=str(calibration_text), **TEXT
        )  # type: ignore[arg-type]
    )
    block, prefix = plan.blocks.modules[0], plan.blocks.name(0)
    plan.weights.load(prefix)
    hidden = torch.randn(1, 8, 64)
    positions = plan.model.model.rotary_emb(hidden, torch.arange(8)[None])  # type: ignore[union-attr,operator]
    call = Call((), {"position_embeddings": positions})
    names = input_groups(block, hidden, call)
    assert sorted(n for g in names for n in g) == sorted(block_linears(block))
    groups = []
    for group in names:
        width = block.get_submodule(group[0]).in_features
        x = torch.randn(200, width).double() * torch.logspace(-1, 1, width)
        groups.append(InputGroup(group, x.t() @ x / 200, 200))  # type: ignore[operator]
    before, old = run_block(block, hidden, call), [g.hessian.clone() for g in groups if g.hessian is not None]
    result = BlockResult()
    done = fold_block(plan, prefix, block, groups, hidden, call, result)
    after = run_block(block, hidden, call)
    assert float((after - before).norm() / before.norm()) < 1e-5
    assert len(done) == 4
    for (fold, factors), group, h in zip(
        sorted(done, key=lambda d: names.index(_group(d[0].consumers, names))), groups, old, strict=True
    ):
        columns = fold.columns(group.names[0], factors).double()
        torch.testing.assert_close(group.hessian, h / torch.outer(columns, columns))
    assert set(result.parts) == {plan.weights.names[n] for n in plan.rewritten if n.startswith(prefix)}


def _group(consumers: Any, names: list[tuple[str, ...]]) -> tuple[str, ...]:
    return next(group for group in names if group[0] in consumers)


def test_the_command_line_offers_awq(
    quantkit: Callable[..., Any], tiny_model: Path, tmp_path: Path, calibration_text: Path
) -> None:
    done = quantkit("convert", tiny_model, "--out", tmp_path / "out", "--method", "awq", "--group-size", 32, "--samples", 4,
                    "--seq-len", 32, "--calibration", calibration_text, "--damping", 0.05, "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["method"] == "awq"
