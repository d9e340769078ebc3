"""Time each stage of GPTQ on a model shaped like Llama-3 8B with random weights, and measure device memory.

    python eval/kernels/gpu_convert.py --out results.json
        [--blocks 4] [--products bf16x6 float32] [--seconds 280] [--whole] [--rehearse]

The text is 128 x 2048 random tokens. A model of ``--blocks`` whole blocks, with the full embedding and head, is written
to ``--folder`` and converted by ``quantkit.convert`` itself, whose functions are timed from outside. What 32 blocks
would take is **extrapolated**: the median of the blocks after the first (it compiles) times 32, what grows with the
output (assemble, verify) by its bytes, the rest once. ``--whole`` writes and converts all 32 (16 GB). ``--rehearse``:
tiny shapes, any device; the numbers mean nothing.

Operations of a block, T = 262,144 tokens (K, N the sides of its linears, 218 M weights):

    observe   2 T K N without down_proj, whose output is not needed      8.4e13
    advance   2 T K N                                                    1.14e14
    Hessians  2 T (3 * 4096^2 + 14336^2), 62.5% of it                    8.4e13    blocks on and above the diagonal
    attention 2 passes, causal half                                      0.9e13
    factorise 2/3 K^3 in float64, four inputs                            0.2e13
    loss      4 N K^2 in float64                                         0.6e13
    columns   N K^2, and 512 a weight in the column kernel               0.16e13

32 blocks: 9.3e15 float32 operations, 169 s at the 55 TFLOP/s that float32 reaches on an H200 without TF32: the target
of 180 s leaves 11 s for all the rest. As six bf16 products each (``calibrate/matmul_precision.py``) the first three
lines take 83 s at 650 TFLOP/s, as three 42 s (other codes: see there). States travel 3 x 4.3 GB a block, 0.26 s of PCIe
5 behind at least 1 s of arithmetic.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import platform
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import quantkit
from quantkit.calibrate import matmul_precision
from quantkit.errors import QuantkitError

LLAMA_8B = {"hidden": 4096, "inner": 14336, "heads": 32, "kv_heads": 8, "vocab": 128256, "layers": 32}
TINY = {"hidden": 64, "inner": 128, "heads": 4, "kv_heads": 2, "vocab": 300, "layers": 4}
# (stage, module, name): what is timed. A stage inside another is part of it.
STAGES = (
    ("load", "quantkit.model.weights", "Weights.load"),
    ("groups", "quantkit.convert.run", "input_groups"),
    ("observe", "quantkit.convert.run", "observe_block"),
    ("observe: hessian", "quantkit.calibrate.stats", "Hessian.add"),
    ("mean", "quantkit.calibrate.stats", "Hessian.result"),
    ("solve", "quantkit.convert.run", "quantize_block"),
    ("solve: factorise", "quantkit.algorithms.gptq", "factorise"),
    ("solve: search", "quantkit.core.affine", "searched_params"),
    ("solve: columns", "quantkit.algorithms.gptq", "_solve"),
    ("solve: loss", "quantkit.convert.stages.block", "output_energy"),
    ("solve: hash", "quantkit.convert.stages.block", "decision_sha256"),
    ("record", "quantkit.convert.job.work_folder", "Work.record"),
    ("advance", "quantkit.convert.run", "advance"),
    ("keep states", "quantkit.convert.job.states", "StateStore.keep"),
)
ONCE = (
    ("plan", "quantkit.convert.api", "make_plan"),
    ("hash of the source", "quantkit.convert.job.work_folder", "job_of"),
    ("embed", "quantkit.convert.run", "embed"),
    ("outside and copy", "quantkit.convert.finish", "_copy_unquantized"),
    ("assemble", "quantkit.checkpoint.writer", "CheckpointWriter.assemble"),
    ("verify", "quantkit.convert.finish", "verify_folder"),
    ("sample", "quantkit.convert.finish", "_smoke_test"),
)
GROWING = ("hash of the source", "assemble", "verify")  # sizes of source and output grow in nearly one proportion


class Clock:
    """Seconds of each stage and block.

    The device is waited for at the ends of every stage but the inner ones of ``observe``.
    """

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self.blocks: list[dict[str, float]] = []
        self.once: dict[str, float] = defaultdict(float)
        self._alone = False  # inside a stage of ONCE, which counts all that it calls
        self._events: list[tuple[dict[str, float], str, Any, Any]] = []
        self._undo: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Clock:
        for stage, module, name in (*STAGES, *ONCE):
            owner: Any = importlib.import_module(module)
            *path, local = name.split(".")
            for part in path:
                owner = getattr(owner, part)
            original = getattr(owner, local)
            self._undo.append((owner, local, original))
            setattr(owner, local, self._timed(stage, original))
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, original in self._undo:
            setattr(owner, name, original)
        self._wait()
        for into, stage, start, stop in self._events:
            into[stage] += start.elapsed_time(stop) / 1e3

    def _wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def _timed(self, stage: str, original: Callable[..., Any]) -> Callable[..., Any]:
        per_block = any(stage == name for name, _, _ in STAGES)

        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._alone:
                return original(*args, **kwargs)
            if stage == "groups":  # the first thing that only a block does
                self.blocks.append(defaultdict(float))
            into = self.blocks[-1] if per_block and self.blocks else self.once
            if stage == "observe: hessian" and self.cuda:  # many times a batch: no waiting
                start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                found = original(*args, **kwargs)
                stop.record()
                self._events.append((into, stage, start, stop))
                return found
            self._wait()
            begun = time.perf_counter()
            self._alone = not per_block
            try:
                return original(*args, **kwargs)
            finally:
                self._alone = False
                self._wait()
                into[stage] += time.perf_counter() - begun

        return run


def write_source(folder: Path, shape: dict[str, int], layers: int, device: torch.device) -> None:
    """A Hugging Face folder of a random llama, one shard a block, and a tokenizer that knows a word for each id."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    folder.mkdir(parents=True)
    h, inner, head = shape["hidden"], shape["inner"], shape["hidden"] // shape["heads"]
    config = LlamaConfig(
        hidden_size=h, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"], vocab_size=shape["vocab"], max_position_embeddings=8192,
        rope_theta=500000.0,
        tie_word_embeddings=False, bos_token_id=0, eos_token_id=1, architectures=["LlamaForCausalLM"], dtype="bfloat16",
    )  # fmt: skip
    config.save_pretrained(folder)
    vocabulary = {"<s>": 0, "</s>": 1, **{f"w{i}": i for i in range(2, shape["vocab"])}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    generator = torch.Generator(device).manual_seed(0)

    def noise(*size: int) -> torch.Tensor:
        return (torch.randn(size, device=device, generator=generator) * size[-1] ** -0.5).bfloat16().cpu()

    ones = torch.ones(h, dtype=torch.bfloat16)
    kv = shape["kv_heads"] * head
    sizes = {
        "self_attn.q_proj": (h, h), "self_attn.k_proj": (kv, h), "self_attn.v_proj": (kv, h),
        "self_attn.o_proj": (h, h),
        "mlp.gate_proj": (inner, h), "mlp.up_proj": (inner, h), "mlp.down_proj": (h, inner),
    }  # fmt: skip
    index: dict[str, str] = {}

    def save(name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, name))

    outer = {"model.embed_tokens.weight": noise(shape["vocab"], h), "lm_head.weight": noise(shape["vocab"], h)}
    save("model-outer.safetensors", {**outer, "model.norm.weight": ones})
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        norms = {f"{prefix}.{name}.weight": ones.clone() for name in ("input_layernorm", "post_attention_layernorm")}
        linears = {f"{prefix}.{name}.weight": noise(*size) for name, size in sizes.items()}
        save(f"model-{layer:05d}.safetensors", {**norms, **linears})
    total = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    )


