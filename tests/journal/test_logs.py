"""Logs are found by the ledger, shown by their ends, and cannot harm a terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from pipeline.cluster.verdict import Cause
from pipeline.journal.attempts import Attempt
from pipeline.journal.run_logs import Follower, LogChoice, end_of, harmless, wanted_logs, whole
from pipeline.journal.run_status import StatusReader
from pipeline.journal.run_view import view
from pipeline.records import EventKind
from tests.journal.ledgers import ASK, Told
from tests.testkit.command import Command

PIPELINE = Path(sys.executable).with_name("pipeline")
LONG_S = 300.0  # a machine may be busy; this only ends what would never end


@pytest.fixture
def told(tmp_path: Path) -> Told:
    """Return a run of two tasks, of which the second failed once and runs again."""
    told = Told(tmp_path)
    told.job("7", [0, 1])
    for task in (0, 1):
        told.log(f"7_{task}.out", "")
        told.log(f"7_{task}.err", f"task {task}\n")
    told.ended(Attempt(0, 1, ASK, Cause.DONE, state="COMPLETED", job="7", log=str(told.folder.logs / "7_0.err")))
    path = str(told.folder.logs / "7_1.err")
    told.ended(Attempt(1, 1, ASK, Cause.HOST_OOM, state="OUT_OF_MEMORY", job="7", log=path))
    told.job("8", [1], attempt=2)
    told.log("8_1.err", "again\n")
    return told


def named(told: Told, wanted: LogChoice) -> list[tuple[int | None, int]]:
    """Return the task and attempt of each log that was found."""
    return [(log.task, log.attempt) for log in wanted_logs(told.folder, told.status, wanted)]


class TestFinding:
    def test_without_options_the_failed_attempts_are_shown(self, told: Told) -> None:
        assert named(told, LogChoice()) == [(1, 1)]

    def test_every_attempt_at_a_task_is_found(self, told: Told) -> None:
        assert named(told, LogChoice(task=1)) == [(1, 1), (1, 2)]
        assert named(told, LogChoice(task=1, attempt=2)) == [(1, 2)]
        assert named(told, LogChoice(failed=True)) == [(1, 1)]
        assert named(told, LogChoice(stage="graph")) == []

    def test_a_supervisor_that_failed_by_itself_comes_before_its_tasks(self, told: Told) -> None:
        told.folder.supervisor_log.write_text("Traceback\n")
        told.over("failed", exit_code=1, error="a bug")
        assert [log.stage for log in wanted_logs(told.folder, told.status, LogChoice())] == ["supervise"]

    def test_the_log_of_a_supervisor_that_was_a_job_is_the_one_that_no_task_has(self, told: Told) -> None:
        told.log("9_0.err", "visit\n")
        told.log("10_0.err", "later visit\n")
        states = [log.state for log in wanted_logs(told.folder, told.status, LogChoice(stage="supervise"))]
        assert states == ["job 9", "job 10"]

    def test_the_offset_of_an_array_is_heeded(self, told: Told) -> None:
        told.job("11", [6, 7])
        told.log("11.sbatch", "#!/bin/bash\noffset=6\n")
        (log,) = wanted_logs(told.folder, told.status, LogChoice(task=7))
        assert log.paths[1].endswith("11_1.err")


class TestReading:
    def test_the_end_is_the_last_lines(self, tmp_path: Path) -> None:
        for text in ("", "one", "one\n", "one\ntwo\n", "one\ntwo\nthree", "\n\n\n", "a\n" * 100_000):
            (tmp_path / "log").write_text(text)
            for lines in (1, 2, 3, 200):
                last = "".join(text.splitlines(keepends=True)[-lines:])
                assert end_of(str(tmp_path / "log"), lines) == last, (text[:20], lines)
        assert end_of(str(tmp_path / "none")) is None

    @pytest.mark.nightly
    @pytest.mark.parametrize("line", [b"x" * 200, b"x" * (1 << 26)])
    def test_memory_does_not_grow_with_a_log(self, tmp_path: Path, line: bytes) -> None:
        with (tmp_path / "log").open("wb") as file:
            for _ in range((1 << 26) // len(line)):
                file.write(line + b"\n")
        tracemalloc.start()
        end_of(str(tmp_path / "log"))
        for _ in whole(str(tmp_path / "log")):
            pass
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
        tracemalloc.stop()

    def test_nothing_in_a_log_gives_orders_to_a_terminal(self) -> None:
        hostile = "\x1b[2J\x1b]0;title\x07\x1b]52;c;cm0gLXJm\x1b\\red\x9b31m\x08\x00\u202eok\x1bc\r\nbar\rbar2\tend\n"
        text = harmless(hostile)
        assert text == "red31mok\nbar\nbar2\tend\n"


class TestFollowing:
    def test_new_lines_new_files_and_replaced_files_are_all_shown(self, told: Told) -> None:
        follower = Follower(StatusReader(told.folder), LogChoice())
        log = told.folder.logs / "8_1.err"

        def latest() -> str:
            return "".join(text for _, path, text in follower.fresh() if path == str(log))

        assert latest() == "again\n"
        with log.open("a") as file:
            file.write("more\nhal")
        assert latest() == "more\n"
        with log.open("a") as file:
            file.write("f\n")
        assert latest() == "half\n"
        log.write_text("cut\n")
        assert latest() == "cut\n"
        log.unlink()
        assert latest() == ""
        log.write_text("a new file\n")
        assert latest() == "a new file\n"

    def test_what_a_task_printed_last_is_shown_though_it_has_ended_meanwhile(self, told: Told) -> None:
        follower = Follower(StatusReader(told.folder), LogChoice())
        list(follower.fresh())
        log = told.log("8_1.err", "again\nlast words")
        told.ended(Attempt(1, 2, ASK, Cause.DONE, state="COMPLETED", job="8", log=str(log)))
        told.over()
        assert "".join(text for _, _, text in follower.fresh()) == "last words"
        assert follower.ended
        assert not list(follower.fresh())

    def test_it_ends_when_the_run_has(self, told: Told) -> None:
        with following(told) as process:
            assert "again\n" in iter(process.stdout.readline, "")
            told.over()
            _, err = process.communicate(timeout=LONG_S)
        assert (process.returncode, err) == (0, f"run {told.folder.name}: done\n")

    def test_ctrl_c_leaves_without_a_traceback(self, told: Told) -> None:
        with following(told) as process:
            assert "again\n" in iter(process.stdout.readline, "")
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=LONG_S)
        assert process.returncode == 130
        assert "Traceback" not in err


def following(told: Told) -> subprocess.Popen[str]:
    """Start `pipeline logs -f`."""
    words = [str(PIPELINE), "logs", "-f", str(told.folder.path)]
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}
    )


class TestTheVerb:
    def test_each_log_stands_below_whose_it_is(self, told: Told, pipeline: Command) -> None:
        head, text = pipeline("logs", str(told.folder.path)).out.splitlines()
        assert head.startswith("==> scan task 1, attempt 1: OUT_OF_MEMORY (host_oom)  ")
        assert head.endswith("7_1.err")
        assert text == "task 1"
        assert pipeline("logs", str(told.folder.path), "--task", "0", "--rank", "0").out.endswith("task 0\n")

    def test_a_log_that_is_not_there_is_refused_with_what_there_is(self, told: Told, pipeline: Command) -> None:
        for words, says in {
            "--stage graph": "started: scan",
            "--task 99": "scan 1",
            "--attempt 5": "",
            "--rank 1": "1 process",
            "--task 0 --failed": "",
            "-f --json": "",
        }.items():
            done = pipeline("logs", str(told.folder.path), *words.split())
            assert (done.code, done.out, says in done.err, "next: " in done.err) == (2, "", True, True), words

    def test_of_many_logs_the_newest_are_shown(self, tmp_path: Path, pipeline: Command) -> None:
        told = Told(tmp_path, tasks=50)
        told.job("7", list(range(50)))
        done = pipeline("logs", str(told.folder.path))
        assert (done.out.count("==>"), "10 of 50" in done.err) == (10, True)


def test_a_worker_that_said_it_has_finished_counts_as_done_before_it_is_judged(told: Told) -> None:
    told.worker(1, EventKind.TASK_STARTED, attempt=2, host="n1")
    told.worker(1, EventKind.TASK_FINISHED, attempt=2, done=10, rejected={}, figures={})
    (stage,) = view(told.folder).status.in_order()
    assert stage.task_states() == {"done": 2}
