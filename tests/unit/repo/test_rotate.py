"""The rotation of a model's weights: its function stays, its outlying channels go.

What it cannot do is refused by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import tiny_config
from scripts import script

from quantkit.checkpoint.open import open_source
from quantkit.errors import UnsupportedModel
from quantkit.model.rotate import RotatedSource, hadamard, turn

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def rotate() -> Any:
    return script(ROOT / "eval" / "rotate.py")


def write_model(folder: Path, name: str, **changes: Any) -> Any:
    """A tiny model with gains away from 1 and one outlying channel, in a folder; the model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**tiny_config(name, hidden_size=24, num_attention_heads=3, **changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.rand_like(parameter) if parameter.dim() == 1 else 0.1 * torch.randn_like(parameter))
        model.get_input_embeddings().weight[:, 5] *= 20
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return model.eval()


def largest(weight: torch.Tensor) -> float:
    """How much the largest channel of the inputs is larger than the middle one."""
    sizes = weight.detach().square().mean(0).sqrt()
    return float(sizes.max() / sizes.median())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", dict(num_key_value_heads=1, head_dim=8)),
        ("mistral", dict(num_key_value_heads=3, head_dim=4, sliding_window=None)),
        ("qwen3", dict(num_key_value_heads=1, head_dim=12)),
    ],
)
def test_a_rotated_model_computes_what_the_original_does(rotate, tmp_path, name, changes, tied):
    from transformers import AutoModelForCausalLM

    model = write_model(tmp_path / "m", name, tie_word_embeddings=tied, **changes)
    assert rotate.rotate(tmp_path / "m", tmp_path / "r", 0) < 1e-4
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "r", dtype=torch.float32).eval()
    before, after = rotate.probe(model), rotate.probe(found)
    assert before.std() > 0.5
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    assert (found.model.norm.weight == 1).all()
    assert all((layer.input_layernorm.weight == 1).all() for layer in found.model.layers)
    assert not found.config.tie_word_embeddings
    assert found.lm_head.weight.data_ptr() != found.model.embed_tokens.weight.data_ptr()
    assert (tmp_path / "r" / "tokenizer.json").exists()
    outlying, spread = model.model.embed_tokens.weight, found.model.embed_tokens.weight
    assert largest(outlying) > 10
    assert largest(spread) < 2


def test_a_seed_gives_the_same_weights_and_another_seed_others(rotate, tmp_path):
    write_model(tmp_path / "m", "llama", num_key_value_heads=1, head_dim=8)
    source = open_source(tmp_path / "m")
    one, same, other = (RotatedSource(source, seed) for seed in (3, 3, 4))
    assert all(torch.equal(one.read(name), same.read(name)) for name in one.names())
    down = "model.layers.0.mlp.down_proj.weight"
    assert not torch.equal(one.read(down), other.read(down))
    assert one.digest() == same.digest() != other.digest() != source.digest()


def test_a_model_that_differs_afterwards_is_not_written(rotate, tmp_path, monkeypatch):
    """The check on logits sees a single head's rotation left out of v alone."""
    write_model(tmp_path / "m", "llama", num_key_value_heads=1, head_dim=8)
    right = RotatedSource.exact

    def wrong(source: RotatedSource, name: str, *given: Any, **more: Any) -> torch.Tensor:
        tensor = right(source, name, *given, **more)
        if name == "model.layers.1.self_attn.v_proj.weight":
            tensor[0] *= -1
        return tensor

    monkeypatch.setattr(RotatedSource, "exact", wrong)
    with pytest.raises(UnsupportedModel, match=r"a logit by .*nothing was written"):
        rotate.rotate(tmp_path / "m", tmp_path / "r", 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("gemma3_text", {}, "gemma3_text has norms after attention and MLP"),
        ("olmo2", {}, "olmo2 has norms after attention and MLP"),
        ("qwen2", {}, "qwen2 is none of llama, mistral, qwen3"),
        ("llama", dict(attention_bias=True), r"no rotation is known for .*(v|o)_proj\.bias \(a bias has to be rotated"),
        ("llama", dict(mlp_bias=True), r"no rotation is known for .*_proj\.bias \(a bias has to be rotated"),
    ],
)
def test_what_cannot_be_rotated_is_refused_by_name(rotate, tmp_path, name, changes, words):
    write_model(tmp_path / "m", name, num_key_value_heads=1, **changes)
    with pytest.raises(UnsupportedModel, match=words):
        rotate.rotate(tmp_path / "m", tmp_path / "r", 0)


def test_a_hadamard_matrix_is_found_or_refused():
    for size in (2, 4, 12, 20, 28, 36, 64, 128, 576):
        matrix = turn(torch.eye(size, dtype=torch.float64), hadamard(size))
        torch.testing.assert_close(matrix @ matrix.T, torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-12)
        torch.testing.assert_close(matrix.abs(), torch.full_like(matrix, size**-0.5), rtol=0, atol=1e-12)
        whole = hadamard(size)[0]
        for factor in hadamard(size)[1:]:
            whole = torch.kron(whole, factor)
        torch.testing.assert_close(matrix, whole / size**0.5)
    for size in (3, 6, 18, 23):
        with pytest.raises(UnsupportedModel, match=f"width {size}"):
            hadamard(size)


def test_a_suites_rotated_row_is_made_of_the_rotated_twin_and_judged_beside_the_twin(tmp_path, monkeypatch):
    suite = script(ROOT / "eval" / "run_suite.py")
    row = {"id": "a-rot", "model": "a", "label": "x", "rotate": True, "convert": ["--bits", "4"]}
    work = tmp_path / "work"
    (work / "twins" / "a").mkdir(parents=True)
    commands: list[list[str]] = []
    monkeypatch.setattr(suite, "execute", lambda command: commands.append(command[1:]) or json.dumps({"layers": 1}))
    runner = suite.Runner({"evaluation": {}, "row": [row]}, work, tmp_path)
    out, _, command = runner.quantize(row, work / "twins" / "a")
    source = work / "rotated" / "a"
    assert commands[0] == [str(ROOT / "eval" / "rotate.py"), str(work / "twins" / "a"), str(source)]
    assert commands[1][2:] == ["convert", str(source), "--out", str(out), "--bits", "4", "--json"]
    assert command == "python -m quantkit.cli.main convert ROTATED --out OUT --bits 4 --json"
    plain, made, _ = runner.quantize({key: row[key] for key in ("id", "model", "rotate")}, work / "twins" / "a")
    assert (plain, made) == (source, None)
