"""Quantize a model: ``quantkit.convert(source, out, *, preset=None, on_progress=None, **options)``.

>>> import inspect, quantkit
>>> inspect.signature(quantkit.convert).parameters["group_size"]  # every option, its default
<Parameter "group_size: 'int | str | None' = 128">

Options are those of the command line with underscores; ``quantkit.convert.api.convert`` says what is written and
raised.

This package holds the pipeline that joins the rooms: plan, the loop over blocks, verification, report. It is also,
called, that function: Python binds a subpackage to its parent's attribute on first import, so the module itself has to
be callable for both to work.
"""

from __future__ import annotations

import inspect
import sys
import types
from typing import Any


class _CallablePackage(types.ModuleType):
    """The package as a module that can be called: ``quantkit.convert(...)``."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from quantkit.convert.api import convert

        return convert(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature with every option by its name, as ``inspect.signature`` and notebooks show it."""
        from dataclasses import fields

        from quantkit.convert.api import convert
        from quantkit.convert.options.options import ConvertOptions

        plain = inspect.signature(convert)
        named = [
            parameter for parameter in plain.parameters.values() if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        options = [
            inspect.Parameter(
                parameter.name, inspect.Parameter.KEYWORD_ONLY, default=parameter.default, annotation=parameter.type
            )
            for parameter in fields(ConvertOptions)
            if parameter.name not in plain.parameters
        ]
        return plain.replace(parameters=[*named, *options])


sys.modules[__name__].__class__ = _CallablePackage
