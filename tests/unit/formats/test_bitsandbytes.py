"""bitsandbytes checkpoints are decoded as the library itself decodes them."""

from __future__ import annotations

import json

import pytest
import torch

from quantkit.errors import CheckpointError
from quantkit.formats.bitsandbytes import BitsAndBytes

NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip


def state(**fields) -> torch.Tensor:
    return torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)


def nf4_parts(**changes) -> dict[str, torch.Tensor]:
    """A 2 x 64 weight with the codes 0..15 in order, absmax 2 and 3."""
    codes = torch.arange(128) % 16
    parts = {
        "weight": (codes[0::2] * 16 + codes[1::2]).to(torch.uint8).reshape(-1, 1),
        "weight.absmax": torch.tensor([2.0, 3.0]),
        "weight.quant_map": torch.tensor(NF4),
        "weight.quant_state.bitsandbytes__nf4": state(quant_type="nf4", blocksize=64, dtype="float16", shape=[2, 64]),
    }
    return parts | changes


def test_nf4_by_hand_first_element_in_the_high_nibble():
    weight = BitsAndBytes.read_module("x", nf4_parts(), {})
    assert (weight.kind, weight.shape) == ("nf4", (2, 64))
    expected = torch.stack([2 * torch.tensor(NF4 * 4), 3 * torch.tensor(NF4 * 4)])
    torch.testing.assert_close(weight.dequantize(), expected)
    assert weight.bits_stored == 128 * 4 + 2 * 32


def test_double_quantized_scales_by_hand():
    parts = nf4_parts(
        **{
            "weight.absmax": torch.tensor([0, 255], dtype=torch.uint8),
            "weight.nested_absmax": torch.tensor([4.0]),
            "weight.nested_quant_map": torch.linspace(-1, 1, 256),
            "weight.quant_state.bitsandbytes__nf4": state(
                quant_type="nf4", blocksize=64, shape=[2, 64], nested_blocksize=256, nested_offset=5.0
            ),
        }
    )
    weight = BitsAndBytes.read_module("x", parts, {}).dequantize()
    torch.testing.assert_close(weight[:, 15], torch.tensor([1.0, 9.0]))  # -1 * 4 + 5 and 1 * 4 + 5
    assert BitsAndBytes.read_module("x", parts, {}).bits_stored == 128 * 4 + 2 * 8 + 32


