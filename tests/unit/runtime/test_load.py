"""Loading: every parameter accounted for, packed stays packed, options refused by name; KV scales really read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.core.kvpages import rotate
from quantkit.core.kvscheme import KVPlan, KVScheme, LayerScales
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError, QuantkitError, RequestError, SourceError
from quantkit.formats.kv_scales import FILE_NAME, read_kv_plan, write_kv_plan
from quantkit.runtime.kv_cache.choose import kv_plan
from quantkit.runtime.kv_cache.transformers_cache import attention_modules
from quantkit.runtime.layers.linear import QuantLinear
from quantkit.runtime.load import choose_dtype, load

Folder = Callable[..., Path]
VOCAB = 288
IDS = torch.randint(0, VOCAB, (2, 100), generator=torch.Generator().manual_seed(0))
KINDS = ["llama", "gemma3_text", "opt", "qwen2", "phi3"]


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None], file: str = "model.safetensors") -> None:
    """Change the tensors of a file, its metadata kept."""
    from safetensors import safe_open

    with safe_open(folder / file, framework="pt") as handle:
        meta = handle.metadata()
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file, metadata=meta)


@pytest.mark.parametrize("kind", KINDS)
def test_a_float_model_gives_the_logits_of_transformers(float_folder: Folder, kind: str) -> None:
    from transformers import AutoModelForCausalLM

    folder = float_folder(kind)
    model = load(folder, device="cpu", dtype="float32")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        torch.testing.assert_close(model(IDS), theirs(input_ids=IDS).logits, rtol=1e-5, atol=1e-5)
    assert model.generate("Hello", max_tokens=5, ignore_eos=True).finish_reason == "length"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format_name", ["native", "compressed-tensors"])
@pytest.mark.parametrize("scheme", [Scheme(4, 32, False), Scheme(8, None)], ids=Scheme.describe)
def test_a_packed_model_runs_as_its_dequantized_twin(
    packed_folder: Folder, kind: str, format_name: str, scheme: Scheme
) -> None:
    folder = packed_folder(kind, scheme, format_name)
    packed = load(folder, device="cpu", dtype="float32", head_bits=16)
    dense = load(folder, device="cpu", dtype="float32", dequantize=True)
    layers = [m for m in packed.module.modules() if isinstance(m, QuantLinear)]
    assert len(layers) == sum(
        1
        for name, m in dense.module.named_modules()
        if isinstance(m, torch.nn.Linear) and "layers." in name and name.endswith("proj")
    )
    assert not any(isinstance(m, QuantLinear) for m in dense.module.modules())
    torch.testing.assert_close(packed(IDS), dense(IDS), rtol=2e-3, atol=2e-3)
    reference = load(folder, device="cpu", dtype="float32", kernel="reference")
    torch.testing.assert_close(reference(IDS), dense(IDS), rtol=2e-3, atol=2e-3)
    assert packed.memory()["dense"] + packed.memory()["quantized"] < dense.memory()["dense"]
    elements = sum(m.in_features * m.out_features for m in layers)
    assert packed.memory()["quantized"] * 8 / elements <= scheme.bits + 64 / 32


def test_a_model_prints_as_what_it_runs(packed_folder: Folder) -> None:
    model = load(packed_folder("llama", Scheme(4, 32)), device="cpu", dtype="float32", kernel="reference")
    assert re.fullmatch(r"Model\(llama, cpu, float32, \d+ x words, KV cache 32 bits\)", repr(model))


def test_tied_embeddings_stay_one_tensor(packed_folder: Folder, float_folder: Folder) -> None:
    for folder in (packed_folder("gemma3_text", Scheme(4, 32)), float_folder("llama", tie_word_embeddings=True)):
        module = load(folder, device="cpu").module
        head, embedding = module.lm_head, module.model.embed_tokens
        if isinstance(head, QuantLinear):
            assert head.packed is embedding.packed
        else:
            assert head.weight is embedding.weight


def test_nothing_is_left_random_or_on_meta(float_folder: Folder) -> None:
    folder = float_folder("qwen2")
    rewrite(folder, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.bias"))
    with pytest.raises(SourceError, match=r"layers\.1\.self_attn\.k_proj\.bias"):
        load(folder, device="cpu")


def test_a_quantized_tensor_that_is_missing_is_named(packed_folder: Folder) -> None:
    folder = packed_folder("llama", Scheme(4, 32))
    name = next(n for n in load_file(folder / "model.safetensors") if "layers.1.mlp.up_proj" in n and "scale" in n)
    rewrite(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(QuantkitError, match=r"layers\.1\.mlp\.up_proj"):
        load(folder, device="cpu")


def test_weights_of_another_model_are_refused(packed_folder: Folder) -> None:
    folder = packed_folder("llama", Scheme(8, None), intermediate_size=96)
    config = json.loads((folder / "config.json").read_text())
    config["intermediate_size"] = 128
    (folder / "config.json").write_text(json.dumps(config))
    for dequantize in (False, True):
        with pytest.raises(CheckpointError, match=r"\[96, 64\].*\[128, 64\]"):
            load(folder, device="cpu", dequantize=dequantize)


def test_options_are_refused_by_name(float_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = float_folder("llama")
    for bad in ({"device": "tpu"}, {"device": "meta"}, {"dtype": "int8"}, {"kernel": "warp"}):
        with pytest.raises(RequestError, match=next(iter(bad))):
            load(folder, **{"device": "cpu", **bad})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="--kv-bits 5: choose"):
        load(folder, device="cpu", kv_bits=5)
    with pytest.raises(RequestError, match="holds no static KV scales"):
        load(folder, device="cpu", kv_bits=8, kv_scales="static")
    with pytest.raises(CheckpointError, match=r"no fp8 KV scales for 'model[.]layers[.]0[.]self_attn'"):
        load(folder, device="cpu", kv_bits="fp8")
    with pytest.raises(RequestError, match="says nothing about its cache"):
        load(folder, device="cpu", kv_scales="static")
    with pytest.raises(RequestError, match="float16 on a CPU"):
        choose_dtype("float16", torch.device("cpu"))
    assert choose_dtype("float16", torch.device("cuda")) == torch.float16
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(RequestError, match="no CUDA device"):
        load(folder, device="cuda")


def test_end_tokens_come_from_the_generation_config(float_folder: Folder) -> None:
    folder = float_folder("llama")
    assert load(folder, device="cpu").end_tokens == (257,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert load(folder, device="cpu").end_tokens == (5, 6)


LONG = torch.randint(0, VOCAB, (2, 200), generator=torch.Generator().manual_seed(1))  # packs its first page


def static_scales(module: Any, bits: int) -> dict[str, LayerScales]:
    """Scales per channel that span what one text gives."""
    found = {}
    cache = module.base_model(input_ids=LONG, use_cache=True).past_key_values
    for index, name in attention_modules(module).items():
        sides = []
        for x in (cache.layers[index].keys, rotate(cache.layers[index].values)):
            low, high = x.float().amin((0, 2)), x.float().amax((0, 2))
            sides += [(high - low) / ((1 << bits) - 1), low]
        found[name] = LayerScales(*sides)
    return found


@pytest.fixture
def kv_folder(packed_folder: Folder) -> Path:
    """A packed model whose cache is calibrated for 8 bits."""
    folder = packed_folder("llama", Scheme(8, None))
    module = load(folder, device="cpu").module
    with torch.inference_mode():
        scales = static_scales(module, 8)
    scheme = KVScheme.of(8, "static")
    write_kv_plan(folder, KVPlan(scheme, dict.fromkeys(scales, scheme), scales))
    return folder


def test_what_the_checkpoint_says_of_its_cache_is_done(kv_folder: Path) -> None:
    before = load(kv_folder, device="cpu")
    assert before.kv_bits == 8
    assert before.kv_plan.scheme.scales == "static"
    logits, plain = before(LONG), load(kv_folder, device="cpu", kv_bits=16)
    assert plain.kv_bits == 16
    assert not torch.equal(logits, plain(LONG))
    torch.testing.assert_close(logits, plain(LONG), rtol=0.1, atol=0.3)
    online = load(kv_folder, device="cpu", kv_scales="online")
    assert online.kv_plan.scheme == KVScheme.of(8)
    assert not torch.equal(online(LONG), logits)
    assert load(kv_folder, device="cpu", kv_bits="k4v2").kv_plan.scheme == KVScheme.of("k4v2")
    with pytest.raises(RequestError, match="static KV scales of this checkpoint are for 8 bits"):
        load(kv_folder, device="cpu", kv_bits=4, kv_scales="static")

    def double(tensors: dict[str, Any]) -> None:
        tensors["model.layers.1.self_attn.v_scale"] *= 2

    rewrite(kv_folder, double, FILE_NAME)
    # codes are chosen with the doubled scale, so values only get coarser: the change is small, and far above noise
    assert float((load(kv_folder, device="cpu")(LONG) - logits).abs().max()) > 1e-3


def test_integers_scales_do_not_serve_fp8_nor_the_other_way_round(kv_folder: Path) -> None:
    stored = read_kv_plan(kv_folder)
    with pytest.raises(RequestError, match="fp8"):
        kv_plan(stored, None, "fp8")
    with pytest.raises(CheckpointError, match="no fp8 KV scales"):
        load(kv_folder, device="cpu", kv_bits="fp8")


@pytest.mark.parametrize("part", ["k_scale", "k_low", "v_scale", "v_low"])
def test_a_missing_kv_scale_is_an_error_that_names_it(kv_folder: Path, part: str) -> None:
    rewrite(kv_folder, lambda tensors: tensors.pop(f"model.layers.2.self_attn.{part}"), FILE_NAME)
    with pytest.raises(CheckpointError, match=rf"model\.layers\.2\.self_attn\.{part}"):
        load(kv_folder, device="cpu")


def test_a_plan_that_leaves_out_a_layer_is_an_error(kv_folder: Path) -> None:
    found = read_kv_plan(kv_folder)
    assert found is not None
    kept = [name for name in found.layers if ".1." not in name]
    write_kv_plan(
        kv_folder,
        KVPlan(found.scheme, {n: found.layers[n] for n in kept}, {n: found.static[n] for n in kept}),
    )
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.self_attn"):
        load(kv_folder, device="cpu")


def test_load_is_public() -> None:
    assert quantkit.load is load


@pytest.mark.parametrize("numba", [True, False])
@pytest.mark.parametrize("multiplies_bf16", [True, False])
def test_the_default_dtype_of_a_cpu_is_that_of_its_fastest_path(
    numba: bool, multiplies_bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.runtime.kernels.numba.threads.available", lambda: numba)
    monkeypatch.setattr("quantkit.runtime.load.cpu_has_bfloat16", lambda: multiplies_bf16)
    expected = torch.bfloat16 if multiplies_bf16 and not numba else torch.float32
    assert choose_dtype("auto", torch.device("cpu"), compiled=True) == expected
    assert choose_dtype("auto", torch.device("cpu")) == (torch.bfloat16 if multiplies_bf16 else torch.float32)
    assert choose_dtype("auto", torch.device("cuda")) == torch.bfloat16


@pytest.mark.parametrize(
    ("has", "free", "options", "expected"),
    [
        (True, 1 << 40, {}, torch.float32),  # the compiled step runs it, and there is room
        (True, 1 << 10, {}, torch.bfloat16),
        (True, 0, {}, torch.bfloat16),
        (True, 1 << 40, {"dequantize": True}, torch.bfloat16),  # an evaluation, which decodes nothing
        (True, 1 << 40, {"dtype": "bfloat16"}, torch.bfloat16),
        (False, 1 << 40, {}, torch.bfloat16),
    ],
    ids=["room", "no room", "too many weights", "dequantize", "asked for", "no step"],
)
def test_a_dense_model_is_float32_where_the_compiled_step_runs_it(
    has: bool, free: int, options: dict[str, Any], expected: torch.dtype, float_folder: Folder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("quantkit.runtime.load.cpu_has_bfloat16", lambda: True)
    monkeypatch.setattr("quantkit.runtime.load.threads.available", lambda: True)
    monkeypatch.setattr("quantkit.runtime.load.available_bytes", lambda: free or 1 << 40)
    monkeypatch.setattr("quantkit.runtime.load.MOST_WEIGHTS", 10**9 if free else 10)
    monkeypatch.setattr("quantkit.runtime.load.proved", lambda config: has)
    assert load(float_folder("llama"), device="cpu", **options).dtype == expected


@pytest.mark.parametrize("kernel", [None, "reference"])
def test_a_loaded_model_holds_no_open_files_but_those_of_head_and_embedding(
    packed_folder: Folder, kernel: str | None
) -> None:
    """A view of a mapped file is an open file: a layer that kept some would come to a limit of 1024 of them."""
    folder, open_files = packed_folder("llama", Scheme(4, 32)), Path("/proc/self/fd")
    if not open_files.exists():
        pytest.skip("this system does not list open files")
    before = len(list(open_files.iterdir()))
    model = load(folder, device="cpu", kernel=kernel)
    assert len(list(open_files.iterdir())) <= before + 2
    assert model(IDS[:, :4]).isfinite().all()
