"""A hostile text is read in part or refused by name within 10 seconds and 1 GB; a valid one gives its bytes as ever."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from hostile.limits import Limited

from quantkit.errors import SourceError

LOAD = "quantkit.checkpoint.texts:load_text"


def bomb(path: Path) -> None:
    """3 MB that unpack to 3 GB."""
    piece = gzip.compress(b"a" * (100 << 20), mtime=0)
    path.write_bytes(piece * 30)


def long_line(path: Path) -> None:
    with path.open("wb") as stream:
        for _ in range(200):
            stream.write(b"a" * 1_000_000)


def endless_records(path: Path) -> None:
    path.write_bytes(gzip.compress(b'{"text":""}\n' * 600_000, 1, mtime=0))


def no_members(path: Path) -> None:
    """Many gzip members with nothing in them."""
    path.write_bytes(gzip.compress(b"", mtime=0) * 100_000)


def many_lists(path: Path) -> None:
    path.write_bytes(b'{"x": [' + b"{}," * 15_000_000 + b'{}], "text": "a"}')


def digits(path: Path) -> None:
    path.write_bytes(b"0123456789" * 700_000)


def emoji(path: Path) -> None:
    path.write_bytes("\U0001f600\U0001f680".encode() * 800_000)


def prose(path: Path) -> None:
    path.write_bytes("The history of the world — naïve, 中文 — is long.\n".encode() * 150_000)


def records(path: Path) -> None:
    first = b'{"text": "The history of the world.", "other": "' + b"x" * 1000 + b'"}\n'
    path.write_bytes(first + b'{"text": "a b c d e f"}\n' * 490_000)


def written(content: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content) and None


CASES: list[tuple[str, Callable[[Path], None], list[str]]] = [
    ("bomb.jsonl.gz", bomb, ["line 1 goes beyond 16,000,000 bytes"]),
    ("records.jsonl.gz", endless_records, ["the text is empty as far as it was read"]),
    ("empty.txt.gz", no_members, ["the text is empty"]),
    ("line.jsonl", long_line, ["line 1 goes beyond 16,000,000 bytes"]),
    ("lists.jsonl", many_lists, ["line 1 goes beyond 16,000,000 bytes"]),
    ("pipe.txt", os.mkfifo, ["pipe.txt: a FIFO", "Write its content to a file"]),
    ("pipe.jsonl", os.mkfifo, ["a FIFO"]),
    ("pipe.parquet", os.mkfifo, ["a FIFO"]),
    ("pipe.txt.gz", os.mkfifo, ["a FIFO"]),
    ("zero.txt", lambda path: path.symlink_to("/dev/zero"), ["a character device"]),
    ("zero.parquet", lambda path: path.symlink_to("/dev/zero"), ["a character device"]),
    ("random.jsonl", lambda path: path.symlink_to("/dev/urandom"), ["a character device"]),
    ("folder.txt", Path.mkdir, ["a folder"]),
    ("folder.parquet", Path.mkdir, ["a folder"]),
    ("loop.txt", lambda path: path.symlink_to(path), ["no such file"]),
    ("noise.txt", written(bytes(range(1, 256)) * 100), ["not UTF-8 text (byte 127 is 0x80)"]),
    ("zeros.txt", written(b"text" + bytes(100)), ["byte 4 is zero"]),
    ("utf16.txt", written("text".encode("utf-16")), ["not text"]),
    ("noise.parquet", written(bytes(range(256)) * 100), ["not a readable parquet file"]),
    ("empty.parquet", written(b""), ["not a readable parquet file"]),
    ("latin.jsonl", written(b'{"text": "a"}\n{"text": "caf\xe9"}\n'), ["line 2: not UTF-8 text"]),
    ("half.jsonl", written(b'{"text": "a"}\n{"text": "b\\ud800c"}\n'),
     ["line 2: character 1 of field 'text'", "\\ud800"]),
    ("deep.jsonl", written(b'{"text": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"), ["line 1 is nested"]),
    ("deep_objects.jsonl", written(b'{"text":' * 100_000 + b"0" + b"}" * 100_000), ["line 1 is nested"]),
    ("digits.jsonl", written(b'\n{"text": "a", "n": ' + b"9" * 5_000 + b"}"), ["line 2 is not JSON (a number"]),
    ("keys.jsonl", written(json.dumps({"k" * 999 + str(i): 0 for i in range(99)}).encode()), ["and 87 more"]),
    ("null.jsonl", written(b"null\n"), ["line 1 has no field 'text'"]),
    ("number.jsonl", written(b'{"text": 1}\n'), ["line 1 has no field 'text'"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "make", "words"), CASES, ids=[case[0] for case in CASES])
def test_a_hostile_text_is_refused_by_name(
    name: str, make: Callable[[Path], None], words: list[str], limited: Limited, tmp_path: Path
) -> None:
    make(tmp_path / name)
    outcome = limited(LOAD, str(tmp_path / name), split="calibration")
    outcome.refused(name, *words)
    assert len(outcome.message) < 1000


def tokens(path: str, folder: str) -> tuple[int, bool, int, str]:
    """What the child with limits calls: bytes and tokens that are read, whether all, and the last of the text."""
    from quantkit.checkpoint.long_texts import MOST_TOKENS
    from quantkit.checkpoint.texts import load_text
    from quantkit.checkpoint.tokenizer import load_tokenizer, long_text_ids

    text = load_text(path, split="calibration")
    ids = long_text_ids(load_tokenizer(Path(folder)), text.text, MOST_TOKENS)
    return len(text.text.encode()), text.whole, len(ids), text.text[-20:]


@pytest.mark.parametrize(
    ("name", "make", "last"),
    [
        ("bomb.txt.gz", bomb, "a" * 20),
        ("line.txt", long_line, "a" * 20),
        ("digits.txt", digits, "01234567890123456789"),
        ("emoji.txt", emoji, "\U0001f600\U0001f680" * 10),
        ("prose.txt", prose, "naïve, 中文 — is long.\n"[-20:]),
        ("records.jsonl", records, "e f\n\n"),
    ],
)
def test_the_beginning_of_a_long_text_is_read(
    name: str, make: Callable[[Path], None], last: str, limited: Limited, tiny_model: Path, tmp_path: Path
) -> None:
    make(tmp_path / name)
    outcome = limited("hostile.test_texts:tokens", str(tmp_path / name), str(tiny_model))
    assert outcome.kind == "passed", outcome
    size, whole, count, end = outcome.value
    assert 5_900_000 < size <= 6_000_000
    assert not whole
    assert 10**5 < count <= 2**21
    assert end.endswith(last)


def test_a_socket_is_refused_by_name(limited: Limited, tmp_path: Path) -> None:
    server = socket.socket(socket.AF_UNIX)
    server.bind(os.path.relpath(tmp_path / "s.txt"))
    limited(LOAD, str(tmp_path / "s.txt"), split="calibration").refused("a socket")
    server.close()


@pytest.mark.parametrize("name", ["~nobody-of-this-name/x.txt", "x" * 5000, "a\0b", "", "."])
def test_a_name_that_names_nothing_is_refused(name: str, limited: Limited) -> None:
    assert limited(LOAD, name, split="calibration").kind == "refused"


def test_a_hostile_parquet_file_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read in a child with limits of its own: lowered here, so that the files are quickly made."""
    import pyarrow
    from pyarrow import parquet

    from quantkit.checkpoint.text_files import parquet as reader
    from quantkit.checkpoint.texts import load_text

    def refused(words: str) -> None:
        with pytest.raises(SourceError, match=f"a.parquet.*{words}"):
            load_text(str(path), split="calibration")

    path = tmp_path / "a.parquet"
    doubled = pyarrow.table([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    parquet.write_table(doubled, path)
    refused("2 columns 'text'")
    parquet.write_table(pyarrow.table({"text": [["a"]]}), path)
    refused("no column 'text' holding strings.*list")
    # kilobytes that unpack to 100 MB: a value in many rows, and a page of many bytes
    parquet.write_table(pyarrow.table({"text": _repeated("a" * 100_000, 1_000)}), path)
    assert path.stat().st_size < 10**6
    text = load_text(str(path), split="calibration")
    assert (len(text.text), text.whole) == (6_000_000, False)
    monkeypatch.setattr(reader, "MEMORY", 64 << 20)
    table = pyarrow.table({"text": ["a" * 100_000_000]})
    parquet.write_table(table, path, compression="zstd", use_dictionary=False, write_statistics=False)
    assert path.stat().st_size < 10**6
    refused("needs more than 67 MB of memory")


def _repeated(value: str, count: int) -> object:
    import pyarrow

    indices = pyarrow.array([0] * count, pyarrow.int32())
    return pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array([value]))


def test_valid_texts_give_the_bytes_they_always_gave(tmp_path: Path) -> None:
    from quantkit.checkpoint.texts import load_text

    content = "\ufeffone\r\ntwo — \U0001f600\n".encode()
    (tmp_path / "a.txt").write_bytes(content)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(content[:10]) + gzip.compress(content[10:]))
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one\\r\\ntwo"}\r\n \n{"text": "\\ud83d\\ude00"}')
    for name in ("a.txt", "a.txt.gz"):
        text = load_text(str(tmp_path / name), split="calibration")
        assert text.text == "one\r\ntwo — \U0001f600\n"
        assert text.sha256 == hashlib.sha256(content[3:]).hexdigest()
    assert load_text(str(tmp_path / "a.jsonl"), split="calibration").text == "one\r\ntwo\n\n\U0001f600"
