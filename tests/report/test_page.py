"""The HTML report of a run in a browser: complete, correct, readable and self-contained."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pipeline.journal.run_folder import RunFolder, runs_in
from pipeline.views.run_page import page_now, write_page
from tests.docs.conftest import Demo, demo
from tests.docs.pictures import chromium
from tests.journal.ledgers import Told
from tests.report.runs_told import HOSTILE, failed, trained
from tests.testkit.command import Command

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

__all__ = ["demo"]  # a fixture: the demo that the pages of the documentation are tried in

SECTIONS = ("training", "timeline", "events", "memory", "rejections", "details")
PHONE, DESK = 360, 1200  # pixels
ENOUGH = 4.5  # contrast of text: WCAG 2.1, AA

# The contrast of every piece of text with what lies behind it, least first; opacity is not heeded: text has none.
CONTRASTS = """() => {
  const rgb = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const linear = (c) => c <= 10 ? c / 3295 : ((c / 255 + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = rgb(getComputedStyle(node).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || ["SCRIPT", "TITLE", "title"].includes(node.tagName)) continue;
    const style = getComputedStyle(node), colour = node.closest("svg") ? style.fill : style.color;
    const [a, b] = [light(rgb(colour)), light(behind(node))].sort((x, y) => y - x);
    found.push([(a + 0.05) / (b + 0.05), node.className, walker.currentNode.data.slice(0, 40)]);
  }
  return found.sort((x, y) => x[0] - y[0]);
}"""


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    program = chromium()
    if program is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("no Chromium here: make browser-packages")
    from playwright.sync_api import sync_playwright

    with (
        sync_playwright() as playwright,
        closing(playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])) as browser,
    ):
        yield browser


class Opened:
    """A report in the browser, with its requests and its console messages; its details are unfolded."""

    def __init__(self, page: Page, file: Path, *, unfolded: bool) -> None:
        self.page, self.asked, self.complaints = page, list[str](), list[str]()
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.goto(file.as_uri())
        folded = page.locator("details:not([open]) > summary")
        while unfolded and folded.count():
            folded.first.click()

    def text(self, place: str) -> str:
        return self.page.locator(place).inner_text()

    def column(self, caption: str, name: str) -> list[str]:
        table = self.page.locator("table", has=self.page.locator("caption", has_text=re.compile(f"^{caption}$")))
        place = table.locator("th").all_inner_texts().index(name) + 1
        return [text.strip() for text in table.locator(f"tbody td:nth-child({place})").all_inner_texts()]

    def click(self, caption: str, name: str) -> str:
        """Click on a column's name; return how the table is sorted then."""
        table = self.page.locator("table", has=self.page.locator("caption", has_text=re.compile(f"^{caption}$")))
        head = table.locator("th", has_text=re.compile(f"^{re.escape(name)}$")).first
        head.locator("button").click()
        return head.get_attribute("aria-sort") or ""


Open = Callable[..., Opened]


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """Return a function that opens the report of a run."""
    contexts: list[Any] = []

    def opened(
        run: RunFolder, *, width: int = DESK, scheme: Any = "light", unfolded: bool = True, **more: Any
    ) -> Opened:
        file = tmp_path / f"page-{len(contexts)}.html"
        write_page(file, page_now(run)[0])
        contexts.append(browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme, **more))
        return Opened(contexts[-1].new_page(), file, unfolded=unfolded)

    yield opened
    for context in contexts:
        context.close()


@pytest.fixture
def real(demo: Demo) -> RunFolder:
    return runs_in(demo.pristine / "runs")[-1]


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Told:
    monkeypatch.chdir(tmp_path)
    return failed(tmp_path)


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Told:
    monkeypatch.chdir(tmp_path)
    return trained(tmp_path)


