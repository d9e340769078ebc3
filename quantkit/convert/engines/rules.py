"""Rules that tell which engines load a checkpoint, up to which tensor-parallel size, and why another one does not.

What a rule is, and how rules are applied; the rules themselves are in ``table.py``. Each was read in the sources of the
version named, and quotes the file and line that decides; a test runs none of them (mixtures of experts: see
``not_shown``). "Loads" means: with a plain install, on the devices that the verdict names (``devices.py``); a GPU is
one of compute capability 8.0 or newer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quantkit.convert.engines.verdict import Verdict
from quantkit.convert.options.rules import EXPERTS, FUSED
from quantkit.convert.plan.targets import Target

# tensor-parallel sizes that are tried
LARGEST = 64

# Linears whose inputs are split over the ranks of a tensor-parallel group (vLLM: RowParallelLinear); the rest split
# outputs.
ROW_PARALLEL = frozenset(
    {"o_proj", "out_proj", "down_proj", "fc2", "dense", "dense_4h_to_h", "c_proj", "wo", "w2", "o"}
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The facts of a checkpoint that rules decide by.

    format: name of the format.
    weights: the quantized weights.
    heads: attention heads.
    kv_heads: key-value heads.
    bfloat16: engines will compute in bfloat16.
    family: config's model_type.
    mixture: its blocks hold experts, quantized or not.
    folder: where it lies, as commands name it; OUT where that is not known yet.
    fp8_cache: it holds scales of an fp8 KV cache that other engines read.
    auto_class: the class of transformers that loads it.
    dequantized: its config asks transformers to dequantize it, as ours does where that is needed.
    """

    format: str
    weights: Sequence[Target]
    heads: int
    kv_heads: int
    bfloat16: bool = False
    family: str = ""
    mixture: bool = False
    folder: str = "OUT"
    fp8_cache: bool = False
    auto_class: str = "AutoModelForCausalLM"
    dequantized: bool = True

    @property
    def linears(self) -> list[Target]:
        """The quantized linears, without head and embeddings."""
        return [weight for weight in self.weights if weight.kind == "linear"]

    def schemes(self) -> set[Any]:
        """Return the different schemes of the quantized weights."""
        return {weight.scheme for weight in self.weights}


Test = Callable[[Checkpoint], str | None]
"""What is wrong, or None."""
RankSplit = Callable[[Checkpoint, int], str | None]
"""What is wrong on that many ranks, or None."""


Mixtures = Callable[[Checkpoint], tuple[str, str] | None]
"""Why a mixture of experts does not load, and the reader's line ("" if none decides).

None where it was shown to load.
"""


def not_shown(checkpoint: Checkpoint) -> tuple[str, str] | None:
    """Refuse mixtures of experts, on which the engine was not run: linears show nothing about fused experts."""
    return (
        (
            "not shown to load mixtures of experts in this format; experts named one by one"
            f" ({checkpoint.family or 'this model'}) were not run in it."
        ),
        "",
    )


# Linears of the common decoder, under the names of the families that engines were run with or read for.
COMMON = frozenset(
    {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj"),
        *("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h", "out_proj", "fc1", "fc2", "c_fc", "c_proj"),
    }
)
# GPT-2 and its kin hold their linears as Conv1D, whose weights lie transposed.
TRANSPOSED = frozenset({"c_attn"})


def unseen(checkpoint: Checkpoint) -> tuple[str, str] | None:
    """Refuse layers that are not attention and MLP of the common decoder (state spaces, linear attention, Conv1D).

    What was read of an engine says nothing about how it loads packed weights there.
    """
    for weight in checkpoint.linears:
        last = last_name(weight)
        if last in TRANSPOSED:
            return f"{weight.name} is a Conv1D of transformers; not shown to load packed ones.", ""
        if last not in COMMON:
            return f"not shown to load packed layers like {weight.name}.", ""
    return None


@dataclass(frozen=True, slots=True)
class EngineRule:
    """A reason not to load a checkpoint. formats: those that it applies to; () for all."""

    formats: tuple[str, ...]
    reader: str
    test: Test


