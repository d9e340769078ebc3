"""The command line and ``quantkit.convert`` take the same options and come in through the same function."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from quantkit.cli.convert import FORMER_NAMES, command
from quantkit.convert import api
from quantkit.convert.options.options import DEFAULTS, ConvertOptions
from quantkit.convert.options.resolve import ALIASES, renamed, resolve_options
from quantkit.errors import RequestError

COMMAND_ONLY = {"dry_run", "as_json", "help"}  # what the command prints, not what is converted
SPELLED = {"format_": "format"}  # a Python keyword argument may not hide the builtin in click's function
TYPED = {"group_size": (None, 128), "activations": ("none", None), "kv_bits": ("16", 16)}  # click's word, Python's


def options() -> dict[str, click.Parameter]:
    return {
        SPELLED.get(str(parameter.name), str(parameter.name)): parameter
        for parameter in command.params
        if parameter.name not in COMMAND_ONLY
    }


def test_every_option_of_the_command_line_is_one_of_python_and_the_other_way_round() -> None:
    assert set(options()) == {field.name for field in fields(ConvertOptions)}


def test_defaults_on_the_command_line_are_those_of_python() -> None:
    for name, parameter in options().items():
        if name in ("source", "out"):
            continue
        shown = parameter.to_info_dict()["default"]
        if name == "group_size":
            assert int(shown) == DEFAULTS[name]
        elif name in TYPED:
            assert (shown, DEFAULTS[name]) == TYPED[name], name
        elif name == "rules":
            assert (shown or (), DEFAULTS[name]) == ((), ()), name
        else:
            assert shown == DEFAULTS[name], name


def test_former_names_are_the_same_in_both_and_no_heading_shows_them() -> None:
    assert FORMER_NAMES == ALIASES
    help_text = CliRunner().invoke(command, ["--help"]).output
    assert "--matmul-precision" in help_text
    assert not any(f"--{name}" in help_text for name in ALIASES)


def test_a_former_name_does_what_todays_name_does_and_both_together_are_refused() -> None:
    assert renamed({"products": "bf16", "bits": 4}) == {"matmul_precision": "bf16", "bits": 4}
    with pytest.raises(RequestError, match="--products and --matmul-precision are one option"):
        renamed({"products": "bf16", "matmul_precision": "bf16"})
    both = CliRunner().invoke(command, ["model", "--out", "out", "--products=bf16", "--matmul_precision", "float32"])
    assert isinstance(both.exception, RequestError)
    assert "--products and --matmul-precision are one option" in str(both.exception)


@pytest.mark.parametrize(
    ("arguments", "typed"),
    [
        ([], {}),
        (["--preset", "balanced", "--no-guided", "--bits", "3"], {"preset": "balanced", "guided": False, "bits": 3}),
        (["--products", "bf16", "--group-size", "channel"], {"matmul_precision": "bf16", "group_size": None}),
        (["--target-bpw", "5", "--rule", "*.v_proj=keep"], {"target_bpw": 5.0, "rules": ("*.v_proj=keep",)}),
        (["--format", "native", "--kv-bits", "k4v2"], {"format": "native", "kv_bits": "k4v2"}),
        (["--activations", "int8", "--method", "rtn"], {"activations": "int8", "method": "rtn"}),
    ],
)
def test_the_command_line_hands_on_what_was_typed_and_nothing_else(
    arguments: list[str], typed: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[dict[str, Any]] = []

    def plan_request(source: str, out: Path, *, preset: str | None = None, **given: Any) -> None:
        seen.append({**given, **({} if preset is None else {"preset": preset})})
        raise RequestError("enough")

    monkeypatch.setattr(api, "plan_request", plan_request)
    result = CliRunner().invoke(command, ["model", "--out", str(tmp_path / "out"), *arguments])
    assert isinstance(result.exception, RequestError), result.output
    assert seen == [typed]


def test_an_option_that_is_given_wins_over_its_preset_and_its_target() -> None:
    chosen = resolve_options("model", "out", "balanced", {"guided": False, "target_bpw": 5.0})
    assert (chosen.method, chosen.fold, chosen.guided) == ("gptq", True, False)
    assert chosen.group_size == "auto"
    assert resolve_options("model", "out", None, {"target_bpw": 5.0, "group_size": 64}).group_size == 64
