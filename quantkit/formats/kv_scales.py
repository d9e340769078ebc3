"""Read and write quantkit_kv.safetensors: how a model's KV cache is kept, beside the weights of any format.

Other engines ignore the file. The metadata entry ``quantkit_kv`` is JSON; a scheme holds the fields of
``core.kvscheme.KVScheme``::

    {"version": 2,
     "scheme": {"keys": 4, "values": 4, "scales": "online", "group_size": 64, "recent": 64, "first": 4},
     "layers": {"model.layers.0.self_attn": {"keys": 4, "values": 2, ...}, ...},     layers that differ, or all
     "static": ["model.layers.0.self_attn", ...]}

Each module under ``static`` has the tensors ``<module>.k_scale``, ``.k_low``, ``.v_scale``, ``.v_low``, float32
``[kv_heads, head_dim]``: calibrated for the bits of that module, whichever scales the scheme uses. A scale that is
missing is an error, never a silent 1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from quantkit.core.kvscheme import SCALE_NAMES, KVPlan, KVScheme, LayerScales
from quantkit.errors import CheckpointError, RequestError

FILE_NAME = "quantkit_kv.safetensors"
_KEY = "quantkit_kv"
_VERSION = 2
_FIELDS = {field.name for field in fields(KVScheme)} - {"at_once"}  # how a cache is read for a comparison, not kept
_AGAIN = "Convert again with --kv-bits."


def write_kv_plan(folder: Path, plan: KVPlan) -> Path:
    """Write the file into a checkpoint folder and return its path.

    Raises CheckpointError for a layer without the scales it needs.
    """
    path = folder / FILE_NAME
    _complete(path, plan)
    # not by the library's save_file, whose files only their owner may read, whatever the umask
    path.write_bytes(_content(plan))
    return path


def kv_plan_bytes(plan: KVPlan) -> int:
    """Return how large the file is that ``write_kv_plan`` writes, without writing it."""
    return len(_content(plan))


def _content(plan: KVPlan) -> bytes:
    from safetensors.torch import save

    meta = {
        "version": _VERSION,
        "scheme": _stored(plan.scheme),
        "layers": {name: _stored(scheme) for name, scheme in plan.layers.items()},
        "static": sorted(plan.static),
    }
    tensors = {
        f"{name}.{part}": getattr(layer, part).contiguous()
        for name, layer in plan.static.items()
        for part in SCALE_NAMES
    }
    content: bytes = save(tensors, metadata={_KEY: json.dumps(meta, sort_keys=True)})
    return content


def _stored(scheme: KVScheme) -> dict[str, Any]:
    return {name: value for name, value in asdict(scheme).items() if name in _FIELDS}


def read_kv_plan(folder: Path) -> KVPlan | None:
    """Read what a checkpoint folder says of its KV cache; None if it says nothing.

    Raises CheckpointError for a damaged file, one of another version, a layer without one of its scales, or scales that
    no layer claims.
    """
    path = folder / FILE_NAME
    if not path.exists():
        return None
    meta, tensors = _read(path)
    try:
        if set(meta) != {"version", "scheme", "layers", "static"}:
            raise ValueError(f"entries {sorted(meta)}")
        scheme = _scheme(meta["scheme"])
        layers = {str(name): _scheme(entry) for name, entry in meta["layers"].items()}
        static = _names(meta["static"])
    except (KeyError, TypeError, ValueError, AttributeError, RequestError) as error:
        raise CheckpointError(f"{path}: its metadata is damaged ({error}). {_AGAIN}") from error
    plan = KVPlan(scheme, layers, {name: _layer(path, name, tensors) for name in static})
    if tensors:
        raise CheckpointError(
            f"{path}: holds {sorted(tensors)[0]!r}, which belongs to no module that its metadata names. {_AGAIN}"
        )
    _complete(path, plan)
    return plan


def _complete(path: Path, plan: KVPlan) -> None:
    """Check that scales that a scheme reads are there: of each named layer, or of any where none is named."""
    for name, scheme in plan.layers.items():
        if scheme.quantized and scheme.scales != "online" and name not in plan.static:
            raise CheckpointError(f"{path}: lacks the {scheme.scales} scales of {name!r}. {_AGAIN}")
    if plan.scheme.quantized and plan.scheme.scales != "online" and not plan.static:
        raise CheckpointError(f"{path}: holds no {plan.scheme.scales} scales, which its scheme needs. {_AGAIN}")


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():  # the library would wait for a FIFO
        raise CheckpointError(f"{path}: not a regular file. {_AGAIN}")
    try:
        with safe_open(path, framework="pt") as file:
            meta = json.loads((file.metadata() or {}).get(_KEY, "{}"))
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a whole file of KV scales ({error}). {_AGAIN}") from error
    number = meta.get("version") if isinstance(meta, dict) else meta
    if number == 1 and number is not True:
        raise CheckpointError(
            f"{path}: version 1, an older quantkit's: its scales are for other pages than this quantkit keeps. {_AGAIN}"
        )
    if number != _VERSION:
        raise CheckpointError(f"{path}: version {number!r}, this quantkit reads version {_VERSION}. {_AGAIN}")
    return meta, tensors


def _scheme(entry: Mapping[str, Any]) -> KVScheme:
    if not isinstance(entry, dict) or set(entry) != _FIELDS:
        raise ValueError(f"a scheme needs {sorted(_FIELDS)}, found {entry!r}")
    numbers = [entry[name] for name in sorted(_FIELDS - {"scales"})]
    if any(type(number) is not int for number in numbers):
        raise ValueError(f"a scheme of numbers that are not whole: {entry!r}")
    return KVScheme(**entry)


def _names(names: Any) -> list[str]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise ValueError(f"'static' is {names!r}, not a list of different names")
    return names


def _layer(path: Path, name: str, tensors: dict[str, Tensor]) -> LayerScales:
    parts = {}
    for part in SCALE_NAMES:
        if f"{name}.{part}" not in tensors:
            raise CheckpointError(f"{path}: lacks '{name}.{part}'. {_AGAIN}")
        parts[part] = tensors.pop(f"{name}.{part}")
    try:
        return LayerScales(**parts)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {name}: {error}. {_AGAIN}") from error
