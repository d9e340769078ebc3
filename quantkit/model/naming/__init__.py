"""Map stored tensors to a skeleton's parameters, and parameters to the names they are written under.

transformers renames tensors while it loads (mixtral's ``block_sparse_moe.experts.0.w1`` is one of the experts of
``mlp.experts.gate_up_proj``). Its own mapping says how; here it is read in both directions, expert by expert.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from quantkit.checkpoint.names import ParameterPart
from quantkit.model.mixture.experts import expert_modules
from quantkit.model.mixture.layout import GATED

# What tensors of layers that predict further tokens are called, in all of qwen3_next, nemotron_h, longcat_flash, mimo.
MTP = re.compile(r"(?:^|\.)mtp(?:_layers)?\.")
HALVES = {"gate_up_proj": GATED}  # other fused tensors hold one projection, of their own name


@dataclass(frozen=True)
class _PerExpert:
    """A rule of transformers: tensors that a checkpoint stores one per expert -> one fused tensor.

    sources: patterns with ``*`` for the expert, in the order of the projections that the target stacks. Without it a
    tensor holds one projection of all experts.
    """

    transform: Any
    sources: tuple[str, ...]
    projections: tuple[str, ...]


class Naming:
    """The names of one skeleton. Build it before any parameter is taken out of the skeleton."""

    def __init__(self, model: nn.Module) -> None:
        self.prefix = getattr(model, "base_model_prefix", "")
        self.parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self.parameters.update(model.state_dict())  # with buffers that checkpoints store
        self.experts = dict(expert_modules(model))
        self.left_out = [re.compile(text) for text in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
        self.config: Any = model.config
        self.renamings, self.rules, self.stacks, self.joins, self.converters = _mapping(model)

    def beside(self, stored: str) -> bool:
        """Tell whether a stored tensor belongs to a part of the model that transformers has no module for.

        It says so itself: layers that predict further tokens (MTP), a head of another task. What is called mtp, and
        the layers behind the last one of which config.json says that they are such, count too.
        """
        keys = (stored, f"{self.prefix}.{stored}")
        known = any(pattern.search(key) for pattern in (*self.left_out, MTP) for key in keys)
        return known or any(self._further_layer(key) or self._no_expert(key) for key in keys)

    def _further_layer(self, key: str) -> bool:
        """Whether a stored tensor is of one of the ``num_nextn_predict_layers`` behind the decoder's last layer."""
        config = self.config.get_text_config()
        further, layers = (getattr(config, name, None) for name in ("num_nextn_predict_layers", "num_hidden_layers"))
        found = re.search(r"(?:^|\.)layers\.(\d{1,6})\.", key)
        if found is None or not isinstance(further, int) or not isinstance(layers, int):
            return False
        return layers <= int(found[1]) < layers + further

    def _no_expert(self, key: str) -> bool:
        """Whether a stored tensor is kept for a choice that is no expert (longcat_flash's experts of identity)."""
        for renaming in self.renamings:
            key, _ = renaming.rename_source_key(key)
        found = re.fullmatch(r"(.+)\.(\d+)\.([^.]+)\.weight", key)
        experts = self.experts.get(found[1]) if found else None
        return found is not None and experts is not None and len(experts) <= int(found[2]) < max(experts.choices)

    def parts_of(self, stored: str) -> list[ParameterPart]:
        """List the parameters that a stored tensor holds: none, one, or all experts' parts of a fused one."""
        for key in (stored, f"{self.prefix}.{stored}", stored.removeprefix(f"{self.prefix}.")):
            parts = self._parts_of(key)
            if parts:
                return parts
        return []

    def module(self, stored: str) -> str | None:
        """Return the module that a stored (quantized) module belongs to: the owner of the weight it would have."""
        parts = self.parts_of(f"{stored}.weight")
        whole = len(parts) == 1 and parts[0].index is None and parts[0].part is None
        return parts[0].parameter.removesuffix(".weight") if whole else None

    def _parts_of(self, key: str) -> list[ParameterPart]:
        if key in self.parameters:
            return [ParameterPart(key)]
        for renaming in self.renamings:
            key, _ = renaming.rename_source_key(key)
        if key in self.parameters:
            return [ParameterPart(key)]
        for rule in self.rules:
            target, pattern = rule.transform.rename_source_key(key)
            if pattern is not None:
                return self._of_one_expert(rule, key, target, pattern)
        for stack in self.stacks:
            target, pattern = stack.transform.rename_source_key(key)
            owner = target.rpartition(".")[0]
            if pattern is not None and owner in self.experts:
                local = f"{stack.projections[stack.sources.index(pattern)]}.weight"
                each = enumerate(f"{owner}.{index}.{local}" for index in range(len(self.experts[owner])))
                return [ParameterPart(name, index, alone=True) for index, name in each if name in self.parameters]
        for join in self.joins:
            target, pattern = join.rename_source_key(key)
            if pattern is not None and target in self.parameters:
                return [self._of_a_join(join, key, target, pattern)]
        return self._of_all_experts(key)

    def _of_a_join(self, join: Any, key: str, target: str, pattern: str) -> ParameterPart:
        """Return which part of a parameter a tensor is, of those named one by one or numbered (qwen4_exp's shards)."""
        sources = list(join.source_patterns)
        counted = join.operations[0].num_shards_attribute
        if counted is None:
            return ParameterPart(target, part=sources.index(pattern), parts=len(sources))
        number = _numbered(pattern).search(key)
        assert number is not None
        parts = int(getattr(self.config.get_text_config(), counted))
        return ParameterPart(target, part=int(number[1]), parts=parts)

    def converter(self, stored: str) -> tuple[Any, str, str] | None:
        """Return the rule of transformers that computes parameters from a stored tensor, if any.

        With it the name of the first of these parameters, and the pattern that the tensor matches.
        """
        for key in (stored, f"{self.prefix}.{stored}"):
            for renaming in self.renamings:
                key, _ = renaming.rename_source_key(key)
            for rule in self.converters:
                target, pattern = rule.rename_source_key(key)
                if pattern is not None:
                    return rule, target, pattern
        return None

    def _of_one_expert(self, rule: _PerExpert, key: str, target: str, pattern: str) -> list[ParameterPart]:
        number = _numbered(pattern).search(key)
        owner = target.rpartition(".")[0]
        if number is None or owner not in self.experts:
            return []
        name = f"{owner}.{number[1]}.{rule.projections[rule.sources.index(pattern)]}.weight"
        return [ParameterPart(name)] if name in self.parameters else []

    def _of_all_experts(self, key: str) -> list[ParameterPart]:
        owner, _, local = key.rpartition(".")
        if owner not in self.experts or local not in self.experts[owner].layout.names():
            return []
        layout = self.experts[owner].layout
        names = (name for name, _ in self.experts[owner].named_parameters() if name[0].isdigit())
        each = [(int(name.partition(".")[0]), f"{owner}.{name}", name.partition(".")[2]) for name in names]
        return [ParameterPart(full, index) for index, full, tail in each if layout.fused_name(tail) == local]

    def written(self, parameter: str) -> str:
        """Return the name that checkpoints of this family give a parameter.

        That is its own name where transformers does not rename it.
        """
        for name in (*self._as_one_expert(parameter), parameter):
            for candidate in self._unrenamed(name):
                if self.parts_of(candidate) == [ParameterPart(parameter)]:
                    return candidate
        return parameter

    def gathers(self, parameter: str) -> bool:
        """Tell whether transformers finds an expert's weight that is stored by itself, and puts it among the others."""
        return bool(self._as_one_expert(parameter))

    def _as_one_expert(self, parameter: str) -> list[str]:
        """What transformers' rules gather into the fused tensor that holds this parameter."""
        found = re.fullmatch(r"(.+)\.(\d+)\.([^.]+\.[^.]+)", parameter)
        if found is None or found[1] not in self.experts:
            return []
        owner, index, local = found.groups()
        fused = f"{owner}.{self.experts[owner].layout.fused_name(local)}"
        names = []
        for rule in self.rules:
            target = _plain(rule.transform.target_patterns[0])
            for source, projection in zip(rule.sources, rule.projections, strict=True):
                if local == f"{projection}.weight" and fused.endswith(target):
                    names.append(fused.removesuffix(target) + _plain(source).replace("*", index))
        return names

    def _unrenamed(self, name: str) -> list[str]:
        """What a name may have been before transformers renamed it, likeliest first."""
        candidates = [name]
        for renaming in reversed(self.renamings):
            candidates = [renaming.reverse_transform().rename_source_key(candidates[0])[0], *candidates]
        return candidates


