"""Seeded damage to the bytes of a file: ``mutate(content, kind, random)`` gives other bytes and says what was done."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from random import Random
from typing import Any

NUMBERS = (
    "0", "-1", "1", "2", "3", "7", "0.0", "-0.0", "0.5", "1e-45", "1e38", "1e308", "1e999", "-1e999", "NaN", "Infinity",
    "-Infinity", "255", "65504", "65536", "2147483647", "2147483648", "4294967296", "9223372036854775807",
    "9223372036854775808", "18446744073709551616", "1000000000", "-2147483649", "9" * 400, "9" * 5000,
)  # fmt: skip
VALUES = (
    "null", "true", "false", "[]", "{}", '""', '"x"', '"\\ud800"', '"\\u0000"', "[null]", "[[]]", "[1,2,3]", '{"a":1}',
    '["a"]', '"../../etc/passwd"', '"/dev/zero"', '"auto"', '"' + "x" * 10000 + '"', '"0"', '"1e5"', '"None"',
    '"\\n\\u001b[2J"', "[" * 2000 + "]" * 2000, "[" * 100000 + "]" * 100000, '{"a":' * 100000 + "1" + "}" * 100000,
    "[" + "0," * 100000 + "0]",
    *NUMBERS,
)  # fmt: skip
NUMBER = re.compile(rb"-?\d+(\.\d+)?([eE][-+]?\d+)?")
WORDS = (0, 1, 2, 3, 0xFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)


def mutate(content: bytes, kind: str, random: Random) -> tuple[bytes, str]:
    """Return damaged content, and what was done to it.

    content: of a whole file.
    kind: json, jsonl, record (JSON behind its sha256), safetensors, gguf, gzip, text or bytes.
    random: all chance comes from it.
    """
    if kind == "gzip" and random.random() < 0.6:
        inner, done = mutate(gzip.decompress(content), "jsonl", random)
        return gzip.compress(inner, mtime=0), f"inside: {done}"
    if kind == "record" and random.random() < 0.8:
        inner, done = _json(content.partition(b"\n")[2], random)
        return hashlib.sha256(inner).hexdigest().encode() + b"\n" + inner, f"signed anew: {done}"
    if kind == "safetensors" and random.random() < 0.7:
        return _safetensors(content, random)
    if kind in ("json", "jsonl", "text") and random.random() < 0.75:
        return _json(content, random)
    if kind == "gguf" and random.random() < 0.6:
        return _words(content, random)
    return _bytes(content, random, 4096 if kind in ("gguf", "safetensors") else len(content))


def _bytes(content: bytes, random: Random, head: int) -> tuple[bytes, str]:
    """Flip, cut, splice, repeat, or insert zeros, more often in the first ``head`` bytes."""
    data, size = bytearray(content), len(content)
    at = random.randrange(max(1, min(size, head) if random.random() < 0.8 else size))
    how = random.choice(["flip", "flip", "flips", "cut", "splice", "zeros", "noise", "repeat", "drop", "empty"])
    length = min(random.choice([1, 2, 4, 8, 16, 100, 1000]), max(1, size - at))
    if how == "flip":
        data[at : at + 1] = bytes([data[at] ^ (1 << random.randrange(8))]) if size else b"x"
    elif how == "flips":
        for _ in range(random.randrange(1, 20)):
            place = random.randrange(max(1, min(size, head)))
            if place < size:
                data[place] = random.randrange(256)
    elif how == "cut":
        del data[at:]
    elif how == "splice":
        source = random.randrange(max(1, size - length))
        data[at : at + length] = data[source : source + length]
    elif how == "zeros":
        data[at:at] = bytes(length)
    elif how == "noise":
        data[at : at + length] = random.randbytes(length)
    elif how == "repeat":
        data[at:at] = data[at : at + length] * random.choice([1, 2, 50])
    elif how == "drop":
        del data[at : at + length]
    else:
        data = bytearray(random.choice([b"", b"\0", b"{}", b"[]", b"null", b"\xff\xfe", b"\x80\x04."]))
    return bytes(data), f"{how} at {at} ({length} bytes)"


def _words(content: bytes, random: Random) -> tuple[bytes, str]:
    """Replace a number of 4 or 8 bytes by an extreme one."""
    width, at = random.choice([4, 8]), random.randrange(min(len(content), 6000) - 8)
    value = random.choice(WORDS) & ((1 << 8 * width) - 1)
    return content[:at] + value.to_bytes(width, "little") + content[at + width :], f"{value:#x} at {at} ({width} bytes)"


def _safetensors(content: bytes, random: Random) -> tuple[bytes, str]:
    """Damage the header as JSON and write its new length, or a wrong one."""
    length = int.from_bytes(content[:8], "little")
    header, done = _json(content[8 : 8 + length], random)
    stated = random.choice([len(header)] * 9 + [random.choice(WORDS)])
    return stated.to_bytes(8, "little") + header + content[8 + length :], f"header: {done}"


def _json(content: bytes, random: Random) -> tuple[bytes, str]:
    """Damage JSON (or a line of it, or any text) at a number, a value, a key, or as a whole."""
    how = random.choice(["number", "number", "value", "value", "value", "key", "key", "double", "wrap"])
    if how == "number":
        places = list(NUMBER.finditer(content[:200_000]))
        if places:
            place, new = random.choice(places), random.choice(NUMBERS)
            return content[: place.start()] + new.encode() + content[place.end() :], _words_of(place.group(), new)
    try:
        lines = content.decode().split("\n")
        line = random.randrange(len(lines)) if len(lines) > 1 and lines[0].startswith('{"') else None
        tree = json.loads(content if line is None else lines[line])
        spots = list(_spots(tree))
        owner, key = random.choice(spots)
    except (ValueError, IndexError):
        return _bytes(content, random, len(content))
    marker = '"MARK-1b7f"'
    old = owner[key]
    if how == "key" and isinstance(owner, dict):
        if random.random() < 0.5:
            del owner[key]
            written, done = json.dumps(tree), f"without {key!r}"
        else:
            name = random.choice(["", "x", "__class__", "../x", "x" * 3000, "\ud800", "0"])
            owner[name] = owner.pop(key)
            written, done = json.dumps(tree), f"{key!r} named {name[:20]!r}"
    elif how == "double" and isinstance(owner, dict):
        owner[key] = "MARK-1b7f"
        new = random.choice(VALUES)
        both = f"{json.dumps(old)}, {json.dumps(key)}: {new}"
        written, done = json.dumps(tree).replace(marker, both), f"{key!r} again, {new[:40]}"
    elif how == "wrap":
        owner[key] = random.choice([[old], {"a": old}, [old, old], str(old)])
        written, done = json.dumps(tree), f"{key!r} wrapped"
    else:
        owner[key] = "MARK-1b7f"
        new = random.choice(VALUES)
        written, done = json.dumps(tree).replace(marker, new), f"{key!r}: {new[:40]}"
    if line is not None:
        lines[line] = written
        written = "\n".join(lines)
    return written.encode("utf-8", "surrogatepass"), done


def _words_of(old: bytes, new: str) -> str:
    return f"number {old.decode()} -> {new[:40]}"


def _spots(tree: Any) -> Any:
    """Every place in a tree that a value may be put: (list or dict, index or key).

    The upper ones are drawn more often.
    """
    stack = [(tree, 0)]
    while stack:
        node, depth = stack.pop()
        pairs: Any = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for number, (key, value) in enumerate(pairs):
            if number > 200:  # a vocabulary: some of it will do
                break
            yield from [(node, key)] * (8 if depth == 0 else 1)
            stack.append((value, depth + 1))
