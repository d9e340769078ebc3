"""``quantkit fetch NAME``: a named model or text into the cache, its folder printed."""

from __future__ import annotations

import json
import sys

import click


@click.command(short_help="Download a named model or text into the cache and print its folder.")
@click.argument("names", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="One JSON object: what, licence, folder, sha256 of each file.")
def command(names: tuple[str, ...], as_json: bool) -> None:
    """Download named models or texts (checksums verified), or models by hub id, and print the folder of each.

    Without NAMES, list what there is. Downloads go through pip and the index it is configured for; the cache is
    $QUANTKIT_CACHE, or quantkit in the user's cache folder.
    """
    from quantkit.checkpoint.fetch import catalogue, fetch, file_sha256, is_named
    from quantkit.checkpoint.hub import ORIGINALS, download, is_hub_id

    known = catalogue()
    if not names:
        if as_json:
            click.echo(json.dumps({n: {"about": e.about, "licence": e.licence} for n, e in known.items()}))
            return
        for name, entry in known.items():
            click.echo(f"{name:18} {entry.about}\n{'':18} licence: {entry.licence}")
        for name, repo in ORIGINALS.items():
            click.echo(f"{name:18} the original of {name.removesuffix('-hub')}, from the model hub: {repo}")
        return
    show = (lambda line: click.echo(line, err=True)) if sys.stderr.isatty() else None
    folders = {
        name: download(name) if is_hub_id(name) and not is_named(name) else fetch(name, progress=show) for name in names
    }
    if as_json:
        facts = {
            name: (
                {"folder": str(folder)}
                | (
                    {
                        "licence": known[name].licence,
                        "sha256": {file: file_sha256(folder / file) for file in known[name].files},
                    }
                    if name in known
                    else {}
                )
            )
            for name, folder in folders.items()
        }
        click.echo(json.dumps(facts))
        return
    for folder in folders.values():
        click.echo(folder)
