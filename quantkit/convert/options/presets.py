"""Options that stand for others: presets, ``activations="int8"``, a target size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantkit.errors import RequestError

AUTO = "auto"  # a group size chosen with the bits


# What a preset sets; an option that was given wins, another method contradicts.
PRESETS: dict[str, dict[str, Any]] = {
    "fast": {"method": "hqq", "scales": "search"},
    "balanced": {"method": "gptq", "scales": "search", "fold": True, "guided": True},
    "best": {"method": "tune", "scales": "search", "distil": 128},
}


# What --activations int8 sets: the only weights that go with it.
INT8_ACTIVATIONS: dict[str, Any] = {"bits": 8, "group_size": None, "symmetric": True}


def apply_activations(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that ``activations="int8"`` adds to those that were given.

    An option that contradicts it is refused later, by the scheme.

    given: the options that were written out.
    """
    if given.get("activations") != "int8":
        return {}
    return {name: value for name, value in INT8_ACTIVATIONS.items() if name not in given}


def apply_target(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a target adds: group sizes are chosen, too, unless one is given.

    given: the options that were written out.
    """
    wanted = given.get("target_bpw") is not None or given.get("target_size") is not None
    return {"group_size": AUTO} if wanted and "group_size" not in given else {}


def check_preset(preset: str | None) -> None:
    """Check that a preset exists.

    Raises RequestError for an unknown preset.
    """
    if preset is not None and preset not in PRESETS:
        raise RequestError(f"--preset {preset} is no preset. Presets: {', '.join(PRESETS)}.")


def apply_preset(preset: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a preset adds to those that were given.

    preset: its name, None for none.
    given: the options that were written out.

    Raises RequestError for an unknown preset or a contradiction.
    """
    check_preset(preset)
    if preset is None:
        return {}
    chosen = PRESETS[preset]
    method = given.get("method", chosen["method"])
    if method != chosen["method"]:
        raise RequestError(
            f"--preset {preset} with --method {method}: the preset is --method {chosen['method']}. Leave one of them"
            " out."
        )
    return {name: value for name, value in chosen.items() if name not in given}
