"""A report is what attempts were given beside what they have used, and what follows from that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.cluster.verdict import Cause
from pipeline.config.load import dump_resolved
from pipeline.config.schema import Config
from pipeline.journal.attempts import Ask, Attempt
from pipeline.journal.run_status import RunStatus, StageJob, State
from pipeline.memory.history import Suggestion
from pipeline.records import EventKind
from pipeline.views.efficiency import StageUse, stage_uses, use_report, used
from tests.journal.ledgers import Told

GIB = 1 << 30
ASK = Ask(4 * GIB, 3600)


def attempt(task: int, **more: Any) -> Attempt:
    """Return an attempt that ended well."""
    given: dict[str, Any] = {"number": 1, "ask": ASK, "cause": Cause.DONE, "state": "COMPLETED", "job": "7", "done": 10}
    return Attempt(task, **given | more)


def report_of(
    tmp_path: Path,
    attempts: list[Attempt],
    mem: Suggestion | None = None,
    cpus: int = 1,
    executor: str = "slurm",
    **job: int,
) -> StageUse:
    """Return what a run with such attempts has used."""
    told = Told(tmp_path, tasks=len({one.task for one in attempts}))
    told.job("7", sorted({one.task for one in attempts}), ask=ASK, cpus=cpus, why="planned", **job)
    for one in attempts:
        told.ended(one)
    cluster = {"executor": executor, "scan": {"cpus": cpus}}
    config = Config.model_validate({"data": {"source": "glob", "path": tmp_path}, "cluster": cluster})
    return used(told.status.stages["scan"], config, mem)


def suggested(found: StageUse) -> dict[str, int]:
    """Return the suggestions by their keys."""
    return {one.key: one.value for one in found.suggested}


def test_used_memory_is_weighted_by_time(tmp_path: Path) -> None:
    found = report_of(
        tmp_path,
        [attempt(0, peak_rss_bytes=4 * GIB, elapsed_s=100.0), attempt(1, peak_rss_bytes=1 * GIB, elapsed_s=300.0)],
    )
    assert found.mem_used == pytest.approx((4 * 100 + 1 * 300) / (4 * 400))
    assert (found.peak_bytes, found.median_peak_bytes) == (4 * GIB, int(2.5 * GIB))


def test_what_was_not_measured_is_unknown_and_not_nothing(tmp_path: Path) -> None:
    found = report_of(tmp_path, [attempt(0)])
    unknown = (found.peak_bytes, found.mem_used, found.cpu_used, found.longest_s, found.time_used, found.gpu_peak_bytes)
    assert {*unknown, found.gpu_busy, found.gpu_total_bytes} == {None}
    assert found.advice == ()
    assert suggested(found) == {}


def test_cores_that_idled_are_suggested_away(tmp_path: Path) -> None:
    found = report_of(tmp_path, [attempt(0, cpu_s=110.0, elapsed_s=100.0)], cpus=8)
    assert found.cpu_used == pytest.approx(110 / 800)
    assert suggested(found)["cluster.scan.cpus"] == 2
    assert len(found.advice) == 1


def test_gpus_that_idled_and_memory_of_a_larger_card_are_told_in_words(tmp_path: Path) -> None:
    seen = {"gpu_peak_bytes": 8 * GIB, "gpu_total_bytes": 80 * GIB}
    attempts = [attempt(0, gpu_busy=0.1, elapsed_s=300.0, **seen), attempt(1, gpu_busy=0.5, elapsed_s=100.0)]
    found = report_of(tmp_path, attempts, gpus=1)
    assert found.gpu_busy == pytest.approx(0.2)
    assert found.gpu_hours == pytest.approx(400 / 3600)
    assert len(found.advice) == 2
    lines = "\n".join(map(str, use_report(RunStatus("r", State.DONE), [found])))
    assert all(advice in lines for advice in found.advice)


@pytest.mark.parametrize(("peak_gib", "total_gib", "gib"), [(9.5, 80, 20), (36, 80, 40), (37, 80, None), (1, 16, None)])
def test_a_slice_is_advised_only_where_a_tenth_of_room_is_left_and_cards_are_cut(
    tmp_path: Path, peak_gib: float, total_gib: int, gib: int | None
) -> None:
    seen = {"gpu_peak_bytes": int(peak_gib * GIB), "gpu_total_bytes": total_gib * GIB}
    found = report_of(tmp_path, [attempt(0, elapsed_s=9.0, **seen)], gpus=1)
    assert [f"would fit a {gib} GB slice" in line for line in found.advice] == ([True] if gib else [])


def test_cores_of_all_ranks_and_nodes_are_compared_with_what_they_did(tmp_path: Path) -> None:
    """Before, a training of many ranks was said to use more cores than it had."""
    found = report_of(tmp_path, [attempt(0, cpu_s=1600.0, elapsed_s=100.0)], cpus=8, nodes=2, ranks=4)
    assert found.cpu_used == pytest.approx(1600 / 6400)
    assert found.core_hours == pytest.approx(6400 / 3600)
    assert suggested(found)["cluster.scan.cpus"] == 2


@pytest.mark.parametrize(("longest_s", "time_s"), [(1.0, 300), (200.0, 300), (201.0, 600), (3600.0, 5400)])
def test_the_next_limit_is_half_more_than_the_longest_task_took(tmp_path: Path, longest_s: float, time_s: int) -> None:
    found = report_of(tmp_path, [attempt(0, elapsed_s=longest_s), attempt(1, elapsed_s=1.0)])
    assert suggested(found)["cluster.scan.time"] == time_s


def test_no_shorter_limit_is_suggested_without_a_queue(tmp_path: Path) -> None:
    assert suggested(report_of(tmp_path, [attempt(0, elapsed_s=1.0)], executor="local")) == {}


def test_memory_is_suggested_from_what_is_remembered_and_never_from_a_plan_alone(tmp_path: Path) -> None:
    remembered, plan_alone = Suggestion(GIB, "from 41 tasks", 41), Suggestion(2 * GIB, "planned", 0)
    (tmp_path / "a").mkdir()
    assert suggested(report_of(tmp_path / "a", [attempt(0)], remembered)) == {"cluster.scan.mem": GIB}
    assert suggested(report_of(tmp_path, [attempt(0)], plan_alone)) == {}


def test_the_plan_is_that_which_the_run_recorded_and_no_code_of_the_user_is_loaded(tmp_path: Path) -> None:
    told = Told(tmp_path / "runs", stage="train", tasks=1)
    planned = StageJob("t", "train", "0", 1, ASK, cpus=3, why="as planned", planned_bytes=3 * GIB, recipe="ab")
    told.supervisor.emit(EventKind.STAGE_SUBMITTED, stage="train", tasks=1, job=planned.to_json(), limits={})
    told.ended(attempt(0))
    train = {"task": "a_module_that_is_not_here:Task"}
    config = Config.model_validate({"data": {"source": "glob", "path": tmp_path}, "train": train})
    told.folder.config.write_text(dump_resolved(config))
    (use,) = stage_uses(told.folder, told.status)
    assert (use.planned_bytes, use.cpus, use.why) == (3 * GIB, 3, "as planned")