@pytest.mark.parametrize(("block", "shape"), [(64, (2, 64)), (64, (1, 128)), (64, (4, 32))])
@pytest.mark.parametrize("nested", [False, True])
def test_codes_and_scales_by_rows_are_the_same_numbers(block, shape, nested):
    parts = nf4_parts()
    fields = {"quant_type": "nf4", "blocksize": block, "shape": list(shape)}
    if nested:
        parts["weight.absmax"] = torch.tensor([3, 200], dtype=torch.uint8)
        parts["weight.nested_absmax"] = torch.tensor([4.0])
        parts["weight.nested_quant_map"] = torch.linspace(-1, 1, 256)
        fields |= {"nested_blocksize": 256, "nested_offset": 5.0}
    parts["weight.quant_state.bitsandbytes__nf4"] = state(**fields)
    weight = BitsAndBytes.read_module("x", parts, {})
    found = weight.look_up(weight.raw)
    assert torch.equal(found.dequantize(), weight.dequantize())
    assert found.scales.shape == (shape[0], max(1, shape[1] // block))
    assert found.group_size == (64 if shape[1] == 128 else None)


def test_blocks_that_end_within_a_row_are_no_table_of_rows():
    parts = nf4_parts(**{"weight.quant_state.bitsandbytes__nf4": state(quant_type="nf4", blocksize=64, shape=[4, 32])})
    assert BitsAndBytes.read_module("x", parts, {}).look_up is not None
    codes = torch.zeros(3 * 48 // 2, 1, dtype=torch.uint8)
    parts |= {"weight": codes, "weight.absmax": torch.ones(3)}
    parts["weight.quant_state.bitsandbytes__nf4"] = state(quant_type="nf4", blocksize=64, shape=[3, 48])
    assert BitsAndBytes.read_module("x", parts, {}).look_up is None


def test_int8_by_hand():
    parts = {"weight": torch.tensor([[127, -64], [0, 1]], dtype=torch.int8), "SCB": torch.tensor([1.0, 12.7])}
    weight = BitsAndBytes.read_module("x", parts, {})
    torch.testing.assert_close(weight.dequantize(), torch.tensor([[1.0, -64 / 127], [0.0, 0.1]]))
    assert weight.bits_stored == 4 * 8 + 2 * 32


def test_modules_are_found_by_their_state_tensors():
    names = [f"a.{part}" for part in nf4_parts()] + ["b.weight", "b.SCB", "b.weight_format", "norm.weight"]
    assert BitsAndBytes.modules(names, {}) == {"a": tuple(nf4_parts()), "b": ("weight", "SCB", "weight_format")}


@pytest.mark.parametrize(
    "changes",
    [
        {"weight": torch.zeros(63, 1, dtype=torch.uint8)},
        {"weight": torch.zeros(32, 1, dtype=torch.int16)},
        {"weight.absmax": torch.ones(3)},
        {"weight.quant_state.bitsandbytes__nf4": torch.tensor([123], dtype=torch.uint8)},
        {"weight.quant_state.bitsandbytes__nf4": state(quant_type="nf4")},
        {"weight.quant_state.bitsandbytes__nf4": state(quant_type="nf4", blocksize=0, shape=[2, 64])},
        {"weight.quant_state.bitsandbytes__nf4": state(quant_type="nf4", blocksize=-64, shape=[2, 64])},
        {"weight.quant_state.bitsandbytes__nf4": state(quant_type="nf4", blocksize=[64], shape=[2, 64])},
        {"weight.quant_state.bitsandbytes__nf4": state(quant_type="nf4", blocksize=64, shape=[2, float("inf")])},
        {"weight.quant_state.bitsandbytes__nf4": state(quant_type="nf4", blocksize=64, shape=5)},
        {"weight.quant_state.bitsandbytes__nf4": torch.frombuffer(bytearray(b"[" * 100_000), dtype=torch.uint8)},
        {"weight.quant_state.bitsandbytes__nf4": torch.frombuffer(bytearray(b"[1]"), dtype=torch.uint8)},
    ],
)
def test_parts_that_do_not_fit_are_refused(changes):
    with pytest.raises(CheckpointError):
        BitsAndBytes.read_module("x", nf4_parts(**changes), {})


def test_int8_in_another_order_is_refused():
    parts = {"weight": torch.zeros(2, 2, dtype=torch.int8), "SCB": torch.ones(2), "weight_format": torch.tensor(1)}
    with pytest.raises(CheckpointError, match="row-major"):
        BitsAndBytes.read_module("x", parts, {})


@pytest.mark.parametrize("shape", [(48, 64), (5, 6), (7, 96)])
@pytest.mark.parametrize("kind", ["nf4", "fp4", "nf4-double", "int8"])
def test_what_the_library_writes_is_decoded_as_the_library_decodes_it(kind, shape):
    bnb = pytest.importorskip("bitsandbytes")
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).half()
    if kind == "int8":
        linear = bnb.nn.Linear8bitLt(shape[1], shape[0], bias=False, has_fp16_weights=False)
        linear.weight = bnb.nn.Int8Params(weight.clone(), requires_grad=False, has_fp16_weights=False)
    else:
        options = {"quant_type": kind.removesuffix("-double"), "compress_statistics": kind.endswith("-double")}
        linear = bnb.nn.Linear4bit(shape[1], shape[0], bias=False, **options)
        linear.weight = bnb.nn.Params4bit(weight.clone(), requires_grad=False, **options)
    parts = dict(linear.to("cpu").state_dict())
    found = BitsAndBytes.modules([f"m.{name}" for name in parts], {})
    decoded = BitsAndBytes.read_module("m", {name: parts[name] for name in found["m"]}, {}).dequantize()
    if kind == "int8":
        expected = bnb.functional.int8_vectorwise_dequant(linear.weight.data, linear.weight.SCB)
    else:
        expected = bnb.functional.dequantize_4bit(linear.weight.data, linear.weight.quant_state).float()
        # With AVX512, 0.50.2 gives back other numbers than it packed where blocks of 64 cross rows: the weight itself
        # decides then.
        if float((expected - weight).abs().max()) > 1:
            assert (
                float((decoded - weight).abs().max()) < 0.6
            )  # half the widest gap of a code, 0.3 in fp4, of the largest weights
            return
    # 4 bits: the library rounds its result to float16, the weight's dtype
    torch.testing.assert_close(decoded, expected.float(), rtol=1e-3, atol=1e-6)


def int8_parts() -> dict[str, torch.Tensor]:
    return {
        "weight": torch.ones(4, 64, dtype=torch.int8), "SCB": torch.ones(4), "weight_format": torch.tensor(0),
    }  # fmt: skip


def nested_parts() -> dict[str, torch.Tensor]:
    """As nf4_parts, with double quantization."""
    fields = {"quant_type": "nf4", "blocksize": 64, "shape": [2, 64], "nested_blocksize": 256, "nested_offset": 5.0}
    return nf4_parts() | {
        "weight.absmax": torch.tensor([0, 255], dtype=torch.uint8),
        "weight.nested_absmax": torch.tensor([4.0]),
        "weight.nested_quant_map": torch.linspace(-1, 1, 256),
        "weight.quant_state.bitsandbytes__nf4": state(**fields),
    }


PARTS = {"nf4": nf4_parts, "nested": nested_parts, "int8": int8_parts}
FLIPS = [(kind, name) for kind, made in PARTS.items() for name in made() if name != "weight_format"]


@pytest.mark.parametrize(("kind", "name"), FLIPS)
def test_a_part_of_another_shape_or_dtype_is_refused(kind, name):
    changes = [lambda t: t[:-1], lambda t: torch.cat([t, t]), lambda t: t.to(torch.int16), lambda t: t[:0]]
    for change in changes:
        parts = PARTS[kind]()
        parts[name] = change(parts[name])
        with pytest.raises(CheckpointError):
            BitsAndBytes.read_module("x", parts, {})


SCALES = [(kind, name) for kind, name in FLIPS if PARTS[kind]()[name].is_floating_point()]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38, -1e38])
@pytest.mark.parametrize(("kind", "name"), SCALES)
def test_a_scale_that_the_library_never_stores_is_refused(kind, name, value):
    parts = PARTS[kind]()
    parts[name] = parts[name].clone()
    parts[name][-1] = value
    with pytest.raises(CheckpointError, match=name.removeprefix("weight.")):
        BitsAndBytes.read_module("x", parts, {})
