"""What the peers' scripts share. Imported inside a peer's environment: torch and safetensors only, never quantkit.

A script gets a model folder and token ids, quantizes, and hands back ``facts.json`` and either ``dense.safetensors``
(every parameter by its Hugging Face name, float32, as the peer itself dequantizes it) or a folder ``packed`` in a
format that quantkit reads.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def arguments(doc: str | None) -> argparse.Namespace:
    """The command line that run.py gives every peer's script."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("source", type=Path, help="a 16-bit model folder")
    parser.add_argument("--out", type=Path, required=True, help="existing empty folder for the result")
    parser.add_argument("--tokens", type=Path, required=True, help="file with input_ids [samples, seq_len]")
    parser.add_argument("--method", required=True)
    parser.add_argument("--bits", type=int, required=True)
    parser.add_argument("--group-size", type=int, required=True)
    parser.add_argument("--sym", action=argparse.BooleanOptionalAction, required=True)
    parser.add_argument("--dtype", choices=["default", "float32"], default="default", help="what the peer computes in")
    parser.add_argument("--times-only", action="store_true", help="hand back no weights")
    parser.add_argument("--begun", type=float, default=time.time(), help="when this process was started, in Unix time")
    return parser.parse_args()


def only_default_dtype(args: argparse.Namespace) -> None:
    """For peers whose script chooses no dtype. Raises SystemExit on another."""
    if args.dtype != "default":
        raise SystemExit(f"--dtype {args.dtype}: this peer is run with its default only")


def token_ids(args: argparse.Namespace) -> Tensor:
    """Calibration ids, int64 ``[samples, seq_len]``."""
    from safetensors.torch import load_file

    return load_file(args.tokens)["input_ids"]


def load_model(args: argparse.Namespace, dtype: torch.dtype) -> Any:
    """The original by transformers, on the CPU."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(args.source, dtype=dtype).eval()


def block_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Linears of the decoder blocks by full name: all but embeddings and head."""
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and not n.endswith("lm_head")}


def by_identity(module: nn.Module, features: int, dtype: torch.dtype, chunk: int = 256) -> Tensor:
    """The weight ``[out, in]`` that a linear multiplies by, read through its own kernel.

    That is its output for the unit vectors.
    """
    with torch.no_grad():
        zero = module(torch.zeros(1, features, dtype=dtype)).float()
        rows = [
            module(torch.nn.functional.one_hot(torch.arange(i, min(i + chunk, features)), features).to(dtype)).float()
            for i in range(0, features, chunk)
        ]
    return (torch.cat(rows) - zero).T.contiguous()


def dense_state(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every parameter of a model in float32, with the given weights in place of the packed ones.

    A tied head is left out.
    """
    found = {
        name: tensor.detach().float().contiguous()
        for name, tensor in model.named_parameters()
        if tensor.is_floating_point()
    }
    return {**found, **{name: tensor.detach().float().contiguous() for name, tensor in weights.items()}}


def packed_bytes(folder: Path, modules: Iterable[str]) -> int:
    """Bytes that a saved checkpoint spends on these modules, biases left out.

    Scales, zeros and group indexes are counted.
    """
    from safetensors import safe_open

    wanted, total = set(modules), 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118  (a safetensors handle is no mapping)
                module, _, local = name.rpartition(".")
                if module in wanted and local != "bias":
                    total += handle.get_tensor(name).nbytes
    return total


def file_bytes(folder: Path, pattern: str = "*.safetensors") -> int:
    """Bytes of the weight files of a saved checkpoint."""
    return sum(file.stat().st_size for file in folder.glob(pattern))


class Stopwatch:
    """What the peer takes, in seconds and memory.

    ``with watch: model.quantize(...)`` is for its quantizing alone, ``watch.saved()`` when its result is on disk (from
    the start of the process, so imports and loading count). The peak memory is that until then.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.begun = args.begun
        self.quantizing = 0.0
        self.total = 0.0
        self.peak_host_bytes = 0

    def __enter__(self) -> Stopwatch:
        self._started = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.quantizing = time.perf_counter() - self._started
        self.saved()

    def saved(self) -> None:
        self.total = time.time() - self.begun
        self.peak_host_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def finish(
    args: argparse.Namespace,
    watch: Stopwatch,
    libraries: Iterable[str],
    dense: Mapping[str, Tensor] | None = None,
    **facts: Any,
) -> None:
    """Write the facts, and the dense weights if the result is not readable as it is.

    facts: ``quantized_bytes`` and ``checkpoint_bytes`` where the result is dense, and ``note``s.
    """
    from safetensors.torch import save_file

    if dense is not None:
        save_file(dict(dense), args.out / "dense.safetensors", metadata={"format": "pt"})
    every = {name: version(name) for name in ("torch", "transformers", *libraries)}
    known = {
        "seconds": round(watch.total, 1),
        "quantize_seconds": round(watch.quantizing, 1),
        "peak_host_bytes": watch.peak_host_bytes,
        "threads": torch.get_num_threads(),
        "versions": every,
    }
    (args.out / "facts.json").write_text(json.dumps({**known, **facts}), encoding="utf-8")
