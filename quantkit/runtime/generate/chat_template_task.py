"""Renders a chat template, in a child process that imports jinja2 only (``core/limited/worker.py``).

What a template may use is what transformers 5.17 offers it (``utils/chat_template_utils.py``): the sandbox, ``tojson``,
``raise_exception``, ``strftime_now``, loop controls, ``{% generation %}``, and namespaces without private names.
"""

from __future__ import annotations

import functools
import json
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class Refused(TemplateError):
    """The template itself refuses the messages."""


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return the ``text``; or ``refused``, the template's own words; or ``error``; or nothing if it is too long.

    request: ``template``, ``variables`` that it may use, ``most`` characters of text.
    """
    pieces, length = [], 0
    try:
        for piece in _compiled(request["template"]).generate(request["variables"]):
            pieces.append(piece)
            length += len(piece)
            if length > request["most"]:
                return {}
    except Refused as error:
        return {"refused": str(error)}
    except TemplateSyntaxError as error:
        return {"error": f"line {error.lineno}: {error.message}"}
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # a template is a program, and fails like one
        return {"error": f"{type(error).__name__}: {error}"}
    return {"text": "".join(pieces)}


@functools.lru_cache(8)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment.from_string(template)


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's text; here only its content is rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Macro) -> str:
        return caller()


def _raise_exception(message: Any) -> None:
    raise Refused(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Dict:
    """``dict`` without a way to the class."""

    def __call__(self, *values: Any, **named: Any) -> dict[Any, Any]:
        return dict(*values, **named)

    def fromkeys(self, *values: Any) -> dict[Any, Any]:
        return dict.fromkeys(*values)


class _Namespace(Namespace):
    """A namespace without names that begin with an underscore."""

    def __init__(*values: Any, **named: Any) -> None:
        self, given = values[0], dict(*values[1:], **named)
        for name in given:
            _check_name(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no names that begin with an underscore, as {name!r} does")
