"""Calibrate on a text of your own, and see what the text brought beside rounding without one.

    python examples/02_your_own_calibration_text.py my-text.txt               # smollm2-135m; some minutes
    python examples/02_your_own_calibration_text.py my-text.jsonl ./my-model ./my-model-int4

TEXT is a .txt or .md file, a .jsonl or .parquet file with a field `text`, `hub:DATASET`, `wikipedia-sample`, or
`builtin` (the documentation of your Python: the default). Take text like that which the model will see, and never the
text that you judge by.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import quantkit


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("text", nargs="?", default="builtin", help="what to calibrate on")
    parser.add_argument("source", nargs="?", default="smollm2-135m", help="a named model, folder, hub id or GGUF file")
    parser.add_argument("out", nargs="?", default="example-out", help="folders are written as OUT-rtn and OUT-gptq")
    parser.add_argument("--group-size", type=int, default=64, help="weights that share a scale")
    parser.add_argument("--samples", type=int, default=16, help="calibration windows: 64 to 128 for a model to keep")
    parser.add_argument("--seq-len", type=int, default=512, help="tokens of a window")
    parser.add_argument("--data", default="wikipedia-sample", help="the text to judge by")
    args = parser.parse_args(arguments)

    text = {"calibration": args.text, "samples": args.samples, "seq_len": args.seq_len}
    for name, options in (("rtn", {}), ("gptq", text)):
        out = f"{args.out}-{name}"
        report = quantkit.convert(args.source, out, method=name, group_size=args.group_size, overwrite=True, **options)
        for line in report.warnings:  # a text that is too short for the windows asked for, and the like
            print(f"warning: {line}")
        found = quantkit.evaluate(
            out, baseline=args.source, data=args.data, seq_len=args.seq_len, tokens=4 * args.seq_len
        )
        tokens = max((layer.tokens for layer in report.layers), default=0)
        print(f"{name:5s} {tokens:7d} calibration tokens, KL {found.kl_mean:.3g} nats per token: {Path(out)}")


if __name__ == "__main__":
    main()
