"""The calibrated KV cache in a report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from quantkit.algorithms.kv import LayerRanges
from quantkit.checkpoint.storage.record import AGAIN, Either
from quantkit.core.kvscheme import KVPlan
from quantkit.errors import WorkFolderError

SIDES = {"keys": {str: float}, "values": {str: float}}
# of ``summary``, as checkpoint/storage/record.py checks it
SUMMARY = {
    "bits": Either(int, str),
    "scales": str,
    "budget": Either(None, float),
    "code_bits": float,
    "stored_bits": float,
    "layers": [{"name": str, "keys": int, "values": int, "damage?": SIDES}],
}


def average_bits(plan: KVPlan) -> tuple[float, float]:
    """Return the average bits of a cached number over all layers: of its code, and with the scales of its page.

    plan: as convert stores it, with the scales of every layer (their shapes give heads and head_dim).
    """
    codes = stored = 0.0
    for name, scheme in plan.layers.items():
        heads, head_dim = plan.static[name].k_scale.shape
        codes += (scheme.keys + scheme.values) / 2
        stored += 8 * scheme.bytes_per_token(heads, head_dim, torch.float16) / (2 * heads * head_dim)
    count = max(len(plan.layers), 1)
    return round(codes / count, 4), round(stored / count, 4)


def summary(plan: KVPlan, layers: Mapping[str, LayerRanges], budget: float | None) -> dict[str, Any]:
    """Return the calibrated cache for report, JSON and manifest.

    Its ``code_bits`` are those of a number, its ``stored_bits`` count the scales of its page, too; both are averages
    over keys and values of all layers.

    plan: the KV-cache plan.
    layers: ranges by name of the attention module.
    budget: average bits, None without a budget.
    """
    codes, stored = average_bits(plan)
    rows = []
    for name, scheme in plan.layers.items():
        row: dict[str, Any] = {"name": name, "keys": scheme.keys, "values": scheme.values}
        if layers[name].key_sensitivity:
            row["damage"] = {
                side: {str(bits): float(f"{kl:.4g}") for bits, kl in by_bits.items()}
                for side, by_bits in (
                    ("keys", layers[name].key_sensitivity),
                    ("values", layers[name].value_sensitivity),
                )
            }
        rows.append(row)
    return {
        "bits": plan.label,
        "scales": plan.scheme.scales,
        "budget": budget,
        "code_bits": codes,
        "stored_bits": stored,
        "layers": rows,
    }


def check_summary(cache: Mapping[str, Any] | None, path: Path) -> None:
    """Check that a stored summary has the sensitivity of every layer if there was a budget.

    cache: of the shape ``SUMMARY``, or None.
    path: the record that it was read from.

    Raises WorkFolderError if a layer lacks it.
    """
    if cache is None or cache["budget"] is None:
        return
    for row in cache["layers"]:
        if any(str(row[side]) not in row.get("damage", {}).get(side, {}) for side in SIDES):
            raise WorkFolderError(f"{path}: the cache of {row['name'][:60]!r} has a budget and no damage. {AGAIN}")


def summary_lines(cache: Mapping[str, Any]) -> list[str]:
    """Return a line for people, and with a budget the table of layers.

    cache: as ``summary`` returns it.
    """
    lines = [
        f"  cache     {cache['scales']} scales, {cache['code_bits']:.2f} bits a number, {cache['stored_bits']:.2f} with"
        " scales" + (f" (budget {cache['budget']:g})" if cache["budget"] is not None else "")
    ]
    if cache["scales"] == "fp8":
        lines.append(
            "            other engines keep no token of an fp8 cache exact: `quantkit eval --kv-exact 0` measures that"
        )
    if cache["budget"] is None:
        return lines
    rows = cache["layers"]
    lines.append("            layer      keys values   damage of keys, values")
    for i, row in enumerate(rows):
        cost = (row["damage"][side][str(row[side])] for side in ("keys", "values"))
        shown = "  ".join(f"{value:.1e}" for value in cost)
        lines.append(f"            {i:<10d} {row['keys']:4d} {row['values']:6d}   {shown}")
    return lines
