"""Check the options of a repack.

The format can be chosen. Any other option must agree with the source, or is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.checkpoint.source import Source
from quantkit.convert.options.options import DEFAULTS
from quantkit.core.scheme import Scheme
from quantkit.errors import RequestError

FREE = ("source", "out", "format", "overwrite", "device", "repack", "allow_rounding")


def refuse_contradictions(
    path: Path,
    requested: Mapping[str, Any],
    schemes: Sequence[Scheme],
    kv_bits: int | str,
    method: str | None,
    calibrating: Sequence[str] = (),
) -> None:
    """Refuse options that contradict the stored model, or that have no effect on a repack.

    path: the source, for the message.
    requested: options that were given, by the names of ConvertOptions.
    schemes: of the stored modules.
    kv_bits: of the stored KV cache.
    method: how the source was quantized, None if unknown.
    calibrating: options that have an effect, because the KV cache is calibrated anew.

    Raises RequestError for such an option.
    """
    sizes = {scheme.group_size for scheme in schemes}
    stored: dict[str, set[Any]] = {
        "bits": {scheme.bits for scheme in schemes},
        "group_size": sizes,
        "symmetric": {scheme.symmetric for scheme in schemes},
        "scale_dtype": {scheme.scale_dtype for scheme in schemes},
        "activations": {scheme.activations or "none" for scheme in schemes},
        "kv_bits": {str(kv_bits)},
        "method": {method},
    }
    for name, value in requested.items():
        if name in FREE or name in calibrating or (value in (None, (), []) and name != "group_size"):
            continue
        if name not in stored and value == DEFAULTS[name]:  # asks for nothing
            continue
        if name not in stored:
            blocks = "its codes decide the type of each tensor"
            why = blocks if name == "gguf_type" else "repacking it changes no code"
            raise RequestError(no_effect(name, value, f"{path} is quantized already, and {why}"))
        wanted = None if name == "group_size" and value == "channel" else value
        wanted = str(value) if name == "kv_bits" else wanted
        # Layers whose width a group size does not divide have a smaller one: asking for the usual size is no
        # contradiction.
        fits = wanted in sizes if name == "group_size" else stored[name] == {wanted}
        if not fits:
            raise RequestError(
                f"{_typed(name, value)}: {path} is quantized already, with {_stored_words(name, stored[name])}."
                " Repacking changes no code: leave the option out, or quantize the 16-bit original."
            )


def refuse_preset(path: str, preset: str | None) -> None:
    """Refuse a preset: nothing is quantized.

    path: the source, for the message.
    preset: its name, None without one.

    Raises RequestError for any preset.
    """
    if preset is not None:
        raise RequestError(f"--preset {preset} has no effect: {path} is quantized and is repacked. Leave it out.")


def no_effect(name: str, value: Any, why: str) -> str:
    """Say that an option has no effect.

    name, value: of the option. why: a sentence without full stop.
    """
    return f"{_typed(name, value)} has no effect: {why}. Leave it out."


def _typed(name: str, value: Any) -> str:
    """Spell an option as it is typed."""
    if name == "symmetric":
        return "--sym" if value else "--asym"
    shown = "channel" if name == "group_size" and value is None else value
    flag = f"--{name.replace('_', '-')}"
    return flag if isinstance(shown, bool | tuple | list) else f"{flag} {shown}"


def _stored_words(name: str, stored: set[Any]) -> str:
    """Describe the value that the source has in place of an option."""
    values = sorted(stored, key=str)
    if name == "symmetric":
        return " and ".join("symmetric weights" if value else "one zero point per group" for value in values)
    if name == "method" and values == [None]:
        return "a method that its folder does not tell"
    what = {"bits": "{} bits", "group_size": "groups of {}", "kv_bits": "a KV cache of {} bits"}.get(name, "{}")
    return what.format(" and ".join("a whole channel" if value is None else str(value) for value in values))


def refuse_forms(source: Source, requested: Mapping[str, Any]) -> None:
    """Raise RequestError if a quantized source should be rounded by bitsandbytes."""
    if source.quantization() is not None and requested.get("format") == "bitsandbytes":
        raise RequestError(
            f"{source.path}: is quantized already, and bitsandbytes rounds weights anew, which no repack does. Give the"
            " 16-bit original with --format bitsandbytes, or make a dense one with --dequantize."
        )
