"""One model type from end to end: a tiny model of it is inspected, quantized, loaded, compared with transformers.

Runs in a child process (``architectures.py``): what crashes or hangs there ends only itself.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tiny_models import VOCAB, Kind, tiny_model, why_not_on_text
from torch import Tensor

ROUNDING = 1e-5  # relative, of logits that two ways of the same float32 arithmetic give
PACKED = 1e-3  # of kernels that sum in another order, with scales in 16 bit
TIE = 1e-3  # logits this near each other may swap their places in a greedy choice
NEW_TOKENS = 8
PROMPTS = (7, 11)  # tokens
GROUP = 32
UNKNOWN, PADDING = "<unknown>", "<padding>"
CALIBRATION = dict(samples=2, seq_len=48)
ENDS = (
    "passed", "all but the check", "refused", "crashed", "wrong", "not built", "not on text", "needs a package",
)  # fmt: skip


class Wrong(AssertionError):
    """Numbers that should be equal are not."""


def trial(kind: Kind) -> dict[str, Any]:
    """How one type ends: ``end`` is one of ENDS; else than passed with ``stage``, ``message`` and where it stopped.

    ``check`` is there, with the same three, if ``inspect --check`` would fail; what a conversion does is tried anyway.
    """
    reason = why_not_on_text(kind)
    if reason:
        return {"end": "not on text", "message": reason}
    stages = Stages(kind)
    with tempfile.TemporaryDirectory(prefix="quantkit-trial-") as folder, silence():
        try:
            for name, run in stages.all(Path(folder)):
                stages.now = name
                run()
        except BaseException as error:  # what it raises is the result
            return {**stages.found, **ended(error, stages.now), "stage": stages.now}
    return {**stages.found, "end": "all but the check" if "check" in stages.found else "passed"}


def ended(error: BaseException, stage: str) -> dict[str, Any]:
    """How a stage that raised ends, what it said and where it stopped."""
    from quantkit.errors import QuantkitError

    if isinstance(error, Wrong):
        return {"end": "wrong", "message": first_line(error)}
    end = "refused" if isinstance(error, QuantkitError) else "crashed"
    if stage == "build":
        end = "needs a package" if isinstance(error, ImportError) else "not built"
    return {"end": end, "message": first_line(error), "at": place(error)}


class Stages:
    """What is done with one type, one after another; ``now`` is where it stands, ``found`` what it saw."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.now = "build"
        self.found: dict[str, Any] = {}
        self.model: Any = None
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(3, VOCAB - 66, (2, 24), generator=generator)
        self.expected: Tensor = torch.empty(0)
        self.loaded: Any = None

    def all(self, folder: Path) -> list[tuple[str, Callable[[], None]]]:
        source = folder / "source"
        return [
            ("build", self.build),
            ("save", lambda: self.save(source)),
            ("inspect", lambda: self.inspect(source)),
            ("check", lambda: self.check(source)),
            ("load", lambda: self.load(source)),
            ("rtn", lambda: self.convert(source, folder / "rtn", "rtn")),
            ("rtn, read back", lambda: self.compare(source, folder / "rtn", dequantize=True)),
            ("gptq", lambda: self.convert(source, folder / "gptq", "gptq")),
            ("gptq, packed", lambda: self.compare(source, folder / "gptq", dequantize=False)),
            ("generate", lambda: self.generate(source)),
        ]

    @torch.no_grad()
    def build(self) -> None:
        self.model = tiny_model(self.kind)
        self.found["weights"] = sum(parameter.numel() for parameter in self.model.parameters())
        self.expected = logits(self.model, self.ids)
        if self.expected.shape[:2] != self.ids.shape or not self.expected.isfinite().all():
            raise ValueError(f"its logits are {tuple(self.expected.shape)}, or not finite")

    def save(self, source: Path) -> None:
        """In bf16, as models are published; the values are exact in it (``fill_random``)."""
        copy.deepcopy(self.model).to(torch.bfloat16).save_pretrained(source)
        write_tokenizer(source)

    def inspect(self, source: Path) -> None:
        from quantkit.cli.inspect import command

        command.main([str(source)], standalone_mode=False)

    def check(self, source: Path) -> None:
        """What ``inspect --check`` proves. A failure is kept apart, as a conversion does not need the proof."""
        from quantkit.checkpoint.open import open_source
        from quantkit.model.check import check_model

        try:
            proof = check_model(open_source(source).config)
            if not proof.difference <= ROUNDING:
                raise Wrong(f"stepping its twin differs from its own forward by {proof.difference:.1e}")
        except TimeoutError:
            raise
        except BaseException as error:  # what it raises is the result
            self.found["check"] = ended(error, self.now)

    def load(self, source: Path) -> None:
        import quantkit

        self.loaded = quantkit.load(source, dtype="float32", device="cpu")
        self.found["load"] = same(self.loaded(self.ids), self.expected, ROUNDING)

    def convert(self, source: Path, out: Path, method: str) -> None:
        import quantkit

        text = source / "calibration.txt"
        options: dict[str, Any] = {} if method == "rtn" else {**CALIBRATION, "calibration": str(text)}
        report = quantkit.convert(source, out=out, method=method, group_size=GROUP, **options)
        self.found["linears"] = len(report.layers)
        self.found["notes"] = [note for note in report.notes if "sample" in note]

    @torch.no_grad()
    def compare(self, source: Path, out: Path, *, dequantize: bool) -> None:
        """A converted folder against transformers' model with the dequantized weights in it."""
        import quantkit

        expected = self.reference(source, out)
        quantized = quantkit.load(out, dtype="float32", device="cpu", dequantize=dequantize, head_bits=16)
        self.found[self.now] = same(quantized(self.ids), expected, ROUNDING if dequantize else PACKED)

    def reference(self, source: Path, out: Path) -> Tensor:
        """Logits of the dequantized weights, by transformers where it reads the names they are written under."""
        import quantkit

        plain = out.parent / f"{out.name}-plain"
        write_dequantized(source, out, plain, conv1d_names(self.model))
        model, info = type(self.model).from_pretrained(plain, dtype=torch.float32, output_loading_info=True)
        lost = sorted(info["missing_keys"]) + sorted(map(str, info["mismatched_keys"]))
        self.found["reference"] = "transformers"
        if not lost:
            return logits(model.eval(), self.ids)
        self.found["reference"] = f"quantkit, dequantized ({lost[0]} is named in another way)"
        return quantkit.load(out, dtype="float32", device="cpu", dequantize=True)(self.ids)

    @torch.no_grad()
    def generate(self, source: Path) -> None:
        from transformers import PreTrainedTokenizerFast

        # some types insist on a tokenizer of their own, which splits the numbers into digits
        self.loaded.tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(source / "tokenizer.json"))
        prompts = [self.ids[row, :length].tolist() for row, length in enumerate(PROMPTS)]
        texts = [" ".join(map(str, prompt)) for prompt in prompts]
        answers = self.loaded.generate(texts, max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
        for prompt, answer in zip(prompts, answers, strict=True):
            given = list(answer.tokens)
            if given == generated(self.model, prompt):
                continue
            self.found["generate"] = "as its forward chooses; transformers' generate differs or fails"
            check_choices(self.model, prompt, given)


@torch.no_grad()
def logits(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids, use_cache=False).logits


def generated(model: Any, prompt: list[int]) -> list[int]:
    """Greedy tokens of transformers' own generate; empty where it has none for tokens alone."""
    model.generation_config.eos_token_id = None
    model.generation_config.forced_eos_token_id = None
    ids = torch.tensor([prompt])
    try:
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return []
    return out[0, len(prompt) :].tolist()


def check_choices(model: Any, prompt: list[int], given: list[int]) -> None:
    """Raise Wrong if a token is not the one that the model's forward on the whole text finds best."""
    text = list(prompt)
    if len(given) != NEW_TOKENS:
        raise Wrong(f"{len(given)} tokens instead of {NEW_TOKENS}")
    for index, token in enumerate(given):
        last = logits(model, torch.tensor([text]))[0, -1]
        best = int(last.argmax())
        if float(last[best] - last[token]) > TIE:
            raise Wrong(f"token {index} is {token}, its forward chooses {best}")
        text.append(token)


def same(got: Tensor, expected: Tensor, tolerance: float) -> float:
    """The relative difference. Raises Wrong if it is more than rounding."""
    if got.shape != expected.shape:
        raise Wrong(f"logits {tuple(got.shape)} instead of {tuple(expected.shape)}")
    difference = float((got - expected).norm() / expected.norm())
    if not difference <= tolerance:
        raise Wrong(f"logits differ by {difference:.1e}")
    return difference


def write_tokenizer(folder: Path) -> None:
    """A tokenizer whose words are the numbers of the tokens, and a text to calibrate on."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {UNKNOWN: 0, PADDING: 1, **{str(index): index for index in range(2, VOCAB)}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "TokenizersBackend", "unk_token": UNKNOWN, "pad_token": PADDING}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    text = torch.randint(3, VOCAB - 66, (600,), generator=torch.Generator().manual_seed(2)).tolist()
    (folder / "calibration.txt").write_text(" ".join(map(str, text)))


def write_dequantized(source: Path, out: Path, plain: Path, turned: tuple[str, ...]) -> None:
    """A float32 checkpoint of what a converted folder says, under the names it has there.

    In float32 throughout: transformers converts dtypes in threads, which torch cannot start in a forked child.

    turned: ends of names of modules that store their matrix transposed.
    """
    from safetensors.torch import save_file

    from quantkit.checkpoint.open import open_source
    from quantkit.formats.reader import QuantizedReader

    reader = QuantizedReader(open_source(out))
    stored = {name: reader.source.read(name) for name in reader.plain_names()}
    tensors = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in stored.items()}
    for name in reader.modules:
        weight = reader.module(name).dequantize().float()
        tensors[f"{name}.weight"] = weight.T if name.endswith(turned) else weight
    plain.mkdir()
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, plain / "model.safetensors")
    for file in ("config.json", "generation_config.json"):
        if (source / file).exists():
            (plain / file).write_bytes((source / file).read_bytes())


def conv1d_names(model: Any) -> tuple[str, ...]:
    """Names of GPT-2's kind of linear, from the base model on: a checkpoint may have a prefix more."""
    from transformers.pytorch_utils import Conv1D

    return tuple(name for name, module in model.base_model.named_modules() if isinstance(module, Conv1D))


def first_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0] or type(error).__name__
    text = re.sub(rf"{re.escape(tempfile.gettempdir())}/quantkit-trial-[^/]*/", "", text)
    named = type(error).__module__.startswith("quantkit") or isinstance(error, Wrong)
    return text if named else f"{type(error).__name__}: {text}"


def place(error: BaseException) -> str:
    """File and line of quantkit where it stopped, or of what it called if quantkit had no part in it."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/quantkit/" in frame.filename and "site-packages" not in frame.filename]
    frame = (ours or frames)[-1]
    inside = frame.filename.rpartition("/quantkit/")[2] if ours else Path(frame.filename).name
    return f"{inside}:{frame.lineno}"


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Neither warnings nor output: 280 types have much to say."""
    with warnings.catch_warnings(), open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        warnings.simplefilter("ignore")
        with contextlib.redirect_stderr(nothing):
            yield
