"""The compiled decode step equals transformers' definition, and is not taken where it would not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.core.kvscheme import KVPlan, KVScheme
from quantkit.errors import UnsupportedModel
from quantkit.runtime.decode import proof
from quantkit.runtime.decode.cpu_step import CpuStep, cpu_step, proved
from quantkit.runtime.decode.family import recognise
from quantkit.runtime.kernels.numba import threads
from quantkit.runtime.kv_cache.transformers_cache import transformers_cache
from quantkit.runtime.model import Model

CPU = torch.device("cpu")
FAMILY = ("llama", "qwen2", "qwen3", "mistral")
needs_numba = pytest.mark.skipif(not threads.available(), reason="numba is not installed (extra [cpu])")


def model_of(module: Any, config: dict[str, Any], fast_step: bool, **options: Any) -> Model:
    return Model(
        module, config, device=CPU, dtype=torch.float32, read_tokenizer=lambda: None, fast_step=fast_step, **options
    )


def decode(model: Model, ids: Tensor, prompt: int, counts: list[int] | None = None) -> Tensor:
    """Hidden states of the tokens after the prompt, one step each.

    counts: tokens of the prompt that each sequence has.
    """
    seam = transformers_cache(model.new_cache(8))
    with torch.inference_mode():
        model.step(ids[:, :prompt], seam, counts)
        return torch.cat([model.step(ids[:, i : i + 1], seam) for i in range(prompt, ids.shape[1])], dim=1)


def tokens(batch: int, count: int) -> Tensor:
    return torch.randint(0, 250, (batch, count), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("kind", FAMILY)
def test_the_family_is_found_by_structure(tiny: Any, kind: str) -> None:
    family = recognise(tiny.module(tiny.config(kind)))
    assert family is not None
    assert (len(family.blocks), family.heads, family.kv_heads, family.head_dim) == (3, 4, 2, 16)


@pytest.mark.parametrize("kind", ["opt", "cohere", "phi3"])
def test_other_structures_are_left_alone(tiny: Any, kind: str) -> None:
    assert recognise(tiny.module(tiny.config(kind))) is None


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@needs_numba
@pytest.mark.parametrize("threads", [1, 3, 5], indirect=True)
@pytest.mark.parametrize("kind", [*FAMILY, "gemma3_text"])
def test_a_compiled_step_equals_the_definition_over_pages_and_windows(tiny: Any, kind: str, threads: int) -> None:
    config = tiny.config(kind, **({"head_dim": 32} if kind == "gemma3_text" else {}))
    module = tiny.module(config)
    step = cpu_step(module, config, torch.float32, CPU)
    assert step is not None
    ids = tokens(2, 150)  # three pages, nearly twice the sliding window of mistral and gemma3
    for given in (None, [120, 111]):
        expected = decode(model_of(module, config, fast_step=False), ids, 120, given)
        model = model_of(module, config, fast_step=True)
        assert model.fast_step is not None
        torch.testing.assert_close(decode(model, ids, 120, given), expected, rtol=2e-4, atol=2e-5)


def agree(
    module: Any, config: dict[str, Any], scheme: KVScheme, ids: Tensor, prompt: int, counts: list[int] | None
) -> Model:
    """Every step is the compiled one, and gives what the definition gives."""
    plan = KVPlan(scheme)
    expected = decode(model_of(module, config, fast_step=False, kv_plan=plan), ids, prompt, counts)
    model = model_of(module, config, fast_step=True, kv_plan=plan)
    taken = []
    step = model.fast_step
    model.fast_step = lambda *given: taken.append(step(*given)) or taken[-1]
    torch.testing.assert_close(decode(model, ids, prompt, counts), expected, rtol=2e-4, atol=5e-5)
    assert len(taken) == ids.shape[1] - prompt
    assert all(hidden is not None for hidden in taken)
    return model


@needs_numba
@pytest.mark.parametrize("bits", [8, 4, 3, 2, "k4v2", "k2v8"])
def test_packed_pages_are_read_as_the_definition_reads_them(tiny: Any, bits: int | str) -> None:
    """From before a page is packed to after it; the second sequence is still among its first tokens."""
    config = tiny.config("llama")
    scheme = KVScheme.of(bits)
    agree(
        tiny.module(config), config, scheme, tokens(2, scheme.recent + 74), scheme.recent + 56, [scheme.recent + 56, 2]
    )


@needs_numba
@pytest.mark.parametrize("threads", [1, 3], indirect=True)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 1, 128), (5, 5, 48), (8, 1, 16)])
def test_packed_pages_of_any_shape_of_heads_in_many_chunks(
    tiny: Any, heads: int, kv_heads: int, dim: int, threads: int
) -> None:
    config = tiny.config(
        "llama", hidden_size=16 * heads, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=dim,
        max_position_embeddings=1024,
    )  # fmt: skip
    agree(tiny.module(config), config, KVScheme.of("k4v3"), tokens(2, 604), 600, [600, 300])


@needs_numba
@pytest.mark.parametrize("bits", [16, 4])
def test_a_window_over_packed_pages_forgets_as_the_definition_does(tiny: Any, bits: int) -> None:
    config = tiny.config("mistral", sliding_window=150)
    agree(tiny.module(config), config, KVScheme.of(bits), tokens(2, 230), 200, [200, 140])


@needs_numba
def test_first_tokens_stay_exact_however_short_the_prompt_was(tiny: Any) -> None:
    config = tiny.config("llama", num_hidden_layers=1)
    agree(tiny.module(config), config, KVScheme(2, 2, recent=1), tokens(1, 70), 1, None)


@needs_numba
def test_pages_that_the_step_does_not_read_are_left_to_the_definition(tiny: Any) -> None:
    config = tiny.config("llama")
    module = tiny.module(config)
    for scheme in (KVScheme(16, 4), KVScheme(4, 16), KVScheme(4, 4, group_size=4)):
        model = model_of(module, config, fast_step=True, kv_plan=KVPlan(scheme))
        cache = model.new_cache(8)
        with torch.inference_mode():
            model.step(tokens(1, 8), transformers_cache(cache))
            assert model.fast_step(tokens(1, 1), cache) is None
        assert not model.fast_step.reads([layer.spec for layer in cache.layers])
    model = model_of(module, config, fast_step=True, kv_plan=KVPlan(KVScheme.of(4)))
    assert model.fast_step.reads([layer.spec for layer in model.new_cache(8).layers])


@needs_numba
def test_what_the_step_does_not_take_runs_by_the_definition(tiny: Any) -> None:
    config = tiny.config("llama")
    module = tiny.module(config)
    step = cpu_step(module, config, torch.float32, CPU)
    assert step is not None
    model = model_of(module, config, fast_step=True)
    cache = model.new_cache(8)
    assert step(tokens(1, 1), cache) is None  # an empty cache
    with torch.inference_mode():
        model.step(tokens(2, 8), transformers_cache(cache))
    assert step(tokens(2, 2), cache) is None
    assert cpu_step(module, config, torch.bfloat16, CPU) is None


@needs_numba
def test_a_model_that_joins_the_same_parts_otherwise_is_found_out(tiny: Any) -> None:
    """granite holds llama's parts and multiplies what a block adds: only the twin tells."""
    config = tiny.config("granite", residual_multiplier=0.5)
    assert recognise(tiny.module(config)) is not None
    assert not proved(json.dumps(config, sort_keys=True))
    assert proved(json.dumps(tiny.config("llama"), sort_keys=True))


