"""KL against bits per weight, from eval/results/*.json.

One panel for each model, one line for each method of quantkit and each peer.

python eval/quality_plot.py            write eval/results/quality.svg
python eval/quality_plot.py --png OUT  a PNG instead, to look at

Needs matplotlib (``pip install quantkit[report]``). Shown are rows with a 16-bit cache, the text and protocol of the
tables (24 windows of 1024) and at most 5.6 bits; of several rows of one line with the same bits (more calibration text,
another seed) the one with the least KL.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "eval" / "results" / "quality.svg"
PROTOCOL = {"data": "wikipedia-sample", "seq_len": 1024, "tokens": 24576, "kv_bits": 16, "protocol": "gptq"}
COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#E69F00",
    "#000000",
    "#882255",
    "#44AA99",
    "#999933",
    "#AA4499",
    "#661100",
)
MOST_BITS = 5.6  # 8 bits are hardly to be told from the original, and would leave no room for the others
MARKERS = "osD^v<>PX*hdp"  # one more than colours: no two of the first 156 lines look alike


def points(folder: Path) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Model -> series -> (bits per quantized weight, mean KL in nats), in order of bits.

    Other seeds than the first are left out: peers have one.
    """
    found: dict[str, dict[str, dict[float, float]]] = {}
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        figures = result.get("evaluation") if isinstance(result, dict) else None
        if figures is None or any(figures.get(key) != value for key, value in PROTOCOL.items()):
            continue
        bits, kl = figures.get("bits_per_weight"), figures.get("kl_mean")
        if kl is None or bits is None or bits > MOST_BITS or "-seed" in path.stem:
            continue
        line = found.setdefault(result["row"]["model"], {}).setdefault(name(result), {})
        line[bits] = min(kl, line.get(bits, kl))
    return {
        model: {key: sorted(line.items()) for key, line in sorted(series.items())} for model, series in found.items()
    }


def name(result: Mapping[str, Any]) -> str:
    """Whose line a result is on: ``quantkit gptq``, ``quantkit best (tune)``, ``llm-compressor awq``."""
    made = result["quantization"]
    method = str(made.get("method") or "")
    if method.startswith("bitsandbytes"):  # its script names library, version and kind in one
        return f"bitsandbytes {method.rpartition(' ')[2]}"
    peer = made.get("peer") or "quantkit"
    if peer == "quantkit" and (made.get("scheme") or "").startswith("W8A8"):
        method = f"{method} W8A8"
    if made.get("preset"):
        method = f"{made['preset']} ({method})"
    if made.get("allocation"):
        method = f"{method}, bits by layer"
    return f"{peer} {method}".strip() if method != peer else peer


def draw(found: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], out: Path) -> None:
    """One panel for each model. Hollow markers are peers."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "quantkit", "svg.fonttype": "path", "font.size": 9}
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(sorted((key for series in found.values() for key in series), key=_ours_first)))
    figure, axes = plt.subplots(1, len(found), figsize=(5.2 * len(found), 4.6), sharex=True, sharey=True, squeeze=False)
    for axis, (model, series) in zip(axes[0], found.items(), strict=True):
        for index, key in enumerate(names):
            if key in series:
                bits, kl = zip(*series[key], strict=True)
                peer = not key.startswith("quantkit")
                colour = COLOURS[index % len(COLOURS)]
                axis.plot(
                    bits, kl, marker=MARKERS[index % len(MARKERS)], color=colour, label=key,
                    linestyle="--" if peer else "-", markerfacecolor="white" if peer else colour, linewidth=1.2,
                    markersize=6,
                )  # fmt: skip
        axis.set_yscale("log")
        axis.set_title(model)
        axis.set_xlabel("bits per quantized weight, scales and zeros counted")
        axis.grid(True, which="both", linewidth=0.3, color="#cccccc")
        axis.yaxis.set_major_formatter(plt.FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_formatter(
            plt.FuncFormatter(lambda value, _: f"{value:.2g}" if f"{value:.2g}"[-1] in "1235" else "")
        )
    axes[0][0].set_ylabel("mean KL against the original, nats per token")
    handles = {
        label: handle for axis in axes[0] for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    ordered = [key for key in names if key in handles]
    figure.legend([handles[key] for key in ordered], ordered, loc="lower center", ncols=3, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.04 + 0.035 * -(-len(ordered) // 3), 1, 1))
    drawn = {"Date": None, "Identifier": digest(found)}
    figure.savefig(out, metadata=drawn if out.suffix == ".svg" else None, dpi=140)


def digest(found: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]) -> str:
    """Of what is drawn; the picture carries it, so that a test sees whether it is of today's results."""
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def _ours_first(key: str) -> tuple[bool, str]:
    return not key.startswith("quantkit"), key


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--png", type=Path, metavar="OUT", help="write a PNG there instead")
    arguments = parser.parse_args()
    out = arguments.png or OUT
    draw(points(ROOT / "eval" / "results"), out)
    print(out)


if __name__ == "__main__":
    main()
