"""The hours that a project's runs have taken together, counted from their ledgers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from pipeline.cluster.verdict import Cause
from pipeline.config.schema_parts import Budget as BudgetSetting
from pipeline.journal.attempts import Ask, Attempt
from pipeline.journal.budget import ENDS_WITHIN_S, PRUNED, Account, Budget, Hours, Spending, hours_of, spending_of_run
from pipeline.journal.run_status import StageJob
from pipeline.records import EventKind
from pipeline.upkeep.prune_runs import foresee_pruning, prune
from tests.journal.ledgers import Told

ASK = Ask(1 << 30, 3600)
LIMIT_H = (3600 + ENDS_WITHIN_S) / 3600
CORES = Budget(10.0, "core")


def done(task: int, elapsed_s: float, job: str = "7", **more: Any) -> Attempt:
    return Attempt(task, 1, ASK, Cause.DONE, job=job, elapsed_s=elapsed_s, ended_at=1.0, **more)


@contextmanager
def told(runs: Path, tasks: int = 2, **job: Any) -> Iterator[Told]:
    """Give a run with one job of all its tasks."""
    run = Told(runs, tasks=tasks)
    run.job("7", list(range(tasks)), ask=ASK, **job)
    yield run
    run.supervisor.close()


def test_what_ended_counts_as_it_ran_and_what_is_in_flight_as_it_may_run(tmp_path: Path) -> None:
    with told(tmp_path, cpus=4, gpus=2) as run:
        run.ended(done(0, 1800.0))
        assert hours_of(run.status, "core") == Hours(2.0, 4 * LIMIT_H)
        assert hours_of(run.status, "gpu") == Hours(1.0, 2 * LIMIT_H)


def test_a_task_of_several_nodes_and_ranks_takes_all_their_cores_and_gpus_also_before_it_began_again(
    tmp_path: Path,
) -> None:
    with told(tmp_path, tasks=1, cpus=4, gpus=2, nodes=3, ranks=2) as run:
        run.ended(done(0, 3000.0, earlier_s=600.0))
        assert (hours_of(run.status, "core").used, hours_of(run.status, "gpu").used) == (24.0, 6.0)


def test_an_attempt_whose_end_nobody_knows_counts_from_its_first_word(tmp_path: Path) -> None:
    with told(tmp_path, tasks=1) as run:
        run.worker(0, EventKind.TASK_STARTED)
        began = run.status.stages["scan"].work[0].word.began
        run.ended(Attempt(0, 1, ASK, Cause.LOST, job="7", ended_at=began + 900.0))
        assert hours_of(run.status, "core").used == pytest.approx(0.25)


def test_an_announced_job_holds_its_hours_until_it_is_refused(tmp_path: Path) -> None:
    run = Told(tmp_path, tasks=3)
    job = StageJob("tag", "scan", "0-2", 1, ASK)
    run.supervisor.emit(EventKind.JOB_SUBMITTING, **job.to_json())
    assert hours_of(run.status, "core") == Hours(0.0, 3 * LIMIT_H)
    run.supervisor.emit(EventKind.JOB_REFUSED, **job.to_json())
    assert hours_of(run.status, "core") == Hours()


def test_nothing_of_a_run_that_was_cancelled_is_in_flight_and_what_had_begun_counts(tmp_path: Path) -> None:
    with told(tmp_path, tasks=2) as run:
        run.worker(0, EventKind.TASK_STARTED)
        run.over("stopped", 130)
        hours = hours_of(run.status, "core")
    assert hours.held == 0.0
    assert 0.0 <= hours.used < 0.1


def test_all_runs_of_a_folder_count_and_those_that_were_pruned_once(tmp_path: Path) -> None:
    for _ in range(3):
        with told(tmp_path, tasks=1) as run:
            run.ended(done(0, 3600.0))
            run.over()
    spending = Spending(tmp_path, CORES)
    assert spending.account().taken == Hours(3.0)
    list(prune(foresee_pruning(tmp_path, keep=1)))
    assert spending.account().taken == Spending(tmp_path, CORES).account().taken == Hours(3.0)
    with (tmp_path / PRUNED).open("a") as file:
        file.write('{"run": "cut')
        file.write(
            f"\n{json.dumps({'run': run.folder.name, 'core': 99.0, 'gpu': 0.0})}\n"
        )  # of a run that is still there
    assert Spending(tmp_path, CORES).account().taken == Hours(3.0)


def test_a_run_that_goes_on_is_read_again_as_it_grows(tmp_path: Path) -> None:
    spending = Spending(tmp_path, CORES)
    with told(tmp_path, tasks=2) as run:
        assert spending.account().taken == Hours(0.0, 2 * LIMIT_H)
        assert spending.account().holders == (run.folder.name,)
        run.ended(done(0, 1800.0))
        assert spending.account().taken == Hours(0.5, LIMIT_H)


def test_a_budget_warns_from_four_fifths() -> None:
    assert Account(Budget(500.0, "gpu"), Hours(380.0, 25.0), ("run",)).is_low
    assert not Account(CORES, Hours(7.9)).is_low


def test_a_budget_is_read_as_people_write_it_and_what_is_none_is_refused() -> None:
    for text, read in {
        "500 gpu-hours": "500 gpu-hours",
        "2.5core-hours": "2.5 core-hours",
        "1 GPU-hour": "1 gpu-hours",
    }.items():
        assert TypeAdapter(BudgetSetting).validate_python(text) == read
    for wrong in ("500", "0 gpu-hours", "-1 core-hours", "5 hours", 500, None, "nan gpu-hours"):
        with pytest.raises(ValueError, match="gpu-hours"):
            TypeAdapter(BudgetSetting).validate_python(wrong)


def test_a_run_without_a_budget_counts_nothing(tmp_path: Path) -> None:
    run = Told(tmp_path)
    run.folder.config.write_text('{"cluster": {}}')
    assert spending_of_run(run.folder).account() is None
    run.folder.config.write_text('{"cluster": {"budget": "5 core-hours"}}')
    account = spending_of_run(run.folder).account()
    assert account is not None
    assert account.budget == Budget(5.0, "core")


@given(
    st.floats(0.1, 1000), st.floats(0, 1000), st.floats(0, 1000),
    st.integers(1, 64), st.integers(0, 8), st.integers(1, 200_000), st.integers(1, 500),
    st.sampled_from(["core", "gpu"]),
)  # fmt: skip
def test_what_fits_never_passes_the_budget_and_one_more_would(
    hours: float, used: float, held: float, cpus: int, gpus: int, time_s: int, tasks: int, unit: str
) -> None:
    budget, taken = Budget(hours, unit), Hours(used, held)
    job = StageJob("tag", "scan", f"0-{tasks - 1}", 1, Ask(1, time_s), cpus=cpus, gpus=gpus)
    fitting, each = budget.fitting(job, taken), budget.task_hours(job)
    assert 0 <= fitting <= tasks
    assert fitting == 0 or taken.total + fitting * each <= hours + 1e-6 or each == 0
    if fitting < tasks:
        assert taken.total + (fitting + 1) * each > hours - 1e-6
