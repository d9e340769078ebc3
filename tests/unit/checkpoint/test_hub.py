"""Hub ids: what is one, what is downloaded of it, and every way it fails, explained."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quantkit.checkpoint import hub
from quantkit.checkpoint.open import open_source
from quantkit.errors import QuantkitError, QuantkitWarning, RequestError, SourceError

FILES = [
    ".gitattributes", "README.md", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "chat_template.jinja", "model.safetensors.index.json",
    "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "pytorch_model.bin",
    "consolidated.safetensors", "original/model.safetensors", "onnx/model.onnx", "additional_chat_templates/rag.jinja",
]  # fmt: skip


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """A hub that answers: ``asked`` holds what it was asked; ``files`` and ``error`` say how."""
    import huggingface_hub

    state: dict[str, Any] = {"files": FILES, "error": None, "asked": []}

    class Api:
        def model_info(self, repo: str, **options: Any) -> Any:
            state["asked"].append((repo, options))
            if state["error"] is not None:
                raise state["error"]
            return SimpleNamespace(sha="abc123", siblings=[SimpleNamespace(rfilename=name) for name in state["files"]])

    def snapshot_download(repo: str, **options: Any) -> str:
        state["asked"].append((repo, options))
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(hub, "unreachable", lambda: None)
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return state


@pytest.mark.parametrize(
    ("ref", "expected"),
    [
        ("org/name", True), ("HuggingFaceTB/SmolLM2-135M-Instruct", True), ("org/name@main", True),
        ("org/name@refs/pr/3", True), ("smollm2-135m-hub", True),
        ("name", False), ("a/b/c", False), ("./model", False), ("../model", False), ("~/model", False),
        ("/model", False), ("org/", False), ("/name", False), ("org/name@", False), ("models/x.gguf", False),
        ("models/model.safetensors", False), ("org/na me", False), ("smollm2-135m", False), ("-org/name", False),
        ("org//name", False), ("org/näme", False),
    ],
)  # fmt: skip
def test_a_hub_id_is_two_words_and_one_slash(ref: str, expected: bool) -> None:
    assert hub.is_hub_id(ref) is expected


def test_only_what_a_model_is_read_from_is_downloaded(online: dict[str, Any], tmp_path: Path) -> None:
    assert hub.download("org/name@v1") == tmp_path / "snapshot"
    (repo, info), (_, snapshot) = online["asked"]
    assert (repo, info["revision"], info["timeout"]) == ("org/name", "v1", 5)
    assert snapshot["revision"] == "abc123"  # the commit that was listed
    assert set(FILES) - set(snapshot["allow_patterns"]) == {
        ".gitattributes", "README.md", "pytorch_model.bin", "consolidated.safetensors", "original/model.safetensors",
        "onnx/model.onnx",
    }  # fmt: skip


def test_a_known_original_stands_for_its_repository(online: dict[str, Any]) -> None:
    hub.download("smollm2-135m-hub")
    assert online["asked"][0][0] == "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["config.json", "pytorch_model.bin"], r"only pickle weights \(pytorch_model.bin\).*never downloaded"),
        (["model.Q4_K_M.gguf"], r"only GGUF files \(model.Q4_K_M.gguf\)"),
        (["config.json", "adapter_model.safetensors"], r"no model\*.safetensors"),
        (["model.safetensors"], "no config.json"),
    ],
)
def test_a_repository_without_a_readable_model_is_refused_before_downloading(
    files: list[str], message: str, online: dict[str, Any]
) -> None:
    online["files"] = files
    with pytest.raises(SourceError, match=message):
        hub.download("org/name")
    assert len(online["asked"]) == 1


def http_error(kind: str) -> Exception:
    from huggingface_hub import errors

    cls: Any = getattr(errors, kind)
    made: Exception = cls.__new__(cls)
    made.args = (f"{kind}: server words",)
    return made


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("GatedRepoError", r"org/name@v9: is gated.*Accept them at .*/org/name.*HF_TOKEN"),
        ("RepositoryNotFoundError", r"no such folder or file here, and no model of that name on the hub.*HF_TOKEN"),
        ("RevisionNotFoundError", r"org/name has no branch, tag or commit 'v9'"),
        ("HfHubHTTPError", r"downloading failed \(HfHubHTTPError.*Try again"),
    ],
)
def test_what_the_hub_answers_is_one_message_with_the_remedy(kind: str, message: str, online: dict[str, Any]) -> None:
    online["error"] = http_error(kind)
    with pytest.raises(QuantkitError, match=message):
        hub.download("org/name@v9")


def test_a_name_the_library_refuses_is_no_traceback(online: dict[str, Any]) -> None:
    from huggingface_hub.errors import HFValidationError

    online["error"] = HFValidationError("cannot have two dots in a row")
    with pytest.raises(SourceError, match=r"no valid hub id.*two dots"):
        hub.download("org/na..me")


def offline(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    from huggingface_hub import constants

    def refuse(address: object, timeout: float) -> None:
        assert timeout == 5
        raise TimeoutError("timed out")

    for key in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(socket, "create_connection", refuse)


def test_an_unreachable_hub_is_said_with_both_readings_of_the_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    offline(monkeypatch, tmp_path)
    with pytest.raises(
        QuantkitError, match=r"models/mine: no such folder or file here, and as a hub id .* 5 s .*Check the path"
    ):
        open_source("models/mine")


def test_an_unreachable_hub_is_found_out_within_five_seconds() -> None:
    """For real: a port where nobody answers (reserved for documentation, RFC 5737)."""
    from huggingface_hub import constants

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", "https://192.0.2.1")
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        for key in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
            patch.delenv(key, raising=False)
        patch.setattr(hub, "SECONDS", 0.2)
        started = time.monotonic()
        assert "192.0.2.1 did not answer within 0.2 s" in str(hub.unreachable())
        assert time.monotonic() - started < 60


def test_a_model_in_the_cache_is_used_when_the_hub_is_away(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    import huggingface_hub

    offline(monkeypatch, tmp_path)
    asked: dict[str, Any] = {}
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda repo, **o: asked.update(o, repo=repo) or str(tmp_path / "kept")
    )
    with pytest.warns(QuantkitWarning, match=r"did not answer.*the copy in the cache is used"):
        assert hub.download("org/name@v1") == tmp_path / "kept"
    assert asked == {"repo": "org/name", "revision": "v1", "local_files_only": True}


def test_a_path_that_cannot_be_a_hub_id_asks_no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "unreachable", None)
    for ref in ("no/such/folder", "./nowhere", "nowhere", "models/x.gguf"):
        with pytest.raises(RequestError, match="no such folder or file"):
            open_source(ref)


def test_a_local_folder_wins_over_a_hub_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "unreachable", None)
    with pytest.raises(SourceError, match=r"no config.json"):
        open_source("org/name")
