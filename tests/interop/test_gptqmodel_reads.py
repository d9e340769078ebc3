"""gptq and awq folders between quantkit and GPTQModel 7.6, in an environment of its own (made here, through pip).

GPTQModel is what transformers loads gptq and awq with. It runs half precision only; logits are compared at that
precision. QUANTKIT_GPTQMODEL_PYTHON may name the interpreter of such an environment that exists already.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import quantkit
from quantkit.checkpoint.open import open_source
from quantkit.checkpoint.tokenizer import write_tokenizer

pytestmark = [pytest.mark.interop, pytest.mark.real]

IDS = list(range(1000, 1032))
READER = """
import json, sys, torch
from gptqmodel import GPTQModel, BACKEND
model = GPTQModel.load(sys.argv[1], device="cpu", backend=getattr(BACKEND, sys.argv[2]), dtype=torch.float16)
with torch.no_grad():
    logits = model.model(torch.tensor([json.loads(sys.argv[3])])).logits[0, -1].float()
print("LOGITS", json.dumps(logits.tolist()))
"""
WRITER = """
import json, sys, torch
from gptqmodel import GPTQModel, QuantizeConfig
ids = [torch.randint(10, 40000, (64,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(8)]
model = GPTQModel.load(sys.argv[1], QuantizeConfig(**json.loads(sys.argv[3])), device="cpu")
model.quantize([{"input_ids": row, "attention_mask": [1] * 64} for row in ids], batch_size=1)
model.save(sys.argv[2])
"""


@pytest.fixture(scope="module")
def gptqmodel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = os.environ.get("QUANTKIT_GPTQMODEL_PYTHON")
    if given:
        return Path(given)
    folder = tmp_path_factory.mktemp("gptqmodel")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    version = torch.__version__.partition("+")[0]
    for packages in ([f"torch=={version}"], [f"torch=={version}", "gptqmodel==7.6.0"]):
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True, capture_output=True)
    return python


def run(python: Path, code: str, *arguments: object) -> str:
    # With fewer than 3 processors GPTQModel asks its own pool for more workers than it made, and stops.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "GPTQMODEL_CPU_WORKERS": "2"
    }
    command = [str(python), "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
    return done.stdout


def assert_same_logits(folder: Path, python: Path, backend: str) -> None:
    said = run(python, READER, folder, backend, json.dumps(IDS))
    line = next(line for line in reversed(said.splitlines()) if line.startswith("LOGITS "))
    theirs = torch.tensor(json.loads(line.removeprefix("LOGITS ")))
    ours = quantkit.load(folder, dequantize=True, dtype="float32", device="cpu")(torch.tensor([IDS]))[0, -1]
    assert float((theirs - ours).norm() / ours.norm()) < 4e-3  # measured: 7e-4 in float16; other zero points give 0.1


@pytest.mark.parametrize(
    ("form", "options", "backend"),
    [
        ("gptq", dict(symmetric=True), "GPTQ_TORCH"),  # groups of 64 and 128: rules in 'dynamic'
        ("gptq", dict(symmetric=False), "GPTQ_TORCH"),
        ("gptq", dict(symmetric=False, bits=3, group_size=64), "GPTQ_TORCH"),
        ("gptq", dict(symmetric=True, bits=8, group_size=None), "GPTQ_TORCH"),
        ("awq", dict(symmetric=False), "AWQ_TORCH"),
        ("awq", dict(symmetric=True), "AWQ_TORCH"),
    ],
    ids=str,
)
def test_gptqmodel_computes_our_logits(
    form: str, options: dict[str, Any], backend: str, gptqmodel: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    quantkit.convert("smollm2-135m", out=out, method="rtn", scales="minmax", format=form, **options)
    assert_same_logits(out, gptqmodel, backend)


@pytest.mark.parametrize(
    "options", [dict(sym=True), dict(sym=False), dict(sym=True, desc_act=True, act_group_aware=False)], ids=str
)
def test_we_read_what_gptqmodel_writes(options: dict[str, Any], gptqmodel: Path, tmp_path: Path) -> None:
    """A tiny random model with SmolLM2's tokenizer, quantized and saved by GPTQModel."""
    from transformers import AutoConfig, AutoModelForCausalLM

    source = open_source("smollm2-135m")
    torch.manual_seed(0)
    tiny = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    config = AutoConfig.for_model("llama", vocab_size=source.config["vocab_size"], tie_word_embeddings=True, **tiny)
    AutoModelForCausalLM.from_config(config, dtype=torch.float16).save_pretrained(tmp_path / "model")
    write_tokenizer(source, tmp_path / "model")
    asked = {"bits": 4, "group_size": 32, **options}
    run(gptqmodel, WRITER, tmp_path / "model", tmp_path / "theirs", json.dumps(asked))
    assert_same_logits(tmp_path / "theirs", gptqmodel, "GPTQ_TORCH")
