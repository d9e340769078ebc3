"""Every relative link, and every file named in backticks, exists.

Read are the pages that describe the repository as it is now.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
HISTORY = {"CHANGELOG.md", "docs/log.md"}  # they tell of files as they were called then
TOP = {"quantkit", "tests", "eval", "docs", "calibration", "examples"}
FOREIGN = {
    "vllm",
    "sglang",
    "lmdeploy",
    "utils",
    "auto_awq.py",
    "quant_utils.py",
    "bitsandbytes",
}  # what other projects' paths begin with
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "docs/formats/*.md", "eval/*.md", "calibration/**/*.md", "examples/*.md")
    for path in ROOT.glob(pattern)
)
DECISIONS = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/adr/*.md"))


def anchors(page: Path) -> set[str]:
    """The anchors that a forge makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """Relative links of a page that lead nowhere: no such file, or no such heading in it."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


def exists(name: str) -> bool:
    """Whether a file, a folder or a pattern of files named on a page is there.

    It is looked for from the root, and below any of its folders.
    """
    if name.partition("/")[0] in TOP:
        return any(True for _ in ROOT.glob(name.rstrip("/")))
    return any(True for top in TOP for _ in (ROOT / top).rglob(name))


def lost_names(page: Path) -> list[str]:
    """What a page names in backticks that does not exist.

    Python files count, and paths that begin with a folder of this repository.
    """
    names = re.findall(r"`([\w.*-]+(?:/[\w.*-]+)*/?)(?:::\w+)?`", page.read_text(encoding="utf-8"))
    named = [name for name in names if name.endswith(".py") or ("/" in name and name.partition("/")[0] in TOP)]
    return [name for name in named if name.partition("/")[0] not in FOREIGN and not exists(name)]


@pytest.mark.parametrize("page", [page for page in [*PAGES, *DECISIONS] if page not in HISTORY])
def test_links_lead_somewhere(page):
    assert broken_links(ROOT / page) == []


@pytest.mark.parametrize("page", [page for page in PAGES if page not in HISTORY])
def test_named_files_exist(page):
    assert lost_names(ROOT / page) == []


def test_the_glossary_is_in_order_and_explains_a_word_once():
    words = re.findall(
        r"^\*\*(.+?)\.\*\*", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    assert len(words) >= 30
    assert words == sorted(set(words), key=str.casefold)


def test_what_is_broken_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A head\n[a](#a-head) [b](#b) [c](gone.md) [d](https://x.y/z) "
        "`quantkit/gone.py` `core/gone.py` `gone.py` `core/affine.py`"
    )
    assert broken_links(page) == ["#b", "gone.md"]
    assert lost_names(page) == ["quantkit/gone.py", "core/gone.py", "gone.py"]
