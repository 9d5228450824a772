"""Typing the README and the pages under docs/ gives what they show, and everything that they name exists.

How to write a page: the comment in the line above a block says what the tests do with it. A block of console, bash,
yaml or python without one is an error. Blocks run in their order, in a folder of the page's own.

<!-- starts from: demo -->        anywhere on the page: the folder starts as a copy of a finished demo (pristine);
                                  structures: with three synthetic complexes in structures/;
                                  docking: with synthetic pairs in data/, two of their files, and weights as
                                  DiffDock-PP publishes them in published/; without this comment it is empty
<!-- run -->                      console: each line is `$ command`, optionally `  # why` after two blanks; it must end
                                  with exit code 0. python: run as a script, in the page's folder
<!-- slow -->                     the same, in `make test-all` only
<!-- fails: 2 -->                 the same as run, but each command must end with this exit code
<!-- cluster -->                  the same on a real Slurm cluster, by tests/slurm/test_pages.py. The page then starts
                                  from structures, its run blocks are typed too, and each submitted run is waited for;
                                  cluster: slow in `make test-all` only
<!-- output -->                   what the last command printed, whole lines, except times, sizes in bytes, folders and
                                  digests (shown.py); a line … leaves lines out
<!-- file: NAME -->               the block is written to this file
<!-- settings -->                 yaml: a part of a configuration, which is loaded and checked, and not kept
<!-- not run: WHY -->             nothing

A link to `tests/FILE.py "test_NAME"` names the test that proves a promise: that test must exist.
Blocks of `text` and diagrams need no comment. Every `pipeline …` between backticks must be a command with its options,
every `section.setting` must exist, and every link and #anchor (a heading or `<a id>`) must have a target.
Try one page: .venv/bin/python -m pytest -q tests/docs/test_pages.py -k cache.md
"""

from __future__ import annotations

import importlib
import re
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import typer

from pipeline import files
from pipeline.cli.main import app
from pipeline.cluster.verdict import Cause
from pipeline.config.schema import FIELDS, LEAVES, schema_key
from pipeline.engine import supervisor
from pipeline.journal.attempts import Ask, Attempt, TaskRecord
from pipeline.journal.run_status import StageStatus
from pipeline.records import NOT_FINITE
from pipeline.structures.synthetic import complex_pdb
from pipeline.tasks.complex_docking import ComplexDocking
from pipeline.tasks.docking.pose_confidence import PoseConfidence
from tests.docs.blocks import Page
from tests.docs.reader import Reader
from tests.docs.reference import walk
from tests.tasks.originals import as_original
from tests.testkit.project import settle

ROOT = Path(__file__).resolve().parents[2]
TASKS, READERS = ROOT / "pipeline/tasks", ROOT / "pipeline/readers"
ALL = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]  # that people read to use it
MAPS = [*(ROOT / f"{one}.md" for one in ("ARCHITECTURE", "CONTRIBUTING", "CHANGELOG")), ROOT / "benchmarks/README.md"]
WELL = {Cause.DONE, Cause.ACTIVE}  # nothing went wrong
CODE = re.compile(r"`([^`\n]+)`")
PROOF = re.compile(r'\]\((?:\.\./)*(tests/[\w/]+\.py) "(\w+)"\)')
SECTIONS = ("data", "structures", "embed", "graph", "train", "cache", "cluster")
SETTING = re.compile(rf"(?:{'|'.join(SECTIONS)})(?:\.[a-z_]+)+")
OPTIONS = {
    verb: {option for one in command.params for option in (*one.opts, *one.secondary_opts)} | {"--help", "-h"}
    for verb, command in walk("pipeline", typer.main.get_command(app))
}


def name(page: Path) -> str:
    """Return what a page is called in the name of a test."""
    return str(page.relative_to(ROOT))


