"""convert --kv-bits, --kv-scales, --kv-budget: what is measured, chosen, stored and reported.

On originals and on quantized models.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from stopping import stop_at
from written import digest

import quantkit as qk
from quantkit.algorithms.kv import fit_range
from quantkit.checkpoint.open import open_source
from quantkit.cli.inspect import command as inspect
from quantkit.convert import api
from quantkit.convert.options.options import ConvertOptions
from quantkit.convert.repack.plan import plan_repack
from quantkit.convert.report.dry_run import describe
from quantkit.core.kvpages import rotate
from quantkit.core.kvscheme import KVPlan, KVScheme, LayerScales
from quantkit.errors import QuantkitError, QuantkitWarning, RequestError
from quantkit.formats.kv_scales import FILE_NAME, read_kv_plan, write_kv_plan

SMALL: dict[str, Any] = dict(samples=2, seq_len=32, group_size=32, method="rtn", device="cpu")
BUDGET: dict[str, Any] = {**SMALL, "seq_len": 256, "kv_budget": 3.0}
LAYERS = [f"model.layers.{i}.self_attn" for i in range(3)]
Run = Callable[..., Any]


def plan_of(folder: Path) -> KVPlan:
    found = read_kv_plan(folder)
    assert found is not None
    return found


def quantization(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize(
    ("bits", "scales", "scheme"),
    [
        (4, "online", KVScheme(4, 4)),
        ("k4v2", "static", KVScheme(4, 2, "static")),
        ("2", "online", KVScheme(2, 2, recent=128)),
        ("k16v3", "online", KVScheme(16, 3)),
    ],
    ids=str,
)
def test_bits_and_static_scales_are_stored_whichever_scales_are_chosen(
    bits: Any, scales: str, scheme: KVScheme, tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    report = qk.convert(
        tiny_original, tmp_path / "out", kv_bits=bits, kv_scales=scales, calibration=str(calibration_text), **SMALL
    )
    plan = plan_of(tmp_path / "out")
    assert plan.scheme == scheme
    assert plan.layers == dict.fromkeys(LAYERS, scheme)
    assert sorted(plan.static) == LAYERS
    assert report.kv_bits == scheme.label
    assert report.cache is not None
    assert report.cache["code_bits"] == (scheme.keys + scheme.values) / 2
    assert report.to_json()["cache"] == report.cache
    assert quantization(tmp_path / "out")["kv_cache_scheme"] is None
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert not [name for name in stored if "k_scale" in name or "v_scale" in name]


def test_static_scales_are_those_of_the_models_own_keys_and_values(
    tiny_original: Path, calibration_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    windows: list[torch.Tensor] = []
    make_plan = api.make_plan

    def planned(*args: Any) -> Any:
        plan = make_plan(*args)
        assert plan.inputs.calibration is not None
        windows.append(plan.inputs.calibration.ids)
        return plan

    monkeypatch.setattr(api, "make_plan", planned)
    asked: dict[str, Any] = {**SMALL, "calibration": str(calibration_text), "matmul_precision": "float32"}
    qk.convert(tiny_original, tmp_path / "out", kv_bits=3, **asked)
    model = AutoModelForCausalLM.from_pretrained(tiny_original, dtype=torch.float32)
    with torch.no_grad():
        cache = model(windows[0], use_cache=True).past_key_values
    found = plan_of(tmp_path / "out").static[LAYERS[0]]  # later layers read what quantized ones give
    for x, scale, low in (
        (cache.layers[0].keys, found.k_scale, found.k_low),
        (rotate(cache.layers[0].values), found.v_scale, found.v_low),
    ):
        wanted = fit_range(x[:, :, 4:].transpose(0, 1).flatten(1, 2).transpose(1, 2).contiguous(), 3)
        torch.testing.assert_close(scale, wanted[0], rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(low, wanted[1], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("method", ["rtn", "awq"])
def test_a_budget_is_kept_and_spent_where_rounding_costs_most(
    method: str, tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    report = qk.convert(
        tiny_original, tmp_path / "out", calibration=str(calibration_text), **{**BUDGET, "method": method}
    )
    plan, cache = plan_of(tmp_path / "out"), report.cache
    assert cache is not None
    schemes = list(plan.layers.values())
    assert sum(one.keys + one.values for one in schemes) <= 3.0 * 2 * len(schemes)
    assert cache["code_bits"] <= 3.0 < cache["stored_bits"]
    spent = [(row["damage"][side], row[side]) for row in cache["layers"] for side in ("keys", "values")]
    for damage, _ in spent:
        assert 0 < damage["8"] < damage["4"] < damage["3"] < damage["2"]
    gained = sum(damage["3"] - damage[str(bits)] for damage, bits in spent)
    assert gained >= 0  # no worse than 3 bits everywhere, by the measure
    assert all(one.recent == (128 if one.keys == 2 else 64) for one in schemes)
    manifest = json.loads((tmp_path / "out" / "quantkit.json").read_text())
    assert manifest["cache"] == cache
    lines = report.table().splitlines()
    assert any("KV cache 3" in line and "bits on average" in line for line in lines) or len(set(schemes)) == 1
    assert any("budget 3" in line for line in lines)


@pytest.mark.usefixtures("states_after_each_block")
def test_the_same_budget_gives_the_same_bytes_when_the_job_is_stopped_and_resumed(
    tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    asked = {**BUDGET, "calibration": str(calibration_text)}
    qk.convert(tiny_original, tmp_path / "wanted", **asked)
    with pytest.raises(KeyboardInterrupt):
        qk.convert(tiny_original, tmp_path / "out", on_progress=stop_at("blocks", 2), **asked)
    with pytest.raises(RequestError, match=r"--kv-budget: 3\.0 there, 4\.0 here"):
        qk.convert(tiny_original, tmp_path / "out", resume=True, **{**asked, "kv_budget": 4.0})
    report = qk.convert(tiny_original, tmp_path / "out", resume=True, **asked)
    assert report.cache is not None
    assert digest(tmp_path / "out") == digest(tmp_path / "wanted")


def test_fp8_scales_lie_where_other_engines_read_them(
    tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    asked = {**SMALL, "calibration": str(calibration_text), "symmetric": True}
    report = qk.convert(tiny_original, tmp_path / "out", kv_bits="fp8", **asked)
    assert not any("fp8" in warning for warning in report.warnings)
    plan, stored = plan_of(tmp_path / "out"), load_file(tmp_path / "out" / "model.safetensors")
    for name in LAYERS:
        for side in ("k", "v"):
            scale = stored[f"{name}.{side}_scale"]
            assert (scale.dtype, scale.shape) == (torch.float32, (1,))
            assert bool((getattr(plan.static[name], f"{side}_scale") == scale).all())
    assert quantization(tmp_path / "out")["kv_cache_scheme"] == {
        "num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False,
    }  # fmt: skip
    ids = torch.arange(10, 40)[None]
    qk.convert(
        tiny_original,
        tmp_path / "plain",
        **{k: v for k, v in asked.items() if k in ("group_size", "method", "symmetric", "device")},
    )
    with torch.no_grad():
        both = [
            AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)(ids).logits
            for name in ("out", "plain")
        ]
    assert float((both[0] - both[1]).norm() / both[1].norm()) < 0.1
    qk.convert(tmp_path / "out", tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(stored[name], again[name]) for name in stored | again)
    assert quantization(tmp_path / "again") == quantization(tmp_path / "out")
    (tmp_path / "again" / FILE_NAME).unlink()  # as another tool writes it
    with pytest.warns(
        QuantkitWarning, match=r"6 scales of an fp8 KV cache \(first .*\) are stored for other engines and not read"
    ):
        assert qk.load(tmp_path / "again", device="cpu").kv_bits == 16


def test_a_format_without_a_place_for_fp8_scales_says_so(
    tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    asked = {**SMALL, "calibration": str(calibration_text), "symmetric": True, "kv_bits": "fp8", "format": "gptq"}
    report = qk.convert(tiny_original, tmp_path / "out", **asked)
    assert any("--format compressed-tensors hands them on" in warning for warning in report.warnings)
    assert plan_of(tmp_path / "out").scheme.scales == "fp8"
    assert not [name for name in load_file(tmp_path / "out" / "model.safetensors") if "k_scale" in name]
    handed = qk.convert(tmp_path / "out", tmp_path / "ct", format="compressed-tensors")
    assert not any("fp8" in warning for warning in handed.warnings)
    assert f"{LAYERS[0]}.k_scale" in load_file(tmp_path / "ct" / "model.safetensors")


@pytest.mark.parametrize("form", ["compressed-tensors", "gptq", "native"])
def test_calibrating_a_quantized_model_adds_only_the_cache(
    form: str, tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    plain = dict(method="rtn", group_size=32, symmetric=True, device="cpu", format=form)
    qk.convert(tiny_original, tmp_path / "source", **plain)
    text = dict(samples=2, seq_len=32, calibration=str(calibration_text))
    report = qk.convert(tmp_path / "source", tmp_path / "out", kv_bits="k4v2", device="cpu", **text)
    assert (report.format, report.repacked_from, report.kv_bits) == (form, form, "k4v2")
    new = {file.name for file in (tmp_path / "out").iterdir()} - {f.name for f in (tmp_path / "source").iterdir()}
    assert new == {FILE_NAME}
    for file in (tmp_path / "source").iterdir():
        if file.name != "quantkit.json":
            assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes(), file.name
    direct = {**plain, **text, "kv_bits": "k4v2"}
    qk.convert(tiny_original, tmp_path / "direct", **direct)
    ours, theirs = plan_of(tmp_path / "out"), plan_of(tmp_path / "direct")
    assert ours.layers == theirs.layers
    first, other = ours.static[LAYERS[0]], theirs.static[LAYERS[0]]  # of rounded weights here, of exact ones there
    assert not torch.equal(first.k_scale, other.k_scale)
    assert float((first.k_scale / other.k_scale).log().abs().mean()) < 0.2


def test_a_quantized_model_takes_a_budget_fp8_and_new_bits(
    tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    qk.convert(tiny_original, tmp_path / "source", method="rtn", group_size=32, symmetric=True, device="cpu")
    text = dict(samples=2, calibration=str(calibration_text), device="cpu")
    report = qk.convert(tmp_path / "source", tmp_path / "a", kv_budget=2.5, seq_len=256, **text)
    assert report.cache is not None
    assert report.cache["code_bits"] <= 2.5
    (tmp_path / "a" / FILE_NAME).write_bytes(b"an old file that nobody reads any more")
    report = qk.convert(tmp_path / "a", tmp_path / "b", kv_bits="fp8", seq_len=32, **text)
    assert quantization(tmp_path / "b")["kv_cache_scheme"]["type"] == "float"
    with pytest.raises(RequestError, match=r"--kv-bits 16.*KV cache of fp8"):
        qk.convert(tmp_path / "b", tmp_path / "c", kv_bits=16)
    report = qk.convert(tmp_path / "b", tmp_path / "c", kv_bits=8, seq_len=32, **text)
    assert quantization(tmp_path / "c")["kv_cache_scheme"] is None
    assert f"{LAYERS[0]}.k_scale" not in load_file(tmp_path / "c" / "model.safetensors")
    assert plan_of(tmp_path / "c").scheme == KVScheme(8, 8)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(kv_bits=4, kv_budget=3.0), ["--kv-bits 4 with --kv-budget 3"]),
        (dict(kv_bits=16, kv_budget=3.0, seq_len=256), ["--kv-bits has no effect", "--kv-budget chooses the bits"]),
        (dict(kv_budget=1.5, seq_len=256), ["--kv-budget 1.5", "from 2 to 8"]),
        (dict(kv_budget=3.0, seq_len=128), ["--seq-len 128 with --kv-budget 3", "Use 256 or more"]),
        (dict(kv_bits=4, seq_len=4), ["--seq-len 4 with --kv-bits 4", "Use 5 or more"]),
        (dict(kv_bits=5), ["--kv-bits 5", "16, 8, 4, 3, 2"]),
        (dict(kv_bits="k4"), ["--kv-bits k4", "k4v2"]),
        (dict(kv_bits="k4v5"), ["--kv-bits k4v5", "16, 8, 4, 3, 2", "k4v2"]),
        (dict(kv_bits=4.5), ["--kv-bits 4.5", "16, 8, 4, 3, 2"]),
        (dict(kv_bits=True), ["--kv-bits True"]),
        (dict(kv_bits=4, kv_scales="dynamic"), ["--kv-scales dynamic", "online"]),
        (dict(kv_scales="static"), ["--kv-scales has no effect", "--kv-bits 16"]),
        (dict(kv_bits="fp8", kv_scales="static"), ["--kv-scales has no effect", "fp8"]),
    ],
    ids=str,
)
def test_options_that_cannot_be_are_refused(
    options: dict[str, Any], words: list[str], tiny_original: Path, tmp_path: Path
) -> None:
    with pytest.raises(RequestError) as caught:
        qk.convert(tiny_original, tmp_path / "out", method="rtn", **options)
    for word in words:
        assert word in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_budget_and_bits_together_end_with_exit_code_2(tiny_original: Path, tmp_path: Path, quantkit: Run) -> None:
    both = quantkit("convert", tiny_original, "--out", tmp_path / "out", "--kv-bits", "4", "--kv-budget", "3")
    assert both.returncode == 2
    assert "--kv-bits 4 with --kv-budget 3" in both.stderr


def inspected(folder: Path, *options: str) -> str:
    return CliRunner().invoke(inspect, [str(folder), *options], catch_exceptions=False).output


def test_inspect_shows_how_the_cache_is_kept(tiny_original: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_original, tmp_path / "model")
    assert "cache" not in inspected(tmp_path / "model")
    static = {name: LayerScales(*(torch.ones(2, 64) for _ in range(4))) for name in LAYERS}
    alike = KVPlan(KVScheme(4, 2), dict.fromkeys(LAYERS, KVScheme(4, 2)), static)
    write_kv_plan(tmp_path / "model", alike)
    shown = inspected(tmp_path / "model")
    assert "KV cache           k4v2, online scales: 3.500 bits per number with its scales" in shown
    assert "static scales      of 3 layers stored too" in shown
    assert "quantkit; other engines keep the cache their own way" in shown
    assert "keys  4" not in shown
    chosen = dict(zip(LAYERS, (KVScheme(4, 2), KVScheme(8, 3), KVScheme(4, 2)), strict=True))
    write_kv_plan(tmp_path / "model", KVPlan(KVScheme(4, 2), chosen, static))
    shown = inspected(tmp_path / "model")
    assert "KV cache           3.83 bits on average, online scales: 4.333 bits per number" in shown
    assert "   1 x keys  8, values  3 bits   layers 1\n" in shown
    assert "   2 x keys  4, values  2 bits   layers 0, 2\n" in shown
    found = json.loads(inspected(tmp_path / "model", "--json"))["kv_cache"]
    assert found["layers"][1] == {"name": LAYERS[1], "keys": 8, "values": 3}
    assert (found["scales"], found["static"], found["stored_bits"]) == ("online", 3, 4.3333)


def test_a_plan_in_words_names_the_cache(tiny_original: Path, calibration_text: Path, tmp_path: Path) -> None:
    asked = {**BUDGET, "calibration": str(calibration_text), "kv_scales": "static"}
    plan = api.make_plan(ConvertOptions(str(tiny_original), tmp_path / "out", **asked))
    assert "KV cache within 3 bits on average, static scales" in describe(plan)
    assert "vLLM, SGLang and other engines that load the weights keep their cache their own way" in describe(plan)
    given = {name: value for name, value in asked.items() if name != "kv_budget"}
    uniform = api.make_plan(ConvertOptions(str(tiny_original), tmp_path / "out", **given, kv_bits=3))
    heads, dim = plan.model.config.num_key_value_heads, plan.model.config.head_dim
    more = plan.prediction.phases["block"] - uniform.prediction.phases["block"]
    assert more >= 4 * 4 * heads * dim * 4096, "four times one side of a batch"
    qk.convert(tiny_original, tmp_path / "source", method="rtn", group_size=32)
    text = dict(kv_bits="k4v2", calibration=str(calibration_text), seq_len=32, samples=2)
    again = plan_repack(open_source(tmp_path / "source"), tmp_path / "out", text)
    assert again is not None
    assert "the same codes; KV cache k4v2, calibrated" in again.describe()
    assert "read by quantkit only: vLLM, SGLang" in again.describe()


def test_a_quantized_model_writes_the_text_that_calibrates_its_cache(tiny_original: Path, tmp_path: Path) -> None:
    qk.convert(tiny_original, tmp_path / "source", method="rtn", group_size=32)
    asked = dict(kv_bits=4, calibration="self", samples=2, seq_len=24)
    planned = plan_repack(open_source(tmp_path / "source"), tmp_path / "out", asked)
    assert planned is not None
    assert "the model writes 2 x 24 tokens first" in planned.describe()
    qk.convert(tmp_path / "source", tmp_path / "out", **asked)  # type: ignore[arg-type]
    qk.convert(tmp_path / "source", tmp_path / "again", **asked, seed=1)  # type: ignore[arg-type]
    first, other = (read_kv_plan(tmp_path / name) for name in ("out", "again"))
    assert first is not None
    assert other is not None
    assert set(first.static) == set(LAYERS)
    assert any(not torch.equal(first.static[name].k_scale, other.static[name].k_scale) for name in LAYERS)


def test_a_model_without_text_to_calibrate_from_is_not_touched(tiny_original: Path, tmp_path: Path) -> None:
    qk.convert(tiny_original, tmp_path / "source", method="rtn", group_size=32)
    with pytest.raises(QuantkitError, match=r"nowhere\.txt"):
        qk.convert(tmp_path / "source", tmp_path / "out", kv_bits=4, calibration=str(tmp_path / "nowhere.txt"))
    assert not (tmp_path / "out").exists()
