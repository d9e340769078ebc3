"""Options under headings: ``@click.command(cls=GroupedCommand)`` and ``@grouped("KV cache", "--kv-bits", ...)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


class GroupedOption(click.Option):
    """An option that ``--help`` lists under a heading of its own."""

    def __init__(self, *args: Any, heading: str, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.heading = heading


class GroupedCommand(click.Command):
    """A command whose ``--help`` lists options under their headings, in the order in which the headings first appear.

    Options without a heading (``--help`` among them) come last, under "Options", as click lists them all otherwise.
    """

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if isinstance(parameter, click.Argument):  # click 8.5.1 gives these a record, too
                continue
            record = parameter.get_help_record(ctx)
            if record is not None:  # not hidden
                sections.setdefault(getattr(parameter, "heading", "Options"), []).append(record)
        if "Options" in sections:
            sections["Options"] = sections.pop("Options")
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def grouped(heading: str, *declarations: str, **attributes: Any) -> Callable[[Decorated], Decorated]:
    """Declare an option as ``click.option`` does; a ``GroupedCommand`` lists it under ``heading``."""
    return click.option(*declarations, cls=GroupedOption, heading=heading, **attributes)
