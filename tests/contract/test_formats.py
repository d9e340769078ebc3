"""Every format x scheme: decode undoes encode exactly; the real library agrees; golden words."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from quantkit.core import affine
from quantkit.core.qtensor import BlockTensor, QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError
from quantkit.formats import reader_format, writer_format
from quantkit.formats.compressed_tensors import CompressedTensors
from quantkit.formats.interface import CheckpointLayout

SHAPES = [(64, 256), (830, 545), (5, 96), (16, 576)]
SCHEMES = [
    Scheme(bits, group, symmetric, dtype)
    for bits in range(2, 9)
    for group in (None, 32, 128)
    for symmetric in (True, False)
    for dtype in ("float16", "bfloat16")
]


def quantized(scheme: Scheme, shape: tuple[int, int], seed: int = 0) -> QuantTensor:
    w = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    scales, zeros = affine.minmax_params(w, scheme)
    return QuantTensor(affine.quantize(w, scales, zeros, scheme), scales, zeros, scheme)


@pytest.mark.parametrize(("name", "least"), [("native", 84), ("compressed-tensors", 8), ("gptq", 8), ("awq", 2)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_undoes_encode(name: str, least: int, shape: tuple[int, int]) -> None:
    form = writer_format(name)
    tried = 0
    for scheme in SCHEMES:
        if form.supports(scheme, *shape) is None:
            q = quantized(scheme, shape)
            parts = form.encode(q)
            assert form.decode(parts, scheme).equal(q), scheme
            assert form.stored_bytes(scheme, *shape) == sum(part.nbytes for part in parts.values()), scheme
            tried += 1
    fits = name in ("native", "compressed-tensors") or shape in ((64, 256), (16, 576))
    assert tried >= (least if fits else 0)


MIXED = {"a.0.q": Scheme(4, 32, True), "a.1.k": Scheme(8, None, False), "b.up": Scheme(4, 32, False, "bfloat16")}
ONE_SIGN = {
    "a.0.q": Scheme(4, 32, True),
    "a.1.k": Scheme(8, None, True),
    "b.up": Scheme(3, 64, True),
    "b.o": Scheme(4, 32, True),
}


@pytest.mark.parametrize(
    ("name", "schemes"),
    [
        ("native", MIXED),
        ("compressed-tensors", MIXED),
        ("gptq", ONE_SIGN),
        ("gptq", {name: replace(scheme, symmetric=False) for name, scheme in ONE_SIGN.items()}),
        ("awq", dict.fromkeys("abc", Scheme(4, 32, True))),
        ("awq", dict.fromkeys("abc", Scheme(4, None, False))),
    ],
)
def test_the_written_config_reads_back_every_scheme(name: str, schemes: dict[str, Scheme]) -> None:
    """Through the reader, as load does: module names and schemes come from config.json and tensor names alone."""
    form = writer_format(name)
    tensors = {}
    originals = {}
    for module, scheme in schemes.items():
        originals[module] = quantized(scheme, (32, 64))
        tensors.update({f"{module}.{part}": value for part, value in form.encode(originals[module]).items()})
    layout = CheckpointLayout(schemes, ["lm_head"])
    assert form.cannot_say(layout) is None
    config = json.loads(json.dumps(form.config(layout, "0")))
    reader = reader_format(config)
    found = reader.modules(list(tensors), config)
    assert set(found) == set(schemes)
    for module, local in found.items():
        q = reader.read_module(module, {part: tensors[f"{module}.{part}"] for part in local}, config)
        assert isinstance(q, QuantTensor)
        assert q.equal(originals[module])


def test_native_holds_the_largest_zero_a_quant_tensor_may_have() -> None:
    scheme = Scheme(4, 32, symmetric=False)
    q = quantized(scheme, (8, 96))
    extreme = QuantTensor(q.codes, q.scales, torch.full_like(q.scales, 16).to(torch.int16), scheme)
    native = writer_format("native")
    assert native.decode(native.encode(extreme), scheme).equal(extreme)


@pytest.mark.parametrize("name", ["compressed-tensors", "gptq", "awq"])
def test_a_zero_point_without_a_field_is_refused_not_rounded(name: str) -> None:
    scheme = Scheme(4, 32, symmetric=False)
    q = quantized(scheme, (8, 64))
    extreme = QuantTensor(q.codes, q.scales, torch.full_like(q.scales, 16).to(torch.int16), scheme)
    with pytest.raises(CheckpointError, match=r"zero point of 16 .* --format native"):
        writer_format(name).encode(extreme)


def test_compressed_tensors_says_why_it_cannot_hold_a_scheme() -> None:
    assert "--format native" in str(CompressedTensors.supports(Scheme(3, 64), 64, 256))
    assert "does not divide" in str(CompressedTensors.supports(Scheme(4, 128), 64, 576))


@pytest.mark.parametrize(
    ("asked", "width", "used"),
    [(128, 576, 64), (128, 1536, 128), (None, 576, None), (256, 576, 64), (64, 545, None), (48, 96, 48)],
)
def test_group_sizes_that_do_not_divide_become_the_largest_that_does(
    asked: int | None, width: int, used: int | None
) -> None:
    assert CompressedTensors.group_size_for(Scheme(4, asked), width) == used
    assert {writer_format(name).group_size_for(Scheme(4, asked), width) for name in ("gptq", "awq")} == {used}
    assert writer_format("native").group_size_for(Scheme(4, asked), width) == asked


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 128), (8, 64), (8, None)])
def test_the_compressed_tensors_library_unpacks_what_we_pack(bits: int, group: int | None, symmetric: bool) -> None:
    """Oracle: the reader's own unpacking and dequantization give our numbers."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    scheme = Scheme(bits, group, symmetric)
    q = quantized(scheme, (48, 256))
    parts = CompressedTensors.encode(q)
    codes = unpack_from_int32(parts["weight_packed"], bits, torch.Size(q.shape))
    offset = torch.zeros_like(q.scales, dtype=torch.float32)
    if not symmetric:
        offset = unpack_from_int32(parts["weight_zero_point"], bits, torch.Size(q.scales.shape), packed_dim=0).float()
    width = scheme.width(256)
    theirs = (codes.float() - offset.repeat_interleave(width, 1)) * q.scales.float().repeat_interleave(width, 1)
    torch.testing.assert_close(theirs, q.dequantize(), rtol=0, atol=0)


