"""What batch x context fits into 8, 24, 80 and 141 GB with a KV cache of so many bits, and what a cached token takes.

    python eval/kv_memory.py          the two tables of docs/kv.md, as Markdown (eval/results_table.py puts them there)

Sizes of caches are those of ``KVScheme.cache_bytes``: packed pages with their scales, the newest tokens and the first
ones at 16 bits. The weights are counted at 4.5 bits (4 bits, groups of 64, a 16-bit scale and zero), embedding and head
at 16. 10 % of the memory are left to everything else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quantkit.core.kvscheme import KVScheme

GB = 10**9
MEMORIES = (8, 24, 80, 141)
CONTEXTS = (4096, 32768, 131072)
SCHEMES = tuple(KVScheme.of(bits) for bits in (16, 8, 4, "k4v2", 2))
LISTED = (*SCHEMES[:3], KVScheme.of(3), *SCHEMES[3:], KVScheme.of(8, "static"), KVScheme.of(4, "static"))
LEFT = 0.9  # of the memory: what weights and cache may take
WEIGHT_BITS = 4.5


@dataclass(frozen=True)
class Shape:
    """A model's published configuration.

    parameters: all; dense: of them, those in embedding and head.
    context: tokens it was made for.
    """

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    parameters: int
    dense: int
    context: int

    @property
    def weight_bytes(self) -> int:
        return int((self.parameters - self.dense) * WEIGHT_BITS / 8) + 2 * self.dense

    def cache_bytes(self, tokens: int, scheme: KVScheme) -> int:
        """Of one sequence, all layers."""
        return self.layers * scheme.cache_bytes(tokens, self.kv_heads, self.head_dim, torch.bfloat16)

    def batch(self, memory: int, tokens: int, scheme: KVScheme) -> int:
        """Sequences of that many tokens that fit beside the weights; 0 where none does."""
        return max(0, int(LEFT * memory * GB - self.weight_bytes) // self.cache_bytes(tokens, scheme))


SHAPES = (
    Shape("Qwen2.5-1.5B", 28, 2, 128, 1_543_714_304, 151_936 * 1536, 32768),
    Shape("Llama-3.1-8B", 32, 8, 128, 8_030_261_248, 2 * 128_256 * 4096, 131072),
    Shape("Llama-2-13B", 40, 40, 128, 13_015_864_320, 2 * 32_000 * 5120, 4096),
    Shape("Llama-3.1-70B", 80, 8, 128, 70_553_706_496, 2 * 128_256 * 8192, 131072),
)


def token_table() -> str:
    """Bits per cached number with scales, and bytes per token of Llama-3.1-8B, the newest tokens left out."""
    shape = SHAPES[1]
    full = shape.layers * KVScheme().bytes_per_token(shape.kv_heads, shape.head_dim, torch.bfloat16)
    lines = ["| cache | bits per number | bytes per token | of 16 bits |", "| --- | --: | --: | --: |"]
    for scheme in LISTED:
        token = shape.layers * scheme.bytes_per_token(shape.kv_heads, shape.head_dim, torch.bfloat16)
        name = f"{scheme.label}{' bits' if isinstance(scheme.label, int) else ''}"
        name += ", static scales" if scheme.scales == "static" else ""
        lines.append(f"| {name} | {16 * token / full:.3f} | {token:,.0f} | {token / full:.3f} |")
    return "".join(f"{line}\n" for line in lines)


def batch_table() -> str:
    """Largest batch for each model, context and memory: 16 / 8 / 4 / k4v2 / 2 bits."""
    order = " / ".join(str(scheme.label) for scheme in SCHEMES)
    lines = [
        f"| model (weights) | context | {' | '.join(f'{memory} GB' for memory in MEMORIES)} |",
        f"| --- | --: | {' | '.join(['--:'] * len(MEMORIES))} |",
    ]
    for shape in SHAPES:
        for tokens in CONTEXTS:
            if tokens > shape.context:
                continue
            cells = [" / ".join(str(shape.batch(memory, tokens, scheme)) for scheme in SCHEMES) for memory in MEMORIES]
            shown = ["-" if set(cell) <= set("0 /") else cell for cell in cells]
            lines.append(
                f"| {shape.name} ({shape.weight_bytes / GB:.1f} GB) | {tokens // 1024}k | {' | '.join(shown)} |"
            )
    return f"Sequences that fit, with a cache of {order} bits:\n\n" + "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    print(token_table())
    print(batch_table())
