"""What we write, loaded by transformers 5.17 and its compressed-tensors library in an environment of their own.

5.17 is the oldest version that the GPU machines of this project run; the environment that runs the other tests has the
newest.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import quantkit

pytestmark = [pytest.mark.interop, pytest.mark.real]

IDS = list(range(1000, 1032))
READER = """
import json, sys, torch, transformers
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
with torch.no_grad():
    logits = model(torch.tensor([json.loads(sys.argv[2])])).logits[0, -1]
print(json.dumps({"version": transformers.__version__, "logits": logits[:500].tolist()}))
"""


@pytest.fixture(scope="module")
def python517(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("transformers517")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    version = torch.__version__.partition("+")[0]
    for packages in ([f"torch=={version}"], ["transformers==5.17.0", "compressed-tensors"]):
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True, capture_output=True)
    return python


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 64), (8, None)])
def test_transformers_517_computes_our_logits(
    bits: int, group_size: int | None, symmetric: bool, python517: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    quantkit.convert(
        "smollm2-135m", out=out, method="rtn", scales="minmax", bits=bits, group_size=group_size, symmetric=symmetric
    )
    done = subprocess.run([str(python517), "-c", READER, str(out), json.dumps(IDS)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads(done.stdout.strip().splitlines()[-1])
    assert theirs["version"] == "5.17.0"
    ours = quantkit.load(out, dequantize=True, dtype="float32")(torch.tensor([IDS]))[0, -1, :500]
    # they may compute in the scales' dtype before casting; measured differences stay below 0.02 at logits of about 10
    torch.testing.assert_close(torch.tensor(theirs["logits"]), ours, rtol=1e-2, atol=5e-2)
