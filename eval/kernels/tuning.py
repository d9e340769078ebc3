"""Tiles to try for ``gpu_linear.py --tune``, and their kernels compiled beforehand on all cores."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context

import torch

from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.runtime.kernels.triton import tile_table
from quantkit.runtime.kernels.triton.layout import TritonWeight
from quantkit.runtime.kernels.triton.tile_table import Tile


def random_weight(shape: tuple[int, int], scheme: Scheme, device: torch.device, seed: int = 0) -> QuantTensor:
    """Random codes; zeros would be read faster than they are."""
    generator = torch.Generator(device).manual_seed(seed)
    groups = scheme.groups(shape[1])
    codes = torch.randint(0, scheme.levels, shape, dtype=torch.uint8, device=device, generator=generator)
    scales = (torch.rand(shape[0], groups, device=device, generator=generator) * 0.01 + 0.001).half()
    zeros = torch.randint(0, scheme.levels, (shape[0], groups), device=device, generator=generator)
    return QuantTensor(codes, scales, None if scheme.symmetric else zeros.to(torch.int16), scheme)


def candidates(weight: TritonWeight, tokens: int, sms: int) -> list[Tile]:
    """Tiles worth measuring, the derived one first: where the time ends early, no worse one is kept."""
    return list(
        dict.fromkeys(
            [
                tile_table.derive(weight, tokens, sms, tile_table.hopper(weight.bricks.device)),
                *_grid(weight, tokens, sms),
            ]
        )
    )


def _grid(weight: TritonWeight, tokens: int, sms: int) -> Iterator[Tile]:
    """Enough programs to fill the device, not more than a few waves of split ones."""
    rows = weight.out_features
    if tokens <= 2:
        for block_n in (16, 32, 64):
            for split in (1, 2, 4, 8):
                if split == 1 or rows // block_n * split <= 8 * sms:
                    yield Tile("gemv", block_n, 1, split, 4, 4)
        yield Tile("gemv", 32, 1, 1, 2, 4)
        yield Tile("gemv", 64, 1, 1, 4, 2)
    if tokens <= 1024:
        block_m = min(max(16, tokens), 128)
        for block_n, warps in ((32, 2), (64, 4), (128, 4), (128, 8)):
            for split in (1, 2, 4, 8):
                programs = rows // block_n * split * -(-tokens // block_m)
                if split == 1 or (programs <= 4 * sms and weight.k_bricks >= 2 * split):
                    for stages in (3, 4) if block_m <= 32 else (2, 3):
                        yield Tile("gemm", block_n, block_m, split, warps, stages, scale_w=block_m >= 128)
        if tokens >= 256:
            yield Tile("gemm", 128, 256, 1, 8, 2, scale_w=True)
            yield Tile("gemm", 64, 256, 1, 4, 2, scale_w=True)
    if tokens >= 64:
        yield Tile("dequantize")


def compile_one(job: tuple[Scheme, int, Tile]) -> str | None:
    """Compile (into Triton's cache on disk) what a tile needs, in a process of its own; what went wrong, or None."""
    from quantkit.runtime.kernels.triton.launch import run

    scheme, tokens, tile = job
    device = torch.device("cuda")
    weight = TritonWeight(random_weight((256, 4096), scheme, device), device)
    try:
        run(torch.randn(tokens, 4096, dtype=torch.bfloat16, device=device), weight, None, tile)
        torch.cuda.synchronize()
    except Exception as error:  # whatever it is, the measuring process meets it again and reports it
        return f"{tile}: {type(error).__name__}: {error}"
    return None


def compile_all(scheme: Scheme, tokens: list[int], workers: int) -> int:
    """Compile every candidate beforehand, on all cores; returns how many kernels there are."""
    weight = TritonWeight(random_weight((8192, 8192), scheme, torch.device("cuda")))
    jobs = {}
    for count in tokens:
        for tile in candidates(weight, count, 132):
            kind = replace(tile, split=min(tile.split, 2))
            jobs[kind] = (scheme, min(count, 32), kind)
    with contextlib.suppress(BrokenProcessPool), ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_one, jobs.values()))  # a compiler that died is met again, and noted, while measuring
    return len(jobs)
