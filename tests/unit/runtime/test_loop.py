"""Generation: batches equal single prompts, stopping, limits, timings; over every kind of attention."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quantkit.core.kvscheme import KVScheme, LayerScales
from quantkit.errors import QuantkitWarning, RequestError, UnsupportedModel
from quantkit.runtime.generate.prefill import PREFILL_TOKENS, pad_left, prefill, shared_tokens
from quantkit.runtime.generate.sampling import GenerationOptions
from quantkit.runtime.kernels.decode_reference import Heads
from quantkit.runtime.kv_cache.layer_kinds import layer_kinds
from quantkit.runtime.kv_cache.paged_layer import PagedLayer, layer_spec
from quantkit.runtime.kv_cache.transformers_cache import attention_modules, transformers_cache
from quantkit.runtime.model import Model

VOCAB = 288
KINDS = ["llama", "qwen2", "qwen3", "mistral", "gemma3_text", "phi3", "opt", "cohere", "granite"]
PROMPTS = ["Hello", "This is a much longer prompt, " * 4, "x"]
Make = Callable[..., Model]


@pytest.fixture(scope="module")
def make(tokenizer: Any, tiny: Any) -> Make:
    def build(kind: str, bits: int | str = 16, **changes: Any) -> Model:
        config = tiny.config(kind, **changes)
        module = tiny.module(config)
        return Model(
            module,
            config,
            device=torch.device("cpu"),
            dtype=torch.float32,
            read_tokenizer=lambda: tokenizer,
            end_tokens=(257,),
            kv_plan=tiny.kv_plan(bits),
        )

    return build


def random_ids(tokens: int, batch: int = 2) -> torch.Tensor:
    return torch.randint(0, VOCAB, (batch, tokens), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_the_models_own_with_and_without_the_cache(make: Make, kind: str) -> None:
    model, ids = make(kind), random_ids(230)
    with torch.inference_mode():
        expected = model.module(input_ids=ids).logits
    assert torch.equal(model(ids), expected)  # soft caps and logit scales included
    seam = transformers_cache(model.new_cache())
    with torch.inference_mode():
        pieces = [model.step(chunk, seam) for chunk in ids.split([100, 1, 1, 63, 65], dim=1)]
    torch.testing.assert_close(model.head(torch.cat(pieces, 1)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [16, 4])
def test_a_batch_of_ragged_prompts_equals_each_alone(make: Make, kind: str, bits: int) -> None:
    model = make(kind, bits)
    options = GenerationOptions(max_tokens=30, ignore_eos=True, temperature=0.7, repetition_penalty=1.1, seed=5)
    together = model.generate(PROMPTS, options)
    for prompt, answer in zip(PROMPTS, together, strict=True):
        alone = model.generate(prompt, options)
        assert alone.tokens == answer.tokens
        assert alone.text == answer.text
        assert alone.prompt_tokens == len(prompt)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "mistral"])
def test_greedy_text_is_that_of_transformers(make: Make, kind: str) -> None:
    model = make(kind)
    ids = torch.tensor([model.encode(PROMPTS[1])])
    expected = model.module.generate(ids, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
    answer = model.generate(PROMPTS[1], max_tokens=40, ignore_eos=True)
    assert answer.tokens == expected[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize(("bits", "limit"), [(8, 1e-4), (4, 0.02), ("k4v2", 0.2)])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen2", "opt"])
def test_a_quantized_cache_changes_logits_a_little_from_where_pages_are_packed(
    make: Make, kind: str, bits: int | str, limit: float
) -> None:
    plain, model, ids = make(kind), make(kind, bits), random_ids(200)
    expected, found = plain(ids).log_softmax(-1), model(ids).log_softmax(-1)
    divergence = (expected.exp() * (expected - found)).sum(-1)
    assert 0 < float(divergence[:, 128:].mean()) < limit
    assert float(divergence[:, :128].abs().max()) < 1e-5  # the newest tokens are exact


def test_attention_reads_what_the_pages_hold(make: Make) -> None:
    model, ids = make("llama", 4), random_ids(140)
    caches = [model.new_cache() for _ in range(2)]
    with torch.inference_mode():
        for cache in caches:
            model.step(ids[:, :139], transformers_cache(cache))
        packed = caches[1].layers[0].packed
        assert packed is not None
        packed.fields["keys"] ^= 0x80  # a bit of every second channel
        good, poisoned = (model.step(ids[:, 139:], transformers_cache(cache)) for cache in caches)
    assert float((good - poisoned).norm() / good.norm()) > 1e-3


def test_chunks_do_not_change_what_a_quantized_cache_holds(make: Make) -> None:
    model, ids = make("llama", 4), random_ids(150)
    caches = []
    for sizes in ([150], [64, 64, 22], [1] * 150):
        cache = model.new_cache()
        with torch.inference_mode():
            hidden = torch.cat([model.step(c, transformers_cache(cache)) for c in ids.split(sizes, dim=1)], 1)
        caches.append((cache.layers[0].read()[0], hidden))
    for keys, _ in caches[1:]:  # products of other shapes round otherwise, which may turn a code here and there
        assert float(((keys - caches[0][0]).abs() > 1e-4).double().mean()) < 1e-3


def test_stop_strings_tokens_and_end_tokens_end_an_answer(make: Make) -> None:
    model = make("llama")
    free = model.generate("Hello", max_tokens=40, temperature=1.0, seed=3, ignore_eos=True)
    assert free.finish_reason == "length"
    assert len(free.tokens) == 40
    cut = free.text[5:8]
    stopped = model.generate("Hello", max_tokens=40, temperature=1.0, seed=3, ignore_eos=True, stop=(cut,))
    assert stopped.finish_reason == "stop"
    assert stopped.text == free.text[: free.text.index(cut)]
    token = free.tokens[7]
    by_token = model.generate("Hello", max_tokens=40, temperature=1.0, seed=3, ignore_eos=True, stop_tokens=(token,))
    assert by_token.tokens == free.tokens[: free.tokens.index(token)]
    model.end_tokens = (9999, token)
    assert model.generate("Hello", max_tokens=40, temperature=1.0, seed=3).tokens == by_token.tokens


def test_a_sequence_that_ends_early_leaves_the_others_unchanged(make: Make) -> None:
    model = make("gemma3_text")
    options = [GenerationOptions(max_tokens=n, ignore_eos=True) for n in (3, 40, 11)]
    together = model.generate(PROMPTS, options)
    assert [len(answer.tokens) for answer in together] == [3, 40, 11]
    assert together[1].tokens == model.generate(PROMPTS[1], options[1]).tokens


def test_pieces_join_to_the_text_and_the_result_comes_with_them(make: Make) -> None:
    model = make("llama")
    pieces = []
    stream = model.stream("Hello", max_tokens=20, temperature=1.0, ignore_eos=True)
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as end:
            answer = end.value
            break
        assert not torch.is_inference_mode_enabled()  # the mode must not leak to the caller between pieces
    assert (
        "".join(pieces) == answer.text == model.generate("Hello", max_tokens=20, temperature=1.0, ignore_eos=True).text
    )


def test_times_and_bytes_come_with_the_answer(make: Make) -> None:
    model = make("llama", 8)
    started = time.perf_counter()
    answer = model.generate("Hello", max_tokens=12, ignore_eos=True)
    took = time.perf_counter() - started
    assert 0 < answer.time_to_first_token < answer.time_to_first_token + sum(answer.inter_token_latencies) <= took
    assert len(answer.inter_token_latencies) == 11
    assert answer.tokens_per_second == pytest.approx(11 / sum(answer.inter_token_latencies))
    assert answer.kv_cache_bytes == 3 * model.kv_plan.scheme.cache_bytes(16, 2, 16, torch.float32)
    assert model.memory()["kv_per_token"] == 3 * 2 * (2 * 16 + 16 * 4 // 64 + 4)
    assert model.generate("Hello", max_tokens=1, ignore_eos=True).tokens_per_second == 0


def test_what_does_not_fit_the_context_is_refused_with_the_room_left(make: Make) -> None:
    model = make("llama")
    assert model.generate("a" * 250, max_tokens=6, ignore_eos=True).finish_reason == "length"
    with pytest.raises(RequestError, match="--max-tokens 6 or less"):
        model.generate("a" * 250, max_tokens=7)
    with pytest.raises(RequestError, match="Shorten the prompt"):
        model.generate(["a", "a" * 256], max_tokens=1)
    with pytest.raises(RequestError, match="257 tokens"):
        model(random_ids(257))
    with pytest.raises(RequestError, match="empty"):
        model.generate("")


@pytest.mark.parametrize("wrong", [-1, 10**6])
def test_ids_that_are_no_tokens_are_refused(make: Make, wrong: int) -> None:
    ids = random_ids(5)
    ids[0, 2] = wrong
    with pytest.raises(RequestError, match=rf"input_ids run from .*{wrong}"):
        make("llama")(ids)


def test_requests_that_contradict_themselves_are_refused(make: Make) -> None:
    model = make("llama")
    with pytest.raises(RequestError, match="either options or keywords"):
        model.generate("a", GenerationOptions(), max_tokens=3)
    with pytest.raises(RequestError, match="bogus"):
        model.generate("a", bogus=3)
    with pytest.raises(RequestError, match="2 prompts but 1"):
        model.generate(["a", "b"], [GenerationOptions()])
    with pytest.raises(RequestError, match="no prompt"):
        model.generate([])
    with pytest.raises(RequestError, match="one prompt"):
        next(model.stream(["a", "b"]))  # type: ignore[arg-type]


def test_messages_go_through_the_chat_template(make: Make) -> None:
    model = make("llama")
    with pytest.raises(RequestError, match="no chat template"):
        model.generate("Hi", chat=True)
    try:
        model.tokenizer.chat_template = (
            "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
            "{% if add_generation_prompt %}[a]{% endif %}"
        )
        expected = model.encode("[user]Hi[a]")
        assert model.encode("Hi", chat=True) == expected
        messages = [{"role": "user", "content": "Hi"}]
        assert model.encode(messages) == expected
        one = model.generate(messages, max_tokens=3)
        assert model.generate([messages, messages], max_tokens=3)[1].tokens == one.tokens
    finally:
        model.tokenizer.chat_template = None


def test_a_long_prompt_is_read_in_pieces(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("gemma3_text")
    whole = model.generate(["a" * 170, "bc" * 40], max_tokens=10, ignore_eos=True)
    monkeypatch.setattr("quantkit.runtime.generate.prefill.PREFILL_TOKENS", 48)
    pieces = model.generate(["a" * 170, "bc" * 40], max_tokens=10, ignore_eos=True)
    assert [a.tokens for a in pieces] == [a.tokens for a in whole]


def test_how_a_token_is_made_is_told_by_what_the_short_step_reads(make: Make) -> None:
    for bits, read in ((16, True), (4, False)):
        model = make("llama", bits)
        model.__dict__["fast_step"] = SimpleNamespace(reads=lambda specs: all(one.packing is None for one in specs))
        assert model.decoding == ("lean" if read else "definition")


def test_a_cache_that_keeps_a_gpu_from_its_short_step_is_told(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    step = SimpleNamespace(heads=Heads(4, 2, 16, 1.0))
    monkeypatch.setattr("quantkit.runtime.decode.gpu_step.gpu_step", lambda *given: (step, ""))
    model = make("llama", 4)
    model.device = torch.device("cuda")
    assert model.fast_step is step
    model = make("llama", 4)
    model.device, scheme = torch.device("cuda"), KVScheme.of("fp8")
    scales = LayerScales(*[torch.ones(2, 16), torch.zeros(2, 16)] * 2)
    model._specs = [layer_spec(scheme, scales, torch.float32, torch.device("cpu"), None)]
    with pytest.warns(QuantkitWarning, match="runs the transformers definition.*fp8 scales"):
        assert model.fast_step is step


def test_equal_prompts_need_no_padding() -> None:
    ids, counts = pad_left([[1, 2], [3, 4]], torch.device("cpu"))
    assert ids.tolist() == [[1, 2], [3, 4]]
    assert counts is None
    ids, counts = pad_left([[1, 2], [3]], torch.device("cpu"))
    assert ids.tolist() == [[1, 2], [0, 3]]
    assert counts == [2, 1]


@pytest.mark.parametrize(
    ("kind", "bits"), [("llama", 16), ("gemma3_text", 16), ("opt", 16), ("llama", 4), ("gemma3_text", 2)]
)
def test_what_prompts_begin_with_is_read_once_and_shared(make: Make, kind: str, bits: int) -> None:
    model, seen = make(kind, bits, max_position_embeddings=1024), []
    step = model.step
    model.step = lambda ids, *rest: seen.append(ids.shape) or step(ids, *rest)
    beginning = "In the beginning there was a cache. " * 16
    prompts = [beginning + tail for tail in ("And?", "It held many pages of tokens.", "x")]
    together = model.generate(prompts, max_tokens=5, ignore_eos=True)
    assert seen[:3] == [(1, 512), (1, 64), (3, 29)] if bits == 16 else [(1, 512), (3, 93), (3, 1)]
    for prompt, answer in zip(prompts, together, strict=True):
        assert answer.tokens == model.generate(prompt, max_tokens=5, ignore_eos=True).tokens


@torch.inference_mode()
@pytest.mark.parametrize("bits", [16, 4])
def test_the_memory_of_a_prompt_is_that_of_its_cache(make: Make, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What reading took goes again: only one page a sequence stays.

    Gone are what a piece of 512 tokens needed on its way, in each layer before the next, and the pages of a shared
    beginning.
    """
    model, sizes, append = make("llama", bits, max_position_embeddings=1024), [], PagedLayer.append

    def watched(layer: PagedLayer, *given: Any) -> None:
        sizes.append(sum(one.pool().pages for one in caches[-1].layers if one.exact is not None))
        append(layer, *given)

    caches, new_cache = [], model.new_cache
    monkeypatch.setattr(model, "new_cache", lambda tokens: caches.append(new_cache(tokens)) or caches[-1])
    monkeypatch.setattr(PagedLayer, "append", watched)
    cache, _ = prefill(model, [[*range(3, 250)] * 3 + [tail] for tail in (7, 8)], 743)
    # a piece takes 8 pages of each layer; before a layer takes them, the others have given theirs back
    assert bits == 16 or max(sizes) <= 3 * 2 * 3
    for layer in cache.layers:
        held = [page for row in layer.sequences for page in row.exact_pages]
        assert layer.pool().in_use() == len(set(held))
        assert layer.pool().pages <= len(set(held)) + 2 * len(layer.sequences)
    cache.select([0])
    assert all(one.pool().in_use() == len(one.sequences[0].exact_pages) for one in cache.layers)


