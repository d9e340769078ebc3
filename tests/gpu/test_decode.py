"""Decoding on a real device: the kernels of a step, and captured steps against single ones and against the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from step_cases import check_pack, check_rotary, noise, packed_of, pages_of
from step_models import greedy_logits, packed, requantize, tiny

from quantkit.core.kvscheme import KVScheme
from quantkit.core.scheme import Scheme
from quantkit.runtime.generate.loop import Generation, run
from quantkit.runtime.generate.sampling import GenerationOptions
from quantkit.runtime.kernels import decode_reference
from quantkit.runtime.kernels.decode_reference import Heads
from quantkit.runtime.layers.fused import fuse_linears
from quantkit.runtime.load import load

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CLOSE = {
    torch.float32: dict(rtol=1e-4, atol=1e-4),
    torch.bfloat16: dict(rtol=2.0**-6, atol=2.0**-5),
    torch.float16: dict(rtol=2.0**-9, atol=2.0**-7),
}


BF16, FP16, F32 = torch.bfloat16, torch.float16, torch.float32
CASES = [(128, BF16), (64, BF16), (16, F32), (64, F32), (128, F32), (96, FP16), (256, BF16)]


@pytest.mark.parametrize(("dim", "dtype"), CASES)
@pytest.mark.parametrize(("length", "window"), [(0, 0), (1000, 0), (1000, 300)])
def test_attention_equals_its_definition(length: int, window: int, dim: int, dtype: Any) -> None:
    from quantkit.runtime.kernels.triton.attention import Workspace, attend

    heads = Heads(8, 2, dim, dim**-0.5)
    pages, stored = pages_of([0, min(length, 790)], length, heads, dtype, "cuda", window=window)
    q = noise(2, 8, dim, seed=1).to("cuda", dtype)
    space = Workspace(2, heads, 132, q.device)
    found = attend(q, pages, heads, space)
    torch.testing.assert_close(found, decode_reference.attend(q, pages, heads, stored), **CLOSE[dtype])
    for _ in range(20):
        assert torch.equal(attend(q, pages, heads, space), found)  # whichever part comes last
    assert not bool(space.lock.any())


@pytest.mark.parametrize(
    ("bits", "dim", "dtype"),
    [
        (8, 128, BF16), (4, 128, BF16), ("k4v2", 128, BF16), (3, 128, BF16), (2, 128, BF16), ("k16v4", 128, BF16),
        ("k8v16", 128, BF16), (4, 64, BF16), (3, 64, FP16), (4, 80, FP16), (4, 256, BF16), (8, 256, FP16), (4, 64, F32),
        ("k8v2", 64, F32),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("length", "window"), [(200, 0), (5000, 0), (1000, 300)])
def test_attention_over_packed_pages_equals_its_definition(
    length: int, window: int, bits: int | str, dim: int, dtype: Any
) -> None:
    from quantkit.runtime.kernels.triton.attention import Workspace, attend

    heads, scheme = Heads(16, 2, dim, dim**-0.5), KVScheme.of(bits)
    pages, stored = packed_of(
        [0, min(length, 190), -1], length, heads, dtype, "cuda", scheme, window=window, done=length > 4000
    )
    q = noise(3, 16, dim, seed=1).to("cuda", dtype)
    space = Workspace(3, heads, 132, q.device, scheme.groups(dim))
    found = attend(q, pages, heads, space)
    close = dict(rtol=1e-3, atol=1e-3) if dtype == F32 else CLOSE[BF16]  # codes in tf32; in float16 beside it
    torch.testing.assert_close(found, decode_reference.attend(q, pages, heads, stored), **close)
    for _ in range(20):
        assert torch.equal(attend(q, pages, heads, space), found)
    assert not bool(space.lock.any())


@pytest.mark.parametrize("bits", [8, 4, "k4v2", 3, 2, "k16v4", "k8v16"])
@pytest.mark.parametrize(("dim", "dtype"), [(128, BF16), (80, FP16), (256, BF16), (64, F32)])
def test_pages_are_packed_as_the_definition_packs_them(bits: int | str, dim: int, dtype: Any) -> None:
    check_pack(KVScheme.of(bits), dim, dtype, "cuda")


@pytest.mark.parametrize(("dim", "width", "norm", "dtype"), [(128, 128, True, BF16), (96, 48, False, FP16)])
def test_rotary_and_the_cache_write_equal_their_definition(dim: int, width: int, norm: bool, dtype: Any) -> None:
    check_rotary(dim, width, norm, dtype, "cuda", CLOSE[dtype])


@pytest.mark.parametrize("dtype", list(CLOSE), ids=str)
def test_norms_and_activations_equal_their_definitions(dtype: Any) -> None:
    from quantkit.runtime.kernels.triton.step import activated, add_norm

    residual, delta = noise(3, 4096).cuda(), noise(3, 4096, seed=1).to("cuda", dtype)
    after, weight = noise(4096, seed=2).cuda(), noise(4096, seed=3).cuda()
    copy = residual.clone()
    expected = decode_reference.add_norm(copy, delta, after, weight, 1e-5, dtype)
    torch.testing.assert_close(add_norm(residual, delta, after, weight, 1e-5, dtype), expected, **CLOSE[dtype])
    torch.testing.assert_close(residual, copy, rtol=1e-4, atol=1e-4)
    for act in ("silu", "gelu_tanh"):
        torch.testing.assert_close(
            activated(delta, delta.flip(0), act), decode_reference.activated(delta, delta.flip(0), act), **CLOSE[dtype]
        )


PROMPTS = [[5, 6, 7] * 4, [1] * 62, [9, 8]]
OPTIONS = [
    GenerationOptions(max_tokens=40),
    GenerationOptions(max_tokens=9, temperature=1.0, min_p=0.01),
    GenerationOptions(max_tokens=90, temperature=0.8, top_k=20, top_p=0.9, seed=3, repetition_penalty=1.3),
]


def answers(model: Any, options: list[GenerationOptions]) -> dict[int, Generation]:
    pieces = run(model, PROMPTS[: len(options)], options, end_tokens=(), context=model.context)
    return {piece.row: piece.done for piece in pieces if piece.done is not None}


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "gemma3_text"])
@pytest.mark.parametrize("kv_bits", [16, 8, "k4v2"])
def test_captured_steps_answer_as_the_cpu_does(kind: str, kv_bits: int | str) -> None:
    """float32, greedy and sampled with the same seeds, sequences that leave the batch."""
    sizes = {"head_dim": 16} if kind in ("qwen3", "gemma3_text") else {}
    cpu = packed(tiny(kind, kv_bits, **sizes), Scheme(4, 32, False))
    gpu = packed(tiny(kind, kv_bits, "cuda", graphs=True, **sizes), Scheme(4, 32, False))
    assert gpu.decoding == "graph"
    for options in (OPTIONS[:1], OPTIONS):
        expected = answers(cpu, options)
        for _ in range(2):
            assert {row: done.tokens for row, done in answers(gpu, options).items()} == {
                row: done.tokens for row, done in expected.items()
            }
    assert gpu.graph_decoder.broken == ""
    assert all(slot.graphs for slot in gpu.graph_decoder._slots.values())


def test_bf16_logits_stay_near_those_of_float32() -> None:
    ids = torch.randint(3, 90, (2, 150), generator=torch.Generator().manual_seed(1))
    expected = greedy_logits(packed(tiny("llama"), Scheme(4, 32, False)), ids, 100).log_softmax(-1)
    model = packed(tiny("llama", device="cuda", dtype=torch.bfloat16, graphs=True), Scheme(4, 32, False))
    assert model.fast_step is not None
    found = greedy_logits(model, ids.cuda(), 100).float().cpu().log_softmax(-1)
    assert float((expected.exp() * (expected - found)).sum(-1).max()) < 0.02


def test_w8a8_and_dense_linears_are_captured_too() -> None:
    for scheme in (Scheme(8, None, activations="int8"), None):
        models = [tiny("llama", device="cuda", graphs=graphs) for graphs in (False, True)]
        for model in models:
            if scheme is not None:
                requantize(model, scheme)
            fuse_linears(model.module, model.device)
        assert models[1].decoding == "graph"
        first, second = (answers(model, OPTIONS[:1])[0].tokens for model in models)
        assert first == second


@torch.inference_mode()
def test_a_step_waits_for_nothing() -> None:
    """Neither captured nor launched; and reading tokens late is no synchronisation of the device."""
    model = packed(tiny("llama", device="cuda", graphs=True), Scheme(4, 32, False))
    pieces = run(model, [PROMPTS[0]], [OPTIONS[2]], end_tokens=(), context=None)
    for _ in range(3):
        next(pieces)
    (slot,) = model.graph_decoder._slots.values()
    (mode,) = slot.graphs
    torch.cuda.set_sync_debug_mode("error")
    try:
        slot.run(mode)
        slot.replay(mode)
        for _ in range(20):
            next(pieces)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    pieces.close()


def test_without_graphs_and_without_a_short_step_the_tokens_are_the_same() -> None:
    expected = answers(tiny("llama", device="cuda"), OPTIONS[:1])[0].tokens
    model = tiny("llama", device="cuda", graphs=True)
    model._may_capture = False
    assert model.decoding == "lean"
    assert answers(model, OPTIONS[:1])[0].tokens == expected
    with pytest.warns(UserWarning, match="this gemma2 are not those of the common decoder family"):
        assert tiny("gemma2", device="cuda", graphs=True).decoding == "definition"


def test_what_cannot_be_captured_is_said_and_runs_launch_by_launch() -> None:
    model = tiny("llama", device="cuda", graphs=True)
    expected = answers(tiny("llama", device="cuda"), OPTIONS[:1])[0].tokens
    loop = model.graph_decoder
    head = loop.head
    loop.head = lambda hidden: head(hidden) * float(hidden.isfinite().any().cpu() | True)  # waits for the device
    with pytest.warns(UserWarning, match="cannot be captured"):
        assert answers(model, OPTIONS[:1])[0].tokens == expected
    assert model.decoding == "lean"


@pytest.mark.real
def test_two_hundred_captured_tokens_of_a_real_model_equal_those_of_the_cpu(smollm2: Path) -> None:
    texts = []
    for device in ("cpu", "cuda"):
        model = load(smollm2, device=device, dtype="float32")
        requantize(model, Scheme(4, 64, False))
        fuse_linears(model.module, model.device)
        texts.append(model.generate("The history of the river begins", max_tokens=200, ignore_eos=True).tokens)
    assert model.decoding == "graph"
    assert len(texts[0]) == 200
    assert texts[0] == texts[1]
