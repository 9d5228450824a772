"""What only the local executor can show: processes, slots, signals, and what becomes of them when it dies."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipeline.cluster import local as local_executor
from pipeline.cluster.job_spec import TaskState
from pipeline.cluster.local import LocalExecutor
from pipeline.errors import SubmissionRefused
from tests.cluster.conftest import SMALL, needs_forks, open_local
from tests.cluster.programs import (
    AWAIT,
    EATS,
    IGNORES_TERM,
    MIB,
    WAITS,
    as_daemon,
    await_true,
    finish,
    is_running,
    is_there,
    job_of,
    python,
    step_until,
    written_pid,
)
from tests.cluster.test_contract import in_pairs, most_at_once

if TYPE_CHECKING:
    from collections.abc import Iterator

MANY_FILES = 1500
WRITES_PID = "import os, pathlib, sys; pathlib.Path(sys.argv[1]).write_text(str(os.getpid()));"


def pid_of(executor: LocalExecutor, job: str) -> int:
    step_until(executor, lambda: executor.status([job])[0].state is TaskState.RUNNING)
    (pid,) = (executor.runner.running[piece].pid for piece in executor._jobs[job].tasks[0].pieces)
    return pid


class TestSlots:
    def test_are_filled_and_never_exceeded(self, local: LocalExecutor, tmp_path: Path) -> None:
        for number, asked in enumerate([{"cpus": 2}, {"ranks": 2}, {"gpus": 1}, {"mem_bytes": 400 * MIB}]):
            folder = tmp_path / str(number)
            folder.mkdir()
            tasks = finish(local, local.submit(in_pairs(folder, tasks=6, **asked)))
            assert [task.state for task in tasks] == [TaskState.COMPLETED] * 6, asked
            assert most_at_once(folder, 6) == 2, asked

    def test_are_free_again_whatever_became_of_the_task(self, local: LocalExecutor, tmp_path: Path) -> None:
        whole = {"cpus": 4, "gpus": 2, "mem_bytes": SMALL.mem_bytes}
        jobs = [
            local.submit(python(tmp_path, "pass", **whole)),
            local.submit(job_of("test", ("/no/such/program",), tasks=range(1), log_dir=str(tmp_path), **whole)),
            local.submit(python(tmp_path, "raise SystemExit(1)", **whole)),
            local.submit(python(tmp_path, "pass", **whole)),
        ]
        assert [task.state.ok for task in finish(local, *jobs)] == [True, False, False, True]

    def test_job_that_does_not_fit_lets_others_pass_and_no_memory_request_counts_nothing(
        self, local: LocalExecutor, tmp_path: Path
    ) -> None:
        local.submit(python(tmp_path, WAITS, cpus=3, mem_bytes=SMALL.mem_bytes))
        wide = local.submit(python(tmp_path, "pass", cpus=2))
        (narrow,) = finish(local, local.submit(python(tmp_path, "pass")))
        assert narrow.state is TaskState.COMPLETED
        assert local.status([wide])[0].state is TaskState.PENDING

    def test_that_this_machine_cannot_hold_are_refused_with_what_it_can(self, local: LocalExecutor) -> None:
        for asked, remedy in [
            ({"cpus": 3, "ranks": 2}, "cluster.test.cpus=2"),
            ({"ranks": 5}, "cluster.test.ranks=4"),
            ({"nodes": 2, "ranks": 1}, "cluster.test.nodes=1"),
        ]:
            with pytest.raises(SubmissionRefused) as refused:
                local.check(python(Path("logs"), "pass", **asked))
            assert remedy in refused.value.remedy, asked


class TestEnvironment:
    SHOWS = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'] or 'none', os.environ['OMP_NUM_THREADS'])"

    def test_tasks_at_the_same_time_see_different_gpus(self, local: LocalExecutor, tmp_path: Path) -> None:
        spec = in_pairs(tmp_path, tasks=2, gpus=1)
        program = f"{self.SHOWS}\n{spec.argv[3]}"
        tasks = finish(local, local.submit(python(tmp_path, program, str(tmp_path), tasks=2, gpus=1)))
        assert sorted(Path(task.stdout).read_text() for task in tasks) == ["0 1\n", "1 1\n"]

    def test_tasks_see_the_gpus_they_asked_for_and_threads_follow_the_cores(
        self, local: LocalExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
        monkeypatch.setenv("OMP_NUM_THREADS", "64")
        for asked, shown in [
            ({"cpus": 3}, "none 3"),
            ({"gpus": 2}, "0,1 1"),
            ({"cpus": 2, "ranks": 2, "gpus": 2}, "0,1 2"),
        ]:
            (task,) = finish(local, local.submit(python(tmp_path, self.SHOWS, **asked)))
            assert Path(task.stdout).read_text() == f"{shown}\n", asked


HIDES = {
    "a daemon": as_daemon(EATS),
    "a child with a clean environment in a session of its own": (
        f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {EATS!r}], env={{}}, start_new_session=True)"
    ),
    "an orphan with a clean environment": (
        f"import os, sys\nif os.fork() == 0:\n    if os.fork() == 0:\n"
        f"        os.execve(sys.executable, [sys.executable, '-c', {EATS!r}], {{}})\n    os._exit(0)\nos.wait()"
    ),
}


class TestMemory:
    LIMIT = 90 * MIB

    @pytest.mark.parametrize("hides", HIDES.values(), ids=HIDES.keys())
    def test_of_any_descendant_counts(self, local: LocalExecutor, tmp_path: Path, hides: str) -> None:
        (task,) = finish(local, local.submit(python(tmp_path, f"{hides}\n{WAITS}", mem_bytes=self.LIMIT)))
        assert (task.state, task.signal) == (TaskState.OUT_OF_MEMORY, signal.SIGKILL), Path(task.stderr).read_text()
        assert "90MiB" in task.reason

    def test_that_forked_workers_share_counts_once(self, local: LocalExecutor, tmp_path: Path) -> None:
        body = f"""{AWAIT}
