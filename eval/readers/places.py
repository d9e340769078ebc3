"""The readers' entries, and where their environments are."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
if str(HERE.parent / "peers") not in sys.path:
    sys.path.insert(0, str(HERE.parent / "peers"))

from environments import environment  # noqa: E402

WORK = ROOT / "build" / "interop"


def readers() -> dict[str, dict[str, Any]]:
    """The entries of environments.toml."""
    return tomllib.loads((HERE / "environments.toml").read_text(encoding="utf-8"))


def python_of(name: str) -> Path:
    """The Python of a reader's environment, made if it is missing.

    The variable QUANTKIT_READER_<NAME> (VLLM, LLAMA_CPP, TRANSFORMERS_5, ...) names one that exists already.
    """
    place = readers()[name].get("environment", name)
    given = os.environ.get(f"QUANTKIT_READER_{place.upper().replace('-', '_')}")
    if given:
        return Path(given)
    made = readers()[place]
    return environment(
        place, made["install"], WORK, alone=made.get("install_alone", []), variables=made.get("build_variables", {})
    )


def inherited() -> dict[str, str]:
    """This process's variables without those that would let another environment import its packages."""
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
