"""A prompt or an option of generation that makes no sense is one RequestError that names it."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import RequestError, SourceError
from quantkit.runtime.generate.prompts import as_batch
from quantkit.runtime.generate.sampling import GenerationOptions

USER = {"role": "user", "content": "Hi"}


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (None, "the prompt is None"),
        (5, "the prompt is a number"),
        (b"text", "the prompt is of type bytes"),
        (USER, "the prompt is of type dict"),
        ("a\ud800", "the prompt: character 1 .* surrogate"),
        (["a", None], "prompt 2 is None"),
        ([1, 2, 3], "prompt 1 is a number"),
        (["a", "b\udc80"], "prompt 2: character 1"),
        (["a", b"b"], "prompt 2 is of type bytes"),
        (["a", USER], "prompt 2 is of type dict"),
        ([[USER], []], "prompt 2 has no messages"),
        ([["a"]], "prompt 1: message 1 is of type str"),
        ([{"role": "user", "content": b"x"}], "the prompt: message 1, 'content' is of type bytes"),
        ([{"role": "user", "content": "\ud800"}], "message 1, 'content': character 0"),
        ([USER, {"role": "user", 5: "x"}], "message 2 has a field named 5"),
        ([{"role": "user", "content": nested(100)}], "nested more than 32 levels"),
        ([{"role": "user", "content": 10**5000}], "message 1, 'content' is a number"),
        ([{"role": "user", "content": {1, 2}}], "'content' is of type set"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)  # fmt: skip
def test_what_is_no_prompt_is_named(prompt: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        as_batch(prompt)


def test_prompts_are_taken_as_they_are() -> None:
    assert as_batch("a") == (["a"], True)
    assert as_batch([USER]) == ([[USER]], True)
    assert as_batch(("a", [USER])) == (["a", [USER]], False)
    assert as_batch(text for text in "ab") == (["a", "b"], False)
    assert as_batch([]) == ([], False)
    deep = [{"role": "user", "content": [{"type": "text", "n": 1.5, "on": True, "none": None}]}]
    assert as_batch(deep) == ([deep], True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", 2**64), ("seed", -1), ("seed", 1 << 20000), ("seed", 1.0), ("seed", "1"),
        ("temperature", math.nan), ("temperature", math.inf), ("temperature", 10**400), ("temperature", None),
        ("temperature", [1]), ("top_p", "0.5"), ("top_p", math.nan), ("top_p", None), ("min_p", math.nan),
        ("top_k", 2**70), ("top_k", 0.5), ("max_tokens", 2**70), ("max_tokens", True), ("max_tokens", None),
        ("repetition_penalty", 5e-324), ("repetition_penalty", 1e300), ("repetition_penalty", math.nan),
        ("stop", None), ("stop", 5), ("stop", b"x"), ("stop", [b"x"]), ("stop", ["\ud800"]), ("stop", ("a", "")),
        ("stop", {"a": 1}), ("stop_tokens", 5), ("stop_tokens", "12"), ("stop_tokens", [2**80]), ("stop_tokens", [1.0]),
        ("stop_tokens", None), ("ignore_eos", "no"), ("chat", 1),
    ],
    ids=lambda value: f"of {value.bit_length()} bits" if isinstance(value, int) else None,
)  # fmt: skip
def test_an_option_that_makes_no_sense_is_named(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{name}=") as caught:
        GenerationOptions(**{name: value})
    assert len(str(caught.value)) < 250


def test_the_limits_of_options_are_taken() -> None:
    options = GenerationOptions(seed=2**64 - 1, stop=["a"], stop_tokens=range(2), temperature=1e308, top_p=1)
    assert (options.stop, options.stop_tokens) == (("a",), (0, 1))


@pytest.fixture(scope="module")
def model(tiny_original: Path) -> Any:
    import quantkit

    return quantkit.load(tiny_original, device="cpu")


def test_a_model_names_what_it_cannot_do(model: Any) -> None:
    vocabulary = model.vocabulary
    for arguments, words in (
        (dict(prompt=None), "the prompt is None"),
        (dict(prompt="a", seed=2**64), "seed="),
        (dict(prompt="a", stop_tokens=[vocabulary]), f"stop_tokens: {vocabulary} is no token"),
        (dict(prompt="a", max_tokens=2**31 - 1), "max_tokens"),
        (dict(prompt="a", options={"seed": 1}), "Give GenerationOptions"),
        (dict(prompt="a", options=5), "Give GenerationOptions"),
        (dict(prompt="a", colour="red"), "colour"),
        (dict(prompt=[]), "no prompt"),
    ):
        with pytest.raises(RequestError, match=words):
            model.generate(**arguments)
    for prompt in (b"x", None, [], 7):
        with pytest.raises(RequestError, match="the prompt"):
            model.encode(prompt)


def test_a_cache_that_does_not_fit_is_told_before_it_is_made(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from quantkit.runtime import requests as module

    monkeypatch.setattr(module, "available_bytes", lambda: 1000)
    with pytest.raises(RequestError, match=r"max_tokens: the KV cache of \d+ tokens.*1 kB are free"):
        model.generate("abc", max_tokens=16)


@pytest.mark.parametrize(
    "value", [math.nan, {"a": 1}, "2", True, -1, 2**40, [1, None], [[1]], 1.5, [math.nan], 10**30, False]
)
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_end_tokens_that_are_none_are_named_while_planning(
    file: str, value: Any, tiny_model: Path, tmp_path: Path
) -> None:
    from quantkit.convert.api import plan_request

    (tiny_model / "generation_config.json").unlink()
    path = tiny_model / file
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | {"eos_token_id": value}))
    with pytest.raises(SourceError, match=rf"{file}.*eos_token_id"):
        plan_request(tiny_model, tmp_path / "out", method="rtn")


def test_standard_input_as_a_prompt_ends(tiny_original: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from quantkit.cli.main import cli

    (tmp_path / "latin").write_bytes(b"caf\xe9")
    for path, words in (
        ("/dev/zero", "goes beyond 16,000,000 bytes"),
        (os.devnull, "the prompt is empty"),
        (str(tmp_path / "latin"), r"not UTF-8 text \(byte 3\)"),
    ):
        stream = open(path)  # noqa: SIM115
        monkeypatch.setattr(sys, "stdin", stream)
        with stream, pytest.raises(RequestError, match=words):
            cli(["generate", str(tiny_original), "--prompt", "-"], standalone_mode=False)
    with pytest.raises(RequestError, match="surrogate pair"):  # a byte of the command line that is no UTF-8
        cli(["generate", str(tiny_original), "--prompt", "caf\udce9"], standalone_mode=False)
