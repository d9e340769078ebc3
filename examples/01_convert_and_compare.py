"""Convert a model to 4 bits and compare the result with the original.

    python examples/01_convert_and_compare.py                          # smollm2-135m (extra [gguf]); some minutes
    python examples/01_convert_and_compare.py ./my-model ./my-model-int4 --preset balanced

Prints sizes, perplexity and KL divergence on the evaluation text, and what both models write.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import quantkit


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", nargs="?", default="smollm2-135m", help="a named model, folder, hub id or GGUF file")
    parser.add_argument("out", nargs="?", default="example-out", help="the folder to write")
    parser.add_argument("--preset", default="fast", help="fast reads no text; balanced and best calibrate on one")
    parser.add_argument("--group-size", type=int, default=64, help="weights that share a scale")
    parser.add_argument("--data", default="wikipedia-sample", help="the text to compare on")
    parser.add_argument("--seq-len", type=int, default=1024, help="tokens of a window")
    parser.add_argument("--windows", type=int, default=4, help="windows to compare on")
    args = parser.parse_args(arguments)

    report = quantkit.convert(args.source, args.out, preset=args.preset, group_size=args.group_size, overwrite=True)
    before, after = report.source_bytes / 1e6, report.output_bytes / 1e6
    print(f"size        {before:.1f} MB -> {after:.1f} MB in {report.seconds:.0f} s")

    found = quantkit.evaluate(
        args.out, baseline=args.source, data=args.data, seq_len=args.seq_len, tokens=args.windows * args.seq_len
    )
    print(f"perplexity  {found.baseline_perplexity:.2f} -> {found.perplexity:.2f}")
    print(f"KL          {found.kl_mean:.4f} nats per token; same top token {found.top1_agreement:.1%}")

    prompt = "The capital of France is"
    for name in (args.source, args.out):
        print(f"{name}: {prompt}{quantkit.load(name, kv_bits=16).generate(prompt, max_tokens=12).text!r}")


if __name__ == "__main__":
    main()