def on_nvidia(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return where an engine runs that has kernels for NVIDIA's GPUs only."""
    return ("on an NVIDIA GPU",)


@dataclass(frozen=True, slots=True)
class Engine:
    """A program that loads checkpoints: the formats that it reads, and the checkpoints that it refuses."""

    name: str
    version: str
    formats: tuple[str, ...]
    # the reader's line that refuses a format it does not know
    unknown: str
    rules: tuple[EngineRule, ...]
    # (reader, rule)
    splits: tuple[tuple[str, RankSplit], ...] = ()
    notes: tuple[Callable[[Checkpoint], str | None], ...] = ()
    mixtures: Mixtures = not_shown
    layers: Mixtures = unseen
    # where a checkpoint that loads does, and where it does not
    devices: Callable[[Checkpoint], tuple[str, ...]] = on_nvidia
    # that serves it
    command: Callable[[Checkpoint], str] | None = None


def judge(engine: Engine, checkpoint: Checkpoint) -> Verdict:
    """Return one engine's verdict: the first rule that objects decides."""
    form = checkpoint.format
    if form not in engine.formats:
        reason = f"does not read the format {form}."
        return Verdict(engine.name, engine.version, False, None, reason, engine.unknown, unread_format=form)
    objection = _objection(engine, checkpoint)
    if objection is not None:
        return Verdict(engine.name, engine.version, False, None, *objection)
    largest, reason, reader = largest_split(engine.splits, checkpoint)
    notes = tuple(note for make in engine.notes if (note := make(checkpoint)) is not None)
    return loading(engine, checkpoint, Verdict(engine.name, engine.version, True, largest, reason, reader, notes))


def loading(engine: Engine, checkpoint: Checkpoint, verdict: Verdict) -> Verdict:
    """Add to the verdict of a checkpoint that loads where that holds, and the command."""
    command = None if engine.command is None else engine.command(checkpoint)
    return replace(verdict, devices=engine.devices(checkpoint), command=command)


def _objection(engine: Engine, checkpoint: Checkpoint) -> tuple[str, str] | None:
    """Return why the engine, which reads the format, does not load it on one GPU, with the deciding line."""
    objection = engine.mixtures(checkpoint) if has_experts(checkpoint) else None
    objection = objection or engine.layers(checkpoint)
    if objection is not None:
        return objection
    for rule in engine.rules:
        reason = rule.test(checkpoint) if not rule.formats or checkpoint.format in rule.formats else None
        if reason is not None:
            return reason, rule.reader
    return _split_objection(engine.splits, checkpoint, 1)


Splits = tuple[tuple[str, RankSplit], ...]


def _split_objection(splits: Splits, checkpoint: Checkpoint, ranks: int) -> tuple[str, str] | None:
    """Return why the engine does not load it on so many ranks, with the deciding line."""
    answers = ((split(checkpoint, ranks), reader) for reader, split in splits)
    return next(((reason, reader) for reason, reader in answers if reason is not None), None)


def largest_split(splits: Splits, checkpoint: Checkpoint) -> tuple[int, str, str]:
    """Return the largest size that loads, and what stops the next one that the number of heads allows.

    splits: what is asked of every size, with the reader's line; none for an engine that does not split.
    checkpoint: the facts to judge.
    """
    if not splits:
        return 1, "does not split a model.", ""
    largest, stop, where = 1, "", ""
    for ranks in range(2, LARGEST + 1):
        if checkpoint.heads % ranks:
            continue
        objection = _split_objection(splits, checkpoint, ranks)
        if objection is None:
            largest, stop, where = ranks, "", ""
        elif not stop:
            stop, where = f"{ranks} ranks: {objection[0]}", objection[1]
    return largest, stop or f"{checkpoint.heads} attention heads.", where


def heads(checkpoint: Checkpoint, ranks: int) -> str | None:
    """Object if attention heads cannot be divided whole, or key-value heads neither divided nor repeated whole.

    checkpoint: the facts to judge.
    ranks: the tensor-parallel size.
    """
    if checkpoint.heads % ranks:
        return f"{checkpoint.heads} attention heads on {ranks} ranks."
    few, many = sorted((checkpoint.kv_heads, ranks))
    return f"{checkpoint.kv_heads} key-value heads on {ranks} ranks." if many % few else None


def last_name(weight: Target) -> str:
    """Return the last part of a weight's module name."""
    return weight.name.rpartition(".")[2]


def is_row_parallel(weight: Target) -> bool:
    """Tell whether engines split a weight's inputs over the ranks."""
    return weight.kind == "linear" and last_name(weight) in ROW_PARALLEL


def inputs_on(weight: Target, ranks: int) -> float:
    """Return the inputs of a weight on one rank (a fraction where it cannot be split)."""
    return weight.in_features / ranks if is_row_parallel(weight) else weight.in_features


def whole_groups(checkpoint: Checkpoint, ranks: int) -> str | None:
    """Object if a group of inputs would lie on two ranks.

    checkpoint: the facts to judge.
    ranks: the tensor-parallel size.
    """
    for weight in checkpoint.linears:
        inputs, size = inputs_on(weight, ranks), weight.scheme.group_size or 1
        if inputs % size:
            return f"{weight.name}: {inputs:g} inputs a rank are no multiple of its groups of {size}."
    return None


def fused_rows(checkpoint: Checkpoint, ranks: int) -> list[tuple[str, int, float, float]]:
    """Return each matrix on one rank as engines see it, q/k/v and gate/up as one: (name, bits, rows, inputs).

    checkpoint: the facts to judge.
    ranks: the tensor-parallel size.
    """
    sums: dict[str, tuple[str, int, float, float]] = {}
    for weight in checkpoint.linears:
        owner, _, last = weight.name.rpartition(".")
        fused = next((group for group in FUSED if last in group), frozenset({last}))
        rows: float = weight.out_features if is_row_parallel(weight) else weight.out_features / ranks
        if last in ("k_proj", "v_proj") and ranks > checkpoint.kv_heads:  # repeated, not split further
            rows = weight.out_features / checkpoint.kv_heads
        key = f"{owner}.{'+'.join(sorted(fused))}"
        name, bits, known, inputs = sums.get(key, (weight.name, weight.scheme.bits, 0.0, inputs_on(weight, ranks)))
        sums[key] = (name, bits, known + rows, inputs)
    return list(sums.values())


def has_experts(checkpoint: Checkpoint) -> bool:
    """Tell whether it is a mixture of experts, also where the experts themselves stay at 16 bit."""
    return checkpoint.mixture or quantizes_experts(checkpoint)


def quantizes_experts(checkpoint: Checkpoint) -> bool:
    """Tell whether the experts are quantized."""
    return any(EXPERTS.match(weight.name) for weight in checkpoint.weights)


def first(checkpoint: Checkpoint, wrong: Callable[[Target], bool]) -> Target | None:
    """Return the first weight for which ``wrong`` is true, None if there is none."""
    return next((weight for weight in checkpoint.weights if wrong(weight)), None)
