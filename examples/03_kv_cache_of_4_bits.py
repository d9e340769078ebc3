"""Run any model with a KV cache of 4 bits: what the cache takes, and what that costs.

    python examples/03_kv_cache_of_4_bits.py                     # smollm2-135m; some minutes
    python examples/03_kv_cache_of_4_bits.py ./my-model --kv-bits k4v2

Nothing is converted: each page of 64 tokens gets scales of its own when it leaves the newest tokens.
`quantkit convert --kv-bits 4` stores the choice with the model (docs/kv.md).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import quantkit


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", nargs="?", default="smollm2-135m", help="a named model, folder, hub id or GGUF file")
    parser.add_argument("--kv-bits", default="4", help="8, 4, 3, 2, or keys and values apart: k4v2")
    parser.add_argument("--data", default="wikipedia-sample", help="the text to compare on")
    parser.add_argument("--seq-len", type=int, default=1024, help="tokens of a window: short ones flatter a cache")
    parser.add_argument(
        "--prompt", default="The quick brown fox jumps over the lazy dog. " * 40, help="text to go on from"
    )
    args = parser.parse_args(arguments)
    kv_bits = int(args.kv_bits) if args.kv_bits.isdigit() else args.kv_bits

    found = quantkit.evaluate(
        args.source, kv_bits=kv_bits, baseline=args.source, data=args.data, seq_len=args.seq_len, tokens=args.seq_len
    )
    print(f"KL          {found.kl_mean:.3g} nats per token beside a 16-bit cache of the same weights")
    print(f"            {found.kv_bits_per_number:.2f} bits per cached number, scales counted")

    for bits in (16, kv_bits):
        answer = quantkit.load(args.source, kv_bits=bits).generate(args.prompt, max_tokens=16)
        print(
            f"cache {bits!s:5s} {answer.kv_cache_bytes / 1e6:.2f} MB for {answer.prompt_tokens} tokens: {answer.text!r}"
        )


if __name__ == "__main__":
    main()
