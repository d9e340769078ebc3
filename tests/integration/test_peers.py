"""Peers are told on facts: which layers they left alone is found by comparing, whatever they report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from scripts import script

from quantkit.calibrate.data import load_windows
from quantkit.checkpoint.open import open_source
from quantkit.checkpoint.tokenizer import load_tokenizer
from quantkit.evaluate.api import evaluate

PEERS = Path(__file__).resolve().parents[2] / "eval" / "peers"


def module(name: str) -> Any:
    return script(PEERS / f"{name}.py")


@pytest.fixture(scope="module")
def run() -> Any:
    sys.path.insert(0, str(PEERS))
    try:
        return module("run")
    finally:
        sys.path.remove(str(PEERS))


def test_every_environment_pins_torch_and_names_a_script(run: Any) -> None:
    peers = run.tomllib.loads((PEERS / "environments.toml").read_text(encoding="utf-8"))
    assert set(peers) == {"gptqmodel", "llm-compressor", "auto-round", "hqq", "torchao", "llama-cpp", "kv-cache"}
    for peer in peers.values():
        assert peer["install"][0].startswith("torch==")
        assert all("==" in requirement for requirement in peer["install"])
        assert (PEERS / peer["script"]).exists()


def test_rows_of_the_suite_ask_for_methods_that_their_peer_has(run: Any) -> None:
    peers = run.tomllib.loads((PEERS / "environments.toml").read_text(encoding="utf-8"))
    suites = [
        run.tomllib.loads((PEERS.parent / "suites" / f"{name}.toml").read_text(encoding="utf-8"))
        for name in ("peers", "llamacpp")
    ]
    asked = [row["peer"] for suite in suites for row in suite["row"] if "peer" in row]
    for words in asked:
        assert words[words.index("--method") + 1] in peers[words[1]]["methods"]
    assert {words[1] for words in asked} == set(peers) - {"kv-cache"}
    for name in ("kv", "kv-2k", "kv-planted"):
        suite = run.tomllib.loads((PEERS.parent / "suites" / f"{name}.toml").read_text(encoding="utf-8"))
        caches = [row["cache"] for row in suite["row"] if "cache" in row]
        assert caches
        assert {words[1] for words in caches} <= set(peers["kv-cache"]["methods"])


def test_the_tokens_are_those_that_convert_calibrates_on(
    tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = dict(samples=3, seq_len=32, seed=5)
    written = module("tokens").write_tokens(
        str(tiny_original), tmp_path / "t.safetensors", calibration=str(calibration_text), **options
    )
    tokenizer = load_tokenizer(open_source(tiny_original))
    ours = load_windows(str(calibration_text), tokenizer, vocab_size=len(tokenizer), **options)
    assert torch.equal(load_file(tmp_path / "t.safetensors")["input_ids"], ours.ids)
    assert written.digest() == ours.digest()


def test_what_a_peer_changed_and_left_alone_is_found_by_comparing(
    run: Any, tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    source = open_source(tiny_original)
    dense = {name: source.read(name).float() for name in source.names()}
    linears = [name for name in dense if "_proj" in name]
    for name in linears[1:]:
        dense[name] += 0.01
    dense["model.layers.0.input_layernorm.weight"] *= 2
    dense["model.embed_tokens.weight"] = (
        dense["model.embed_tokens.weight"].bfloat16().float()
    )  # loaded in it: not changed
    save_file(dense, tmp_path / "dense.safetensors")
    facts = {"quantized_bytes": 1000, "checkpoint_bytes": 5000}
    found = run.judge_dense(source, tmp_path, facts)
    weights = sum(dense[name].numel() for name in linears[1:])
    assert found["bits_per_weight"] == pytest.approx(8000 / weights)
    assert (found["layers"], found["left_alone"]) == (len(linears) - 1, [linears[0].removesuffix(".weight")])
    assert found["changed_besides"] == ["model.layers.0.input_layernorm.weight"]
    assert found["cast"] == {"bfloat16": 1, "float16": 0}
    read = open_source(tmp_path)
    assert all(torch.equal(read.read(name), dense[name]) for name in source.names())
    done = evaluate(tmp_path, baseline=tiny_original, data=str(calibration_text), seq_len=64, tokens=128)
    assert done.kl_mean is not None
    assert 0.005 < done.kl_mean < 0.15  # measured 0.028


def test_a_result_that_lacks_a_tensor_is_no_result(run: Any, tiny_original: Path, tmp_path: Path) -> None:
    source = open_source(tiny_original)
    save_file({name: source.read(name) for name in source.names()[1:]}, tmp_path / "dense.safetensors")
    with pytest.raises(SystemExit, match=f"1 tensors .* first {source.names()[0]}"):
        run.judge_dense(source, tmp_path, {"quantized_bytes": 1, "checkpoint_bytes": 1})


@pytest.fixture
def commands(run: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What run.py would have run, instead of running it."""
    asked: list[list[str]] = []

    def pretend(command: list[str], **options: Any) -> Any:
        asked.append(command)
        if "venv" in command:
            Path(command[-1]).mkdir(parents=True)
        return type("Done", (), {"returncode": 0})()

    monkeypatch.setattr(run.subprocess, "run", pretend)
    return asked