import os, sys
shared = bytearray(os.urandom(1)) * (60 << 20)
for worker in range(4):
    if os.fork() == 0:
        await_file(sys.argv[1])
        os._exit(0)
await_file(sys.argv[1])
for worker in range(4):
    os.wait()
"""
        job = local.submit(python(tmp_path, body, str(tmp_path / "go"), mem_bytes=self.LIMIT))
        step_until(local, lambda: bool(local.runner.running))
        (running,) = local.runner.running.values()
        step_until(local, lambda: len(local.runner._table.of(running.mark)) == 5 and running.peak_bytes > 60 * MIB)
        for _ in range(5):
            running._measure_at = 0.0
            local.step(0.06)
        (tmp_path / "go").touch()
        (ended,) = finish(local, job)
        assert ended.state is TaskState.COMPLETED, ended.reason
        assert 60 * MIB < ended.peak_rss_bytes < self.LIMIT
        assert ended.cpu_s > 0

    def test_of_mapped_files_does_not_count(self, local: LocalExecutor, tmp_path: Path) -> None:
        (tmp_path / "large").write_bytes(bytes(120 * MIB))
        body = f"""{AWAIT}
import mmap, sys
file = open(sys.argv[1], 'rb')
mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
total = sum(mapped[::4096])
print('read', flush=True)
await_file(sys.argv[2])
"""
        job = local.submit(python(tmp_path, body, str(tmp_path / "large"), str(tmp_path / "go"), mem_bytes=self.LIMIT))
        out = Path(local.status([job])[0].stdout)
        step_until(local, lambda: out.exists() and out.read_text() == "read\n")
        local.runner._look_at = 0.0
        local.step(0.1)
        (tmp_path / "go").touch()
        assert finish(local, job)[0].state is TaskState.COMPLETED

    def test_kill_of_the_kernel_is_told_from_others(
        self, local: LocalExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for body in ("os.kill(os.getpid(), 9)", "sys.exit(137)"):
            spec = python(tmp_path, f"import os, sys; {body}")
            assert finish(local, local.submit(spec))[0].state is TaskState.FAILED
            kills = iter([3, 4])
            with monkeypatch.context() as patched:
                patched.setattr(local_executor, "count_oom_kills", lambda kills=kills: next(kills))
                assert finish(local, local.submit(spec))[0].state is TaskState.OUT_OF_MEMORY


class TestEnding:
    def test_has_a_grace(self, local: LocalExecutor, tmp_path: Path) -> None:
        body = """
