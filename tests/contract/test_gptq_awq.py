"""gptq and awq files: golden words, the quirks of files in the wild, what is refused and with which remedy."""

from __future__ import annotations

import json
import re
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantkit.core import affine
from quantkit.core.qtensor import BlockTensor, QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError, QuantkitWarning
from quantkit.formats import writer_format
from quantkit.formats.awq import AWQ
from quantkit.formats.gptq import GPTQ
from quantkit.formats.gptq_rules import override_for, pattern
from quantkit.formats.interface import CheckpointLayout


def quantized(scheme: Scheme, shape: tuple[int, int], seed: int = 0) -> QuantTensor:
    w = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    scales, zeros = affine.minmax_params(w, scheme)
    return QuantTensor(affine.quantize(w, scales, zeros, scheme), scales, zeros, scheme)


def words(tensor: Tensor) -> list[str]:
    return [f"{word & 0xFFFFFFFF:08x}" for word in tensor.flatten().tolist()]


def of_codes(codes: Tensor, scheme: Scheme, zero: int | None = None) -> QuantTensor:
    groups = (codes.shape[0], scheme.groups(codes.shape[1]))
    zeros = None if zero is None else torch.full(groups, zero, dtype=torch.int16)
    return QuantTensor(codes.to(torch.uint8), torch.ones(groups, dtype=torch.float16), zeros, scheme)


def config_of(form: Any, module: str, scheme: Scheme) -> dict[str, Any]:
    return dict(json.loads(json.dumps(form.config(CheckpointLayout({module: scheme}), "0"))))


def test_gptq_golden_words() -> None:
    along_k = torch.arange(8).expand(8, 8)
    parts = GPTQ.encode(of_codes(along_k, Scheme(4, None, True)))
    assert words(parts["qweight"]) == ["76543210"] * 8
    assert words(parts["qzeros"]) == ["77777777"]
    assert words(GPTQ.encode(of_codes(along_k, Scheme(4, None, False), 8))["qzeros"]) == ["88888888"]
    eight = of_codes(torch.tensor([[0, 127, 128, 255]]).expand(4, 4), Scheme(8, None, True))
    assert words(GPTQ.encode(eight)["qweight"]) == ["ff807f00"] * 4
    assert words(GPTQ.encode(eight)["qzeros"]) == ["7f7f7f7f"]
    three = GPTQ.encode(of_codes(torch.arange(32).remainder(8).expand(32, 32), Scheme(3, None, True)))
    assert words(three["qweight"].t()[0]) == ["88fac688", "c688fac6", "fac688fa"]
    assert three["g_idx"].tolist() == [0] * 32


def test_awq_golden_words() -> None:
    q = of_codes(torch.arange(8)[:, None].expand(8, 32), Scheme(4, 32, True))
    parts = AWQ.encode(q)
    assert words(parts["qweight"]) == ["75316420"] * 32
    assert words(parts["qzeros"]) == ["88888888"]
    assert list(parts["qweight"].shape) == [32, 1]


@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    rows=st.integers(1, 3),
    groups=st.integers(1, 4),
    size=st.sampled_from([32, 64, 96, 128, None]),
    symmetric=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_any_supported_shape_round_trips(
    bits: int, rows: int, groups: int, size: int | None, symmetric: bool, seed: int
) -> None:
    scheme = Scheme(bits, size, symmetric)
    shape = (32 * rows, groups * (size or 32))
    q = quantized(scheme, shape, seed)
    for form in (GPTQ, AWQ):
        if form.supports(scheme, *shape) is None:
            assert form.decode(form.encode(q), scheme).equal(q)
    assert GPTQ.supports(scheme, *shape) is None


def test_dequantizing_the_files_by_the_readers_formula_gives_our_numbers() -> None:
    """w[n, k] = (q[k, n] - z[g_idx[k], n]) * s[g_idx[k], n], unpacked here bit by bit, independent of our packing."""
    scheme = Scheme(3, 32, False)
    q = quantized(scheme, (32, 96))
    parts = GPTQ.encode(q)

    def field(stream: list[int], i: int) -> int:
        value = sum((word & 0xFFFFFFFF) << (32 * j) for j, word in enumerate(stream))
        return (value >> (3 * i)) & 7

    for n, k in [(0, 0), (3, 10), (31, 95), (17, 64), (5, 31)]:
        group = int(parts["g_idx"][k])
        code = field(parts["qweight"][:, n].tolist(), k)
        zero = field(parts["qzeros"][group].tolist(), n)
        assert (code - zero) * float(parts["scales"][group, n]) == float(q.dequantize()[n, k])


