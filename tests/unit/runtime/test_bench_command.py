"""``quantkit bench``: what it counts is what the model holds and reads; wrong requests end with exit code 2."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quantkit.cli.main import main
from quantkit.core.scheme import Scheme
from quantkit.errors import RequestError
from quantkit.evaluate.speed.bench import bench, whole_numbers
from quantkit.evaluate.speed.traffic import kv_bytes_per_step, model_memory, weight_bytes_per_step
from quantkit.runtime.kernels.numba import threads
from quantkit.runtime.load import load

Folder = Callable[..., Path]


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["quantkit", "bench", *arguments, "--device", "cpu"])
    monkeypatch.setattr("quantkit.evaluate.speed.traffic.STREAM_BYTES", 1 << 16)
    code = 0
    try:
        main()
    except SystemExit as end:
        code = int(end.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_grid_gives_one_row_for_each_cell(
    packed_folder: Folder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(packed_folder("llama", Scheme(4, 32)))
    grid = (folder, "--batch", "1,3", "--prompt", "5,70", "--new-tokens", "4", "--repeat", "2", "--threads", "1")
    code, out, err = run(capsys, monkeypatch, *grid, "--json")
    assert (code, err) == (0, "")
    data = json.loads(out)
    assert [(c["batch"], c["prompt"]) for c in data["cells"]] == [(1, 5), (1, 70), (3, 5), (3, 70)]
    assert data["threads"] == 1
    for cell in data["cells"]:
        assert cell["decode_tokens_per_second"] > 0
        assert cell["inter_token_latency_p50"] <= cell["inter_token_latency_p99"]
        assert cell["gb_per_s"] == pytest.approx(cell["bytes_per_step"] / cell["inter_token_latency_p50"] / 1e9)
        assert cell["bytes_per_token"] == cell["bytes_per_step"] / cell["batch"]
    assert data["cells"][1]["bytes_per_step"] > data["cells"][0]["bytes_per_step"]  # more keys and values
    code, table, _ = run(capsys, monkeypatch, *grid)
    assert code == 0
    assert "of peak" in table
    assert "bandwidth" in table


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--batch", "0"), "--batch"),
        (("--prompt", "4,x"), "--prompt"),
        (("--new-tokens", "1"), "--new-tokens"),
        (("--repeat", "0"), "--repeat"),
        (("--threads", "0"), "--threads"),
        (("--kernel", "warp"), "kernel='warp'"),
        (("--kernel", "reference", "--keep-dense"), "keep_dense serves packed"),
        (("--kernel", "reference"), "--kernel reference has no effect: no weight of"),
        (("--keep-dense",), "(--keep-dense) has no effect: no weight of"),
        (("--threads", "100000"), "--threads 100000: this process may use"),
        (("--seed", "-1"), "--seed -1"),
        (("--head-bits", "3"), "head_bits=3"),
        (("--device", "cpu", "--no-graphs"), "only a GPU captures graphs"),
        (("--kv-bits", "5"), "choose 16, 8, 4, 3, 2 or fp8"),
        (
            ("--prompt", "250", "--new-tokens", "32"),
            "--prompt 250 and --new-tokens 32 are together more than the model's context of 256",
        ),
    ],
)
def test_a_wrong_request_is_one_message_and_exit_code_2(
    float_folder: Folder,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    code, out, err = run(capsys, monkeypatch, str(float_folder("llama")), *arguments)
    assert code == 2
    assert out.strip() == ""
    assert message in err


def test_numbers_keep_their_order_and_repetitions_are_dropped() -> None:
    assert whole_numbers("8, 1,8", "--batch") == [8, 1]


def test_threads_are_as_before_after_a_benchmark(float_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantkit.evaluate.speed.traffic.STREAM_BYTES", 1 << 16)
    before = torch.get_num_threads()
    monkeypatch.setattr("quantkit.evaluate.speed.bench.usable_cpus", lambda: before + 1)
    speed = bench(float_folder("llama"), prompt="4", new_tokens=2, repeat=1, threads=before + 1, device="cpu")
    assert speed.threads == before + 1
    assert torch.get_num_threads() == before


def test_a_step_reads_every_weight_but_of_an_embedding_only_its_rows(
    float_folder: Folder, packed_folder: Folder
) -> None:
    model = load(float_folder("llama"), device="cpu", dtype="float32")
    total = model.memory()["dense"]
    vocab, width = model.module.config.vocab_size, model.module.config.hidden_size
    assert weight_bytes_per_step(model, 2) == total - vocab * width * 4 + 2 * width * 4
    tied = load(float_folder("gemma3_text"), device="cpu", dtype="float32")
    assert weight_bytes_per_step(tied, 2) == tied.memory()["dense"]
    packed = load(packed_folder("llama", Scheme(4, 32)), device="cpu", dtype="float32", head_bits=16)
    memory = model_memory(packed)
    assert memory.codes == sum(
        m.in_features * m.out_features // 2 for n, m in packed.module.named_modules() if n.endswith("proj")
    )
    assert memory.codes + memory.scales == packed.memory()["quantized"]
    assert weight_bytes_per_step(packed, 1) < weight_bytes_per_step(model, 1)


@pytest.mark.parametrize("there", [True, False])
def test_without_numba_the_table_says_what_would_be_faster(
    packed_folder: Folder, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    monkeypatch.setattr("quantkit.evaluate.speed.traffic.STREAM_BYTES", 1 << 16)
    folder = packed_folder("llama", Scheme(4, 32))
    if not there:
        monkeypatch.setattr("quantkit.runtime.kernels.numba.threads.available", lambda: False)
    elif not threads.available():
        pytest.skip("numba is not installed (extra [cpu])")
    speed = bench(folder, prompt="4", new_tokens=2, repeat=1, device="cpu", dtype="float32")
    assert ("quantkit[cpu]" in speed.table()) is not there


def test_sliding_layers_read_their_window_only(float_folder: Folder) -> None:
    model = load(float_folder("gemma3_text"), device="cpu", dtype="float32")
    layer = model.memory()["kv_per_token"] / 3
    assert model.windows() == [80, None, 80]
    assert kv_bytes_per_step(model, 100, 2) == 2 * layer * (80 + 100 + 80)
    assert kv_bytes_per_step(model, 10, 1) == layer * 30


def test_a_dense_copy_serves_prompts_and_is_counted_as_memory_but_not_as_read(
    packed_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are no compiled kernels, which read prompts faster from the packed weights: there it is refused."""
    folder = packed_folder("llama", Scheme(4, 32))
    if threads.available():
        with pytest.raises(RequestError, match="faster from packed weights"):
            load(folder, device="cpu", dtype="float32", keep_dense=True)
    monkeypatch.setattr("quantkit.runtime.kernels.numba.threads.available", lambda: False)
    plain = load(folder, device="cpu", dtype="float32")
    both = load(folder, device="cpu", dtype="float32", keep_dense=True)
    linears = [m for n, m in both.module.named_modules() if n.endswith("proj")]
    extra = sum(4 * m.in_features * m.out_features for m in linears)
    assert model_memory(both).dense == model_memory(plain).dense + extra  # none of a head kept in 16 bits
    assert weight_bytes_per_step(both, 1) == weight_bytes_per_step(plain, 1)
    ids = torch.randint(0, 250, (1, 90), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(both(ids), plain(ids), rtol=1e-3, atol=1e-3)
