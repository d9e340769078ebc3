"""``quantkit eval`` on tiny models.

Against transformers' own losses, against itself, and on requests that are wrong.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import quantkit
from quantkit.errors import QuantkitError, RequestError, SourceError
from quantkit.evaluate.api import evaluate
from quantkit.evaluate.prepare import prepare, prepare_baseline

EVAL_TEXT = (
    " ".join(
        f"A {a} {b} by the {c} sings to nobody."
        for a in ("red", "slow")
        for b in ("bird", "gate")
        for c in ("sea", "wall")
    )
    * 6
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("evaluation") / "evaluation.txt"
    path.write_text(EVAL_TEXT)
    return path


@pytest.fixture(scope="module")
def quantized(tiny_original: Path, calibration_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 bits in groups of 32, asymmetric, scales for a 4-bit cache."""
    out = tmp_path_factory.mktemp("quantized") / "out"
    quantkit.convert(
        tiny_original, out=out, method="rtn", bits=4, group_size=32, format="native", kv_bits=4,
        calibration=str(calibration_text), samples=4, seq_len=64,
    )  # fmt: skip
    return out


def transformers_losses(folder: Path, text: Path, seq_len: int) -> list[float]:
    """Window losses by transformers alone: its tokenizer, its model, its cross entropy."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(folder)(text.read_text(), add_special_tokens=False)["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    windows = torch.tensor(ids[: len(ids) // seq_len * seq_len]).reshape(-1, 1, seq_len)
    with torch.inference_mode():
        return [float(model(window, labels=window).loss) for window in windows]


def test_perplexity_is_that_of_transformers_own_loss(tiny_original: Path, text: Path) -> None:
    losses = torch.tensor(transformers_losses(tiny_original, text, 64), dtype=torch.float64)
    found = evaluate(tiny_original, data=str(text), seq_len=64)
    assert found.perplexity == pytest.approx(math.exp(losses.mean()), rel=1e-5)
    assert found.stderr == pytest.approx(found.perplexity * float(losses.std()) / math.sqrt(len(losses)), rel=1e-3)
    assert (found.windows, found.scored_tokens, found.tokens) == (len(losses), 63 * len(losses), 64 * len(losses))
    assert (found.bits_per_weight, found.model_bits_per_weight, found.kv_bits) == (None, 16.0, 16)


def test_a_model_compared_with_itself_diverges_by_nothing(tiny_original: Path, text: Path) -> None:
    found = evaluate(tiny_original, baseline=tiny_original, data=str(text), seq_len=64)
    assert (found.kl_mean, found.kl_max, found.delta_ln_ppl, found.top1_agreement) == (0.0, 0.0, 0.0, 1.0)
    assert found.perplexity == found.baseline_perplexity


def test_divergence_of_a_quantized_model_is_that_of_the_two_full_softmaxes(
    tiny_original: Path, quantized: Path, text: Path
) -> None:
    """By hand: all logits at once, both models through ``load`` and ``__call__``."""
    found = evaluate(quantized, baseline=tiny_original, data=str(text), seq_len=64, kv_bits=16)
    ids = prepare(quantized, data=str(text), seq_len=64).windows.ids
    original = quantkit.load(tiny_original, dtype="float32")(ids)[:, :-1].double().log_softmax(-1)
    model = quantkit.load(quantized, dtype="float32", dequantize=True, kv_bits=16)(ids)[:, :-1].double().log_softmax(-1)
    kl = (original.exp() * (original - model)).sum(-1)
    assert found.kl_mean == pytest.approx(float(kl.mean()), rel=1e-3)
    # one token's KL of 4e-4 is a difference of float32 logarithms near 6, each right to 2**-22
    assert found.kl_max == pytest.approx(float(kl.max()), rel=1e-3, abs=2e-6)
    assert found.top1_agreement == pytest.approx(float((original.argmax(-1) == model.argmax(-1)).double().mean()))
    assert found.kl_mean is not None
    assert found.kl_mean > 1e-4


def test_sizes_count_scales_and_zeros_and_tied_weights_once(quantized: Path, text: Path) -> None:
    found = evaluate(quantized, data=str(text), seq_len=64)
    # 64 or 96 inputs in groups of 32: 4 bits + (16-bit scale + 4-bit zero) / 32
    assert found.bits_per_weight == pytest.approx(4 + 20 / 32)
    from safetensors import safe_open

    stored = 0
    for path in quantized.glob("*.safetensors"):
        if path.name.startswith("quantkit_kv"):
            stored += path.stat().st_size  # a small file of its own: counted whole
            continue
        with safe_open(path, framework="pt") as file:
            stored += sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
    assert found.checkpoint_bytes == stored
    from transformers import AutoConfig, AutoModelForCausalLM

    config = json.loads((quantized / "config.json").read_text())
    config.pop("quantization_config")
    parameters = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).num_parameters()
    assert found.model_bits_per_weight == pytest.approx(8 * stored / parameters)


def test_the_cache_under_test_is_in_the_loop(tiny_original: Path, quantized: Path, text: Path) -> None:
    full, stored = (
        evaluate(quantized, baseline=tiny_original, data=str(text), seq_len=256, kv_bits=bits) for bits in (16, None)
    )
    assert (full.kv_bits, stored.kv_bits) == (16, 4)
    assert full.kl_mean != stored.kl_mean


def test_packed_kernels_are_measured_on_request(quantized: Path, text: Path) -> None:
    dense = evaluate(quantized, data=str(text), seq_len=64)
    packed = evaluate(quantized, data=str(text), seq_len=64, runtime=True)
    assert packed.runtime
    assert packed.perplexity == pytest.approx(dense.perplexity, rel=0.02)  # bf16 where the processor has it


def test_a_prepared_baseline_serves_several_evaluations(tiny_original: Path, quantized: Path, text: Path) -> None:
    prepared = prepare_baseline(tiny_original, prepare(tiny_original, data=str(text), seq_len=64))
    one = evaluate(quantized, baseline=prepared, data=str(text), seq_len=64)
    two = evaluate(quantized, baseline=tiny_original, data=str(text), seq_len=64)
    assert one.kl_mean == two.kl_mean
    with pytest.raises(RequestError, match="other tokens"):
        evaluate(quantized, baseline=prepared, data=str(text), seq_len=32)


def test_a_baseline_with_another_tokenizer_is_refused(tiny_model: Path, quantized: Path, text: Path) -> None:
    file = tiny_model / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["merges"] = content["model"]["merges"][:20]
    file.write_text(json.dumps(content))
    with pytest.raises(RequestError, match=r"tokenizers of .* differ: .* parting at token"):
        evaluate(quantized, baseline=tiny_model, data=str(text), seq_len=64)


def test_a_quantized_baseline_is_refused(quantized: Path, text: Path) -> None:
    with pytest.raises(RequestError, match="is quantized itself"):
        evaluate(quantized, baseline=quantized, data=str(text), seq_len=64, kv_bits=16)


def test_a_text_that_is_too_short_and_a_window_that_is_too_long(
    tiny_original: Path, tmp_path: Path, text: Path
) -> None:
    (tmp_path / "short.txt").write_text("Hello there.")
    with pytest.raises(SourceError, match="tokens: 0 windows of 64"):
        evaluate(tiny_original, data=str(tmp_path / "short.txt"), seq_len=64)
    with pytest.raises(RequestError, match="at most 256 tokens"):
        evaluate(tiny_original, data=str(text), seq_len=300)


def test_json_is_one_object_with_every_figure_and_nothing_else(
    tiny_original: Path, quantized: Path, text: Path, quantkit: Callable[..., Any]
) -> None:
    done = quantkit(
        "eval", quantized, "--baseline", tiny_original, "--data", text, "--seq_len", 64, "--tokens", 200, "--json"
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    promised = [
        "perplexity",
        "stderr",
        "tokens",
        "seq_len",
        "data",
        "data_sha256",
        "data_whole",
        "bos",
        "baseline_perplexity",
        "delta_ln_ppl",
        "delta_ln_ppl_stderr",
        "kl_mean",
        "kl_p99",
        "kl_max",
        "top1_agreement",
        "bits_per_weight",
        "model_bits_per_weight",
        "checkpoint_bytes",
        "kv_bits",
    ]
    assert set(promised) <= set(found)
    assert all(found[name] is not None for name in promised)
    assert (found["tokens"], found["windows"]) == (192, 3)


def test_the_table_shows_the_figures_and_what_they_were_measured_on(
    tiny_original: Path, quantized: Path, text: Path, quantkit: Callable[..., Any]
) -> None:
    done = quantkit("eval", quantized, "--baseline", tiny_original, "--data", text, "--seq-len", 64, "--tokens", 192)
    assert done.returncode == 0, done.stderr
    for part in (
        "perplexity",
        "KL divergence",
        "same top token",
        "delta ln ppl",
        "KV cache",
        "3 windows of 64",
        "no BOS",
    ):
        assert part in done.stdout
    assert "\x1b" not in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--html", "x.html"], 2, "has not landed yet"),
        (["--protocol", "wikitext"], 2, "gptq and llama.cpp"),
        (["--tokens", "10"], 2, "less than one window"),
        (["--kv-bits", "5"], 2, "16, 8, 4"),
        (["--dtype", "float8"], 2, "expected auto, float32"),
        (["--data", "builtin"], 2, "for calibration only"),
        (["--baseline", "nowhere"], 2, "no such folder"),
        (["--data", "nowhere.txt"], 1, "no such file"),
    ],
)
def test_a_wrong_request_is_refused_before_any_weight_is_read(
    options: list[str], code: int, message: str, tiny_original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from click.testing import CliRunner

    from quantkit.cli.eval import command

    monkeypatch.setattr("quantkit.model.weights.Weights.read", None)
    with pytest.raises(QuantkitError, match=message) as error:
        CliRunner().invoke(command, [str(tiny_original), "--seq-len", "64", *options], catch_exceptions=False)
    assert isinstance(error.value, RequestError) == (code == 2)


def test_nan_weights_are_told_by_name(tiny_model: Path, text: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(tiny_model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, tiny_model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(QuantkitError, match="NaN"):
        evaluate(tiny_model, data=str(text), seq_len=64)


def test_a_bitsandbytes_checkpoint_is_read_and_measured(
    tiny_original: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer script writes it; its sizes follow from the layout: 4 bits and an fp32 scale per 64 weights."""
    pytest.importorskip("bitsandbytes")
    import runpy
    import sys

    script = Path(__file__).resolve().parents[2] / "eval" / "peers" / "bnb.py"
    monkeypatch.setattr(sys, "argv", ["bnb.py", str(tiny_original), "--out", str(tmp_path / "nf4"), "--kind", "nf4"])
    runpy.run_path(str(script), run_name="__main__")
    assert json.loads(capsys.readouterr().out)["out"] == str(tmp_path / "nf4")
    found = evaluate(tmp_path / "nf4", baseline=tiny_original, data=str(text), seq_len=64)
    assert found.bits_per_weight == pytest.approx(4.5)
    assert found.kl_mean is not None
    assert 1e-5 < found.kl_mean < 0.1
    shutil.rmtree(tmp_path / "nf4")
