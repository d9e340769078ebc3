"""The help of a command lists its options under headings."""

from __future__ import annotations

import re
from typing import Any

import click
import pytest
from click.testing import CliRunner

from quantkit.cli.main import cli
from quantkit.cli.option_groups import GroupedCommand, grouped


@click.command(cls=GroupedCommand)
@click.argument("source")
@click.option("--plain", is_flag=True, help="Under no heading.")
@grouped("Second", "--late", help="Declared first of its heading.")
@grouped("First", "--early", type=int, default=3, show_default=True, help="A number.")
@grouped("Second", "--flag/--no-flag", default=None, help="Two names.")
@grouped("First", "--secret", hidden=True)
def example(**given: Any) -> None:
    """An example."""
    click.echo(repr(sorted(given.items())))


def sections(text: str) -> dict[str, list[str]]:
    """Heading -> the options below it."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if match := re.fullmatch(r"(\w[\w ]*):", line):
            found[match[1]] = []
        elif (match := re.match(r"  (--?[\w-]+)", line)) and found:
            found[list(found)[-1]].append(match[1])
    return found


def test_options_stand_under_their_headings_in_order_of_declaration():
    text = CliRunner().invoke(example, ["--help"]).output
    shown = sections(text)
    assert list(shown.items()) == [
        ("Second", ["--late", "--flag"]),
        ("First", ["--early"]),
        ("Options", ["--plain", "--help"]),
    ]
    assert "[default: 3]" in text
    assert "--secret" not in text
    assert "  SOURCE" not in text  # an argument is no option


def test_a_heading_changes_nothing_but_the_help():
    told = CliRunner().invoke(example, ["x", "--early", "7", "--no-flag", "--secret", "s"])
    assert told.output.strip() == (
        "[('early', 7), ('flag', False), ('late', None), ('plain', False), ('secret', 's'), ('source', 'x')]"
    )
    assert CliRunner().invoke(example, ["x", "--early", "many"]).exit_code == 2


@pytest.mark.parametrize("name", ["convert", "eval", "generate", "bench"])
def test_every_option_of_a_long_command_stands_under_a_heading_exactly_once(name: str):
    command = cli.get_command(click.Context(cli), name)
    assert isinstance(command, GroupedCommand)
    shown = sections(CliRunner().invoke(cli, [name, "--help"]).output)
    assert shown.pop("Options") in (["-h"], ["--help"])
    assert all(shown.values())
    declared = [p.opts[0] for p in command.params if isinstance(p, click.Option) and not p.hidden]
    assert sorted(option for options in shown.values() for option in options) == sorted(declared)
    assert max(len(options) for options in shown.values()) <= 12
