"""Read and write ``dynamic``: GPTQModel's ordered map from a pattern to what differs for the modules it matches.

``"-:PATTERN": {}`` leaves modules at 16 bit, ``"+:PATTERN": {...}`` (or no prefix) overrides ``bits``, ``group_size``,
``sym``; the first match wins. Readers use ``re.match`` on the module's name: gptqmodel/quantization/config.py
(dynamic_get), vLLM vllm/model_executor/layers/quantization/utils/gptq_utils.py (get_dynamic_override), SGLang the same
code.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Literal

from quantkit.core.scheme import Scheme
from quantkit.formats.common import match_pattern
from quantkit.formats.interface import CheckpointLayout

# vLLM and SGLang ask for the name of the fused layer, which no file stores.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def dynamic_rules(layout: CheckpointLayout, base: Scheme) -> dict[str, dict[str, Any]]:
    """List the rules for what is not quantized as ``base``. A dense lm_head needs none: ``lm_head: false`` says it."""
    rules: dict[str, dict[str, Any]] = {}
    dense = [name for name in layout.dense if name != "lm_head"]
    if dense:
        rules[f"-:{pattern(dense)}"] = {}
    for scheme in dict.fromkeys(layout.modules.values()):
        if scheme != base:
            members = [name for name, other in layout.modules.items() if other == scheme]
            size = -1 if scheme.group_size is None else scheme.group_size
            changed = {
                "bits": (scheme.bits, base.bits),
                "group_size": (size, -1 if base.group_size is None else base.group_size),
            }
            rules[f"+:{pattern(members)}"] = {key: own for key, (own, usual) in changed.items() if own != usual}
    return rules


def override_for(module: str, dynamic: Mapping[str, Any] | None) -> dict[str, Any] | Literal[False] | None:
    """Return the overrides of a module: None without a rule, False if it is left at 16 bit."""
    for rule, values in (dynamic or {}).items():
        if rule.startswith("-:"):
            if match_pattern(rule[2:], module):
                return False
        elif match_pattern(rule.removeprefix("+:"), module):
            return dict(values)
    return None


def pattern(names: Collection[str]) -> str:
    """Build a regular expression that matches exactly these names, and fused names whose parts are all among them.

    >>> pattern(["layers.0.up", "layers.1.up"])
    '^layers\\\\.(?:0|1)\\\\.up$'
    """
    wanted = dict.fromkeys(names)
    for name in names:
        owner, _, local = name.rpartition(".")
        for fused, parts in FUSED.items():
            if local in parts and all(f"{owner}.{part}" in wanted for part in parts):
                wanted[f"{owner}.{fused}"] = None
    numbers: dict[tuple[str, str], list[str]] = {}  # (before, after) the first number of a name
    plain = []
    for name in wanted:
        match = re.match(r"(.*?\.)(\d+)(\..*)", name)
        if match:
            numbers.setdefault((match[1], match[3]), []).append(match[2])
        else:
            plain.append(re.escape(name))
    ends: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (before, after), found_numbers in numbers.items():
        ends.setdefault((before, tuple(sorted(found_numbers, key=int))), []).append(re.escape(after))
    plain += [f"{re.escape(before)}{_any(list(which))}{_any(after)}" for (before, which), after in ends.items()]
    return f"^{_any(plain)}$"


def _any(choices: list[str]) -> str:
    return choices[0] if len(choices) == 1 else f"(?:{'|'.join(choices)})"
