"""The head at run time: exact in 16 bits by itself, rounded where asked, tied embeddings with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quantkit.core.scheme import Scheme
from quantkit.errors import RequestError
from quantkit.runtime.kernels.cpu_layouts import HalfWeight
from quantkit.runtime.kernels.numba import threads
from quantkit.runtime.layers.embedding import QuantEmbedding
from quantkit.runtime.layers.linear import QuantLinear
from quantkit.runtime.load import load

Folder = Callable[..., Path]
IDS = torch.arange(3, 40)[None]


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_rounded_head_is_small_and_near(float_folder: Folder, kind: str, bits: int) -> None:
    folder = float_folder(kind)
    exact = load(folder, device="cpu", dtype="float32", kernel="reference")
    rounded = load(folder, device="cpu", dtype="float32", head_bits=bits)
    head = rounded.module.get_output_embeddings()
    assert isinstance(head, QuantLinear)
    assert isinstance(rounded.module.get_input_embeddings(), QuantEmbedding) == (kind == "gemma3_text")
    assert rounded.memory()["quantized"] < exact.module.get_output_embeddings().weight.nbytes / 2
    hidden = exact.hidden(IDS)
    difference = (rounded.head(hidden) - exact.head(hidden)).norm() / exact.head(hidden).norm()
    assert 0 < float(difference) < (0.02 if bits == 8 else 0.2)


def test_what_cannot_be_rounded_is_refused(float_folder: Folder) -> None:
    with pytest.raises(RequestError, match="head_bits=5"):
        load(float_folder("llama"), device="cpu", head_bits=5)
    with pytest.raises(RequestError, match="dequantize"):
        load(float_folder("llama"), device="cpu", head_bits=8, dequantize=True)


@pytest.mark.skipif(not threads.available(), reason="numba is not installed (extra [cpu])")
def test_a_head_stored_in_16_bits_stays_so_and_gives_the_same_logits(packed_folder: Folder, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = packed_folder("gemma3_text", Scheme(4, 32))
    file = folder / "model.safetensors"
    tensors = {n: t.bfloat16() if "embed_tokens" in n else t for n, t in load_file(file).items()}
    save_file(tensors, file)
    exact = load(folder, device="cpu", dtype="float32", kernel="reference")
    held = load(folder, device="cpu", dtype="float32", head_bits=16)
    head, embedding = held.module.get_output_embeddings(), held.module.get_input_embeddings()
    assert isinstance(head.packed, HalfWeight)
    assert head.packed is embedding.packed
    assert torch.equal(embedding(IDS), exact.module.get_input_embeddings()(IDS))
    hidden = exact.hidden(IDS)[:, -1:]
    torch.testing.assert_close(held.head(hidden), exact.head(hidden), rtol=1e-5, atol=1e-5)
    assert held.memory()["dense"] < exact.memory()["dense"]


@pytest.mark.parametrize("numba", [True, False])
@pytest.mark.parametrize(("bits", "expected"), [(4, 8), (8, 16)])
def test_the_default_head_is_of_8_bits_beside_narrow_weights_on_compiled_kernels(
    bits: int, expected: int, numba: bool, packed_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    if numba and not threads.available():
        pytest.skip("numba is not installed (extra [cpu])")
    if not numba:
        monkeypatch.setattr("quantkit.runtime.kernels.numba.threads.available", lambda: False)
    model = load(packed_folder("llama", Scheme(bits, 32)), device="cpu", dtype="float32")
    assert model.head_bits == (expected if numba and bits == 4 else 32)  # the tiny model is stored in float32
    exact = load(packed_folder("llama", Scheme(bits, 32)), device="cpu", dtype="float32", head_bits=16)
    assert exact.head_bits in (16, 32)


def test_an_original_keeps_its_head(float_folder: Folder) -> None:
    assert load(float_folder("llama"), device="cpu", dtype="float32").head_bits == 32
