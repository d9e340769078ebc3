"""A peer's KV cache, judged by the hidden states it leads to: the original's own head turns them into losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from quantkit.evaluate.by_position import by_position
from quantkit.evaluate.divergence import Baseline, compare
from quantkit.evaluate.environment import hardware, versions
from quantkit.evaluate.kv_cache.planted_facts import measure_planted, plant
from quantkit.evaluate.perplexity import perplexity_of
from quantkit.evaluate.prepare import prepare
from quantkit.runtime.load import load


class States:
    """A language model that knows the final hidden states of some rows of token ids."""

    def __init__(self, rows: Tensor, hidden: Tensor, head: Any) -> None:
        self._found = {_key(ids): states for ids, states in zip(rows, hidden, strict=True)}
        self.config, self.head = head.config, head.head

    def hidden(self, input_ids: Tensor) -> Tensor:
        return self._found[_key(input_ids[0])][None]


def _key(ids: Tensor) -> bytes:
    return ids.cpu().numpy().tobytes()


class ForeignCache:
    """One original and the tokens of a suite; serves all rows of peers' caches.

    source: the original. evaluation: the suite's. baseline: the original with a 16-bit cache over the same windows.
    """

    def __init__(self, source: str, evaluation: dict[str, Any], baseline: Baseline) -> None:
        self.baseline, self._source = baseline, source
        self._cut = {name: evaluation[name] for name in ("data", "protocol", "seq_len", "tokens") if name in evaluation}
        self._planted = bool(evaluation.get("planted_fact"))
        self.prepared = prepare(source, **self._cut)
        self.texts = plant(
            self.prepared.tokenizer,
            self.prepared.text_ids,
            seq_len=self.prepared.windows.seq_len,
            bos_id=self.prepared.bos_id,
        ) if self._planted else []  # fmt: skip
        self._exact: States | None = None

    def options(self, own: dict[str, Any]) -> list[str]:
        """What run_kv.py must be told of the evaluation.

        own: options of the row, of which it may have ``planted_fact``.
        """
        planted = own.get("planted_fact", self._planted)
        flags = [word for name, value in self._cut.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        return [*flags, "--planted-fact"] if planted else flags

    def figures(self, folder: Path, made: dict[str, Any]) -> dict[str, Any]:
        """What ``Evaluation.to_json`` would say of hidden.safetensors in ``folder``, as far as it has a meaning."""
        with safe_open(folder / "hidden.safetensors", framework="pt") as file:
            hidden = file.get_tensor("hidden")
        windows = self.prepared.windows
        count = windows.count
        if made["ids_sha256"] != windows.digest():
            raise SystemExit(f"{folder}: was run over other tokens")
        comparison = compare(States(windows.ids, hidden[:count], self.baseline.model), self.baseline)
        perplexity, stderr = perplexity_of(comparison.losses)
        before, before_stderr = perplexity_of(comparison.baseline_losses)
        figures = {
            "perplexity": perplexity, "stderr": stderr, "baseline_perplexity": before, "baseline_stderr": before_stderr,
            **comparison.summary(), "windows": count, "seq_len": windows.seq_len, "ids_sha256": windows.digest(),
            "kv_bits": made["bits"], "kv_bits_per_number": made["kv_bits_per_number"], "dtype": "float32",
            "by_position": [band.to_json() for band in by_position(comparison.losses, windows.first, comparison)],
            "planted_fact": None, "greedy": None, "versions": versions(), "hardware": hardware(),
        }  # fmt: skip
        if len(hidden) > count:
            rows = torch.stack([text.ids for text in self.texts])
            found = States(rows, hidden[count:], self.baseline.model)
            figures["planted_fact"] = measure_planted(self.exact(rows), found, self.texts).to_json()
        return figures

    def exact(self, rows: Tensor) -> States:
        """The original with its 16-bit cache over the planted texts; run once."""
        if self._exact is None:
            model = load(self._source, dtype="float32", kv_bits=16)
            hidden = torch.cat([model.hidden(ids[None]) for ids in rows])
            self._exact = States(rows, hidden, self.baseline.model)
        return self._exact