def test_a_symmetric_v1_file_that_stores_zeros_as_v2_is_read_as_v2_with_a_warning() -> None:
    scheme = Scheme(4, 32, True)
    q = quantized(scheme, (8, 64))
    parts = GPTQ.encode(q)
    parts["qzeros"] = torch.full_like(parts["qzeros"], -0x77777778)  # 0x88888888
    with pytest.warns(QuantkitWarning, match="v1 but stores its zero points as v2"):
        read = GPTQ.read_module("x", parts, config_of(GPTQ, "x", scheme))
    assert isinstance(read, QuantTensor)
    assert read.equal(q)


def test_an_asymmetric_v1_file_adds_one_to_each_field_and_warns_where_readers_differ() -> None:
    scheme = Scheme(4, 32, False)
    q = of_codes(torch.arange(32).remainder(16).expand(8, 32), scheme, 5)
    config = {**config_of(GPTQ, "x", scheme), "checkpoint_format": "gptq", "format": "gptq"}
    parts = GPTQ.encode(q)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read = GPTQ.read_module("x", parts, config)
    assert isinstance(read, QuantTensor)
    assert read.zeros is not None
    assert set(read.zeros.flatten().tolist()) == {6}
    parts["qzeros"] = torch.full_like(parts["qzeros"], -1)  # every field 15
    with pytest.warns(QuantkitWarning, match="read as 0"):
        read = GPTQ.read_module("x", parts, config)
    assert isinstance(read, QuantTensor)
    assert read.zeros is not None
    assert set(read.zeros.flatten().tolist()) == {0}


