"""The click group. Commands live in files of their own and are imported when used, so that ``--help`` is quick."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from typing import Any

import click

from quantkit.cli.output import print_json, printable
from quantkit.core.interrupt import handle_signals, ignore_signals, raise_if_interrupted, was_interrupted
from quantkit.errors import QuantkitError, QuantkitWarning, RequestError
from quantkit.version import __version__

COMMANDS = {
    "fetch": "Download a named model or text into the cache and print its folder.",
    "inspect": "Show the structure of a model: blocks, linears, sizes.",
    "convert": "Quantize a model into a folder that engines load.",
    "imatrix": "Write llama.cpp's importance matrix of a model.",
    "eval": "Measure perplexity, and divergence from the original.",
    "generate": "Generate text with a model.",
    "bench": "Time a model: first token, tokens/s, share of the memory's bandwidth.",
}
INTERRUPTED = "Interrupted."
NOT_LANDED = ("serve",)
ELSEWHERE = {
    "repack": "convert",
    "quantize": "convert",
    "run": "generate",
    "perplexity": "eval",
}  # names that others use


class Commands(click.Group):
    """Loads a command's module only when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in NOT_LANDED:
            raise click.UsageError(f"'{cmd_name}' has not landed yet. Commands: {', '.join(COMMANDS)}.")
        if cmd_name in ELSEWHERE:
            raise click.UsageError(f"'{cmd_name}' is part of `quantkit {ELSEWHERE[cmd_name]}` here: see its --help.")
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"quantkit.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="quantkit")
def cli() -> None:
    """Quantize large language models, prove what it cost, and run them.

    A SOURCE is a Hugging Face folder, a .gguf file, a hub id (org/name[@revision]), or a name that `quantkit fetch`
    knows. Exit code 0: done, 1: it failed (a file, a model, the machine), 2: the request was wrong or
    cannot be carried out as it stands, 130: interrupted.
    """


def main() -> None:
    """Entry point: quantkit's own errors become one message and an exit code, without a traceback."""
    # Other libraries' progress bars and advice do not belong into this program's output; they read this when imported.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # transformers would otherwise download kernels, and load them, for some model types that a config.json names.
    os.environ.setdefault("USE_HUB_KERNELS", "NO")
    _show_warnings_as_notes()
    handle_signals()  # a polite kill cleans up like Ctrl-C
    try:
        _run()
    except KeyboardInterrupt as error:  # a second one, while the first was being told of
        fail(INTERRUPTED, 130, error)


def _run() -> None:
    try:
        cli(standalone_mode=False)
        raise_if_interrupted()
        ignore_signals()  # all is done
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.ClickException as error:
        if "--json" in sys.argv[1:]:
            print_json({"error": error.format_message(), "exit_code": 2})
        error.show()
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort) as error:
        fail(INTERRUPTED, 130, error)
    except RequestError as error:
        fail(str(error), 2, error)
    except QuantkitError as error:
        fail(str(error), 1, error)
    except BrokenPipeError:
        _write_nowhere()
        sys.exit(1)
    except OSError as error:  # a disk or a permission: the system's own words are the best there are
        fail(f"{error.filename or 'input or output'}: {error.strerror or error}.", 1, error)
    except Exception as error:
        # An interrupt that arrives inside a library's compiled code may come out as any other exception.
        if not was_interrupted():
            raise
        fail(INTERRUPTED, 130, error)


def fail(message: str, code: int, error: BaseException | None = None) -> None:
    """Print one message, and below it what was noted on the error (what a job left behind), then exit."""
    if was_interrupted():  # whatever came of it
        message, code = INTERRUPTED, 130
        ignore_signals()  # who presses Ctrl-C twice gets the message, too
    message = "\n".join([message, *_notes(error)])
    if "--json" in sys.argv[1:]:  # a script reads stdout, whatever happened
        try:
            print_json({"error": message, "exit_code": code})
        except BrokenPipeError:
            _write_nowhere()
    click.echo(f"{click.style('Error:', fg='red', bold=True)} {printable(message)}", err=True)
    sys.exit(code)


def _write_nowhere() -> None:
    """Who read stdout has gone.

    What is left in its buffer would raise again at exit (Python's documentation, "Note on SIGPIPE").
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show_warnings_as_notes() -> None:
    show = warnings.showwarning

    def note(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
        if issubclass(category, QuantkitWarning):
            click.echo(f"note: {printable(str(message))}", err=True)
        else:
            show(message, category, *rest, **more)

    warnings.showwarning = note


def _notes(error: BaseException | None) -> list[str]:
    """Notes of an error and of what it came from: click turns an interrupt into an Abort of its own."""
    found: list[str] = []
    while error is not None:
        found += getattr(error, "__notes__", [])
        error = error.__cause__ or error.__context__
    return found


if __name__ == "__main__":
    main()
