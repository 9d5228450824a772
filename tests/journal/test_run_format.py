"""A run folder says of which format it is; one of a later version is refused, and nothing is decided over its head."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pipeline.config.load import read_config
from pipeline.engine.lifecycle import new_run, refuse_double
from pipeline.errors import ConfigError, SubmissionRefused
from pipeline.journal import run_folder as folders
from pipeline.journal.run_folder import FORMAT, RunFolder, by_path, find_run, hidden, runs_in
from pipeline.journal.run_view import active_runs
from tests.testkit.command import Command
from tests.testkit.project import make_project

NEWER = str(FORMAT + 1)


def a_run(runs: Path, told: str | None = None, *, day: int = 1) -> RunFolder:
    """Make the folder of a run that has not begun."""
    run = folders.create_folder(runs, datetime(2026, 1, day, tzinfo=UTC))
    run.stages.write_text('["scan"]')
    if told is not None:
        run.format.write_text(told)
    return run


@pytest.mark.parametrize("told", [NEWER.encode(), b"1.5", b"two", b"\xff\xfe1"])
def test_a_run_of_a_newer_format_is_refused_by_name_by_folder_and_as_the_newest(tmp_path: Path, told: bytes) -> None:
    old, new = a_run(tmp_path), a_run(tmp_path, day=2)
    assert (runs_in(tmp_path), hidden(tmp_path)) == ([old, new], [])
    new.format.write_bytes(told)
    for ask in (lambda: find_run(tmp_path, None), lambda: find_run(tmp_path, new.name), lambda: by_path(str(new.path))):
        with pytest.raises(ConfigError, match="newer format"):
            ask()
    assert find_run(tmp_path, old.name) == by_path(str(old.path)) == old
    assert runs_in(tmp_path) == [old]
    assert hidden(tmp_path) == [new.name]  # nobody can say whether it goes on
    assert active_runs(tmp_path, tmp_path / "cache") == [old]


def test_every_verb_refuses_a_run_of_a_newer_format(pipeline: Command, tmp_path: Path) -> None:
    new = a_run(make_project(tmp_path, 1).folder / "runs", NEWER)
    for verb in ("status", "logs", "cancel", "resume", "report", "replay"):
        done = pipeline(verb, new.name, *(["--step", "1"] if verb == "replay" else []))
        assert (done.code, "newer format" in done.err) == (2, True), verb


def test_every_verb_says_that_the_configuration_of_a_run_is_gone(pipeline: Command, tmp_path: Path) -> None:
    run = a_run(make_project(tmp_path, 1).folder / "runs")  # which has no config.json
    run.plan("train").write_text("[]")  # for `compare`
    page = ("report", "--html", "page.html")
    for verb, *words in (("cancel",), ("resume",), ("report",), page, ("replay", "--step", "1"), ("compare",)):
        done = pipeline(verb, run.name, *words)
        assert (done.code, str(run.config) in done.err, "next: " in done.err) == (2, True, True), (verb, done.err)
    run.inventory.write_bytes(b"id,split\nc\xff,train\n")  # nor is this UTF-8
    for verb in ("status", "logs", "items"):
        assert pipeline(verb, run.name).code == 0, verb


def test_work_goes_on_beside_a_run_of_a_newer_format_and_nothing_is_emptied_that_it_may_need(
    pipeline: Command, tmp_path: Path
) -> None:
    new = a_run(make_project(tmp_path, 2).folder / "runs", NEWER, day=2)
    assert pipeline("submit", "--stage", "scan", "--follow").code == 0
    refused = pipeline("cache", "clean", "--all", "--yes")
    assert refused.code == 2
    assert "is unknown" in refused.err
    new.stages.unlink()  # no run
    new.format.unlink()
    assert pipeline("cache", "clean", "--all", "--yes").code == 0


def test_the_work_of_a_run_is_known_though_a_setting_was_added_since(tmp_path: Path) -> None:
    config = read_config(make_project(tmp_path, 1).folder / "pipeline.yaml").config
    run = new_run(config, ["scan"])
    frozen = json.loads(run.config.read_text())
    del frozen["data"]["labels"]
    run.config.write_text(json.dumps(frozen))
    with pytest.raises(SubmissionRefused, match="already processes this data set"):
        refuse_double(config, ["scan"])
