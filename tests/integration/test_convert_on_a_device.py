"""Converting on a device that is not the CPU (``pretend``).

Everything is where it should be, and the results are the CPU's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pretend
import pytest
import torch
from stopping import stop_at

import quantkit
from quantkit.checkpoint.open import open_source
from quantkit.convert.plan import plan
from quantkit.errors import RequestError
from quantkit.formats.reader import QuantizedReader

SMALL: dict[str, Any] = dict(samples=4, seq_len=32, group_size=32)


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--device cuda`` chooses the pretended device."""
    monkeypatch.setattr(plan, "choose_device", lambda name: pretend.device() if name == "cuda" else torch.device("cpu"))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)


def convert(source: Path, out: Path, text: Path, device: str, **options: Any) -> Any:
    given = {"calibration": str(text), **SMALL, **options}
    if options.get("method") == "rtn":  # reads no text
        given = {key: value for key, value in given.items() if key not in ("calibration", "samples", "seq_len")}
    with pretend.pretending():
        return quantkit.convert(source, out=out, device=device, **given)


def equal_codes(a: Path, b: Path, within: str = "") -> float:
    """Share of codes that are equal, of modules with ``within`` in their name.

    What is not quantized must be equal anyway.
    """
    sources = [open_source(folder) for folder in (a, b)]
    left, right = (QuantizedReader(source) for source in sources)
    assert left.modules.keys() == right.modules.keys()
    assert left.plain_names() == right.plain_names()
    pairs = [(left.module(name), right.module(name)) for name in left.modules if within in name]
    equal = sum(int((x.codes == y.codes).sum()) for x, y in pairs)  # type: ignore[union-attr]
    return equal / sum(x.codes.numel() for x, _ in pairs)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "options",
    [
        dict(
            method="gptq",
            kv_bits=8,
            scales="minmax",
            format="native",
            rules=("*lm_head=bits:8", "*embed_tokens=bits:8"),
        ),
        pytest.param(dict(method="gptq", bits=3, format="native"), marks=pytest.mark.slow),
        pytest.param(dict(method="awq", symmetric=True, kv_bits=8), marks=pytest.mark.slow),
        pytest.param(dict(method="rtn"), marks=pytest.mark.slow),
        pytest.param(dict(method="smooth", activations="int8", group_size=None), marks=pytest.mark.slow),
    ],
    ids=["gptq-kv-head", "gptq-search", "awq-kv", "rtn", "smooth"],
)
def test_the_same_codes_are_written_as_on_the_cpu(
    options: dict[str, Any], on_device: None, tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    for device in ("cpu", "cuda"):
        exact = {} if device == "cuda" or options["method"] == "rtn" else {"matmul_precision": "float32"}
        convert(tiny_original, tmp_path / device, calibration_text, device, **options, **exact)
    # Attention is put together differently, and sums are float32: the last bits of a statistic differ. A code that
    # falls on the other side changes what the next block sees, so differences grow from block to block.
    assert equal_codes(tmp_path / "cpu", tmp_path / "cuda", "layers.0.") > 0.999
    assert equal_codes(tmp_path / "cpu", tmp_path / "cuda") > 0.99
    manifests = [json.loads((tmp_path / device / "quantkit.json").read_text()) for device in ("cpu", "cuda")]
    assert [manifest["device"] for manifest in manifests] == ["cpu", "pretend"]


def test_a_job_does_not_go_on_on_another_device(
    on_device: None, tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    stop = stop_at("blocks", 1)
    with pytest.raises(KeyboardInterrupt):
        convert(tiny_original, tmp_path / "out", calibration_text, "cuda", scales="minmax", on_progress=stop)
    with pytest.raises(RequestError, match="--device: pretend there, cpu here"):
        convert(tiny_original, tmp_path / "out", calibration_text, "cpu", scales="minmax", resume=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is one")
def test_a_gpu_that_is_not_there_is_refused(tiny_original: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="torch sees no CUDA device"):
        quantkit.convert(tiny_original, out=tmp_path / "out", device="cuda")


@pytest.mark.slow
def test_blocks_learn_on_a_device_by_the_channels_that_count(
    on_device: None, tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    """Signs of small gradients differ from the CPU's, so codes do; what was learned is as good."""
    given: dict[str, Any] = dict(method="tune", tune_steps=8, samples=12, distil=4, format="native")
    reports = {
        device: convert(tiny_original, tmp_path / device, calibration_text, device, **given, **exact)
        for device, exact in (("cpu", {"matmul_precision": "float32"}), ("cuda", {}))
    }
    assert equal_codes(tmp_path / "cpu", tmp_path / "cuda", "layers.0.") > 0.9
    for name, one in reports["cpu"].tuning.items():
        other = reports["cuda"].tuning[name]
        assert other["before"] == pytest.approx(one["before"], rel=0.1)
        assert other["after"] == pytest.approx(one["after"], rel=0.2)
