"""Read the written tensors back and compare them with the decisions, before the folder gets its final name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from quantkit.checkpoint.source import FolderSource
from quantkit.checkpoint.writer import WrittenTensor, tensor_sha256
from quantkit.convert.output.ahead import ahead
from quantkit.convert.results import decision_sha256
from quantkit.core.kvscheme import SCALE_NAMES, KVPlan
from quantkit.core.qtensor import BlockTensor, QuantTensor
from quantkit.errors import CheckpointError
from quantkit.formats.kv_scales import read_kv_plan
from quantkit.formats.reader import QuantizedReader


@dataclass
class CastLoss:
    """The error in engines that cast fp16 scales to bfloat16 (8 bits of mantissa instead of 11), over all modules."""

    # of the error and of the weights, both summed in float64
    squared: float = 0.0
    energy: float = 0.0

    def add(self, q: QuantTensor) -> None:
        """Add a module to the sums."""
        weight = q.dequantize()
        cast = replace(q, scales=q.scales.to(torch.bfloat16), scheme=replace(q.scheme, scale_dtype="bfloat16"))
        self.squared += float((cast.dequantize() - weight).square().sum(dtype=torch.float64))
        self.energy += float(weight.square().sum(dtype=torch.float64))

    def note(self) -> str:
        """Return the note for the report."""
        relative = (self.squared / max(self.energy, 1e-300)) ** 0.5
        return (
            "an engine that casts the scales to bfloat16, the source's dtype, changes the quantized weights by"
            f" {relative:.2%} (run it with --dtype float16, or convert with --scale-dtype bfloat16, which chooses codes"
            " for such scales)"
        )


def verify_folder(
    folder: Path, digests: dict[str, str], entries: dict[str, WrittenTensor], cast: CastLoss | None = None,
    digest_of: Callable[[QuantTensor | BlockTensor], str] = decision_sha256, threads: int = 0,
) -> int:  # fmt: skip
    """Read every tensor of a folder and decode every module; return how many tensors were compared.

    folder: the written checkpoint.
    digests: by module name.
    entries: stored name -> checksum of the tensor that was given to the writer.
    cast: collects the error of bfloat16 scales; None to skip it.
    digest_of: what made the digests. threads: how many modules are read beside the one that is looked at.

    Raises CheckpointError, naming the tensor, for any difference.
    """
    source = FolderSource(folder)
    reader = QuantizedReader(source)
    _same_names(folder, "tensors", set(entries), set(source.names()))
    _same_names(folder, "quantized modules", set(digests), set(reader.modules))

    def read(name: str) -> tuple[str, QuantTensor | BlockTensor, str]:
        q = reader.module(name)
        return name, q, digest_of(q)

    for name, q, digest in ahead(read, digests, threads):
        if digest != digests[name]:
            raise CheckpointError(
                f"{folder.name}: {name} reads back different from what was quantized: the disk or a codec is at fault."
            )
        if cast is not None and isinstance(q, QuantTensor):
            cast.add(q)
    plain = [*reader.plain_names(), *reader.cache_names()]
    for name in plain:
        if tensor_sha256(source.read(name)) != entries[name].sha256:
            raise CheckpointError(
                f"{folder.name}: {name} reads back different from what was written: the disk is at fault."
            )
    return len(plain) + sum(len(local) for local in reader.modules.values())


def verify_kv(folder: Path, decided: KVPlan | None) -> int:
    """Read back how the KV cache is kept; return how many tensors were compared.

    folder: the written checkpoint.
    decided: the KV-cache plan, None without one.

    Raises CheckpointError for a difference.
    """
    stored = read_kv_plan(folder)
    if decided is None or stored is None:
        if decided is not stored:
            raise CheckpointError(
                f"{folder.name}: {'lacks the plan of' if decided else 'holds a plan for'} a KV cache, against what was"
                " decided."
            )
        return 0
    _same_names(folder, "layers with KV scales", set(decided.static), set(stored.static))
    if (stored.scheme, dict(stored.layers)) != (decided.scheme, dict(decided.layers)):
        raise CheckpointError(f"{folder.name}: the bits of the KV cache read back different from what was decided.")
    for name, scales in decided.static.items():
        for part in SCALE_NAMES:
            if not torch.equal(getattr(scales, part), getattr(stored.static[name], part)):
                raise CheckpointError(f"{folder.name}: {name}.{part} reads back different from what was calibrated.")
    return len(decided.static) * len(SCALE_NAMES)


def _same_names(folder: Path, what: str, written: set[str], read: set[str]) -> None:
    """Check that no name is missing and none was added.

    Raises CheckpointError for a difference.
    """
    if written != read:
        odd = sorted(written ^ read)
        raise CheckpointError(f"{folder.name}: {what} written and read differ: {len(odd)} names, first {odd[0]!r}.")
