"""What in a model's JSON files asks a library to fetch or run code, and the same files without it.

Nothing of a model folder is ever executed. transformers is told so at every call (``trust_remote_code=False``); beyond
that, what could name code never reaches it. Seen in transformers 5.23:

* ``auto_map`` names classes in Python files of the folder, or of another repository (``org/name--file.Class``), and
  ``_name_or_path`` says where these files lie (models/auto/auto_factory.py). Of configs inside a config transformers
  builds models without passing ``trust_remote_code`` on, so that it asks the user, or runs what they name.
* ``_attn_implementation: org/name`` and its kin download a kernel and load it (integrations/hub_kernels.py).
* ``attribute_map`` gives a key another name on its way into the config, so that any key may become one of these
  (configuration_utils.py, ``__setattr__``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CODE_KEYS = frozenset({"auto_map", "_name_or_path", "_auto_class", "custom_pipelines", "custom_generate"})
RENAMING_KEYS = frozenset({"attribute_map", "sub_configs", "sub_configs_defaults", "name_or_path"})
IMPLEMENTATION_KEYS = frozenset(
    {
        "attn_implementation", "_attn_implementation", "_attn_implementation_internal",
        "experts_implementation", "_experts_implementation", "_experts_implementation_internal",
        "use_kernels", "kernel_config",
    }
)  # fmt: skip
NOT_PASSED_ON = CODE_KEYS | IMPLEMENTATION_KEYS | {"attribute_map"}


def without_code(config: Mapping[str, Any], *also: str) -> dict[str, Any]:
    """Copy a config without what names code, at every depth.

    config: content of config.json or tokenizer_config.json. also: further keys to leave out at every depth.
    """
    away = CODE_KEYS | RENAMING_KEYS | IMPLEMENTATION_KEYS | set(also)
    clean: dict[str, Any] = _without(config, away)
    return clean


def passed_on(config: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a config as it goes into the output folder: it names no code either, as none is copied.

    config: content of any of a model's JSON files. ``sub_configs`` and ``name_or_path`` stay: they are data elsewhere,
    and transformers takes no code by them.
    """
    clean: dict[str, Any] = _without(config, NOT_PASSED_ON)
    return clean


def may_name_code(data: bytes) -> bool:
    """Tell whether the bytes of a file hold, in any spelling that JSON has, a key that names code.

    data: of a file that is no JSON object.
    """
    return b"\\u" in data or any(f'"{key}"'.encode() in data for key in NOT_PASSED_ON)


def _without(value: Any, away: frozenset[str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _without(entry, away) for key, entry in value.items() if key not in away}
    if isinstance(value, list):
        return [_without(entry, away) for entry in value]
    return value
