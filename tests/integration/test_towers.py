"""Models with vision towers: the language model is quantized, everything else is copied and loads again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from scripts import script

import quantkit as qk
from quantkit.convert.api import describe, plan_request

EVAL = Path(__file__).resolve().parents[2] / "eval"

VISION = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
)
IDS = torch.randint(3, 200, (2, 11), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="session")
def llava(tiny_original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny LLaVA with the tokenizer of the tiny model, a processor and a chat template; do not modify."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    folder = tmp_path_factory.mktemp("llava") / "model"
    text = json.loads((tiny_original / "config.json").read_text())
    config = AutoConfig.for_model(
        "llava", text_config=text, vision_config=dict(VISION, model_type="siglip_vision_model"), image_token_index=5,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_original / name, folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    (folder / "preprocessor_config.json").write_text('{"image_size": 16}')
    return folder


def test_the_language_model_is_quantized_and_the_tower_is_copied_bit_for_bit(
    llava: Path, calibration_text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    report = qk.convert(
        llava, out=out, method="gptq", group_size=32, calibration=str(calibration_text), samples=2, seq_len=32
    )
    assert len(report.layers) == 3 * 7
    assert any("model.vision_tower stays in 16 bit" in note for note in report.warnings)
    assert all("language_model" in layer.name for layer in report.layers)
    before, after = load_file(llava / "model.safetensors"), load_file(out / "model.safetensors")
    kept = [name for name in before if "vision" in name or "projector" in name]
    assert len(kept) > 10
    assert all(torch.equal(before[name], after[name]) for name in kept)
    ignored = set(json.loads((out / "config.json").read_text())["quantization_config"]["ignore"])
    linears = {name.removesuffix(".weight") for name in kept if name.endswith(("fc1.weight", "_proj.weight"))}
    assert linears <= ignored
    assert (out / "preprocessor_config.json").read_bytes() == (llava / "preprocessor_config.json").read_bytes()
    assert (out / "chat_template.jinja").exists()


def test_original_and_result_compute_what_transformers_computes(llava: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    reference = AutoModelForImageTextToText.from_pretrained(llava, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = reference(input_ids=IDS).logits
    torch.testing.assert_close(qk.load(llava, dtype="float32")(IDS), expected, rtol=0, atol=1e-5)
    out = tmp_path / "out"
    qk.convert(llava, out=out, method="rtn", bits=8, group_size=32)
    packed, dense = qk.load(out, dtype="float32"), qk.load(out, dtype="float32", dequantize=True)
    torch.testing.assert_close(packed(IDS), dense(IDS), rtol=1e-3, atol=1e-3)
    assert float((dense(IDS) - expected).norm() / expected.norm()) < 0.05
    text = qk.load(llava, dtype="float32").generate("The old fox", max_tokens=4, ignore_eos=True)
    assert len(text.tokens) == 4


def test_inspect_says_what_stays_and_why(llava: Path, quantkit: Callable[..., Any]) -> None:
    shown = quantkit("inspect", llava).stdout
    assert "model.vision_tower.*" in shown
    assert "tower, " in shown
    assert "3 x self_attn.q_proj" in shown
    data = json.loads(quantkit("inspect", llava, "--json").stdout)
    reasons = {entry["reason"] for entry in data["left_at_16_bit"]}
    assert {"tower", "embedding"} <= reasons
    quantized = sum(line["count"] * line["out_features"] * line["in_features"] for line in data["linears"])
    assert quantized + sum(entry["weights"] for entry in data["left_at_16_bit"]) == data["parameters"]


def test_a_matrix_that_blocks_share_is_told_among_what_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantkit: Callable[..., Any]
) -> None:
    monkeypatch.syspath_prepend(str(EVAL))
    tiny = script(EVAL / "tiny_models.py")
    tiny.tiny_model(tiny.Kind("causal", "zamba2")).save_pretrained(tmp_path / "model")
    data = json.loads(quantkit("inspect", tmp_path / "model", "--json").stdout)
    assert "shared by several blocks" in {entry["reason"] for entry in data["left_at_16_bit"]}
    quantized = sum(line["count"] * line["out_features"] * line["in_features"] for line in data["linears"])
    assert quantized + sum(entry["weights"] for entry in data["left_at_16_bit"]) == data["parameters"]


def test_a_plan_says_what_stays_and_why_with_any_method(llava: Path, tmp_path: Path) -> None:
    words = describe(plan_request(llava, tmp_path / "out", method="rtn", group_size=32))
    assert "model.vision_tower.* (tower, " in words
    assert "(embedding, " in words
