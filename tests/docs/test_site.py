"""The website builds without a warning, so that no link is broken, and loads nothing from other sites."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.docs import site
from tests.report.test_page import browser

if TYPE_CHECKING:
    from playwright.sync_api import Browser

__all__ = ["browser"]  # a fixture
ROOT = Path(__file__).resolve().parents[2]
LOADED = re.compile(r"<(?:script|img|link|iframe|source|audio|video)\b[^<>]*? (?:src|href)=\"([^\"]*)\"")
OUTSIDE = re.compile(r"(?:url\(|@import) *[\"']?(?:https?:)?//[^);]*")
PARAGRAPH = re.compile(r"<p>(.*?)</p>", re.DOTALL)
INSIDE = re.compile(r"<code>.*?</code>|<[^>]+>", re.DOTALL)
RAW = re.compile(r"```|^\s*\||^- |^\d+\. |<!--", re.MULTILINE)  # a list or table that was not taken for one
COPY = "nodes => nodes.map(n => { n.setAttribute('data-md-copying', ''); return n.innerText })"  # as the theme copies


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if find_spec("mkdocs") is None or find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed: pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.nightly
def test_pages_load_nothing_from_elsewhere_show_no_mark_of_ours_and_are_a_click_away(built: Path) -> None:
    html = {path.relative_to(built).as_posix(): path.read_text() for path in built.rglob("*.html")}
    loaded = [(page, name) for page, text in html.items() for name in LOADED.findall(text)]
    assert len(loaded) > len(html)
    assert [(page, name) for page, name in loaded if re.match("(https?:)?//", name)] == []
    assert [sheet.name for sheet in built.rglob("*.css") if OUTSIDE.search(sheet.read_text())] == []
    diagrams = [page for page, text in html.items() if 'class="mermaid"' in text]
    assert diagrams == [], "the theme draws mermaid with a script that it fetches: commit a picture"
    prose = {page: INSIDE.sub("", "\n".join(PARAGRAPH.findall(text))) for page, text in html.items()}
    assert {page: RAW.findall(text) for page, text in prose.items() if RAW.search(text)} == {}
    pages = {path.relative_to(ROOT).with_suffix(".html").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert len(pages) > 20
    assert {page.replace("README", "index") for page in pages} - {
        *re.findall(r'href="([^"#]*)', html["index.html"])
    } == set()


@pytest.mark.nightly
def test_pages_fit_a_phone_and_their_buttons_copy_commands_without_the_prompt(built: Path, browser: Browser) -> None:
    page = browser.new_page(viewport={"width": 400, "height": 800})
    copied = []
    for path in sorted((built / "docs").rglob("*.html")):
        page.goto(path.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= 400, path
        copied += page.locator("code:has(.gp)").evaluate_all(COPY)
    assert len(copied) > 50
    assert [text for text in copied if re.search(r"^\$ ", text, re.MULTILINE)] == []


def test_a_link_in_code_is_left_and_one_to_a_folder_leads_to_its_page() -> None:
    class Page:
        class file:  # noqa: N801
            src_uri = "docs/page.md"

    for text, shown in {
        "`[a](../tests)` [b](../configs/sites) <!-- x -->.": "`[a](../tests)` [b](../configs/sites/README.md) .",
        '[c](../tests/docs/site.py "linked")': "[c](../tests/docs/site.py.md#linked)",
        "[d](https://a.org/b) [e](#f) [g](cache.md#h)": "[d](https://a.org/b) [e](#f) [g](cache.md#h)",
    }.items():
        assert site.on_page_markdown(text, Page) == shown
