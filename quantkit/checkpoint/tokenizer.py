"""Tokenizers: loaded from a model folder or rebuilt from a GGUF file, and written so that other readers load them.

transformers' own GGUF loader is not used. Seen with 5.17: Gemma's tokenizer came out without merges, so that every word
fell apart into letters and perplexity rose from 24 to 1280, without a word of warning; SmolLM2's lost the rule that
digits stand alone. Here a rebuilt tokenizer must pass ``check_round_trip``.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from quantkit.checkpoint.fetch import fetch, is_named
from quantkit.checkpoint.foreign_files.code_references import passed_on
from quantkit.checkpoint.foreign_files.fields import read_json
from quantkit.checkpoint.foreign_files.library_words import refused_field
from quantkit.checkpoint.gguf_files.header import read_header
from quantkit.checkpoint.gguf_files.vocabulary import rebuild
from quantkit.checkpoint.hub import download, is_hub_id
from quantkit.checkpoint.long_texts import PIECE, Encoding, ids_in_pieces
from quantkit.checkpoint.names import TOKENIZER_FILES, VOCABULARY_FILES
from quantkit.checkpoint.regular import check_regular, given_path
from quantkit.checkpoint.source import Source
from quantkit.checkpoint.storage.links import TEMPLATES, refuse_links_out
from quantkit.errors import RequestError, SourceError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Written by transformers 5, unknown to 4. The generic class is the same thing in both; the rest describes the loading.
GENERIC_CLASS = "PreTrainedTokenizerFast"
ONLY_IN_5 = ("backend", "is_local", "local_files_only")

CONFIG = "tokenizer_config.json"
MOST_BYTES = 100_000_000  # of a tokenizer's file; Gemma's has 33 million
MOST_GROWTH = 64  # times as long, in bytes: a space becomes three for its mark
MOST_TOKENS = 16  # of a letter: one for each of its bytes, and some for what marks words

# Words, digits, code, several scripts, runs of spaces and newlines. NFC, because some tokenizers normalize to that.
ROUND_TRIP_TEXT = (
    "The committee didn't publish its 1984 report until October, 27 months later.\n\n"
    "def area(r):\n    return 3.14159 * r**2  # m²\n\n\tNaïve café — “quotes”, 中文, 日本語, русский, 😀.\n"
)
ENGLISH = "The history of the world is the history of the people who lived in it, and of the things that they did."


def load_tokenizer(ref: str | Path | Source) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a named model, folder, GGUF file or open source. Reads no weights.

    Raises SourceError if there is none, or if one rebuilt from GGUF does not reproduce text; RequestError for a
    reference that names nothing.
    """
    path = _locate(ref)
    return tokenizer_from_gguf(path) if path.suffix == ".gguf" and path.is_file() else _from_folder(path)


def tokenizer_from_gguf(path: Path, changes: Mapping[str, Any] | None = None) -> PreTrainedTokenizerFast:
    """Rebuild the tokenizer of a GGUF file and check it.

    changes: metadata values to read differently (to reproduce another reader).
    """
    from transformers import PreTrainedTokenizerFast

    rebuilt = rebuild(read_header(path).metadata | dict(changes or {}), path)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=rebuilt.tokenizer,
        clean_up_tokenization_spaces=False,
        model_max_length=rebuilt.context_length,
        **rebuilt.special,
    )
    tokenizer.chat_template = rebuilt.chat_template
    check_round_trip(tokenizer, str(path))
    return tokenizer


def write_tokenizer(source: Source, out_dir: Path) -> list[str]:
    """Write tokenizer and chat template into an existing folder, loadable by transformers 4 and 5.

    Returns file names.
    """
    path = _locate(source)
    if path.is_file():
        load_tokenizer(source).save_pretrained(out_dir)
    else:
        _require_vocabulary(path)
        for name in [*TOKENIZER_FILES, *(p.name for p in path.glob("*.tiktoken"))]:
            if (path / name).is_file():
                shutil.copyfile(path / name, out_dir / name)
        if (path / TEMPLATES).is_dir():
            shutil.copytree(path / TEMPLATES, out_dir / TEMPLATES, dirs_exist_ok=True)
        if not (out_dir / "tokenizer.json").exists():  # engines read this one; older folders hold only its ingredients
            load_tokenizer(source).save_pretrained(out_dir)
    repair_config(out_dir)
    present = [*TOKENIZER_FILES, *(p.name for p in out_dir.glob("*.tiktoken")), TEMPLATES]
    return [name for name in present if (out_dir / name).exists()]


