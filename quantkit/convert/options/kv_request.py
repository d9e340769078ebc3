"""The KV cache in a conversion: statistics layer by layer, then the plan that is stored.

A budget gives each layer bits for its keys and for its values: of the widths in ``BUDGET_BITS``, those with the least
total sensitivity whose average is within the budget. Sensitivity is the error that rounding one side of one layer's
cache causes at the output of that layer's block (``calibrate.cache_sensitivity``); comparing sums of it takes the
layers for independent.
"""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.calibrate.cache_sensitivity import NEWEST
from quantkit.core.kvscheme import PAGE_TOKENS, KVScales, KVScheme, bits_words
from quantkit.errors import RequestError

BUDGET_BITS = (8, 4, 3, 2)
BUDGET_TOKENS = (
    128 + NEWEST + PAGE_TOKENS
)  # shortest window in which 2-bit keys are packed for the queries that are compared


@dataclass(frozen=True, slots=True)
class CacheRequest:
    """The requested KV cache: one scheme for all layers, or a budget of bits on average.

    Raises RequestError for a budget out of range.
    """

    scheme: KVScheme
    budget: float | None = None

    def __post_init__(self) -> None:
        if self.budget is not None and not min(BUDGET_BITS) <= self.budget <= max(BUDGET_BITS):
            raise RequestError(
                f"--kv-budget {self.budget:g}: bits of a key or value on average, from {min(BUDGET_BITS)} to"
                f" {max(BUDGET_BITS)}."
            )

    @property
    def wanted(self) -> bool:
        """Whether a cache is calibrated at all."""
        return self.scheme.quantized or self.budget is not None

    def words(self) -> str:
        """Describe the request for people: ``KV cache 4 bits``."""
        if self.budget is not None:
            return f"KV cache within {self.budget:g} bits on average"
        return label_words(self.scheme.label)

    def candidates(self) -> list[KVScheme]:
        """Return the schemes whose ranges are calibrated."""
        if self.budget is None:
            return [self.scheme]
        return [KVScheme.of(bits, self.scheme.scales) for bits in BUDGET_BITS]

    def check_windows(self, seq_len: int) -> None:
        """Check that calibration windows are long enough to measure what was asked for.

        seq_len: tokens of a window.

        Raises RequestError if they are too short.
        """
        shortest = BUDGET_TOKENS if self.budget is not None else self.scheme.first + 1
        if self.wanted and seq_len < shortest:
            what = f"--kv-budget {self.budget:g}" if self.budget is not None else f"--kv-bits {self.scheme.label}"
            raise RequestError(
                f"--seq-len {seq_len} with {what}: its windows hold no token that the cache would round. Use {shortest}"
                " or more."
            )


def request(bits: int | str, scales: KVScales, budget: float | None) -> CacheRequest:
    """Build the request from the options of the conversion.

    bits: ``--kv-bits``.
    scales: ``--kv-scales``.
    budget: ``--kv-budget``, average bits, None without one.

    Raises RequestError for values that are out of range or contradict each other.
    """
    if scales not in ("online", "static"):
        raise RequestError(f"--kv-scales {scales}: online (each page its own) or static (calibrated).")
    if budget is not None and str(bits) != "16":
        raise RequestError(
            f"--kv-bits {bits} with --kv-budget {budget:g}: the budget chooses the bits. Leave one of them out."
        )
    return CacheRequest(KVScheme.of(16 if budget is not None else bits, scales), budget)


def label_words(label: int | str) -> str:
    """Describe a cache for people: ``KV cache 4 bits``, ``KV cache k4v2``, ``KV cache fp8``.

    label: bits, or the label of a scheme.
    """
    return f"KV cache {bits_words(label)}"
