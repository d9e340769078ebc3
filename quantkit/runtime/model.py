"""Model: a model ready to run. Logits, hidden states, text."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from quantkit.core.kvscheme import PAGE_TOKENS, KVPlan, cache_words
from quantkit.errors import QuantkitWarning, RequestError
from quantkit.runtime.attention import cached_heads, layer_specs, transformers_cache
from quantkit.runtime.cache import KVCache
from quantkit.runtime.embedding import QuantEmbedding
from quantkit.runtime.engine import Generation, Piece, run
from quantkit.runtime.kernels.cpu_packed import HalfWeight
from quantkit.runtime.linear import QuantLinear
from quantkit.runtime.sampling import GenerationOptions

Messages = Sequence[Mapping[str, str]]


class Model:
    """What ``quantkit.load`` returns.

    config: the content of config.json. module: the transformers model with packed linears. tokenizer: read on first use.
    kv_plan: how the cache is kept. dtype, device: of activations. lean: whether decoding may leave the transformers
    definition for a short step that was proved equal. graphs: whether that step is captured on a GPU, and runs ahead of the host.
    """

    def __init__(
        self,
        module: Any,
        config: dict[str, Any],
        *,
        device: torch.device,
        dtype: torch.dtype,
        read_tokenizer: Callable[[], Any],
        end_tokens: Sequence[int] = (),
        kv_plan: KVPlan | None = None,
        lean: bool = True,
        graphs: bool = True,
    ) -> None:
        self.module, self.config = module, config
        self.device, self.dtype = device, dtype
        self.kv_plan = kv_plan or KVPlan()
        self.end_tokens = tuple(end_tokens)
        self._read_tokenizer = read_tokenizer
        self._specs = layer_specs(module, self.kv_plan, dtype, device)
        self._head = head_only(module)
        self._may_be_lean, self._may_capture = lean, graphs

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer stored with the model."""
        return self._read_tokenizer()

    @cached_property
    def lean(self) -> Any:
        """The short decode step (``lean.py`` on a CPU, ``lean_gpu.py`` on a GPU), or None: found and proved at the first step that may
        take it. Warns, in words, where a GPU has to do without."""
        from quantkit.runtime.lean import lean_step

        if not self._may_be_lean or self.device.type != "cuda":
            return lean_step(self.module, self.config, self.dtype, self.device) if self._may_be_lean else None
        from quantkit.runtime.lean_gpu import gpu_step, unread

        step, reason = gpu_step(self.module, self.config, self.dtype, self.device)
        if step is not None:
            reason = next(filter(None, (unread(spec, self.dtype, step.heads) for spec in self._specs)), "")
        if reason:
            warnings.warn(
                f"decoding on the GPU runs the transformers definition, launch by launch, without a CUDA graph: {reason}.",
                QuantkitWarning,
                stacklevel=2,
            )
        return step

    @cached_property
    def loop(self) -> Any:
        """Captured decode steps that run ahead of the host (``ahead.py``), or None: for a GPU and a model with a short step."""
        if self.device.type != "cuda" or not self._may_capture or self.lean is None:
            return None
        return self.ahead(self.lean, capture=True)

    def ahead(self, step: Any, *, capture: bool) -> Any:
        """An ``ahead.Loop`` of a ``GpuStep``; without ``capture`` it launches kernel by kernel (Triton's interpreter)."""
        from quantkit.runtime.ahead import Loop

        return Loop(step, self.head, self._specs, self.vocabulary, capture=capture)

    @property
    def decoding(self) -> str:
        """How a token is made: "graph" (captured steps), "lean" (the short step, launched), "definition" (transformers)."""
        if self.lean is None or not self.lean.reads(self._specs):
            return "definition"
        return "graph" if self.loop is not None and not self.loop.broken else "lean"

    @property
    def vocabulary(self) -> int:
        """Entries of a row of logits."""
        head = self.module.get_output_embeddings()
        return int(head.out_features)

    @property
    def kv_bits(self) -> int | str:
        """Bits of the KV cache as ``--kv-bits`` takes them (8, "k4v2"); 16 stands for the run-time dtype."""
        return self.kv_plan.label

    @property
    def kv_stored_bits(self) -> float:
        """Bits that a cached number takes once it is packed, scales included; those of the run-time dtype where nothing is quantized."""
        heads, dim = self._cached_shape()
        token = sum(spec.scheme.bytes_per_token(heads, dim, self.dtype) for spec in self._specs)
        return 8 * token / (2 * heads * dim * len(self._specs))

    @property
    def kv_words(self) -> str:
        """How the cache is kept, in words: bits, scales, and bits per number with them."""
        return cache_words(self.kv_bits, self.kv_plan.kind, self.kv_stored_bits)

    @property
    def context(self) -> int | None:
        """Tokens the model can attend to, prompt and answer together; None if its config names no limit."""
        limit = getattr(self.module.config, "max_position_embeddings", None)
        return None if limit is None else int(limit)

    def new_cache(self, capacity: int = 0) -> KVCache:
        """An empty cache; ``capacity``: tokens per sequence to reserve pages for."""
        return KVCache(self._specs, capacity)

    def step(self, ids: Tensor, cache: Any, counts: Sequence[int] | None = None) -> Tensor:
        """Run tokens over a cache (``transformers_cache``), appending to it.

        ids: int64 ``[batch, tokens]``. counts: how many of them, the last ones, each sequence has (the others are padding); None: all.
        Returns the final hidden states ``[batch, tokens, hidden]``, after the last norm.
        """
        paged, tokens = cache.paged, ids.shape[1]
        if tokens == 1 and paged.length and counts is None and self.lean is not None:
            quick: Tensor | None = self.lean(ids, paged)
            if quick is not None:
                return quick
        lengths = torch.tensor(paged.expect(counts or [tokens] * len(ids), tokens), device=ids.device)[:, None]
        for layer in cache.layers:
            layer.expect(tokens)
        longest = int(lengths.max())
        position = (lengths - tokens + torch.arange(tokens, device=ids.device)).clamp(min=0)
        mask = None
        if int(lengths.min()) < longest:
            mask = (torch.arange(longest, device=ids.device) >= longest - lengths).long()
        output = self.module.base_model(
            input_ids=ids, attention_mask=mask, position_ids=position, past_key_values=cache, use_cache=True
        )
        hidden: Tensor = output.last_hidden_state
        return hidden

    @torch.inference_mode()
    def hidden(self, input_ids: Tensor) -> Tensor:
        """Final hidden states ``[batch, tokens, hidden]``, after the last norm, of int64 ids ``[batch, tokens]``.

        With a quantized cache the tokens are fed in chunks of 64, so that attention really reads what the pages hold.
        Raises RequestError beyond the context.
        """
        ids = input_ids.to(self.device)
        if self.context is not None and ids.shape[1] > self.context:
            raise RequestError(
                f"{ids.shape[1]} tokens are more than the model's context of {self.context}. Use shorter windows."
            )
        if not self.kv_plan.quantized:
            hidden: Tensor = self.module.base_model(input_ids=ids, use_cache=False).last_hidden_state
            return hidden
        seam = transformers_cache(self.new_cache(ids.shape[1]))
        return torch.cat([self.step(chunk, seam) for chunk in ids.split(PAGE_TOKENS, dim=1)], dim=1)

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        """Logits ``[batch, tokens, vocab]`` of hidden states, with the model's own scaling and soft cap."""
        logits: Tensor = self._head(inputs_embeds=hidden, use_cache=False).logits
        return logits

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Logits ``[batch, tokens, vocab]`` of int64 ids ``[batch, tokens]``."""
        return self.head(self.hidden(input_ids))

    def generate(
        self,
        prompt: str | Sequence[str] | Messages | Sequence[Messages],
        options: GenerationOptions | Sequence[GenerationOptions] | None = None,
        **overrides: Any,
    ) -> Any:
        """Continue a prompt, or a batch of them.

        prompt: text, or chat messages (``[{"role": "user", "content": "..."}]``), or a list of either. options: one for all,
        or one per prompt; or its fields as keywords: ``generate("Once", max_tokens=32)``. Returns a ``Generation``, or a
        list of them for a list of prompts. Raises RequestError for a bad option or a prompt beyond the context.
        """
        prompts, single = as_batch(prompt)
        done: dict[int, Generation] = {}
        for piece in self._run(prompts, options, overrides):
            if piece.done is not None:
                done[piece.row] = piece.done
        return done[0] if single else [done[row] for row in range(len(prompts))]

    def stream(
        self, prompt: str | Messages, options: GenerationOptions | None = None, **overrides: Any
    ) -> Generator[str, None, Generation | None]:
        """Continue one prompt; yields text as soon as it is certain. The generator's return value is the ``Generation``."""
        prompts, single = as_batch(prompt)
        if not single:
            raise RequestError("stream takes one prompt; use generate for a list.")
        for piece in self._run(prompts, options, overrides):
            if piece.text:
                yield piece.text
            if piece.done is not None:
                return piece.done
        return None

    def memory(self) -> dict[str, int]:
        """Bytes: ``quantized`` (packed weights with their scales), ``dense`` (all else), ``kv_per_token`` (in packed pages, all layers)."""
        weights = {m.packed for m in self.module.modules() if isinstance(m, (QuantLinear, QuantEmbedding))}
        packed = sum(weight.nbytes() for weight in weights if not isinstance(weight, HalfWeight))  # a tied matrix once
        tensors = {t.data_ptr(): t.nbytes for t in [*self.module.parameters(), *self.module.buffers()]}
        heads, dim = self._cached_shape()
        token = sum(spec.scheme.bytes_per_token(heads, dim, self.dtype) for spec in self._specs)
        return {"quantized": packed, "dense": sum(tensors.values()) - packed, "kv_per_token": round(token)}

    def _cached_shape(self) -> tuple[int, int]:
        """Heads of keys and values, and channels of each."""
        config = self.module.config
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cached_heads(config), int(dim)

    def layouts(self) -> dict[str, int]:
        """Layers by the layout of their packed weight: ``{"int4": 210}``."""
        found = [m.packed.layout for m in self.module.modules() if isinstance(m, (QuantLinear, QuantEmbedding))]
        return {name: found.count(name) for name in dict.fromkeys(found)}

    def __repr__(self) -> str:
        dtype, layouts = str(self.dtype).removeprefix("torch."), self.layouts()
        held = ", ".join(f"{count} x {name}" for name, count in layouts.items()) or "no packed weights"
        return f"Model({self.config.get('model_type')}, {self.device}, {dtype}, {held}, KV cache {self.kv_words})"

    def windows(self) -> list[int | None]:
        """Sliding window of each layer in tokens, None for full attention."""
        return [spec.window for spec in self._specs]

    def _run(
        self,
        prompts: Sequence[str | Messages],
        options: GenerationOptions | Sequence[GenerationOptions] | None,
        overrides: dict[str, Any],
    ) -> Iterator[Piece]:
        if options is not None and overrides:
            raise RequestError("give either options or keywords, not both.")
        if not prompts:
            raise RequestError("no prompt was given.")
        try:
            one = GenerationOptions(**overrides) if options is None else options
        except TypeError as error:
            raise RequestError(f"unknown generation option: {error}") from None
        each = [one] * len(prompts) if isinstance(one, GenerationOptions) else list(one)
        if len(each) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts but {len(each)} options; give one for all, or one each.")
        _ = self.lean, self.loop  # proved before any clock runs
        ids = [self.encode(text, chat=o.chat) for text, o in zip(prompts, each, strict=True)]
        return run(self, ids, each, end_tokens=self.end_tokens, context=self.context)

    def encode(self, prompt: str | Messages, *, chat: bool = False) -> list[int]:
        """Token ids of a prompt. Messages, and text with ``chat``, go through the chat template.

        Raises RequestError if the model has no chat template.
        """
        if isinstance(prompt, str) and not chat:
            return self._checked(self.tokenizer(prompt)["input_ids"])
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
        if not getattr(self.tokenizer, "chat_template", None):
            raise RequestError(
                "this model has no chat template: it is no chat model. Give the prompt as plain text, without --chat."
            )
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self._checked(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _checked(self, ids: Sequence[int]) -> list[int]:
        from quantkit.checkpoint.tokenizer import check_vocabulary

        check_vocabulary(ids, self.config, "prompt")
        return list(ids)


def as_batch(prompt: Any) -> tuple[list[Any], bool]:
    """Prompts as a list, and whether a single one was given."""
    if isinstance(prompt, str):
        return [prompt], True
    items = list(prompt)
    if items and all(isinstance(item, Mapping) for item in items):
        return [items], True
    return items, False


class _Given:
    """Stands where the base model is, and returns the hidden states that it is given."""

    def __getattr__(self, name: str) -> Any:
        return self  # OPT's head calls model.decoder

    def __call__(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import MoeModelOutputWithPast

        return MoeModelOutputWithPast(last_hidden_state=inputs_embeds)  # has the fields of every other output


def head_only(module: Any) -> Any:
    """The model without its body: maps ``inputs_embeds`` (final hidden states) to logits by the architecture's own code.

    So every scaling and soft cap (gemma, cohere, granite) is right without a list of them. Shares all weights.
    """
    alone = copy.copy(module)
    alone.__dict__["_modules"] = {**module._modules, module.base_model_prefix: _Given()}
    return alone
