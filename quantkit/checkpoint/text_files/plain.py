"""Plain UTF-8 text, packed by gzip or not, read in pieces up to what a text may have."""

from __future__ import annotations

import codecs
import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from quantkit.checkpoint.regular import open_regular
from quantkit.errors import SourceError

# 1.4 million tokens of English, more than calibration or evaluation takes; to tokenize them takes seconds already.
MOST_BYTES = 6_000_000
PIECE = 1 << 20
LAST_LINE = 1 << 16  # bytes in which a text that is cut off should have the end of a line or word
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Beginning:
    """A text as far as it was read; ``whole`` if that is all of it."""

    text: str
    whole: bool = True


def read_plain(path: Path) -> Beginning:
    """Read MOST_BYTES of a UTF-8 file, unpacked if its name ends in .gz; line ends are kept as they are.

    path: the file; a byte order mark at its beginning is left out.

    Raises SourceError for what is no regular file, or is no text.
    """
    with unpacked(path) as stream:
        data = bytearray()
        while len(data) <= MOST_BYTES + len(BOM) and (piece := stream.read(PIECE)):
            data += piece
            if b"\0" in piece:
                raise SourceError(
                    f"{path}: not text (byte {data.index(0)} is zero). Give a UTF-8 file, no binary or UTF-16 one."
                )
    return beginning(bytes(data).removeprefix(BOM), f"{path}:")


def beginning(data: bytes, where: str) -> Beginning:
    """Decode a text, only up to the end of a line or word if it is longer than MOST_BYTES.

    data: the bytes, or the first of them, more than MOST_BYTES. where: file, as an error begins.

    Raises SourceError naming the first byte that is no UTF-8.
    """
    if len(data) <= MOST_BYTES:
        return Beginning(decoded(data, where))
    data = data[:MOST_BYTES]
    for end in (b"\n", b" "):
        at = data.rfind(end, MOST_BYTES - LAST_LINE)
        if at >= 0:
            return Beginning(decoded(data[: at + 1].rstrip(b" "), where), whole=False)
    return Beginning(decoded(data, where, final=False), whole=False)


@contextmanager
def unpacked(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading the bytes of its text, unpacked if its name ends in .gz.

    path: the file.

    Raises SourceError for what is no regular file, cannot be read, or is no whole gzip file.
    """
    try:
        with open_regular(path) as stream:
            if path.suffix != ".gz":
                yield stream
                return
            with gzip.GzipFile(fileobj=stream) as packed:
                yield cast(BinaryIO, packed)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise SourceError(
            f"{path}: not a whole gzip file ({error}). Download it again, or unpack it yourself."
        ) from error
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror}).") from error


def decoded(data: bytes, where: str, *, final: bool = True) -> str:
    """Decode UTF-8.

    data: the bytes. where: file and line, as an error begins. final: False leaves out a character that the end cuts in
    two.

    Raises SourceError naming the first byte that is none.
    """
    try:
        return codecs.utf_8_decode(data, "strict", final)[0]
    except UnicodeDecodeError as error:
        raise SourceError(
            f"{where} not UTF-8 text (byte {error.start} is 0x{data[error.start]:02x}). "
            "Convert it, for example with: iconv -f latin1 -t utf-8"
        ) from error