def test_an_environment_is_made_once_and_anew_when_its_list_changes(
    run: Any, tmp_path: Path, commands: list[list[str]]
) -> None:
    python = run.environment("x", ["torch==1", "x==2"], tmp_path)
    assert run.environment("x", ["torch==1", "x==2"], tmp_path) == python
    assert len(commands) == 2
    assert commands[1][1:] == ["-m", "pip", "install", "--quiet", "torch==1", "x==2"]
    (tmp_path / "envs" / "x" / "old").touch()
    run.environment("x", ["torch==1", "x==3"], tmp_path)
    assert len(commands) == 4
    assert not (tmp_path / "envs" / "x" / "old").exists()


def test_an_environments_npm_packages_are_laid_beside_it_and_run_nothing(
    run: Any, tmp_path: Path, commands: list[list[str]]
) -> None:
    for packages in (["@y/z@1"], ["@y/z@1"], ["@y/z@2"]):
        run.environment("x", ["torch==1"], tmp_path, packages)
    asked = [command for command in commands if command[0] == "npm"]
    assert [command[-1] for command in asked] == ["@y/z@1", "@y/z@2"]
    for command in asked:
        assert "--ignore-scripts" in command
        assert command[command.index("--prefix") + 1] == str(tmp_path / "envs" / "x")


def test_the_gguf_file_for_llama_cpp_holds_the_original(tiny_original: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    sys.path.insert(0, str(PEERS))
    try:
        peer = module("with_llamacpp")
    finally:
        sys.path.remove(str(PEERS))
    source = open_source(tiny_original)
    tensors = {name: source.read(name).half() for name in source.names()}
    names = peer.Names(source.config)
    peer.write_gguf(tmp_path / "original.gguf", source.config, tensors, names)
    dense, facts = peer.read_back(tmp_path / "original.gguf", tensors, names)
    assert set(dense) == set(tensors)
    assert all(torch.equal(dense[name], tensors[name].float()) for name in tensors)
    assert facts["types"]["self_attn.q_proj"] == {"F16": source.config["num_hidden_layers"]}
    linears = [tensors[name] for name in tensors if "_proj" in name]
    assert facts["quantized_bytes"] == sum(weight.nbytes for weight in linears)


def test_a_failing_peer_is_told_and_leaves_no_result(run: Any, tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit(3)")
    (tmp_path / "partial").mkdir()
    given = dict(source="s", method="m", bits=4, group_size=64, sym=True, peer="x", dtype="default", times_only=False)
    args = type("Args", (), given)()
    with pytest.raises(SystemExit, match="fails failed with exit code 3"):
        run.quantize(Path(sys.executable), str(script), args, tmp_path / "partial")


def test_a_weight_is_read_back_through_the_linear_that_multiplies_by_it() -> None:
    worker = module("worker")
    linear = torch.nn.Linear(300, 7)
    assert torch.allclose(worker.by_identity(linear, 300, torch.float32), linear.weight, atol=1e-6)


def test_packed_bytes_count_a_modules_tensors_but_its_bias(tmp_path: Path) -> None:
    tensors = {
        "a.qweight": torch.zeros(10, dtype=torch.int32), "a.scales": torch.zeros(4, dtype=torch.float16),
        "a.bias": torch.zeros(9), "b.weight": torch.zeros(100),
    }  # fmt: skip
    save_file(tensors, tmp_path / "model.safetensors")
    assert module("worker").packed_bytes(tmp_path, ["a"]) == 48
    assert module("worker").file_bytes(tmp_path) == (tmp_path / "model.safetensors").stat().st_size


def test_a_peers_cache_is_judged_as_quantkits_own(tiny_original: Path, calibration_text: Path, tmp_path: Path) -> None:
    """Hidden states of quantkit's own 4-bit cache, handed over as a peer's: the figures of ``evaluate``."""
    import quantkit
    from quantkit.evaluate.prepare import prepare, prepare_baseline

    protocol: dict[str, Any] = {"data": str(calibration_text), "protocol": "gptq", "seq_len": 256, "tokens": 512}
    prepared = prepare(tiny_original, **protocol)
    foreign = script(PEERS.parent / "foreign_cache.py").ForeignCache(
        str(tiny_original), protocol, prepare_baseline(tiny_original, prepared)
    )
    assert foreign.options({}) == [
        "--data", str(calibration_text), "--protocol", "gptq", "--seq-len", "256", "--tokens", "512",
    ]  # fmt: skip
    model = quantkit.load(tiny_original, dtype="float32", dequantize=True, kv_bits=4)
    hidden = torch.cat([model.hidden(ids[None]) for ids in prepared.windows.ids])
    save_file({"hidden": hidden}, tmp_path / "hidden.safetensors")
    told = {"bits": 4, "kv_bits_per_number": 5.25, "ids_sha256": prepared.windows.digest()}
    found = foreign.figures(tmp_path, told)
    own = evaluate(tiny_original, baseline=tiny_original, kv_bits=4, **protocol).to_json()
    same = (
        "perplexity",
        "stderr",
        "baseline_perplexity",
        "kl_mean",
        "kl_p99",
        "delta_ln_ppl",
        "by_position",
        "kv_bits_per_number",
    )
    assert {name: found[name] for name in same} == {name: own[name] for name in same}
    with pytest.raises(SystemExit, match="other tokens"):
        foreign.figures(tmp_path, told | {"ids_sha256": "another"})