@pytest.mark.parametrize("bits", [16, 2])
def test_long_prompts_of_a_ragged_batch_answer_as_they_would_alone(make: Make, bits: int) -> None:
    model = make("llama", bits, max_position_embeddings=1024)
    prompts = ["ab" * 300, "Once upon a time. " * 12, "x" * (PREFILL_TOKENS + 1)]
    together = model.generate(prompts, max_tokens=5, ignore_eos=True)
    for prompt, answer in zip(prompts, together, strict=True):
        assert answer.tokens == model.generate(prompt, max_tokens=5, ignore_eos=True).tokens


def test_prompts_share_whole_pages_and_keep_a_token_each() -> None:
    same = list(range(200))
    assert shared_tokens([same, [*same, 1]], 64) == 192
    assert shared_tokens([same, [*same, 1]], 128) == 128
    assert shared_tokens([same[:128], same], 64) == 64  # the last token of the first prompt is still to be read
    assert shared_tokens([same], 64) == shared_tokens([same, same[1:]], 64) == 0


def test_attention_modules_and_windows_are_found(make: Make) -> None:
    model = make("gemma3_text")
    assert attention_modules(model.module) == {i: f"model.layers.{i}.self_attn" for i in range(3)}
    assert [(kind.attention, kind.window) for kind in layer_kinds(model.module) or ()] == [
        (True, 80),
        (True, None),
        (True, 80),
    ]
    model.module.config.layer_types[1] = "linear_attention"
    assert [kind.attention for kind in layer_kinds(model.module) or ()] == [True, False, True]
    assert sorted(attention_modules(model.module)) == [0, 2]
    model.module.config.layer_types[1] = "of_another_kind"
    assert layer_kinds(model.module) is None
    with pytest.raises(UnsupportedModel, match="0 of its layers keep keys and values"):
        attention_modules(model.module)
