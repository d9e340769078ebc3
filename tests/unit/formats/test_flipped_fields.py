"""One field of a quantized checkpoint is changed: every format names it, or what it contradicts, in its error."""

from __future__ import annotations

import contextlib
import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.core import affine
from quantkit.core.kvscheme import LayerScales
from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError, QuantkitWarning
from quantkit.formats import FORMATS
from quantkit.formats.interface import CheckpointLayout
from quantkit.formats.reader import QuantizedReader

MODULE = "model.layers.0.mlp.up_proj"
FORMS = ("native", "compressed-tensors", "gptq", "awq")
SCALES = {"native": "scales", "compressed-tensors": "weight_scale", "gptq": "scales", "awq": "scales"}
ZEROS = {"native": "qzeros", "compressed-tensors": "weight_zero_point", "gptq": "qzeros", "awq": "qzeros"}
CODES = {"native": "qweight", "compressed-tensors": "weight_packed", "gptq": "qweight", "awq": "qweight"}


class Stored:
    """A checkpoint of one module, in memory."""

    path = Path("model")

    def __init__(self, form: str, dtype: str = "float16", size: int | None = 32) -> None:
        scheme = Scheme(4, size, False, dtype)
        weight = torch.randn((64, 128), generator=torch.Generator().manual_seed(0))
        scales, zeros = affine.minmax_params(weight, scheme)
        q = QuantTensor(affine.quantize(weight, scales, zeros, scheme), scales, zeros, scheme)
        self.tensors: dict[str, Tensor] = FORMATS[form].encode(q)
        layout = CheckpointLayout({MODULE: scheme})
        self.config: dict[str, Any] = json.loads(json.dumps(FORMATS[form].config(layout, "0")))

    def names(self) -> list[str]:
        return [f"{MODULE}.{part}" for part in self.tensors]

    def info(self, name: str) -> Tensor:
        return self.read(name)

    def read(self, name: str) -> Tensor:
        return self.tensors[name.removeprefix(f"{MODULE}.")]

    def quantization(self) -> dict[str, Any]:
        return self.config


