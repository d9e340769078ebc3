"""What transformers says of a config that it does not accept, in one line that names the field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quantkit.checkpoint.foreign_files.fields import shown

# How its message names the kinds of values; what else it may expect is left out.
WORDS = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "text", "list": "a list"}
_FIELD = re.compile(r"error for field '([^']*)'")
_EXPECTED = re.compile(r"expected (\w+)")


def refused_field(error: Exception, config: Mapping[str, Any]) -> str:
    """Say which field of a config does not fit, and what was expected: ``use_cache is null; expected true or false``.

    error: huggingface_hub's StrictDataclassError. config: what was given.
    """
    text = str(error)
    field = _FIELD.search(text)
    if field is None:  # two fields that contradict each other
        last = text.splitlines()[-1].strip() if text.strip() else type(error).__name__
        return shown(last.partition("Error: ")[2] or last, 300).rstrip(".")
    value = config.get(field[1], "left out")
    wanted = list(dict.fromkeys(WORDS[kind] for kind in _EXPECTED.findall(text) if kind in WORDS))
    said = "null" if value is None else shown(value)
    return f"{field[1]} is {said}" + (f"; expected {' or '.join(wanted)}" if wanted else ", which no such model has")


def unknown_word(error: Exception, config: Mapping[str, Any]) -> str | None:
    """Say which field holds the word that transformers looked up in vain; None if that was not it.

    error: what building raised. config: what was given.
    """
    word = error.args[0] if isinstance(error, KeyError) and error.args else None
    if not isinstance(word, str):
        return None
    nested = {
        f"{name}.{key}": value for name, sub in config.items() if isinstance(sub, dict) for key, value in sub.items()
    }
    return next((f"{name} is {shown(word)}" for name, value in {**config, **nested}.items() if value == word), None)
