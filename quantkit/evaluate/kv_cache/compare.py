"""What a quantized KV cache costs beside a 16-bit one over the same weights, apart from perplexity and divergence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quantkit.core.kvscheme import PAGE_TOKENS, KVPlan
from quantkit.errors import RequestError
from quantkit.evaluate.kv_cache.greedy_text import check_greedy, measure_greedy
from quantkit.evaluate.kv_cache.planted_facts import PlantedText, measure_planted, plant
from quantkit.evaluate.perplexity import OnProgress
from quantkit.evaluate.windows import EvaluationWindows
from quantkit.runtime.model import Model

if TYPE_CHECKING:
    from quantkit.evaluate.prepare import Prepared
    from quantkit.evaluate.streamed import StreamedModel


def with_cache(model: Model, plan: KVPlan | None = None) -> Model:
    """Return the same weights with another cache, of 16 bits if None."""
    return Model(
        model.module,
        model.config,
        device=model.device,
        dtype=model.dtype,
        read_tokenizer=lambda: model.tokenizer,
        end_tokens=model.end_tokens,
        kv_plan=plan,
    )


def packs_a_page(plan: KVPlan, seq_len: int) -> bool:
    """Return whether any token of a window fed in chunks attends to a packed page."""
    return seq_len >= shortest_window(plan)


def shortest_window(plan: KVPlan) -> int:
    """Return the tokens of the shortest window whose last chunk attends to a packed page of a quantized plan."""
    recent = min(scheme.recent for scheme in [*plan.layers.values()] or [plan.scheme] if scheme.quantized)
    # whole chunks before the last, and a token in it
    return -(-(PAGE_TOKENS - 1 + recent) // PAGE_TOKENS) * PAGE_TOKENS + 1


def cache_facts(model: Model | StreamedModel) -> dict[str, Any]:
    """Return ``kv_bits``, ``kv_scales``, ``kv_bits_per_number`` and ``kv_exact`` of an ``Evaluation``."""
    if not isinstance(model, Model):  # a streamed one has no cache
        return {"kv_bits": 16, "kv_scales": None, "kv_bits_per_number": 8.0 * model.dtype.itemsize, "kv_exact": None}
    return {
        "kv_bits": model.kv_bits,
        "kv_scales": model.kv_plan.kind,
        "kv_bits_per_number": model.kv_stored_bits,
        "kv_exact": 0 if model.kv_plan.scheme.at_once else None,
    }


@dataclass(frozen=True, slots=True)
class CacheChecks:
    """Planted facts and greedy text, where they are asked for. Wrong requests are refused before weights are read."""

    windows: EvaluationWindows
    texts: Sequence[PlantedText] | None
    greedy: int | None

    @classmethod
    def of(cls, prepared: Prepared, planted_fact: bool, greedy: int | None, quantized: bool) -> CacheChecks:
        """Prepare what was asked for, before weights are read.

        Raises RequestError for checks of a cache that is not quantized, and what ``plant`` and ``check_greedy`` raise.
        """
        asked = [name for name, yes in (("--planted-fact", planted_fact), ("--greedy", greedy is not None)) if yes]
        if asked and not quantized:
            raise RequestError(
                f"{asked[0]} compares a quantized KV cache with a 16-bit one, and this one has 16 bits. Add --kv-bits"
                " 8, 4, 3, 2 or k4v2."
            )
        windows = prepared.windows
        if greedy is not None:
            check_greedy(greedy, windows.seq_len)
        texts = None
        if planted_fact:
            texts = plant(prepared.tokenizer, prepared.text_ids, seq_len=windows.seq_len, bos_id=prepared.bos_id)
        return cls(windows, texts, greedy)

    def run(self, model: Model | StreamedModel, progress: OnProgress | None) -> dict[str, Any]:
        """Measure ``planted_fact`` and ``greedy`` of an ``Evaluation``; None for what was not asked for."""
        figures: dict[str, Any] = {"planted_fact": None, "greedy": None}
        if not isinstance(model, Model) or (self.texts is None and self.greedy is None):
            return figures  # a streamed model has a 16-bit cache, and was refused
        exact = with_cache(model)
        if self.texts is not None:
            figures["planted_fact"] = measure_planted(exact, model, self.texts, progress)
        if self.greedy is not None:
            figures["greedy"] = measure_greedy(exact, model, self.windows, self.greedy, progress)
        return figures
