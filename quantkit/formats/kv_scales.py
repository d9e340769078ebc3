"""quantkit_kv.safetensors: the calibrated scales of a quantized KV cache, beside the weights of any format.

Tensors ``<attention module>.k_scale``, ``.k_zero``, ``.v_scale``, ``.v_zero``, float32 ``[kv_heads, groups]``. The file's
metadata entry ``quantkit_kv`` is JSON::

    {"version": 1, "bits": 4, "group_size": 64,
     "layers": {"model.layers.0.self_attn": {"head_dim": 64, "group_size": 64}, ...}}

``group_size`` inside ``layers`` is the one used, where 64 does not divide the head. Other engines ignore the file.
A scale that is missing is an error, never a silent 1.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from quantkit.core.kvscheme import SCALE_NAMES, KVScales, KVScheme, LayerScales
from quantkit.errors import CheckpointError, RequestError

FILE_NAME = "quantkit_kv.safetensors"
_KEY = "quantkit_kv"
_VERSION = 1


def write_kv_scales(folder: Path, scales: KVScales) -> Path:
    """Write the file into a checkpoint folder and return its path."""
    from safetensors.torch import save_file

    layers = {
        name: {"head_dim": layer.head_dim, "group_size": layer.head_dim // layer.k_scale.shape[1]}
        for name, layer in scales.layers.items()
    }
    meta = {"version": _VERSION, "bits": scales.scheme.bits, "group_size": scales.scheme.group_size, "layers": layers}
    tensors = {
        f"{name}.{part}": getattr(layer, part).contiguous()
        for name, layer in scales.layers.items()
        for part in SCALE_NAMES
    }
    path = folder / FILE_NAME
    save_file(tensors, path, metadata={_KEY: json.dumps(meta, sort_keys=True)})
    return path


def read_kv_scales(folder: Path) -> KVScales | None:
    """The scales of a checkpoint folder, or None if it has none.

    Raises CheckpointError for a damaged file, a layer without one of its scales, or scales that no layer claims.
    """
    path = folder / FILE_NAME
    if not path.exists():
        return None
    meta, tensors = _read(path)
    try:
        scheme = KVScheme(int(meta["bits"]), int(meta["group_size"]))
        claimed = {
            str(name): (int(entry["head_dim"]), int(entry["group_size"])) for name, entry in meta["layers"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError, RequestError) as error:
        raise CheckpointError(f"{path}: metadata is damaged ({error!r}). Convert again with --kv-bits.") from error
    layers = {name: _layer(path, name, *entry, tensors) for name, entry in claimed.items()}
    if tensors:
        raise CheckpointError(f"{path}: holds {sorted(tensors)[0]!r}, which belongs to no layer its metadata names.")
    return KVScales(scheme, layers)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            meta = json.loads((file.metadata() or {}).get(_KEY, "{}"))
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise CheckpointError(
            f"{path}: not a whole file of KV scales ({error}). Convert again with --kv-bits."
        ) from error
    if not isinstance(meta, dict) or meta.get("version") != _VERSION:
        found = meta.get("version") if isinstance(meta, dict) else meta
        raise CheckpointError(
            f"{path}: version {found!r}, this quantkit reads version {_VERSION}. Convert again with --kv-bits."
        )
    return meta, tensors


def _layer(path: Path, name: str, head_dim: int, group_size: int, tensors: dict[str, Tensor]) -> LayerScales:
    parts = {}
    for part in SCALE_NAMES:
        if f"{name}.{part}" not in tensors:
            raise CheckpointError(
                f"{path}: lacks '{name}.{part}'. The KV cache cannot be used; convert again with --kv-bits."
            )
        parts[part] = tensors.pop(f"{name}.{part}")
    try:
        layer = LayerScales(**parts, head_dim=head_dim)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {name}: {error}") from error
    if layer.k_scale.shape[1] * group_size != head_dim:
        raise CheckpointError(
            f"{path}: {name}: {layer.k_scale.shape[1]} groups of {group_size} are not head_dim {head_dim}."
        )
    return layer
