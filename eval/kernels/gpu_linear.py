"""Time every GPU linear beside torch.matmul in bf16, at the shapes of Llama-3 8B and 70B; one JSON in ten minutes.

    python eval/kernels/gpu_linear.py --out results.json
        [--tune] [--tiles tiles.json] [--seconds 540] [--bits 4] [--rehearse]

Times are medians of replayed CUDA graphs whose calls walk through copies of the weights that together are several times
the cache, so every call reads its weight from memory and launches cost what they cost while decoding. GB/s counts the
bytes of the stored weight, x and y once; its share is of a copy measured in the same run (reads and writes counted).
``--tune`` tries tiles for each shape and number of tokens and writes the table that
runtime/kernels/triton/tile_table.py reads, into the cache and to ``--tiles``. Beside ours: tinygemm
(``aten::_weight_int4pack_mm``), our NF4 and bitsandbytes', and the peers of ``peers.py`` where they import; what does
not is noted by name. ``--w8a8`` measures int8 activations, against ``torch._int_mm`` and bf16. Layers are measured in
the order of ``predict.SHAPES``; cells that the time did not reach are listed, not left out silently. ``--rehearse``:
tiny shapes on a CPU, in Triton's interpreter; the numbers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from predict import SHAPES, TOKENS, weight_bytes
from torch import Tensor
from tuning import candidates, compile_all, random_weight

from quantkit.core.qtensor import QuantTensor, TableTensor
from quantkit.core.scheme import Scheme
from quantkit.runtime.kernels.triton import tile_table
from quantkit.runtime.kernels.triton.fp4_tables import VALUES
from quantkit.runtime.kernels.triton.layout import TritonWeight
from quantkit.runtime.kernels.triton.tile_table import Tile

OTHERS_US = ("tinygemm_us", "bitsandbytes_us", "nf4_us", "gemlite_us", "torchao_us", "marlin_us", "int_mm_us")
ROTATE = 3  # times the cache that the copies of a weight fill
Call = Callable[[int], object]  # number of the copy -> result


@dataclass
class Bench:
    """device, its cache in bytes, the measured copy in bytes a second, and when to stop."""

    device: torch.device
    cache: int
    copy: float
    deadline: float
    rehearse: bool

    def left(self) -> float:
        return self.deadline - time.monotonic()


def median_us(bench: Bench, call: Call, copies: int, guess_us: float) -> float:
    """Median microseconds of one call."""
    if bench.rehearse:
        start = time.perf_counter()
        call(0)
        return (time.perf_counter() - start) * 1e6
    rounds = max(1, round(2000 / max(guess_us, 1.0) / copies)) * copies  # some 2 ms a replay
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(rounds):
            call(number % copies)
    graph.replay()
    times = []
    for _ in range(9):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / rounds)
    return statistics.median(times)


def measured_copy(device: torch.device, rehearse: bool) -> float:
    """Bytes a second of a large copy on the device, reads and writes counted."""
    if rehearse:
        return 1e9
    source = torch.randint(0, 255, (1 << 31,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    bench = Bench(device, 1, 1.0, 0.0, False)
    return 2 * source.numel() / median_us(bench, lambda _: target.copy_(source), 1, 1000.0) * 1e6


def copies_of(bench: Bench, size: int) -> int:
    return 1 if bench.rehearse else max(2, -(-ROTATE * bench.cache // size))


def twins(weight: TritonWeight, count: int) -> list[TritonWeight]:
    """Copies of a packed weight, each in memory of its own."""
    found = [weight]
    for _ in range(count - 1):
        twin = object.__new__(TritonWeight)
        twin.__dict__.update(weight.__dict__)
        twin._buffers = {name: None if b is None else b.clone() for name, b in weight._buffers.items()}
        found.append(twin)
    return found


def ours(bench: Bench, weights: list[TritonWeight], x: Tensor, tile: Tile, guess_us: float) -> float:
    from quantkit.runtime.kernels.triton.launch import run

    return median_us(bench, lambda i: run(x, weights[i], None, tile), len(weights), guess_us)


def tune(
    bench: Bench, weights: list[TritonWeight], x: Tensor, guess_us: float, failed: list[str]
) -> tuple[Tile, float]:
    """The fastest candidate and its time. Tiles that the device or the compiler refuses are noted in ``failed``."""
    best: tuple[float, Tile] | None = None
    for tile in candidates(weights[0], x.shape[0], tile_table.processors(bench.device)):
        if bench.left() < 0 and best is not None:
            failed.append(f"{tile_table.key(weights[0])}, {x.shape[0]} tokens: no time left for all tiles")
            break
        try:
            spent = ours(bench, weights, x, tile, guess_us)
        except Exception as error:  # whatever it is: one tile less, and no end of the table
            failed.append(f"{tile}: {type(error).__name__}: {str(error)[:200]}")
            continue
        if best is None or spent < best[0]:
            best = spent, tile
    if best is None:
        raise SystemExit(f"no tile runs for {tile_table.key(weights[0])}; the last one: {failed[-1]}")
    return best[1], best[0]


def error_of(weight: TritonWeight, x: Tensor, tile: Tile) -> float:
    """Relative error against float32, from one call."""
    from quantkit.runtime.kernels.triton.launch import run

    rows = slice(0, min(4096, weight.out_features))
    expected = x.float() @ weight.columns(rows.start, rows.stop, torch.float32)
    y = run(x, weight, None, tile)[:, rows].float()
    return float((y - expected).norm() / expected.norm())


def cell(
    bench: Bench, layer: str, shape: tuple[int, int], scheme: Scheme, tokens: list[int], options: argparse.Namespace,
    table: dict[str, dict[str, Tile]], failed: list[str],
) -> Iterator[dict[str, object]]:  # fmt: skip
    """All rows of one layer."""
    q = random_weight(shape, scheme, bench.device)
    size = weight_bytes(*shape, 4 if scheme.bits <= 4 else 8, zeros=not scheme.symmetric)
    weights = twins(TritonWeight(q, bench.device), copies_of(bench, size))
    dense = [
        torch.randn(shape, dtype=torch.bfloat16, device=bench.device)
        for _ in range(copies_of(bench, shape[0] * shape[1] * 2))
    ]
    for count in tokens:
        if bench.left() < 0:
            failed.append(f"{layer}, {count} tokens: no time left")
            continue
        x = torch.randn(count, shape[1], dtype=torch.bfloat16, device=bench.device)
        guess = max(size / 3e6, 2.0 * shape[0] * shape[1] * count / 500e6)
        bf16 = median_us(bench, lambda i, x=x: torch.matmul(x, dense[i].T), len(dense), 4 * guess)
        if options.tune:
            tile, spent = tune(bench, weights, x, guess, failed)
            table.setdefault(tile_table.key(weights[0]), {})[str(tile_table.bucket(count))] = tile
        else:
            tile = tile_table.choose_tile(weights[0], count, x.dtype)
            spent = ours(bench, weights, x, tile, guess)
        moved = size + 2 * count * sum(shape)
        row: dict[str, object] = {
            "layer": layer,
            "shape": list(shape),
            "scheme": scheme.describe(),
            "tokens": count,
            "us": spent,
            "tile": asdict(tile),
            "error": error_of(weights[0], x, tile),
            "gb_per_s": moved / spent / 1e3,
            "share_of_copy": moved / spent * 1e6 / bench.copy,
            "bf16_us": bf16,
            "speedup": bf16 / spent,
        }
        if not options.tune and count <= 512:
            row |= others(bench, q, x, len(weights), 2 * guess, failed)
        yield row


def others(
    bench: Bench, q: QuantTensor, x: Tensor, count: int, guess_us: float, failed: list[str]
) -> dict[str, object]:
    """Microseconds of what peers offer for this weight.

    What is not installed, or does not take it, is said once by name.
    """
    from peers import PEERS, Maker

    calls: list[tuple[str, Callable[[], float | None]]] = [("nf4", lambda: nf4(bench, q.shape, x, count, guess_us))]
    for peer, make in PEERS.items():

        def measure(make: Maker = make) -> float | None:
            call = make(q, x, count)
            return None if bench.rehearse else median_us(bench, call, count, guess_us)

        calls.append((peer, measure))
    found: dict[str, object] = {}
    for peer, run in calls:
        if any(note.startswith(f"{peer}:") for note in failed):
            continue
        try:
            spent = run()
        except Exception as error:  # a peer's refusal, whatever its kind, is a note and no end of the measurement
            failed.append(f"{peer}: {type(error).__name__}: {str(error)[:200]}")
            continue
        if spent is not None:
            found[f"{peer}_us"] = spent
    return found


def sorted_notes(notes: list[str]) -> dict[str, list[str]]:
    """What of ours failed, and which peers were left out and why."""
    from peers import PEERS

    left_out = [note for note in notes if note.partition(":")[0] in PEERS]
    return {"failed": [note for note in notes if note not in left_out], "left_out": left_out}


def nf4(bench: Bench, shape: tuple[int, int], x: Tensor, count: int, guess_us: float) -> float | None:
    """Ours with NF4 in blocks of 64, beside bitsandbytes'."""
    codes = torch.randint(0, 16, shape, dtype=torch.uint8, device=bench.device)
    scales = torch.rand(shape[0], shape[1] // 64, device=bench.device) * 0.01 + 0.001
    q = TableTensor(codes, scales, torch.tensor(VALUES["nf4"], device=bench.device), 64)
    weights = twins(TritonWeight(q, bench.device), count)
    tile = tile_table.choose_tile(weights[0], x.shape[0], x.dtype)
    return ours(bench, weights, x, tile, guess_us)


def w8a8_cell(
    bench: Bench, layer: str, shape: tuple[int, int], scheme: Scheme, tokens: list[int], failed: list[str]
) -> Iterator[dict[str, object]]:
    """int8 weights and activations (rounding them is part of ours) against ``torch._int_mm`` alone and bf16."""
    from quantkit.runtime.kernels.triton.w8a8 import linear_w8a8_triton, round_tokens
    from quantkit.runtime.kernels.w8a8 import W8A8Weight

    q = random_weight(shape, scheme, bench.device)
    size = shape[0] * shape[1]
    weights = [W8A8Weight(q, triton=True).to(bench.device) for _ in range(copies_of(bench, size))]
    dense = [torch.randn(shape, dtype=torch.bfloat16, device=bench.device) for _ in range(copies_of(bench, 2 * size))]
    for count in tokens:
        if bench.left() < 0:
            failed.append(f"{layer}, {count} tokens: no time left")
            continue
        x = torch.randn(count, shape[1], dtype=torch.bfloat16, device=bench.device)
        guess = max(size / 3e6, 2.0 * size * count / 900e6)
        bf16 = median_us(bench, lambda i, x=x: torch.matmul(x, dense[i].T), len(dense), 4 * guess)
        spent = median_us(bench, lambda i, x=x: linear_w8a8_triton(x, weights[i], None), len(weights), guess)
        expected = x.float() @ q.dequantize().T
        error = float((linear_w8a8_triton(x, weights[0], None).float() - expected).norm() / expected.norm())
        moved = size + 2 * count * sum(shape)
        row: dict[str, object] = {
            "layer": layer, "shape": list(shape), "scheme": scheme.describe(), "tokens": count, "us": spent,
            "error": error,
            "gb_per_s": moved / spent / 1e3, "share_of_copy": moved / spent * 1e6 / bench.copy, "bf16_us": bf16,
            "speedup": bf16 / spent,
        }  # fmt: skip
        if count > 16:  # what torch._int_mm takes
            codes = round_tokens(x)[0]
            row["int_mm_us"] = median_us(
                bench, lambda i, codes=codes: torch._int_mm(codes, weights[i].codes.t()), len(weights), guess
            )
        yield row


def facts(device: torch.device, rehearse: bool) -> dict[str, object]:
    import triton

    return {
        "device": "interpreter" if rehearse else torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "rehearsal": rehearse,
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--tiles", type=Path, help="a table to use; with --tune, where to write it beside the cache")
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--symmetric", action="store_true")
    parser.add_argument("--w8a8", action="store_true", help="int8 activations, against torch._int_mm and bf16")
    parser.add_argument("--layers", nargs="*", help="only these")
    parser.add_argument("--tokens", nargs="*", type=int)
    parser.add_argument("--workers", type=int, default=12, help="processes that compile")
    parser.add_argument("--rehearse", action="store_true")
    return parser.parse_args(arguments)


def write(
    options: argparse.Namespace,
    result: dict[str, object],
    rows: list[dict[str, object]],
    failed: list[str],
    table: dict[str, dict[str, Tile]],
) -> None:
    """All that is known up to now: results, and the table of tiles if there is one."""
    options.out.write_text(json.dumps({**result, "rows": rows, **sorted_notes(failed)}, indent=1) + "\n")
    if options.tune and table:
        path = tile_table.save(str(result["device"]), table, result)
        if options.tiles:
            options.tiles.write_text(path.read_text())


def main(arguments: list[str] | None = None) -> None:
    start = time.monotonic()
    options = parse(arguments)
    rehearse: bool = options.rehearse
    if rehearse and os.environ.get("TRITON_INTERPRET") != "1":
        raise SystemExit("--rehearse runs in Triton's interpreter: set TRITON_INTERPRET=1")
    device = torch.device("cpu" if rehearse else "cuda")
    scheme = Scheme(8, None, True, activations="int8") if options.w8a8 else Scheme(options.bits, 128, options.symmetric)
    shapes = {"tiny": (128, 512)} if rehearse else {n: s for n, s in SHAPES.items() if n in (options.layers or SHAPES)}
    tokens = options.tokens or ([1, 4] if rehearse else list(TOKENS))
    if options.tiles and not options.tune:
        stored = json.loads(options.tiles.read_text())["tiles"]
        tile_table.override(
            {layer: {count: Tile(**tile) for count, tile in rows.items()} for layer, rows in stored.items()}
        )
    compiled = compile_all(scheme, tokens, options.workers) if options.tune and not rehearse else 0
    cache = 1 if rehearse else torch.cuda.get_device_properties(device).L2_cache_size
    bench = Bench(device, cache, measured_copy(device, rehearse), start + options.seconds, rehearse)
    result = {**facts(device, rehearse), "copy_gb_per_s": bench.copy / 1e9, "l2_bytes": cache, "compiled": compiled}
    result["compile_seconds"] = time.monotonic() - start
    rows: list[dict[str, object]] = []
    failed: list[str] = []
    table: dict[str, dict[str, Tile]] = {}
    for layer, shape in shapes.items():
        cells = (
            w8a8_cell(bench, layer, shape, scheme, tokens, failed)
            if options.w8a8
            else cell(bench, layer, shape, scheme, tokens, options, table, failed)
        )
        for row in cells:
            rows.append(row)
            print(
                f"{layer:12} {row['tokens']:5} {row['us']:9.1f} us {row['share_of_copy']:6.1%} of copy, "
                f"{row['speedup']:5.2f} x bf16, "
                f"error {row['error']:.1e} {row['tile']['kernel'] if 'tile' in row else ''} "  # type: ignore[index]
                + ", ".join(f"{name} {row[name]:.1f}" for name in row if name in OTHERS_US and row[name]),
                flush=True,
            )
            write(options, result, rows, failed, table)  # after each cell: what ends the process takes none away
        write(options, result, rows, failed, table)
    print(f"{len(rows)} cells in {time.monotonic() - start:.0f} s, {len(failed)} notes: {options.out}")


if __name__ == "__main__":
    main()
