"""The pipeline that joins the rooms: plan, the loop over blocks, verification, report.

``quantkit.convert`` is both this package and, called, the function ``quantkit.convert.run.convert``: Python binds a
subpackage to its parent's attribute on first import, so the module itself has to be callable for both to work.
"""

from __future__ import annotations

import sys
import types
from typing import Any


class _CallablePackage(types.ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from quantkit.convert.run import convert

        return convert(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
