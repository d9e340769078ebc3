"""What goes with GPTQ: AWQ's channel factors, the original's inputs, tokens that count by what they mean.

Factors come before it (``--fold``, which preset balanced sets); targets are of the original's inputs with ``--gptaq``;
tokens count by what they mean with ``--guided``, in balanced too.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import tiny_model as tiny_architecture

import quantkit
from quantkit.calibrate.data import load_windows
from quantkit.checkpoint.open import open_source
from quantkit.checkpoint.tokenizer import load_tokenizer
from quantkit.convert.options.options import ConvertOptions
from quantkit.convert.plan.plan import make_plan
from quantkit.errors import RequestError

NORM = "model.layers.1.input_layernorm.weight"


def test_channels_are_scaled_only_if_asked_for(tiny_original: Path, calibration_text: Path, tmp_path: Path) -> None:
    losses = {}
    for fold in (False, True):
        report = quantkit.convert(
            tiny_original, out=tmp_path / f"fold-{fold}", method="gptq", bits=3, group_size=32, format="native",
            fold=fold, calibration=str(calibration_text), samples=4, seq_len=64,
        )  # fmt: skip
        same = torch.equal(open_source(tmp_path / f"fold-{fold}").read(NORM), open_source(tiny_original).read(NORM))
        assert same == (not fold)
        losses[fold] = sum(layer.relative_output_error or 0.0 for layer in report.layers)
    assert losses[True] < 1.1 * losses[False]


def test_balanced_folds(tiny_original: Path, tmp_path: Path) -> None:
    from quantkit.convert.options.presets import apply_preset

    asked = ConvertOptions(str(tiny_original), tmp_path / "out", **apply_preset("balanced", {}))
    assert asked.method == "gptq"
    assert asked.folds
    assert asked.guided


@pytest.mark.parametrize(("method", "reason"), [("awq", "always scales channels"), ("rtn", "does not scale channels")])
def test_fold_beside_another_method_is_refused(tiny_original: Path, tmp_path: Path, method: str, reason: str) -> None:
    with pytest.raises(RequestError, match=f"--fold has no effect: --method {method} {reason}"):
        quantkit.convert(tiny_original, out=tmp_path / "out", method=method, fold=True)


def inputs_of_block_1(model: torch.nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every linear's inputs there, float32 [tokens, in], by name."""
    seen: dict[str, torch.Tensor] = {}
    linears = {n: m for n, m in model.model.layers[1].named_modules() if isinstance(m, torch.nn.Linear)}
    hooks = [
        linear.register_forward_pre_hook(lambda m, args, n=name: seen.update({n: args[0].flatten(0, 1)}))
        for name, linear in linears.items()
    ]
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return seen


def test_gptaq_brings_outputs_nearer_to_those_of_the_original_inputs(
    tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    """Block 0 sees the original's inputs and comes out the same.

    In block 1 every linear's output is nearer to what the original has there.
    """
    original = quantkit.load(tiny_original, device="cpu", dtype="float32").module
    ids = load_windows(
        str(calibration_text), load_tokenizer(open_source(tiny_original)), samples=8, seq_len=64, seed=0, vocab_size=512
    ).ids
    wanted = inputs_of_block_1(original, ids)
    errors: dict[bool, dict[str, float]] = {}
    first: dict[bool, dict[str, torch.Tensor]] = {}
    for gptaq in (False, True):
        quantkit.convert(
            tiny_original, out=tmp_path / f"{gptaq}", method="gptq", bits=3, group_size=32, format="native",
            gptaq=gptaq, calibration=str(calibration_text), samples=8, seq_len=64, matmul_precision="float32",
        )  # fmt: skip
        quantized = quantkit.load(tmp_path / f"{gptaq}", device="cpu", dtype="float32", dequantize=True).module
        first[gptaq] = dict(quantized.model.layers[0].state_dict())
        mixed = quantkit.load(tiny_original, device="cpu", dtype="float32").module
        mixed.model.layers[0] = quantized.model.layers[0]
        errors[gptaq] = {
            name: float((wanted[name] @ original.model.layers[1].get_parameter(f"{name}.weight").T
                         - x @ quantized.model.layers[1].get_parameter(f"{name}.weight").T).square().sum())
            for name, x in inputs_of_block_1(mixed, ids).items()
        }  # fmt: skip
    assert all(torch.equal(value, first[True][name]) for name, value in first[False].items())
    assert len(errors[True]) == 7
    assert all(error < errors[False][name] for name, error in errors[True].items()), errors


def test_gptaq_beside_another_method_is_refused(tiny_original: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="--gptaq has no effect: --method awq has no targets"):
        quantkit.convert(tiny_original, out=tmp_path / "out", method="awq", gptaq=True)


def test_guided_beside_another_method_is_refused(tiny_original: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="--guided has no effect: --method awq does not weigh tokens"):
        quantkit.convert(tiny_original, out=tmp_path / "out", method="awq", guided=True)


@pytest.mark.parametrize("asked", ["gptaq", "guided"])
@pytest.mark.parametrize("wanted", [True, False])
def test_a_plan_says_that_experts_are_no_part_of_it(
    asked: str, wanted: bool, tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_original)
    tiny_architecture("qwen3_moe", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "source")
    tokenizer.save_pretrained(tmp_path / "source")
    options: dict[str, Any] = {asked: wanted}
    plan = ConvertOptions(
        str(tmp_path / "source"),
        tmp_path / "out",
        **options,
        calibration=str(calibration_text),
        samples=4,
        seq_len=32,
    )
    said = [warning for warning in make_plan(plan).warnings if warning.startswith(f"--{asked}: not for the experts")]
    assert len(said) == wanted
    assert all("model.layers.0.mlp.experts" in warning for warning in said)
