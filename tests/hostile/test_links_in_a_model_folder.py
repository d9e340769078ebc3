"""A link in a model folder that leads out of it is refused by name; a hub's cache, which is all links, is read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from written import digest

import quantkit as package
from quantkit.checkpoint.open import open_source
from quantkit.checkpoint.source import FolderSource
from quantkit.checkpoint.storage.links import refuse_link_out, refuse_links_out
from quantkit.checkpoint.tokenizer import load_tokenizer
from quantkit.errors import SourceError

SECRET = '{"secret": "do not copy"}'


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A private file beside the model's folder."""
    path = tmp_path / "secret.json"
    path.write_text(SECRET)
    return path


def plant(model: Path, name: str, target: Path) -> Path:
    """Put a link in the place of a file of the model."""
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(target)
    return model / name


@pytest.mark.parametrize(
    "name",
    ["special_tokens_map.json", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
     "NOTICE", "README.md", "quantkit_kv.safetensors", "chat_template.jinja", "additional_chat_templates/tools.jinja"],
)  # fmt: skip
def test_a_file_that_is_a_link_out_of_the_folder_is_named_and_not_copied(
    name: str, tiny_model: Path, secret: Path, tmp_path: Path
) -> None:
    link = plant(tiny_model, name, secret)
    with pytest.raises(SourceError) as caught:
        package.convert(tiny_model, tmp_path / "out", method="rtn", group_size=32)
    assert str(link) in str(caught.value)
    assert str(secret) in str(caught.value)
    with pytest.raises(SourceError, match="leads out of the model's folder"):
        load_tokenizer(tiny_model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret.json", "source"]


def test_weights_that_are_a_link_out_of_the_folder_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    elsewhere = shutil.move(tiny_model / "model.safetensors", tmp_path / "model.safetensors")
    plant(tiny_model, "model.safetensors", Path(elsewhere))
    with pytest.raises(SourceError, match=r"source/model\.safetensors: leads out"):
        FolderSource(tiny_model)


def test_a_folder_of_templates_that_is_a_link_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    plant(tiny_model, "additional_chat_templates", tmp_path / "private")
    with pytest.raises(SourceError, match=r"additional_chat_templates: leads out"):
        FolderSource(tiny_model)


def test_a_gguf_that_is_a_link_in_a_folder_is_refused(secret: Path, tmp_path: Path) -> None:
    (tmp_path / "gguf").mkdir()
    plant(tmp_path / "gguf", "model.gguf", secret)
    with pytest.raises(SourceError, match=r"model\.gguf: leads out"):
        open_source(tmp_path / "gguf")


def test_a_shard_that_leads_out_by_a_folder_on_the_way_is_refused(tmp_path: Path) -> None:
    model, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    model.mkdir()
    elsewhere.mkdir()
    (elsewhere / "a.safetensors").write_bytes(b"")
    (model / "shards").symlink_to(elsewhere)
    refuse_links_out(model)  # a folder that is no part of a model may be a link: nothing in it is read
    for name in ("shards/a.safetensors", "../elsewhere/a.safetensors", str(elsewhere / "a.safetensors")):
        with pytest.raises(SourceError, match="leads out of the model's folder"):
            refuse_link_out(model, name)


def test_a_link_that_comes_back_by_a_detour_counts_by_its_end(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "a.json").write_text("{}")
    (tmp_path / "detour").symlink_to(model / "a.json")
    plant(model, "inside.json", tmp_path / "detour")
    refuse_links_out(model)
    os.symlink("circle.json", model / "circle.json")
    os.symlink(tmp_path / "nowhere", model / "dangling.json")
    refuse_links_out(model)  # neither can be opened, so nothing is read


def hub_cache(model: Path, root: Path, repository: str = "models--org--name") -> Path:
    """The model as huggingface_hub keeps it: files named by their hash, a folder of links for each commit."""
    blobs, snapshot = root / repository / "blobs", root / repository / "snapshots" / "0123abcd"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for index, path in enumerate(sorted(model.iterdir())):
        shutil.copyfile(path, blobs / f"{index:040x}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"{index:040x}")
    return snapshot


def test_a_hubs_cache_and_a_link_to_the_folder_give_the_same_bytes(tiny_model: Path, tmp_path: Path) -> None:
    (tiny_model / "NOTICE").write_text("of the model")
    snapshot = hub_cache(tiny_model, tmp_path / "hub")
    (tmp_path / "mine").symlink_to(snapshot)
    folders = {"plain": tiny_model, "hub": snapshot, "link": tmp_path / "mine"}
    outputs = {}
    for name, folder in folders.items():
        out = tmp_path / f"out-{name}"
        package.convert(folder, out, method="rtn", group_size=32)
        assert not any(path.is_symlink() for path in out.rglob("*"))
        outputs[name] = digest(out)
    assert "NOTICE" in outputs["plain"]
    assert outputs["plain"] == outputs["hub"] == outputs["link"]


def test_a_blob_that_is_a_link_itself_is_refused(tiny_model: Path, secret: Path, tmp_path: Path) -> None:
    snapshot = hub_cache(tiny_model, tmp_path / "hub")
    plant(snapshot.parents[1] / "blobs", f"{0:040x}", secret)
    with pytest.raises(SourceError, match="leads out"):
        FolderSource(snapshot)


def test_blobs_on_another_disk_are_read_in_the_users_own_cache_alone(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    snapshot = hub_cache(tiny_model, tmp_path / "hub")
    blobs = snapshot.parents[1] / "blobs"
    shutil.move(blobs, tmp_path / "disk")
    blobs.symlink_to(tmp_path / "disk")
    with pytest.raises(SourceError, match="leads out"):  # a stranger may have made it
        FolderSource(snapshot)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert FolderSource(snapshot).config == FolderSource(tiny_model).config
    (tmp_path / "disk" / "id_rsa").write_text(SECRET)
    plant(snapshot, "NOTICE", blobs / "id_rsa")
    with pytest.raises(SourceError, match=r"NOTICE: leads out"):  # no blob's name
        FolderSource(snapshot)
    (snapshot / "NOTICE").unlink()
    (tmp_path / "disk" / f"{99:040x}").symlink_to(tmp_path / "disk" / "id_rsa")
    plant(snapshot, "NOTICE", blobs / f"{99:040x}")
    with pytest.raises(SourceError, match=r"NOTICE: leads out"):
        FolderSource(snapshot)


def test_a_cache_that_is_reached_by_a_link_is_read(tiny_model: Path, tmp_path: Path) -> None:
    """HF_HOME on another disk."""
    snapshot = hub_cache(tiny_model, tmp_path / "disk")
    (tmp_path / "hub").symlink_to(tmp_path / "disk")
    assert FolderSource(tmp_path / "hub" / snapshot.relative_to(tmp_path / "disk")).config


@pytest.mark.parametrize("repository", ["evil", "datasets--org--name"])
def test_blobs_beside_what_is_no_models_repository_are_not_followed(
    repository: str, tiny_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(SourceError, match="leads out"):
        FolderSource(hub_cache(tiny_model, tmp_path / "hub", repository))


def test_another_repositorys_blobs_are_not_followed(tiny_model: Path, tmp_path: Path) -> None:
    mine = hub_cache(tiny_model, tmp_path / "hub")
    private = hub_cache(tiny_model, tmp_path / "hub", "models--me--private")
    plant(mine, "NOTICE", private.parents[1] / "blobs" / f"{0:040x}")
    with pytest.raises(SourceError, match=r"NOTICE: leads out"):
        FolderSource(mine)


def test_the_command_line_says_it_in_one_line(tiny_model: Path, tmp_path: Path, quantkit: Callable[..., Any]) -> None:
    plant(tiny_model, "special_tokens_map.json", Path("/etc/passwd"))
    done = quantkit("convert", tiny_model, "--out", tmp_path / "out", "--method", "rtn")
    assert done.returncode == 1
    assert done.stderr.startswith(f"Error: {tiny_model / 'special_tokens_map.json'}: leads out")
    assert "Traceback" not in done.stderr
    assert "root:" not in done.stdout + done.stderr
    assert not (tmp_path / "out").exists()
