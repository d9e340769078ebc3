"""Options that would do nothing are refused by name, on the command line and in Python alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quantkit.convert.options import ConvertOptions, refuse_without_effect
from quantkit.errors import RequestError


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            dict(method="rtn", damping=0.01),
            r"--damping has no effect: --method rtn uses no statistics of a text\. Leave it out",
        ),
        (
            dict(method="rtn", samples=4, seed=1, damping=0.1),
            "--damping, --samples, --seed have no effect: .*Leave them",
        ),
        (dict(method="awq", scales="minmax", damping=0.1), "--damping has no effect: --method awq --scales minmax"),
        (dict(method="rtn", kv_bits=8, damping=0.1, samples=4), "--damping has no effect"),
        (dict(method="rtn", products="bf16x3"), "--products has no effect: --method rtn reads no text"),
    ],
)
def test_options_without_effect_are_refused_together(given: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        refuse_without_effect(given, ConvertOptions("model", Path("out"), **given))


@pytest.mark.parametrize(
    "given",
    [
        dict(method="gptq", scales="minmax", damping=0.1),
        dict(method="awq", damping=0.1, seed=1),
        dict(method="rtn", kv_bits=8, samples=4, seq_len=64, seed=1),
    ],
)
def test_options_with_an_effect_are_not(given: dict[str, Any]) -> None:
    refuse_without_effect(given, ConvertOptions("model", Path("out"), **given))
