"""Environments of other tools, beside our own: made through pip when first needed, and anew when a list changes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def environment(
    peer: str,
    install: list[str],
    work: Path,
    npm: Sequence[str] = (),
    *,
    alone: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> Path:
    """The Python of a peer's environment, made if it is missing or was made from another list.

    npm: packages of npm, laid beside it in ``node_modules``; none of their scripts is run.
    alone: packages that are installed last, without what they require.
    variables: set while packages are built from source; part of the list.
    """
    folder = (work / "envs" / peer).resolve()
    python, mark = folder / "bin" / "python", folder / "installed.json"
    variables = dict(variables or {})
    wanted = [*install, *npm, *alone, *(f"{name}={value}" for name, value in sorted(variables.items()))]
    if mark.exists() and json.loads(mark.read_text(encoding="utf-8")) == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    print(f"making the environment of {peer}: {' '.join(wanted)}", file=sys.stderr, flush=True)
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    commands = [[sys.executable, "-m", "venv", str(folder)], [*pip, *install]]
    if alone:
        commands.append([*pip, "--no-deps", *alone])
    if npm:
        commands.append(["npm", "install", "--silent", "--no-save", "--ignore-scripts", "--prefix", str(folder), *npm])
    for command in commands:
        if subprocess.run(command, check=False, stdout=sys.stderr, env={**os.environ, **variables}).returncode:
            raise SystemExit(f"the environment of {peer} could not be made: {' '.join(command)}")
    mark.write_text(json.dumps(wanted), encoding="utf-8")
    return python
