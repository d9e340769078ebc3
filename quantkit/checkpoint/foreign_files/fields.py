"""The boundary where somebody else's JSON becomes our values.

Whatever Python's parser, or a value in the file, could do to us ends here as one SourceError that names file and field:
text that is no JSON, nesting without end, numbers of thousands of digits, a key with two values, NaN. What a field may
hold is said by a rule (``Whole``, ``Real``, ``Flag``, ``Word``), so that tables of fields can be written down.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from quantkit.checkpoint.regular import read_regular
from quantkit.errors import SourceError

# The index of a model of 276,000 tensors has 26 MB; a config that lists as many modules is smaller.
MOST_BYTES = 64 << 20
# Each list or object takes some 60 bytes, so that 64 MB of brackets would become 2 GB.
MOST_CONTAINERS = 1 << 20
MOST_DEPTH = 64
# tokenizer_config.json says 10**30 for "no limit" (31 digits); beyond 4,300 Python itself refuses.
MOST_DIGITS = 100
# Mamba's configs have no upper limit there.
MAY_BE_INFINITE = frozenset({"time_step_limit"})
AGAIN = "Download it again."


def read_json(path: Path, most: int = MOST_BYTES) -> dict[str, Any]:
    """Read a JSON object from a file.

    path: the file. most: bytes that it may have.

    Raises SourceError, naming the file and the field, if it is missing, no regular file, too large, damaged, no object,
    or holds a value that no such file has.
    """
    try:
        data = read_regular(path, most)
    except FileNotFoundError:
        raise SourceError(f"{path}: no such file. A Hugging Face model folder has one; download it again.") from None
    except OSError as error:
        raise SourceError(
            f"{path}: cannot be read ({error.strerror}). Check what it is and who may read it."
        ) from error
    return parse_object(data, str(path))


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """Parse the JSON object that a file, or a part of one, holds.

    data: UTF-8. where: what an error names.

    Raises SourceError as ``read_json`` does.
    """
    if data.count(b"[") + data.count(b"{") > MOST_CONTAINERS:
        raise SourceError(
            f"{where}: more than {MOST_CONTAINERS:,} lists and objects, too many for such a file. {AGAIN}"
        )
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_without_doubles, parse_int=_whole)
    except RecursionError:
        raise SourceError(f"{where}: lists or objects nested without end. {AGAIN}") from None
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, and what the two hooks say
        raise SourceError(f"{where}: not valid JSON ({error}). {AGAIN}") from error
    if not isinstance(value, dict):
        raise SourceError(f"{where}: expected a JSON object, found {type(value).__name__}")
    _check_values(value, where)
    return value


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        for key, value in pairs:
            if repr(entries[key]) != repr(value):
                raise ValueError(f"{shown(key)} has two different values")
    return entries


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number of {len(digits):,} digits")
    return int(digits)


def _check_values(data: dict[str, Any], where: str) -> None:
    """Refuse depth, numbers that are not finite, and text that is no Unicode; without recursion."""
    waiting: list[tuple[str, Any, int]] = [("", data, 1)]
    while waiting:
        name, value, depth = waiting.pop()
        if depth > MOST_DEPTH:
            raise SourceError(f"{where}: {_name(name)} is nested deeper than {MOST_DEPTH} lists and objects. {AGAIN}")
        if isinstance(value, dict):
            for key, entry in value.items():
                _check_text(key, where, name)
                if key not in MAY_BE_INFINITE:
                    waiting.append((f"{name}.{key}" if name else key, entry, depth + 1))
        elif isinstance(value, list):
            waiting += [(f"{name}[{index}]", entry, depth + 1) for index, entry in enumerate(value)]
        elif isinstance(value, float) and not math.isfinite(value):
            raise SourceError(f"{where}: {_name(name)} is {value}, not a finite number. {AGAIN}")
        elif isinstance(value, str):
            _check_text(value, where, name)


def _check_text(text: str, where: str, name: str) -> None:
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise SourceError(
                f"{where}: {_name(name)} holds half of a surrogate pair, which is no text. {AGAIN}"
            ) from None


def _name(name: str) -> str:
    return shown(name, 120) if name else "the file"


def shown(value: Any, most: int = 60) -> str:
    """Write a foreign value for a message: in one line, short, whatever it is."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    text = value if isinstance(value, str) else repr(value)
    text = text.encode("unicode_escape").decode("ascii") if not text.isprintable() else text
    return text if len(text) <= most else f"{text[:most]}..."


