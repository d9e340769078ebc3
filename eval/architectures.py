#!/usr/bin/env python3
"""Which model types of the installed transformers quantkit handles from end to end: every one, made tiny, is tried.

    python eval/architectures.py                       # all, 20 minutes on one core; writes result and table
    python eval/architectures.py --only qwen3_next,image-text:gemma3    # these, printed; the others' results stay
    python eval/architectures.py --shard 0/4           # every fourth, from the first; the others' results stay
    python eval/architectures.py --print               # the same without writing
    python eval/architectures.py --out FILE            # the result to a file of its own, and no table
    python eval/architectures.py --table               # the table of docs/architectures.md from the result

A type passes if ``inspect``, its ``--check``, ``convert`` with rtn and gptq, ``load`` and ``generate`` work, the logits
of the original are transformers' own, those of the converted folder are what transformers computes with the
dequantized weights, and 8 greedy tokens are those that transformers generates. If only ``--check`` fails, it says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "eval")) if path not in sys.path]

RESULT = ROOT / "eval" / "results" / "architectures.json"
PAGE = ROOT / "docs" / "architectures.md"
BEGIN, END = "<!-- types: begin -->", "<!-- types: end -->"
SECONDS = 60  # of processor time for one type: a busy machine must not fail what waits for its turn
PATIENCE = 10  # of the clock, for one second of processor time
MEMORY = 6 << 30  # bytes of addresses that one type may take beyond what the imports did


def trial_in_child(kind: Any, seconds: int = SECONDS, memory: int = MEMORY) -> dict[str, Any]:
    """``architecture_trial.trial`` in a forked child with limits. A child that dies has crashed."""
    begun = time.monotonic()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _in_child(kind, writing, seconds, memory)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        reply = pipe.read()
    _, status = os.waitpid(child, 0)
    if reply:
        result: dict[str, Any] = json.loads(reply)
    else:
        death = os.waitstatus_to_exitcode(status)
        why = f"took more than {seconds} s" if -death in (signal.SIGALRM, signal.SIGPROF) else f"ended with {death}"
        result = {"end": "crashed", "stage": "process", "message": f"its process {why}"}
    return {**result, "seconds": round(time.monotonic() - begun, 1)}


def _in_child(kind: Any, writing: int, seconds: int, memory: int) -> None:
    """Try the type, send what came out, and end this process without any of the parent's cleaning up."""
    from architecture_trial import trial

    code = 1
    try:
        signal.signal(signal.SIGPROF, partial(_late, seconds))
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.alarm(PATIENCE * seconds)
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + memory, taken + memory))
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(json.dumps(trial(kind)).encode())
        code = 0
    finally:
        os._exit(code)


def _late(seconds: int, *_: Any) -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, 10)  # if what runs does not let the exception through
    raise TimeoutError(f"more than {seconds} s")


def prepare() -> None:
    """Import what every child needs, once, and compile the kernels that they share; one thread, or a fork may hang."""
    import torch
    from architecture_trial import trial
    from tiny_models import Kind
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    result = trial(Kind("causal", "llama"))
    if result["end"] != "passed":
        print(f"even llama does not pass: {result}", file=sys.stderr)
    torch.set_num_threads(1)


def chosen(only: str | None) -> list[Any]:
    """The kinds that ``--only`` names, by type or by group and type; all without it."""
    from tiny_models import all_kinds

    kinds = all_kinds()
    if only is None:
        return kinds
    names = only.split(",")
    found = [kind for kind in kinds if kind.model_type in names or str(kind) in names]
    unknown = set(names) - {kind.model_type for kind in found} - set(map(str, found))
    if unknown:
        raise SystemExit(
            f"--only: transformers has no {', '.join(sorted(unknown))} among its causal and image-text types"
        )
    return found