def write_text(path: Path, vocab: int, tokens: int) -> None:
    words = torch.randint(2, vocab, (tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    path.write_text("\n".join(" ".join(f"w{i}" for i in words[at : at + 512]) for at in range(0, tokens, 512)))


def convert(
    source: Path, text: Path, mode: str, options: argparse.Namespace, shape: dict[str, int], layers: int
) -> dict[str, Any]:
    """One conversion: what it measured, and what 32 blocks would take."""
    cuda = options.device.startswith("cuda")
    out = source.parent / f"out-{mode}"
    samples, seq_len = (4, 32) if options.rehearse else (128, 2048)
    begun = time.perf_counter()
    with Clock(cuda) as clock:
        report = quantkit.convert(
            source, out=out, calibration=str(text), samples=samples, seq_len=seq_len, device=options.device,
            matmul_precision=mode, group_size=32 if options.rehearse else 128,
        )  # fmt: skip
    seconds = time.perf_counter() - begun
    written = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    shutil.rmtree(out)
    found: dict[str, Any] = {
        "products": mode, "blocks": layers, "seconds": seconds, "peak_device_bytes": report.peak_device_bytes,
        "peak_host_bytes": report.peak_host_bytes, "output_bytes": written, "once": dict(clock.once),
        "per_block": clock.blocks,
    }  # fmt: skip
    return {**found, **extrapolated(found, shape, layers)}


def extrapolated(found: dict[str, Any], shape: dict[str, int], layers: int) -> dict[str, Any]:
    """Seconds of each stage for all blocks; equal to what was measured if all were."""
    blocks: list[dict[str, float]] = found["per_block"]
    warm = blocks[1:-1] or blocks[-1:]  # the first compiles, the last is not advanced
    names = dict.fromkeys(name for block in blocks for name in block)
    median = {name: statistics.median(block.get(name, 0.0) for block in warm) for name in names}
    total = shape["layers"]
    outer = 4 * shape["vocab"] * shape["hidden"]
    growth = (outer + (found["output_bytes"] - outer) * total / layers) / found["output_bytes"]
    once = {name: value * (growth if name in GROWING else 1.0) for name, value in found["once"].items()}
    once.pop("sample", None)  # a model of 8B is too large for the sample at the end
    stages = {**{name: value * total for name, value in median.items()}, **once}
    unseen = found["seconds"] - sum(found["once"].values()) - sum(_outer(block) for block in blocks)
    whole = _outer(stages) + unseen if layers != total else found["seconds"]
    return {
        "stages_all_blocks": stages,
        "not_in_a_stage": unseen,
        "seconds_all_blocks": whole,
        "extrapolated": layers != total,
    }


def _outer(stages: dict[str, float]) -> float:
    return sum(value for name, value in stages.items() if ":" not in name)


def product_speeds(device: torch.device, rehearse: bool) -> dict[str, Any]:
    """Measure one product of a batch with gate_proj in float32 and as six or three bf16 products.

    TFLOP/s of each, and its error against float64.
    """
    m, k, n = (64, 64, 96) if rehearse else (4096, 4096, 14336)
    left, right = torch.randn(m, k, device=device), torch.randn(n, k, device=device).t()
    exact = left[:64].double() @ right.double()
    found: dict[str, Any] = {"shape": [m, k, n]}
    for name, multiply in (
        ("float32", torch.mm),
        *((mode, functools.partial(matmul_precision.split_product, mode=mode)) for mode in matmul_precision.MODES[1:]),
    ):
        times = []
        for _ in range(3 if rehearse else 12):
            if device.type == "cuda":
                torch.cuda.synchronize()
            begun = time.perf_counter()
            y = multiply(left, right)
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begun)
        error = float((y[:64].double() - exact).norm() / exact.norm())
        found[name] = {"tflop_per_s": 2e-12 * m * k * n / statistics.median(times), "relative_error": error}
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, help="where models are written; emptied at the end [a temporary one]")
    parser.add_argument(
        "--blocks", type=int, default=4, help="at least 3: the first compiles, the last is not advanced"
    )
    parser.add_argument("--products", nargs="+", default=["bf16x6", "bf16x3"], choices=matmul_precision.MODES)
    parser.add_argument("--seconds", type=float, default=280, help="no conversion is begun after this")
    parser.add_argument("--whole", action="store_true", help="all 32 blocks, nothing extrapolated")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args(arguments)
    start = time.monotonic()
    shape = TINY if options.rehearse else LLAMA_8B
    layers = shape["layers"] if options.whole else options.blocks
    device = torch.device(options.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    result: dict[str, Any] = {
        "device": name, "torch": torch.__version__, "python": platform.python_version(), "rehearsal": options.rehearse,
        "model": shape, "tokens": 4 * 32 if options.rehearse else 128 * 2048,
        "product": product_speeds(device, options.rehearse), "runs": [],
    }  # fmt: skip
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        folder = Path(scratch)
        write_source(folder / "source", shape, layers, device)
        write_text(folder / "text.txt", shape["vocab"], 4096 if options.rehearse else 330_000)
        result["seconds_writing_the_source"] = time.monotonic() - start
        for mode in options.products:
            if time.monotonic() - start > options.seconds:
                result["runs"].append({"products": mode, "left_out": "no time left"})
                continue
            try:
                run = convert(folder / "source", folder / "text.txt", mode, options, shape, layers)
            except QuantkitError as error:
                run = {"products": mode, "error": str(error)}
            result["runs"].append(run)
            options.out.write_text(json.dumps(result, indent=1) + "\n")
            show(run)
    print(f"{time.monotonic() - start:.0f} s in all: {options.out}")


def show(run: dict[str, Any]) -> None:
    if "error" in run:
        print(f"{run['products']}: {run['error']}", flush=True)
        return
    what = "extrapolated from" if run["extrapolated"] else "measured,"
    print(
        f"{run['products']}: {run['seconds_all_blocks']:.1f} s "
        f"({what} {run['blocks']} blocks in {run['seconds']:.1f} s), "
        f"device peak {run['peak_device_bytes'] / 1e9:.2f} GB"
    )
    for name, value in run["stages_all_blocks"].items():
        print(f"    {name:20} {value:8.2f} s", flush=True)


if __name__ == "__main__":
    main()
