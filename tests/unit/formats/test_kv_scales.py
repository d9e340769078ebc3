"""quantkit_kv.safetensors: what is written is read, and a file that is not whole says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from quantkit.core.kvscheme import SCALE_NAMES, KVPlan, KVScheme, LayerScales
from quantkit.errors import CheckpointError
from quantkit.formats.kv_scales import FILE_NAME, read_kv_plan, write_kv_plan

NAMES = ("model.layers.0.self_attn", "model.layers.1.self_attn")


def scales(seed: int = 0) -> LayerScales:
    made = torch.Generator().manual_seed(seed)
    k, v = (torch.rand(2, 8, generator=made) + 0.1 for _ in range(2))
    return LayerScales(k, -7 * k, v, -3 * v)


def plan(**changes: Any) -> KVPlan:
    layers = {NAMES[0]: KVScheme.of("k4v2"), NAMES[1]: KVScheme.of(2)}
    return KVPlan(
        **{"scheme": KVScheme.of(4), "layers": layers, "static": {n: scales(i) for i, n in enumerate(NAMES)}, **changes}
    )


def same(a: KVPlan, b: KVPlan) -> bool:
    return (a.scheme, dict(a.layers), set(a.static)) == (b.scheme, dict(b.layers), set(b.static)) and all(
        torch.equal(getattr(a.static[name], part), getattr(b.static[name], part))
        for name in a.static
        for part in SCALE_NAMES
    )


@pytest.mark.parametrize(
    "written",
    [
        plan(),
        plan().with_scales("static"),
        plan(scheme=KVScheme.of("fp8"), layers=dict.fromkeys(NAMES, KVScheme.of("fp8"))),
        KVPlan(KVScheme(3, 16, group_size=32, recent=7, first=0)),
    ],
    ids=["layers", "static", "fp8", "uniform without scales"],
)
def test_a_plan_reads_back_as_it_was_written(written: KVPlan, tmp_path: Path) -> None:
    write_kv_plan(tmp_path, written)
    found = read_kv_plan(tmp_path)
    assert found is not None
    assert same(found, written)


def test_a_folder_without_the_file_says_nothing(tmp_path: Path) -> None:
    assert read_kv_plan(tmp_path) is None


def test_the_same_plan_gives_the_same_bytes(tmp_path: Path) -> None:
    first = write_kv_plan(tmp_path, plan()).read_bytes()
    turned = plan(static={n: scales(i) for i, n in reversed(list(enumerate(NAMES)))})
    assert write_kv_plan(tmp_path, turned).read_bytes() == first


def rewritten(folder: Path, change: Any) -> None:
    """The file of ``plan()`` again, after ``change(meta, tensors)``."""
    from safetensors import safe_open

    path = write_kv_plan(folder, plan().with_scales("static"))
    with safe_open(path, framework="pt") as file:
        meta = json.loads(file.metadata()["quantkit_kv"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(meta, tensors)
    save_file(tensors, path, metadata={"quantkit_kv": json.dumps(meta)})


@pytest.mark.parametrize("part", SCALE_NAMES)
def test_a_missing_scale_is_named(part: str, tmp_path: Path) -> None:
    rewritten(tmp_path, lambda meta, tensors: tensors.pop(f"{NAMES[1]}.{part}"))
    with pytest.raises(CheckpointError, match=rf"lacks '{NAMES[1]}.{part}'.*again with --kv-bits"):
        read_kv_plan(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m, t: t.update(other=torch.ones(1)), "holds 'other', which belongs to no module"),
        (lambda m, t: m["static"].remove(NAMES[1]) or [t.pop(f"{NAMES[1]}.{p}") for p in SCALE_NAMES],
         f"lacks the static scales of '{NAMES[1]}'"),
        (lambda m, t: (m.update(static=[], layers={}), t.clear()), "holds no static scales"),
        (lambda m, t: m.update(version=1), "version 1, an older"),
        (lambda m, t: m.update(version=3), "version 3, this quantkit reads version 2"),
        (lambda m, t: m.update(version=True), "version True"),
        (lambda m, t: m.clear(), "version None"),
        (lambda m, t: m.pop("layers"), "metadata is damaged"),
        (lambda m, t: m.update(extra=1), "metadata is damaged"),
        (lambda m, t: m["scheme"].pop("recent"), "metadata is damaged"),
        (lambda m, t: m["scheme"].update(keys=5), "metadata is damaged"),
        (lambda m, t: m["scheme"].update(keys=4.0), "metadata is damaged"),
        (lambda m, t: m["scheme"].update(scales="silent"), "metadata is damaged"),
        (lambda m, t: m["layers"].update({NAMES[0]: 4}), "metadata is damaged"),
        (lambda m, t: m.update(layers=[4]), "metadata is damaged"),
        (lambda m, t: m.update(static=NAMES[0]), "metadata is damaged"),
        (lambda m, t: m.update(static=[NAMES[0], *m["static"]]), "metadata is damaged"),
        (lambda m, t: t.update({f"{NAMES[0]}.k_scale": torch.zeros(2, 8)}), "not finite and positive"),
        (lambda m, t: t.update({f"{NAMES[0]}.v_low": torch.zeros(2, 4)}), "expected float32"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_right_is_refused(change: Any, said: str, tmp_path: Path) -> None:
    rewritten(tmp_path, change)
    with pytest.raises(CheckpointError) as caught:
        read_kv_plan(tmp_path)
    message = str(caught.value)
    assert said in message
    assert FILE_NAME in message
    assert "again with --kv-bits" in message


def test_half_a_file_is_refused(tmp_path: Path) -> None:
    path = write_kv_plan(tmp_path, plan())
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="not a whole file"):
        read_kv_plan(tmp_path)


def test_a_plan_without_the_scales_it_needs_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="lacks the static scales"):
        write_kv_plan(tmp_path, plan(static={}).with_scales("static"))
    assert not list(tmp_path.iterdir())


def test_low_ends_below_one_are_ordinary() -> None:
    scale, low = torch.full((2, 8), 0.01), torch.full((2, 8), -0.3)
    LayerScales(scale, low, scale, torch.zeros(2, 8))
    with pytest.raises(CheckpointError, match="v_low holds 1e\\+38"):
        LayerScales(scale, low, scale, torch.full((2, 8), 1e38))
