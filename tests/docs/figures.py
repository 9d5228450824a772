"""How long and how plain the pages are: `python -m tests.docs.figures`."""

from __future__ import annotations

import re
from pathlib import Path

from tests.house.test_plain_words import Text, banned, prose

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ("commands.md", "configuration.md", "files.md")
UNREAD = re.compile(r"^ *```.*?^ *```$|<!--.*?-->", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*#|]|\d+\. ))")  # what ends a paragraph, an item of a list, a heading
ENDING = re.compile(r"(?<=[.!?])[\"')*]*\s+")


def written() -> list[Path]:
    """Return the pages of docs/ that are written by hand."""
    return [page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name not in GENERATED]


def words(page: Path) -> int:
    """Count the words of a page without blocks and comments."""
    return len(UNREAD.sub("", page.read_text()).split())


def sentences(page: Path) -> list[str]:
    """Return the sentences of a page's prose, longest first; tables and headings are none."""
    blocks = [block.strip() for block in BLOCK.split(prose(page)) if block.strip()[:1] not in ("#", "|", "")]
    found = [" ".join(sentence.split()) for block in blocks for sentence in ENDING.split(block)]
    return sorted(found, key=lambda sentence: len(sentence.split()), reverse=True)


if __name__ == "__main__":
    for page in [ROOT / "README.md", *written()]:
        longest = sentences(page)[0]
        uses = len(banned(Text(page.name, prose(page)))) * 1000 / words(page)
        print(f"{words(page):6,} words, {uses:4.1f} banned in 1,000: {page.relative_to(ROOT)}")  # noqa: T201
        print(f"        {len(longest.split())} words: {longest[:140]}")  # noqa: T201
    print(f"{sum(map(words, written())):6,} words in docs/")  # noqa: T201
