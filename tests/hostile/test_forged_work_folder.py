"""A work folder that somebody else made: nothing outside is written or removed, and every field is checked by name."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stopping import stop_at
from written import digest

import quantkit as package
from quantkit.checkpoint.storage.record import LARGEST, read_record, write_record
from quantkit.checkpoint.storage.removal import remove
from quantkit.checkpoint.writer import PART, CheckpointWriter
from quantkit.convert.job import states
from quantkit.convert.job.records import kept_measured, restored_result
from quantkit.convert.job.states import StateStore
from quantkit.convert.plan.job_record import read_job
from quantkit.convert.report.report import ConvertReport
from quantkit.errors import QuantkitError, RequestError, WorkFolderError

SMALL: dict[str, Any] = dict(samples=4, seq_len=32, group_size=32)
MODES: list[dict[str, Any]] = [{"resume": True}, {"overwrite": True}, {"resume": True, "overwrite": True}, {}]
NAN = float("nan")


class Stopped:
    """A job that was stopped on its way, put back as it was before each test; beside it a folder that is none of it."""

    def __init__(self, root: Path, source: Path, options: dict[str, Any]) -> None:
        self.place, self.kept, self.victim = root / "here", root / "kept", root / "victim"
        self.source, self.options = source, {**SMALL, **options}
        self.out, self.work = self.place / "out", self.place / ".out.work"
        self.place.mkdir()

    def convert(self, **more: Any) -> Any:
        return package.convert(self.source, self.out, **self.options, **more)

    def reset(self) -> None:
        for folder in (self.place, self.victim):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.kept, self.place, symlinks=True)
        self.victim.mkdir()
        for name in (
            "config.json",
            "thesis.txt",
        ):  # the first makes it look like a model, which --overwrite may replace
            (self.victim / name).write_text(name)

    @property
    def token(self) -> str:
        return str(record(self.work / "job.json")["token"])

    def refused(self, mode: dict[str, Any], error: type[QuantkitError] = WorkFolderError) -> str:
        """Convert in this mode: it is refused, and nothing at all has changed."""
        before = everything(self.place), digest(self.victim)
        with pytest.raises(error) as caught:
            self.convert(**mode)
        assert (everything(self.place), digest(self.victim)) == before
        return str(caught.value)


def everything(folder: Path) -> dict[str, str]:
    """Every entry below a folder with what it is; links are not followed, an empty lock file does not count."""
    found = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = f"link {os.readlink(path)}"
        elif path.is_file() and name != ".out.work/lock":
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        elif name != ".out.work/lock":
            found[name] = "no file"
    return found


def record(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text().partition("\n")[2])
    return found


def forge(path: Path, text: str) -> None:
    """Write a record whose checksum is right."""
    path.write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")


def stopped(root: Path, source: Path, options: dict[str, Any], listen: Any = None) -> Stopped:
    job = Stopped(root, source, options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(states, "EVERY", 0.0)
        patch.setattr(states, "SHARE", 0)
        if listen is None:  # all is done but the last rename
            patch.setattr(CheckpointWriter, "commit", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            job.convert(on_progress=listen or (lambda progress: None))
    shutil.copytree(job.place, job.kept)
    return job


@pytest.fixture(scope="module")
def kept_in_blocks(tiny_original: Path, calibration_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    options = dict(method="gptq", kv_bits=8, calibration=str(calibration_text))
    return stopped(tmp_path_factory.mktemp("blocks"), tiny_original, options, stop_at("blocks", 2))


@pytest.fixture(scope="module")
def kept_measured_job(tiny_original: Path, calibration_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    options = dict(method="gptq", guided=True, target_bpw=6.0, format="native", calibration=str(calibration_text))
    return stopped(tmp_path_factory.mktemp("measured"), tiny_original, options, stop_at("blocks", 1))


@pytest.fixture(scope="module")
def kept_text_job(tiny_original: Path, tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    options = dict(method="gptq", calibration="self")
    return stopped(tmp_path_factory.mktemp("text"), tiny_original, options, stop_at("blocks", 1))


@pytest.fixture(scope="module")
def kept_finished(tiny_original: Path, calibration_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    options = dict(
        method="rtn", target_bpw=6.0, kv_budget=4.0, seq_len=256, format="native", calibration=str(calibration_text)
    )
    return stopped(tmp_path_factory.mktemp("finished"), tiny_original, options)


@pytest.fixture
def job(kept_in_blocks: Stopped) -> Stopped:
    """Stopped after two of three blocks."""
    kept_in_blocks.reset()
    return kept_in_blocks


@pytest.fixture
def measured_job(kept_measured_job: Stopped) -> Stopped:
    """Stopped after one block; bits were chosen by what was measured."""
    kept_measured_job.reset()
    return kept_measured_job


@pytest.fixture
def text_job(kept_text_job: Stopped) -> Stopped:
    """Stopped after one block; the model wrote its own text."""
    kept_text_job.reset()
    return kept_text_job


@pytest.fixture
def finished_job(kept_finished: Stopped) -> Stopped:
    """Stopped before the output got its name."""
    kept_finished.reset()
    return kept_finished


TOKENS: list[Any] = [
    "x/../../../victim", "../victim", "/etc", "", ".", "..", "0123abc", "0123abcde", "0123ABCD", "0123abcd\n",
    " 123abcd", "0123abc/", "٠١٢٣٤٥٦٧", "repack-0123abcd", "0" * 1_000_000, 12345678, 1e7, NAN, None, True, [],
    ["0123abcd"], {},
]  # fmt: skip


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_token_is_eight_hex_digits_and_nothing_else(mode: dict[str, Any], job: Stopped) -> None:
    path = job.work / "job.json"
    whole = record(path)
    for token in TOKENS:
        write_record(path, {**whole, "token": token})
        words = job.refused(mode)
        assert f"{path}: 'token' is" in words
        assert "remove it by hand" in words
        assert len(words) < 1000
    write_record(path, {key: value for key, value in whole.items() if key != "token"})
    assert f"{path}: 'token' is missing" in job.refused(mode)


FIELDS: list[tuple[str, Any]] = [
    ("identity", None), ("identity", []), ("identity", "x"), ("identity", {}), ("identity", {"out": None}),
    ("identity", {"out": ["x"]}), ("finished", []), ("finished", "yes"), ("finished", True), ("read", "yes"),
    ("read", 1), ("choice", []), ("choice", {"taken": "x"}),
    ("choice", {"taken": [0.5], "sensitivity": [], "measured_on": {}}), ("something", 1),
]  # fmt: skip


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_every_field_of_the_job_has_its_type(mode: dict[str, Any], job: Stopped) -> None:
    path = job.work / "job.json"
    whole = record(path)
    for name, value in FIELDS:
        write_record(path, {**whole, name: value})
        words = job.refused(mode)
        assert str(path) in words
        assert name in words
    for name in ("identity", "finished"):
        write_record(path, {key: value for key, value in whole.items() if key != name})
        assert f"'{name}' is missing" in job.refused(mode)


def test_half_of_a_surrogate_pair_in_a_record_is_refused(job: Stopped) -> None:
    for name in ("job.json", "parts/block-0000.json", "parts/block-0001.json"):
        path = job.work / name
        whole = record(path)
        for changed in ({**whole, "\ud800": 1}, {**whole, "name": ["\udfff"]}):
            forge(path, json.dumps(changed))
            assert f"{path}: holds half of a surrogate pair" in job.refused({"resume": True})
        job.reset()


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_what_is_no_record_is_refused_quickly(mode: dict[str, Any], job: Stopped) -> None:
    path = job.work / "job.json"
    for text in (
        "[]",
        "null",
        "NaN",
        "3",
        '"x"',
        "[" * 100_000,
        '{"token":' * 50_000,
        f'{{"token": {"9" * 5000}}}',
        "{",
        "",
    ):
        forge(path, text)
        assert str(path) in job.refused(mode)
    for data in (b"", b"\xff\xfe", b"nonsense"):
        path.write_bytes(data)
        assert "is damaged" in job.refused(mode)
    with path.open("wb") as file:
        file.truncate(LARGEST + 1)  # holes: it takes no room
    with pytest.raises(WorkFolderError, match="too large for such a file"):
        job.convert(**mode)


def test_another_folder_as_out_is_not_touched(job: Stopped) -> None:
    """``--overwrite`` removed what lay beside the ``out`` of the record, and put a folder in its place."""
    path = job.work / "job.json"
    whole = record(path)
    whole["identity"]["out"] = str(job.victim)
    write_record(path, whole)
    (job.victim.parent / f".victim.partial-{job.token}").mkdir()
    (job.victim.parent / f".victim.replaced-{job.token}").mkdir()
    words = job.refused({"overwrite": True})
    assert f"is the work folder of a job for {job.victim}" in words
    assert f"--out: {job.victim} there" in job.refused({"resume": True}, RequestError)
    job.refused({}, RequestError)
    for kind in ("partial", "replaced"):
        folder = job.victim.parent / f".victim.{kind}-{job.token}"
        assert folder.is_dir()
        folder.rmdir()


PLACES = [
    "job.json", "lock", "parts", "parts/block-0000.json", "parts/block-0000.safetensors", "parts/block-0002.new",
    "parts/block-0002.new-record", "parts/plain.json", "text.json", "text.new-record", "states-0.bin", "states-1.json",
    "states-0.new-record", "measured.json", "guides.safetensors", "sensitivity.bin", "job.new-record", "deep/er/link",
]  # fmt: skip


def clear(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    return path


@pytest.mark.parametrize("place", PLACES)
def test_links_and_special_files_in_a_work_folder_are_refused(place: str, job: Stopped) -> None:
    path, thesis = job.work / place, job.victim / "thesis.txt"
    plants: list[tuple[str, Callable[[], object]]] = [
        ("is a symbolic link", lambda: path.symlink_to(job.victim if place == "parts" else thesis)),
        ("is a symbolic link", lambda: path.symlink_to(job.victim.parent / "nowhere")),
        ("is a FIFO", lambda: os.mkfifo(path)),
        ("has another name elsewhere", lambda: os.link(thesis, path)),
    ]
    for words, plant in plants:
        job.reset()
        clear(path)
        plant()
        for mode in MODES:
            found = job.refused(mode)
            assert f"{path}: {words}" in found
            assert "by hand" in found


def test_a_work_folder_that_is_a_link_is_refused(job: Stopped) -> None:
    shutil.rmtree(job.work)
    job.work.symlink_to(job.victim)
    for mode in MODES:
        assert f"{job.work}: is a symbolic link" in job.refused(mode)


@pytest.mark.parametrize("kind", ["partial", "replaced"])
def test_a_link_in_the_place_of_an_unfinished_output_is_never_followed(kind: str, job: Stopped) -> None:
    link = job.place / f".out.{kind}-{job.token}"
    link.symlink_to(job.victim)
    before = digest(job.victim)
    if kind == "partial":
        assert f"{link}: is a symbolic link" in job.refused({"resume": True})
    job.convert(overwrite=True)
    assert digest(job.victim) == before
    assert not job.out.is_symlink()
    assert sorted(path.name for path in job.place.iterdir() if path.name != "out") in ([], [link.name])


def test_a_link_in_a_finished_output_is_not_given_its_name(finished_job: Stopped) -> None:
    link = finished_job.place / f".out.partial-{finished_job.token}" / "README.md"
    link.symlink_to(finished_job.victim / "thesis.txt")
    assert f"{link}: is a symbolic link" in finished_job.refused({"resume": True})


def test_a_job_that_nobody_touched_goes_on(
    job: Stopped, measured_job: Stopped, text_job: Stopped, finished_job: Stopped
) -> None:
    """The checks refuse nothing that quantkit writes itself; the same bytes as without a stop: test_resume.py."""
    for one in (job, measured_job, text_job, finished_job):
        one.convert(resume=True).table()
        assert [path.name for path in one.place.iterdir()] == ["out"]


ODD: list[Any] = [None, "x", "9" * 5000, "", -1, 0.5, NAN, float("inf"), 1 << 70, [], {}, [[]], {"x": 1}, True]


def variants(data: Any) -> Iterator[tuple[str, Any]]:
    """The data with each of its fields, at every depth, replaced by each of ``ODD``, left out, or doubled."""

    def walk(value: Any, trail: list[Any]) -> Iterator[list[Any]]:
        entries = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
        for key, entry in entries:
            yield [*trail, key]
            yield from walk(entry, [*trail, key])

    for trail in list(walk(data, [])):
        for odd in [*ODD, "gone", "twice"]:
            changed = copy.deepcopy(data)
            holder = changed
            for key in trail[:-1]:
                holder = holder[key]
            if odd == "gone":
                del holder[trail[-1]]
            elif odd == "twice":
                if not isinstance(holder[trail[-1]], list):
                    continue
                holder[trail[-1]] = holder[trail[-1]] * 2
            else:
                holder[trail[-1]] = odd
            yield f"{trail} {odd!r}", changed


def all_read_or_refused(path: Path, read: Callable[[], object], whole: dict[str, Any]) -> tuple[int, int]:
    """Read every variant of a record: a value, or an error that names the file. Returns how many of each."""
    read_ones = refused = 0
    for label, changed in variants(whole):
        forge(path, json.dumps(changed))
        try:
            read()
            read_ones += 1
        except WorkFolderError as error:
            assert str(path.parent) in str(error), label  # noqa: PT017
            refused += 1
    return read_ones, refused


def test_any_field_of_a_part_may_be_forged(job: Stopped) -> None:
    path = job.work / "parts" / "block-0000.json"

    def read() -> None:
        writer = CheckpointWriter(job.out, kept=job.work, token=job.token)
        facts = writer.find_part("block-0000")
        if facts is not None:
            restored_result(facts, path)

    read_ones, refused = all_read_or_refused(path, read, record(path))
    assert refused > 900
    assert read_ones < refused / 4  # another text, another number of the right kind, a tensor that is not there


def test_any_field_of_what_was_measured_may_be_forged(measured_job: Stopped) -> None:
    path = measured_job.work / "measured.json"
    read_ones, refused = all_read_or_refused(path, lambda: kept_measured(measured_job.work), record(path))
    assert refused > 100
    assert read_ones < refused


def test_any_field_of_kept_states_may_be_forged(job: Stopped) -> None:
    path = next(job.work.glob("states-?.json"))
    whole = record(path)
    shapes = whole["shapes"]
    store = StateStore(job.work)
    wanted = lambda found: [list(shape) for shape in found] == shapes  # noqa: E731
    assert all_read_or_refused(path, lambda: store.latest(99, wanted), whole)[1] > 20
    write_record(path, {**whole, "shapes": [[1 << 40, 1 << 20, 4]], "block": 99})
    with pytest.raises(WorkFolderError, match="not those of this job"):
        store.latest(99, wanted)
    older = store.latest(
        99, lambda shapes: True
    )  # the file is shorter than it says: no memory is taken, and it is passed over
    assert older is None or older[0] < 99


def test_any_field_of_a_finished_job_may_be_forged(finished_job: Stopped) -> None:
    path = finished_job.work / "job.json"
    whole = record(path)
    assert whole["finished"]["cache"]["budget"]
    assert whole["finished"]["allocation"]

    def read() -> None:
        found = read_job(finished_job.work)
        if found is not None and found["finished"] is not None:
            report = ConvertReport(out=Path("out"), method="rtn", format="native", scheme="", kv_bits=16)
            report.restore(found["finished"], path)
            report.table()
            report.to_json()
            report.for_manifest()

    assert all_read_or_refused(path, read, whole)[1] > 1000


@pytest.mark.parametrize("kind", ["blocks", "measured", "text", "finished"])
def test_a_forged_record_stops_the_resumed_job_or_changes_nothing_outside(
    kind: str, job: Stopped, measured_job: Stopped, text_job: Stopped, finished_job: Stopped
) -> None:
    """The whole command, on variants drawn at random: an error of ours or a finished output, and no other change."""
    one, name = {
        "blocks": (job, "parts/block-0001.json"), "measured": (measured_job, "measured.json"),
        "text": (text_job, "text.json"), "finished": (finished_job, "job.json"),
    }[kind]  # fmt: skip
    changed = list(variants(record(one.work / name)))
    for label, forged in random.Random(kind).sample(changed, 6):
        one.reset()
        write_record(one.work / name, forged)
        before = digest(one.victim)
        try:
            one.convert(resume=True).table()
        except QuantkitError as error:
            assert str(one.place) in str(error), label  # noqa: PT017
            assert one.work.is_dir(), label
        assert digest(one.victim) == before, label
        assert (
            {path.name for path in one.place.iterdir()} <= {"out", ".out.work", f".out.partial-{one.token}"}
            if one.work.exists()
            else True
        )


@pytest.mark.parametrize(
    "change",
    [lambda ids: ids[:-1], lambda ids: [[*window, 1] for window in ids], lambda ids: [[-1, *ids[0][1:]], *ids[1:]],
     lambda ids: [[10**6, *ids[0][1:]], *ids[1:]], lambda ids: [ids[0][1:], *ids[1:]]],
    ids=["fewer", "longer", "negative", "beyond the vocabulary", "one shorter"],
)  # fmt: skip
def test_a_text_that_the_model_cannot_have_written_is_refused(change: Callable[[Any], Any], text_job: Stopped) -> None:
    path = text_job.work / "text.json"
    whole = record(path)
    write_record(path, {**whole, "ids": change(whole["ids"])})
    assert str(path) in text_job.refused({"resume": True})


def test_numbers_of_another_shape_or_not_finite_are_refused(measured_job: Stopped, job: Stopped) -> None:
    from safetensors.torch import load_file, save_file

    path = measured_job.work / "guides.safetensors"
    for change in (lambda value: value * NAN, lambda value: value[:-1], lambda value: value.float()):
        measured_job.reset()
        tensors = load_file(path)
        name = sorted(tensors)[0]
        save_file({**tensors, name: change(tensors[name]).contiguous()}, path)
        whole = record(measured_job.work / "measured.json")
        write_record(
            measured_job.work / "measured.json",
            {**whole, "guides_sha256": hashlib.sha256(path.read_bytes()).hexdigest()},
        )
        assert str(path) in measured_job.refused({"resume": True})
    part = job.work / "parts" / "block-0000.json"
    tensors = load_file(part.with_suffix(".safetensors"))
    name = next(name for name, value in tensors.items() if value.is_floating_point())
    writer = CheckpointWriter(job.out, kept=job.work, token=job.token)
    tensors[name][0] = NAN
    writer.add_part("block-0000", tensors, record(part)["facts"])
    assert f"{name!r} is not finite" in job.refused({"resume": True})


def test_a_part_that_lacks_a_module_is_refused(job: Stopped) -> None:
    part = job.work / "parts" / "block-0000.json"
    whole = read_record(part, PART)
    assert whole is not None
    lost = next(iter(whole["facts"]["digests"]))
    del whole["facts"]["digests"][lost]
    write_record(part, whole)
    with pytest.raises(WorkFolderError, match=f"'{lost}' is missing or too much"):
        job.convert(resume=True)


def test_nothing_outside_a_folder_is_ever_removed(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for folder in (inside, outside):
        (folder / "deep").mkdir(parents=True)
        (folder / "file").write_text("")
    (inside / "way").symlink_to(outside)
    for path in (outside, outside / "file", inside, inside / "..", inside / "deep" / "..", inside / ".." / "outside",
                 inside / "way" / "file", inside / "way" / "deep", tmp_path, Path("/")):  # fmt: skip
        with pytest.raises(QuantkitError, match="is not removed"):
            remove(path, inside)
    remove(inside / "way", inside)
    remove(inside / "nothing", inside)
    (inside / "deep" / "link").symlink_to(outside)
    remove(inside / "deep", inside)
    remove(inside / "file", inside)
    assert list(inside.iterdir()) == []
    assert sorted(path.name for path in outside.iterdir()) == ["deep", "file"]


@pytest.mark.parametrize("mode", ["--resume", "--overwrite"])
def test_the_command_line_refuses_it_in_one_line(mode: str, job: Stopped, quantkit: Callable[..., Any]) -> None:
    write_record(job.work / "job.json", {**record(job.work / "job.json"), "token": "x/../../../victim"})
    before = digest(job.victim), everything(job.place)
    done = quantkit("convert", job.source, "--out", job.out, "--method", "rtn", mode)
    assert done.returncode == 2
    assert "'token' is 'x/../../../victim'" in done.stderr
    assert "Traceback" not in done.stderr
    assert (digest(job.victim), everything(job.place)) == before
