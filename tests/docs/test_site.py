"""docs/ as a site: it is built without a warning, loads nothing from elsewhere, and all that it links to is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cached_property
from html import unescape
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.docs import site

ROOT = Path(__file__).resolve().parents[2]
SECURITY = (ROOT / "docs/security.md").read_text()
TAG = re.compile(r"<(\w+)((?: [^<>]*)?)>")
ATTRIBUTE = re.compile(r"([\w-]+)=\"([^\"]*)\"")
LOADERS = {"script", "img", "link", "iframe", "source", "audio", "video"}  # tags whose address a browser loads
OUTSIDE = re.compile(r"(?:url\(|@import) *[\"']?(?:https?:)?//[^);]*")
PARAGRAPH = re.compile(r"<p>(.*?)</p>", re.DOTALL)
INSIDE = re.compile(r"<code>.*?</code>|<[^>]+>", re.DOTALL)


class Html:
    """A page as its reader's browser takes it."""

    def __init__(self, path: Path) -> None:
        self.path, self.text = path, path.read_text()
        self.ids, self.links, self.loaded = set[str](), list[str](), list[str]()
        for tag, words in TAG.findall(self.text):
            told = dict(ATTRIBUTE.findall(words))
            self.ids |= {told[name] for name in ("id", "name") if name in told}
            address = told.get("src") or told.get("href")
            if address is not None and (tag == "a" or tag in LOADERS):
                (self.links if tag == "a" else self.loaded).append(unescape(address))

    @property
    def prose(self) -> str:
        """Return the text of its paragraphs."""
        return "\n".join(INSIDE.sub("", paragraph) for paragraph in PARAGRAPH.findall(self.text))


class Site:
    """The pages that were built."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def pages(self) -> dict[Path, Html]:
        """Return all but the page for addresses that are not there, whose links a server's root completes."""
        return {path: Html(path) for path in self.folder.rglob("*.html") if path.name != "404.html"}

    def lost(self, page: Html) -> Iterator[str]:
        """Yield the links of a page within the site that lead nowhere."""
        for link in page.links:
            parts = urlsplit(link)
            if not parts.scheme:
                target = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path
                target = target / "index.html" if target.is_dir() else target
                known = self.pages[target].ids if target in self.pages else set()
                if not target.exists() or (parts.fragment and unquote(parts.fragment) not in known):
                    yield f"{page.path.relative_to(self.folder)}: {link}"


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Site:
    if find_spec("mkdocs") is None or find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed: pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Site(folder)


@pytest.mark.nightly
def test_no_page_loads_anything_from_elsewhere(built: Site) -> None:
    loaded = [(page.path.name, name) for page in built.pages.values() for name in page.loaded]
    assert len(loaded) > len(built.pages)
    assert [(page, name) for page, name in loaded if re.match("(https?:)?//", name)] == []
    assert [sheet.name for sheet in built.folder.rglob("*.css") if OUTSIDE.search(sheet.read_text())] == []
    diagrams = [page.path.name for page in built.pages.values() if 'class="mermaid"' in page.text]
    assert diagrams == [], "the theme draws mermaid with a script that it fetches: commit a picture"


@pytest.mark.nightly
def test_every_link_and_anchor_of_the_site_leads_somewhere(built: Site) -> None:
    assert sum(len(page.links) for page in built.pages.values()) > 1000
    assert [link for page in built.pages.values() for link in built.lost(page)] == []


@pytest.mark.nightly
def test_a_link_to_no_page_and_one_to_no_anchor_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a class="x" href="b.html#there">b</a> <a href="b.html#gone">b</a> <a href="c.html">c</a>'
    )
    (tmp_path / "b.html").write_text('<h1 id="there">b</h1><script src="https://elsewhere.org/x.js"></script>')
    site_of = Site(tmp_path)
    assert list(site_of.lost(site_of.pages[tmp_path / "a.html"])) == ["a.html: b.html#gone", "a.html: c.html"]
    assert site_of.pages[tmp_path / "b.html"].loaded == ["https://elsewhere.org/x.js"]


@pytest.mark.nightly
def test_every_page_of_docs_is_a_click_away(built: Site) -> None:
    start = built.pages[built.folder / "index.html"]
    pages = {page.relative_to(ROOT).with_suffix(".html").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert len(pages) > 20
    assert {page.replace("README", "index") for page in pages} - {urlsplit(link).path for link in start.links} == set()


@pytest.mark.nightly
def test_no_mark_of_ours_shows_and_none_is_left(built: Site) -> None:
    raw = re.compile(r"```|^\s*\||^- |^\d+\. ", re.MULTILINE)  # a list or table that was not taken for one
    shown = {page.path.name: page.prose for page in built.pages.values()}
    assert len(shown["cluster.html"]) > 1000
    assert {name: raw.findall(text) for name, text in shown.items() if raw.search(text)} == {}
    assert {page.path.name for page in built.pages.values() if "<!--" in page.text} == set()


@pytest.mark.nightly
def test_a_link_to_a_test_leads_to_that_test(built: Site) -> None:
    (path, name), *others = re.findall(r'\]\(\.\./(tests/security/\w+\.py) "(\w+)"\)', SECURITY)
    assert f"../{path}.html#{name}" in built.pages[built.folder / "docs/security.html"].links
    assert name in built.pages[built.folder / f"{path}.html"].ids
    assert len(others) > 10


@pytest.mark.nightly
def test_a_link_in_code_is_left_and_one_to_a_folder_leads_to_its_page(tmp_path: Path) -> None:
    class Page:
        class file:  # noqa: N801
            src_uri = "docs/page.md"

    assert site.on_page_markdown("`[a](../tests)` [b](../configs/sites) <!-- x -->.", Page) == (
        "`[a](../tests)` [b](../configs/sites/README.md) ."
    )
    assert site.on_page_markdown('[c](../tests/docs/site.py "linked")', Page) == "[c](../tests/docs/site.py.md#linked)"
    assert site.on_page_markdown("[d](https://a.org/b) [e](#f) [g](cache.md#h)", Page) == (
        "[d](https://a.org/b) [e](#f) [g](cache.md#h)"
    )
