"""The work folder of a conversion: what a killed job leaves behind, and what ``--resume`` goes on from.

::

    .NAME.work/                 beside the output folder NAME, or --work-dir
      lock                      held by the process that works here (flock: a kill releases it)
      job.json                  what is converted into what; written first, removed last
      parts/block-0007.json     one finished step: sums of its tensors, and its facts for the report
      parts/block-0007.safetensors
      text.json                 calibration text that the model wrote itself
      measured.json             what each choice of bits would cost, which channels count and which tokens
      guides.safetensors        the numbers of the last
      states-0.bin, .json       hidden states in front of some block; two files in turn
    .NAME.partial-TOKEN/        the output while it is put together, one rename away from its name

Every file of JSON is written, brought to the disk and renamed, and carries a checksum: it is there and whole, or it is
not there. See docs/adr for the order of steps.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import re
import secrets
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from quantkit.calibrate.data import CalibrationWindows
from quantkit.checkpoint.storage.record import AGAIN, SHA256, read_record, write_record
from quantkit.checkpoint.storage.removal import remove
from quantkit.checkpoint.storage.unfinished import partial_folder, put_back, replaced_folder
from quantkit.checkpoint.writer import CheckpointWriter, disk
from quantkit.convert.job.records import RECORD, keep_measured, kept_measured, restored_result, result_record
from quantkit.convert.job.states import StateStore
from quantkit.convert.options.options import ConvertOptions
from quantkit.convert.plan.carried import beside_sha256
from quantkit.convert.plan.inputs import Inputs
from quantkit.convert.plan.job_record import JOB, printable, read_job
from quantkit.convert.plan.paths import busy, check_paths
from quantkit.convert.plan.plan import Plan
from quantkit.convert.plan.self_calibration import windows_in_all
from quantkit.convert.results import BlockResult, BudgetChoice, Measured
from quantkit.core.host import device_name
from quantkit.core.precision import cpu_has_amx
from quantkit.errors import NumericsError, RequestError, UnsupportedModel, WorkFolderError
from quantkit.model.language import text_config
from quantkit.version import __version__

# of the work folder. 3: importance of tokens may have been measured, too; 4: sensitivity is that of scaled channels;
# 5: decisions are kept as indices and numbers
LAYOUT = 5
TEXT = {"ids": [[int]], "name": str, "text_sha256": SHA256, "bos": bool, "seed": int}
INCURABLE = (NumericsError, UnsupportedModel, RequestError)  # the same again would come of the same: nothing is kept


class Work:
    """The work folder of one job, locked. ``writer`` writes parts and output; ``states`` keeps hidden states.

    Raises RequestError if another process or another job has the folder.
    """

    def __init__(self, plan: Plan) -> None:
        o = plan.options
        self.folder = o.work_folder
        self.resumed = o.resume
        # of the text that the model writes itself: windows, tokens of each, token ids
        vocabulary = range(int(text_config(plan.model).vocab_size))
        self._text_shape = (windows_in_all(o), o.seq_len, vocabulary)
        identity = job_of(plan)  # takes a while: before anything is made that would have to be tidied up
        with disk(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.folder)
        self._new = False
        try:
            self._job = self._open(o, identity)
            self.states = StateStore(self.folder)
            self.writer = CheckpointWriter(
                o.out, overwrite=o.overwrite, stem=plan.format.stem, kept=self.folder, token=self._job["token"]
            )
        except BaseException:
            if self._new:  # nothing is done yet: the same command may simply be given again
                _remove(self.folder)
            self.release()
            raise

    def _open(self, options: ConvertOptions, identity: dict[str, Any]) -> dict[str, Any]:
        check_paths(options)  # again: now nobody else can change it
        if options.resume:
            job = read_job(self.folder)
            assert job is not None
            differences = _differences(job["identity"], identity)
            if differences:
                raise RequestError(
                    "\n".join(
                        [
                            f"{self.folder}: is the work folder of another job:",
                            *(f"  - {difference}" for difference in differences),
                            "Repeat the command of that job, or pass --overwrite instead of --resume to start anew.",
                        ]
                    )
                )
            return job
        if (self.folder / "job.json").exists():
            _discard(self.folder, options.out)
        self._new = True
        job = {"identity": identity, "token": secrets.token_hex(4), "finished": None}
        with disk(self.folder):
            write_record(self.folder / "job.json", job)
        return job

    def record(self, part: str, result: BlockResult, *, over: bool = False) -> None:
        """Keep one finished step durably.

        part: the name of the step.
        result: its tensors and facts.
        over: its tensors replace those of earlier steps.
        """
        self.writer.add_part(part, result.parts, result_record(result), over=over)

    def replay(self, part: str) -> BlockResult | None:
        """Return the result that an earlier process recorded, None if there is none.

        It has no tensors: those count as written.

        part: the name of the step.
        """
        facts = self.writer.find_part(part) if self.resumed else None
        return None if facts is None else restored_result(facts, self.folder / "parts" / f"{part}.json")

    def check_decided(self, wanted: set[str], decided: set[str]) -> None:
        """Check that the steps, those of earlier processes among them, decided every module and no other.

        wanted: stored names of the modules to quantize.
        decided: stored names of the modules that were quantized.

        Raises WorkFolderError naming one that is missing or unexpected.
        """
        odd = sorted(wanted ^ decided)
        if odd:
            raise WorkFolderError(f"{self.folder / 'parts'}: {odd[0][:100]!r} is missing or too much. {AGAIN}")

    def keep_text(self, windows: CalibrationWindows) -> None:
        """Keep the text that the model wrote for its own calibration."""
        with disk(self.folder):
            write_record(
                self.folder / "text.json",
                {name: getattr(windows, name) for name in TEXT} | {"ids": windows.ids.tolist()},
            )

    def text(self) -> CalibrationWindows | None:
        """Return the text that ``keep_text`` kept, None if there is none.

        Raises WorkFolderError for a text that quantkit did not write.
        """
        record = read_record(self.folder / "text.json", TEXT)
        if record is None:
            return None
        count, length, vocabulary = self._text_shape
        ids = record["ids"]
        if len(ids) != count or any(
            len(window) != length or any(i not in vocabulary for i in window) for window in ids
        ):
            raise WorkFolderError(f"{self.folder / 'text.json'}: not {count} windows of {length} token ids. {AGAIN}")
        return CalibrationWindows(**{**record, "ids": torch.tensor(record["ids"], dtype=torch.int64)})

    @property
    def read(self) -> bool:
        """Whether every weight of the source was checked, by this process or an earlier one."""
        return bool(self._job.get("read"))

    def keep_read(self) -> None:
        """Record that every weight of the source was checked."""
        self._job["read"] = True
        with disk(self.folder):
            write_record(self.folder / "job.json", self._job)

    def keep_measured(self, measured: Measured) -> None:
        """Keep the results of the sensitivity pass."""
        keep_measured(self.folder, measured)

    def measured(self) -> Measured | None:
        """Return the results that ``keep_measured`` kept, None if there are none."""
        return kept_measured(self.folder) if self.resumed else None

    @property
    def finished(self) -> dict[str, Any] | None:
        """The facts given to ``finish``, if an earlier process completed the output."""
        record: dict[str, Any] | None = self._job["finished"]
        return record

    @property
    def choice(self) -> BudgetChoice | None:
        """The choice within a bit budget, as given to ``finish``."""
        stored = self._job.get("choice")
        return None if stored is None else BudgetChoice(**{**stored, "taken": tuple(stored["taken"])})

    def finish(self, facts: dict[str, Any], choice: BudgetChoice | None) -> None:
        """Record that the output is complete and checked: only its rename and the removal of the work folder remain.

        facts: what a resumed job's report cannot measure again.
        choice: the choice within a bit budget, None without one.
        """
        self._job["finished"] = facts
        self._job["choice"] = None if choice is None else asdict(choice)
        with disk(self.folder):
            write_record(self.folder / "job.json", self._job)

    def remove(self) -> None:
        """Remove the work folder, the record of the job last."""
        _remove(self.folder)
        self.release()

    def leave(self, error: BaseException) -> str:
        """Keep the folder after an error if a resumed job could get further, else remove everything.

        Returns a sentence for the user, "" if nothing is left to resume from.

        error: the error that ended the job.
        """
        if isinstance(error, WorkFolderError):  # its message says what to do; whoever looks into it should see it all
            self.release()
            return ""
        kept = any((self.folder / "parts").glob("*.json")) or any(
            (self.folder / name).exists() for name in ("text.json", RECORD)
        )
        if isinstance(error, INCURABLE) or not kept:
            self.writer.abandon()
            self.remove()
            stopped = isinstance(error, KeyboardInterrupt)
            return "No block was finished, so nothing is kept: the same command starts anew." if stopped else ""
        self.release()
        blocks = any((self.folder / "parts").glob("*.json"))
        what = "Finished blocks are" if blocks else "What was done before the first block is"
        return f"{what} kept in {self.folder}: the same command with --resume goes on from there."

    def release(self) -> None:
        """Release the lock."""
        os.close(self._lock)


def identity(plan: Plan, inputs: Inputs) -> dict[str, Any]:
    """Return what decides the bytes of the result; part of the manifest.

    It reads the whole source for its hash.

    plan: the plan of the conversion.
    inputs: its token windows.
    """
    windows = inputs.for_sensitivity
    calibration = None if windows is None else _text(windows)
    return {
        "quantkit_version": __version__,
        "source_sha256": plan.source.digest(),
        "options": plan.options.for_manifest(),
        "calibration": calibration,
        **({} if inputs.distil is None else {"distilled_on": _text(inputs.distil)}),
        "device": device_name(plan.device),
        "products": plan.matmul_precision,
        "versions": {name: version(name) for name in ("torch", "transformers", "numpy")},
        "threads": torch.get_num_threads(),
    }


def _text(windows: CalibrationWindows) -> dict[str, Any]:
    tokens = None if windows.ids.is_meta else windows.digest()  # not written yet: the model and the seed decide them
    return {"text": windows.name, "text_sha256": windows.text_sha256, "tokens_sha256": tokens, "bos": windows.bos}


def job_of(plan: Plan) -> dict[str, Any]:
    """Return what must be equal for a job to be resumed: its identity, its place, and the processor's arithmetic."""
    cpu = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}{' AMX' if cpu_has_amx() else ''}"
    beside = beside_sha256(plan.source)
    return {
        **identity(plan, plan.inputs),
        "layout": LAYOUT,
        "beside_sha256": beside,
        "out": str(plan.options.out.resolve()),
        "cpu": cpu,
    }