def test_act_order_is_dequantized_exactly_as_blocks() -> None:
    scheme = Scheme(4, 32, True)
    q = quantized(scheme, (8, 96))
    order = torch.randperm(96, generator=torch.Generator().manual_seed(1))
    parts = GPTQ.encode(QuantTensor(q.codes[:, order], q.scales, None, scheme))
    parts["g_idx"] = (order // 32).to(torch.int32)
    config = {**config_of(GPTQ, "x", scheme), "desc_act": True}
    read = GPTQ.read_module("x", parts, config)
    assert isinstance(read, BlockTensor)
    assert read.kind == "gptq act-order"
    assert torch.equal(read.dequantize(), q.dequantize()[:, order])
    trivial = GPTQ.read_module("x", GPTQ.encode(q), config)  # says act-order, but the groups are contiguous
    assert isinstance(trivial, QuantTensor)
    assert trivial.equal(q)


def test_a_missing_index_means_contiguous_groups() -> None:
    scheme = Scheme(4, 32, True)
    q = quantized(scheme, (8, 64))
    parts = GPTQ.encode(q)
    del parts["g_idx"]
    assert GPTQ.modules(["x.qweight", "x.qzeros", "x.scales"], {})["x"] == ("qweight", "qzeros", "scales")
    read = GPTQ.read_module("x", parts, config_of(GPTQ, "x", scheme))
    assert isinstance(read, QuantTensor)
    assert read.equal(q)


def test_a_short_last_group_of_gptqmodel_is_read() -> None:
    scheme = Scheme(4, 128, True)
    q = quantized(scheme, (8, 576))
    assert GPTQ.supports(scheme, 8, 576) is not None
    read = GPTQ.read_module("x", GPTQ.encode(q), config_of(GPTQ, "x", scheme))
    assert isinstance(read, QuantTensor)
    assert read.equal(q)


@pytest.mark.parametrize(
    ("form", "config", "words"),
    [
        (GPTQ, {"checkpoint_format": "marlin"}, "'marlin' is not read"),
        (GPTQ, {"is_marlin_format": True}, "'marlin' is not read"),
        (GPTQ, {"format": "gptq_p"}, "'gptq_p' is not read"),
        (AWQ, {"version": "gemv_fast"}, "'gemv_fast' has another layout"),
    ],
    ids=str,
)
def test_other_layouts_are_refused_by_name(form: Any, config: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        form.modules(["x.qweight"], config)


def test_a_config_that_contradicts_the_tensors_is_refused() -> None:
    asymmetric = quantized(Scheme(4, 32, False), (8, 64))
    for form, key in ((GPTQ, {"sym": True}), (AWQ, {"zero_point": False})):
        config = {**config_of(form, "x", asymmetric.scheme), **key}
        with pytest.raises(CheckpointError, match=r"other zero points|other than 8"):
            form.read_module("x", form.encode(asymmetric), config)
        config = {**config_of(form, "x", asymmetric.scheme), "group_size": 16}
        with pytest.raises(CheckpointError, match="do not fit"):
            form.read_module("x", form.encode(asymmetric), config)


def test_names_of_autoawqs_first_releases_are_read() -> None:
    q = quantized(Scheme(4, 32, False), (8, 64))
    legacy = {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}
    assert AWQ.modules(["x.qweight"], legacy)
    assert AWQ.read_module("x", AWQ.encode(q), legacy).equal(q)


@pytest.mark.parametrize(
    ("name", "scheme", "shape", "words"),
    [
        ("gptq", Scheme(5, 32), (64, 64), "5 bits.*--bits 4 or 8"),
        ("gptq", Scheme(3, 48), (64, 48), "48 inputs are no multiple of 32"),
        ("gptq", Scheme(4, None), (60, 64), "60 outputs are no multiple of 8"),
        ("gptq", Scheme(4, 128), (64, 576), "does not divide 576"),
        ("gptq", Scheme(4, 32, True, "bfloat16"), (64, 64), "--scale-dtype float16"),
        ("awq", Scheme(8, 32), (64, 64), "8 bits.*--format gptq"),
        ("awq", Scheme(4, None), (60, 64), "60 outputs"),
        ("awq", Scheme(4, 32, True, "bfloat16"), (64, 64), "--scale-dtype float16"),
    ],
)
def test_what_a_format_cannot_hold_is_said_with_the_remedy(
    name: str, scheme: Scheme, shape: tuple[int, int], words: str
) -> None:
    assert re.search(words, str(writer_format(name).supports(scheme, *shape)))


def test_what_one_config_cannot_say_is_refused() -> None:
    sym, asym, eight = Scheme(4, 32, True), Scheme(4, 32, False), Scheme(8, 32, True)
    assert "v1 or v2" in str(GPTQ.cannot_say(CheckpointLayout({"a": sym, "b": asym})))
    assert GPTQ.cannot_say(CheckpointLayout({"a": sym, "b": eight})) is None
    assert "W4 g32 asym and W4 g32 sym" in str(AWQ.cannot_say(CheckpointLayout({"a": sym, "b": asym})))
    clash = AWQ.cannot_say(CheckpointLayout({"mlp.gate_proj": sym}, ["lm_head", "mlp.gate"]))
    assert "would leave mlp.gate_proj out" in str(clash)
    assert AWQ.cannot_say(CheckpointLayout({"mlp.gate_proj": sym}, ["lm_head"])) is None


def test_rules_name_exactly_the_modules_they_are_for() -> None:
    layers = [f"model.layers.{i}.{name}" for i in range(12) for name in ("self_attn.q_proj", "mlp.down_proj")]
    schemes = {
        name: Scheme(8, 64, True) if "layers.1." in name or "layers.11." in name else Scheme(4, 128, True)
        for name in layers
    }
    kept = "model.layers.3.mlp.down_proj"
    schemes.pop(kept)
    config = GPTQ.config(CheckpointLayout(schemes, [kept, "lm_head"]), "0")
    assert (config["bits"], config["group_size"], config["sym"], config["lm_head"]) == (4, 128, True, False)
    dynamic = config["dynamic"]
    assert list(dynamic.values()) == [{}, {"bits": 8, "group_size": 64}]
    for name, scheme in schemes.items():
        expected = {"bits": 8, "group_size": 64} if scheme.bits == 8 else None
        assert override_for(name, dynamic) == expected, name
    assert override_for(kept, dynamic) is False
    assert override_for("lm_head", dynamic) is None
    with pytest.raises(CheckpointError, match="'dynamic' says it is not"):
        GPTQ.read_module(kept, {}, config)


def test_rules_also_name_the_fused_layer_that_vllm_asks_for() -> None:
    names = [f"layers.{i}.attn.{p}_proj" for i in (0, 2) for p in "qkv"] + ["layers.0.mlp.gate_proj"]
    found = re.compile(pattern(names))
    assert all(found.match(name) for name in [*names, "layers.0.attn.qkv_proj", "layers.2.attn.qkv_proj"])
    others = ["layers.1.attn.q_proj", "layers.0.attn.o_proj", "layers.0.mlp.gate_up_proj", "layers.20.attn.q_proj"]
    assert not any(found.match(name) for name in others)


def test_gptq_configs_are_what_readers_require() -> None:
    config = GPTQ.config(CheckpointLayout({"a": Scheme(4, 128, True)}, ["lm_head"]), "1.2")
    assert config == {
        "quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "lm_head": False,
        "format": "gptq", "checkpoint_format": "gptq", "pack_dtype": "int32", "dynamic": None,
        "meta": {"quantizer": ["quantkit:1.2"]},
    }  # fmt: skip
    v2 = GPTQ.config(
        CheckpointLayout({"a": Scheme(4, None, False), "lm_head": Scheme(4, None, False)}, head_embeddings=["lm_head"]),
        "1.2",
    )
    assert (v2["checkpoint_format"], v2["sym"], v2["group_size"], v2["lm_head"]) == ("gptq_v2", False, -1, True)
    assert GPTQ.side_files(config) == {"quantize_config.json": config}
    awq = AWQ.config(CheckpointLayout({"a": Scheme(4, 64, False)}, ["lm_head"]), "1.2")
    assert awq == {
        "quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm", "lm_head": False,
        "modules_to_not_convert": ["lm_head"],
    }  # fmt: skip
