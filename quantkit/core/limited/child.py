"""A child process that does one risky task under limits on memory and time, and is kept for the next request.

For what a library does with a stranger's file where nothing inside this process can stop it: a template that doubles a
string, a compressed page that unpacks to gigabytes. The child loads only the task and its one library, so it starts in
tenths of a second.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.errors import QuantkitError

WORKER = Path(__file__).with_name("worker.py")
# Of the clock, for one second of processor time: a busy machine must not fail what is only waiting for its turn.
PATIENCE = 10


class Stopped(QuantkitError):
    """A task went over a limit, or its process ended; the message says which, to be put behind "it"."""


class LimitedChild:
    """One task in a process of its own, started at the first request and again after it ended."""

    def __init__(self, task: Path, libraries: Sequence[str], *, memory: int, seconds: int, reply_bytes: int) -> None:
        """Say what to run; nothing is started yet.

        task: file that defines ``answer(request: dict) -> dict``. libraries: top-level modules it imports.
        memory: bytes it may take beyond its libraries. seconds: of processor time for a request. reply_bytes: size of
        a reply, at most.
        """
        self._task, self._libraries = task, tuple(libraries)
        self._memory, self._seconds, self._reply_bytes = memory, seconds, reply_bytes
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request of JSON values and return the task's reply.

        Raises Stopped if it went over a limit or its process ended.
        """
        message = json.dumps(request).encode()
        with self._lock:
            process = self._running()
            timer = threading.Timer(PATIENCE * self._seconds, process.kill)
            timer.daemon = True
            timer.start()
            try:
                reply = self._exchange(process, message)
            except BaseException:  # whatever happened, the next request must not meet half an answer
                process.kill()
                raise
            finally:
                timer.cancel()
        if "stopped" in reply:
            raise Stopped(self._words(reply["stopped"]))
        return reply

    def close(self) -> None:
        """End the process; the next request starts another one."""
        with self._lock:
            if self._process is not None and self._owner == os.getpid():
                _end(self._process)
            self._process = None

    def _running(self) -> subprocess.Popen[bytes]:
        # The pipes of a process that forked belong to its parent.
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return self._process
        if self._process is not None and self._owner == os.getpid():
            _end(self._process)
        limits = [str(self._memory), str(self._seconds)]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(WORKER), str(self._task), *limits, *_folders(self._libraries)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for this process alone, which then ends the child
            env=os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "1"},
        )
        self._owner = os.getpid()
        weakref.finalize(self, _end, self._process)
        return self._process

    def _exchange(self, process: subprocess.Popen[bytes], message: bytes) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(len(message).to_bytes(8, "little") + message)
            process.stdin.flush()
        except BrokenPipeError:
            raise Stopped(self._why_ended(process)) from None
        header = process.stdout.read(8)
        size = int.from_bytes(header, "little")
        if len(header) == 8 and size > self._reply_bytes:
            raise Stopped(f"gives more than {self._reply_bytes:,} bytes")
        body = process.stdout.read(size)
        if len(header) < 8 or len(body) < size:
            raise Stopped(self._why_ended(process))
        reply: dict[str, Any] = json.loads(body)
        return reply

    def _why_ended(self, process: subprocess.Popen[bytes]) -> str:
        status = process.wait()
        if status == -signal.SIGPROF:
            return f"takes more than {self._seconds} seconds of processor time"
        if status == -signal.SIGKILL:
            return f"does not end within {PATIENCE * self._seconds} seconds, or was killed"
        return f"ends its process (status {status})"

    def _words(self, reason: str) -> str:
        if reason == "memory":
            return f"needs more than {self._memory / 1e6:.0f} MB of memory"
        return "is nested too deeply, or calls itself without end"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):  # the rest of a request that nobody reads
                stream.close()


def _folders(libraries: Sequence[str]) -> list[str]:
    """Return the folders that the libraries are imported from, in the order of this process's path."""
    places = []
    for name in libraries:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise QuantkitError(f"The library '{name}' is not installed. Install it with: pip install {name}")
        places.append(str(Path(spec.origin).parents[1 if spec.submodule_search_locations else 0]))
    return list(dict.fromkeys(places))
