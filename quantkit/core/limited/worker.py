"""The child's side of ``child.py``: answers requests with one task, within limits on memory and time.

Run as ``python -I -S worker.py TASK MEMORY SECONDS FOLDER...``. It imports nothing of quantkit: a task loads
the one library that it needs, from the folders that it is given.

A message is 8 bytes of length, little-endian, and that many bytes of JSON, in either direction.
"""

from __future__ import annotations

import json
import resource
import runpy
import signal
import sys
from typing import Any, BinaryIO

UNKNOWN_BYTES = 1 << 30  # address space taken to be in use where /proc does not tell


def main(task: str, memory: str, seconds: str, *folders: str) -> None:
    """Answer requests from standard input until it ends.

    task: file that defines ``answer(request)``. memory: bytes that it may take beyond its libraries. seconds: of
    processor time for a request. folders: where its libraries lie.
    """
    sys.path += folders
    answer = runpy.run_path(task)["answer"]
    limit = _bytes_in_use() + int(memory)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # no task writes a file
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, also in the middle of one long operation
    while (request := receive(sys.stdin.buffer)) is not None:
        signal.setitimer(signal.ITIMER_PROF, float(seconds))
        reply = _reply(answer, request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(sys.stdout.buffer, reply)


def _reply(answer: Any, request: bytes) -> bytes:
    try:
        return json.dumps(answer(json.loads(request))).encode()
    except MemoryError:
        return b'{"stopped": "memory"}'
    except RecursionError:
        return b'{"stopped": "recursion"}'


def _bytes_in_use() -> int:
    """Return the address space in use now, which the limit counts too."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return UNKNOWN_BYTES


def receive(stream: BinaryIO) -> bytes | None:
    """Read one message, or None at the end of the stream."""
    header = stream.read(8)
    return stream.read(int.from_bytes(header, "little")) if len(header) == 8 else None


def send(stream: BinaryIO, message: bytes) -> None:
    """Write one message."""
    stream.write(len(message).to_bytes(8, "little") + message)
    stream.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
