"""The folders of the matrix: written here, with what quantkit itself computes from each and says of each engine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from models import SENTENCES, token_ids, write_model
from reading import log_softmax
from safetensors.torch import load_file

import quantkit
from quantkit.checkpoint.open import open_source
from quantkit.checkpoint.tokenizer import write_tokenizer
from quantkit.convert.api import plan_request
from quantkit.convert.engines.lint import gguf_readers, lint_folder, lint_plan
from quantkit.convert.engines.rules import Checkpoint
from quantkit.convert.engines.verdict import Verdict
from quantkit.convert.plan.plan import Plan
from quantkit.formats.reader import QuantizedReader

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

HERE = Path(__file__).resolve().parent
NEW_TOKENS = 16
NAMES = {"from": "origin", "format": "written"}  # of matrix.toml
PEERS, PEERS_WORK = (
    "QUANTKIT_PEERS",
    HERE.parent.parent / "build" / "eval",
)  # where eval/peers/run.py keeps environments


@dataclass(frozen=True)
class Case:
    """One folder. origin: id of the case that it is repacked from."""

    id: str
    model: str
    options: dict[str, Any] | None = None
    origin: str | None = None
    # another tool writes it: a script of eval/ and its arguments (SOURCE stands for the model, OUT for the folder)
    by: tuple[str, ...] = ()
    # the format that it is written in, where quantkit does not write it
    written: str = ""
    # what the table calls it
    label: str = ""
    # by reader: of the difference, where the reader computes with rounded activations or another cache
    limits: dict[str, float] = field(default_factory=dict)
    # by reader: flags of a processor without which its numbers are wrong
    needs: dict[str, list[str]] = field(default_factory=dict)

    @property
    def format(self) -> str:
        """The format's name; "" for the original."""
        if self.by:
            return self.written
        return "" if self.options is None else self.options.get("format", "compressed-tensors")


@dataclass
class Folder:
    """A written case. logs: our log-probabilities ``[tokens, vocabulary]``. greedy: our continuation, in float32."""

    case: Case
    path: Path
    scheme: str
    logs: Any
    greedy: list[int]
    verdicts: list[Verdict]
    # another tool's folder: largest difference of a weight from what that tool dequantizes, relative to the largest
    unlike_theirs: float | None = None


def cases(*patterns: str) -> list[Case]:
    """The cases of matrix.toml whose ids match one of the patterns; all without one."""
    rows = tomllib.loads((HERE / "matrix.toml").read_text(encoding="utf-8"))["case"]
    made = [Case(**{NAMES.get(key, key): value for key, value in row.items()}) for row in rows]
    return [case for case in made if not patterns or any(fnmatch(case.id, one) for one in patterns)]


def request(case: Case, folder: Path) -> dict[str, Any]:
    """What is asked of ``quantkit.convert``. Calibration TEXT is a file of the models' own sentences, made here."""
    options = dict(case.options or {})
    if options.get("group_size") == "channel":
        options["group_size"] = None
    if options.get("calibration") == "TEXT":
        text = folder / "models" / "text.txt"
        text.write_text(" ".join(SENTENCES * 4), encoding="utf-8")
        options["calibration"] = str(text)
    return options if case.origin else {"method": "rtn", **options}


def write(wanted: Iterable[Case], folder: Path) -> list[Folder]:
    """Write the cases below ``folder``, with models and originals that they need; what was there is replaced."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "models").mkdir(parents=True)
    every, ids = {case.id: case for case in cases()}, torch.tensor([token_ids()])
    return [_answered(case, _written(case, folder, every), ids) for case in wanted]


def verdicts_of_plan(case: Case, folder: Path) -> list[Verdict] | None:
    """What the engines' table says of a case before it is written; None for what only a folder tells."""
    if case.origin or case.by or case.options is None:
        return None
    planned = plan_request(_model(case.model, folder), folder / "never-written", **request(case, folder))
    if not isinstance(planned, Plan):
        return None
    if planned.problems:
        raise SystemExit(f"{case.id}: {planned.problems[0]}")
    return lint_plan(
        planned.format.name, planned.targets, planned.model.config, planned.source.config, folder=str(folder)
    )


