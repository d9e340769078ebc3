"""Make the two text samples from the files that the gensim wheel carries for its tests.

The wiki markup is removed by gensim's own ``filter_wiki``: the samples are defined by it, and their checksums pin its
every quirk. gensim is LGPL and needs scipy, so it is neither copied nor installed: the few regular expressions and
functions that ``filter_wiki`` consists of are taken out of the checksum-verified wheel and run from there.
"""

from __future__ import annotations

import ast
import bz2
import html.entities
import io
import re
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from xml.etree.ElementTree import iterparse

from quantkit.errors import SourceError

SHORTEST = 2000  # characters; shorter articles are stubs and disambiguation pages
DUMP = "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
WIKICORPUS, UTILS = "gensim/corpora/wikicorpus.py", "gensim/utils.py"
NEWS = "gensim/test/test_data/lee_background.cor"


def wikipedia_sample(members: Mapping[str, bytes]) -> dict[str, str]:
    """Make both halves of the Wikipedia sample.

    members: of the wheel, path -> content. Returns {"calibration.txt": text, "evaluation.txt": text}.
    """
    filter_wiki = _filter_wiki(members[WIKICORPUS].decode("utf-8"), members[UTILS].decode("utf-8"))
    articles = [_article(title, filter_wiki(markup)) for title, markup in _pages(members[DUMP])]
    articles = [article for article in articles if len(article) > SHORTEST]
    # By position, so that both halves have the same mix of subjects. Index 3 of each four is kept back for later.
    return {
        "calibration.txt": "\n\n\n".join(a for i, a in enumerate(articles) if i % 4 in (0, 2)),
        "evaluation.txt": "\n\n\n".join(a for i, a in enumerate(articles) if i % 4 == 1),
    }


def news_sample(members: Mapping[str, bytes]) -> dict[str, str]:
    """Make the news sample: one article a paragraph, repeated ones and HTML tags dropped.

    members: of the wheel, path -> content. Returns {"evaluation.txt": text}.
    """
    lines = (re.sub(r"</?\w+>", "", line).strip() for line in members[NEWS].decode("utf-8").split("\n"))
    return {"evaluation.txt": "\n\n".join(dict.fromkeys(line for line in lines if line))}


def _pages(dump: bytes) -> Iterator[tuple[str, str]]:
    """Yield (title, wiki markup) of the dump's main-namespace pages, in file order."""
    for _, element in iterparse(io.BytesIO(bz2.decompress(dump))):
        if element.tag.endswith("}page"):
            space = element.tag.removesuffix("page")
            if element.findtext(f"{space}ns") == "0":
                yield element.findtext(f"{space}title") or "", element.findtext(f"{space}revision/{space}text") or ""
            element.clear()


def _article(title: str, text: str) -> str:
    """Return title and prose of a page.

    Emphasis marks and list or table lines are dropped, headings are paragraphs of their own.
    """
    text = re.sub(r"'{2,}", "", text)
    text = re.sub(r"^=+[ \t]*([^=]*?)[ \t]*=+[ \t]*$", r"\n\1\n", text, flags=re.MULTILINE)
    text = re.sub(r"^[*#:;|!{}].*$", "", text, flags=re.MULTILINE)
    return title + "\n\n" + re.sub(r"\n{3,}", "\n\n", text).strip()


def _filter_wiki(wikicorpus: str, utils: str) -> Callable[[str], str]:
    """Make gensim's ``filter_wiki`` from the source text of the two modules that define it."""
    helpers = _definitions(
        utils,
        {"RE_HTML_ENTITY", "any2unicode", "to_unicode", "safe_unichr", "decode_htmlentities"},
        {"re": re, "n2cp": html.entities.name2codepoint},
    )
    module = _definitions(
        wikicorpus,
        {f"RE_P{i}" for i in range(18)} | {"filter_wiki", "remove_markup", "remove_template", "remove_file"},
        {"re": re, "utils": types.SimpleNamespace(**helpers)},
    )
    function: Callable[[str], str] = module["filter_wiki"]
    return function


def _definitions(source: str, wanted: set[str], names: dict[str, Any]) -> dict[str, Any]:
    """Run only the wanted top-level assignments and functions of a module, with ``names`` in place of its imports."""
    body: list[ast.stmt] = []
    found: set[str] = set()
    for node in ast.parse(source).body:
        targets = {t.id for t in node.targets if isinstance(t, ast.Name)} if isinstance(node, ast.Assign) else set()
        if isinstance(node, ast.FunctionDef):
            targets = {node.name}
        if targets & wanted:
            body.append(node)
            found |= targets
    if wanted - found:
        raise SourceError(
            f"the gensim wheel lacks {', '.join(sorted(wanted - found))}; another version was downloaded."
        )
    space = dict(names)
    exec(compile(ast.Module(body, []), "gensim (from the downloaded wheel)", "exec"), space)
    return space
