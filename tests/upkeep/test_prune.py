"""`pipeline runs prune`: which run folders go, which stay and why, and what is left where it is interrupted."""

from __future__ import annotations

import json
import os
import shutil
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pipeline.config.load import dump_resolved, read_config
from pipeline.journal import run_folder as folders
from pipeline.journal.ledger import Ledger
from pipeline.journal.run_folder import RunFolder, runs_in
from pipeline.records import EventKind
from pipeline.upkeep import prune_runs
from pipeline.upkeep.prune_runs import YOUNG_S, foresee_pruning, prune
from tests.testkit.command import Command
from tests.testkit.project import MakeProject

BEGUN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def made(runs: Path, number: int, *, state: str = "done", host: str = "elsewhere", table: str = "") -> RunFolder:
    """Return a run of some minutes after the others, ended unless its state is `running`."""
    run = folders.create_folder(runs, BEGUN + timedelta(minutes=number))
    run.stages.write_text('["scan"]')
    run.config.write_text(dump_resolved(read_config(runs.parent / "pipeline.yaml").config))
    copy = runs / ".code" / f"copy{number}"
    copy.mkdir(parents=True)
    run.code.write_text(str(copy))
    (run.claims / "000001").touch()
    ledger = Ledger(run, "supervisor-000001")
    ledger.emit(EventKind.RUN_STARTED, stages=["scan"], host=host, pid=1)
    if state != "running":
        ledger.emit(EventKind.RUN_ENDED, state=state, error="", exit_code=0)
    ledger.close()
    if table:
        run.table.write_text(table)
    return run


@pytest.fixture
def runs(make_project: MakeProject) -> Path:
    return make_project(1) / "runs"


def test_the_newest_stay_and_so_does_what_goes_on_or_is_read_by_a_training(runs: Path) -> None:
    names_old_table = made(runs, 0, table="aa")
    names_table = made(runs, 1, table="aa")
    going = made(runs, 2, state="running")
    ended = [made(runs, number, state=state) for number, state in ((3, "done"), (4, "failed"), (5, "stopped"))]
    newest = [made(runs, number) for number in (6, 7)]
    pruning = foresee_pruning(runs, keep=2)
    assert [old.folder for old in pruning.goes] == [names_old_table, *ended]
    assert sum(pruning.stays.values()) == 4
    list(prune(pruning))
    assert runs_in(runs) == [names_table, going, *newest]
    assert list(prune(foresee_pruning(runs, keep=2))) == []


def test_the_newest_run_that_lists_the_items_stays(runs: Path) -> None:
    lists, *others = (made(runs, number) for number in range(4))
    lists.inventory.write_text("id\n")
    assert [old.folder for old in foresee_pruning(runs, keep=1).goes] == others[:-1]


def test_code_that_no_run_names_goes_unless_it_is_young(runs: Path) -> None:
    made(runs, 0)
    made(runs, 1)
    young, *_ = sorted((runs / ".code").iterdir())
    long_ago = time.time() - 7 * 86_400
    old = runs / ".code" / "left_behind"
    for path in (old, runs / ".code" / "copy1"):
        path.mkdir(exist_ok=True)
        os.utime(path, (long_ago, long_ago))
    list(prune(foresee_pruning(runs, keep=1)))
    assert sorted(path.name for path in (runs / ".code").iterdir()) == [young.name, "copy1"]


def test_a_run_that_was_taken_up_since_it_was_shown_stays(runs: Path) -> None:
    old = made(runs, 0)
    made(runs, 1)
    pruning = foresee_pruning(runs, keep=1)
    assert [run.folder for run in pruning.goes] == [old]
    (old.claims / "000002").touch()
    ledger = Ledger(old, "supervisor-000002")
    ledger.emit(EventKind.RUN_STARTED, stages=["scan"], host="elsewhere", pid=1)
    ledger.close()
    assert list(prune(pruning)) == []
    assert old in runs_in(runs)


def test_what_an_interrupted_pruning_leaves_is_no_run_and_goes_next_time(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(runs, 0)
    newest = made(runs, 1)

    def interrupted(*_given: object, **_named: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prune_runs.shutil, "rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(prune(foresee_pruning(runs, keep=1)))
    assert runs_in(runs) == [newest]
    list(prune(foresee_pruning(runs, keep=1)))
    assert sorted(path.name for path in runs.iterdir()) == [".code", newest.name]


def test_a_run_whose_making_was_interrupted_goes_once_it_is_a_day_old(runs: Path) -> None:
    newest = made(runs, 1)
    begun = [folders.create_folder(runs, datetime.now(UTC), private=True).path for _ in range(2)]
    os.utime(begun[0], (time.time() - YOUNG_S - 60,) * 2)
    assert foresee_pruning(runs, keep=1).left == (begun[0],)
    list(prune(foresee_pruning(runs, keep=1)))
    assert not begun[0].exists()
    assert begun[1].exists()
    assert newest in runs_in(runs)


def test_the_verb_shows_first_and_does_it_when_told(pipeline: Command, runs: Path) -> None:
    for number in range(5):
        made(runs, number)
    shown = pipeline("runs", "prune", "--keep", "2")
    assert shown.code == 0, shown.err
    assert "pipeline runs prune --keep 2 --yes" in shown.out
    document = json.loads(pipeline("runs", "prune", "--keep", "2", "--json").out)
    assert [old["run"] for old in document["goes"]] == [run.name for run in runs_in(runs)[:3]]
    assert len(runs_in(runs)) == 5
    done = pipeline("runs", "prune", "--keep", "2", "--yes")
    assert done.code == 0, done.err
    assert len(runs_in(runs)) == 2
    shutil.rmtree(runs)
    assert pipeline("runs", "prune").code == 0
