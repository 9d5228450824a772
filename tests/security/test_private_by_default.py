"""What a run writes is its owner's alone, whatever the umask: a folder that nobody else may enter holds all of it.

A cache is shared with a group on purpose, and only read by it: its files are `r--r-----` and what the umask adds.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.config.load import read_config
from pipeline.engine.lifecycle import new_run
from pipeline.errors import JobFailed
from pipeline.project.run_code import COPIES, freeze_files
from tests.conftest import NOBODY
from tests.testkit.command import Command

CONFIG = "data: {source: glob, path: data}\ncluster: {runs: runs}\n"
OTHERS = stat.S_IRWXG | stat.S_IRWXO
IS_ROOT = os.geteuid() == 0


@pytest.fixture
def open_place() -> Iterator[Path]:
    """Return a folder that everybody may enter, while files are made as openly as can be."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    before = os.umask(0)
    yield folder
    os.umask(before)
    shutil.rmtree(folder)


@pytest.fixture
def project(open_place: Path, pipeline: Command, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a project there, and change into it."""
    from pipeline.structures.synthetic import complex_pdb  # late: it takes a while

    (open_place / "data").mkdir()
    (open_place / "data/a.pdb").write_bytes(complex_pdb(0, 40, 41))
    (open_place / "pipeline.yaml").write_text(CONFIG)
    monkeypatch.chdir(open_place)
    return open_place


def is_closed(path: Path, top: Path) -> bool:
    """Say whether the file, or a folder between it and the top, is the owner's alone."""
    return any(not one.stat().st_mode & OTHERS for one in (path, *path.parents) if top in one.parents)


def test_all_files_of_a_run_are_its_owners_alone_under_an_open_umask(pipeline: Command, project: Path) -> None:
    assert pipeline("submit", "--stage", "scan", "--executor", "local", "--follow").code == 0
    (run,) = (project / "runs").glob("2*")
    files = [path for path in run.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"config.json", "stages.json", "items.jsonl", "code.txt", "again.txt"} <= names
    assert {path.parent.name for path in files} >= {"events", "logs"}
    code = list(Path((run / "code.txt").read_text()).rglob("*.py"))
    assert code
    assert [path for path in (*files, *code) if not is_closed(path, project)] == []
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in (run, run / "events", run / "logs")} == {0o700}
    assert not (project / "runs").stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if IS_ROOT:
        assert opened_by_nobody([*files, *code]) == []


def opened_by_nobody(paths: list[Path]) -> list[Path]:
    """Return the files that another user can open."""
    opened = []
    os.seteuid(NOBODY)
    try:
        for path in paths:
            try:
                path.open("rb").close()
            except PermissionError:
                continue
            opened.append(path)
    finally:
        os.seteuid(0)
    return opened


def test_the_cache_is_read_by_the_group_and_changed_by_nobody(pipeline: Command, project: Path) -> None:
    os.umask(0o027)
    assert pipeline("submit", "--stage", "scan", "--executor", "local", "--follow").code == 0
    shards = list((project / "cache").glob("*/shards/*.safetensors"))
    assert shards
    assert {stat.S_IMODE(path.stat().st_mode) for path in shards} == {0o440}
    folders = [path for path in (project / "cache").rglob("*") if path.is_dir()]
    assert not [path for path in folders if not path.stat().st_mode & stat.S_IXGRP]


def test_a_group_that_wants_to_see_its_runs_can_say_so(project: Path) -> None:
    os.umask(0o027)
    config = read_config(project / "pipeline.yaml", ["cluster.private=false"]).config
    run = new_run(config, ["scan"])
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o750
    assert stat.S_IMODE(run.events.stat().st_mode) == 0o750


@pytest.mark.skipif(not IS_ROOT, reason="only root can make a folder that belongs to somebody else")
def test_code_that_somebody_else_has_put_there_is_not_what_a_run_runs(project: Path) -> None:
    """The name of a copy is a digest that everybody can compute: before, a copy that was there was taken as it was."""
    (source := project / "own.py").write_text("good = True\n")
    mine = freeze_files([("own.py", source)], project / "runs")
    assert (mine / "own.py").read_text() == "good = True\n"
    theirs = project / "others" / COPIES / mine.name
    theirs.mkdir(parents=True)
    (theirs / "own.py").write_text("import os; os.system('touch made')\n")
    os.chown(theirs.parent, NOBODY, NOBODY)
    copy = freeze_files([("own.py", source)], project / "others")
    assert copy.parent.name == f"{COPIES}-0"
    assert (copy / "own.py").read_text() == "good = True\n"
    os.chown(copy.parent, NOBODY, NOBODY)
    with pytest.raises(JobFailed, match="belongs to another user"):
        freeze_files([("own.py", source)], project / "others")


def test_a_folder_of_code_that_is_a_link_is_not_followed(project: Path) -> None:
    (source := project / "own.py").write_text("good = True\n")
    (project / "elsewhere").mkdir()
    (project / "runs").mkdir()
    (project / "runs" / COPIES).symlink_to(project / "elsewhere")
    assert freeze_files([("own.py", source)], project / "runs").parent.name == f"{COPIES}-{os.geteuid()}"
    assert not list((project / "elsewhere").iterdir())


def test_who_has_another_number_on_a_server_is_still_the_owner_of_their_code(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server may take root for nobody, and a mount show all files as one user's: what we make there is ours."""
    (source := project / "own.py").write_text("good = True\n")
    monkeypatch.setattr("pipeline.project.run_code.os.geteuid", lambda: NOBODY + 1)
    copies = [freeze_files([("own.py", source)], project / "runs") for _ in range(2)]
    assert [copy.parent for copy in copies] == [project / "runs" / COPIES] * 2
    assert sorted(path.name for path in (project / "runs").iterdir()) == [COPIES]


def test_a_folder_of_code_that_we_may_not_close_is_not_ours(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a mount shows all users as one, only the server knows whose a folder is."""
    (source := project / "own.py").write_text("good = True\n")
    (project / "runs" / COPIES).mkdir(parents=True)
    change = Path.chmod

    def refused(path: Path, mode: int) -> None:
        if path.name == COPIES:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        change(path, mode)

    monkeypatch.setattr(Path, "chmod", refused)
    assert freeze_files([("own.py", source)], project / "runs").parent.name == f"{COPIES}-{os.geteuid()}"