@needs_numba
def test_attention_scaled_by_position_is_found_out(tiny: Any) -> None:
    """ministral3 holds llama's parts and scales queries beyond its original context: only tokens out there tell."""
    rope = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 4096,
        "llama_4_scaling_beta": 0.5,
    }
    config = tiny.config("mistral", model_type="ministral3", rope_parameters=rope, max_position_embeddings=8192)
    assert recognise(tiny.module(config)) is not None
    assert not proved(json.dumps(config, sort_keys=True))


def test_a_block_with_a_tensor_of_its_own_is_not_taken(tiny: Any) -> None:
    module = tiny.module(tiny.config("llama"))
    module.base_model.layers[1].register_buffer("layer_scalar", torch.ones(1))
    assert recognise(module) is None


@needs_numba
def test_a_twin_that_gives_nan_proves_nothing(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuStep, "__call__", lambda self, ids, cache: torch.full((*ids.shape, 64), float("nan")))
    assert not proved(json.dumps(tiny.config("llama", rms_norm_eps=2e-6), sort_keys=True))


@needs_numba
def test_the_proof_multiplies_in_float32_whatever_the_program_allows(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TF32, or bf16 on a CPU, is some 1e-3 off: the proof would fail for a step that is right."""
    seen: list[str] = []

    def agree(*given: Any) -> bool:
        seen.append(torch.get_float32_matmul_precision())
        return True

    monkeypatch.setattr(proof, "_agree", agree)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert proved(json.dumps(tiny.config("llama", rms_norm_eps=4e-6), sort_keys=True))
        assert seen == ["highest"] * 2
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_config_without_a_twin_decodes_by_the_definition(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(config: Any) -> Any:
        raise UnsupportedModel("no twin of this")

    monkeypatch.setattr("quantkit.model.twin.small_twin", fail)
    with pytest.warns(UserWarning, match="no twin of this"):
        assert not proved(json.dumps(tiny.config("llama", rms_norm_eps=3e-6), sort_keys=True))