WORDS = {
    "source_sha256": "the source's weights and config (sha256)",
    "beside_sha256": "the files beside the source's weights (sha256)",
    "out": "--out",
    "layout": "the version of the work folder",
    "threads": "the number of threads (OMP_NUM_THREADS)",
    "device": "--device",
    "products": "--matmul-precision",
    "cpu": "the processor's instructions",
    "quantkit_version": "the version of quantkit",
    "options.rules": "--rule",
    "calibration": "the calibration text",
    "calibration.text": "--calibration",
    "calibration.text_sha256": "the calibration text (sha256)",
    "calibration.tokens_sha256": "the tokens drawn from the text (sha256)",
    "calibration.bos": "whether each window starts with BOS",
}


def _differences(there: Any, here: Any, name: str = "") -> list[str]:
    """Describe where two records differ: ``--bits: 4 there, 8 here``."""
    if isinstance(there, dict) and isinstance(here, dict):
        keys = dict.fromkeys([*there, *here])
        return [d for k in keys for d in _differences(there.get(k), here.get(k), f"{name}.{k}" if name else k)]
    if there == here:
        return []
    kind, _, last = name.rpartition(".")
    flag = {"options": f"--{last.replace('_', '-')}", "versions": f"the version of {last}"}.get(kind, name)
    return [f"{WORDS.get(name, flag)}: {_short(there)} there, {_short(here)} here"]


