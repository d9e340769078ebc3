"""Open a model by whatever names it: a folder, a GGUF file, a hub id, a name that ``fetch`` knows."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from quantkit.checkpoint.fetch import fetch, is_named, models
from quantkit.checkpoint.gguf_files.source import GGUFSource
from quantkit.checkpoint.hub import download, is_hub_id
from quantkit.checkpoint.regular import given_path
from quantkit.checkpoint.source import FolderSource, Source
from quantkit.checkpoint.storage.links import refuse_links_out
from quantkit.errors import MissingExtra, RequestError, SourceError


def open_source(ref: str | Path | Source) -> Source:
    """Open a model given as a folder, GGUF file, named model or hub id (``org/name[@revision]``, downloaded).

    A source that is open already is returned as it is.

    Raises RequestError for a reference that names nothing, QuantkitError for a hub that does not answer, SourceError
    for a folder or file that cannot be a model.
    """
    if not isinstance(ref, str | Path):
        if not hasattr(ref, "read_entry"):  # a protocol: what it needs to have
            given_path(ref)
        return ref
    path = given_path(ref)
    if isinstance(ref, str) and is_named(ref) and not path.exists():
        if importlib.util.find_spec("gguf") is None:  # said before the download, not after it
            raise MissingExtra("gguf", "gguf", f"{ref} is a GGUF file; reading it")
        path = fetch(ref)
    if isinstance(ref, str) and not path.exists() and is_hub_id(ref):
        path = download(ref)
    if not path.exists():
        raise RequestError(
            f"{ref}: no such folder or file, and no model of that name is known. Give a Hugging Face folder, a .gguf"
            f" file, a hub id (org/name, one slash), or a name that `quantkit fetch` lists: {', '.join(models())}."
        )
    if path.is_file():
        if path.suffix == ".gguf":
            return GGUFSource(path)
        if path.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl"):
            raise SourceError(
                f"{path}: pickle files are never opened (unpickling runs code). Convert it to safetensors first."
            )
        raise SourceError(
            f"{path}: not a model. Give the folder that holds config.json and *.safetensors, or a .gguf file."
        )
    ggufs = sorted(path.glob("*.gguf"))
    if (path / "config.json").exists() and (not ggufs or any(path.glob("*.safetensors"))):
        return FolderSource(path)  # GGUF repositories often carry a config.json, but no safetensors
    if len(ggufs) == 1:
        refuse_links_out(path)
        return GGUFSource(ggufs[0])
    if len(ggufs) > 1:
        raise RequestError(
            f"{path}: holds {len(ggufs)} GGUF files; name one of them: {', '.join(g.name for g in ggufs[:5])}"
        )
    raise SourceError(
        f"{path}: no config.json and no .gguf file in this folder. Give the folder of a Hugging Face model."
    )