def environment() -> dict[str, Any]:
    import torch
    import transformers

    from quantkit.evaluate.environment import hardware
    from quantkit.version import __version__

    versions = {"quantkit": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return {"versions": versions, "processor": hardware()["processor"]}


def line(name: str, result: dict[str, Any]) -> str:
    """One type for people."""
    detail = " | ".join(str(result[key]) for key in ("stage", "message", "at") if result.get(key))
    check = f"check: {result['check']['message']}" if "check" in result else ""
    return f"{result['end']:<18}{name:<36}{result.get('seconds', 0):5.1f} s  {detail} {check}".rstrip()


def summary(types: dict[str, dict[str, Any]]) -> str:
    """How many of each group pass, and how the others end."""
    parts = []
    for group in ("causal", "image-text"):
        ends = Counter(result["end"] for name, result in types.items() if name.startswith(f"{group}:"))
        others = ", ".join(f"{count} {end}" for end, count in ends.most_common() if end != "passed")
        parts.append(f"{ends['passed']} of {ends.total()} {group}" + (f" ({others})" if others else ""))
    return "; ".join(parts)


def table(data: dict[str, Any]) -> str:
    """Everything between the markers of docs/architectures.md."""
    versions, types = data["versions"], data["types"]
    lines = [
        f"With transformers {versions['transformers']}, torch {versions['torch']}, these pass: {summary(types)}.",
        "",
        *(_passing(group, types) for group in ("causal", "image-text")),
        "| type | ends | at | because | check |",
        "|---|---|---|---|---|",
    ]
    for name, result in sorted(types.items(), key=lambda entry: (entry[1]["end"], entry[0])):
        if result["end"] != "passed":
            cells = (name, result["end"], result.get("stage", ""), _cell(result), _cell(result.get("check", {})))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(result: dict[str, Any]) -> str:
    """A message that does not end its cell."""
    return str(result.get("message", "")).replace("|", "\\|")[:200]


def _passing(group: str, types: dict[str, dict[str, Any]]) -> str:
    start = f"{group}:"
    names = [name.removeprefix(start) for name, r in types.items() if name.startswith(start) and r["end"] == "passed"]
    return f"Pass, {group} ({len(names)}): {', '.join(names)}.\n" if names else ""


def write_page(data: dict[str, Any], page: Path = PAGE) -> None:
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{page} lacks its markers {BEGIN} and {END}")
    page.write_text(f"{before}{BEGIN}\n{table(data)}\n{END}{after}", encoding="utf-8")


def run(kinds: Iterable[Any]) -> dict[str, dict[str, Any]]:
    prepare()
    found = {}
    for kind in kinds:
        found[str(kind)] = trial_in_child(kind)
        print(line(str(kind), found[str(kind)]), flush=True)
    return found


def shard(kinds: list[Any], part: str | None) -> list[Any]:
    """Those that ``--shard i/n`` names: every n-th, from the i-th."""
    if part is None:
        return kinds
    first, _, step = part.partition("/")
    if not (first.isdecimal() and step.isdecimal() and int(first) < int(step)):
        raise SystemExit(f"--shard: {part} is not i/n, as 0/4 for the first of four")
    return kinds[int(first) :: int(step)]


def merged(found: dict[str, dict[str, Any]], path: Path) -> dict[str, Any]:
    """What a result file holds with these types tried anew. Those that transformers lost are dropped."""
    from tiny_models import all_kinds

    old = json.loads(path.read_text(encoding="utf-8"))["types"] if path.exists() else {}
    types = {**old, **found}
    return {**environment(), "types": {name: types[name] for name in sorted(map(str, all_kinds())) if name in types}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="types, or group:type, with commas")
    parser.add_argument("--shard", help="i/n: every n-th type, from the i-th")
    parser.add_argument("--print", action="store_true", dest="only_print", help="write nothing")
    parser.add_argument("--out", type=Path, help="another result file; the page stays")
    parser.add_argument("--table", action="store_true", help="only make the page from the result again")
    arguments = parser.parse_args()
    if arguments.table:
        write_page(json.loads(RESULT.read_text(encoding="utf-8")))
        return
    with contextlib.suppress(OSError):
        os.nice(10)
    found = run(shard(chosen(arguments.only), arguments.shard))
    print(summary(found))
    if arguments.only_print:
        return
    path = arguments.out or RESULT
    data = merged(found, path)
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if path == RESULT:
        write_page(data)


if __name__ == "__main__":
    main()