def wants_bos(tokenizer: Any) -> bool:
    """Return whether this model's texts start with BOS: its own encoding does so, or it has Gemma's vocabulary.

    Gemma is named because its models are useless without BOS (perplexity in the thousands) and tokenizers rebuilt by
    other tools often lack the rule.
    """
    bos = tokenizer.bos_token_id
    if bos is None:
        return False
    if tokenizer("a")["input_ids"][:1] == [bos]:
        return True
    vocab = tokenizer.get_vocab()
    return tokenizer.bos_token == "<bos>" and ("<start_of_turn>" in vocab or "<unused0>" in vocab)


def check_vocabulary(ids: Iterable[int], config: Mapping[str, Any], where: object) -> None:
    """Raise RequestError for token ids that the model has no embedding for.

    The tokenizer then belongs to another model.
    """
    largest, size = max(ids, default=0), config.get("vocab_size")
    if isinstance(size, int) and largest >= size:
        raise RequestError(
            f"{where}: the tokenizer yields id {largest}, but the model has {size} embeddings: the tokenizer belongs to"
            " another model. Replace its files by the right ones."
        )


def check_round_trip(tokenizer: Any, where: str) -> None:
    """Raise SourceError if encoding and decoding changes a text, or if words fall apart into letters."""
    ids = tokenizer.encode(ROUND_TRIP_TEXT, add_special_tokens=False)
    back = tokenizer.decode(ids)
    if back != ROUND_TRIP_TEXT:
        at = next(
            (i for i, (a, b) in enumerate(zip(ROUND_TRIP_TEXT, back, strict=False)) if a != b),
            min(len(ROUND_TRIP_TEXT), len(back)),
        )
        raise SourceError(
            f"{where}: its tokenizer does not reproduce text: {ROUND_TRIP_TEXT[at : at + 20]!r} came back as"
            f" {back[at : at + 20]!r}. Use the model's Hugging Face folder, or a GGUF file made by a current llama.cpp."
        )
    count = len(tokenizer.encode(ENGLISH, add_special_tokens=False))
    if count > len(ENGLISH) / 2:
        raise SourceError(
            f"{where}: its tokenizer needs {count} tokens for {len(ENGLISH)} letters of English: its merges are lost. "
            "Use the model's Hugging Face folder, or a GGUF file made by a current llama.cpp."
        )


def _locate(ref: str | Path | Source) -> Path:
    """Find the folder or .gguf file that a reference names."""
    path = given_path(ref) if isinstance(ref, str | Path) else ref.path
    if isinstance(ref, str) and is_named(ref) and not path.exists():
        path = fetch(ref)
    if isinstance(ref, str) and not path.exists() and is_hub_id(ref):
        path = download(ref)
    if not path.exists():
        raise RequestError(f"{ref}: no such folder or file, and no model of that name is known.")
    if path.is_file() and path.suffix != ".gguf":
        raise SourceError(f"{path}: no tokenizer can be read from this file. Give the model's folder or a .gguf file.")
    if path.is_dir():
        refuse_links_out(path)
        _check_files(path)
    ggufs = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if ggufs and not any((path / name).exists() for name in VOCABULARY_FILES):
        if len(ggufs) > 1:
            raise RequestError(f"{path}: holds {len(ggufs)} GGUF files; name one of them: {ggufs[0].name}, ...")
        return ggufs[0]
    return path


