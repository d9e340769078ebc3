"""Call a function in a child process with 10 seconds and 1 GB beyond what its imports take, and tell what came of it.

Seconds of processor time: what a busy machine does elsewhere does not count. What waits for something is ended, too, by
the clock and much later.

The child is kept for the next call, and started again when it has ended. What may come of a call:

passed     it returned
refused    it raised a QuantkitError
traceback  it raised anything else
memory     it wanted more than 1 GB
hang       it took 10 seconds, or waited for 60
signal     the process was ended
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import resource
import selectors
import signal
import subprocess
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 10.0
WAITING = 60.0
MEMORY = 1 << 30
START_SECONDS = 120.0  # imports of a busy machine


@dataclass
class Outcome:
    """What came of a call: the kind, the error's class and message (or the traceback), the value, and how long."""

    kind: str
    error: str = ""
    message: str = ""
    value: Any = None
    seconds: float = 0.0

    def refused(self, *words: str) -> None:
        """Fail unless it was refused in one line that has these words."""
        assert self.kind == "refused", self
        assert self.message.strip(), self
        assert "\n" not in self.message.strip(), self
        for word in words:
            assert word in self.message, self


class Limited:
    """A child process that calls functions by name."""

    def __init__(self, *modules: str, memory: int = MEMORY) -> None:
        """Name the modules whose import does not count as memory of a call."""
        self._modules, self._memory = modules, memory
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, function: str, *arguments: Any, **named: Any) -> Outcome:
        """Call ``module:function`` in the child."""
        process = self._running()
        start = time.monotonic()
        assert process.stdin is not None
        _send(process.stdin, (function, arguments, named))
        data = self._wait(process, WAITING)
        seconds = time.monotonic() - start
        if data is None:
            running = process.poll() is None
            self.close()
            kind = "hang" if running or process.returncode == -signal.SIGPROF else "signal"
            return Outcome(kind, message=f"status {process.returncode}", seconds=seconds)
        outcome: Outcome = pickle.loads(data)
        outcome.seconds = seconds
        if outcome.kind == "memory":  # what is left of it should not count for the next call
            self.close()
        return outcome

    def close(self) -> None:
        """End the child."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._process = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__)), str(self._memory), *self._modules],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ
                | {
                    "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                    "OMP_NUM_THREADS": "1",
                    "PYTHONDONTWRITEBYTECODE": "1",
                },
            )
            assert self._wait(self._process, START_SECONDS) is not None, "the child did not start"
        return self._process

    @staticmethod
    def _wait(process: subprocess.Popen[bytes], seconds: float) -> bytes | None:
        """Return the next message, or None if there is none in time."""
        assert process.stdout is not None
        end, data = time.monotonic() + seconds, b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while len(data) < 8 or len(data) < 8 + int.from_bytes(data[:8], "little"):
                if not selector.select(max(0.0, end - time.monotonic())):
                    return None
                piece = os.read(process.stdout.fileno(), 1 << 16)
                if not piece:
                    process.wait()
                    return None
                data += piece
        return data[8:]


def _send(stream: Any, value: Any) -> None:
    data = pickle.dumps(value)
    stream.write(len(data).to_bytes(8, "little") + data)
    stream.flush()


def _outcome(function: str, arguments: Any, named: Any) -> Outcome:
    from quantkit.errors import QuantkitError

    module, _, name = function.partition(":")
    try:
        return Outcome("passed", value=getattr(importlib.import_module(module), name)(*arguments, **named))
    except QuantkitError as error:
        return Outcome("refused", type(error).__name__, str(error))
    except MemoryError:
        return Outcome("memory", "MemoryError", traceback.format_exc(limit=-8))
    except BaseException as error:  # a panic of a Rust library is none of Exception's children
        kind = "memory" if "can't allocate memory" in str(error) else "traceback"
        return Outcome(kind, type(error).__name__, traceback.format_exc(limit=-12))


def _child(memory: str, *modules: str) -> None:
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the function prints must not come between the replies
    warnings.simplefilter("ignore")
    for module in modules:
        importlib.import_module(module)
    with open("/proc/self/statm") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + int(memory)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    _send(replies, "ready")
    while header := sys.stdin.buffer.read(8):
        function, arguments, named = pickle.loads(sys.stdin.buffer.read(int.from_bytes(header, "little")))
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # ends the process
        outcome = _outcome(function, arguments, named)
        signal.setitimer(signal.ITIMER_PROF, 0)
        try:
            _send(replies, outcome)
        except (pickle.PicklingError, TypeError, AttributeError):
            outcome.value = repr(outcome.value)[:1000]
            _send(replies, outcome)


if __name__ == "__main__":
    from hostile.limits import _child as child  # by its real name, so that the parent can load what it sends

    child(*sys.argv[1:])
