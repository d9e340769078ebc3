"""What we let bitsandbytes round, loaded by transformers and bitsandbytes on a CPU.

transformers asks for accelerate beside the library: it is installed into a folder of its own, through pip.
QUANTKIT_ACCELERATE may name such a folder that exists already.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import quantkit
from quantkit.core.scheme import OF_BITSANDBYTES

pytestmark = [pytest.mark.interop, pytest.mark.real]

IDS = list(range(1000, 1032))
READER = """
import json, sys, torch
from bitsandbytes import functional, nn
from transformers import AutoModelForCausalLM
ids = torch.tensor([json.loads(sys.argv[2])])

def weight(layer):
    if isinstance(layer, nn.Linear4bit):
        return functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return functional.int8_vectorwise_dequant(layer.weight.data, layer.weight.SCB)

with torch.no_grad():
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    for tensor in [*model.parameters(), *model.buffers()]:  # loaded in the dtype of config.json, whatever is asked
        if tensor.is_floating_point():
            tensor.data = tensor.data.float()
    layers = {n: m for n, m in model.named_modules() if isinstance(m, (nn.Linear4bit, nn.Linear8bitLt))}
    for name, layer in layers.items():
        dense = torch.nn.Linear(layer.in_features, layer.out_features, bias=False)
        dense.weight.copy_(weight(layer).reshape(dense.weight.shape))
        model.set_submodule(name, dense)
    dense = model(ids).logits[0, -1].tolist()
    for name, layer in layers.items():
        model.set_submodule(name, layer)
    packed = model(ids).logits[0, -1].tolist()
kinds = sorted({type(layer).__name__ for layer in layers.values()})
print(json.dumps({"kinds": kinds, "packed": packed, "dense": dense}))
"""
# Relative differences of logits. dense: of the numbers that the library decodes (measured: none). packed: of its
# kernels, which round scales to bfloat16 on a CPU with AVX512-BF16, and activations to int8 for LLM.int8 (0.031).
LIMITS = {"dense": 1e-5, "packed": 5e-3}
OF_INT8 = {"dense": 1e-5, "packed": 6e-2}


@pytest.fixture(scope="module")
def accelerate(tmp_path_factory: pytest.TempPathFactory) -> str:
    given = os.environ.get("QUANTKIT_ACCELERATE")
    if given:
        return given
    folder = tmp_path_factory.mktemp("accelerate")
    packages = ["--no-deps", "--target", str(folder), "accelerate", "psutil"]
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *packages], check=True, capture_output=True)
    return str(folder)


@pytest.mark.parametrize("scheme", OF_BITSANDBYTES)
def test_transformers_computes_our_logits(scheme: str, accelerate: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    quantkit.convert("smollm2-135m", out=out, format="bitsandbytes", scheme=scheme)
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["bnb_4bit_compute_dtype"] = "float32"  # else products are rounded to bfloat16
    (out / "config.json").write_text(json.dumps(config))
    environment = {**os.environ, "PYTHONPATH": accelerate}
    command = [sys.executable, "-c", READER, str(out), json.dumps(IDS)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads(done.stdout.strip().splitlines()[-1])
    assert theirs["kinds"] == ["Linear8bitLt" if scheme == "llm-int8" else "Linear4bit"]
    ours = quantkit.load(out, dequantize=True, dtype="float32", device="cpu")(torch.tensor([IDS]))[0, -1]
    for way, limit in (OF_INT8 if scheme == "llm-int8" else LIMITS).items():
        relative = float((torch.tensor(theirs[way]) - ours).norm() / ours.norm())
        print(scheme, way, relative)
        assert relative < limit, (way, relative)