def _model(name: str, folder: Path) -> Path:
    path = folder / "models" / name
    return path if path.exists() else write_model(path, name)


def _written(case: Case, folder: Path, every: dict[str, Case]) -> Path:
    path = folder / case.id
    if path.exists():
        return path / "saved" if (path / "saved").exists() else path
    if case.by:
        return _by_another(case, _model(case.model, folder), path)
    if case.options is None:
        return Path(shutil.copytree(_model(case.model, folder), path))
    source = _written(every[case.origin], folder, every) if case.origin else _model(case.model, folder)
    quantkit.convert(source, path, **request(case, folder))
    return path


def _by_another(case: Case, source: Path, path: Path) -> Path:
    """Let another tool write the folder, in its own environment where it needs one."""
    words = {
        "SOURCE": str(source.resolve()),
        "OUT": str(path.resolve()),
        "PEERS": os.environ.get(PEERS, str(PEERS_WORK)),
    }
    script, *arguments = case.by
    command = [sys.executable, str(HERE.parent / script), *(words.get(word, word) for word in arguments)]
    if subprocess.run(command, check=False, stdout=sys.stderr).returncode:
        raise SystemExit(f"{case.id} could not be written: {' '.join(command)}")
    if (
        path / "saved"
    ).exists():  # eval/peers: the tool's folder, beside its weights as the tool itself dequantizes them
        write_tokenizer(open_source(source), path / "saved")
        return path / "saved"
    return path


def unlike_theirs(path: Path) -> float | None:
    """The largest difference of our weights of a tool's folder from its own, relative to its largest of that matrix.

    Own weights that are numbers of bfloat16 are what the tool rounded to it: ours are rounded alike. None where the
    tool's own were not kept.
    """
    if path.name != "saved":
        return None
    theirs, reader, worst = load_file(path.parent / "model.safetensors"), QuantizedReader(open_source(path)), 0.0
    for name in reader.modules:
        ours: Any = reader.module(name)
        own = theirs[f"{name}.weight"]
        rounded = torch.equal(own.bfloat16().float(), own.float())
        made = ours.dequantize().to(torch.bfloat16 if rounded else torch.float32).float()
        worst = max(worst, float((made - own).abs().max() / own.abs().max()))
    return worst


def _answered(case: Case, path: Path, ids: torch.Tensor) -> Folder:
    """What quantkit computes from the folder: weights as float32 numbers, no cache."""
    source = open_source(path)
    model = quantkit.load(path, device="cpu", dtype="float32", dequantize=True, kv_bits=16)
    with torch.no_grad():
        logs = log_softmax(model(ids)[0].float().numpy())
        text = ids
        for _ in range(NEW_TOKENS):
            text = torch.cat((text, model(text)[:, -1:].argmax(-1)), 1)
    if case.format == "gguf":
        family = str(source.config["model_type"])
        verdicts = gguf_readers(Checkpoint("gguf", [], 0, 0, family=family, folder=str(source.path)))
        scheme = str((case.options or {}).get("gguf_type", case.label)).upper()
    else:
        verdicts = lint_folder(source) if case.format else []
        reader = QuantizedReader(source)
        found = {s if isinstance(s, str) else s.describe() for s in map(reader.scheme, reader.modules)}
        scheme = " + ".join(sorted(found))
    return Folder(case, path, scheme, logs, text[0, ids.shape[1] :].tolist(), verdicts, unlike_theirs(path))


def originals(folders: Iterable[Folder], folder: Path) -> dict[str, Any]:
    """Our log-probabilities of the models that the folders were made from, by name."""
    ids, names = torch.tensor([token_ids()]), sorted({one.case.model for one in folders})
    with torch.no_grad():
        return {
            name: log_softmax(quantkit.load(_model(name, folder), device="cpu", dtype="float32")(ids)[0].numpy())
            for name in names
        }
