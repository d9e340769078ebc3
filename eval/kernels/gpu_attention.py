"""Time decode attention over packed pages beside the best bf16 attention that torch has; one JSON.

    python eval/kernels/gpu_attention.py --out results.json
        [--kv 16 8 4 k4v2] [--context 16384] [--batch 16] [--seconds 50] [--rehearse]

One query a sequence, long contexts, 32 query heads over 4 key heads of 128 channels. Ours:
``kernels.triton.attention.attend`` over shuffled pages, first and newest tokens exact, checked against torch's
attention over what the pages decode to. Torch: ``scaled_dot_product_attention`` with each of its backends, with
``enable_gqa`` and with the queries of a key head as rows of one (the same numbers, and what its kernels split best),
and ``flex_attention``, compiled. Medians of replays of a CUDA graph, keys and values in copies that together are three
times the cache. over_torch: the fastest of torch / ours. For KV4 other launches (warps, stages, programs a
multiprocessor) are tried while time is left. ``--rehearse``: tiny shapes on a CPU, in Triton's interpreter; the numbers
mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_linear import Bench, copies_of, facts, measured_copy, median_us
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from quantkit.core.kvscheme import PAGE_TOKENS, KVScheme
from quantkit.runtime.kernels.decode_reference import FIELDS, Heads, PackedPages, Pages
from quantkit.runtime.kernels.triton.tile_table import processors
from quantkit.runtime.kv_cache.packed_page import Packing

DTYPE = torch.bfloat16
BACKENDS = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
LAUNCHES = ((2, 2, 4), (2, 2, 8), (4, 2, 2), (4, 2, 8), (4, 3, 4), (2, 3, 8), (4, 1, 8))  # warps, stages, programs
KV = ("16", "8", "4", "k4v2")


@dataclass
class Case:
    """The same keys and values, dense and in pages.

    keys, values: ``[batch, kv heads, context, dim]``. kept: the tensors behind the addresses of ``pages``.
    """

    heads: Heads
    scheme: KVScheme
    keys: Tensor
    values: Tensor
    pages: Pages
    kept: list[Tensor]

    def bytes(self) -> float:
        """Read once: pages, and the exact tail."""
        batch, kv, context, dim = self.keys.shape
        return batch * self.scheme.cache_bytes(context, kv, dim, DTYPE)


def make(scheme: KVScheme, heads: Heads, batch: int, context: int, device: torch.device, seed: int) -> Case:
    """Random keys with a few large channels. ``keys`` and ``values`` are what the pages give back."""
    generator = torch.Generator(device).manual_seed(seed)
    count = context // PAGE_TOKENS
    shape = (batch * count, heads.kv, PAGE_TOKENS, heads.dim)
    keys, values = (torch.randn(shape, dtype=DTYPE, device=device, generator=generator) for _ in range(2))
    keys *= 1 + 4 * (torch.arange(heads.dim, device=device) % 16 == 3)
    numbers = torch.randperm(batch * count, generator=generator, device=device).view(batch, count)
    about, kept = None, [keys, values]
    if scheme.quantized:
        about, kept = packed(scheme, heads, keys, values, numbers)
    length = torch.tensor([context - 1], dtype=torch.int32, device=device)
    pads = torch.zeros(batch, dtype=torch.int32, device=device)
    pools = torch.tensor([keys.data_ptr(), values.data_ptr()], device=device)
    pages = Pages(pads, length, numbers, pools, 0, about)
    dense = [x[numbers].transpose(1, 2).reshape(batch, heads.kv, context, heads.dim) for x in (keys, values)]
    return Case(heads, scheme, dense[0], dense[1], pages, [*kept, keys, values])


def packed(
    scheme: KVScheme, heads: Heads, keys: Tensor, values: Tensor, numbers: Tensor
) -> tuple[PackedPages, list[Tensor]]:
    """All pages packed; ``keys`` and ``values`` become what old pages give back, but for the first tokens."""
    packing, batch = Packing(scheme, DTYPE), len(numbers)
    first = [x[numbers[:, 0], :, : scheme.first].contiguous() for x in (keys, values)]
    parts: dict[str, list[Tensor]] = {}
    old = (numbers.shape[1] * PAGE_TOKENS - scheme.recent) // PAGE_TOKENS
    for chunk in torch.arange(len(keys), device=keys.device).split(256):
        found = packing.encode(keys[chunk], values[chunk], 0)
        for name, x in found.items():
            parts.setdefault(name, []).append(x)
        given = packing.decode(found, (heads.dim, heads.dim))
        far = torch.isin(chunk, numbers[:, :old].reshape(-1))
        keys[chunk[far]], values[chunk[far]] = given[0][far], given[1][far]
    for x, kept in zip((keys, values), first, strict=True):
        x[numbers[:, 0], :, : scheme.first] = kept
    fields = {name: torch.cat(x) for name, x in parts.items()}
    addresses = [fields[name].data_ptr() if name in fields else 0 for name in FIELDS] + [x.data_ptr() for x in first]
    done = torch.zeros(batch, dtype=torch.int32, device=keys.device)
    about = PackedPages(
        numbers, done, torch.tensor(addresses, device=keys.device), scheme.keys, scheme.values,
        scheme.groups(heads.dim),
        scheme.recent, scheme.first,
    )  # fmt: skip
    return about, [*fields.values(), *first]


def ours(bench: Bench, cases: list[Case], q: Tensor) -> tuple[float, float]:
    """Microseconds, and the greatest difference from float32 attention over the same numbers."""
    from quantkit.runtime.kernels.triton import attention as kernel

    case = cases[0]
    groups = case.scheme.groups(case.heads.dim) if case.scheme.quantized else 0
    count = 8 if bench.rehearse else processors(bench.device)
    space = kernel.Workspace(len(q), case.heads, count, bench.device, groups)
    rows = q.reshape(len(q), case.heads.kv, -1, case.heads.dim).float()
    exact = scaled_dot_product_attention(
        rows[:1], case.keys[:1].float(), case.values[:1].float(), scale=case.heads.scaling
    )
    found = kernel.attend(q, case.pages, case.heads, space)
    error = float((found[:1].view_as(exact).float() - exact).abs().max())
    spent = median_us(bench, lambda i: kernel.attend(q, cases[i].pages, case.heads, space), len(cases), 100.0)
    return spent, error


def torchs(bench: Bench, cases: list[Case], q: Tensor, failed: list[str]) -> dict[str, float]:
    """Microseconds by way."""
    heads, found = cases[0].heads, {}
    wide, rows = q[:, :, None], q.reshape(len(q), heads.kv, -1, heads.dim)
    for name in BACKENDS:
        if bench.rehearse and name != "MATH":
            continue
        for way, x, gqa in (("gqa", wide, True), ("rows", rows, False)):
            try:
                with sdpa_kernel(getattr(SDPBackend, name)):
                    found[f"{name.lower()} {way}"] = median_us(
                        bench,
                        lambda i, x=x, gqa=gqa: scaled_dot_product_attention(  # type: ignore[misc]
                            x, cases[i].keys, cases[i].values, scale=heads.scaling, enable_gqa=gqa
                        ),
                        len(cases),
                        150.0,
                    )
            except RuntimeError as error:
                failed.append(f"{name} {way}: {str(error).splitlines()[0]}")
    if not bench.rehearse and bench.left() > 25:
        try:
            from torch.nn.attention.flex_attention import flex_attention

            flex: Any = torch.compile(flex_attention)
            found["flex gqa"] = median_us(
                bench,
                lambda i: flex(wide, cases[i].keys, cases[i].values, scale=heads.scaling, enable_gqa=True),
                len(cases),
                150.0,
            )
        except Exception as error:  # whatever a compiler says
            failed.append(f"flex: {str(error).splitlines()[0]}")
    return found


def launches(bench: Bench, cases: list[Case], q: Tensor, failed: list[str]) -> Iterator[dict[str, Any]]:
    """The same kernel launched otherwise."""
    from quantkit.runtime.kernels.triton import attention as kernel

    usual = kernel.shape_of_launch, kernel.PACKED_PROGRAMS
    try:
        for warps, stages, programs in LAUNCHES[:1] if bench.rehearse else LAUNCHES:
            if bench.left() < 6:
                failed.append(f"launch {warps} {stages} {programs}: no time left")
                continue
            kernel.shape_of_launch = lambda *given, w=warps, s=stages: (w, s)  # type: ignore[assignment, misc]
            kernel.PACKED_PROGRAMS = programs
            us, error = ours(bench, cases, q)
            yield {"warps": warps, "stages": stages, "programs": programs, "us": us, "error": error}
    finally:
        kernel.shape_of_launch, kernel.PACKED_PROGRAMS = usual


def rows(options: argparse.Namespace, bench: Bench, failed: list[str]) -> Iterator[dict[str, Any]]:
    heads = Heads(8, 1, 32, 32**-0.5) if options.rehearse else Heads(32, 4, 128, 128**-0.5)
    context, batch = (192, 2) if options.rehearse else (options.context, options.batch)
    q = torch.randn(batch, heads.query, heads.dim, generator=torch.Generator().manual_seed(1)).to(bench.device, DTYPE)
    torch_us: dict[str, float] = {}
    for kv in ("16", *(kind for kind in options.kv if kind != "16")):
        if bench.left() < 5:
            failed.append(f"kv {kv}: no time left")
            continue
        scheme = KVScheme.of(kv)
        size = round(batch * scheme.cache_bytes(context, heads.kv, heads.dim, DTYPE))
        cases = [make(scheme, heads, batch, context, bench.device, seed) for seed in range(copies_of(bench, size))]
        if kv == "16":
            torch_us = torchs(bench, cases, q, failed)
        us, error = ours(bench, cases, q)
        best = min(torch_us, key=lambda way: torch_us[way])
        row: dict[str, Any] = {
            "kv": kv, "context": context, "batch": batch, "us": us, "error": error, "bytes": cases[0].bytes(),
            "gb_per_s": cases[0].bytes() / us / 1e3, "share_of_copy": cases[0].bytes() / us * 1e6 / bench.copy,
            "torch_us": torch_us, "best_of_torch": best, "over_torch": torch_us[best] / us,
        }  # fmt: skip
        if kv == "4":
            row["launches"] = list(launches(bench, cases, q, failed))
        yield row
        del cases


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kv", nargs="*", default=list(KV), choices=[*KV, "3", "2"])
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=50)
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args(arguments)
    if options.rehearse and os.environ.get("TRITON_INTERPRET") != "1":
        raise SystemExit("--rehearse runs in Triton's interpreter: set TRITON_INTERPRET=1")
    device = torch.device("cpu" if options.rehearse else "cuda")
    cache = 1 if options.rehearse else torch.cuda.get_device_properties(device).L2_cache_size
    copy = measured_copy(device, options.rehearse)
    bench = Bench(device, cache, copy, time.monotonic() + options.seconds, options.rehearse)
    result = {**facts(device, options.rehearse), "copy_gb_per_s": copy / 1e9}
    failed: list[str] = []
    found: list[dict[str, Any]] = []
    for row in rows(options, bench, failed):
        found.append(row)
        print(
            f"kv {row['kv']:5} {row['us']:9.1f} us {row['gb_per_s']:8.1f} GB/s, {row['share_of_copy']:6.1%} of copy, "
            f"{row['over_torch']:5.2f} x {row['best_of_torch']}, error {row['error']:.1e}",
            flush=True,
        )
        options.out.write_text(json.dumps({**result, "rows": found, "failed": failed}, indent=1) + "\n")
    options.out.write_text(json.dumps({**result, "rows": found, "failed": failed}, indent=1) + "\n")


if __name__ == "__main__":
    main()
