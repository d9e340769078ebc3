"""Models by hub id, ``org/name`` or ``org/name@revision``: downloaded once; what goes wrong is explained.

Only config, tokenizer and safetensors are fetched; pickle weights (``.bin``) never, because unpickling runs code. The
files lie in huggingface_hub's own cache, so other tools share them.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from quantkit.checkpoint.names import TOKENIZER_FILES
from quantkit.errors import QuantkitError, QuantkitWarning, SourceError

SECONDS = 5
# Names for the originals of the registry's models (which are quantized GGUF files).
ORIGINALS = {"smollm2-135m-hub": "HuggingFaceTB/SmolLM2-135M-Instruct", "gemma3-270m-hub": "google/gemma-3-270m"}
# A hub id: two parts of letters, digits, '-', '_' and '.', then perhaps a branch, tag or commit.
ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?", re.ASCII)
WEIGHTS = re.compile(r"(model|quantkit)([-_.].*)?\.safetensors(\.index\.json)?|quantkit_.*\.safetensors")
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
FILE_ENDS = (*PICKLES, ".gguf", ".safetensors", ".json")
BESIDE = (
    "config.json", "generation_config.json", "quantize_config.json", "quant_config.json", "quantkit.json",
)  # fmt: skip


def is_hub_id(ref: str) -> bool:
    """Return whether a reference can be one on a hub.

    A known original's name, or two words with one slash between them (and not the name of a model file, which can only
    be a path).
    """
    return ref in ORIGINALS or (ID.fullmatch(ref) is not None and not ref.endswith(FILE_ENDS))


def download(ref: str) -> Path:
    """Return the folder of a model's files in the hub's cache, downloaded if they are not there.

    ref: as ``is_hub_id`` accepts it, and no local path.

    Raises SourceError for a model that is missing, gated or has no safetensors, QuantkitError if the hub does not
    answer within 5 s and the model is not in the cache.
    """
    from huggingface_hub import HfApi, constants, snapshot_download

    match = ID.fullmatch(ORIGINALS.get(ref, ref))
    assert match is not None  # is_hub_id
    repo, revision = match["repo"], match["revision"]
    if why := unreachable():
        return _cached(ref, repo, revision, why)
    with explained(ref, repo, revision):
        # revision of the answer, so that files and list belong to one commit
        info = HfApi().model_info(repo, revision=revision, timeout=SECONDS)
        wanted = needed(ref, [file.rfilename for file in info.siblings or []])
        if sys.stderr.isatty():  # gigabytes, perhaps; what is in the cache already is not fetched again
            print(f"{ref}: {len(wanted)} files of {repo} into {constants.HF_HUB_CACHE}", file=sys.stderr)
        return Path(snapshot_download(repo, revision=info.sha, allow_patterns=wanted))


def needed(ref: str, files: Iterable[str]) -> list[str]:
    """Pick those of a repository's files that a model is read from.

    Raises SourceError when there are no safetensors, or no config.
    """
    files = list(files)
    weights = [file for file in files if WEIGHTS.fullmatch(file)]
    if not any(file.endswith(".safetensors") for file in weights):
        pickles = [file for file in files if file.endswith(PICKLES)]
        ggufs = [file for file in files if file.endswith(".gguf")]
        if pickles:
            raise SourceError(
                f"{ref}: on the hub it has only pickle weights ({pickles[0]}), which are never downloaded or opened "
                "(unpickling runs code). Look for a copy as safetensors, often in a pull request of that page."
            )
        if ggufs:
            raise SourceError(
                f"{ref}: on the hub it has only GGUF files ({', '.join(ggufs[:3])}). Download one, then give its path."
            )
        raise SourceError(f"{ref}: on the hub it has no model*.safetensors. It may be an adapter or no model at all.")
    if "config.json" not in files:
        raise SourceError(f"{ref}: on the hub it has no config.json, so it is no transformers model.")
    beside = [
        file
        for file in files
        if file in (*BESIDE, *TOKENIZER_FILES) or ("/" not in file and file.endswith(".tiktoken"))
    ]
    templates = [file for file in files if file.startswith("additional_chat_templates/")]
    return [*beside, *templates, *weights]


def unreachable() -> str | None:
    """Return why the hub cannot be asked, None if it can.

    Found out within five seconds; the hub's library would retry for minutes.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    if any(os.environ.get(key) for key in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")):
        return None  # the proxy resolves the name; a direct connection proves nothing
    url = urlsplit(constants.ENDPOINT)
    host, port = url.hostname or "", url.port or (443 if url.scheme == "https" else 80)
    try:
        socket.create_connection((host, port), timeout=SECONDS).close()
    except OSError as error:
        return f"{host} did not answer within {SECONDS} s ({error})"
    return None


def _cached(ref: str, repo: str, revision: str | None, why: str) -> Path:
    """Return what the cache holds of a model, when the hub cannot be asked."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(repo, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        raise QuantkitError(
            f"{ref}: no such folder or file here, and as a hub id it cannot be had: {why}, and it is not in the cache"
            f" ({constants.HF_HUB_CACHE}). Check the path; or go online; or copy the model's folder here and give its"
            " path; `quantkit fetch` lists models that need no hub."
        ) from None
    if not constants.HF_HUB_OFFLINE:
        warnings.warn(
            f"{ref}: {why}; the copy in the cache is used, which may be older.", QuantkitWarning, stacklevel=2
        )
    return folder


@contextmanager
def explained(ref: str, repo: str, revision: str | None) -> Iterator[None]:
    """Turn what the hub's library raises into one message with the remedy."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{repo}"
    try:
        yield
    except errors.GatedRepoError as error:
        raise SourceError(
            f"{ref}: is gated: its owner wants you to agree to terms first. Accept them at {page} while signed in, then"
            " run `hf auth login` (or set HF_TOKEN) here."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise SourceError(
            f"{ref}: {repo} has no branch, tag or commit {revision!r}. Its revisions are listed at {page}/commits."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise SourceError(
            f"{ref}: no such folder or file here, and no model of that name on the hub that you may see. Check the"
            " spelling; for a private model run `hf auth login` (or set HF_TOKEN)."
        ) from error
    except OSError as error:  # the library's HTTP errors, a connection that breaks, a full disk
        raise QuantkitError(
            f"{ref}: downloading failed ({type(error).__name__}: {_short(error)}). Try again: finished files are kept"
            f" in {constants.HF_HUB_CACHE}. If the disk is full, make room or set HF_HOME elsewhere."
        ) from error
    except ValueError as error:  # a name that the library itself refuses
        raise SourceError(f"{ref}: is no folder or file here, and no valid hub id ({_short(error)}).") from error


def _short(error: Any) -> str:
    return " ".join(str(error).split())[:300]
