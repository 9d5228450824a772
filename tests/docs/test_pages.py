"""What the pages under docs/ name is there: commands, settings, entries; a failed stage leads to its entry."""

from __future__ import annotations

import importlib
import re
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest

from pipeline.cluster.verdict import Cause
from pipeline.config import shipped
from pipeline.config.schema import FIELDS, LEAVES
from pipeline.runs import supervisor
from pipeline.runs.attempts import Ask, Attempt, Task
from tests.docs.blocks import ENVIRONMENT, Page

ROOT = Path(__file__).resolve().parents[2]
TASKS, READERS = ROOT / "pipeline/tasks", ROOT / "pipeline/readers"
PAGES = sorted((ROOT / "docs").glob("*.md"))
WELL = {Cause.DONE, Cause.ACTIVE}  # nothing went wrong
CODE = re.compile(r"`([^`\n]+)`")
SECTIONS = ("data", "structures", "embed", "graph", "train", "cache", "cluster")
SETTING = re.compile(rf"(?:{'|'.join(SECTIONS)})(?:\.[a-z_]+)+")
HELP = {path.stem: path.read_text() for path in (ROOT / "tests/cli/golden").iterdir()}


def codes(page: Path) -> list[str]:
    """Return what stands between backticks, and the lines of blocks."""
    text = page.read_text()
    blocks = [
        line.removeprefix("$ ")
        for body in re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
        for line in body.splitlines()
    ]
    return [*CODE.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL)), *blocks]


RUN = [pytest.param(page, command, id=f"{page.name}: {command}") for page in PAGES for command in Page(page).commands()]


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Path]:
    """Write the files of each page into a folder of its own."""
    found = {}
    for page in PAGES:
        found[page] = tmp_path_factory.mktemp(page.stem)
        Page(page).write_files(found[page])
    return found


@pytest.mark.parametrize(("page", "command"), RUN)
def test_every_command_that_is_marked_as_run_works(projects: dict[Path, Path], page: Path, command: str) -> None:
    done = subprocess.run(
        command, cwd=projects[page], env=ENVIRONMENT, capture_output=True, text=True, check=False, shell=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_console_block_says_whether_it_is_run(page: Path) -> None:
    assert Page(page).unmarked() == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_setting_that_a_page_names_exists(page: Path) -> None:
    known = {".".join(key) for key in (*FIELDS, *LEAVES)}
    named = {match[0] for code in codes(page) for match in SETTING.finditer(code)}
    files = {name for name in named if name.endswith(".py")}
    assert sorted(named - known - files - options(TASKS, "train") - options(READERS, "data")) == []


def options(folder: Path, section: str) -> set[str]:
    """Return the options of our own tasks or readers as settings."""
    found = set()
    for path in folder.glob("*.py"):
        module = importlib.import_module(f"pipeline.{folder.name}.{path.stem}")
        own = [one for one in vars(module).values() if getattr(one, "__module__", "") == module.__name__]
        for one in own:
            if callable(getattr(one, "collate", None)) or callable(getattr(one, "entries", None)):
                found |= {f"{section}.options.{field.name}" for field in fields(one)}
    return found


def test_our_tasks_and_readers_have_options_to_compare_with() -> None:
    assert {"train.options.pairs_at_once", "train.options.hidden_irreps", "train.options.render_reach"} <= options(
        TASKS, "train"
    )
    assert "data.options.max_peaks" in options(READERS, "data")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_every_link_within_the_project_leads_somewhere(page: Path) -> None:
    lost = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        name, _, anchor = link.partition("#")
        target = (page.parent / name) if name else page
        if "://" not in link and not (target.exists() and (not anchor or anchor in anchors(target))):
            lost.append(link)
    assert lost == []


def anchors(page: Path) -> set[str]:
    """Return where links into a page may lead: its own anchors, and its headings as GitHub names them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    named = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return named | set(re.findall(r'<a id="([^"]+)">', text))


def test_a_link_is_looked_up_by_anchor_and_by_heading(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text('# One: `two`, 3\n<a id="own"></a>\n```\n# no heading\n```\n')
    assert anchors(tmp_path / "page.md") == {"one-two-3", "own"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_that_a_page_names_exists_with_its_options(page: Path) -> None:
    for code in codes(page):
        if code.startswith("pipeline "):
            words = code.split("   ")[0].split("#")[0].split()[1:]
            verbs = ("-".join(["pipeline", *words[:count]]) for count in (2, 1, 0))
            text = next(HELP[verb] for verb in verbs if verb in HELP)
            for option in (word.split("=")[0] for word in words if word.startswith("-")):
                assert option in text, f"{page.name}: {code}"


def test_a_failed_stage_names_the_page_that_is_there_and_else_the_one_of_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = Attempt(0, 1, Ask(1, 60), Cause.CRASHED)
    task = Task(0, ended=[attempt])
    page = ROOT / supervisor.TROUBLESHOOTING
    assert supervisor._describe([task])[1] == f"    more: {page}#crashed"
    monkeypatch.setattr(shipped, "CHECKOUT", tmp_path)  # as beside the frozen code of a run
    assert supervisor._describe([task])[1] == "    more: docs/troubleshooting.md#crashed"


def test_every_ending_of_a_task_has_an_entry_to_which_a_failed_stage_leads() -> None:
    text = (ROOT / supervisor.TROUBLESHOOTING).read_text()
    entries = set(re.findall(r'<a id="(\w+)">', text))
    assert {cause.value for cause in Cause if cause not in WELL} <= entries
    assert set(re.findall(r"\(#(\w+)\)", text)) <= entries, "links within the page"
