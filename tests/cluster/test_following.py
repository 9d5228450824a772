"""What becomes of a task where the queue and the accounting do not tell the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.cluster import slurm
from pipeline.cluster.accounting import AccountedTask
from pipeline.cluster.following import Followed, Views
from pipeline.cluster.job_spec import Job, TaskState
from pipeline.cluster.slurm import SlurmExecutor
from pipeline.cluster.slurm_words import Queued
from pipeline.config.schema_cluster import SlurmSection
from pipeline.errors import SubmissionRefused
from tests.testkit.stubs import TESTED, program, silent_slurm


def followed(tmp_path: Path) -> Followed:
    return Followed("7", Job(name="a", argv=("true",), tasks=range(1), log_dir=str(tmp_path)), 0, 100.0)


def test_a_task_that_was_cancelled_has_begun_if_the_queue_showed_it_running(tmp_path):
    views = Views({}, {"7_0": AccountedTask(job="7_0", state=TaskState.CANCELLED, started=200.0, ended=200.0)}, 2.0)
    job = followed(tmp_path)
    job.take_in(Views({"7_0": Queued("7_0", TaskState.RUNNING, "", "", 150.0, "n1")}, {}, 1.0), 15.0)
    (task,) = job.take_in(views, 15.0)
    assert (task.state, task.node, task.started) == (TaskState.CANCELLED, "n1", 150.0)
    (task,) = followed(tmp_path).take_in(views, 15.0)
    assert (task.state, task.node, task.started) == (TaskState.CANCELLED, "", None)


def test_a_hiccup_of_the_scheduler_when_a_job_is_tested_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(slurm, "TRIES_S", (0.0,))
    monkeypatch.setenv("PATH", f"{silent_slurm(tmp_path / 'bin')}:/usr/bin:/bin")
    busy = f"[ -e {tmp_path}/tried ] || {{ touch {tmp_path}/tried; echo 'Socket timed out on send/recv' >&2; exit 1; }}"
    program(tmp_path / "bin", "sbatch", f"cat >/dev/null; {busy}; {TESTED}")
    with SlurmExecutor(SlurmSection()) as executor:
        assert executor.starts(Job(name="a", argv=("true",), tasks=range(1), log_dir=str(tmp_path)))


def test_only_a_job_of_our_own_name_is_seen_and_cancelled_and_one_that_already_ends_need_not_be(tmp_path, monkeypatch):
    """The queue has our job 7, and as job 8, which was ours before the controller lost its state, a stranger's."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    listed = "0|RUNNING|None|N/A|n1|"
    program(tmp_path, "squeue", f'[[ " $* " = *" --name="*run-scan-0* && $* = *--user=$UID* ]] && echo "7_{listed}7_0"')
    program(tmp_path, "scancel", f'echo "$@" >>{tmp_path}/said; exit 229')
    with SlurmExecutor(SlurmSection()) as executor:
        executor.cancel(["7", "8"])
        executor.recognize({"7": "run-scan-0", "8": "run-scan-1"})
        assert executor.queued(["7", "8", "9"]) == {"7"}
        executor.cancel(["7", "8", "9"])
        assert (tmp_path / "said").read_text() == "--quiet 7\n"
        program(tmp_path, "scancel", "exit 1")
        with pytest.raises(SubmissionRefused):
            executor.cancel(["7"])