class Rule(Protocol):
    """What a field may hold."""

    def allows(self, value: Any) -> bool:
        """Return whether the value is one of them."""

    @property
    def words(self) -> str:
        """Say it, for a message: ``a whole number from 1 to 8``."""


@dataclass(frozen=True, slots=True)
class Whole:
    """Whole numbers from ``low`` to ``high``."""

    low: int
    high: int

    def allows(self, value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and self.low <= value <= self.high

    @property
    def words(self) -> str:
        return f"a whole number from {self.low} to {self.high}"


@dataclass(frozen=True, slots=True)
class Token:
    """Ids of tokens up to ``high``, -1 for none; some writers store 2 as 2.0."""

    high: int

    def allows(self, value: Any) -> bool:
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        return whole and not isinstance(value, bool) and -1 <= value <= self.high

    @property
    def words(self) -> str:
        return f"the id of a token, from 0 to {self.high}"


@dataclass(frozen=True, slots=True)
class Real:
    """Finite numbers from ``low`` to ``high``."""

    low: float
    high: float

    def allows(self, value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and self.low <= value <= self.high

    @property
    def words(self) -> str:
        return f"a number from {self.low:g} to {self.high:g}"


@dataclass(frozen=True, slots=True)
class Flag:
    """True or false."""

    def allows(self, value: Any) -> bool:
        return isinstance(value, bool)

    @property
    def words(self) -> str:
        return "true or false"


@dataclass(frozen=True, slots=True)
class Word:
    """Text of at most ``most`` letters."""

    most: int = 1000

    def allows(self, value: Any) -> bool:
        return isinstance(value, str) and len(value) <= self.most

    @property
    def words(self) -> str:
        return "text"


@dataclass(frozen=True, slots=True)
class Several:
    """A list whose entries all follow a rule; ``alone``: or one such value without a list."""

    rule: Rule
    alone: bool = False

    def allows(self, value: Any) -> bool:
        if isinstance(value, list | tuple):
            return all(self.rule.allows(entry) for entry in value)
        return self.alone and self.rule.allows(value)

    @property
    def words(self) -> str:
        return f"{self.rule.words}, or a list of such" if self.alone else f"a list, each entry {self.rule.words}"


def check_field(where: str, name: str, value: Any, rule: Rule) -> None:
    """Raise SourceError, naming file and field, for a value that the rule does not allow.

    where: the file. name: the field. value: what it holds. rule: what it may hold.
    """
    if not rule.allows(value):
        raise SourceError(
            f"{where}: {name} is {shown(value)}; expected {rule.words}. The file is damaged: {AGAIN.lower()}"
        )


def field(data: Mapping[str, Any], name: str, rule: Rule, where: str) -> Any:
    """Return a field that has to be there, checked.

    Raises SourceError, naming file and field, if it is missing or the rule does not allow its value.
    """
    if name not in data:
        raise SourceError(f"{where}: lacks {name}. The file is damaged: {AGAIN.lower()}")
    check_field(where, name, data[name], rule)
    return data[name]


def check_table(data: Mapping[str, Any], rules: Mapping[str, Rule], where: str, skipped: Iterable[str] = ()) -> None:
    """Check every field that a table knows, at every depth; null is nothing said.

    data: the file's object. rules: by the field's name. where: the file. skipped: objects that are not looked into.

    Raises SourceError, naming file and field.
    """
    away = set(skipped)
    for name, value in data.items():
        if name in rules and value is not None:
            check_field(where, name, value, rules[name])
        elif isinstance(value, Mapping) and name not in away:
            check_table(value, rules, where, away)
