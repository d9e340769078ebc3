"""Evaluation block by block: the same figures, and never more than one block in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import tiny_model

import quantkit
from quantkit.checkpoint.open import open_source
from quantkit.errors import NumericsError, RequestError
from quantkit.evaluate import streamed
from quantkit.evaluate.api import evaluate
from quantkit.evaluate.prepare import prepare
from quantkit.evaluate.sizes import count_parameters
from quantkit.evaluate.windows import EvaluationWindows
from quantkit.model.skeleton import build_skeleton, find_blocks

SAME = ("perplexity", "stderr", "kl_mean", "kl_p99", "kl_max", "top1_agreement", "baseline_perplexity", "delta_ln_ppl")
LAYERS = 12


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("evaluation") / "evaluation.txt"
    path.write_text(" ".join(f"A {a} bird by the {c} sings." for a in ("red", "slow") for c in ("sea", "wall")) * 12)
    return path


@pytest.fixture(scope="module")
def quantized(tiny_original: Path, calibration_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("quantized") / "out"
    quantkit.convert(
        tiny_original, out=out, method="rtn", bits=4, group_size=32, format="native", kv_bits=4,
        calibration=str(calibration_text), samples=4, seq_len=64,
    )  # fmt: skip
    return out


@pytest.fixture(scope="module")
def deep(tiny_original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve blocks with sliding windows in some of them, so that blocks get different masks."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("deep") / "model"
    tokenizer = AutoTokenizer.from_pretrained(tiny_original)
    config = AutoConfig.for_model(
        "gemma3_text", vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=LAYERS,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, sliding_window=8, max_position_embeddings=128,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_streamed_original_and_model_give_the_same_bits(tiny_original: Path, quantized: Path, text: Path) -> None:
    whole, passed = (
        evaluate(quantized, baseline=tiny_original, data=str(text), seq_len=64, kv_bits=16, stream=stream)
        for stream in (False, True)
    )
    assert {name: getattr(passed, name) for name in SAME} == {name: getattr(whole, name) for name in SAME}
    assert (whole.streamed, whole.baseline_streamed, passed.streamed, passed.baseline_streamed) == (
        False, False, True, True,
    )  # fmt: skip
    assert "the original and the model: one block in memory at a time" in passed.table()
    assert "one block" not in whole.table()


def test_blocks_with_arguments_of_their_own_get_them(deep: Path, text: Path) -> None:
    for protocol in ("gptq", "llama.cpp"):
        whole, passed = (
            evaluate(deep, data=str(text), seq_len=32, tokens=96, protocol=protocol, stream=stream)
            for stream in (False, True)
        )
        assert passed.perplexity == whole.perplexity


@pytest.mark.parametrize(
    "name", ["llama", "gemma2", "falcon", "falcon-new", "falcon-alibi", "gpt_neox", "opt", "gpt_oss"]
)
def test_each_kind_of_block_streams_to_the_whole_models_bits(name: str, tmp_path: Path) -> None:
    tiny_model(name).save_pretrained(tmp_path)
    ids = torch.randint(3, 100, (3, 17), generator=torch.Generator().manual_seed(1))
    windows = EvaluationWindows(ids, 0, "gptq", bos=False, stride=17)
    passed = streamed.stream(tmp_path, windows, device="cpu")
    whole = quantkit.load(tmp_path, device="cpu", dtype="float32")
    for window in ids:
        hidden = passed.hidden(window[None])
        assert torch.equal(hidden, whole.hidden(window[None]))
        assert torch.equal(passed.head(hidden), whole(window[None]))


def test_one_block_beside_embedding_and_head_is_all_that_is_loaded(
    deep: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    live: list[int] = []
    build, run = streamed.build_skeleton, streamed.run_block
    monkeypatch.setattr(streamed, "build_skeleton", lambda *args: made.append(build(*args)) or made[-1])

    def watched(*args: Any) -> Any:
        live.append(sum(p.numel() for p in made[-1].parameters() if not p.is_meta))
        return run(*args)

    monkeypatch.setattr(streamed, "run_block", watched)
    windows = prepare(deep, data=str(text), seq_len=32, tokens=96).windows
    streamed.stream(deep, windows)
    source = open_source(deep)
    in_blocks = sum(p.numel() for p in find_blocks(build_skeleton(source.config)).modules.parameters())
    outside = count_parameters(source) - in_blocks  # the head is tied
    assert len(live) == LAYERS * windows.count
    assert set(live) == {outside + in_blocks // LAYERS}
    assert all(p.is_meta for p in find_blocks(made[-1]).modules.parameters())


def test_a_model_that_does_not_fit_is_streamed_unasked(
    tiny_original: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = count_parameters(open_source(tiny_original)) * 4  # float32
    whole = evaluate(tiny_original, data=str(text), seq_len=64)
    for free, expected in ((needed / streamed.SHARE + 1, False), (needed / streamed.SHARE - 1, True)):
        monkeypatch.setattr(streamed, "free_bytes", lambda device, free=free: free)
        found = evaluate(tiny_original, data=str(text), seq_len=64)
        assert (found.streamed, found.perplexity) == (expected, whole.perplexity)
        assert not evaluate(tiny_original, data=str(text), seq_len=64, stream=False).streamed


def test_what_streaming_cannot_measure_is_refused_with_the_remedy(
    tiny_original: Path, quantized: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RequestError, match=r"--stream does not pass through a quantized KV cache.*--kv-bits 16"):
        evaluate(quantized, data=str(text), seq_len=64, stream=True)
    with pytest.raises(RequestError, match="--runtime measures packed ones"):
        evaluate(quantized, data=str(text), seq_len=64, stream=True, runtime=True)
    monkeypatch.setattr(streamed, "free_bytes", lambda device: 0)
    with pytest.raises(RequestError, match=r"does not fit into memory.*--no-stream"):
        evaluate(quantized, data=str(text), seq_len=64)
    assert not evaluate(quantized, data=str(text), seq_len=64, runtime=True).streamed


def test_states_of_other_tokens_are_not_made_up(tiny_original: Path, text: Path) -> None:
    windows = prepare(tiny_original, data=str(text), seq_len=64).windows
    passed = streamed.stream(tiny_original, windows)
    whole = quantkit.load(tiny_original, dtype="float32")
    assert torch.equal(passed.hidden(windows.ids[1:2]), whole.hidden(windows.ids[1:2]))
    with pytest.raises(RequestError, match="not among the windows"):
        passed.hidden(windows.ids[1:2] + 1)


def test_a_damaged_block_is_named(tiny_model: Path, text: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(tiny_model / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"][0, 0] = float("inf")
    save_file(tensors, tiny_model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NumericsError, match=r"model\.layers\.2\.mlp\.up_proj\.weight"):
        evaluate(tiny_model, data=str(text), seq_len=64, stream=True)