def _from_folder(path: Path) -> PreTrainedTokenizerFast:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    _require_vocabulary(path)
    reader: Any = AutoTokenizer
    if class_of_its_own(path):
        if (path / "tokenizer.json").is_file():
            reader = PreTrainedTokenizerFast
        elif "auto_map" in read_json(path / CONFIG):
            raise SourceError(
                f"{path / CONFIG}: names code of the folder as its tokenizer (auto_map), which is not run, and there is"
                " no tokenizer.json, which would do without. Take a folder of the model that has one, or a GGUF file."
            )
    with library_errors(path, "loaded"):
        tokenizer: Any = reader.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    _check_loaded(tokenizer, path)
    return cast("PreTrainedTokenizerFast", tokenizer)


def class_of_its_own(folder: Path) -> bool:
    """Return whether a folder's tokenizer_config.json names a class that transformers does not have.

    Raises SourceError for a file that is no JSON object.
    """
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    if not (folder / CONFIG).exists():
        return False
    config = read_json(folder / CONFIG)
    name = config.get("tokenizer_class")
    if not isinstance(name, str) or not name:
        return "auto_map" in config
    return not any(tokenizer_class_from_name(one) for one in (name, name.removesuffix("Fast"), f"{name}Fast"))


def _check_files(path: Path) -> None:
    """Raise SourceError for a tokenizer file that is no regular file or larger than any is, and for names of others.

    transformers would read a file that ``fast_tokenizer_files`` names in the place of tokenizer.json, wherever it lies.
    """
    named = read_json(path / CONFIG).get("fast_tokenizer_files") if (path / CONFIG).exists() else None
    if named not in (None, [], ["tokenizer.json"]):
        raise SourceError(
            f"{path / CONFIG}: fast_tokenizer_files names other files than tokenizer.json, for other versions of"
            " transformers. Take the field out, and name the file that you want tokenizer.json."
        )
    templates = [file for file in sorted((path / TEMPLATES).rglob("*")) if not file.is_dir()]
    others = [*path.glob("*.tiktoken"), *templates]
    for file in [*(path / name for name in (*TOKENIZER_FILES, "config.json")), *others]:
        if file.exists():
            check_regular(file)
            if file.stat().st_size > MOST_BYTES:
                raise SourceError(f"{file}: more than {MOST_BYTES:,} bytes, no tokenizer's file. Download it again.")


@contextmanager
def library_errors(path: Path, what: str, part: str = "tokenizer") -> Iterator[None]:
    """Turn errors of the libraries that read tokenizers and processors into SourceError.

    They raise whatever their parsers raise: json, tokenizers, KeyError, and a panic of Rust code, no Exception. A
    library that is missing (ImportError) is for the caller to name.

    path: the model. what: what could not be done. part: of what.
    """
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if isinstance(error, ImportError) and part != "tokenizer":
            raise
        if isinstance(error, StrictDataclassError):  # transformers reads the model's config beside the tokenizer's
            said = refused_field(error, read_json(path / "config.json"))
            raise SourceError(f"{path / 'config.json'}: {said}. Correct it, or download it again.") from error
        raise SourceError(
            f"{path}: the {part} cannot be {what} ({type(error).__name__}: {' '.join(str(error)[:300].split())}). "
            f"Download the {part} files again; {part}s that bring code of their own are not run."
        ) from error


def _check_loaded(tokenizer: Any, path: Path) -> None:
    """Raise SourceError for a tokenizer whose settings are of wrong types, or that makes too much of a sentence."""
    longest = tokenizer.model_max_length
    if isinstance(longest, bool) or not isinstance(longest, (int, float)):
        raise SourceError(
            f"{path / CONFIG}: model_max_length is {repr(longest)[:60]}, expected a number of tokens."
            " Correct it, or download the file again."
        )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    for part in (getattr(backend, "normalizer", None), getattr(backend, "decoder", None)):
        if part is not None and _growth(json.loads(part.__getstate__())) > MOST_GROWTH:
            raise SourceError(
                f"{path / 'tokenizer.json'}: replacements in its normalizer or decoder make a text more than"
                f" {MOST_GROWTH} times as long. Download it again."
            )
    ids = token_ids(tokenizer, ENGLISH, special=True)
    with library_errors(path, "used"):
        tokenizer.decode(ids)
    if len(ids) > MOST_TOKENS * len(ENGLISH):
        raise SourceError(
            f"{path}: the tokenizer makes {len(ids)} tokens of {len(ENGLISH)} letters. Download its files again."
        )


