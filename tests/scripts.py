"""Scripts of eval/ as modules: they are run by path, and belong to no package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any


def script(path: Path) -> Any:
    """A fresh module of the file; dataclasses in it find it under its name."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
