"""The plot of KL against bits: which results are on it, and on whose line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scripts import script

ROOT = Path(__file__).resolve().parents[3]
plot = script(ROOT / "eval" / "quality_plot.py")


def result(model: str, bits: float | None, kl: float, made: dict[str, Any], **changed: Any) -> dict[str, Any]:
    figures = {**plot.PROTOCOL, "bits_per_weight": bits, "kl_mean": kl, **changed}
    return {"row": {"model": model}, "quantization": made, "evaluation": figures}


def test_rows_of_one_method_are_one_line_and_foreign_protocols_are_left_out(tmp_path: Path) -> None:
    gptq, peer = {"method": "gptq", "scheme": "W4 g64 asym"}, {"peer": "llm-compressor", "method": "gptq"}
    rows = [
        result("a", 4.3, 0.2, gptq),
        result("a", 4.3, 0.3, gptq),
        result("a", 3.3, 0.9, gptq),
        result("a", 4.5, 0.4, peer),
        result("b", 4.5, 0.5, {"method": "bitsandbytes 0.50.2 nf4"}),
        result("b", 4.5, 0.6, {"peer": "hqq", "method": "hqq"}),
        result("a", 4.3, 0.1, gptq, tokens=4096),
        result("a", 4.3, 0.1, gptq, kv_bits=8),
        result("a", 4.3, 0.1, gptq, data="news-sample"),
        result("a", 4.3, 0.15, {**gptq, "preset": "balanced"}),
        result("a", 4.2, 0.16, {**gptq, "preset": "balanced", "allocation": {"target": "4.2"}}),
        result("a", 8.0, 0.1, gptq),
        result("a", None, 0.0, gptq),
    ]
    for index, row in enumerate(rows):
        (tmp_path / f"{index}.json").write_text(json.dumps(row))
    (tmp_path / "x-seed1.json").write_text(json.dumps(result("a", 4.3, 0.05, gptq)))
    (tmp_path / "table.json").write_text("[1, 2]")
    assert plot.points(tmp_path) == {
        "a": {
            "llm-compressor gptq": [(4.5, 0.4)],
            "quantkit balanced (gptq)": [(4.3, 0.15)],
            "quantkit balanced (gptq), bits by layer": [(4.2, 0.16)],
            "quantkit gptq": [(3.3, 0.9), (4.3, 0.2)],
        },
        "b": {"bitsandbytes nf4": [(4.5, 0.5)], "hqq": [(4.5, 0.6)]},
    }


def test_the_plot_is_of_the_committed_results() -> None:
    found = plot.points(ROOT / "eval" / "results")
    assert found["smollm2-135m"]
    assert plot.digest(found) in (ROOT / "eval" / "results" / "quality.svg").read_text(encoding="utf-8")
