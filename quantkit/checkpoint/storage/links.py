"""Symbolic links in a model folder: which of them are followed.

A folder from a stranger may hold ``special_tokens_map.json`` as a link to a private file, whose content would end in
the output. So a link in a model folder may point inside that folder, or, in a hub's cache, into the ``blobs`` of the
same repository, where huggingface_hub keeps every file; another one is refused by name. The folder itself may be
reached through links, since the user named it: a hub's cache, or a repository in it, may lie on another disk.

A ``blobs`` that is a link itself is followed only in the user's own hub cache (HF_HUB_CACHE), and only to files that
are named by a hash there. Anywhere else a stranger may have made it, and would read by it what lies in any folder.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from quantkit.errors import SourceError

# a folder whose files are copied, those in folders of its own too
TEMPLATES = "additional_chat_templates"
# how huggingface_hub names a repository's folder: models--ORG--NAME/snapshots/COMMIT
HUB_REPOSITORY = "models--"
BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def refuse_links_out(folder: Path) -> None:
    """Refuse a model folder in which a file is a symbolic link to something elsewhere.

    folder: a model folder; what lies directly in it and below its folder of chat templates is looked at.

    Raises SourceError naming the first such link.
    """
    inside, templates = _allowed(folder), folder / TEMPLATES
    for path in [*(path for path in _entries(folder) if path == templates or not path.is_dir()), *templates.rglob("*")]:
        if path.is_symlink() and os.path.exists(path):
            _require_inside(path, inside)


def refuse_link_out(folder: Path, name: str) -> None:
    """Refuse a file of a model folder that lies elsewhere, by a link of its own or of a folder on the way.

    folder: a model folder. name: the file's path in it, as an index of shards names it.

    Raises SourceError naming the file.
    """
    _require_inside(folder / name, _allowed(folder))


def _entries(folder: Path) -> list[Path]:
    """Return what lies in a folder, sorted; nothing if there is no such folder, which its reader will say."""
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise SourceError(f"{folder}: cannot be read ({error.strerror}). Check who may read it.") from error


def _allowed(folder: Path) -> list[Path]:
    """Return the folders that a link in ``folder`` may point into, resolved."""
    own = Path(os.path.realpath(folder))
    snapshots = [path for path in own.parents if path.name == "snapshots"]
    blobs = [path.parent / "blobs" for path in snapshots if path.parent.name.startswith(HUB_REPOSITORY)]
    return [own, *blobs]


def _require_inside(path: Path, inside: list[Path]) -> None:
    # not Path.resolve, which raises for a circle of links: such a one is missing, for whoever opens it
    target = Path(os.path.realpath(path))
    if not any(target.is_relative_to(folder) for folder in inside) and not _own_blob(path, target):
        raise SourceError(
            f"{path}: leads out of the model's folder, to {target}, and is not followed. Put a copy of the file in its"
            " place if it belongs to the model."
        )


def _own_blob(path: Path, target: Path) -> bool:
    """Return whether a file is a blob of the user's own hub cache, in a ``blobs`` that is a link."""
    from huggingface_hub import constants

    own = Path(os.path.realpath(path.parent))
    cache = Path(os.path.realpath(constants.HF_HUB_CACHE))
    for snapshots in (folder for folder in own.parents if folder.name == "snapshots"):
        repository = snapshots.parent
        blobs = os.path.realpath(repository / "blobs")
        if repository.parent == cache and repository.name.startswith(HUB_REPOSITORY) and str(target.parent) == blobs:
            return bool(BLOB.fullmatch(target.name))
    return False