def _numbered(pattern: str) -> re.Pattern[str]:
    """Return a pattern of transformers with ``*`` for a number as one that finds the number at the end of a name."""
    return re.compile(re.escape(_plain(pattern)).replace(r"\*", r"(\d+)") + "$")


def _plain(pattern: str) -> str:
    """Return what a pattern of transformers matches, ``*`` for a number excepted: some of them escape their dots."""
    return pattern.replace("\\.", ".")


def _mapping(model: nn.Module) -> tuple[list[Any], list[_PerExpert], list[_PerExpert], list[Any], list[Any]]:
    """transformers' renamings for a model, and its rules: those that gather experts, that fuse projections of which
    each is stored for all experts, that join tensors into one, and all.

    The others of all are for towers alone (``converted.py``): of the language model, what they would convert has no
    place here, and is refused by name.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    transforms = get_model_conversion_mapping(model, add_legacy=False)  # type: ignore[arg-type]
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    rules, stacks, joins = [], [], []
    for transform in transforms:
        if not isinstance(transform, WeightConverter) or len(transform.target_patterns) != 1:
            continue
        fused = transform.target_patterns[0].rpartition(".")[2]
        steps = [(type(op).__name__, getattr(op, "dim", None)) for op in transform.operations]
        gathers = steps in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])
        sources = tuple(transform.source_patterns)
        projections = HALVES.get(fused, (fused,))
        if gathers and len(projections) == len(sources):
            rules.append(_PerExpert(transform, sources, projections))
        elif steps == [("Concatenate", 1)] and len(projections) == len(sources) and "*" not in "".join(sources):
            stacks.append(_PerExpert(transform, sources, projections))
        elif steps == [("Concatenate", 0)]:
            joins.append(transform)
    return renamings, rules, stacks, joins, [each for each in transforms if isinstance(each, WeightConverter)]
