"""Options under headings (``cls=GroupedCommand``, ``@grouped("KV cache", "--kv-bits", ...)``), and the type of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from quantkit.errors import RequestError

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


class GroupSize(click.ParamType):  # type: ignore[type-arg]  # generic only since click 8.4
    """A number of inputs, 'channel' for one scale per output row, or 'auto': chosen with the bits."""

    name = "size|channel|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str | None:
        if value in (None, "channel", "-1", -1):
            return None
        if value == "auto":
            return "auto"
        try:
            return int(value)
        except ValueError:
            raise RequestError(
                f"--group-size {value}: a positive number of inputs, 'channel', or 'auto' with --target-bpw or"
                " --target-size."
            ) from None
