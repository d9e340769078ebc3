"""Converting on a GPU decides what a CPU decides, and goes on after a kill with the same bytes."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import tiny_model

import quantkit
from quantkit.algorithms.gptq import GPTQOptions, Loops, gptq
from quantkit.calibrate.capture import advance, observe
from quantkit.calibrate.transfer import offload
from quantkit.checkpoint.open import open_source
from quantkit.core.scheme import Scheme
from quantkit.formats.reader import QuantizedReader
from quantkit.model.arguments import BlockArguments

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CUDA = torch.device("cuda")
SMALL: dict[str, Any] = dict(samples=8, seq_len=64, group_size=32)


def problem(rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(4 * width, width, generator=generator) * (0.2 + torch.rand(width, generator=generator))
    return torch.randn(rows, width, generator=generator), x.t() @ x / len(x)


@pytest.mark.parametrize("shape", [(33, 160), (192, 576), (1000, 1024)], ids=str)
@pytest.mark.parametrize(
    "scheme", [Scheme(4, 64, False), Scheme(4, 128, True), Scheme(8, None, True)], ids=Scheme.describe
)
def test_the_kernel_decides_what_the_cpus_loop_decides(scheme: Scheme, shape: tuple[int, int]) -> None:
    from quantkit.runtime.kernels.triton.gptq import round_columns

    weight, hessian = problem(*shape)
    options = GPTQOptions(scales="minmax")
    here = gptq(weight, hessian, scheme, options).quantized
    there = gptq(weight.to(CUDA), hessian.to(CUDA), scheme, options, Loops(round_columns)).quantized.to("cpu")
    assert float((there.codes == here.codes).float().mean()) >= 0.999
    assert torch.equal(there.scales, here.scales)


def test_states_travel_while_a_block_works_and_arrive_whole() -> None:
    """Many batches on two streams: a batch that were overwritten too early would differ."""
    block = torch.nn.Sequential(
        torch.nn.Linear(256, 256, bias=False), torch.nn.Linear(256, 256, bias=False)
    ).requires_grad_(False)
    start = torch.randn(40, 16, 256, generator=torch.Generator().manual_seed(0))
    found = {}
    for device in ("cpu", "cuda"):
        states = [offload(batch.clone(), torch.device(device)) for batch in start.split(1)]
        block.to(device)
        (hessian,) = observe(block, states, BlockArguments((), {}), [("0",)])
        for _ in range(3):
            advance(block, states, BlockArguments((), {}))
        found[device] = torch.cat(states), hessian.result().double().cpu()
    for here, there in zip(found["cpu"], found["cuda"], strict=True):
        torch.testing.assert_close(there, here, rtol=1e-4, atol=1e-5)


def equal_codes(a: Path, b: Path, within: str = "") -> float:
    """Share of codes that are equal, of modules with ``within`` in their name.

    Of later blocks less can be asked: one code that falls on the other side changes what they see.
    """
    left, right = (QuantizedReader(open_source(folder)) for folder in (a, b))
    pairs = [(left.module(name), right.module(name)) for name in left.modules if within in name]
    equal = sum(int((x.codes == y.codes).sum()) for x, y in pairs)  # type: ignore[union-attr]
    return equal / sum(x.codes.numel() for x, _ in pairs)  # type: ignore[union-attr]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path / "source"
    vocabulary = {"<s>": 0, "</s>": 1, **{f"w{i}": i + 2 for i in range(98)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    tiny_model("llama", hidden_size=64, intermediate_size=128).save_pretrained(folder)
    fast.save_pretrained(folder)
    words = torch.randint(0, 98, (4000,), generator=torch.Generator().manual_seed(0)).tolist()
    (tmp_path / "text.txt").write_text(" ".join(f"w{i}" for i in words))
    return folder


@pytest.mark.parametrize(
    "options", [dict(method="gptq"), dict(method="rtn"), dict(method="awq", scales="minmax", kv_bits=8)], ids=str
)
def test_a_model_gets_the_codes_of_the_cpu(options: dict[str, Any], source: Path, tmp_path: Path) -> None:
    text = {} if options["method"] == "rtn" else {**SMALL, "calibration": str(tmp_path / "text.txt")}
    for device in ("cpu", "cuda"):
        report = quantkit.convert(source, out=tmp_path / device, device=device, **{"group_size": 32, **text, **options})
    assert report.peak_device_bytes > 0
    assert equal_codes(tmp_path / "cpu", tmp_path / "cuda", "layers.0.") >= 0.999
    assert equal_codes(tmp_path / "cpu", tmp_path / "cuda") >= 0.95


def test_a_killed_job_goes_on_with_the_same_bytes(source: Path, tmp_path: Path) -> None:
    options = {**SMALL, "calibration": str(tmp_path / "text.txt"), "device": "cuda"}
    quantkit.convert(source, out=tmp_path / "whole", **options)
    code = (
        "import os, signal, quantkit\nfrom quantkit.convert.job import states\nstates.EVERY, states.SHARE = 0.0, 0\n"
        "def killed(progress):\n"
        "    if (progress.stage, progress.done) == ('blocks', 2): os.kill(os.getpid(), signal.SIGKILL)\n"
        f"quantkit.convert({str(source)!r}, out={str(tmp_path / 'out')!r}, on_progress=killed, **{options!r})\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], check=False, env=environment).returncode == -signal.SIGKILL
    quantkit.convert(source, out=tmp_path / "out", resume=True, **options)
    digests = [
        {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted((tmp_path / name).glob("*.safetensors"))}
        for name in ("whole", "out")
    ]
    assert digests[0] == digests[1]


def test_six_bf16_products_are_a_float32_product() -> None:
    from quantkit.calibrate.matmul_precision import (
        choose_precision,
        gram_factors,
        matmul_precision,
        multiply,
        split_product,
    )

    generator = torch.Generator(CUDA).manual_seed(0)
    left, right = (torch.randn(size, device=CUDA, generator=generator) for size in ((512, 4096), (4096, 768)))
    exact = left.double() @ right.double()
    assert float((split_product(left, right, "bf16x6").double() - exact).norm() / exact.norm()) < 3e-6
    with matmul_precision(choose_precision("auto", CUDA)):
        first, second = gram_factors(left)
        gram, exact = multiply(first.t(), second), left.double().t() @ left.double()
    assert float((gram.double() - exact).norm() / exact.norm()) < 3e-6


@pytest.mark.real
@pytest.mark.parametrize("products", ["float32", "bf16x6"])
def test_a_real_model_gets_the_codes_of_the_cpu(products: str, smollm2: Path, wikipedia: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = dict(samples=16, seq_len=512, group_size=64, calibration="wikipedia-sample")
    quantkit.convert(smollm2, out=tmp_path / "cpu", device="cpu", matmul_precision="float32", **options)
    report = quantkit.convert(smollm2, out=tmp_path / "cuda", device="cuda", matmul_precision=products, **options)
    assert report.peak_device_bytes < 2 * 10**9
    whole = equal_codes(tmp_path / "cpu", tmp_path / "cuda")
    print(f"{products}: {whole:.4%} of all codes equal")
    assert equal_codes(tmp_path / "cpu", tmp_path / "cuda", "layers.0.") >= 0.999
    assert whole >= 0.8