def test_a_finished_run_is_shown_whole_and_asks_the_network_for_nothing(real: RunFolder, show: Open) -> None:
    seen = show(real)
    assert [section.get_attribute("id") for section in seen.page.locator("main > section").all()] == list(SECTIONS)
    assert seen.text("h1").split() == [real.name, "done"]
    stages = ["scan", "embed", "graph", "train", "evaluate"]
    assert seen.column("stages", "stage") == stages
    assert seen.column("stages", "state") == ["done"] * 5
    assert seen.page.locator(".timeline svg.wide rect.run").count() == 5
    assert seen.page.locator(".timeline svg.wide path.fail.survived").count() == 1
    assert seen.column("memory of a task", "stage") == ["embed", "train", "evaluate"]
    assert "train.epochs" in seen.column("settings", "setting")
    assert seen.asked == [seen.page.url]
    assert seen.complaints == []


def test_the_first_screen_has_the_verdict_the_losses_and_the_monitored_metric(real: RunFolder, show: Open) -> None:
    seen = show(real, width=1280, unfolded=False)
    assert re.match(
        r"Done in .*: contact_auroc 0\.\d+ \(val\) / 0\.\d+ \(test\); .* survived 1 out-of-memory",
        seen.text(".verdict"),
    )
    plots = seen.page.locator("#training figure")
    assert plots.locator("figcaption b").all_inner_texts()[-1] == "validation: contact_auroc"
    bottoms = [box["y"] + box["height"] for plot in plots.all() if (box := plot.bounding_box())]
    assert len(bottoms) >= 2
    assert max(bottoms) < 800


def test_the_verb_writes_the_page_where_it_is_asked_to(real: RunFolder, pipeline: Command, tmp_path: Path) -> None:
    def report(*words: str) -> Any:
        return pipeline("report", str(real.path), "--html", *words)

    done = report(str(tmp_path / "own.html"))
    assert (done.code, done.err, str(tmp_path / "own.html") in done.out) == (0, "", True)
    assert (tmp_path / "own.html").read_text().startswith("<!DOCTYPE html>")
    printed = report("-")
    assert (printed.code, printed.err) == (0, "")
    assert (printed.out[:15], printed.out.rstrip()[-7:]) == ("<!DOCTYPE html>", "</html>")
    os.mkfifo(tmp_path / "pipe")  # as root, a page would take the place of /dev/stdout
    for words in (("-", "--json"), (".",), ("",), ("/",), (str(tmp_path / "pipe"),), (str(tmp_path / "no/own.html"),)):
        refused = report(*words)
        assert (refused.code, refused.out) == (2, ""), words
    assert f"next: mkdir -p {tmp_path / 'no'}" in refused.err
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o007, 0o660)])
def test_reports_are_readable_as_the_umask_says(
    failing: Told, pipeline: Command, tmp_path: Path, umask: int, mode: int
) -> None:
    before = os.umask(umask)
    try:
        assert pipeline("report", str(failing.folder.path), "--html", str(tmp_path / "own.html")).code == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "own.html").stat().st_mode) == mode


def test_a_click_sorts_by_number_and_another_reverses(failing: Told, training: Told, show: Open) -> None:
    seen = show(failing.folder)
    for turn in ("ascending", "descending"):  # unknown values come last either way
        assert seen.click("failed attempts", "peak") == turn
        assert seen.column("failed attempts", "peak") == ["20.0 GiB", "–", "–"]
    seen = show(training.folder)
    known = seen.column("epochs", "epoch")
    assert known == [str(number) for number in range(1, 31)]
    assert seen.click("epochs", "distance") == "ascending"  # 1/n, by value
    assert seen.column("epochs", "epoch") == known[::-1]
    assert seen.click("epochs", "peak memory") == "ascending"
    assert seen.column("epochs", "epoch")[-1] == "3"