def codes(page: Path) -> list[str]:
    """Return what stands between backticks, and the lines of blocks that are not to fail."""
    told = [block for block in Page(page).blocks if block.what not in ("fails", "output")]
    typed = [line.removeprefix("$ ") for block in told for line in block.body.splitlines()]
    lines = [part for line in typed for part in line.split(" && ")]
    return [*CODE.findall(Page(page).prose), *lines]


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that makes the folder in which a page begins."""

    def begin(start: str) -> Path:
        if start == "demo":
            shutil.copytree(request.getfixturevalue("demo").pristine, tmp_path / "project")
        elif start == "structures":
            write_structures(tmp_path / "project")
        elif start == "docking":
            write_docking(tmp_path / "project")
        else:
            assert start == "nothing", f"no page starts from {start!r}"
            (tmp_path / "project").mkdir()
        return tmp_path / "project"

    return begin


def write_structures(folder: Path) -> None:
    """Write three made complexes below structures/."""
    (folder / "structures").mkdir(parents=True)
    for seed in range(3):
        (folder / "structures" / f"{seed}.pdb").write_bytes(complex_pdb(seed, 40, 40))


def write_docking(folder: Path) -> None:
    """Write six made pairs with their splits, a pair to dock, and random weights under their published names."""
    structures = folder / "data" / "structures"
    structures.mkdir(parents=True)
    rows = ["path,split"]
    for number, split in enumerate(("train", "train", "train", "train", "val", "test")):
        lines = complex_pdb(number, 20 + number, 20 + number).decode().splitlines(keepends=True)
        for chain, letter, copy in (("A", "r", "receptor"), ("B", "l", "ligand")):
            text = "".join([line for line in lines if line.startswith("ATOM") and line[21] == chain])
            (structures / f"c{number}_{letter}_b.pdb").write_text(f"{text}END\n")
            (folder / f"{copy}.pdb").write_text(f"{text}END\n")
        rows.append(f"c{number},{split}")
    (folder / "data" / "splits.csv").write_text("\n".join([*rows, ""]))
    (folder / "published").mkdir()
    for name, task in (("score", ComplexDocking), ("confidence", PoseConfidence)):
        state = as_original(task(as_published=True).model())
        torch.save({"model": state, "optimizer": {}}, folder / "published" / f"{name}.pth")
    settle(folder)


FOLLOWED = [page for page in ALL if Page(page).has("run", "slow", "fails", "settings")]
GATE = {"first_project.md", "use_model.md", "cache.md"}  # the first hour, without its slow blocks
QUICK = [pytest.param(page, ("run",), id=f"{name(page)}, quick blocks") for page in FOLLOWED if page.name in GATE]
WHOLE = [
    pytest.param(page, ("run", "slow"), id=name(page), marks=(pytest.mark.nightly, pytest.mark.timeout(1200)))
    for page in FOLLOWED
    if page.name not in GATE or Page(page).has("slow")
]


@pytest.mark.parametrize(("page", "typing"), QUICK + WHOLE)
def test_following_a_page_gives_what_it_shows(
    folder: Callable[[str], Path], page: Path, typing: tuple[str, ...]
) -> None:
    Reader(folder(Page(page).start), typing).follow(Page(page))


def test_every_block_says_what_becomes_of_it() -> None:
    assert [problem for page in ALL for problem in Page(page).problems()] == []


def test_every_setting_that_a_page_names_exists() -> None:
    known = {".".join(key) for key in (*FIELDS, *LEAVES)}
    known |= {name for section in ("train", "train.evaluate", "train.predict") for name in options(TASKS, section)}
    known |= options(READERS, "data") | options(TASKS / "rna", "data")
    assert {"train.options.multiplicity", "train.options.render_reach", "data.options.max_peaks"} <= known
    for page in ALL:
        named = {match[0] for code in codes(page) for match in SETTING.finditer(code)}
        named = {".".join(schema_key(tuple(one.split(".")))) for one in named}
        files = {one for one in named if one.endswith((".py", ".json", ".tsv"))}
        assert sorted(named - known - files) == [], name(page)


def options(folder: Path, section: str) -> set[str]:
    """Return the options of our own tasks or readers as settings."""
    found = set()
    for path in folder.rglob("*.py"):
        module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        own = [one for one in vars(module).values() if getattr(one, "__module__", "") == module.__name__]
        for one in own:
            if callable(getattr(one, "collate", None)) or callable(getattr(one, "entries", None)):
                found |= {f"{section}.options.{field.name}" for field in fields(one)}
    return found


def test_every_link_within_the_project_leads_somewhere_and_every_proof_is_there() -> None:
    lost, links, proofs = [], 0, 0
    for page in (*ALL, *MAPS):
        for link in re.findall(r"\]\(([^)\s]+)\)", CODE.sub("", Page(page).prose)):
            path, _, anchor = link.partition("#")
            target, links = (page.parent / path) if path else page, links + 1
            if "://" not in link and not (target.exists() and (not anchor or anchor in anchors(target))):
                lost.append((name(page), link))
        for path, test in PROOF.findall(page.read_text()):
            proofs += 1
            if f"def {test}(" not in (ROOT / path).read_text():
                lost.append((name(page), test))
    assert lost == []
    assert (links > 100, proofs > 20) == (True, True)


def anchors(page: Path) -> set[str]:
    """Return where links into a page may lead: its anchors and headings as GitHub names them; of code, its names."""
    if page.suffix == ".py":
        return set(re.findall(r"^(?:def|class) (\w+)", page.read_text(), re.MULTILINE))
    if page.suffix != ".md":
        return set()
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    named = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return named | set(re.findall(r'<a id="([^"]+)">', text))


def test_every_command_that_a_page_names_exists_with_its_options() -> None:
    named = [(page, code) for page in ALL for code in codes(page) if code.startswith("pipeline ")]
    assert len(named) > 300
    for page, code in named:
        words = code.split("   ")[0].split("#")[0].split(" -- ")[0].split()[1:]  # after it: of another program
        verbs = (" ".join(["pipeline", *words[:count]]) for count in (2, 1, 0))
        known = next(OPTIONS[verb] for verb in verbs if verb in OPTIONS)
        asked = {word.split("=")[0] for word in words if word.startswith("-")}
        assert asked <= known, f"{name(page)}: {code}"


def test_a_failed_stage_names_the_page_that_is_there_and_else_the_one_of_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = Attempt(0, 1, Ask(1, 60), Cause.CRASHED)
    task = TaskRecord(0, ended=[attempt])
    page = ROOT / supervisor.TROUBLESHOOTING
    assert supervisor._describe(StageStatus("scan"), [task])[1] == f"    more: {page}#crashed"
    refused = Attempt(0, 1, Ask(1, 60), Cause.REFUSED, reason=f"the loss of step 7 {NOT_FINITE} (of item3)")
    (_, more) = supervisor._describe(StageStatus("train"), [TaskRecord(0, ended=[refused])])
    assert more == f"    more: {page}#nan"
    monkeypatch.setattr(files, "CHECKOUT", tmp_path)  # as beside the frozen code of a run
    (_, more) = supervisor._describe(StageStatus("scan"), [task])
    assert more == f"    more: {supervisor.TROUBLESHOOTING}#crashed"


def test_every_ending_of_a_task_has_an_entry_to_which_a_failed_stage_leads() -> None:
    text = (ROOT / supervisor.TROUBLESHOOTING).read_text()
    entries = set(re.findall(r'<a id="(\w+)">', text))
    assert {cause.value for cause in Cause if cause not in WELL} <= entries
    assert set(re.findall(r"\(#(\w+)\)", text)) <= entries, "links within the page"
