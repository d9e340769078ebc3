"""Every architecture converts, loads and generates: what transformers saved, what is written, what runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, MOE, tiny_model
from safetensors import safe_open

import quantkit as qk
from quantkit.runtime.kv_cache.transformers_cache import transformers_cache

PROMPT = "The old fox runs near the gate, and nobody runs twice. The small river waits"


def saved(name: str, folder: Path, tokenizer: Path, **changes: Any) -> Path:
    """A tiny model as ``save_pretrained`` writes it, with a tokenizer."""
    vocab = json.loads((tokenizer / "config.json").read_text())["vocab_size"]
    tiny_model(name, vocab_size=vocab, max_position_embeddings=128, **changes).half().save_pretrained(folder)
    for file in tokenizer.glob("*token*"):
        shutil.copy(file, folder / file.name)
    return folder


def stored_names(folder: Path) -> set[str]:
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as handle:
            names |= set(handle.keys())
    return names


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_generation_equals_transformers(name: str, tmp_path: Path, tiny_original: Path) -> None:
    """Unquantized, greedy, through our cache: sliding windows, soft caps, sinks, alibi, experts."""
    from transformers import AutoModelForCausalLM

    source = saved(name, tmp_path / "source", tiny_original)
    model = qk.load(source, device="cpu", dtype="float32")
    ids = torch.tensor([model.encode(PROMPT)])
    theirs = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(ids), theirs(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
    expected = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    batch = model.generate([PROMPT, "The"], max_tokens=12, ignore_eos=True)  # the second one is padded on the left
    assert batch[0].tokens == expected[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("format_name", ["native", "compressed-tensors"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_is_converted_runs_as_its_dequantized_twin(
    name: str, format_name: str, tmp_path: Path, tiny_original: Path, calibration_text: Path
) -> None:
    source, out = saved(name, tmp_path / "source", tiny_original), tmp_path / "out"
    report = qk.convert(
        source, out, method="gptq", bits=8, group_size=32, format=format_name, calibration=str(calibration_text),
        samples=4, seq_len=32, device="cpu",
    )  # fmt: skip
    assert all(layer.relative_output_error < 0.02 for layer in report.layers)
    packed = qk.load(out, device="cpu", dtype="float32", kernel="dequantize")
    dense = qk.load(out, device="cpu", dtype="float32", dequantize=True)
    original = qk.load(source, device="cpu", dtype="float32")
    ids = torch.tensor([packed.encode(PROMPT)])
    torch.testing.assert_close(packed(ids), dense(ids), rtol=1e-3, atol=1e-3)
    assert float((dense(ids) - original(ids)).norm() / original(ids).norm()) < 0.1
    assert packed.generate(PROMPT, max_tokens=6, ignore_eos=True).finish_reason == "length"
    modules = {layer.name for layer in report.layers}
    assert len(modules) == len(report.layers)
    for module in modules:
        assert any(stored.startswith(f"{module}.") for stored in stored_names(out))


@pytest.mark.parametrize("name", ["falcon", "falcon-alibi", "gemma2", "mixtral"])
def test_a_quantized_cache_fits_every_kind_of_attention(
    name: str, tmp_path: Path, tiny_original: Path, calibration_text: Path
) -> None:
    source, out = saved(name, tmp_path / "source", tiny_original), tmp_path / "out"
    qk.convert(
        source, out, method="rtn", bits=8, group_size=32, kv_bits=8, calibration=str(calibration_text), samples=4,
        seq_len=64, device="cpu",
    )  # fmt: skip
    quantized, plain = (
        qk.load(out, device="cpu", dtype="float32", kernel="dequantize", kv_bits=bits) for bits in (8, 16)
    )
    ids = torch.randint(3, plain.vocabulary, (2, 128), generator=torch.Generator().manual_seed(0))

    @torch.inference_mode()
    def last(model: Any) -> torch.Tensor:
        seam = transformers_cache(model.new_cache())
        model.step(ids[:, :127], seam, [127, 120])
        hidden: torch.Tensor = model.step(ids[:, 127:], seam)[:1]  # its first page is packed
        return hidden

    assert 0 < float((last(quantized) - last(plain)).norm() / last(plain).norm()) < 0.05


@pytest.mark.parametrize(
    ("name", "experts", "router"),
    [
        ("mixtral", "block_sparse_moe.experts.{}.w{}", "block_sparse_moe.gate"),
        ("qwen3_moe", "mlp.experts.{}.{}_proj", "mlp.gate"),
        ("gpt_oss", "mlp.experts.{}.{}_proj", "mlp.router"),
    ],
)
def test_experts_are_written_one_by_one_under_the_names_of_the_family(
    name: str, experts: str, router: str, tmp_path: Path, tiny_original: Path, calibration_text: Path
) -> None:
    source, out = saved(name, tmp_path / "source", tiny_original), tmp_path / "out"
    qk.convert(source, out, method="rtn", bits=4, group_size=32, format="compressed-tensors", device="cpu")
    parts = (1, 2, 3) if name == "mixtral" else ("gate", "up", "down")
    names = stored_names(out)
    for layer in (0, 2):
        for expert in range(4):
            for part in parts:
                assert f"model.layers.{layer}.{experts.format(expert, part)}.weight_packed" in names
        assert f"model.layers.{layer}.{router}.weight" in names
    if name == "gpt_oss":
        assert "model.layers.1.mlp.experts.3.down_proj.bias" in names
        assert not any("gate_up_proj" in stored for stored in names)
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert f"model.layers.0.{router}" in ignored


def test_an_expert_that_is_never_routed_to_is_converted_and_named(
    tmp_path: Path, tiny_original: Path, calibration_text: Path
) -> None:
    from safetensors.torch import load_file, save_file

    source = saved("gpt_oss", tmp_path / "source", tiny_original)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.router.bias"][2] = -1e4  # nobody chooses expert 2 of layer 1
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    report = qk.convert(
        source, tmp_path / "out", method="gptq", bits=8, group_size=32, format="native",
        calibration=str(calibration_text), samples=8, seq_len=64, device="cpu",
    )  # fmt: skip
    note = next(note for note in report.notes if "layers.1.mlp.experts" in note)
    assert "2 (0)" in note
    starved = [layer for layer in report.layers if layer.name.startswith("model.layers.1.mlp.experts.2.")]
    assert [layer.tokens for layer in starved] == [0, 0, 0]
    assert all(layer.relative_output_error < 0.02 for layer in starved)


@pytest.mark.parametrize("name", [n for n in MOE if n != "gpt_oss"])
def test_experts_stored_in_one_tensor_are_read_too(name: str, tmp_path: Path, tiny_original: Path) -> None:
    """The same model twice: as transformers saves it (one tensor per expert), and as it holds it (fused)."""
    from safetensors.torch import save_file

    source = saved(name, tmp_path / "source", tiny_original)
    vocab = json.loads((source / "config.json").read_text())["vocab_size"]
    fused = Path(shutil.copytree(source, tmp_path / "fused"))
    state = tiny_model(name, vocab_size=vocab, max_position_embeddings=128).half().state_dict()
    save_file({key: value.contiguous() for key, value in state.items()}, fused / "model.safetensors")
    assert any(key.endswith("experts.gate_up_proj") for key in stored_names(fused))
    assert not any(key.endswith("experts.gate_up_proj") for key in stored_names(source))
    outs = []
    for folder in (source, fused):
        out = tmp_path / f"{folder.name}-out"
        qk.convert(folder, out, method="rtn", bits=4, group_size=32, format="compressed-tensors", device="cpu")
        outs.append(out)
    assert stored_names(outs[0]) == stored_names(outs[1])
    ids = torch.arange(5, 30)[None]
    a, b = (qk.load(out, device="cpu", dtype="float32")(ids) for out in outs)
    assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "zorglub"}, "model_type 'zorglub' is unknown"),
        ({"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}, "mxfp4, but no tensor"),
    ],
)
def test_inspect_refuses_an_unknown_model_in_one_line(
    config: dict[str, Any], message: str, tmp_path: Path, quantkit: Any
) -> None:
    from safetensors.torch import save_file

    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"a.weight": torch.zeros(2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    done = quantkit("inspect", tmp_path)
    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