def refused(stored: Stored, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        QuantizedReader(stored).module(MODULE)
    assert "\n" not in str(caught.value)
    for word in ("model: ", *words):
        assert word in str(caught.value), caught.value


@pytest.mark.parametrize("form", FORMS)
def test_an_unchanged_field_is_read(form: str) -> None:
    assert QuantizedReader(Stored(form)).module(MODULE).shape == (64, 128)


@pytest.mark.parametrize("value", [65504.0, float("nan"), float("inf"), -1.0, 0.0])
@pytest.mark.parametrize("form", FORMS)
def test_a_scale_that_no_writer_stores(form: str, value: float) -> None:
    stored = Stored(form)
    scales = stored.tensors[SCALES[form]].clone()
    scales[1, 2] = value
    stored.tensors[SCALES[form]] = scales
    refused(stored, MODULE, SCALES[form])


@pytest.mark.parametrize("value", [1e38, 1e-39])
@pytest.mark.parametrize("form", ["native", "compressed-tensors"])
def test_a_scale_in_bfloat16_beyond_all_weights(form: str, value: float) -> None:
    stored = Stored(form, "bfloat16")
    stored.tensors[SCALES[form]][0, 0] = value
    refused(stored, MODULE, SCALES[form])


@pytest.mark.parametrize("which", [SCALES, ZEROS, CODES])
@pytest.mark.parametrize("form", FORMS)
def test_a_tensor_of_another_shape(form: str, which: dict[str, str]) -> None:
    changes: list[Callable[[Tensor], Tensor]] = [
        lambda t: t[:-1],
        lambda t: t[:, :-1],
        lambda t: t[:0],
        lambda t: t.unsqueeze(0),
        lambda t: t.flatten(),
        lambda t: t.t(),
        lambda t: t.to(torch.float32) if not t.is_floating_point() else t.to(torch.int32),
    ]
    for change in changes:
        stored = Stored(form)
        changed = change(stored.tensors[which[form]]).contiguous()
        if changed.shape == stored.tensors[which[form]].shape and changed.dtype == stored.tensors[which[form]].dtype:
            continue  # a square matrix transposed
        stored.tensors[which[form]] = changed
        refused(stored, MODULE)


@pytest.mark.parametrize("form", FORMS)
def test_a_tensor_that_is_missing(form: str) -> None:
    for part in Stored(form).tensors:
        stored = Stored(form)
        del stored.tensors[part]
        if part == "g_idx":  # a file without it has its groups in order
            assert QuantizedReader(stored).module(MODULE).shape == (64, 128)
        else:
            with pytest.raises(CheckpointError, match="model: "):
                QuantizedReader(stored).module(MODULE)


def test_groups_that_are_not_stored() -> None:
    for value in (-1, 99):
        stored = Stored("gptq")
        stored.tensors["g_idx"] = stored.tensors["g_idx"].clone()
        stored.tensors["g_idx"][5] = value
        refused(stored, MODULE, "g_idx")


def test_a_zero_point_beyond_the_codes() -> None:
    """The one format whose fields could hold one."""
    stored = Stored("native")
    stored.tensors["qzeros"] = torch.full_like(stored.tensors["qzeros"], -1)
    refused(stored, MODULE, "zeros run to 31", "holds 0 to 16")


BITS: dict[str, Callable[[dict[str, Any], Any], None]] = {
    "native": lambda config, value: config["modules"][MODULE].__setitem__("bits", value),
    "compressed-tensors": lambda config, value: weights_of(config).__setitem__("num_bits", value),
    "gptq": lambda config, value: config.__setitem__("bits", value),
    "awq": lambda config, value: config.__setitem__("bits", value),
}


def weights_of(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = config["config_groups"]["group_0"]["weights"]
    return found


@pytest.mark.parametrize("value", [2, 3, 8, 0, -4, 64, 10**30, 4.5, "four", None, [4], {}, True, float("nan")])
@pytest.mark.parametrize("size", [32, None])
@pytest.mark.parametrize("form", FORMS)
def test_bits_that_contradict_the_packed_tensor(form: str, size: int | None, value: Any) -> None:
    stored = Stored(form, size=size)
    BITS[form](stored.config, value)
    refused(stored, MODULE)


@pytest.mark.parametrize("form", FORMS)
def test_every_entry_of_the_config_may_be_anything(form: str) -> None:
    """No value of any entry ends in anything but a module or a CheckpointError."""
    values: list[Any] = [None, -1, 10**40, 1e308, "x", [], [[]], {}, {"x": {"y": 1}}, True, ["("], "re:("]
    for path in paths(Stored(form).config):
        for value in values:
            stored = Stored(form)
            put(stored.config, path, copy.deepcopy(value))
            with contextlib.suppress(CheckpointError), warnings.catch_warnings():
                warnings.simplefilter("ignore", QuantkitWarning)
                QuantizedReader(stored).module(MODULE)


def paths(data: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    entries = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [place for key, value in entries for place in [(*here, key), *paths(value, (*here, key))]]


def put(data: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        data = data[key]
    data[path[-1]] = value


@pytest.mark.parametrize("value", [1e38, 1e-45, 65504.0, float("nan"), float("inf"), -1.0, 0.0])
@pytest.mark.parametrize("field", ["k_scale", "v_scale"])
def test_a_scale_of_the_kv_cache_that_no_cache_needs(field: str, value: float) -> None:
    parts = {name: torch.ones(2, 4) for name in ("k_scale", "k_low", "v_scale", "v_low")}
    LayerScales(**parts)
    parts[field] = parts[field].clone()
    parts[field][1, 1] = value
    with pytest.raises(CheckpointError, match=field):
        LayerScales(**parts)


@pytest.mark.parametrize("value", [[True], {}, "yes", 1])
def test_a_symmetry_that_is_neither_true_nor_false(value: Any) -> None:
    stored = Stored("compressed-tensors")
    config = copy.deepcopy(stored.quantization())
    weights_of(config)["symmetric"] = value
    stored.quantization = lambda: config  # type: ignore[method-assign]
    refused(stored, MODULE, "symmetric is", "expected true or false")
