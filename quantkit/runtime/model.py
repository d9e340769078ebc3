"""Model: a model ready to run. Logits, hidden states, text."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.core.interrupt import interruptible
from quantkit.core.kvscheme import KVPlan, cache_words
from quantkit.errors import QuantkitWarning, RequestError, UnsupportedModel
from quantkit.model.attention_shape import cached_kv_heads, head_dim
from quantkit.model.language import output_embeddings, text_config, trunk
from quantkit.runtime.decode.definition import definition_step
from quantkit.runtime.decode.states import Stepping, stepping
from quantkit.runtime.generate.loop import Generation, Piece, run
from quantkit.runtime.generate.prefill import Beside, read_through_pages
from quantkit.runtime.generate.prompts import Messages, as_batch, check_ids, checked
from quantkit.runtime.generate.sampling import GenerationOptions
from quantkit.runtime.images.step import step_after_images, step_with_images
from quantkit.runtime.kernels.cpu_layouts import HalfWeight
from quantkit.runtime.kernels.numba import threads
from quantkit.runtime.kv_cache.cache import KVCache
from quantkit.runtime.kv_cache.layer_kinds import layer_kinds
from quantkit.runtime.kv_cache.recompute import TokenCache
from quantkit.runtime.kv_cache.transformers_cache import layer_specs
from quantkit.runtime.layers.embedding import QuantEmbedding
from quantkit.runtime.layers.head import head_bits, head_only
from quantkit.runtime.layers.linear import QuantLinear
from quantkit.runtime.requests import Images, encoded, requests


class Model:
    """A model ready to run: what ``quantkit.load`` returns.

    module: the transformers model with packed linears.
    config: the content of config.json.
    path: of its folder or file.
    tokenizer: read on first use.
    kv_plan: how the cache is kept.
    dtype: of activations.
    device: of activations.
    fast_step: whether decoding may leave the transformers definition for a short step that was proved equal.
    graphs: whether that step is captured on a GPU, and runs ahead of the host.
    """

    def __init__(
        self,
        module: Any,
        config: dict[str, Any],
        *,
        device: torch.device,
        dtype: torch.dtype,
        read_tokenizer: Callable[[], Any],
        read_processor: Callable[[Any], Any] | None = None,
        path: Path = Path("model"),
        end_tokens: Sequence[int] = (),
        kv_plan: KVPlan | None = None,
        fast_step: bool = True,
        graphs: bool = True,
    ) -> None:
        self.module, self.config = module, config
        self.device, self.dtype = device, dtype
        self.kv_plan = kv_plan or KVPlan()
        self.end_tokens = tuple(end_tokens)
        self._read_tokenizer, self._read_processor, self.path = read_tokenizer, read_processor, path
        self._kinds = layer_kinds(module)
        self._specs = layer_specs(module, self.kv_plan, dtype, device)
        self._head = head_only(module)
        self._may_be_fast, self._may_capture = fast_step, graphs

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer stored with the model."""
        return self._read_tokenizer()

    @cached_property
    def processor(self) -> Any:
        """The processor stored with a model that reads images. Raises UnsupportedModel for another."""
        if self._read_processor is None:
            raise UnsupportedModel(f"{self.path}: was loaded without its processor, which reads images.")
        return self._read_processor(self.tokenizer)

    @cached_property
    def fast_step(self) -> Any:
        """The short decode step (``decode/cpu_step.py`` or ``gpu_step.py``), or None where there is none.

        It is built and proved at the first step that may use it. Warns, with the reason, where a GPU has none.
        """
        from quantkit.runtime.decode.cpu_step import cpu_step

        if not self._may_be_fast or self.device.type != "cuda":
            return cpu_step(self.module, self.config, self.dtype, self.device) if self._may_be_fast else None
        from quantkit.runtime.decode.gpu_step import gpu_step, why_unreadable

        step, reason = gpu_step(self.module, self.config, self.dtype, self.device)
        if step is not None:
            reason = next(filter(None, (why_unreadable(spec, self.dtype, step.heads) for spec in self._specs)), "")
        if reason:
            warnings.warn(
                "decoding on the GPU runs the transformers definition, launch by launch, without a CUDA graph:"
                f" {reason}.",
                QuantkitWarning,
                stacklevel=2,
            )
        return step

    @cached_property
    def graph_decoder(self) -> Any:
        """Captured decode steps that run ahead of the host (``generate/cuda_graphs.py``), or None.

        For a GPU and a model with a short step.
        """
        if self.device.type != "cuda" or not self._may_capture or self.fast_step is None:
            return None
        return self.new_graph_decoder(self.fast_step, capture=True)

    def new_graph_decoder(self, step: Any, *, capture: bool) -> Any:
        """Make a ``GraphDecoder`` of a ``GpuStep``.

        step: the step.
        capture: without it kernels are launched one by one (Triton's interpreter).
        """
        from quantkit.runtime.generate.cuda_graphs import GraphDecoder

        return GraphDecoder(step, self.head, self._specs, self.vocabulary, capture=capture)

    @property
    def invariant_step(self) -> int:
        """How many sequences a decode step takes without one changing a bit of another's numbers.

        The compiled step of a CPU takes several; it is not proved of any other step.
        """
        from quantkit.runtime.decode.cpu_step import CpuStep

        step = self.fast_step
        return step.invariant_batch if isinstance(step, CpuStep) and step.reads(self._specs) else 1

    @property
    def invariant_head(self) -> int:
        """How many rows of ``head`` are computed together without one changing a bit of another.

        Only a compiled kernel takes several; if logits are capped afterwards, torch's tanh differs at the ends of
        vectors.
        """
        head = output_embeddings(self.module)
        capped = getattr(text_config(self.module), "final_logit_softcapping", None) is not None
        return 1 if capped or not isinstance(head, QuantLinear) else head.invariant_tokens()

    @property
    def decoding(self) -> str:
        """How a token is decoded, as reports name it.

        "graph" (captured steps), "lean" (the short step, launched) or "definition" (transformers).
        """
        if self.fast_step is None or not self.fast_step.reads(self._specs):
            return "definition"
        return "graph" if self.graph_decoder is not None and not self.graph_decoder.broken else "lean"

    @property
    def head_bits(self) -> int | None:
        """In how many bits the head is held."""
        return head_bits(self.module)

    @property
    def vocabulary(self) -> int:
        """Entries of a row of logits."""
        head = output_embeddings(self.module)
        return int(head.out_features)

    @property
    def kv_bits(self) -> int | str:
        """Bits of the KV cache as ``--kv-bits`` takes them (8, "k4v2"); 16 stands for the run-time dtype."""
        return self.kv_plan.label

    @property
    def kv_stored_bits(self) -> float:
        """Bits of a cached number once it is packed, scales included.

        Those of the run-time dtype where nothing is quantized.
        """
        heads, dim = self._cached_shape()
        token = sum(spec.scheme.bytes_per_token(heads, dim, self.dtype) for spec in self._specs)
        return 8 * token / (2 * heads * dim * max(1, len(self._specs)))

    @property
    def kv_words(self) -> str:
        """How the cache is kept, in words: bits, scales, and bits per number with them."""
        return cache_words(self.kv_bits, self.kv_plan.kind, self.kv_stored_bits)

    @property
    def context(self) -> int | None:
        """Tokens the model can attend to, prompt and answer together; None if its config names no limit."""
        limit = getattr(text_config(self.module), "max_position_embeddings", None)
        return None if limit is None or limit < 0 else int(limit)  # xlnet: -1

    def new_cache(self, capacity: int = 0) -> KVCache:
        """Return an empty cache.

        capacity: tokens per sequence to reserve pages for.
        """
        if not self._stepping.caches:
            return TokenCache()
        cache = KVCache(self._specs, capacity, self._kinds)
        cache.positions = self._stepping.positions
        return cache

    @property
    def alone(self) -> bool:
        """Whether each sequence is computed by itself, its prompt in one piece.

        So it is where layers keep states: padding would change them.
        """
        return not self._stepping.batches

    @cached_property
    def _stepping(self) -> Stepping:
        """How tokens are stepped over the cache, found on a twin where it is not known."""
        return stepping(self.module, self.config, quantized=self.kv_plan.quantized)

    def step(
        self, ids: Tensor, cache: Any, counts: Sequence[int] | None = None, beside: Beside | None = None
    ) -> Tensor:
        """Run tokens over a cache, appending to it, by the fast step where there is one.

        Returns the final hidden states ``[batch, tokens, hidden]``, after the last norm.

        ids: int64 ``[batch, tokens]``.
        cache: as ``transformers_cache`` returns it.
        counts: how many of the tokens, the last ones, each sequence has (the others are padding); None: all.
        beside: images that stand among these tokens, of one sequence.
        """
        paged = cache.paged
        if beside:
            return step_with_images(self.module, ids, cache, beside)
        if paged.remembered:
            return step_after_images(self.module, ids, cache)
        if ids.shape[1] == 1 and paged.length and counts is None and not self.alone and self.fast_step is not None:
            quick: Tensor | None = self.fast_step(ids, paged)
            if quick is not None:
                return quick
        width = int(self.module.get_input_embeddings().embedding_dim) + paged.length + ids.shape[1]
        with threads.without_openmp(ids.numel() * width) if self._compiled else nullcontext():
            return definition_step(self.module, ids, cache, counts)

    @cached_property
    def _compiled(self) -> bool:
        """Whether most of the linears' weights run in our own threads."""
        layers = [m for m in self.module.modules() if isinstance(m, (QuantLinear, torch.nn.Linear))]
        sizes = {id(m): m.in_features * m.out_features for m in layers}
        ours = sum(sizes[id(m)] for m in layers if isinstance(m, QuantLinear) and m.packed.layout.startswith("planar"))
        return 2 * ours > sum(sizes.values())

    @torch.inference_mode()
    def hidden(self, input_ids: Tensor) -> Tensor:
        """Return final hidden states ``[batch, tokens, hidden]``, after the last norm.

        With a quantized cache tokens come in chunks of 64 (with states: 64, then one by one): packed pages are read.

        input_ids: int64 ``[batch, tokens]``.

        Raises RequestError beyond the context, and for ids that are no tokens of the vocabulary.
        """
        check_ids(input_ids, int(self.module.get_input_embeddings().num_embeddings))
        ids = input_ids.to(self.device)
        if self.context is not None and ids.shape[1] > self.context:
            raise RequestError(
                f"{ids.shape[1]} tokens are more than the model's context of {self.context}. Use shorter windows."
            )
        if not self.kv_plan.quantized:
            hidden: Tensor = trunk(self.module)(input_ids=ids, use_cache=False).last_hidden_state
            return hidden
        rows = ids.split(1) if self.alone else (ids,)
        return torch.cat([read_through_pages(self, row) for row in rows])

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        """Return logits ``[batch, tokens, vocab]`` of hidden states, with the model's own scaling and soft cap."""
        logits: Tensor = self._head(inputs_embeds=hidden, use_cache=False).logits
        return logits

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Return logits ``[batch, tokens, vocab]`` of int64 ids ``[batch, tokens]``."""
        return self.head(self.hidden(input_ids))

    @interruptible()
    def generate(
        self,
        prompt: str | Sequence[str] | Messages | Sequence[Messages],
        options: GenerationOptions | Sequence[GenerationOptions] | None = None,
        *,
        images: Images | Sequence[Images] = (),
        **overrides: Any,
    ) -> Any:
        """Continue a prompt, or a batch of them.

        Returns a ``Generation``, or a list of them for a list of prompts.

        prompt: text, or chat messages (``[{"role": "user", "content": "..."}]``), or a list of either.
        options: one for all, or one per prompt.
        images: files or ``PIL.Image`` that the prompt is about; for a list of prompts, a list of them for each.
        overrides: fields of the options as keywords: ``generate("Once", max_tokens=32)``.

        Raises RequestError for a bad option or a prompt beyond the context, UnsupportedModel for images that the model
        does not read.
        """
        prompts, single = as_batch(prompt)
        done: dict[int, Generation] = {}
        for piece in self._run(prompts, options, overrides, [images] if single and images else images):
            if piece.done is not None:
                done[piece.row] = piece.done
        return done[0] if single else [done[row] for row in range(len(prompts))]

    def stream(
        self, prompt: str | Messages, options: GenerationOptions | None = None, *, images: Images = (), **overrides: Any
    ) -> Generator[str, None, Generation | None]:
        """Continue one prompt; yield text as soon as it is certain.

        The generator's return value is the ``Generation``.

        prompt: text or chat messages.
        options: how to generate.
        images: files or ``PIL.Image`` that the prompt is about.
        overrides: fields of the options as keywords.

        Raises RequestError as ``generate`` does, and for a list of prompts.
        """
        prompts, single = as_batch(prompt)
        if not single:
            raise RequestError("stream takes one prompt; use generate for a list.")
        for piece in self._run(prompts, options, overrides, [images] if images else []):
            if piece.text:
                yield piece.text
            if piece.done is not None:
                return piece.done
        return None

    def memory(self) -> dict[str, int]:
        """Return bytes by kind.

        ``quantized``: packed weights with scales. ``dense``: all else. ``kv_per_token``: packed pages of all layers.
        """
        weights = {m.packed for m in self.module.modules() if isinstance(m, (QuantLinear, QuantEmbedding))}
        packed = sum(weight.nbytes() for weight in weights if not isinstance(weight, HalfWeight))  # a tied matrix once
        tensors = {t.data_ptr(): t.nbytes for t in [*self.module.parameters(), *self.module.buffers()]}
        heads, dim = self._cached_shape()
        token = sum(spec.scheme.bytes_per_token(heads, dim, self.dtype) for spec in self._specs)
        return {"quantized": packed, "dense": sum(tensors.values()) - packed, "kv_per_token": round(token)}

    def _cached_shape(self) -> tuple[int, int]:
        """Return heads of keys and values, and channels of each."""
        config = text_config(self.module)
        return cached_kv_heads(config), head_dim(config)

    def layouts(self) -> dict[str, int]:
        """Count layers by the layout of their packed weight: ``{"int4": 210}``."""
        kinds = [m.packed.layout for m in self.module.modules() if isinstance(m, (QuantLinear, QuantEmbedding))]
        return {name: kinds.count(name) for name in dict.fromkeys(kinds)}

    def __repr__(self) -> str:
        dtype, layouts = str(self.dtype).removeprefix("torch."), self.layouts()
        held = ", ".join(f"{count} x {name}" for name, count in layouts.items()) or "no packed weights"
        return f"Model({self.config.get('model_type')}, {self.device}, {dtype}, {held}, KV cache {self.kv_words})"

    def windows(self) -> list[int | None]:
        """Return the sliding window of each layer in tokens, None for full attention."""
        return [spec.window for spec in self._specs]

    def _run(
        self,
        prompts: Sequence[str | Messages],
        options: GenerationOptions | Sequence[GenerationOptions] | None,
        overrides: dict[str, Any],
        images: Sequence[Images],
    ) -> Iterator[Piece]:
        asked = requests(self, prompts, options, overrides, images)
        return run(
            self, [one.ids for one in asked], [one.options for one in asked], [one.beside for one in asked],
            end_tokens=self.end_tokens, context=self.context,
        )  # fmt: skip

    def cache_bytes(self, lengths: Sequence[int], slack: int = 0) -> float:
        """Return the bytes of keys and values of sequences.

        lengths: their tokens. slack: half of the tokens that a sliding window holds beyond itself.
        """
        heads, dim = self._cached_shape()
        needed = 0.0
        for spec in self._specs:
            held = lengths if spec.window is None else [min(n, spec.window + 2 * slack) for n in lengths]
            needed += sum(held) * spec.scheme.bytes_per_token(heads, dim, self.dtype)
        return needed

    def encode(self, prompt: str | Messages, *, chat: bool = False) -> list[int]:
        """Return token ids of a prompt. Messages, and text with ``chat``, go through the chat template.

        prompt: text or chat messages.
        chat: use the chat template on text, too.

        Raises RequestError for what is no prompt or far beyond the context, or a model without chat template,
        SourceError if the template fails.
        """
        return encoded(self, checked(prompt, "the prompt"), chat)
