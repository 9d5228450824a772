"""What accounting and queue of a real cluster have on tasks that ended in every way, and what is judged of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.cluster import slurm_commands
from pipeline.cluster.accounting import AccountedTask, Accounting, AccountingLook
from pipeline.cluster.job_spec import TaskState
from pipeline.cluster.slurm_words import NEVER
from pipeline.cluster.verdict import Cause, Word, judge_attempt
from tests.testkit.cluster import Cluster

pytestmark = pytest.mark.slurm

MIB = 1 << 20
BEGAN = Word(started=True)
EATS = "srun python3 -c 'import time; held = b\"x\" * (400 << 20); time.sleep(60)'"
SLEEPS = "srun sleep 60"
TIMEOUT_S = 10.0


class Jobs:
    """Submits jobs of one line to the cluster and looks at them."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self._folder, self._since = cluster, folder, time.time()
        self.ours: list[str] = []

    def submit(self, script: str, *options: str) -> str:
        logs = [f"--output={self._folder}/%j.out", "--mem=100M"]
        if any(option.startswith("--array") for option in options):
            logs[0] = f"--output={self._folder}/%A_%a.out"
        done = self.cluster.run("sbatch", "--parsable", *logs, *options, f"--wrap={script}")
        assert done.returncode == 0, done.stderr
        self.ours.append(done.stdout.strip())
        return self.ours[-1]

    def look(self, *jobs: str) -> AccountingLook:
        return Accounting(slurm_commands.run_command, timeout_s=TIMEOUT_S).look(
            dict.fromkeys(jobs, "wrap"), self._since
        )

    def until(self, job: str, true: Callable[[dict[str, AccountedTask]], bool]) -> dict[str, AccountedTask]:
        """Look until the rows of a job are so."""
        rows: dict[str, AccountedTask] = {}

        def is_so() -> bool:
            look = self.look(job)
            assert look.trouble == ""
            rows.clear()
            rows.update(look.rows)
            return true(rows)

        self.cluster.until(is_so, f"what is wanted of job {job}", 90.0)
        return rows

    def ended(self, job: str, tasks: int = 0) -> dict[str, AccountedTask]:
        """Return the rows of a job whose tasks have all ended; an array has as many."""
        return self.until(
            job, lambda rows: len(rows) == max(tasks, 1) and all(row.state.ended for row in rows.values())
        )

    def wait_until(self, name: str, state: TaskState) -> None:
        """Wait until the queue has a task in a state."""
        array = name.partition("_")[0]

        def is_so() -> bool:
            queued = slurm_commands.queue({array: "wrap"}).get(name)
            return queued is not None and queued.state is state

        self.cluster.until(is_so, f"{name} to be {state.value}", 60.0)

    def cause_of(self, row: AccountedTask, word: Word = BEGAN) -> Cause:
        """Judge a task by its row and its log."""
        log = self._folder / f"{row.job}.out"
        text = log.read_text() if log.exists() else ""
        return judge_attempt(row.status(0, str(log), str(log)), word, text, asked_bytes=row.asked_mem_bytes).cause


@pytest.fixture
def jobs(cluster: Cluster, tmp_path: Path) -> Iterator[Jobs]:
    jobs = Jobs(cluster, tmp_path)
    yield jobs
    if jobs.ours:
        cluster.run("scancel", *jobs.ours)


@pytest.mark.nightly
def test_the_task_of_an_array_that_ate_too_much_is_the_one_out_of_memory(jobs: Jobs) -> None:
    job = jobs.submit(f"if [ $SLURM_ARRAY_TASK_ID = 1 ]; then {EATS}; fi", "--array=0-2")
    rows = jobs.ended(job, 3)
    assert [rows[f"{job}_{task}"].state.value for task in range(3)] == ["COMPLETED", "OUT_OF_MEMORY", "COMPLETED"]
    eaten = rows[f"{job}_1"]
    assert eaten.asked_mem_bytes == 100 * MIB
    assert (eaten.peak_rss_bytes or 0) <= 101 * MIB
    assert "step 0 ran out of memory" in eaten.why
    assert jobs.cause_of(eaten) is Cause.HOST_OOM
    assert jobs.cause_of(rows[f"{job}_0"], Word(started=True, finished=True)) is Cause.DONE
    assert jobs.cause_of(rows[f"{job}_0"]) is Cause.LOST, "Slurm's word alone is not enough"


ENDINGS = {
    "exit 3": (3, None, Cause.REFUSED),
    "exit 75": (75, None, Cause.INTERRUPTED),
    "exit 1": (1, None, Cause.FAILED),
    "kill -SEGV $$": (None, 11, Cause.CRASHED),
    "kill -KILL $$": (None, 9, Cause.CRASHED),
    "kill -TERM $$": (None, 15, Cause.INTERRUPTED),
}


@pytest.mark.nightly
@pytest.mark.parametrize("ending", ENDINGS)
def test_how_a_worker_ended_is_told_by_its_step(jobs: Jobs, ending: str) -> None:
    job = jobs.submit(f"srun bash -c '{ending}'")
    (row,) = jobs.ended(job).values()
    code, killed_by, cause = ENDINGS[ending]
    assert (row.state, row.exit_code, row.signal) == (TaskState.FAILED, code, killed_by)
    assert jobs.cause_of(row) is cause


@pytest.mark.nightly
@pytest.mark.parametrize("number", [11, 6])
def test_without_a_step_an_exit_code_above_128_still_reads_as_the_signal(jobs: Jobs, number: int) -> None:
    (row,) = jobs.ended(jobs.submit(f"exit {128 + number}")).values()
    assert row.exit_code in (number, 128 + number), "22.05 takes 128 off"
    assert jobs.cause_of(row) is Cause.CRASHED


