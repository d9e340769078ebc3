"""``import quantkit.hf``: transformers loads native folders with quantkit's layers.

It computes what quantkit computes.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import tiny_model as tiny_architecture

import quantkit as qk
from quantkit.checkpoint import writer
from quantkit.errors import QuantkitError, UnsupportedModel
from quantkit.runtime.layers.embedding import QuantEmbedding
from quantkit.runtime.layers.linear import QuantLinear

IDS = torch.tensor([[5, 9, 130, 77, 201, 14, 8, 300]])


@pytest.fixture(autouse=True)
def registered() -> None:
    import quantkit.hf

    quantkit.hf.register()


def convert(source: Path, out: Path, **options: Any) -> Path:
    qk.convert(source, out=out, format="native", **{"method": "rtn", "group_size": 32, **options})
    return out


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def both(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        return loaded(folder)(IDS).logits, qk.load(folder, device="cpu", dtype="float32", head_bits=16)(IDS)


@pytest.mark.parametrize(
    "options",
    [
        dict(bits=3),
        dict(bits=5, symmetric=True,
             rules=["*down_proj=bits:8,group:channel", "*q_proj=keep", "*k_proj=keep", "*v_proj=keep"]),
        dict(rules=["lm_head=bits:8"]),
        dict(activations="int8", bits=8, group_size=None, symmetric=True),
    ],
    ids=["3 bits", "mixed", "tied head", "int8 activations"],
)  # fmt: skip
def test_transformers_computes_what_quantkit_computes(
    options: dict[str, Any], tiny_original: Path, tmp_path: Path
) -> None:
    theirs, ours = both(convert(tiny_original, tmp_path / "out", **options))
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)


def test_nothing_is_held_as_floats_that_is_stored_packed(tiny_original: Path, tmp_path: Path) -> None:
    model = loaded(convert(tiny_original, tmp_path / "out", rules=["lm_head=bits:8"]))
    assert isinstance(model.model.embed_tokens, QuantEmbedding)
    assert isinstance(model.lm_head, QuantLinear)
    assert model.lm_head.packed is model.model.embed_tokens.packed
    assert all(parameter.dim() == 1 for parameter in model.parameters())  # norms


def test_generating_through_transformers_gives_quantkits_text(tiny_original: Path, tmp_path: Path) -> None:
    folder = convert(tiny_original, tmp_path / "out")
    theirs = loaded(folder).generate(IDS, max_new_tokens=8, do_sample=False)[0, IDS.shape[1] :]
    model, ids = qk.load(folder, device="cpu", dtype="float32", head_bits=16), IDS
    for _ in range(8):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=1)
    assert theirs.tolist() == ids[0, IDS.shape[1] :].tolist()


def test_sharded_folders_load(tiny_original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(writer.CheckpointWriter.__init__.__kwdefaults__, "shard_bytes", 40_000)
    folder = convert(tiny_original, tmp_path / "out")
    assert len(list(folder.glob("quantkit-*.safetensors"))) > 1
    theirs, ours = both(folder)
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)


def test_a_calibrated_cache_that_is_not_used_is_said(
    tiny_original: Path, calibration_text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = dict(method="rtn", kv_bits=8, calibration=str(calibration_text), samples=2, seq_len=32)
    folder = convert(tiny_original, tmp_path / "out", **options)
    logging.getLogger("transformers").propagate = True
    loaded(folder)
    assert "quantkit.load uses it" in caplog.text


def test_what_cannot_be_loaded_this_way_is_refused(tiny_original: Path, tmp_path: Path) -> None:
    tiny_architecture("mixtral", vocab_size=384).save_pretrained(tmp_path / "experts")
    for file in tiny_original.glob("token*"):
        shutil.copy(file, tmp_path / "experts")
    with pytest.raises(UnsupportedModel, match=r"experts as one tensor .* Use quantkit.load"):
        loaded(convert(tmp_path / "experts", tmp_path / "mixtral"))
    folder = convert(tiny_original, tmp_path / "out")
    model = loaded(folder)
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path / "saved")
    (folder / "quantkit.safetensors").unlink()
    with pytest.raises((OSError, QuantkitError), match=r"quantkit\.safetensors"):
        loaded(folder)


def test_importing_twice_and_in_any_order_registers_once() -> None:
    code = (
        "import transformers, importlib, quantkit.hf\nimportlib.reload(quantkit.hf)\n"
        "from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING\n"
        "assert AUTO_QUANTIZER_MAPPING['quantkit'].__module__ == 'quantkit.hf'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
