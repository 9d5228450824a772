"""A run folder says of which format it is; one of a later version is refused, and nothing is decided over its head."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pipeline.config.load import read_config
from pipeline.errors import ConfigError, SubmissionRefused
from pipeline.journal import run_folder as folders
from pipeline.journal.active_runs import going_on, hidden
from pipeline.journal.run_folder import FORMAT, RunFolder, by_path, find_run, runs_in
from pipeline.runs.engine.lifecycle import new_run, refuse_double
from tests.testkit.command import Command
from tests.testkit.project import MakeProject

NEWER = str(FORMAT + 1)
VERBS = (["status"], ["logs"], ["cancel"], ["resume"], ["report"], ["replay", "--step", "1"])


def a_run(runs: Path, told: str | None = None, *, day: int = 1) -> RunFolder:
    """Make the folder of a run that has not begun."""
    run = folders.create_folder(runs, "scan", datetime(2026, 1, day, tzinfo=UTC))
    run.stages.write_text('["scan"]')
    if told is not None:
        run.format.write_text(told)
    return run


def test_a_new_run_says_of_which_format_it_is(tmp_path: Path) -> None:
    assert a_run(tmp_path).format.read_text() == f"{FORMAT}\n"


@pytest.mark.parametrize("told", ["1\n", "", None])
def test_a_run_of_the_first_format_is_read_whether_it_says_so_or_not(tmp_path: Path, told: str | None) -> None:
    run = a_run(tmp_path, told)
    if told is None:
        run.format.unlink()
    assert runs_in(tmp_path) == [run] == [find_run(tmp_path, None)]
    assert by_path(str(run.path)) == run
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("told", [NEWER, "1.5", "two"])
def test_a_run_of_a_newer_format_is_refused_by_name_by_folder_and_as_the_newest(tmp_path: Path, told: str) -> None:
    old, new = a_run(tmp_path), a_run(tmp_path, told, day=2)
    for ask in (lambda: find_run(tmp_path, None), lambda: find_run(tmp_path, new.name), lambda: by_path(str(new.path))):
        with pytest.raises(ConfigError, match=f"newer format; this version of pipeline reads up to format {FORMAT}"):
            ask()
    assert find_run(tmp_path, old.name) == old
    assert runs_in(tmp_path) == [old]


def test_a_format_that_is_no_text_is_none_that_is_known(tmp_path: Path) -> None:
    """Before, one such run kept every verb from all others."""
    old, torn = a_run(tmp_path), a_run(tmp_path, day=2)
    torn.format.write_bytes(b"\xff\xfe1")
    assert runs_in(tmp_path) == [old]
    with pytest.raises(ConfigError, match="newer format"):
        find_run(tmp_path, torn.name)


def test_whether_a_run_of_a_newer_format_goes_on_cannot_be_told(tmp_path: Path) -> None:
    new = a_run(tmp_path / "runs", NEWER)
    assert hidden(tmp_path / "runs") == [new.name]
    assert going_on(tmp_path / "runs", tmp_path / "cache") == []


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb[0])
def test_every_verb_refuses_a_run_of_a_newer_format(
    pipeline: Command, make_project: MakeProject, verb: list[str]
) -> None:
    new = a_run(make_project(1) / "runs", NEWER)
    done = pipeline(verb[0], new.name, *verb[1:])
    assert done.code == 2
    assert f"reads up to format {FORMAT}" in done.err
    assert "next: use the version of pipeline that made it, or a newer one" in done.err


def test_work_goes_on_beside_a_run_of_a_newer_format_and_nothing_is_emptied_that_it_may_need(
    pipeline: Command, make_project: MakeProject
) -> None:
    new = a_run(make_project(2) / "runs", NEWER, day=2)
    assert pipeline("submit", "--stage", "scan", "--follow").code == 0
    refused = pipeline("cache", "clean", "--all", "--yes")
    assert refused.code == 2
    assert "cannot be told" in refused.err
    new.stages.unlink()  # no run
    new.format.unlink()
    assert pipeline("cache", "clean", "--all", "--yes").code == 0


def test_the_work_of_a_run_is_known_though_a_setting_was_added_since(make_project: MakeProject) -> None:
    """Before, who upgraded while a run went on could begin the same work beside it."""
    config = read_config(make_project(1) / "pipeline.yaml").config
    run = new_run(config, ["scan"])
    frozen = json.loads(run.config.read_text())
    del frozen["data"]["labels"]
    run.config.write_text(json.dumps(frozen))
    with pytest.raises(SubmissionRefused, match="working on this data set"):
        refuse_double(config, ["scan"])
