"""``--guided``: tokens count by what they mean to the model's output.

What GPTQ is given, against autograd through the whole model; stopped jobs; experts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import tiny_model as tiny_architecture
from stopping import stop_at, watch
from transformers import AutoModelForCausalLM, AutoTokenizer
from written import digest

import quantkit
from quantkit.algorithms.guide import fit_guide
from quantkit.calibrate.data import load_windows
from quantkit.checkpoint.open import open_source
from quantkit.checkpoint.tokenizer import load_tokenizer
from quantkit.convert import run
from quantkit.convert.job.records import NUMBERS
from quantkit.convert.options.options import ConvertOptions
from quantkit.convert.plan.memory_inputs import guide_bytes
from quantkit.convert.plan.plan import make_plan
from quantkit.convert.results import InputGroup
from quantkit.convert.stages import sensitivity

SHORT: dict[str, Any] = dict(
    method="gptq",
    bits=4,
    group_size=32,
    format="native",
    samples=6,
    seq_len=48,
    guided=True,
    matmul_precision="float32",
)
LINEARS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


def given_to_gptq(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[InputGroup]]:
    """Statistics of every block, as it is quantized; filled by a conversion."""
    found: dict[str, list[InputGroup]] = {}
    quantize = run.quantize_block

    def seen(solver: Any, prefix: str, block: Any, groups: Any, *rest: Any) -> None:
        found[prefix] = list(groups)
        quantize(solver, prefix, block, groups, *rest)

    monkeypatch.setattr(run, "quantize_block", seen)
    return found


def one_window(
    model: Any, ids: torch.Tensor, uniform: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """States in front of the first block, what its linears read, and the mean square of gradients.

    The gradients are those at the linears' outputs, of labels drawn by ``uniform``.
    """
    outputs: dict[str, torch.Tensor] = {}
    reads: dict[str, torch.Tensor] = {}

    def keep(name: str, read: torch.Tensor, output: torch.Tensor) -> None:
        reads[name], outputs[name] = read.detach(), output

    linears = [model.model.layers[0].get_submodule(name) for name in LINEARS]
    hooks = [
        one.register_forward_hook(lambda m, a, o, n=n: keep(n, a[0], o))
        for n, one in zip(LINEARS, linears, strict=True)
    ]
    start = model.get_input_embeddings()(ids[None]).detach().requires_grad_(True)
    logits = model(inputs_embeds=start, use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    below = logits.detach().softmax(-1).double().cumsum(-1)
    labels = torch.searchsorted(below, uniform.double()[:, None]).clamp(max=logits.shape[-1] - 1)
    gradients = torch.autograd.grad(logits.log_softmax(-1).gather(1, labels).sum(), [outputs[name] for name in LINEARS])
    return start.detach(), reads, {n: g[0].square().mean(-1) for n, g in zip(LINEARS, gradients, strict=True)}


def test_statistics_of_the_first_block_are_weighted_by_what_autograd_says_of_the_whole_model(
    tiny_original: Path, calibration_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = given_to_gptq(monkeypatch)
    quantkit.convert(
        tiny_original,
        out=tmp_path / "out",
        calibration=str(calibration_text),
        **{**SHORT, "samples": 8, "seq_len": 160},
    )
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_original, dtype=torch.float32).eval()
    tokenizer = load_tokenizer(open_source(tiny_original))
    ids = load_windows(str(calibration_text), tokenizer, samples=8, seq_len=160, seed=0, vocab_size=512).ids
    draws = torch.rand(ids.shape, generator=torch.Generator().manual_seed(0))
    hidden, inputs, squares = zip(*(one_window(model, *pair) for pair in zip(ids, draws, strict=True)), strict=True)
    block = model.model.layers[0]
    guide = fit_guide({name: block.get_submodule(name).out_features for name in LINEARS}, hidden, squares)
    assert guide is not None
    assert len(groups["model.layers.0"]) == 4
    moved = []
    for group in groups["model.layers.0"]:
        weights = torch.cat(
            [one for state in hidden for one in guide.weights([group.names], state) if one is not None]
        ).double()
        x = torch.cat([reads[group.names[0]].flatten(0, -2) for reads in inputs]).double()
        assert group.hessian is not None
        wanted = (x * weights[:, None]).t() @ x / weights.sum()
        plain = x.t() @ x / len(x)
        torch.testing.assert_close(group.hessian, wanted, rtol=2e-3, atol=2e-3 * float(wanted.diagonal().mean()))
        moved.append(float((wanted - plain).norm() / plain.norm()))
    assert max(moved) > 0.02, moved  # it would be seen


@pytest.mark.usefixtures("states_after_each_block")
@pytest.mark.parametrize(
    "more", [{}, dict(target_bpw=4.5), dict(gptaq=True, fold=True)], ids=["alone", "bits", "gptaq"]
)
def test_a_job_that_stopped_goes_on_to_the_same_bytes_without_measuring_again(
    more: dict[str, Any], tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    options = {**SHORT, **more, "calibration": str(calibration_text)}
    if "target_bpw" in more:
        del options["bits"]
    quantkit.convert(tiny_original, out=tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        quantkit.convert(tiny_original, out=tmp_path / "out", on_progress=stop_at("blocks", 2), **options)
    stages: list[str] = []
    quantkit.convert(tiny_original, out=tmp_path / "out", resume=True, on_progress=watch(stages), **options)
    assert "blocks" in stages
    assert "measure" not in stages
    assert digest(tmp_path / "out") == digest(tmp_path / "whole")


def test_experts_tokens_count_alike_and_those_of_all_other_linears_do_not(
    tiny_original: Path, calibration_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_original)
    tiny_architecture("qwen3_moe", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "source")
    tokenizer.save_pretrained(tmp_path / "source")
    found: dict[bool, list[InputGroup]] = {}
    for guided in (False, True):
        with monkeypatch.context() as patch:
            groups = given_to_gptq(patch)
            quantkit.convert(
                tmp_path / "source",
                out=tmp_path / f"{guided}",
                calibration=str(calibration_text),
                **{**SHORT, "guided": guided},
            )
            found[guided] = groups["model.layers.0"]
    blocks = make_plan(
        ConvertOptions(str(tmp_path / "source"), tmp_path / "plan", calibration=str(calibration_text), **SHORT)
    ).blocks
    one = 2 * 33 + 5 * 36  # attention's four linears and the router, no experts
    assert guide_bytes(32, blocks) == len(blocks) * 8 * one
    for plain, weighted in zip(found[False], found[True], strict=True):
        assert plain.hessian is not None
        assert weighted.hessian is not None
        assert torch.equal(plain.hessian, weighted.hessian) == ("experts" in plain.names[0]), plain.names


@pytest.mark.parametrize("kept", ["rule", "none"])
def test_linears_beside_one_that_is_kept_are_weighed_and_where_nothing_is_known_a_note_says_so(
    kept: str, tiny_original: Path, calibration_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kept == "none":  # as if no gradient had been finite in the first block
        fit = sensitivity.fit_guide
        calls: list[int] = []
        monkeypatch.setattr(
            sensitivity, "fit_guide", lambda *args: (calls.append(1), None if len(calls) == 3 else fit(*args))[1]
        )
    hessians = {}
    for guided in (False, True):
        with monkeypatch.context() as patch:
            groups = given_to_gptq(patch)
            report = quantkit.convert(
                tiny_original,
                out=tmp_path / f"{guided}",
                calibration=str(calibration_text),
                **{**SHORT, "guided": guided, "rules": ["*.v_proj=keep"] if kept == "rule" else []},
            )
            hessians[guided] = {group.names: group.hessian for group in groups["model.layers.0"]}
    same = [torch.equal(hessians[False][names], hessians[True][names]) for names in hessians[True]]
    assert same == [kept == "none"] * 4
    told = [note for note in report.notes if "every token counts the same for" in note]
    assert len(told) == (kept == "none")
    assert all(note.startswith("model.layers.0: ") and "self_attn.q_proj" in note for note in told)


@pytest.mark.parametrize("damage", ["truncated", "gone"])
def test_a_job_whose_kept_numbers_are_damaged_measures_again_with_the_same_result(
    damage: str, tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    options = {**SHORT, "calibration": str(calibration_text)}
    quantkit.convert(tiny_original, out=tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        quantkit.convert(tiny_original, out=tmp_path / "out", on_progress=stop_at("blocks", 0), **options)
    numbers = tmp_path / ".out.work" / NUMBERS
    plan = make_plan(ConvertOptions(str(tiny_original), tmp_path / "other", **options))
    foretold = guide_bytes(plan.weights.model.config.hidden_size, plan.blocks)
    assert foretold < numbers.stat().st_size < 1.1 * foretold + 8192  # names and shapes come on top
    if damage == "gone":
        numbers.unlink()
    else:
        numbers.write_bytes(numbers.read_bytes()[:-100])
    stages: list[str] = []
    quantkit.convert(tiny_original, out=tmp_path / "out", resume=True, on_progress=watch(stages), **options)
    assert "measure" in stages
    assert digest(tmp_path / "out") == digest(tmp_path / "whole")


def test_the_prediction_counts_what_measuring_takes(
    tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    common: dict[str, Any] = {**SHORT, "calibration": str(calibration_text)}
    phases = {
        guided: make_plan(
            ConvertOptions(str(tiny_original), tmp_path / "out", **{**common, "guided": guided})
        ).prediction.phases
        for guided in (False, True)
    }
    assert "measure" in phases[True]
    assert "measure" not in phases[False]
