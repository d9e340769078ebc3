"""Checks of the output folder, the work folder and the free space on their disks, before anything is written."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

from quantkit.checkpoint.regular import require_utf8
from quantkit.checkpoint.storage.unfinished import TOKEN, partial_folder, unfinished
from quantkit.checkpoint.writer import check_output
from quantkit.convert.options.options import ConvertOptions
from quantkit.convert.plan.job_record import printable, read_job, refuse_planted
from quantkit.convert.plan.memory import Prediction
from quantkit.core.host import size_text
from quantkit.errors import RequestError, WorkFolderError

CHOICE = "Add --resume to go on with it, or --overwrite to start anew"


def check_paths(options: ConvertOptions) -> None:
    """Check that the output folder can be made, and that the work folder fits ``--resume``.

    Raises RequestError if not: nothing to resume, an unfinished job without ``--resume`` or ``--overwrite``, or a work
    folder that is not usable or not quantkit's.
    """
    folder = options.work_folder
    for path in (options.out, folder):
        require_utf8(path)
    refuse_planted(folder)
    job = read_job(folder)
    _require_same_out(options, job)
    if options.resume:
        if job is None:
            if (options.out / "quantkit.json").exists():
                raise RequestError(
                    f"--resume: {options.out} is complete, nothing is left to do. To make it anew: --overwrite instead"
                    " of --resume, or another --out."
                )
            raise RequestError(
                f"--resume: there is no unfinished job in {folder}. Leave --resume out to start one, "
                "or name the job's --work-dir."
            )
        partial = partial_folder(options.out, job["token"])
        refuse_planted(partial)
        if job["finished"] is not None and not partial.exists():
            return  # the output has its name already; only tidying up is left
    elif job is not None and not options.overwrite:
        raise RequestError(f"{folder}: holds an unfinished job for {options.out}. {CHOICE}.")
    check_output(options.out, options.overwrite)
    check_work_folder(folder, options)


def _require_same_out(options: ConvertOptions, job: dict[str, Any] | None) -> None:
    """Refuse to start anew in another output's work folder.

    What the job wrote beside that output would have to be removed: nothing is, outside the folders that were asked for.
    """
    if job is None or options.resume or not options.overwrite or job["identity"]["out"] == str(options.out.resolve()):
        return
    raise WorkFolderError(
        f"{options.work_folder}: is the work folder of a job for {printable(job['identity']['out'])}, not for"
        f" {options.out.resolve()}. Choose another --work-dir, or remove that folder by hand."
    )


def leftovers(options: ConvertOptions) -> list[str]:
    """Return the plan's note on folders beside the output that belong to no job known here.

    options: of the conversion; its own job's folders are not among them.
    """
    job = read_job(options.work_folder)
    own = "" if job is None else job["token"]
    names = [
        path.name
        for kind in ("partial", "replaced")
        for path in unfinished(options.out, kind, TOKEN)
        if not path.name.endswith(f".{kind}-{own}")
    ]
    if not names:
        return []
    return [
        f"{options.out.parent} holds {', '.join(names)} of another job for this --out. If no --work-dir has it any"
        " more, remove it by hand (.replaced: the model that was there before)"
    ]


def refuse_busy(folder: Path) -> None:
    """Refuse a work folder in which another process is working now.

    Raises RequestError; neither ``--resume`` nor ``--overwrite`` would help.
    """
    refuse_planted(folder)
    try:
        handle = os.open(folder / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RequestError(busy(folder)) from None
    finally:
        os.close(handle)


def busy(folder: Path) -> str:
    """Return the message for a work folder that another process has locked."""
    return f"{folder}: another process is working on this job now. Wait for it, or choose another --out and --work-dir."


def resumed_note(folder: Path, blocks: int) -> str:
    """Return the plan's note on the resumed job: how many of its ``blocks`` are finished."""
    done = sum(1 for _ in (folder / "parts").glob("block-*.json"))
    return f"--resume: {folder} holds {done} of {blocks} blocks"


def check_work_folder(folder: Path, options: ConvertOptions) -> None:
    """Check that ``folder`` can be the work folder.

    Raises RequestError if it overlaps the output folder, its parent does not exist, it is no folder, or it holds files
    but no job.
    """
    out, work = options.out.resolve(), folder.resolve()
    if work == out or out in work.parents or work in out.parents:
        raise RequestError(f"--work-dir {folder}: is, holds or lies in --out {options.out}. Choose another folder.")
    if not folder.exists():
        if not folder.parent.is_dir():
            raise RequestError(f"--work-dir {folder}: the folder {folder.parent} does not exist. Create it.")
        return
    if not folder.is_dir():
        raise RequestError(f"--work-dir {folder}: is no folder. Choose another one.")
    foreign = [path.name for path in folder.iterdir() if path.name not in ("lock", "job.new-record")]
    if foreign and not (folder / "job.json").exists():
        raise RequestError(f"--work-dir {folder}: holds {foreign[0]!r}, so it is no work folder. Choose another one.")


def check_room(options: ConvertOptions, need: Prediction) -> list[str]:
    """Return a problem, in words, for each disk with less free space than the job needs.

    With ``--resume``, bytes that the stopped job wrote count as free.
    """
    out, work = options.out.parent, options.work_folder
    beside = work if work.exists() else work.parent
    if not beside.exists():
        return []  # refused by ``check_paths``
    written = {out: _size(_partial(options)), beside: _size(work)} if options.resume else {}
    if _one_disk(out, beside):
        wanted, written = {out: need.disk}, {out: sum(written.values())}
    else:
        wanted = {out: need.output, beside: need.work}
    problems: list[str] = []
    for place, size in wanted.items():
        option = "an --out" if place == out else "a --work-dir"
        problems += lacks_room(place, size, option, written.get(place, 0))
    return problems


def lacks_room(place: Path, size: int, option: str, written: int = 0) -> list[str]:
    """Return a problem, in words, if the disk of ``place`` has less than ``size`` bytes free.

    option: the option that chooses another folder, for the message.
    written: bytes of an earlier job there, which count as free.
    """
    free = shutil.disk_usage(place).free + written
    if size <= free:
        return []
    return [
        f"disk: {size_text(size)} are needed in {place}, {size_text(free)} are free. "
        f"Free some space there, or choose {option} on another disk."
    ]


def _partial(options: ConvertOptions) -> Path:
    """Return the folder in which the job puts the output together."""
    job = read_job(options.work_folder)
    return partial_folder(options.out, job["token"] if job is not None else "none")


def _one_disk(a: Path, b: Path) -> bool:
    return a.stat().st_dev == b.stat().st_dev


def _size(folder: Path) -> int:
    """Return the bytes of all files below ``folder``, 0 if it does not exist."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.exists() else 0