import pathlib, signal, sys
def end(*_):
    print('in order', flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print('ready', flush=True)
signal.pause()
"""
        job = local.submit(python(tmp_path, body))
        out = Path(local.status([job])[0].stdout)
        step_until(local, lambda: out.exists() and out.read_text() == "ready\n")
        local.cancel([job])
        (task,) = finish(local, job)
        assert (task.state, task.exit_code) == (TaskState.CANCELLED, 0)
        assert out.read_text() == "ready\nin order\n"

    def test_of_the_first_process_ends_the_daemons_it_left(self, local: LocalExecutor, tmp_path: Path) -> None:
        pid_file = tmp_path / "pid"
        body = f"{AWAIT}\n{as_daemon(WRITES_PID + IGNORES_TERM)}\nimport sys; await_file(sys.argv[1])"
        (task,) = finish(local, local.submit(python(tmp_path, body, str(pid_file))))
        assert task.state is TaskState.COMPLETED
        await_true(lambda: written_pid(pid_file) == 0 or not is_running(written_pid(pid_file)))

    def test_is_noticed_in_a_process_with_more_than_1024_open_files(self, local: LocalExecutor, tmp_path: Path) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if hard != resource.RLIM_INFINITY and hard < MANY_FILES:
            pytest.skip(f"this process may open {hard} files")
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, MANY_FILES), hard))
        opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(MANY_FILES - 100)]
        try:
            (task,) = finish(local, local.submit(python(tmp_path, "pass")))
        finally:
            for descriptor in opened:
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert task.state is TaskState.COMPLETED

    def test_whose_status_somebody_else_took_is_unknown(self, tmp_path: Path) -> None:
        with open_local() as local:
            job = local.submit(python(tmp_path, "pass"))
            os.waitpid(pid_of(local, job), 0)
            local.step(1)
            (task,) = local.status([job])
        assert (task.state, task.exit_code) == (TaskState.UNKNOWN, None)


class TestSignals:
    def test_ctrl_c_in_a_step_leaves_everything_in_order(self, local: LocalExecutor, tmp_path: Path) -> None:
        interrupts = f"import os, signal; os.kill({os.getpid()}, signal.SIGINT)"
        jobs = [local.submit(python(tmp_path, interrupts)), local.submit(python(tmp_path, "pass", tasks=5))]
        with pytest.raises(KeyboardInterrupt):
            finish(local, *jobs)
        assert [task.state for task in finish(local, *jobs)] == [TaskState.COMPLETED] * 6

    def test_ctrl_c_in_the_terminal_does_not_reach_the_tasks(self, local: LocalExecutor, tmp_path: Path) -> None:
        pid = pid_of(local, local.submit(python(tmp_path, WAITS)))
        assert os.getsid(pid) == os.getpgid(pid) == pid != os.getsid(0)


class TestClosing:
    def test_leaves_neither_processes_nor_zombies(self, tmp_path: Path) -> None:
        with LocalExecutor(SMALL, grace_s=0.1) as executor:
            waits = executor.submit(python(tmp_path, WAITS))
            stubborn = executor.submit(python(tmp_path, IGNORES_TERM))
            pids = [pid_of(executor, waits), pid_of(executor, stubborn), executor.runner._guard._process.pid]
        assert not any(map(is_there, pids))
        assert {task.state for task in executor.status([waits, stubborn])} == {TaskState.CANCELLED}

    @pytest.mark.parametrize("begins_s", [0, 60])
    def test_a_second_ctrl_c_takes_the_grace_away(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begins_s: float
    ) -> None:
        """This includes a Ctrl-C that arrives while the tasks are being cancelled."""
        executor = LocalExecutor(SMALL, grace_s=3600)
        tells = executor.cancel
        monkeypatch.setattr(executor, "cancel", lambda jobs: (tells(jobs), time.sleep(begins_s)))
        body = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print('ready', flush=True)
signal.sigwait({signal.SIGTERM})
os.kill(os.getppid(), signal.SIGINT)
while True:
    signal.pause()
"""
        job = executor.submit(python(tmp_path, body))
        pid = pid_of(executor, job)
        out = Path(executor.status([job])[0].stdout)
        step_until(executor, lambda: out.read_text() == "ready\n")
        with pytest.raises(KeyboardInterrupt):
            executor.close()
        assert not is_there(pid)
        assert executor.status([job])[0].signal == signal.SIGKILL


FOLLOWER = """
import sys
from pathlib import Path
from tests.cluster.conftest import EXECUTORS
from tests.cluster.programs import job_of
name, program, pid_file = sys.argv[1:]
executor = EXECUTORS[name]()
executor.submit(job_of("test", (sys.executable, "-S", "-c", program, pid_file), range(1), str(Path(pid_file).parent)))
while True:
    executor.step(1)
"""


@pytest.mark.fault
class TestDeathOfTheExecutor:
    @pytest.fixture(params=["local", needs_forks("forking")])
    def follower(self, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
        """A process with a task that ignores SIGTERM and has such a daemon; both write down their numbers."""
        program = f"{as_daemon(WRITES_PID + IGNORES_TERM)}\nsys.argv[1] += '.first'\n{WRITES_PID}{IGNORES_TERM}"
        program = f"import sys\n{program}"
        arguments = [sys.executable, "-c", FOLLOWER, request.param, program, str(tmp_path / "pid")]
        with subprocess.Popen(arguments, cwd=Path(__file__).parents[2], stderr=subprocess.DEVNULL) as process:
            yield process
            process.kill()

    @pytest.mark.nightly
    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
    def test_leaves_no_process(self, follower: subprocess.Popen[bytes], tmp_path: Path, number: int) -> None:
        files = [tmp_path / "pid", tmp_path / "pid.first"]
        await_true(lambda: all(map(written_pid, files)))
        pids = [written_pid(path) for path in files]
        assert all(map(is_running, pids))
        follower.send_signal(number)
        follower.wait()
        await_true(lambda: not any(map(is_running, pids)))
