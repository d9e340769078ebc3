"""llama.cpp's importance matrix: written, read back, and refused where it is damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from quantkit.checkpoint.gguf_files.imatrix import Importance, read_imatrix, write_imatrix
from quantkit.errors import RequestError, SourceError

ENTRIES = {
    "blk.0.attn_q.weight": Importance(torch.rand(1, 64) * 9, torch.tensor([512.0])),
    "blk.0.ffn_up_exps.weight": Importance(torch.rand(4, 32), torch.tensor([3.0, 0.0, 7.0, 1.0])),
}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "imatrix.gguf"
    write_imatrix(path, ENTRIES, "some-text", 4, 128)
    return path


def test_what_was_written_is_read(written: Path) -> None:
    found = read_imatrix(written)
    assert set(found) == set(ENTRIES)
    for name, entry in ENTRIES.items():
        assert torch.equal(found[name].sums, entry.sums)
        assert torch.equal(found[name].counts, entry.counts)
    mean = found["blk.0.attn_q.weight"].mean()
    assert mean is not None
    assert torch.allclose(mean, ENTRIES["blk.0.attn_q.weight"].sums[0] / 512)
    assert found["blk.0.ffn_up_exps.weight"].mean(1) is None


def test_the_layout_is_llama_cpps(written: Path) -> None:
    reader = gguf.GGUFReader(written)
    assert reader.fields["general.type"].contents() == "imatrix"
    assert reader.fields["imatrix.datasets"].contents() == ["some-text"]
    assert (reader.fields["imatrix.chunk_count"].contents(), reader.fields["imatrix.chunk_size"].contents()) == (4, 128)
    shapes = {tensor.name: tensor.shape.tolist() for tensor in reader.tensors}
    assert shapes == {  # innermost first
        "blk.0.attn_q.weight.in_sum2": [64, 1], "blk.0.attn_q.weight.counts": [1, 1],
        "blk.0.ffn_up_exps.weight.in_sum2": [32, 4], "blk.0.ffn_up_exps.weight.counts": [1, 4],
    }  # fmt: skip


def test_a_file_is_never_written_over(written: Path) -> None:
    with pytest.raises(RequestError, match="exists already"):
        write_imatrix(written, ENTRIES, "some-text", 4, 128)


def made(path: Path, kind: str | None, tensors: dict[str, np.ndarray[Any, Any]]) -> Path:
    writer = gguf.GGUFWriter(path, "")
    if kind is not None:
        writer.add_string("general.type", kind)
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


SUMS, ONE = np.ones((1, 8), np.float32), np.ones((1, 1), np.float32)
DAMAGED: dict[str, tuple[str | None, dict[str, np.ndarray[Any, Any]], str]] = {
    "a model": ("model", {"x.in_sum2": SUMS, "x.counts": ONE}, "not an importance matrix"),
    "no kind": (None, {"x.in_sum2": SUMS, "x.counts": ONE}, "not an importance matrix"),
    "no counts": ("imatrix", {"x.in_sum2": SUMS}, "sums without counts"),
    "another tensor": ("imatrix", {"x.weight": SUMS}, "belongs to no importance matrix"),
    "negative": ("imatrix", {"x.in_sum2": -SUMS, "x.counts": ONE}, "no sums of squares"),
    "not a number": ("imatrix", {"x.in_sum2": SUMS * np.nan, "x.counts": ONE}, "no sums of squares"),
    "infinite counts": ("imatrix", {"x.in_sum2": SUMS, "x.counts": ONE * np.inf}, "no sums of squares"),
    "half": ("imatrix", {"x.in_sum2": SUMS.astype(np.float16), "x.counts": ONE}, "F16, expected F32"),
    "other counts": ("imatrix", {"x.in_sum2": SUMS, "x.counts": np.ones((3, 1), np.float32)}, "do not go together"),
    "three dimensions": ("imatrix", {"x.in_sum2": np.ones((1, 1, 8), np.float32), "x.counts": ONE}, "do not go"),
    "empty": ("imatrix", {}, "holds no entry"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_are_refused_by_name(case: str, tmp_path: Path) -> None:
    kind, tensors, words = DAMAGED[case]
    path = made(tmp_path / "bad.gguf", kind, tensors)
    with pytest.raises(SourceError, match=words) as refusal:
        read_imatrix(path)
    assert "bad.gguf" in str(refusal.value)


CUTS: dict[str, Callable[[bytes], bytes]] = {
    "cut off": lambda data: data[: len(data) // 2],
    "no GGUF": lambda data: b"old " + data[4:],
    "longer": lambda data: data + bytes(100),
}


@pytest.mark.parametrize("how", CUTS)
def test_a_file_that_is_not_whole_is_refused(how: str, written: Path) -> None:
    written.write_bytes(CUTS[how](written.read_bytes()))
    with pytest.raises(SourceError, match=r"imatrix\.gguf"):
        read_imatrix(written)
