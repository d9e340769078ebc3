"""Stepping block by block equals the model's own forward bit for bit, for every architecture we claim."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, DENSE, MOE, tiny_model
from torch import nn

from quantkit.checkpoint.source import TensorInfo
from quantkit.errors import NumericsError, SourceError, UnsupportedModel
from quantkit.model.arguments import BlockArguments, same_call
from quantkit.model.skeleton import block_linears, build_skeleton, find_blocks
from quantkit.model.stepper import input_groups, record, run_block, run_norm, run_tail
from quantkit.model.weights import Weights


class InMemory:
    """A model's own weights as a source."""

    path = Path("memory")

    def __init__(self, model: nn.Module, config: dict[str, Any]) -> None:
        tied = getattr(model.config, "tie_word_embeddings", False)
        self.config = config
        self.tensors = {n: p.detach() for n, p in model.state_dict().items() if not (tied and n == "lm_head.weight")}

    def names(self) -> list[str]:
        return list(self.tensors)

    def info(self, name: str) -> TensorInfo:
        return TensorInfo(self.tensors[name].dtype, tuple(self.tensors[name].shape))

    def read(self, name: str) -> torch.Tensor:
        return self.tensors[name].clone()

    def read_entry(self, name: str, index: int) -> torch.Tensor:
        return self.tensors[name][index].clone()

    def digest(self) -> str:
        return ""

    def quantization(self) -> None:
        return None


def build(kind: str) -> tuple[nn.Module, dict[str, Any]]:
    model = tiny_model(kind)
    return model, model.config.to_dict()


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_stepping_blocks_equals_native_forward(kind: str) -> None:
    """Bit for bit with the modules untouched; the window is shorter than the text, so layers differ in their masks."""
    model, _ = build(kind)
    ids = torch.randint(3, 100, (2, 17), generator=torch.Generator().manual_seed(1))
    blocks = find_blocks(model)
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
    recording = record(model, blocks, ids)
    hidden = recording.hidden
    for block, call in zip(blocks.modules, recording.calls, strict=True):
        hidden = run_block(block, hidden, call)
    assert torch.equal(run_tail(model, blocks, ids, hidden), expected)
    final = run_norm(model, blocks, ids, hidden)
    with torch.no_grad():
        trunk: Any = model.base_model
        assert torch.equal(final, trunk(input_ids=ids, use_cache=False).last_hidden_state)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_stepping_a_skeleton_one_block_in_memory_equals_native_forward(kind: str) -> None:
    """With experts seen as linears the sums of a token's experts may differ in their last bits, nothing else."""
    model, config = build(kind)
    ids = torch.randint(3, 100, (2, 17), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
    skeleton = build_skeleton(config)
    blocks = find_blocks(skeleton)
    assert all(p.is_meta for p in skeleton.parameters())
    weights = Weights(skeleton, InMemory(model, config))
    for name in weights.parameters:
        if not name.startswith(f"{blocks.prefix}."):
            weights.load_parameter(name)
    recording = record(skeleton, blocks, ids)
    hidden = recording.hidden
    for index, block in enumerate(blocks.modules):
        weights.load(blocks.name(index))
        hidden = run_block(block, hidden, recording.calls[index])
        weights.release(blocks.name(index))
        assert all(p.is_meta for p in block.parameters())
    logits = run_tail(skeleton, blocks, ids, hidden)
    if kind in MOE:
        assert float((logits - expected).norm() / expected.norm()) <= 1e-5
    else:
        assert torch.equal(logits, expected)


@pytest.mark.parametrize("kind", DENSE)
def test_linears_that_read_one_tensor_are_found_by_running(kind: str) -> None:
    model, _ = build(kind)
    blocks = find_blocks(model)
    recording = record(model, blocks, torch.tensor([[3, 4, 5]]))
    groups = input_groups(blocks.modules[0], recording.hidden, recording.calls[0])
    names = [tuple(name.rpartition(".")[2] for name in group) for group in groups]
    parallel = [("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj",), ("down_proj",)]
    fused = [("query_key_value",), ("dense",), ("dense_h_to_4h",), ("dense_4h_to_h",)]
    expected = {
        "phi3": [("qkv_proj",), ("o_proj",), ("gate_up_proj",), ("down_proj",)],
        "opt": [("q_proj", "k_proj", "v_proj"), ("out_proj",), ("fc1",), ("fc2",)],
        "cohere": parallel,
        "cohere2": parallel,
        "starcoder2": [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("c_fc",), ("c_proj",)],
        "gpt_neox": fused,
        "falcon": [("query_key_value", "dense_h_to_4h"), ("dense",), ("dense_4h_to_h",)],
        "falcon-new": fused,
        "falcon-alibi": fused,
    }.get(kind, [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)])
    assert names == expected


def test_a_model_that_works_between_its_blocks_is_refused() -> None:
    model, _ = build("llama")
    blocks = find_blocks(model)
    halve = nn.Module()
    halve.forward = lambda hidden, **kwargs: hidden / 2  # type: ignore[method-assign]
    inner = model.model.layers  # type: ignore[union-attr]

    class Between(nn.ModuleList):
        """Iterates as a model that scales the hidden state after each of its blocks."""

        def __iter__(self) -> Any:
            for block in list(self._modules.values()):
                yield block
                yield halve

        def __getitem__(self, index: Any) -> Any:
            return [*self][index]

    model.config.num_hidden_layers = 5
    model.model.layers = Between(list(inner))  # type: ignore[union-attr]
    ids = torch.tensor([[3, 4, 5]])
    with pytest.raises(UnsupportedModel, match="between its blocks"):
        record(model, blocks, ids)
    with pytest.raises(UnsupportedModel, match="between its blocks"):
        run_tail(model, blocks, ids, torch.zeros(1, 3, 32))


