"""Plain UTF-8 text, packed by gzip or not, read in pieces up to what a text may have."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from quantkit.checkpoint.regular import open_regular
from quantkit.errors import SourceError

# 8 million tokens or so, more than any calibration or evaluation takes; to tokenize them costs 4 GB already.
MOST_BYTES = 32_000_000
PIECE = 1 << 20
BOM = b"\xef\xbb\xbf"


def read_plain(path: Path) -> str:
    """Read a UTF-8 file, unpacked if its name ends in .gz; line ends are kept as they are.

    path: the file; a byte order mark at its beginning is left out.

    Raises SourceError for what is no regular file, is larger than MOST_BYTES, or is no text.
    """
    with unpacked(path) as stream:
        data = bytearray()
        while piece := stream.read(PIECE):
            data += piece
            if len(data) > MOST_BYTES:
                raise too_long(path)
            if b"\0" in piece:
                raise SourceError(
                    f"{path}: not text (byte {data.index(0)} is zero). Give a UTF-8 file, no binary or UTF-16 one."
                )
    return decoded(bytes(data).removeprefix(BOM), f"{path}:")


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


def decoded(data: bytes, where: str) -> str:
    """Decode UTF-8.

    data: the bytes. where: file and line, as an error begins.

    Raises SourceError naming the first byte that is none.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SourceError(
            f"{where} not UTF-8 text (byte {error.start} is 0x{data[error.start]:02x}). "
            "Convert it, for example with: iconv -f latin1 -t utf-8"
        ) from error


def too_long(path: object) -> SourceError:
    """Make the error for a text that goes on beyond MOST_BYTES.

    path: the file or data set.
    """
    return SourceError(
        f"{path}: the text is longer than {MOST_BYTES:,} bytes, more than calibration or evaluation can use."
        " Give a part of it, for example cut off with: head -c 8000000"
    )
