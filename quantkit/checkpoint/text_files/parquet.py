"""Parquet files: the column ``text``, read in a child process, since a page of kilobytes may unpack to gigabytes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from quantkit.checkpoint.regular import check_regular
from quantkit.checkpoint.text_files.plain import MOST_BYTES, Beginning, beginning
from quantkit.checkpoint.text_files.records import names
from quantkit.core.limited.child import LimitedChild, Stopped
from quantkit.errors import MissingExtra, SourceError

TASK = Path(__file__).with_name("parquet_task.py")
MEMORY = 512 << 20
SECONDS = 5  # of processor time; 6 MB of text take less than one


def read_parquet(path: Path) -> Beginning:
    """Join the column ``text`` of a parquet file, up to MOST_BYTES; rows without a value are left out.

    path: the file.

    Raises SourceError for what is no regular file, is damaged, needs too much memory, or has no such column of strings.
    """
    if importlib.util.find_spec("pyarrow") is None:
        raise MissingExtra("pyarrow", "dev", "Reading a parquet file")
    libraries = [name for name in ("pyarrow", "numpy") if importlib.util.find_spec(name)]
    child = LimitedChild(TASK, libraries, memory=MEMORY, seconds=SECONDS, reply_bytes=8 * MOST_BYTES)
    try:
        check_regular(path)
        reply = child.ask({"path": str(path.absolute()), "most": MOST_BYTES})
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror}).") from error
    except Stopped as error:
        raise SourceError(f"{path}: reading this parquet file {error}. Download it again, or give a part.") from error
    finally:
        child.close()
    if "columns" in reply:
        raise SourceError(
            f"{path}: has no column 'text' holding strings (its columns are {names(reply['columns'])})."
            " Rename the one that holds the text."
        )
    if "doubled" in reply:
        raise SourceError(f"{path}: has {reply['doubled']} columns 'text'. Keep one of them.")
    if "error" in reply:
        raise SourceError(
            f"{path}: not a readable parquet file ({' '.join(reply['error'][:300].split())}). Download it again."
        )
    return beginning(reply["text"].encode(), f"{path}:")
