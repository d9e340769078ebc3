"""Exact products: inside, float32 is float32; afterwards everything is as a program had set it.

The program may have used either interface of torch.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import torch
from quantkit.core.precision import exact_products
backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
{setting}
before = [backend.fp32_precision for backend in backends]
with exact_products():
    assert torch.get_float32_matmul_precision() == "highest"
    assert [backend.fp32_precision for backend in backends] == ["ieee", "ieee"]
assert [backend.fp32_precision for backend in backends] == before, before
{after}
"""


@pytest.mark.parametrize(
    ("setting", "after"),
    [
        ("", "assert before == ['none', 'none']"),
        ("torch.set_float32_matmul_precision('medium')", "assert torch.get_float32_matmul_precision() == 'medium'"),
        ("torch.backends.cuda.matmul.allow_tf32 = True", "assert torch.backends.cuda.matmul.allow_tf32"),
        ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", "assert before == ['tf32', 'none']"),
    ],
    ids=["default", "word", "flag", "backend"],
)
def test_what_a_program_had_set_comes_back(setting: str, after: str) -> None:
    """In a process of its own: these settings cannot be taken back to the untouched state."""
    code = CODE.format(setting=setting, after=after)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