def test_the_compressed_tensors_library_accepts_our_config() -> None:
    from compressed_tensors.quantization import QuantizationConfig

    config = CompressedTensors.config(
        CheckpointLayout({"x": Scheme(4, 128), "y": Scheme(8, None, False)}, ["lm_head"]), "0"
    )
    config.pop("quant_method")
    parsed = QuantizationConfig.model_validate({**config, "quant_method": "compressed-tensors"})
    assert parsed.config_groups["group_0"].weights.num_bits == 4
    assert parsed.ignore == ["lm_head"]


@pytest.mark.parametrize("symmetric", [True, False])
def test_what_no_scheme_expresses_in_compressed_tensors_is_read_by_the_definition(symmetric: bool) -> None:
    """Act-order groups (``actorder: group`` of older llm-compressors), and float32 scales (of float32 models)."""
    scheme = Scheme(4, 32, symmetric)
    q = quantized(scheme, (8, 96))
    config = CompressedTensors.config(CheckpointLayout({"x": scheme}, []), "0")
    order = torch.randperm(96, generator=torch.Generator().manual_seed(1))
    turned = CompressedTensors.encode(QuantTensor(q.codes[:, order], q.scales, q.zeros, scheme))
    turned["weight_g_idx"] = (order // 32).to(torch.int32)
    wide = {**CompressedTensors.encode(q), "weight_scale": q.scales.float() * 1.0001}
    zeros = q.scales.new_full(q.scales.shape, 8.0) if q.zeros is None else q.zeros
    codes = q.codes.float() - zeros.float().repeat_interleave(32, 1)
    exact = codes * wide["weight_scale"].repeat_interleave(32, 1)
    for parts, kind, numbers in (
        (turned, "act-order groups", q.dequantize()[:, order]), (wide, "float32 scales", exact),
        ({**wide, "weight_g_idx": torch.full((96,), -1)}, "act-order groups", exact),
    ):  # fmt: skip
        named = CompressedTensors.modules([f"x.{name}" for name in parts], config)
        assert set(named["x"]) == set(parts)
        assert CompressedTensors.scheme("x", parts, config) == f"{scheme.describe()} with {kind}"
        read = CompressedTensors.read_module("x", parts, config)
        assert isinstance(read, BlockTensor)
        assert torch.equal(read.dequantize(), numbers)
    uneven = {**turned, "weight_g_idx": torch.zeros(96, dtype=torch.int32)}
    with pytest.raises(CheckpointError, match="weight_g_idx does not give 32 inputs to every group"):
        CompressedTensors.read_module("x", uneven, config)


def test_an_index_beside_bytes_that_are_not_packed_is_refused() -> None:
    with pytest.raises(CheckpointError, match="weight_g_idx"):
        CompressedTensors.modules(["a.weight", "a.weight_scale", "a.weight_g_idx"], {"format": "int-quantized"})


def test_an_unknown_quant_method_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match="'hocus'"):
        reader_format({"quant_method": "hocus"})