def _growth(part: Any) -> float:
    """Return how many times as long a normalizer or decoder may make a text, by its ``Replace`` steps."""
    if isinstance(part, list):
        return math.prod(map(_growth, part))
    if not isinstance(part, dict):
        return 1.0
    if part.get("type") != "Replace":
        return math.prod(map(_growth, part.values()))
    pattern = (part.get("pattern") or {}).get("String")  # else a regular expression, which may match a letter or less
    return max(1.0, len(str(part.get("content")).encode()) / max(1, len((pattern or "").encode())))


def token_ids(tokenizer: Any, text: str, *, special: bool = False, most: int | None = None) -> list[int]:
    """Encode a text of any length, as if in one piece.

    special: with the tokens that the model puts around a text. most: of the text's tokens, only the
    first of them; the rest of the text is not read.

    Raises SourceError if the tokenizer's library gives up, on a pattern that tries without end for example.
    """
    if len(text) <= PIECE or not tokenizer.is_fast:
        # verbose=False: that the text is longer than the model's context is for the caller to judge
        with library_errors(_name(tokenizer), "used on this text"):
            ids: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        return ids
    before, after = _around(tokenizer) if special else ([], [])
    return [*before, *long_text_ids(tokenizer, text, most).tolist(), *after]


def long_text_ids(tokenizer: Any, text: str, most: int | None = None) -> NDArray[np.int32]:
    """Encode a text of any length, as if in one piece, without the tokens that the model puts around it.

    most: as for ``token_ids``. Returns int32 ``[tokens]``, a tenth of what a list takes.

    Raises SourceError as ``token_ids`` does, and for a long text that has no place where it could be cut in two.
    """
    if not tokenizer.is_fast:  # written in Python: it tells no places, and keeps nothing but ids
        return np.array(token_ids(tokenizer, text), dtype=np.int32)[:most]

    def encode(part: str) -> Encoding:
        with library_errors(_name(tokenizer), "used on this text"):
            encoded = tokenizer(part, add_special_tokens=False, verbose=False)
        encoding: Encoding = encoded.encodings[0]
        return encoding

    return ids_in_pieces(encode, text, most)


def _around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the special tokens that the model puts before and after a text."""
    inner, whole = token_ids(tokenizer, ENGLISH), token_ids(tokenizer, ENGLISH, special=True)
    for at in range(len(whole) - len(inner) + 1):
        if whole[at : at + len(inner)] == inner:
            return whole[:at], whole[at + len(inner) :]
    raise SourceError(
        f"{_name(tokenizer)}: special tokens change those of a text. Give a text of at most {PIECE:,} letters."
    )


def _name(tokenizer: Any) -> Path:
    return Path(getattr(tokenizer, "name_or_path", "") or "tokenizer")


def _require_vocabulary(path: Path) -> None:
    if not any((path / name).exists() for name in VOCABULARY_FILES) and not any(path.glob("*.tiktoken")):
        raise SourceError(
            f"{path}: no tokenizer (none of {', '.join(VOCABULARY_FILES)}). Copy the tokenizer files of the model into"
            " this folder; calibration, evaluation and generation need them."
        )


def repair_config(folder: Path) -> None:
    """Make tokenizer_config.json readable by transformers 4 as well, and put the chat template where both find it."""
    path = folder / CONFIG
    config: dict[str, Any] = read_json(path) if path.exists() else {"tokenizer_class": GENERIC_CLASS}
    if config.get("tokenizer_class") in (None, "TokenizersBackend") or class_of_its_own(folder):
        config["tokenizer_class"] = GENERIC_CLASS
    config = passed_on(config)
    for key in ONLY_IN_5:
        config.pop(key, None)
    extra = config.get("extra_special_tokens")
    if isinstance(extra, list):  # version 4 knows this key as a mapping, and the list under its older name
        del config["extra_special_tokens"]
        config["additional_special_tokens"] = extra
    template = folder / "chat_template.jinja"
    if "chat_template" not in config and template.exists():
        config["chat_template"] = template.read_text(encoding="utf-8")
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
