"""What a run's status says of it, event by event and in numbers."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any, ClassVar

from pipeline.cluster.job_spec import Limits
from pipeline.cluster.verdict import GO_ON, PEER_LOST, Cause, Word
from pipeline.codec import plain
from pipeline.journal.attempts import Ask, Attempt, TaskRecord, reported
from pipeline.journal.run_status import (
    COUNTED,
    StageJob,
    StageStatus,
    State,
    StatusReader,
    Wait,
    summary,
)
from pipeline.records import Event, EventKind
from tests.journal.ledgers import Told, fold_events

ASK = Ask(1 << 30, 600)
JOB = StageJob("t1", "embed", "0-1", 1, ASK, id="7", cpus=3, gpus=2, nodes=4, ranks=5)
FIGURES = {
    "forward_s": 2.0, "residues": 30.0, "tokens": 48.0, "encoded_residues": 24.0, "cost_done": 6.0,
    "host_peak_bytes": 5.0, "device_peak_bytes": 9.0, "lowest cosine to fair-esm": 0.5, "splits": 1.0,
}  # fmt: skip


def event(kind: EventKind, at: float = 1.0, writer: str = "supervisor-000001", **data: object) -> Event:
    return Event(kind, at, writer, data)


def of_stage(kind: EventKind, at: float = 1.0, writer: str = "supervisor-000001", **data: object) -> Event:
    return event(kind, at, writer, stage="embed", **data)


def begun(tasks: int = 2, at: float = 1.0, **more: object) -> Event:
    return of_stage(EventKind.STAGE_SUBMITTED, at, items=10, missing=8, tasks=tasks, **more)


def job_event(kind: EventKind, job: StageJob = JOB, at: float = 2.0) -> Event:
    return Event(kind, at, "supervisor-000001", job.to_json())


def ended(task: int, cause: Cause = Cause.DONE, number: int = 1, job: str = "7") -> Event:
    return of_stage(EventKind.TASK_ENDED, 9.0, **Attempt(task, number, ASK, cause, job=job).to_event())


def said(kind: EventKind, at: float, task: int = 0, writer: str = "embed-000000", **more: object) -> Event:
    return of_stage(kind, at, writer, task=task, **more)


def progress(at: float, done: int, writer: str = "embed-000000", **more: object) -> Event:
    return said(EventKind.PROGRESS, at, writer=writer, **{"attempt": 1, "done": done, "rejected": {}, **more})


def stage_of(*events: Event) -> StageStatus:
    return fold_events("r", events).stages["embed"]


class TestRun:
    START = event(EventKind.RUN_STARTED, 1.0, stages=["scan", "embed"], host="h", pid=11, uid=5, born=0.5)
    END = event(EventKind.RUN_ENDED, 8.0, state="failed", error="why", exit_code=3)

    def test_begins_with_whoever_looks_after_it(self) -> None:
        status = fold_events("r", [self.START])
        assert (status.state, status.started_at, status.planned) == (State.RUNNING, 1.0, ("scan", "embed"))
        assert (status.host, status.pid, status.uid, status.born, status.seen) == ("h", 11, 5, 0.5, 1.0)

    def test_ends_with_its_error_and_nobody_who_would_come(self) -> None:
        handed = event(EventKind.HANDED_OVER, 2.0, jobs=["5"])
        assert fold_events("r", [self.START, handed]).successors == ("5",)
        status = fold_events("r", [self.START, handed, begun(), self.END])
        assert (status.state, status.ended_at, status.error, status.exit_code) == (State.FAILED, 8.0, "why", 3)
        assert status.successors == ()
        assert status.stages["embed"].state is State.FAILED

    def test_begun_again_is_as_old_as_at_first_and_has_no_end(self) -> None:
        again = replace(self.START, at=9.0)
        status = fold_events("r", [self.START, self.END, again])
        assert (status.state, status.started_at, status.seen) == (State.RUNNING, 1.0, 9.0)
        assert (status.error, status.exit_code, status.ended_at) == ("", 0, 0.0)

    def test_a_visit_has_a_successor_from_its_first_moment_and_alone_is_left_when_it_is_over(self) -> None:
        handed = event(EventKind.HANDED_OVER, 2.0, jobs=["5"], names=["five"])
        submitted = event(EventKind.SUCCESSOR, 3.0, jobs=["5", "6"], names=["five", "six"])
        visit = event(EventKind.VISIT, 4.0, number=4, host="g", pid=12, job="5")
        status = fold_events("r", [self.START, handed, submitted, visit])
        assert (status.visits, status.host, status.pid, status.uid, status.born) == (4, "g", 12, None, 0.0)
        assert (status.seen, status.successors) == (4.0, ("5", "6"))
        assert (status.queued_as, status.unfinished) == ({"5": "five", "6": "six"}, 1)
        status.apply(event(EventKind.HANDED_OVER, 5.0, jobs=["6"], names=["six"]))
        assert (status.queued_as, status.unfinished) == ({"6": "six"}, 0)
        again = event(EventKind.VISIT, 6.0, number=5, host="g", pid=12, job="5", name="five")  # requeued
        status.apply(again)
        assert (status.queued_as, status.unfinished) == ({"5": "five", "6": "six"}, 1)

    def test_as_json_it_has_its_stages_in_the_order_in_which_they_began(self) -> None:
        scan = replace(begun(at=1.5), data={**begun().data, "stage": "scan"})
        told = fold_events("r", [self.START, begun(at=2.0), scan]).to_json()
        assert [stage["name"] for stage in told["stages"]] == ["scan", "embed"]
        assert told["state"] == "running"
        assert told.keys() == {
            "cluster", "ended_at", "error", "exit_code", "host", "name", "pid", "planned", "stages", "started_at",
            "state", "successors", "visits", "waits",
        }  # fmt: skip


class TestWaits:
    BEGAN: ClassVar[dict[str, Any]] = {
        "of": "embed",
        "reason": "QOSMax",
        "words": "w",
        "remedy": "r",
        "tasks": 2,
        "since": 3.0,
    }

    def test_are_numbered_and_each_ends_once(self) -> None:
        began, over = event(EventKind.WAITING, **self.BEGAN), event(EventKind.WAITED, **self.BEGAN, until=9.0)
        again = event(EventKind.WAITING, **{**self.BEGAN, "since": 12.0})
        first = Wait("embed", "QOSMax", 1, "w", "r", tasks=2, since=3.0, until=9.0)
        waits = fold_events("r", [began, over, over, again]).waits
        assert waits == [first, replace(first, number=2, since=12.0, until=0.0)]
        assert [wait.lasted_s(20.0) for wait in waits] == [6.0, 8.0]


class TestStage:
    def test_begins_with_its_counts_and_its_tasks(self) -> None:
        limits = {"mem_bytes": 5, "preempts": True}
        stage = stage_of(begun(cost=7.5, refused=1, job=JOB.to_json(), limits=limits, at=4.0))
        assert stage.counts() == dict.fromkeys(COUNTED, 0) | {"items": 10, "missing": 8, "tasks": 2, "refused": 1}
        assert (stage.cost, stage.started_at, stage.submitted, stage.state) == (7.5, 4.0, True, State.RUNNING)
        assert (stage.planned, stage.limits) == (JOB, Limits(mem_bytes=5, preempts=True))
        assert (list(stage.work), stage.parts, stage.names) == ([0, 1], {}, [])
        assert stage_of(begun(job=JOB.to_json(), limits={})).limits is None

    def test_announces_a_job_until_its_id_is_known_or_it_was_refused(self) -> None:
        announced = stage_of(begun(), job_event(EventKind.JOB_SUBMITTING))
        assert (announced.intents, announced.jobs, announced.live) == ({"t1": replace(JOB, at=2.0)}, {}, [])
        refused = stage_of(begun(), *map(job_event, (EventKind.JOB_SUBMITTING, EventKind.JOB_REFUSED)))
        assert (refused.intents, refused.jobs) == ({}, {})
        sent = stage_of(begun(), *map(job_event, (EventKind.JOB_SUBMITTING, EventKind.JOB_SUBMITTED)))
        assert (sent.intents, sent.jobs, sent.live) == ({}, {"7": replace(JOB, at=2.0)}, ["7"])
        task = sent.task(1)
        assert (task.job, task.ask, task.attempt, task.then) == ("7", ASK, 1, {0: ""})

    def test_a_task_that_ended_has_no_job_unless_a_later_one_has_it(self) -> None:
        later = replace(JOB, id="8", tag="t2", tasks="0", attempt=2, why="again")
        events = [begun(), job_event(EventKind.JOB_SUBMITTED)]
        stage = stage_of(*events, ended(0, Cause.NODE))
        assert (stage.live, stage.task(0).job, stage.task_states()) == (["7"], None, {"failed": 1, "waiting": 1})
        stage = stage_of(*events, job_event(EventKind.JOB_SUBMITTED, later), ended(0, Cause.NODE))
        assert (stage.live, stage.task(0).job) == (["8", "7"], "8")
        assert stage.task(0).then == {0: "", 1: "again"}
        reported = [ended(0, Cause.NODE)] * 2  # by two visits
        twice = stage_of(*events, *reported, ended(0, Cause.NODE, job="8"), ended(0, Cause.NODE, number=2))
        assert [(attempt.number, attempt.job) for attempt in twice.task(0).ended] == [(1, "7"), (1, "8"), (2, "7")]

    def test_what_was_given_up_and_left_out_is_told(self) -> None:
        given_up = of_stage(EventKind.TASK_GIVEN_UP, task=1, attempt=1, why="too large")
        out = of_stage(EventKind.LEFT_OUT, names=["a"], reason="killed_its_task", why="twice")
        stage = stage_of(begun(), ended(1, Cause.FAILED), ended(0, Cause.FAILED, 2), given_up, out)
        told = stage.to_json()
        assert [(failure["task"], failure["then"]) for failure in told["failures"]] == [(1, "too large"), (0, "")]
        assert [left["names"] for left in told["left_out"]] == [["a"]]

    def test_a_word_in_its_states(self) -> None:
        events = [begun(1), job_event(EventKind.JOB_SUBMITTED, replace(JOB, tasks="0"))]
        started = said(EventKind.TASK_STARTED, 3.0, attempt=1)
        failed = said(EventKind.TASK_FAILED, 4.0, attempt=1, exit_code=9, what="w", trouble="disk_full")
        finished = said(EventKind.TASK_FINISHED, 4.0, attempt=1, done=5, rejected={})
        words = {"waiting": (), "running": (started,), "failed": (started, failed), "done": (started, finished)}
        for word, told in words.items():
            assert stage_of(*events, *told).task_states() == {word: 1}
        assert stage_of(*events, started, finished, ended(0)).task_states() == {"done": 1}
        requeued = replace(failed, data={**failed.data, "exit_code": GO_ON})
        run = fold_events("r", [*events, started, requeued])
        assert run.stages["embed"].task_states() == {"waiting": 1}, "Slurm begins it again"
        run.abandon()
        assert run.stages["embed"].task_states() == {"stalled": 1}
        stopped = event(EventKind.RUN_ENDED, 5.0, state="stopped", error="", exit_code=130)
        assert stage_of(*events, started, stopped).task_states() == {"stopped": 1}, "its jobs ended with the run"

    def test_of_several_processes_a_fault_counts_before_the_loss_of_a_peer_and_a_restart_forgets_both(self) -> None:
        events = [begun(1), job_event(EventKind.JOB_SUBMITTED, replace(JOB, tasks="0"))]
        started = said(EventKind.TASK_STARTED, 3.0, attempt=1)
        fault = said(EventKind.TASK_FAILED, 4.0, attempt=1, exit_code=1, what="ValueError", trouble="")
        lost = said(EventKind.TASK_FAILED, 5.0, attempt=1, exit_code=PEER_LOST, what="rank 1 is lost", trouble="")
        for told in ((started, fault, lost), (started, lost, fault)):
            assert stage_of(*events, *told).task(0).word.what == "ValueError"
        death = {**ended(0, Cause.CRASHED).data, "attempt": 1, "lost_s": 7.0, "done": 3}
        restarted = event(EventKind.RESTARTED, 6.0, **death)
        stage = stage_of(*events, started, lost, restarted, said(EventKind.CAUGHT_UP, 9.0, lost_s=2.0))
        assert (stage.task_states(), stage.lost_s) == ({"running": 1}, 9.0)
        assert [start.done for start in stage.task(0).history] == [3]

    def test_as_json_it_says_all_but_what_is_internal(self) -> None:
        told = stage_of(
            begun(), job_event(EventKind.JOB_SUBMITTED), progress(3.0, 4, rejected={"no_atoms": 2})
        ).to_json()
        assert (told["state"], told["items_done"], told["reasons"]) == ("running", 4, {"no_atoms": 2})
        assert (told["warnings"], told["measured"], told["task_states"]) == ([], {}, {"waiting": 2})
        assert [job["id"] for job in told["jobs"]] == ["7"]
        assert {"judged", "told", "work", "intents", "own", "names", "of", "limits", "planned"}.isdisjoint(told)
        assert "at" not in told["jobs"][0]


class TestWords:
    """What a worker says of its attempt; its files are read one after the other."""

    START = said(EventKind.TASK_STARTED, 3.0, attempt=1)
    FAILED = said(EventKind.TASK_FAILED, 5.0, attempt=1, exit_code=9, what="full")
    FINISHED = said(EventKind.TASK_FINISHED, 5.0, attempt=1, done=4, rejected={"no_atoms": 1}, warnings=["slow"])

    def word(self, *events: Event) -> Word:
        return stage_of(begun(1), job_event(EventKind.JOB_SUBMITTED), *events).task(0).word

    def test_a_start_an_end_and_a_failure(self) -> None:
        assert self.word(self.START) == Word(started=True, at=3.0, began=3.0)
        assert self.word(self.START, self.FINISHED) == Word(started=True, finished=True, at=5.0, began=3.0)
        failed = Word(started=True, exit_code=9, what="full", at=5.0, began=3.0)
        assert self.word(self.START, self.FAILED) == failed
        assert self.word(self.FAILED, self.START) == failed

    def test_a_start_over_is_the_beginning_of_what_is_said_after_it(self) -> None:
        assert self.word(self.START, self.FAILED, replace(self.START, at=7.0)) == Word(started=True, at=7.0, began=7.0)
        assert self.word(replace(self.START, at=4.0), self.START).began == 4.0

    def test_counts_figures_and_warnings_are_those_that_came_last(self) -> None:
        first = progress(3.0, 2, figures=FIGURES, warnings=["a"])
        stage = stage_of(begun(1), first, progress(3.0, 3, "embed-000000-1", warnings=["a", "b"]), progress(4.0, 4))
        assert (stage.items_done, stage.done) == (7, {"embed-000000": 4, "embed-000000-1": 3})
        assert stage.figures == {"embed-000000": {**FIGURES, "task": 0}}
        assert stage.warnings == ["a", "b"]
        whole = stage_of(begun(1), self.START, first, self.FINISHED)
        assert (whole.done, dict(whole.reasons), whole.warnings) == ({"embed-000000": 4}, {"no_atoms": 1}, ["slow"])


class TestParts:
    """Several encoders, and points of a sweep: tasks have names."""

    EVENTS = (
        begun(
            3,
            parts={"a": {"items": 4, "missing": 3}, "b": {"items": 6, "missing": 5}},
            jobs={"a": replace(JOB, tasks="0").to_json(), "b": replace(JOB, tasks="1-2", ask=Ask(9, 9)).to_json()},
        ),
        progress(3.0, 2, "embed-000000", figures=FIGURES, rejected={"no_atoms": 1}),
        said(EventKind.PROGRESS, 3.0, 2, "embed-000002-0", attempt=1, done=5, rejected={}),
    )

    def test_each_encoder_has_its_counts_its_tasks_and_its_plan(self) -> None:
        stage = stage_of(*self.EVENTS)
        first, second = stage.by_part()
        assert [(part.title, part.items, part.missing, part.tasks) for part in (first, second)] == [
            ("embed a", 4, 3, 1), ("embed b", 6, 5, 2),
        ]  # fmt: skip
        assert (first.done, second.done) == ({"embed-000000": 2}, {"embed-000002-0": 5})
        assert (list(first.figures), dict(first.reasons), list(second.figures)) == (
            ["embed-000000"],
            {"no_atoms": 1},
            [],
        )
        assert (list(second.work), second.parts, second.census) == ([1, 2], {}, None)
        assert second.planned is not None
        assert second.planned.ask == stage.task(2).first == Ask(9, 9)
        assert stage.title == "embed"
        assert stage_of(begun()).by_part() == [stage_of(begun())]

    def test_a_part_counts_no_task_that_was_split(self) -> None:
        split = of_stage(EventKind.TASK_SPLIT, task=2, into=[3, 4], ask=plain(ASK), why="in halves")
        stage = stage_of(*self.EVENTS, split)
        assert [part.tasks for part in stage.by_part()] == [1, 3]
        assert (stage.tasks, stage.task(2).split, stage.task(2).then) == (4, (3, 4), {0: "in halves"})
        assert (stage.name_of(4), stage.task(3).first) == ("b", ASK)
        assert stage_of(*self.EVENTS, split, split).tasks == 4
        assert (stage.done, list(stage.figures)) == ({"embed-000000": 2}, ["embed-000000"])


def test_a_reader_applies_what_is_new_and_a_deep_one_counts_over_time(tmp_path: Path) -> None:
    told = Told(tmp_path)
    reader, deep = StatusReader(told.folder), StatusReader(told.folder, deep=True)
    assert reader.read().stages["scan"].tasks == 2
    for done in (1, 2, 3):
        told.worker(0, EventKind.PROGRESS, done=done, rejected={}, figures={"ooms": done % 2})
    told.over()
    assert reader.read().state is State.DONE
    (shallow,), (stage,) = reader.status.stages.values(), deep.read().stages.values()
    assert shallow.items_done == stage.items_done == 3
    assert (shallow.ooms.counts.total(), stage.ooms.counts.total()) == (0, 1)
    told.worker(0, EventKind.TASK_STARTED)
    told.worker(0, EventKind.PROGRESS, done=2, rejected={}, figures={"ooms": 1})  # work that is repeated counts again
    assert deep.read().stages["scan"].ooms.counts.total() == 2
    told.supervisor.close()


class TestFigures:
    def test_rates_are_of_a_process_and_the_rest_of_all(self) -> None:
        other = {
            **FIGURES,
            "forward_s": 4.0,
            "cost_done": 2.0,
            "host_peak_bytes": 6.0,
            "device_peak_bytes": 1.0,
            "lowest cosine to fair-esm": 0.25,
        }
        assert summary([FIGURES, other, {"task": 1.0}], 20.0, 2) == {
            "residues_per_s": 10.0, "pad_factor": 2.0, "left_s": 12.0 / (8.0 / 6.0 * 2), "peak_rss_bytes": 6.0,
            "peak_gpu_bytes": 9.0, "lowest cosine to fair-esm": 0.25, "splits": 2.0,
        }  # fmt: skip

    def test_items_done_are_no_more_than_are_not_undone(self) -> None:
        for undone, done in ((3, 5), (9, 0), (0, 7), (None, 7)):
            census = None if undone is None else {"undone": undone}
            end = of_stage(EventKind.STAGE_ENDED, 9.0, state="failed", census=census, warnings=[], error="")
            assert stage_of(begun(1), progress(3.0, 7), end).items_done == done, undone


class TestAttempts:
    def test_what_is_written_is_read(self) -> None:
        attempt = Attempt(1, 2, Ask(5, 6, partition="p"), Cause.NODE, gpu_busy=0.0, on=("a",), done=3)
        assert reported(Attempt, attempt.to_event()) == attempt
        assert "reason" not in attempt.to_event(), "what is empty is not written"

    def test_a_task_is_good_open_or_under_way(self) -> None:
        node, done = Attempt(0, 1, ASK, Cause.NODE), Attempt(0, 2, ASK, Cause.DONE)
        for task, is_good, is_open in (
            (TaskRecord(0), False, True),
            (TaskRecord(0, job="7"), False, False),
            (TaskRecord(0, ended=[node]), False, True),
            (TaskRecord(0, ended=[node, done]), True, False),
            (TaskRecord(0, ended=[done, node]), False, True),
            (TaskRecord(0, job="7", ended=[done]), False, False),
            (TaskRecord(0, split=(1, 2)), True, False),
        ):
            assert (task.good, task.open) == (is_good, is_open), task


class TestOrder:
    """Files of events are read one after the other, in any order."""

    def test_words_of_several_processes_mean_the_same_in_whatever_order_their_files_are_read(self) -> None:
        parent, part, job = "embed-000000", "embed-000000-0", job_event(EventKind.JOB_SUBMITTED)
        failed = {"attempt": 1, "what": "full", "exit_code": 7, "trouble": "disk_full"}
        files = [
            [said(EventKind.TASK_STARTED, 3.0, writer=parent, attempt=1, host="n1")],
            [progress(4.0, 4, part), said(EventKind.TASK_FAILED, 5.0, writer=part, **failed)],
            [begun(1), job],
        ]
        words = {stage_of(*(one for file in order for one in file)).task(0).word for order in permutations(files)}
        (word,) = words
        assert (word.exit_code, word.kind, word.what) == (7, "disk_full", "full")

    def test_a_task_that_was_cancelled_by_hand_is_over_and_no_failure(self) -> None:
        by_hand = of_stage(EventKind.TASK_CANCELLED, 4.0, "cancel-here-9", task=0, why="by me")
        told = [begun(), job_event(EventKind.JOB_SUBMITTED)]
        for events in permutations([*told, ended(0, Cause.CANCELLED), by_hand]):
            if events.index(told[0]) < events.index(told[1]):
                stage = stage_of(*events)
                assert (stage.state_of(stage.task(0)), stage.state_of(stage.task(1))) == ("cancelled", "waiting")
                assert (stage.task(0).open, stage.failures) == (False, [])
        stage = stage_of(*told, ended(1, Cause.CANCELLED), by_hand)  # somebody else cancelled the other
        assert [(attempt.task, attempt.cause) for attempt in stage.failures] == [(1, Cause.CANCELLED)]
        stage = stage_of(*told, ended(0, Cause.CRASHED), by_hand)  # it crashed before
        assert ([attempt.cause for attempt in stage.failures], stage.task(0).open) == ([Cause.CRASHED], False)
        finished = said(EventKind.TASK_FINISHED, 3.5, attempt=1, done=1, rejected={}, figures={})
        for end in (finished, ended(0, Cause.DONE)):  # it had finished
            stage = stage_of(*told, end, by_hand)
            assert stage.state_of(stage.task(0)) == "done"

    def test_a_split_forgets_what_all_its_processes_did_also_where_the_first_died_silently(self) -> None:
        for first in (0, 1):
            parts = [progress(3.0, 4, f"embed-000000-{part}", figures={"cost_done": 1.0}) for part in range(first, 3)]
            assert stage_of(begun(1), *parts).items_done == 4 * (3 - first)
            halves = of_stage(EventKind.TASK_SPLIT, 4.0, task=0, into=[1, 2], ask=plain(ASK), why="in halves")
            split = stage_of(begun(1), *parts, halves)
            assert (split.items_done, dict(split.reasons), split.figures) == (0, {}, {})
