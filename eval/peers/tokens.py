"""Calibration windows as a file, so that a peer without quantkit reads the very token ids that quantkit calibrates on.

    python eval/peers/tokens.py SOURCE OUT.safetensors [--calibration TEXT] [--samples N] [--seq-len N] [--seed N]

The file holds one tensor, ``input_ids``, int64 ``[samples, seq_len]``, BOS included where the model wants one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from quantkit.calibrate.data import CalibrationWindows, load_windows
from quantkit.checkpoint.open import open_source
from quantkit.checkpoint.tokenizer import load_tokenizer


def write_tokens(
    source: str,
    out: Path,
    *,
    calibration: str = "wikipedia-sample",
    samples: int = 128,
    seq_len: int = 1024,
    seed: int = 0,
) -> CalibrationWindows:
    """The windows that ``quantkit convert`` with the same options calibrates on, written to ``out``."""
    from safetensors.torch import save_file

    opened = open_source(source)
    windows = load_windows(
        calibration,
        load_tokenizer(opened),
        samples=samples,
        seq_len=seq_len,
        seed=seed,
        vocab_size=int(opened.config["vocab_size"]),
    )
    facts = {"text_sha256": windows.text_sha256, "tokens_sha256": windows.digest(), "text": windows.name}
    save_file({"input_ids": windows.ids.contiguous()}, out, metadata=facts)
    return windows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", help="a model: its tokenizer is used")
    parser.add_argument("out", type=Path, help="file to write")
    parser.add_argument("--calibration", default="wikipedia-sample")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    args = vars(parser.parse_args())
    windows = write_tokens(args.pop("source"), args.pop("out"), **args)
    print(windows.digest())


if __name__ == "__main__":
    main()
