"""What is done with a damaged file: every reader that it may come to. Called in a child (``limits.py``)."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from hostile.mutations import mutate
from hostile.same_numbers import hashes

import quantkit as package

# file -> (kind of its content, who reads it, how many of a hundred inputs)
FILES: dict[str, tuple[str, str, float]] = {
    "float/config.json": ("json", "folder", 10),
    "float/generation_config.json": ("json", "folder", 3),
    "plan/config.json": ("json", "plan", 3),
    "plan/generation_config.json": ("json", "plan", 2),
    "repack/quantkit.json": ("json", "plan", 2),
    "repack/config.json": ("json", "plan", 2),
    "float/tokenizer.json": ("json", "tokenizer", 12),
    "float/tokenizer_config.json": ("json", "tokenizer", 8),
    "float/chat_template.jinja": ("bytes", "tokenizer", 4),
    "float/model.safetensors": ("safetensors", "folder", 9),
    "sharded/model.safetensors.index.json": ("json", "folder", 5),
    "old-gptq/quantize_config.json": ("json", "folder", 4),
    "gptq/config.json": ("json", "folder", 3),
    "gptq/model.safetensors": ("safetensors", "folder", 3),
    "awq/config.json": ("json", "folder", 2),
    "awq/model.safetensors": ("safetensors", "folder", 2),
    "compressed/config.json": ("json", "folder", 4),
    "compressed/model.safetensors": ("safetensors", "folder", 3),
    "native/config.json": ("json", "folder", 3),
    "native/quantkit.safetensors": ("safetensors", "folder", 2),
    "native/quantkit_kv.safetensors": ("safetensors", "folder", 4),
    "model.gguf": ("gguf", "gguf", 8),
    "packed.gguf": ("gguf", "repacked", 3),
    "imatrix.gguf": ("gguf", "imatrix", 3),
    "fp8/config.json": ("json", "folder", 2),
    "fp8/model.safetensors": ("safetensors", "repacked", 2),
    "modelopt/hf_quant_config.json": ("json", "folder", 2),
    "modelopt/model.safetensors": ("safetensors", "repacked", 2),
    "mxfp4/config.json": ("json", "repacked", 2),
    "mxfp4/model.safetensors": ("safetensors", "folder", 2),
    "nf4/config.json": ("json", "folder", 2),
    "nf4/model.safetensors": ("safetensors", "folder", 2),
    "nvfp4/config.json": ("json", "folder", 1),
    "nvfp4/model.safetensors": ("safetensors", "repacked", 2),
    "w8a8/config.json": ("json", "folder", 1),
    "w8a8/model.safetensors": ("safetensors", "folder", 2),
    "act-order/config.json": ("json", "folder", 1),
    "act-order/model.safetensors": ("safetensors", "folder", 2),
    "gpt-oss/config.json": ("json", "folder", 2),
    "gpt-oss/model.safetensors": ("safetensors", "folder", 2),
    "texts/a.jsonl": ("jsonl", "text", 4),
    "texts/a.jsonl.gz": ("gzip", "text", 1.5),
    "texts/a.txt": ("text", "text", 0.5),
    "texts/a.parquet": ("bytes", "text", 1),
    "seeing/preprocessor_config.json": ("json", "images", 3),
    "seeing/processor_config.json": ("json", "images", 2),
    "seeing/image.png": ("bytes", "images", 1),
    "job/.out.work/job.json": ("record", "job", 1),
    "job/.out.work/parts/block-0000.json": ("record", "job", 0.5),
}


def draw(kept: str, seed: int, number: int) -> tuple[str, bytes, str]:
    """Return the file that an input is made of, its damaged content, and what was done to it."""
    random = Random(f"{seed}/{number}")
    name = random.choices(list(FILES), [share for _, _, share in FILES.values()])[0]
    content, done = mutate((Path(kept) / name).read_bytes(), FILES[name][0], random)
    return name, content, done


def read(kept: str, scratch: str, seed: int, number: int) -> Any:
    """Put an input in its place among the originals, let its reader have it, and put the original back.

    The originals lie in ``scratch``. Returns what the reader does: of a model, ``same_numbers.hashes``.
    """
    name, content, _ = draw(kept, seed, number)
    _watch(Path(scratch))
    path = Path(scratch) / name
    path.write_bytes(content)
    outside.clear()
    try:
        return READERS[FILES[name][1]](path)
    finally:
        shutil.copyfile(Path(kept) / name, path)
        assert not outside, f"touched outside: {outside[:5]}"


def folder(path: Path) -> dict[str, str]:
    """As ``inspect`` and ``generate`` do; returns hashes of the numbers."""
    import torch

    import quantkit
    from quantkit.checkpoint.open import open_source
    from quantkit.cli.inspect import _quantized, _structure
    from quantkit.runtime.layers.dense_source import stored_experts

    source = stored_experts(open_source(path.parent))
    (_structure if source.quantization() is None else _quantized)(source)
    model = quantkit.load(path.parent, device="cpu", dtype="float32")
    model(torch.tensor([[2, 3, 4, 5]]))
    _ = model.context, model.memory()
    model.encode("The history")
    return hashes(source)


def plan(path: Path) -> None:
    """As ``convert --dry-run`` does, from an original and from a quantized folder (repack)."""
    from quantkit.convert.api import plan_request

    options: dict[str, Any] = {"format": "gptq"} if path.parent.name == "repack" else {"method": "rtn"}
    plan_request(path.parent, path.parents[1] / "planned", **options)


def repacked(path: Path) -> None:
    """As ``convert --repack`` and ``convert --dequantize`` do, up to what is written."""
    from quantkit.convert.api import plan_request
    from quantkit.convert.repack.dequantize import DequantizePlan
    from quantkit.convert.repack.fit import fit
    from quantkit.convert.repack.plan import RepackPlan, integer_module

    given, out = (path if path.suffix == ".gguf" else path.parent), path.parents[1] / "planned"
    planned = plan_request(given, out, repack=True, format="native")
    assert isinstance(planned, RepackPlan)
    planned.raise_problems()
    for name in planned.reader.modules:
        fit(integer_module(planned.reader, name), planned.format, rounding=True)
    dense = plan_request(given, out, dequantize=True)
    assert isinstance(dense, DequantizePlan)
    for name in dense.source.names():
        dense.source.read(name)


def imatrix(path: Path) -> None:
    """As ``convert --imatrix`` does."""
    from quantkit.checkpoint.gguf_files.imatrix import read_imatrix

    for entry in read_imatrix(path).values():
        entry.mean(0)


def tokenizer(path: Path) -> None:
    """As ``generate`` and ``convert`` do."""
    from quantkit.checkpoint.tokenizer import check_vocabulary, load_tokenizer, wants_bos
    from quantkit.runtime.generate.chat_template import chat_text

    loaded = load_tokenizer(path.parent)
    ids = loaded("The history of é 😀\n", add_special_tokens=False)["input_ids"]
    check_vocabulary(ids, {"vocab_size": 400}, path)
    wants_bos(loaded)
    loaded.decode(ids, skip_special_tokens=True)
    chat_text(loaded, [{"role": "user", "content": "Hi"}])


def gguf(path: Path) -> dict[str, str]:
    """As ``inspect`` and ``generate`` do; returns hashes of the numbers."""
    import torch

    import quantkit
    from quantkit.checkpoint.open import open_source
    from quantkit.checkpoint.tokenizer import load_tokenizer
    from quantkit.cli.inspect import _structure

    source = open_source(path)
    _structure(source)
    model = quantkit.load(path, device="cpu", dtype="float32")
    model(torch.tensor([[2, 3, 4, 5]]))
    load_tokenizer(path)
    return hashes(source)


def text(path: Path) -> None:
    """As ``convert`` and ``eval`` do."""
    from quantkit.checkpoint.texts import load_text

    load_text(str(path), split="calibration")


def images(path: Path) -> None:
    """As ``generate --image`` does, up to what the model gets."""
    from quantkit.checkpoint.foreign_files.fields import read_json
    from quantkit.checkpoint.tokenizer import load_tokenizer
    from quantkit.runtime.images.files import read_image
    from quantkit.runtime.images.processor import load_processor
    from quantkit.runtime.images.prompt import prompt_with_images

    folder = path.parent
    source: Any = SimpleNamespace(path=folder, config=read_json(folder / "config.json"))
    image = read_image(folder / "image.png")
    processor = load_processor(source, load_tokenizer(folder))
    prompt_with_images(processor, "The history", [image], folder)


def job(path: Path) -> None:
    """As ``convert --resume`` does."""
    from quantkit import convert

    work = next(parent for parent in path.parents if parent.name == ".out.work")
    root = work.parents[1]
    kept = shutil.copytree(work, root / "kept", dirs_exist_ok=True)
    try:
        convert(root / "float", work.parent / "out", method="rtn", group_size=16, resume=True)
    finally:
        for made in (work, work.parent / "out"):
            shutil.rmtree(made, ignore_errors=True)
        shutil.move(kept, work)


READERS: dict[str, Callable[[Path], Any]] = {
    "folder": folder, "plan": plan, "tokenizer": tokenizer, "gguf": gguf, "text": text, "job": job, "images": images,
    "repacked": repacked, "imatrix": imatrix,
}  # fmt: skip

PICKLED = (
    "numba.",
    "quantkit.runtime.kernels.numba.",
    "builtins",
    "numpy",
    "copyreg",
)  # what numba keeps of compiled kernels
outside: list[str] = []
_watched: list[Path] = []


def _watch(scratch: Path) -> None:
    """Note every file that is written outside the scratch folder, every program and every connection."""
    if _watched:
        return
    _watched.append(scratch)
    caches = (str(Path(package.__file__).parent), tempfile.gettempdir() + "/torchinductor_")  # numba's and torch's own
    allowed = (str(scratch), "/dev/", "/proc/", *caches)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            name, mode, _ = arguments
            writes = isinstance(mode, str) and any(letter in mode for letter in "wax+")
            if writes and isinstance(name, str) and not name.startswith(allowed):
                outside.append(f"writes {name}")
        elif event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "os.link"):
            # A relative name is one of a folder that rmtree holds open, and was asked about when it was opened.
            if os.path.isabs(str(arguments[0])) and not str(arguments[0]).startswith(allowed):
                outside.append(f"{event} {arguments[0]}")
        elif event in ("os.system", "os.exec", "socket.connect", "socket.getaddrinfo") or (
            event == "pickle.find_class" and not str(arguments[0]).startswith(PICKLED)
        ):
            outside.append(f"{event} {str(arguments)[:200]}")
        elif event == "subprocess.Popen" and "worker.py" not in str(arguments[1]):
            outside.append(f"starts {arguments[1]}")

    sys.addaudithook(hook)
