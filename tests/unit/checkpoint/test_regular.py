"""A FIFO, a device, a socket or a folder in the place of a file is refused by name, and nothing waits for it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from quantkit.checkpoint import regular
from quantkit.checkpoint.regular import check_regular, given_path, open_regular, read_regular, require_utf8
from quantkit.errors import RequestError, SourceError


@pytest.mark.parametrize("opener", [open_regular, check_regular, lambda path: read_regular(path, 10)])
def test_what_is_no_file_is_refused_by_name(opener, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    server = socket.socket(socket.AF_UNIX)
    server.bind(os.path.relpath(tmp_path / "socket"))  # the address may have 107 characters
    for path, word in (
        (tmp_path / "pipe", "pipe: a FIFO"),
        (tmp_path / "link", "link: a FIFO"),
        (Path("/dev/zero"), "/dev/zero: a character device"),
        (tmp_path / "socket", "socket: a socket"),
        (tmp_path, "a folder"),
    ):
        with pytest.raises(SourceError, match=word):
            opener(path)
    server.close()
    with pytest.raises(FileNotFoundError):
        opener(tmp_path / "nothing")


def test_what_takes_the_place_of_a_file_after_the_question_is_not_waited_for(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    asked = regular.os.stat(path)
    path.unlink()
    os.mkfifo(path)
    monkeypatch.setattr(regular.os, "stat", lambda path: asked)
    with pytest.raises(SourceError, match="a FIFO"):
        open_regular(path)


def test_a_file_and_a_link_to_one_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with open_regular(tmp_path / "link") as stream:
        assert stream.read() == b"content"
    assert read_regular(tmp_path / "file", 7) == b"content"
    with pytest.raises(SourceError, match="more than 6 bytes"):
        read_regular(tmp_path / "file", 6)
    with (tmp_path / "sparse").open("wb") as stream:
        stream.truncate(10**12)
    with pytest.raises(SourceError, match="more than 1,000,000 bytes"):
        read_regular(tmp_path / "sparse", 10**6)


def test_a_path_that_is_not_utf_8_is_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"od\xffd")
    for path in (folder, folder / "model"):
        with pytest.raises(RequestError, match=r"od\\xffd.*not UTF-8"):
            given_path(path)
        with pytest.raises(RequestError, match=r"od\\xffd.*not UTF-8"):
            require_utf8(path)
    assert given_path(tmp_path / "größe") == tmp_path / "größe"
