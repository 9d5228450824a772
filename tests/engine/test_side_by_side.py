"""Tasks that run side by side in one job: how they are grouped, how each ends by itself, what is refused."""

from __future__ import annotations

import argparse
import signal
import sys
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.cluster.job_spec import Limits, TaskState, TaskStatus
from pipeline.cluster.local import LocalExecutor
from pipeline.cluster.machine import Machine
from pipeline.cluster.verdict import GO_ON, Cause, Word, judge_attempt
from pipeline.config.load import read_config
from pipeline.engine import side_by_side as launcher
from pipeline.engine.dispatch import Dispatch, by_itself, pieces
from pipeline.errors import PlanInfeasible
from pipeline.journal.attempts import Ask
from pipeline.journal.ledger import Ledger
from pipeline.journal.run_status import StageJob
from pipeline.memory.hardware.gpus import device
from pipeline.memory.planning.memory_plan import CardSpec
from pipeline.planning import trainings
from pipeline.planning.trainings import PER_GPU
from pipeline.records import EventKind
from pipeline.stages.jobs import job_of, side_by_side
from tests.journal.ledgers import Told
from tests.testkit.project import DATA, EMBED, TRAIN, make_project, write_config, write_weights

SHARED = StageJob("tag", "train", "0-5", 1, Ask(100 << 20, 3600), cpus=2, gpus=1, sharing=3)
ENDS = {0: 0, 1: -signal.SIGKILL, 2: 3, 4: 0}  # what a worker of the number of the key does; 3 was done before
WORKER = f"""
import os, signal, sys
code = {ENDS!r}[int(sys.argv[3])]
print(sys.argv[3], os.environ['OMP_NUM_THREADS'])
os.kill(os.getpid(), -code) if code < 0 else sys.exit(code)
"""


