"""The tensors of a model as a GGUF file will hold them: names are checked, formats chosen, before a weight is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from quantkit.checkpoint.gguf_files.out_config import config_fields, config_notes
from quantkit.checkpoint.gguf_files.out_names import Names
from quantkit.checkpoint.gguf_files.out_vocabulary import vocabulary_fields
from quantkit.checkpoint.names import COMPUTED
from quantkit.checkpoint.source import Source
from quantkit.convert.gguf.types import Chosen, ModelFacts, tensor_kind
from quantkit.errors import UnsupportedModel
from quantkit.model.language import text_config, towers
from quantkit.model.weights import Weights


def config_of(model: Any) -> dict[str, Any]:
    """Return the config of a skeleton's language model as a dictionary.

    Raises UnsupportedModel for a model with towers.
    """
    beside = towers(model)
    if beside:
        raise UnsupportedModel(
            f"a model with {', '.join(beside)} is not written as GGUF (llama.cpp keeps towers in a file of their own)."
            " Use --format compressed-tensors."
        )
    config: dict[str, Any] = text_config(model).to_dict()
    return config


def gguf_chooser(
    mix: str, weights: Weights, matrices: Sequence[str], *, informed: bool
) -> Callable[[str, tuple[int, ...]], Chosen]:
    """Return a function that chooses the format of a matrix, by its name in the checkpoint and its shape.

    mix: a key of ``types.MIXES``.
    weights: the source's tensors; every one must have a place in the file.
    matrices: names in the checkpoint of all matrices that could be rounded.
    informed: the inputs' statistics are known.

    Raises UnsupportedModel for a model that cannot be written.
    """
    config = config_of(weights.model)
    config_fields(config)  # what cannot be said is refused here
    names = Names(config)
    for stored in written_names(weights):
        names.place(stored)
    placed = {name: names.place(f"{name}.weight").name for name in matrices}
    different = set(placed.values())
    heads = int(config["num_attention_heads"])
    facts = ModelFacts(
        layers=int(config["num_hidden_layers"]),
        values=sum(name.split(".")[2] in ("attn_v", "attn_qkv") for name in different if name.startswith("blk.")),
        experts=experts_of(config),
        share=heads // int(config.get("num_key_value_heads") or heads),
        tied="output.weight" not in different,
        informed=informed,
        family=names.family.architecture,
    )

    if mix == "mxfp4" and not facts.experts:
        raise UnsupportedModel(
            "--gguf-type mxfp4 keeps experts in MXFP4 and all else in Q8_0, as llama.cpp does; this model has none. Use"
            " q4_k_m."
        )

    def choose(stored: str, shape: tuple[int, ...]) -> Chosen:
        stacked = (facts.experts, *shape) if "_exps." in placed[stored] else shape
        return tensor_kind(mix, placed[stored], stacked, facts)

    return choose


def check_gguf_vocabulary(mix: str | None, source: Source, tokenizer: Any, model: Any) -> None:
    """Check that a GGUF file can say the tokenizer of a model folder; a GGUF source's own is copied.

    mix: the GGUF type, None where another format is written.

    Raises UnsupportedModel for a tokenizer that has no name there.
    """
    if mix is not None and source.path.is_dir():
        vocabulary_fields(tokenizer, int(config_of(model)["vocab_size"]))


def gguf_notes(model: Any) -> list[str]:
    """Return what a plan says of a model in GGUF."""
    return config_notes(config_of(model))


def experts_of(config: dict[str, Any]) -> int:
    """Return how many experts a layer has, 0 for a dense model."""
    return int(config.get("num_experts") or config.get("num_local_experts") or 0)


def written_names(weights: Weights) -> list[str]:
    """Return the names under which everything is written, tensors without a parameter of the skeleton among them."""
    used = {part for ref in weights.sources.values() for part in (ref.joined or (ref.name,))}
    beside = [name for name in weights.source.names() if name not in used and not name.endswith(COMPUTED)]
    return [*dict.fromkeys([*weights.names.values(), *beside])]
