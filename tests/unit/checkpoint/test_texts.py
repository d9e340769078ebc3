"""Texts by name: what they are, which purpose they may serve, and what is wrong with a file."""

from __future__ import annotations

import gzip
import hashlib
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from quantkit.checkpoint import texts
from quantkit.checkpoint.text_files import wikipedia
from quantkit.checkpoint.texts import load_text
from quantkit.errors import QuantkitError, RequestError, SourceError


def test_local_file_is_hashed_over_its_bytes(tmp_path: Path) -> None:
    content = "first line\r\nsecond — line\n".encode()
    (tmp_path / "a.txt").write_bytes(content)
    text = load_text(str(tmp_path / "a.txt"), split="calibration")
    assert text.text == content.decode()
    assert text.sha256 == hashlib.sha256(content).hexdigest()
    assert text.name.endswith("a.txt")


def test_gzip_is_unpacked(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"packed text"))
    assert load_text(str(tmp_path / "a.txt.gz"), split="evaluation").text == "packed text"


def test_jsonl_joins_the_text_fields(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one", "id": 1}\n\n{"text": "two"}\n')
    assert load_text(str(tmp_path / "a.jsonl"), split="calibration").text == "one\n\ntwo"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "the text is empty"),
        ("a.txt", b" \n\n", "the text is empty"),
        ("a.txt", "caf\xe9".encode("latin-1"), r"not UTF-8 text \(byte 3 is 0xe9\).*iconv"),
        ("a.txt.gz", gzip.compress(b"text " * 100, mtime=0)[:-12], "not a whole gzip file"),
        ("a.txt.gz", b"no gzip at all", "not a whole gzip file"),
        ("a.jsonl", b'{"text": "one"}\n{"text": ', "line 2 is not JSON"),
        ("a.jsonl", b'{"content": "one"}\n', r"line 1 has no field 'text'.*its fields are content"),
        ("a.jsonl", b'["text"]\n', "line 1 has no field 'text'.*no object"),
        ("a.jsonl", b"\n", "the text is empty"),
    ],
)
def test_bad_file_is_one_clear_error(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match=message):
        load_text(str(tmp_path / name), split="calibration")


def test_missing_file_says_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"no such file.*wikipedia-sample, news-sample, builtin"):
        load_text(str(tmp_path / "nothing.txt"), split="calibration")
    with pytest.raises(SourceError, match="a folder"):
        load_text(str(tmp_path), split="calibration")


def test_builtin_is_deterministic_prose_and_code() -> None:
    text = load_text("builtin", split="calibration")
    assert text == load_text("builtin", split="calibration")
    assert len(text.text) > 500_000
    assert "def " in text.text
    assert "Assignment statements" in text.text


@pytest.mark.parametrize(
    ("name", "split", "message"),
    [
        ("builtin", "evaluation", "calibration only"),
        ("news-sample", "calibration", "evaluation only"),
        ("wikipedia-sample:evaluation", "calibration", "flatters"),
        ("wikipedia-sample:calibration", "evaluation", "flatters"),
        ("wikipedia-sample:all", "evaluation", "two halves"),
        ("hub:", "evaluation", "names no dataset"),
    ],
)
def test_text_for_the_wrong_purpose_is_refused(name: str, split: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        load_text(name, split=split)


def test_unreachable_hub_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    waited: list[float] = []

    def refuse(address: object, timeout: float) -> None:
        waited.append(timeout)
        raise TimeoutError("timed out")

    for key in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "create_connection", refuse)
    with pytest.raises(QuantkitError, match=r"did not answer within 5 s.*wikipedia-sample or builtin"):
        load_text("hub:some/dataset", split="calibration")
    assert waited == [5]


def test_hub_dataset_is_streamed_until_there_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: dict[str, Any] = {}

    def load_dataset(path: str, name: str | None, **options: Any) -> Any:
        asked.update(options, path=path, name=name)
        return ({"text": f"record {i}"} for i in range(10**9))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(texts, "_check_hub", lambda: None)
    monkeypatch.setattr(texts, "HUB_CHARACTERS", 24)
    text = load_text("hub:some/dataset:config:validation", split="calibration")
    assert text.text == "record 0\n\nrecord 1\n\nrecord 2"
    assert asked == {"path": "some/dataset", "name": "config", "split": "validation", "streaming": True}
    load_text("hub:some/dataset", split="evaluation")
    assert (asked["name"], asked["split"]) == (None, "test")


def test_article_keeps_prose_and_drops_lists_and_tables() -> None:
    markup = "'''Bold''' text.\n== Head ==\nProse.\n* item\n# item\n|cell\n=== E = mc ===\n\n\n\nEnd. \n"
    assert wikipedia._article("Title", markup) == "Title\n\nBold text.\n\nHead\n\nProse.\n\n=== E = mc ===\n\nEnd."


def test_only_the_wanted_definitions_of_a_module_run() -> None:
    source = "import no_such_module\nA = 1\nB = no_such_name\ndef double(x):\n    return helper(x) * 2\n"
    found = wikipedia._definitions(source, {"A", "double"}, {"helper": lambda x: x + 1})
    assert (found["A"], found["double"](3)) == (1, 8)
    assert "B" not in found
    with pytest.raises(SourceError, match="lacks gone"):
        wikipedia._definitions(source, {"A", "gone"}, {})


def test_news_drops_repeats_and_tags() -> None:
    lines = "One <i>book</i>. \nTwo.\nOne <i>book</i>. \n\n"
    assert wikipedia.news_sample({wikipedia.NEWS: lines.encode()}) == {"evaluation.txt": "One book.\n\nTwo."}


@pytest.mark.real
def test_the_wikipedia_halves_share_no_article(wikipedia: Path) -> None:
    record = json.loads((wikipedia / "fetch.json").read_text())
    titles = {}
    for split in ("calibration", "evaluation"):
        text = load_text("wikipedia-sample", split=split)  # type: ignore[arg-type]
        assert text.sha256 == record["sha256"][f"{split}.txt"]
        titles[split] = {article.split("\n", 1)[0] for article in text.text.split("\n\n\n")}
    assert (len(titles["calibration"]), len(titles["evaluation"])) == (45, 23)
    assert not titles["calibration"] & titles["evaluation"]


def test_parquet_joins_the_text_column(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    for kind in (pyarrow.string(), pyarrow.large_string()):
        table = pyarrow.table({"id": [1, 2, 3], "text": pyarrow.array(["one", None, "two"], type=kind)})
        parquet.write_table(table, tmp_path / "a.parquet")
        for split in ("calibration", "evaluation"):
            found = load_text(str(tmp_path / "a.parquet"), split=split)
            assert found.text == "one\n\ntwo"
            assert found.sha256 == load_text(str(tmp_path / "a.parquet"), split="evaluation").sha256


def test_a_parquet_file_without_text_names_its_columns(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"content": ["one"], "id": [1]}), path)
    with pytest.raises(SourceError, match=r"no column 'text' .*content \(string\), id \(int64\)"):
        load_text(str(path), split="calibration")
    parquet.write_table(pyarrow.table({"text": [1, 2]}), path)
    with pytest.raises(SourceError, match=r"no column 'text' holding strings .*text \(int64\)"):
        load_text(str(path), split="calibration")
    parquet.write_table(pyarrow.table({"text": pyarrow.array([None, ""], pyarrow.string())}), path)
    with pytest.raises(SourceError, match="the text is empty"):
        load_text(str(path), split="calibration")
    path.write_bytes(b"PAR1 and nothing more")
    with pytest.raises(SourceError, match="not a readable parquet file"):
        load_text(str(path), split="calibration")
