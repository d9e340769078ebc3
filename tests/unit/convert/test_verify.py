"""Reading back: one damaged byte, one tensor more or less, and it is told by name; a sound folder is counted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.algorithms.kv import KVObserver
from quantkit.algorithms.rtn import rtn
from quantkit.checkpoint.writer import CheckpointWriter, WrittenTensor, write_json
from quantkit.convert.options.kv_request import CacheRequest
from quantkit.convert.output.verify import CastLoss, verify_folder, verify_kv
from quantkit.convert.results import decision_sha256
from quantkit.convert.stages.kv_cache import decide_cache
from quantkit.core.kvscheme import KVPlan, KVScheme
from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError
from quantkit.formats import writer_format
from quantkit.formats.interface import CheckpointLayout
from quantkit.formats.kv_scales import write_kv_plan

SCHEME = Scheme(4, 16, False)
MODULES = ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj")
NORM = "model.norm.weight"


@dataclass
class Written:
    folder: Path
    digests: dict[str, str]
    entries: dict[str, WrittenTensor]
    quantized: dict[str, QuantTensor]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """Two quantized modules and a norm, in the native format."""
    form, made = writer_format("native"), torch.Generator().manual_seed(0)
    quantized = {name: rtn(torch.randn(8, 32, generator=made), SCHEME).quantized for name in MODULES}
    writer = CheckpointWriter(tmp_path / "out", stem=form.stem)
    for name, q in quantized.items():
        writer.add_part(name, {f"{name}.{part}": value for part, value in form.encode(q).items()})
    writer.add_part("plain", {NORM: torch.randn(32, generator=made)})
    writer.assemble()
    layout = CheckpointLayout(dict.fromkeys(MODULES, SCHEME), [], [])
    write_json(writer.folder / "config.json", {"model_type": "llama", "quantization_config": form.config(layout, "1")})
    writer.commit()
    return Written(tmp_path / "out", {n: decision_sha256(q) for n, q in quantized.items()}, writer.entries, quantized)


def damage(folder: Path, name: str) -> None:
    """Change the last byte of a tensor."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors[name].view(torch.uint8).view(-1)[-1] ^= 1
    save_file(tensors, file, {"format": "pt"})


def test_every_tensor_of_a_sound_folder_is_compared(written: Written) -> None:
    assert verify_folder(written.folder, written.digests, written.entries) == len(written.entries)
    (file,) = written.folder.glob("*.safetensors")
    assert (
        len(written.entries)
        == len(load_file(file))
        == 1 + sum(len(writer_format("native").encode(q)) for q in written.quantized.values())
    )


@pytest.mark.parametrize("module", MODULES)
def test_a_changed_bit_of_a_quantized_module_is_told_by_its_name(module: str, written: Written) -> None:
    damage(written.folder, f"{module}.qweight")
    with pytest.raises(CheckpointError, match=f"{module} reads back different from what was quantized"):
        verify_folder(written.folder, written.digests, written.entries)


def test_a_changed_bit_of_another_tensor_is_told_by_its_name(written: Written) -> None:
    damage(written.folder, NORM)
    with pytest.raises(CheckpointError, match=f"{NORM} reads back different from what was written"):
        verify_folder(written.folder, written.digests, written.entries)


def test_a_tensor_or_a_module_too_many_or_too_few_is_told_by_its_name(written: Written) -> None:
    fewer = {name: entry for name, entry in written.entries.items() if name != NORM}
    with pytest.raises(CheckpointError, match=f"tensors written and read differ: 1 names, first '{NORM}'"):
        verify_folder(written.folder, written.digests, fewer)
    more = {**written.digests, "lm_head": "0"}
    with pytest.raises(CheckpointError, match="quantized modules written and read differ: 1 names, first 'lm_head'"):
        verify_folder(written.folder, more, written.entries)


def test_the_loss_of_a_cast_to_bfloat16_is_that_of_all_modules_together(written: Written) -> None:
    cast, wanted, energy = CastLoss(), 0.0, 0.0
    verify_folder(written.folder, written.digests, written.entries, cast)
    for q in written.quantized.values():
        assert q.zeros is not None
        steps = q.codes.double().reshape(8, 2, 16) - q.zeros.double()[..., None]
        exact, rounded = (steps * s.double()[..., None] for s in (q.scales, q.scales.to(torch.bfloat16)))
        wanted += float((rounded - exact).square().sum())
        energy += float(exact.square().sum())
    assert cast.squared == pytest.approx(wanted, rel=1e-4)
    assert cast.energy == pytest.approx(energy, rel=1e-4)
    assert f"changes the quantized weights by {(wanted / energy) ** 0.5:.2%} (run it" in cast.note()


def kv_plan(seed: int = 0) -> KVPlan:
    request, made, layers = CacheRequest(KVScheme.of("k4v2", "static")), torch.Generator().manual_seed(seed), {}
    for index in range(2):
        observer = KVObserver()
        observer.add(*(torch.randn(1, 2, 50, 8, generator=made) for _ in range(2)))
        layers[f"model.layers.{index}.self_attn"] = observer.ranges(request.candidates())
    return decide_cache(request, layers)


def test_a_plan_of_the_cache_is_compared_scale_by_scale(written: Written) -> None:
    plan = kv_plan()
    write_kv_plan(written.folder, plan)
    assert verify_kv(written.folder, plan) == 2 * 4
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.self_attn\.k_scale reads back different"):
        verify_kv(written.folder, kv_plan(seed=1))
    with pytest.raises(CheckpointError, match="the bits of the KV cache read back different"):
        verify_kv(written.folder, replace(plan, scheme=KVScheme.of("k8v8", "static")))


def test_a_plan_that_is_missing_or_was_never_decided_is_told(written: Written) -> None:
    plan = kv_plan()
    assert verify_kv(written.folder, None) == 0
    with pytest.raises(CheckpointError, match="lacks the plan of a KV cache"):
        verify_kv(written.folder, plan)
    write_kv_plan(written.folder, plan)
    with pytest.raises(CheckpointError, match="holds a plan for a KV cache"):
        verify_kv(written.folder, None)