@pytest.mark.nightly
def test_a_failed_worker_is_seen_behind_a_script_that_completed(jobs: Jobs) -> None:
    (row,) = jobs.ended(jobs.submit("srun bash -c 'exit 3'; true")).values()
    assert (row.state, row.exit_code) == (TaskState.COMPLETED, 3)
    assert jobs.cause_of(row) is Cause.REFUSED


@pytest.mark.nightly
def test_a_log_that_cannot_be_opened_is_told(jobs: Jobs, tmp_path: Path) -> None:
    (row,) = jobs.ended(jobs.submit("true", f"--output={tmp_path}/not there/out")).values()
    assert (row.state, jobs.cause_of(row)) == (TaskState.FAILED, Cause.NODE)


@pytest.mark.nightly
def test_tasks_of_an_array_that_were_cancelled_while_they_ran_or_waited_are_told_apart(jobs: Jobs) -> None:
    job = jobs.submit(f"if [ $SLURM_ARRAY_TASK_ID = 0 ]; then {SLEEPS}; fi", "--array=0-3%1")
    jobs.wait_until(f"{job}_0", TaskState.RUNNING)
    queued = slurm_commands.queue({job: "wrap"})
    assert queued[f"{job}_2"].waits_for == "its array already runs as many tasks as allowed"
    jobs.cluster.run("scancel", f"{job}_2")
    jobs.cluster.run("scancel", f"{job}_0")
    rows = jobs.until(
        job, lambda rows: {name for name, row in rows.items() if row.state.ok} >= {f"{job}_1", f"{job}_3"}
    )
    assert rows[f"{job}_0"].state is TaskState.CANCELLED
    assert rows[f"{job}_0"].cancelled_by == 0
    assert jobs.cause_of(rows[f"{job}_0"]) is Cause.CANCELLED
    assert jobs.look(job).never_began(job, 2) == (f"{job}_2" not in rows)


@pytest.mark.nightly
def test_the_waiting_rest_of_an_array_is_cancelled_task_by_task(jobs: Jobs) -> None:
    job = jobs.submit(SLEEPS, "--array=0-3%1")
    jobs.wait_until(f"{job}_0", TaskState.RUNNING)
    jobs.cluster.run("scancel", job)
    rows = jobs.ended(job, 4)
    assert {row.state for row in rows.values()} == {TaskState.CANCELLED}


@pytest.mark.nightly
def test_a_requeued_task_has_begun_again(jobs: Jobs) -> None:
    job = jobs.submit(f"if [ ${{SLURM_RESTART_COUNT:-0}} = 0 ]; then {SLEEPS}; fi")
    jobs.wait_until(job, TaskState.RUNNING)
    jobs.cluster.run("scontrol", "requeue", job)
    rows = jobs.until(job, lambda rows: job in rows and rows[job].state.ok)
    assert rows[job].restarts == 1
    assert [state for state, _ in rows[job].before] == [TaskState.REQUEUED]


@pytest.mark.nightly
def test_a_task_on_a_node_that_died_shows_which_node(jobs: Jobs) -> None:
    node = sorted(jobs.cluster.nodes)[-1]
    job = jobs.submit(SLEEPS, "--no-requeue", f"--nodelist={node}")
    jobs.until(job, lambda rows: job in rows and "0" in [step.name for step in rows[job].steps])
    jobs.cluster.kill_node(node)
    try:
        (row,) = jobs.ended(job).values()
    finally:
        jobs.cluster.revive_node(node)
    assert (row.state, row.node) == (TaskState.NODE_FAIL, node)
    assert jobs.cause_of(row) is Cause.NODE


@pytest.mark.nightly
def test_a_job_that_waits_for_a_failed_one_is_held(jobs: Jobs) -> None:
    failing = jobs.submit("sleep 2; false")
    job = jobs.submit("true", f"--dependency=afterok:{failing}")
    jobs.ended(failing)
    jobs.cluster.until(
        lambda: slurm_commands.queue({job: "wrap"})[job].waits_for.startswith(NEVER), f"job {job} to be stuck"
    )
    queued = slurm_commands.queue({job: "wrap"})[job]
    row = jobs.until(job, lambda rows: job in rows)[job]
    assert row.state is queued.state is TaskState.PENDING
    assert queued.waits_for == "will never start: a job that it depends on failed"


@pytest.mark.nightly
def test_a_job_nobody_knows_has_no_row(jobs: Jobs) -> None:
    look = jobs.look("99999999")
    assert (look.rows, look.trouble) == ({}, "")


@pytest.mark.nightly
def test_a_long_list_of_waiting_tasks_is_whole(jobs: Jobs) -> None:
    size = int(jobs.cluster.run("scontrol", "show", "config").stdout.split("MaxArraySize")[1].split()[1])
    job = jobs.submit("true", f"--array=0-{size - 1}", "--hold")
    rows = jobs.until(job, lambda rows: len(rows) == size)
    assert {row.state for row in rows.values()} == {TaskState.PENDING}
    assert slurm_commands.queue({job: "wrap"}).keys() == rows.keys()


@pytest.mark.nightly
def test_an_accounting_that_is_down_is_trouble_and_told(jobs: Jobs) -> None:
    job = jobs.submit("true")
    jobs.ended(job)
    jobs.cluster.stop_accounting()
    try:
        look = jobs.look(job)
    finally:
        jobs.cluster.start_accounting()
    assert look.rows == {}
    assert look.trouble
    assert jobs.ended(job)[job].state is TaskState.COMPLETED