def test_a_group_is_one_task_of_its_job_with_the_sum_of_its_requests(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = read_config(write_config(tmp_path, **DATA, **TRAIN, cluster__executor="slurm")).config
    job = job_of(None, config, SHARED)
    assert job.tasks == (0, 3)
    assert (job.request.cpus, job.request.gpus, job.request.mem_bytes) == (6, 1, 300 << 20)
    assert job.max_parallel == 1  # of one task at once, three
    assert job.command(3)[-4:] == ["--beside", "0-5", "--sharing", "3"]
    assert SHARED.cards == pytest.approx(1 / 3)
    assert list(pieces(range(8), Limits(job_tasks=2), 9, sharing=3)) == [[0, 1, 2, 3, 4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("state", "word", "cause"),
    [
        (TaskState.FAILED, Word(started=True, finished=True), Cause.DONE),
        (TaskState.FAILED, Word(started=True, exit_code=2, what="no such option"), Cause.REFUSED),
        (TaskState.OUT_OF_MEMORY, Word(started=True, exit_code=1, what="ValueError"), Cause.FAILED),
        (TaskState.OUT_OF_MEMORY, Word(started=True), Cause.HOST_OOM),
        (TaskState.COMPLETED, Word(started=True, exit_code=1, kind="gpu_oom"), Cause.GPU_OOM),
        (TaskState.NODE_FAIL, Word(started=True, exit_code=GO_ON), Cause.NODE),
    ],
)
def test_each_task_of_a_failed_group_is_judged_by_its_own_end(state, word, cause):
    report = TaskStatus("7", 0, state, "7_0.out", "7_0.err", exit_code=1, cpu_s=6.0)
    assert judge_attempt(by_itself(report, word, 3), word, "").cause is cause


def test_a_report_of_a_group_is_one_for_each_task_with_its_own_log(tmp_path):
    told = Told(tmp_path, "train", tasks=6)
    told.job("7", range(6), sharing=3)
    stage = told.status.stages["train"]
    group = Dispatch.of_tasks(stage, [TaskStatus("7", 3, TaskState.FAILED, "/logs/7_3.out", "/logs/7_3.err")])
    assert [(one.task, one.stderr) for one in group] == [(n, f"/logs/7_{n}.err") for n in (3, 4, 5)]
    for number in (0, 1, 3, 4, 5):
        told.supervisor.emit(EventKind.TASK_CANCELLED, stage="train", task=number, why="by hand")
    assert told.status.stages["train"].cancelled_groups("7") == [3]  # the other group has one that goes on


def test_a_worker_that_is_killed_ends_no_other_and_one_that_ended_before_is_not_begun_again(tmp_path, monkeypatch):
    config = write_config(tmp_path, **DATA, **TRAIN, cluster__train__cpus=1)
    told = Told(tmp_path / "runs", "train", tasks=5)
    told.job("7", range(5), sharing=5)
    told.folder.config.write_text(read_config(config).config.model_dump_json())
    with closing(Ledger(told.folder, "train-000003")) as ledger:
        ledger.emit(EventKind.TASK_FINISHED, stage="train", task=3, attempt=1, done=1, rejected={}, figures={})
    monkeypatch.setattr(launcher, "module_command", lambda *_: (sys.executable, "-c", WORKER))
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    before = {number: signal.getsignal(number) for number in launcher.FORWARDED}
    words = [str(told.folder.path), "train", "0", "--attempt", "1", "--beside", "0-4", "--sharing", "5"]
    arguments = argparse.Namespace(stage="train", task=0, attempt=1, beside="0-4", sharing=5)
    try:
        assert launcher.run_side_by_side(words, told.folder, arguments) == 137
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    logs = {path.name: path.read_text() for path in told.folder.logs.glob("*.out")}
    assert logs == {f"7_{number}.out": f"{number} 1\n" for number in (0, 1, 2, 4)}


@pytest.mark.parametrize("share", [2, 3, 8])
def test_the_parts_of_a_card_and_the_contexts_of_all_processes_fit_on_it(share):
    gpu = device("a100-40gb")
    part = CardSpec.of(gpu, 1, share=share)
    assert share * (part.budget_bytes + part.workspace_bytes + part.process_bytes) <= gpu.usable_bytes
    assert part.budget_bytes > 0.8 * CardSpec.of(gpu, 1).budget_bytes / share - part.process_bytes


@pytest.mark.parametrize(("taken_mib", "sharing"), [((100, 3700, 500, 500, 9), 4), ((9000,) * 9, 1), ((9,) * 20, 8)])
def test_auto_is_how_many_of_the_largest_fit(tmp_path, monkeypatch, taken_mib, sharing):
    monkeypatch.chdir(tmp_path)
    sweep = {"train__sweep": {"points": [{"train.seed": 1}, {"train.seed": 2}], "per_gpu": "auto"}}
    config = read_config(write_config(tmp_path, **DATA, **TRAIN, **sweep, cluster__train__gpus=1)).config
    card = {"held_bytes": 15 << 30, "process_bytes": 1 << 29}
    plans = [SimpleNamespace(**card, taken_bytes=mib << 20) for mib in taken_mib]
    monkeypatch.setattr(trainings, "known_plans", lambda _: plans)
    assert trainings.sharing_of(SimpleNamespace(config=config)) == sharing


def test_as_many_share_a_job_as_a_node_holds_and_more_are_refused_with_that_number(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    points = {"train__sweep__points": [{"train.seed": seed} for seed in range(8)]}
    stage, job = SimpleNamespace(name="train", sharing=lambda _: 7), replace(SHARED, tasks="0-7", cpus=1, gpus=0)
    with LocalExecutor(Machine(cpus=4, gpus=(), mem_bytes=8 << 30)) as executor:
        for per_gpu in ("auto", 7):
            config = read_config(
                write_config(tmp_path, **DATA, **TRAIN, **points, train__sweep__per_gpu=per_gpu)
            ).config
            project: Any = SimpleNamespace(config=config)
            if per_gpu == "auto":
                assert side_by_side(project, stage, executor, job).sharing == 4
                continue
            with pytest.raises(PlanInfeasible) as refused:
                side_by_side(project, stage, executor, job)
            assert refused.value.command.settings == ((PER_GPU, "4"),)


@pytest.mark.nightly
def test_a_plan_says_how_many_share_a_job(tmp_path, pipeline):
    project = make_project(
        tmp_path, 3, **EMBED, **TRAIN, cluster__executor="local", cluster__slots={"cpus": 4}, cluster__train__cpus=1
    )
    write_weights(tmp_path)
    project.finishes("graph")
    sweep = ("submit", "train", "--sweep", "train.seed=0:8", "--executor", "local", "--dry-run")
    refused = pipeline(*sweep, "--set", "train.sweep.per_gpu=5")
    assert refused.code == 5
    assert "train.sweep.per_gpu=4" in refused.err
    assert "4 a job" in pipeline(*sweep, "--set", "train.sweep.per_gpu=4").out
    ranks = pipeline(*sweep, "--set", "train.sweep.per_gpu=2", "--set", "cluster.train.ranks=2")
    assert (ranks.code, "train.sweep.per_gpu=1" in ranks.err) == (2, True)
