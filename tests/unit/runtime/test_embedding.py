"""QuantEmbedding looks up what dequantizing the whole matrix gives.

For every layout, and for embeddings with a forward of their own.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from quantkit.algorithms.rtn import rtn
from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import UnsupportedModel
from quantkit.runtime.kernels.reference import WordsWeight
from quantkit.runtime.layers.embedding import QuantEmbedding
from quantkit.runtime.layers.linear import pack

IDS = torch.tensor([[0, 5, 79, 5], [31, 32, 33, 78]])


def quantized(scheme: Scheme, rows: int = 80, columns: int = 64) -> QuantTensor:
    torch.manual_seed(1)
    return rtn(torch.randn(rows, columns), scheme).quantized


@pytest.mark.parametrize(
    "scheme", [Scheme(4, 32, False), Scheme(8, None, True), Scheme(3, 48, False), Scheme(8, 32, False)], ids=str
)
@pytest.mark.parametrize("layout", ["chosen", "words"])
def test_a_lookup_gives_the_rows_of_the_matrix(scheme: Scheme, layout: str) -> None:
    q = quantized(scheme)
    packed = WordsWeight(q) if layout == "words" else pack(q, device=torch.device("cpu"))
    embedding = QuantEmbedding(packed, nn.Embedding(80, 64), torch.float32)
    assert torch.equal(embedding(IDS), packed.dequantize()[IDS])
    assert torch.allclose(embedding.dequantize(), q.dequantize(), atol=0.02)
    assert embedding(torch.empty(1, 0, dtype=torch.int64)).shape == (1, 0, 64)
    assert not list(embedding.parameters())


def test_an_embedding_with_a_forward_of_its_own_keeps_it() -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

    q = quantized(Scheme(8, 32))
    original: Any = Gemma3TextScaledWordEmbedding(80, 64, padding_idx=0, embed_scale=8.0)
    embedding = QuantEmbedding(WordsWeight(q), original, torch.bfloat16)
    found = embedding(IDS)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, q.dequantize().bfloat16()[IDS] * torch.tensor(8.0, dtype=torch.bfloat16))


def test_two_threads_look_up_at_once() -> None:
    q = quantized(Scheme(8, 32))
    embedding, whole = QuantEmbedding(WordsWeight(q), nn.Embedding(80, 64), torch.float32), q.dequantize()
    wrong: list[int] = []

    def work(start: int) -> None:
        for step in range(50):
            ids = torch.arange(start + step % 7, 80, 7)
            if not torch.equal(embedding(ids), whole[ids]):
                wrong.append(step)

    threads = [threading.Thread(target=work, args=(start,)) for start in (0, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_an_embedding_that_renormalises_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="max_norm"):
        QuantEmbedding(WordsWeight(quantized(Scheme(8, 32))), nn.Embedding(80, 64, max_norm=1.0), torch.float32)