def _short(value: Any) -> str:
    """Shorten a value for a message; of a hash, to its beginning."""
    text = printable("none" if value in (None, [], {}) else str(value))
    return f"{text[:12]}..." if re.fullmatch(r"[0-9a-f]{64}", text) else text


def _lock(folder: Path) -> int:
    """Return a descriptor that holds the folder's lock.

    Raises RequestError if another process holds it.
    """
    path = folder / "lock"
    while True:
        with disk(folder):
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                return handle
        except BlockingIOError:
            os.close(handle)
            raise RequestError(busy(folder)) from None
        except FileNotFoundError:
            pass  # a job that just ended took the file away; make it anew
        os.close(handle)
        folder.mkdir(parents=True, exist_ok=True)


def _discard(folder: Path, out: Path) -> None:
    """Remove the leftovers of a job for ``out``, but not its lock, which this process holds.

    A model that the job was about to replace is put back.
    """
    job = read_record(folder / "job.json", JOB)
    if job is not None:
        put_back(out, replaced_folder(out, job["token"]))
        with disk(out.parent):
            remove(partial_folder(out, job["token"]), out.parent)
    _remove(folder, keep="lock")


def _remove(folder: Path, keep: str = "") -> None:
    last = ["job.json", "lock"]
    for path in sorted(folder.iterdir(), key=lambda path: last.index(path.name) if path.name in last else -1):
        if path.name != keep:
            remove(path, folder)
    if not keep:
        with contextlib.suppress(OSError):  # somebody else's lock file may be in it again
            folder.rmdir()
