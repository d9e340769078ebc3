"""Source tensor names <-> module names.

For the architectures that convert today they are the same, with three exceptions handled here: a checkpoint saved from
the base model lacks the model's prefix, a tied head is not stored, and old files carry buffers that are computed now.
Anything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from quantkit.errors import SourceError, UnsupportedModel

# Buffers that old checkpoints store and today's models compute.
COMPUTED = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")


def match_names(
    parameters: Iterable[str], stored: Iterable[str], tied: Mapping[str, str], base_prefix: str, where: str
) -> dict[str, str]:
    """Parameter name -> stored tensor name. Tied parameters map to their twin's tensor when not stored.

    base_prefix: the attribute that holds the base model (``model``). Raises SourceError naming what the source lacks,
    UnsupportedModel naming tensors that the model has no place for.
    """
    available = set(stored)
    found: dict[str, str] = {}
    missing: list[str] = []
    for name in parameters:
        candidates = [name, name.removeprefix(f"{base_prefix}.")]
        if name in tied:
            candidates += [tied[name], tied[name].removeprefix(f"{base_prefix}.")]
        hit = next((c for c in candidates if c in available), None)
        if hit is None:
            missing.append(name)
        else:
            found[name] = hit
    if missing:
        raise SourceError(
            f"{where}: lacks {len(missing)} tensors that its architecture needs, first {missing[0]!r}. "
            "The download is incomplete, or config.json belongs to another model."
        )
    extra = sorted(name for name in available - set(found.values()) if not name.endswith(COMPUTED) and name not in tied)
    if extra:
        raise UnsupportedModel(
            f"{where}: stores {len(extra)} tensors that its architecture has no place for, first {extra[0]!r}. "
            "quantkit would lose them; this model is not supported."
        )
    return found
