"""Texts by name: for calibrating, or for measuring, never both.

Every text carries the sha256 of its UTF-8 bytes, so that a number can name exactly what it was measured on.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from quantkit.checkpoint.fetch import fetch
from quantkit.checkpoint.regular import given_path
from quantkit.checkpoint.text_files.parquet import read_parquet
from quantkit.checkpoint.text_files.plain import Beginning, read_plain
from quantkit.checkpoint.text_files.records import SEPARATOR, read_jsonl, text_bytes, text_field
from quantkit.errors import MissingExtra, QuantkitError, RequestError, SourceError

Split = Literal["calibration", "evaluation"]

# Prose and code of the running Python: the language reference, and modules that are long, readable and pure Python.
BUILTIN_MODULES = (
    "argparse",
    "ast",
    "datetime",
    "difflib",
    "json.decoder",
    "pathlib",
    "statistics",
    "tarfile",
    "typing",
)
HUB_CHARACTERS = 8_000_000  # enough for any calibration or evaluation here; a hub dataset can be terabytes


@dataclass(frozen=True, slots=True)
class Text:
    """One text: the name it was asked for by, its characters, and the sha256 of their UTF-8 bytes.

    whole: False if the text goes on beyond what was read.
    """

    name: str
    text: str
    sha256: str
    whole: bool = True


def load_text(name: str, *, split: Split) -> Text:
    """Read a text by name, for one purpose.

    name: ``wikipedia-sample`` (also with ``:calibration`` or ``:evaluation``), ``news-sample``, ``builtin``, a local
    .txt, .md or other UTF-8 file (.gz unpacked), a .jsonl or .parquet file (field or column ``text``), or
    ``hub:dataset[:config[:split]]``. Of a long one the beginning is read:
    ``plain.MOST_BYTES``, HUB_CHARACTERS.
    split: what it is for; a text that may not serve that is refused.

    Raises RequestError for a name or purpose that is wrong, SourceError for a file that is missing, empty or
    undecodable, QuantkitError if a hub does not answer.
    """
    base, _, half = name.partition(":")
    if base == "wikipedia-sample":
        return _text(name, _wikipedia(half, split))
    if name == "news-sample":
        if split == "calibration":
            raise RequestError("news-sample: for evaluation only. Calibrate on wikipedia-sample, builtin or a file.")
        return _text(name, read_plain(fetch("news-sample") / "evaluation.txt"))
    if name == "builtin":
        if split == "evaluation":
            raise RequestError(
                "builtin: for calibration only; it differs between Python versions. Use wikipedia-sample."
            )
        return _text(name, Beginning(_builtin()))
    if name == "self":
        raise RequestError(
            "self: text that the model writes, for `quantkit convert --calibration self` alone. Name a text or give a"
            " file."
        )
    if base == "hub":
        return _text(name, _hub(half, split))
    path = given_path(name)
    if not path.exists():
        raise SourceError(
            f"{name}: no such file, and no text of that name is known. Known are wikipedia-sample, news-sample,"
            " builtin, self (for convert), hub:DATASET; or give a .txt, .md, .gz, .jsonl or .parquet file."
        )
    if path.suffix == ".parquet":
        return _text(name, read_parquet(path))
    return _text(name, read_jsonl(path) if ".jsonl" in path.suffixes else read_plain(path))


def _text(name: str, read: Beginning) -> Text:
    if not read.text.strip():
        far = "" if read.whole else " as far as it was read"
        raise SourceError(f"{name}: the text is empty{far}. Give a file with something in it.")
    return Text(name, read.text, hashlib.sha256(read.text.encode("utf-8")).hexdigest(), read.whole)


def _wikipedia(half: str, split: Split) -> Beginning:
    if half not in ("", "calibration", "evaluation"):
        raise RequestError(f"wikipedia-sample:{half}: there are two halves, calibration and evaluation.")
    if half and half != split:
        raise RequestError(
            f"wikipedia-sample:{half}: asked for {split}. Calibrating and measuring on the same text flatters the"
            " result; leave the half away and the right one is taken."
        )
    return read_plain(fetch("wikipedia-sample") / f"{split}.txt")


def _builtin() -> str:
    """Join the language reference and some library source of this Python.

    The same on every machine with this version.
    """
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    prose = [topics[key].strip() for key in sorted(topics)]
    code = [inspect.getsource(importlib.import_module(module)).strip() for module in BUILTIN_MODULES]
    # Code spread among prose, so that any stretch of the text holds some of both.
    every = max(1, len(prose) // (len(code) + 1))
    for i, source in enumerate(code, 1):
        prose.insert(i * every + i - 1, source)
    return SEPARATOR.join(prose)


def _hub(spec: str, split: Split) -> Beginning:
    """Stream ``dataset[:config[:split]]`` until enough characters are there."""
    dataset, _, rest = spec.partition(":")
    config, _, part = rest.partition(":")
    if not dataset:
        raise RequestError("hub: names no dataset. Write hub:DATASET, hub:DATASET:CONFIG or hub:DATASET:CONFIG:SPLIT.")
    part = part or ("train" if split == "calibration" else "test")
    try:
        import datasets
    except ImportError:
        raise MissingExtra("datasets", "dev", "Reading a dataset from a hub") from None
    _check_hub()
    try:
        rows: Iterable[Any] = datasets.load_dataset(dataset, config or None, split=part, streaming=True)
        texts, size = [], 0
        for number, row in enumerate(rows, 1):
            texts.append(text_field(row, f"hub:{spec}: record {number}"))
            text_bytes(texts[-1], f"hub:{spec}: record {number}")
            size += len(texts[-1])
            if size >= HUB_CHARACTERS:
                break
    except QuantkitError:
        raise
    except Exception as error:  # datasets raises its own, the hub's, and its file readers' errors
        raise SourceError(
            f"hub:{spec}: cannot be read ({type(error).__name__}: {str(error)[:300]}). Check the name, config and split"
            f" ({part!r} was asked for), or download a text file and give its path."
        ) from error
    text = SEPARATOR.join(texts)
    return Beginning(text[: 2 * HUB_CHARACTERS], whole=size < HUB_CHARACTERS)


def _check_hub() -> None:
    """Say within five seconds that the hub cannot be reached; the library would retry for minutes."""
    from huggingface_hub import constants

    from quantkit.checkpoint.hub import unreachable

    if constants.HF_HUB_OFFLINE or os.environ.get("HF_DATASETS_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        return  # the user says what is cached is enough, and the library then asks no network
    if why := unreachable():
        raise QuantkitError(
            f"hub: {why}. Use wikipedia-sample or builtin, give a local file, or set HF_HUB_OFFLINE=1 if the dataset is"
            " in the cache already."
        )
