"""``quantkit generate``: text on stdout, timings on stderr, wrong requests with exit code 2."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quantkit.cli.main import main

Folder = Callable[..., Path]


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["quantkit", "generate", *arguments])
    code = 0
    try:
        main()
    except SystemExit as end:
        code = int(end.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_streamed_text_is_the_whole_text(
    float_folder: Folder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(float_folder("llama"))
    common = (
        folder,
        "--device",
        "cpu",
        "--prompt",
        "Hello",
        "--max-tokens",
        "12",
        "--temperature",
        "0.9",
        "--seed",
        "4",
    )
    code, streamed, err = run(capsys, monkeypatch, *common)
    assert code == 0
    assert "tokens/s" in err
    _, whole, _ = run(capsys, monkeypatch, *common, "--no-stream")
    assert whole == streamed
    _, out, err = run(capsys, monkeypatch, *common, "--json")
    data = json.loads(out)
    assert data["text"] + "\n" == whole
    assert err == ""
    assert data["kv_bits"] == 16
    assert len(data["inter_token_latencies"]) == len(data["tokens"]) - 1 or data["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompt", "x", "--top-p", "2"), "top_p=2"),
        (("--prompt", ""), "--prompt"),
        (("--prompt", "x", "--max-tokens", "0"), "max_tokens=0"),
        (("--prompt", "x", "--kv-bits", "5"), "--kv-bits 5"),
        (("--prompt", "x", "--kv-bits", "16", "--kv-scales", "static"), "has no effect on a KV cache of 16 bits"),
        (("--prompt", "x", "--chat"), "no chat template"),
        (("--prompt", "x" * 300), "context of 256"),
        (("--prompt", "x", "--device", "tpu"), "device='tpu'"),
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
    assert "Traceback" not in err