def test_a_tail_follows_a_single_block_that_returns_a_tuple() -> None:
    model = tiny_model("falcon", num_hidden_layers=1)
    blocks, ids = find_blocks(model), torch.tensor([[3, 4, 5], [6, 7, 8]])
    recording = record(model, blocks, ids)
    hidden = run_block(blocks.modules[0], recording.hidden, recording.calls[0])
    with torch.no_grad():
        assert torch.equal(run_tail(model, blocks, ids, hidden), model(input_ids=ids, use_cache=False).logits)
        trunk: Any = model.base_model
        final = trunk(input_ids=ids, use_cache=False).last_hidden_state
        assert torch.equal(run_norm(model, blocks, ids, hidden), final)


def test_layers_of_different_kinds_get_different_masks() -> None:
    """Reusing block 0's arguments is the classic mistake."""
    model, _ = build("gemma3_text")
    recording = record(model, find_blocks(model), torch.arange(3, 20)[None])
    assert not same_call(recording.calls[0], recording.calls[1])
    assert same_call(recording.calls[0], recording.calls[2])


def test_a_missing_tensor_is_named() -> None:
    model, config = build("llama")
    source = InMemory(model, config)
    del source.tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(SourceError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        Weights(build_skeleton(config), source)


def test_a_tensor_without_a_place_is_named() -> None:
    model, config = build("llama")
    source = InMemory(model, config)
    source.tensors["model.layers.0.mystery.weight"] = torch.zeros(3)
    with pytest.raises(UnsupportedModel, match=r"layers\.0\.mystery"):
        Weights(build_skeleton(config), source)


def test_a_wrong_shape_names_tensor_expected_and_found() -> None:
    model, config = build("llama")
    source = InMemory(model, config)
    source.tensors["model.norm.weight"] = torch.zeros(31)
    with pytest.raises(SourceError, match=r"model\.norm\.weight.*\[31\].*\[32\]"):
        Weights(build_skeleton(config), source)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_nan_weight_is_named_when_read(bad: float) -> None:
    model, config = build("llama")
    source = InMemory(model, config)
    source.tensors["model.layers.2.self_attn.o_proj.weight"][3, 4] = bad
    weights = Weights(build_skeleton(config), source)
    weights.load("model.layers.1")
    with pytest.raises(NumericsError, match=r"layers\.2\.self_attn\.o_proj.*holds NaN or infinite"):
        weights.load("model.layers.2")


def test_checkpoints_saved_from_the_base_model_are_read() -> None:
    model, config = build("llama")
    source = InMemory(model, config)
    source.tensors = {name.removeprefix("model."): value for name, value in source.tensors.items()}
    weights = Weights(build_skeleton(config), source)
    assert weights.names["model.layers.0.mlp.up_proj.weight"] == "layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "nonesuch"}, "'nonesuch' is unknown"),
        ({"hidden_size": 3}, "no model_type"),
        ({"model_type": "t5", "num_layers": 1, "d_model": 12}, "t5"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        find_blocks(
            build_skeleton({**config, "vocab_size": 50}) if "vocab_size" not in config else build_skeleton(config)
        )


def test_gpt2_computes_the_same_with_linears_in_the_place_of_conv1d() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50, n_positions=16, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    original = GPT2LMHeadModel(config).eval()
    model = build_skeleton(config.to_dict())
    assert set(block_linears(find_blocks(model).modules[0])) == {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}
    weights = Weights(model, InMemory(original, config.to_dict()))  # type: ignore[arg-type]
    weights.load("transformer")
    model.tie_weights()  # type: ignore[operator]
    ids = torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(0))
    name = "transformer.h.0.attn.c_attn.weight"
    assert torch.equal(weights.raw_as_stored(name), original.get_parameter(name))
    torch.testing.assert_close(model(input_ids=ids).logits, original(input_ids=ids).logits)


def test_building_a_skeleton_leaves_torch_as_it_was() -> None:
    _, config = build("llama")
    before = nn.Module.register_parameter
    build_skeleton(config)
    assert nn.Module.register_parameter is before
    assert not nn.Linear(2, 2).weight.is_meta
    assert len(block_linears(find_blocks(build_skeleton(config)).modules[0])) == 7


class OddBlock(torch.nn.Module):
    """One linear runs, one is idle; ``again`` runs the first one twice."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.used, self.idle, self.again = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(self.used(x)) if self.again else self.used(x)


def test_a_linear_that_never_runs_is_a_group_of_its_own_and_one_that_runs_twice_is_refused() -> None:
    x = torch.ones(1, 2, 4)
    assert input_groups(OddBlock(False), x, BlockArguments((), {})) == [("used",), ("idle",)]
    with pytest.raises(UnsupportedModel, match="used: runs more than once"):
        input_groups(OddBlock(True), x, BlockArguments((), {}))
