"""Prediction of the host memory, device memory and disk space that a conversion takes."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from quantkit.algorithms.tune import COPIES
from quantkit.calibrate.transfer import ON_DEVICE
from quantkit.core.affine import SEARCH_ELEMENTS_GPU
from quantkit.core.host import LARGE, current_rss, peak_rss, size_text

CHUNK = 1 << 21  # elements of head or embeddings that are float at one time
GENERATE_BYTES = 2 * 10**9  # the smoke test runs if the written model takes no more, or no more than the job did
NUMBA_BYTES = 55 << 20
KERNEL_BYTES = NUMBA_BYTES + (75 << 20)  # with the compiled kernels
BATCH_TOKENS = 4096  # tokens per forward of a block: enough to keep a matmul busy, little memory
GRADIENTS = 80 << 20  # torch's code for gradients, mapped when they are first computed (52 MB), and its pools
FEWEST_TOKENS = 1024  # with fewer, adding to a wide Hessian costs as much as computing what is added


@dataclass(frozen=True, slots=True)
class Prediction:
    """Bytes of memory and disk that a conversion takes at its peak.

    host: the process's resident peak, interpreter and libraries included.
    device: what tensors take on the device (CUDA's own few hundred MB are not counted), 0 on a CPU.
    """

    host: int
    device: int
    # Peak of work folder and output together.
    disk: int
    # Of the work folder alone: finished parts, and the hidden states twice.
    work: int
    output: int
    # What each phase adds to the resident size at the start.
    phases: dict[str, int]
    # The phase that takes ``device``.
    busiest: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the peaks and sizes as JSON for ``--dry-run --json``."""
        return {
            "peak_host_bytes": self.host,
            "peak_device_bytes": self.device,
            "peak_disk_bytes": self.disk,
            "work_bytes": self.work,
            "output_bytes": self.output,
        }


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that the prediction is made from: element counts, and bytes where named so."""

    # Parameters loaded to embed tokens.
    before_blocks: int
    stored_itemsize: int
    # Elements of the largest tensor copied unchanged.
    largest_plain: int
    # Parameters of the largest block.
    block: int
    # in_features of each distinct input of the largest block.
    widths: tuple[int, ...]
    # in_features of any linear of any block.
    widest: int
    # Elements of the largest parameter of a block.
    largest_parameter: int
    # Elements of the largest stack of linears with one input.
    largest_group: int
    # in_features and elements of each such stack.
    groups: tuple[tuple[int, int], ...]
    # Activations per token inside a block.
    inner: int
    hidden: int
    # Calibration tokens, 0 without data.
    tokens: int
    seq_len: int
    plain_bytes: int
    packed_bytes: int
    calibrated: bool
    kv_sample_bytes: int
    # Of the largest head or embedding to quantize: as stored, its codes, packed; 0 if there is none.
    head_embedding_bytes: int
    # Of the written model, loaded to run it.
    packed_model: int = 0
    # The method reads correlations between inputs: it holds Hessians, and factorises them.
    correlations: bool = True
    # in_features of inputs that are kept themselves, in the place of Hessians.
    roots: tuple[int, ...] = ()
    # Bytes that the search for factors and scaling take; 0 if the method scales no channels.
    fold: int = 0
    # Bytes of the libraries behind compiled CPU kernels, where they are not loaded yet.
    kernels: int = 0
    # Weights that learn together, of the largest block.
    tuned: int = 0
    # The original model's states are kept beside the quantized ones.
    paired: bool = False
    # A batch's inputs are held a second time, multiplied by token importance.
    weighed: bool = False
    # The original model's activations of a batch are held too, and a cross matrix for each input.
    crossed: bool = False
    # bytes that the sensitivity pass takes (``stages.sensitivity``); 0 without one
    measuring: int = 0
    # Bytes of its file in the work folder, which is removed before the first block.
    measuring_file: int = 0
    # Bytes of its results, which stay in the work folder.
    measured: int = 0
    # Bytes of the whole model while it writes its own calibration text; 0 if it does not.
    whole: int = 0
    # Bytes of the states of the end-to-end pass, of both models; 0 without one.
    distil_states: int = 0
    # Bytes of the rest of it.
    distil: int = 0


def kernel_bytes() -> int:
    """Return the bytes that numba and its compiled kernels add, if they are installed and not loaded yet."""
    loaded = "quantkit.runtime.kernels.numba.worker_loop" in sys.modules
    if loaded or importlib.util.find_spec("numba") is None:
        return 0
    return KERNEL_BYTES - (NUMBA_BYTES if "numba" in sys.modules else 0)


def predict(sizes: Sizes, device: str = "cpu") -> Prediction:
    """Predict the peak: the largest phase, on top of what the process holds now.

    device: the kind of device that blocks are worked on.

    embed:  the embedding is read (stored copy + its finite mask + float32), then the hidden states fill
    block:  states + a block in float32, and the next one as stored, from here to ``fold`` + one Hessian per input in
            float64 (or the inputs themselves, where they are few and nobody reads correlations) + one batch of
            activations
    solve:  states + block + Hessians + float64 copies for the factorisation + search and rounding temporaries
    tune:   states + block + Hessians + copies of its linears while they learn, and one window's activations and their
            gradients
    fold:   states + block + Hessians + rows of a fold's consumers and what trying factors on them takes
    self:   the whole model with its cache, before anything else
    measure: sensitivity: head and embeddings, states and gradients of its few windows, a block or a part of the logits
            (measure, or else distil, and every phase after it, hold torch's code for gradients, which stays)
    distil: states of both models + all codes, where they are held + scales and norms that learn, with Adam's moments +
            head and embeddings, those that are quantized twice: the original's and the dequantized + one step: states
            in front of every block, one block's weights and activations with their gradients, a few tokens' logits
    head_embeddings: head or embeddings: as stored, their codes, packed, and the temporaries of searching a few rows
    generate: the written model, loaded whole, if that is small (GENERATE_BYTES) or no more than another phase
    copy:   states + three stored copies of the largest plain tensor (read, written, read back)
    """
    f32, away = 4, device != "cpu"
    phases = {"copy": 3 * sizes.largest_plain * sizes.stored_itemsize, **_block_phases(sizes, away)}
    if sizes.whole and not away:
        phases["self"] = sizes.whole
    if sizes.distil_states:
        phases["distil"] = sizes.distil_states + (0 if away else sizes.distil)
    if sizes.head_embedding_bytes:
        phases["head_embeddings"] = sizes.head_embedding_bytes + 12 * CHUNK * f32
    if sizes.measuring and not away:
        phases["measure"] = sizes.measuring
    if sizes.packed_model <= max(GENERATE_BYTES, *phases.values()):
        phases["generate"] = sizes.packed_model + sizes.kernels
    if not away and (sizes.measuring or sizes.distil_states):
        before = ("self",) if sizes.measuring else ("embed", "block", "fold", "solve", "head_embeddings", "self")
        phases.update({name: size + GRADIENTS for name, size in phases.items() if name not in before})
    host = max(peak_rss(), current_rss() + max(phases.values()))
    output = sizes.plain_bytes + sizes.packed_bytes
    states = 2 * (1 + sizes.paired) * sizes.tokens * sizes.hidden * f32
    work = output + sizes.measured + max(states, sizes.measuring_file)
    there = device_phases(sizes) if away else {"": 0}
    busiest = max(there, key=there.__getitem__)
    disk = max(work, 2 * output + sizes.measured)  # states are gone when the output is assembled
    return Prediction(host, there[busiest], disk, work, output, phases, busiest)


def batch_tokens(widest: int, on_cpu: bool) -> int:
    """Return the tokens per forward of a block whose linears have up to ``widest`` inputs.

    On a CPU they are so few that activations are reused from the heap (``core.host.map_large_blocks``), unless that
    takes fewer than FEWEST_TOKENS.
    """
    small = LARGE // (4 * widest)
    return small if on_cpu and FEWEST_TOKENS <= small < BATCH_TOKENS else BATCH_TOKENS


def _block_phases(sizes: Sizes, away: bool) -> dict[str, int]:
    """Return the host bytes of the phases of the loop over blocks, and of filling the hidden states before it.

    away: blocks are worked on on another device.
    """
    f32 = 4
    states = (1 + sizes.paired) * sizes.tokens * sizes.hidden * f32
    batch = min(sizes.tokens, max(batch_tokens(sizes.widest, not away), sizes.seq_len))
    if away:  # torch rounds pinned blocks up to a power of two
        states = _pinned(states, batch * sizes.hidden * f32)
    statistics = 0 if away or not sizes.calibrated else _statistics(sizes, 8)
    wide = max(Counter(sizes.widths) - Counter(sizes.roots), default=0)
    square = 0 if away or not sizes.calibrated else wide * wide * 8
    ahead = sizes.block * sizes.stored_itemsize  # the next block, as it is stored
    held = states + statistics + ahead + (sizes.largest_parameter if away else sizes.block) * f32
    phases = {}
    if sizes.tokens:
        # the embedding's float32 copy stays until the states are filled, its stored copy only while it is read
        reading = sizes.before_blocks * (f32 + sizes.stored_itemsize + 1)
        phases["embed"] = max(reading, sizes.before_blocks * f32 + states + batch * sizes.hidden * f32 * 3)
        copies = sizes.crossed * sum(sizes.widths) + sizes.weighed * (1 + sizes.crossed) * sizes.widest
        inner = 0 if away else batch * (sizes.inner + copies) * f32
        phases["block"] = held + max(inner, square) + sizes.kv_sample_bytes  # a mean is taken beside its sum
    if sizes.tuned and not away:
        phases["tune"] = held + _learning(sizes)
    if sizes.fold and not away:
        phases["fold"] = held + sizes.fold
    if away:  # codes, and what is packed of them
        phases["solve"] = held + 3 * sizes.largest_group
    else:
        phases["solve"] = held + max(_solving(sizes, *group) for group in sizes.groups)
    return phases


def _solving(sizes: Sizes, width: int, elements: int) -> int:
    """Return the host bytes that solving one stack of linears adds: factors of its Hessian, and work on its weights."""
    square = width * width * 8 if sizes.calibrated and width not in sizes.roots else 0
    matrices = (4 if sizes.crossed else 2.5) if sizes.correlations else 1
    return int(matrices * square) + 9 * elements * 4


def device_phases(sizes: Sizes) -> dict[str, int]:
    """Return the bytes that tensors take on the device in each phase.

    Always the block in float32 and one float32 Hessian per input; and besides:

    observe: a batch's activations and the batches in transfer, the factors of a product
             (``calibrate.matmul_precision``), and the product that is added to a Hessian
    solve:   the stacked weights, and the factorisation in float64 (three matrices and its workspace), or the search for
             ranges on a part of them, or the weights left to round, their codes and their errors
    report:  the Hessian in float64, and a part of one weight three times
    fold, tune: as on a CPU
    self:    the whole model with its cache
    distil:  as on a CPU, but for the states
    """
    f32, f64 = 4, 8
    widest = max(sizes.widths)
    square = widest * widest if sizes.calibrated and sizes.correlations else 0
    streams = 1 + sizes.paired
    base = sizes.block * f32 + (_statistics(sizes, f32) if sizes.calibrated else 0)
    batch = min(sizes.tokens, max(BATCH_TOKENS, sizes.seq_len))
    searched = min(sizes.largest_group, SEARCH_ELEMENTS_GPU)
    split = 32 * batch * widest + 20 * sizes.largest_parameter  # factors of bf16x6: three parts, six times on each side
    phases = {
        "observe": (
            batch
            * f32
            * (
                sizes.inner
                + sizes.crossed * sum(sizes.widths)
                + sizes.weighed * (1 + sizes.crossed) * widest
                + streams * ON_DEVICE * sizes.hidden
            )
            + square * f32 // 8
            + split
        ),
        "solve": (
            sizes.largest_group * f32
            + max(4 * square * f64, 10 * searched * f32, sizes.largest_group * (2 * f32 + 2) + square * f64)
        ),
        "report": square * f64 + 2 * sizes.largest_parameter * f32 + 4 * min(sizes.largest_parameter, 1 << 24) * f64,
        "fold": sizes.fold,
        "measure": sizes.measuring - base,
        "tune": _learning(sizes),
        "self": sizes.whole // 2 - base,  # in bfloat16
        "head_embeddings": 12 * CHUNK * f32 - base if sizes.head_embedding_bytes else 0,
        "distil": sizes.distil - base,
    }
    return {name: base + size for name, size in phases.items()}


def _statistics(sizes: Sizes, itemsize: int) -> int:
    """Return the bytes of the statistics of a block's inputs: Hessians, or inputs themselves."""
    squares = sum(w * w for w in sizes.widths) - sum(w * w for w in sizes.roots)
    return (1 + sizes.crossed) * squares * itemsize + sum(sizes.roots) * sizes.tokens * 4


def _learning(sizes: Sizes) -> int:
    """Return the bytes that tuning a block adds: copies of its linears, one window's activations and gradients."""
    return 4 * (COPIES * sizes.tuned + 4 * sizes.seq_len * sizes.inner) if sizes.tuned else 0


def _pinned(total: int, batch: int) -> int:
    """Return the bytes that ``total`` bytes of states, in batches of ``batch`` bytes, take in pinned memory."""
    return -(-total // max(batch, 1)) * (1 << (max(batch, 1) - 1).bit_length())


def check_device(device: torch.device, need: Prediction, spares: str = "") -> list[str]:
    """Return a problem, in words, if a GPU has less free memory than the job needs.

    device: where blocks are worked on.
    need: the predicted peak.
    spares: the option that leaves out the sensitivity pass, "" if none does.
    """
    if device.type != "cuda":
        return []
    free = torch.cuda.mem_get_info(device)[0]
    if need.device <= free:
        return []
    less = f" {spares} needs less." if spares and need.busiest == "measure" else ""
    return [
        f"{device}: {size_text(need.device)} of its memory are needed, {size_text(free)} are free. "
        f"Free some of it, choose another GPU (--device cuda:1), or --device cpu.{less}"
    ]