def test_a_failed_run_says_what_failed_where_why_and_what_to_do(failing: Told, show: Open) -> None:
    seen, name = show(failing.folder), "failed attempts"
    assert seen.text("h1").split() == [failing.folder.name, "failed"]
    assert seen.text(".verdict").startswith("Failed in embed after")
    assert "10 of 40 items are not done" in seen.text(".verdict")
    assert "pipeline submit --again" in seen.text("header [role=alert]")
    assert str(failing.folder.logs) in seen.text("header [role=alert]")
    assert "the worker's own words" in seen.text("#events")
    assert seen.column(name, "task") == ["1", "2", "3"]
    assert seen.column(name, "cause") == ["host_oom", "gpu_oom", "failed"]
    assert seen.column(name, "task now") == ["done", "done", "not done"]
    assert seen.column(name, "log")[2] == str(failing.folder.logs / "7_3.err")
    assert seen.column("by reason", "items") == ["1"]
    assert seen.column("rejected items", "origin") == ["manifest.csv:3"]
    assert seen.page.locator(".timeline svg.wide path.fail.survived").count() > 0
    assert "survived 2 out-of-memory" in seen.text(".verdict")


def test_a_training_shows_estimated_and_measured_memory_and_survived_out_of_memory(training: Told, show: Open) -> None:
    seen = show(training.folder)
    assert seen.text("h1").split() == [training.folder.name, "running"]
    assert seen.column("epochs", "estimated memory")[:4] == ["10.0 GiB"] * 4
    assert seen.column("epochs", "peak memory")[:4] == ["9.0 GiB", "9.0 GiB", "11.0 GiB", "9.0 GiB"]
    assert seen.column("steps that ran out of memory and were repeated", "items by remedy") == ["5 by smaller"]
    assert f"pipeline replay {training.folder.name} --step 23" in seen.text("main")
    (validated,) = seen.page.locator("#training figure").first.locator("path.line.s1").all()
    assert (validated.get_attribute("d") or "").count("M") == 2  # broken where the loss was no number


def test_what_others_wrote_is_text_and_nothing_of_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, show: Open
) -> None:
    monkeypatch.chdir(tmp_path)
    seen = show(failed(tmp_path, HOSTILE).folder)
    assert seen.page.title() == f"{seen.text('h1 span:first-child')}: failed"
    assert seen.page.locator("img").count() == 0
    assert seen.page.locator("script").count() == 1
    assert seen.asked == [seen.page.url]
    assert HOSTILE in seen.text("#rejections")
    assert HOSTILE in seen.text("header [role=alert]")


def test_a_browser_lets_the_page_do_nothing_but_sort(failing: Told, show: Open) -> None:
    seen = show(failing.folder)
    refused = """async () => {
      const tag = document.createElement("script"); tag.textContent = "window.taken = 1"; document.body.append(tag);
      const asked = await fetch("http://127.0.0.1:9/").then(() => "asked", () => "refused");
      return [window.taken === undefined, asked];
    }"""
    assert seen.page.evaluate(refused) == [True, "refused"]
    assert all("Content Security Policy" in one or "Refused" in one for one in seen.complaints)
    assert seen.complaints


def test_all_text_stands_out_from_what_is_behind_it(failing: Told, training: Told, show: Open) -> None:
    media: Any
    for told, scheme, media in product((failing, training), ("light", "dark"), ("screen", "print")):
        page = show(told.folder, scheme=scheme).page
        page.emulate_media(media=media)
        worst = page.evaluate(CONTRASTS)
        assert len(worst) > 100
        assert worst[0][0] >= ENOUGH, (scheme, media, worst[:5])


def test_on_a_phone_nothing_sticks_out_and_words_are_large_enough(failing: Told, training: Told, show: Open) -> None:
    for told in (failing, training):
        seen = show(told.folder, width=PHONE, is_mobile=True, has_touch=True)
        assert seen.page.evaluate("document.documentElement.scrollWidth") == PHONE
        assert seen.page.locator(".timeline svg.narrow").is_visible()
        assert not seen.page.locator(".timeline svg.wide").is_visible()
        heights = "[...document.querySelectorAll('svg text')].map((one) => one.getBoundingClientRect().height)"
        shown = [height for height in seen.page.evaluate(heights) if height]
        assert min(shown) >= 9, "words of plots are too small to read"
