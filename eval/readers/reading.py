"""What the scripts of all readers share. Imported inside a reader's environment: numpy and no more, never quantkit.

A script gets a JSON file of jobs and answers each in a child of its own, so that one that dies takes no other along:
the libraries are imported once, before. An answer is ``CASE.npy`` (float32 log-probabilities ``[tokens, vocabulary]``
of the next token after each) and ``CASE.json``.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

# (folder, ids, how many to write greedily, dtype) -> (log-probabilities, greedy tokens, what else there is to say)
Reader = Callable[[str, list[int], int, str], tuple[Any, list[int], dict[str, Any]]]


def serve(read: Reader, fork: bool = True) -> None:
    """Answer the jobs of the file that is the script's argument.

    fork: whether a child may go on with the libraries that are imported here; else each is a new process (libraries
    that start threads when they are imported would wait for them without end).
    """
    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    out = Path(asked["out"])
    if len(sys.argv) > 2:
        _answer(read, asked, asked["jobs"][int(sys.argv[2])], out)
    found = {}
    for name in asked["versions"]:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    (out / "versions.json").write_text(json.dumps(found), encoding="utf-8")
    for number, job in enumerate(asked["jobs"]):
        child = os.fork()
        if child == 0:
            if not fork:
                os.execv(sys.executable, [sys.executable, *sys.argv, str(number)])
            _answer(read, asked, job, out)
        _wait(child, out / f"{job['case']}.json", asked["seconds"])


def log_softmax(logits: Any) -> Any:
    """Log-probabilities of logits ``[tokens, vocabulary]``, in float64."""
    x = np.asarray(logits, dtype=np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def _answer(read: Reader, asked: dict[str, Any], job: dict[str, Any], out: Path) -> None:
    """Read one folder, in the child, which ends here. The first dtype that works is the answer's."""
    log = os.open(out / f"{job['case']}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.dump_traceback_later(max(1.0, asked["seconds"] - 2), exit=False)  # where one hangs: in its log
    errors: dict[str, str] = {}
    begun = time.perf_counter()
    answer: dict[str, Any] = {"loads": False}
    for dtype in asked["dtypes"]:
        try:
            logs, greedy, said = read(job["path"], asked["ids"], asked["new_tokens"], dtype)
        except BaseException as error:
            traceback.print_exc()
            errors[dtype] = f"{type(error).__name__}: {error}"[:2000]
            continue
        np.save(out / f"{job['case']}.npy", np.asarray(logs, dtype=np.float32))
        answer = {"loads": True, "dtype": dtype, "greedy": list(map(int, greedy)), **said}
        break
    answer |= {"errors": errors, "seconds": round(time.perf_counter() - begun, 1)}
    (out / f"{job['case']}.json").write_text(json.dumps(answer), encoding="utf-8")
    os._exit(0)


def _wait(child: int, answer: Path, seconds: float) -> None:
    """Wait for a child; one that dies or takes too long is an answer, too."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            if not answer.exists():
                code = os.waitstatus_to_exitcode(status)
                answer.write_text(json.dumps({"loads": False, "errors": {"all": f"died with exit code {code}"}}))
            return
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    answer.write_text(json.dumps({"loads": False, "errors": {"all": f"no answer in {seconds:g} s"}}))
