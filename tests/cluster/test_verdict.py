"""One verdict from the scheduler's state, the worker's word and the end of the log, whichever of them are wrong."""

from __future__ import annotations

import itertools
import re
import signal
from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from pipeline.cluster.job_spec import TaskState, TaskStatus
from pipeline.cluster.local import LocalExecutor
from pipeline.cluster.verdict import GO_ON, PEER_LOST, RESTARTS, Cause, TaskVerdict, Word, judge_attempt
from tests.cluster.programs import EATS, MIB, finish, python

SILENT = Word()
BEGAN = Word(started=True, done=3)
FINISHED = Word(started=True, finished=True, exit_code=0, done=9)
STOPPED = Word(started=True, exit_code=GO_ON, what="told to end", done=3)
REFUSED = Word(started=True, exit_code=3, what="no chain A in 1abc.pdb")
RAISED = Word(started=True, exit_code=1, what="ValueError: 3")
NO_GPU_LEFT = Word(started=True, exit_code=7, what="CUDA out of memory at a batch of 1", kind="gpu_oom")
DISK_FULL = Word(started=True, exit_code=7, what="quota exceeded under the cache", kind="disk_full")
STRANGE = Word(started=True, exit_code=99, what="?", kind="a kind nobody knows")
WORDS = (SILENT, BEGAN, FINISHED, STOPPED, REFUSED, RAISED, NO_GPU_LEFT, DISK_FULL, STRANGE)

OOM_LOG = """\
slurmstepd-n1: error: Detected 1 oom-kill event(s) in StepId=4.0. Some of your processes may have been killed by the cgroup out-of-memory handler.
srun: error: n1: task 0: Out Of Memory
"""  # noqa: E501 - as it is printed
LIMIT_LOG = "slurmstepd-n1: error: *** JOB 12 ON n1 CANCELLED AT 2026-11-21T22:52:19 DUE TO TIME LIMIT ***\n"
PREEMPTION_LOG = "slurmstepd-n1: error: *** JOB 12 ON n1 CANCELLED AT 2026-11-21T22:52:19 DUE TO PREEMPTION ***\n"
NODE_LOG = (
    "slurmstepd-n1: error: *** JOB 12 ON n1 CANCELLED AT 2026-11-21T22:52:19 DUE TO NODE FAILURE, SEE SLURMCTLD ***\n"
)
CANCEL_LOG = "slurmstepd-n3: error: *** JOB 28 ON n3 CANCELLED AT 2026-11-21T22:52:19 ***\n"
GPU_LOG = """\
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.
srun: error: n1: task 0: Exited with exit code 1
"""
DISK_LOG = "OSError: [Errno 122] Disk quota exceeded\n"
FULL_LOG = "OSError: [Errno 28] No space left on device\n"
SEGV_LOG = "srun: error: n1: task 0: Segmentation fault\n"
BUS_LOG = "srun: error: n1: task 0: Bus error\n"
SLURM_LOGS = (OOM_LOG, LIMIT_LOG, PREEMPTION_LOG, NODE_LOG, CANCEL_LOG, SEGV_LOG)
LOGS = ("", "all is well\n", *SLURM_LOGS, GPU_LOG, DISK_LOG, FULL_LOG)
ENDINGS: tuple[tuple[int | None, int | None], ...] = (
    (None, None),
    (0, None),
    *((code, None) for code in (1, 2, 3, 4, 5, 6, 7, 9, 11, 12, 15, GO_ON, 130, 137, 139, 143, 255)),
    *((None, number) for number in (1, 2, 6, 7, 9, 10, 11, 12, 15, 53, 64, 125)),
)


def ended(state: TaskState, code: int | None = None, killed_by: int | None = None, **facts: object) -> TaskStatus:
    return TaskStatus("12", 3, state, "12_3.out", "12_3.err", code, killed_by, **facts)  # type: ignore[arg-type]


def cause_of(status: TaskStatus, word: Word = SILENT, log: str = "", asked_bytes: int | None = None) -> Cause:
    return judge_attempt(status, word, log, asked_bytes=asked_bytes).cause


PERHAPS = (TaskState.UNKNOWN, TaskState.COMPLETING)


def test_every_combination_gets_a_verdict_with_a_reason_and_no_success_is_made_up() -> None:
    for state, word, (code, killed_by), log in itertools.product(TaskState, WORDS, ENDINGS, LOGS):
        found = judge_attempt(ended(state, code, killed_by), word, log, asked_bytes=200 * MIB)
        assert found.reason or found.cause is Cause.DONE
        assert (found.cause is Cause.DONE) == (word.finished and (state.ended or state in PERHAPS)), found


def test_a_task_that_has_not_ended_has_no_verdict_on_its_end() -> None:
    states = [state for state in TaskState if not state.ended and state is not TaskState.UNKNOWN]
    for state, word in itertools.product(states, WORDS):
        if not (word.finished and state is TaskState.COMPLETING):
            assert cause_of(ended(state), word, OOM_LOG) in (Cause.ACTIVE, Cause.HELD), (state, word)


class TestTheScheduler:
    def test_is_believed_where_it_knows(self) -> None:
        for cause, states in {
            Cause.HOST_OOM: [TaskState.OUT_OF_MEMORY],
            Cause.TIMEOUT: [TaskState.TIMEOUT, TaskState.DEADLINE],
            Cause.PREEMPTED: [TaskState.PREEMPTED],
            Cause.NODE: [TaskState.NODE_FAIL, TaskState.BOOT_FAIL, TaskState.LAUNCH_FAILED, TaskState.RECONFIG_FAIL],
            Cause.CANCELLED: [TaskState.CANCELLED, TaskState.REVOKED],
        }.items():
            for state, word in itertools.product(states, (SILENT, BEGAN, RAISED)):
                assert cause_of(ended(state), word) is cause, (state, word)

    def test_is_not_believed_against_the_worker(self) -> None:
        assert cause_of(ended(TaskState.COMPLETED, 0), BEGAN) is Cause.LOST
        assert cause_of(ended(TaskState.COMPLETED, 1), BEGAN) is Cause.FAILED
        assert cause_of(ended(TaskState.COMPLETED, 0), REFUSED) is Cause.REFUSED
        assert cause_of(ended(TaskState.FAILED, 1), FINISHED, GPU_LOG) is Cause.DONE

    def test_that_has_lost_its_accounts_leaves_it_to_the_worker(self) -> None:
        for word, cause in [
            (FINISHED, Cause.DONE),
            (STOPPED, Cause.INTERRUPTED),
            (REFUSED, Cause.REFUSED),
            (NO_GPU_LEFT, Cause.GPU_OOM),
            (BEGAN, Cause.LOST),
            (SILENT, Cause.LOST),
        ]:
            assert cause_of(ended(TaskState.UNKNOWN), word) is cause, word

    def test_holding_a_task_is_said_to_hold_it(self) -> None:
        held = ended(TaskState.PENDING, waits_for="will never start: a job that it depends on failed")
        assert cause_of(held) is cause_of(ended(TaskState.REQUEUE_HOLD)) is Cause.HELD
        assert cause_of(ended(TaskState.PENDING, waits_for="the requested resources are in use")) is Cause.ACTIVE

    def test_that_could_not_open_the_log_blames_the_node(self) -> None:
        found = judge_attempt(ended(TaskState.FAILED, None, 53), SILENT, "")
        assert found.cause is Cause.NODE
        assert "12_3.out" in found.reason


class TestMemory:
    def test_at_its_limit_is_the_least_that_was_needed_not_what_was_sampled(self) -> None:
        status = ended(TaskState.OUT_OF_MEMORY, None, 9, peak_rss_bytes=118 * MIB)
        found = judge_attempt(status, BEGAN, OOM_LOG, asked_bytes=200 * MIB)
        assert (found.cause, found.peak_bytes, found.node) == (Cause.HOST_OOM, 200 * MIB, "n1")
        refused = replace(status, state=TaskState.FAILED, signal=None, exit_code=1)
        found = judge_attempt(refused, BEGAN, "MemoryError\n", asked_bytes=200 * MIB)
        assert (found.cause, found.peak_bytes) == (Cause.HOST_OOM, 118 * MIB), "it asked for something huge"

    def test_is_seen_in_the_log_where_the_state_hides_it(self) -> None:
        states = (TaskState.FAILED, TaskState.COMPLETED, TaskState.UNKNOWN, TaskState.TIMEOUT)
        for state, log in itertools.product(states, OOM_LOG.splitlines()):
            assert cause_of(ended(state, 1), BEGAN, log) is Cause.HOST_OOM, (state, log)
        for log in ("MemoryError\n", "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory\n"):
            assert cause_of(ended(TaskState.FAILED, 1), BEGAN, log) is Cause.HOST_OOM, log

    def test_is_not_believed_of_a_line_that_the_task_itself_printed(self) -> None:
        for line in OOM_LOG.splitlines():
            assert cause_of(ended(TaskState.FAILED, 1), BEGAN, f"my log says: {line}\n") is Cause.FAILED
            assert cause_of(ended(TaskState.FAILED, 1), BEGAN, f" 0: {line}\n") is Cause.HOST_OOM

    def test_of_the_gpu_is_told_apart_by_word_and_by_log_unless_it_was_survived(self) -> None:
        failed = ended(TaskState.FAILED, 1)
        assert cause_of(failed, NO_GPU_LEFT) is cause_of(failed, BEGAN, GPU_LOG) is Cause.GPU_OOM
        log = GPU_LOG + "a smaller batch\n" * 40 + "ValueError: 3\n"
        assert cause_of(failed, BEGAN, log) is Cause.FAILED

    def test_is_suspected_behind_a_sigkill_only_near_the_limit(self) -> None:
        near, far = (ended(TaskState.FAILED, None, 9, peak_rss_bytes=peak * MIB) for peak in (190, 118))
        assert cause_of(near, BEGAN, asked_bytes=200 * MIB) is Cause.HOST_OOM
        assert cause_of(far, BEGAN, asked_bytes=200 * MIB) is Cause.CRASHED
        assert cause_of(near, BEGAN) is Cause.CRASHED


class TestTime:
    def test_that_ran_out_is_seen_in_the_log_where_the_state_hides_it(self) -> None:
        for state in (TaskState.FAILED, TaskState.CANCELLED, TaskState.UNKNOWN):
            assert cause_of(ended(state, None, 15), BEGAN, LIMIT_LOG) is Cause.TIMEOUT, state

    def test_that_was_going_to_run_out_only_interrupts(self) -> None:
        for code in (GO_ON, 128 + signal.SIGTERM, 128 + signal.SIGUSR2):
            for word in (Word(started=True, exit_code=code), BEGAN):
                assert cause_of(ended(TaskState.FAILED, code), word) is Cause.INTERRUPTED, (code, word)
        for code in (signal.SIGTERM, signal.SIGUSR2):  # sacct took 128 off, or tells the signal
            assert cause_of(ended(TaskState.FAILED, code), BEGAN) is Cause.INTERRUPTED, code
            assert cause_of(ended(TaskState.FAILED, None, code), SILENT) is Cause.INTERRUPTED, code

    def test_at_the_limit_asks_for_more_only_when_nothing_was_done(self) -> None:
        idle = Word(started=True, exit_code=GO_ON)
        assert cause_of(ended(TaskState.TIMEOUT), STOPPED) is Cause.INTERRUPTED
        assert cause_of(ended(TaskState.TIMEOUT), idle) is Cause.TIMEOUT


class TestSignals:
    def test_that_nobody_sent_are_crashes(self) -> None:
        for name in ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL"):
            number = int(signal.Signals[name])
            for status in (ended(TaskState.FAILED, None, number), ended(TaskState.FAILED, 128 + number)):
                found = judge_attempt(status, BEGAN, "")
                assert (found.cause, name in found.reason) == (Cause.CRASHED, True)

    def test_of_which_sacct_left_a_small_code_are_crashes_unless_the_worker_meant_the_code(self) -> None:
        aborted = ended(TaskState.FAILED, int(signal.SIGABRT))
        assert cause_of(aborted, BEGAN) is Cause.CRASHED
        assert cause_of(aborted, Word(started=True, exit_code=6, what="refused")) is Cause.REFUSED

    def test_are_read_from_sruns_message_where_no_accounting_tells(self) -> None:
        for log in (SEGV_LOG, BUS_LOG):
            assert cause_of(ended(TaskState.UNKNOWN), BEGAN, log) is Cause.CRASHED
        for how, cause in {
            "Killed": Cause.CRASHED,
            "Terminated": Cause.INTERRUPTED,
            "Exited with exit code 3": Cause.REFUSED,
        }.items():
            log = f"epoch 2\nsrun: error: n1: task 0: {how}\nsrun: Force Terminated StepId=520.0\n"
            for state in (TaskState.FAILED, TaskState.UNKNOWN):
                assert cause_of(ended(state, None, reason="NonZeroExitCode"), BEGAN, log) is cause, (state, how)

    def test_kill_without_a_sign_of_memory_is_a_crash_with_figures(self) -> None:
        found = judge_attempt(ended(TaskState.FAILED, 137, peak_rss_bytes=50 * MIB), BEGAN, "", asked_bytes=200 * MIB)
        assert found.cause is Cause.CRASHED
        assert re.search("200MiB.* 50MiB", found.reason)


class TestRanks:
    """Of several processes that ended for the sake of one, that one counts."""

    def test_that_were_taken_along_blame_the_first(self) -> None:
        others = "".join(f"{rank}: rank 5 is gone\n" for rank in (0, 1, 2, 3, 4, 6, 7) for _ in range(9))
        words = (BEGAN, Word(started=True, exit_code=PEER_LOST, what="rank 5 is gone"))
        for how, said, cause, word_of_it in [
            ("Killed", "", Cause.CRASHED, "SIGKILL"),
            ("Terminated", "", Cause.INTERRUPTED, "SIGTERM"),
            ("Segmentation fault (core dumped)", "", Cause.CRASHED, "Segmentation fault"),
            ("Exited with exit code 3", "", Cause.REFUSED, "3"),
            ("Exited with exit code 1", "5: ValueError: 3\n", Cause.FAILED, "ValueError: 3"),
            ("Exited with exit code 1", "5: CUDA out of memory\n", Cause.GPU_OOM, "CUDA out of memory"),
            ("Exited with exit code 1", "15: CUDA out of memory\n", Cause.FAILED, "1"),
            ("Exited with exit code 1", "05: MemoryError\n", Cause.HOST_OOM, "MemoryError"),
        ]:
            log = f"{said}{others}srun: error: n1: tasks 0-3: Exited with exit code 76\n"
            log += f"srun: error: n2: task 4: Exited with exit code 75\nsrun: error: n2: task 5: {how}\n"
            log += "srun: error: n2: tasks 4,6-7: Exited with exit code 76\n"
            for word in words:
                found = judge_attempt(ended(TaskState.FAILED, PEER_LOST, node="n[1-2]"), word, log)
                assert (found.cause, found.node) == (cause, "n2"), (how, said, word)
                assert "rank 5 on n2" in found.reason
                assert word_of_it in found.reason

    def test_that_hung_crash_and_what_the_log_says_above_a_restart_is_over(self) -> None:
        word = Word(started=True, exit_code=PEER_LOST, what="rank 1 made no progress")
        hung = "srun: error: n2: task 1: Exited with exit code 77\n"
        assert judge_attempt(ended(TaskState.FAILED, 77), word, hung).cause is Cause.CRASHED
        log = f"srun: error: n1: task 3: Killed\n{RESTARTS}rank 3 on n1\n{hung}"
        assert judge_attempt(ended(TaskState.FAILED, 77), word, log).node == "n2"

    def test_that_near_their_limit_lost_one_lost_it_to_memory(self) -> None:
        log = "srun: error: n2: task 1: Killed\nsrun: error: n2: task 0: Exited with exit code 76\n"
        status = ended(TaskState.FAILED, PEER_LOST, peak_rss_bytes=190 * MIB)
        assert cause_of(status, BEGAN, log, 200 * MIB) is Cause.HOST_OOM

    def test_that_srun_ended_for_the_first_blame_it(self) -> None:
        log = "srun: error: n1: task 1: Bus error\nsrun: First task exited 60s ago\nsrun: error: n1: task 0: Killed\n"
        found = judge_attempt(ended(TaskState.FAILED, None, signal.SIGKILL), BEGAN, log)
        assert (found.cause, found.node) == (Cause.CRASHED, "n1")
        assert "rank 1" in found.reason

    def test_of_whom_nobody_tells_which_was_lost_crashed(self) -> None:
        word = Word(started=True, exit_code=76, what="rank 5 is gone")
        found = judge_attempt(ended(TaskState.FAILED, PEER_LOST), word, "")
        assert (found.cause, found.reason, found.node) == (Cause.CRASHED, "rank 5 is gone", "")
        assert cause_of(ended(TaskState.FAILED, PEER_LOST)) is Cause.CRASHED

    def test_on_a_node_that_failed_name_it(self) -> None:
        log = "srun: error: Node failure on n2\n" + NODE_LOG
        found = judge_attempt(ended(TaskState.NODE_FAIL, node="n[1-3]"), BEGAN, log)
        assert (found.cause, found.node) == (Cause.NODE, "n2")

    @given(st.text(st.sampled_from("srun: error: n1: tasks 0-3,7: Killed\n-, "), max_size=60))
    def test_in_a_garbled_log_never_raise(self, noise: str) -> None:
        log = f"srun: error: n1: tasks 1{noise}: Killed\nsrun: error: n1: task {noise}: Aborted\n"
        assert judge_attempt(ended(TaskState.FAILED, PEER_LOST), BEGAN, log).reason


class TestTheWorker:
    def test_that_refuses_is_believed(self) -> None:
        for code in range(2, 7):
            word = Word(started=True, exit_code=code, what="its own words")
            cause = Cause.DAMAGE if code == 4 else Cause.REFUSED
            assert judge_attempt(ended(TaskState.FAILED, code), word, "") == TaskVerdict(cause, "its own words")

    def test_that_did_not_start_and_ended_with_an_error_blames_its_node_and_is_quoted(self) -> None:
        said = "slurm_script: line 14: module: command not found\nsrun: error: n1: task 0: Exited with exit code 127\n"
        for code in (1, 2, 127, None):
            found = judge_attempt(ended(TaskState.FAILED, code), SILENT, said)
            assert (found.cause, "module: command not found" in found.reason) == (Cause.NODE, True), code
        assert cause_of(ended(TaskState.FAILED, 139), SILENT) is Cause.NODE
        for log, cause in ((OOM_LOG, Cause.HOST_OOM), (FULL_LOG, Cause.DISK)):
            assert cause_of(ended(TaskState.FAILED, 1), SILENT, log) is cause
        log = "srun: error: n2: task 1: Exited with exit code 127\nsrun: error: n1: task 0: Exited with exit code 76\n"
        found = judge_attempt(ended(TaskState.FAILED, 127), Word(started=True, exit_code=PEER_LOST), log)
        assert (found.cause, found.node) == (Cause.NODE, "n2")

    def test_with_a_full_disk_says_so_or_its_log_does(self) -> None:
        failed = ended(TaskState.FAILED, 7)
        assert cause_of(failed, DISK_FULL) is cause_of(failed, BEGAN, DISK_LOG) is cause_of(failed, BEGAN, FULL_LOG)
        assert cause_of(failed, DISK_FULL) is Cause.DISK

    def test_that_raised_is_quoted(self) -> None:
        assert judge_attempt(ended(TaskState.FAILED, 1), RAISED, "").reason == RAISED.what
        log = "Traceback (most recent call last):\nKeyError: 'x'\nsrun: error: n1: task 0: Exited with exit code 1\n"
        assert "KeyError: 'x'" in judge_attempt(ended(TaskState.FAILED, 1), BEGAN, log).reason

    def test_on_a_broken_node_or_in_a_container_that_could_not_begin_there_blames_the_node(self) -> None:
        for said in (
            "slurmstepd: error: execve(): apptainer: No such file or directory\nsrun: error: n1: task 0: Exited",
            "slurmstepd: error: execve(): podman: Permission denied",
            "FATAL:   container creation failed: mount /a->/a error: while mounting /a: mount source /a doesn't exist",
            "FATAL:   could not open image /images/x.sif: failed to retrieve path for /images/x.sif",
            "slurmstepd: error: pyxis: container start failed with error code: 1",
        ):
            for code in (2, 125, 255):
                verdict = judge_attempt(ended(TaskState.FAILED, code), SILENT, said)
                assert (verdict.cause, verdict.reason) == (Cause.NODE, said.splitlines()[0]), code
        for said in ("CUDA error: uncorrectable ECC error encountered", "[Errno 116] Stale file handle"):
            for word, log in ((BEGAN, said), (Word(started=True, exit_code=1, what=said), "")):
                assert cause_of(ended(TaskState.FAILED, 1), word, log) is Cause.NODE, said
        launch = "srun: error: Application launch failed: Zero Bytes were transmitted or received\n"
        launch += "srun: Job step aborted\n"  # as a dying node shows on 22.05
        assert cause_of(ended(TaskState.FAILED, None, 13), SILENT, launch) is Cause.NODE


class TestALog:
    def test_of_an_earlier_start_is_not_held_against_the_last(self) -> None:
        again = "began again\n" * 5
        for earlier in (PREEMPTION_LOG, NODE_LOG, OOM_LOG + PREEMPTION_LOG):
            log = f"{earlier}{again}ValueError: 3\n"
            assert cause_of(ended(TaskState.FAILED, 1, restarts=1), BEGAN, log) is Cause.FAILED, earlier
        log = f"{NODE_LOG}{again}{PREEMPTION_LOG}srun: error: n1: task 0: Terminated\n"
        assert cause_of(ended(TaskState.FAILED, None, 9, restarts=1), BEGAN, log) is Cause.PREEMPTED

    def test_of_a_cancelled_step_does_not_make_a_failure_a_cancellation(self) -> None:
        log = "slurmstepd-n1: error: *** STEP 50.0 ON n1 CANCELLED AT 2026-11-21T22:58:39 ***\n"
        assert cause_of(ended(TaskState.FAILED, 1), BEGAN, log) is Cause.FAILED
        assert cause_of(ended(TaskState.UNKNOWN), BEGAN, CANCEL_LOG) is Cause.CANCELLED


class TestTheLocalExecutor:
    """Its statuses go through the same judgement."""

    def test_shows_what_a_program_died_of(self, local: LocalExecutor, tmp_path: Path) -> None:
        kills = "import os, signal; os.kill(os.getpid(), signal.{})"
        causes = {
            EATS: Cause.HOST_OOM,
            "import time; time.sleep(60)": Cause.TIMEOUT,
            "import os; os.abort()": Cause.CRASHED,
            kills.format("SIGTERM"): Cause.INTERRUPTED,
            kills.format("SIGKILL"): Cause.CRASHED,
            "import sys; sys.exit(75)": Cause.INTERRUPTED,
            "import sys; sys.exit(3)": Cause.REFUSED,
            "1/0": Cause.FAILED,
            "": Cause.LOST,
        }
        for code, cause in causes.items():
            limits = {"mem_bytes": 100 * MIB} if code == EATS else {"time_s": 1} if "sleep" in code else {}
            (task,) = finish(local, local.submit(python(tmp_path, code, **limits)))
            found = judge_attempt(task, BEGAN, Path(task.stderr).read_text(), asked_bytes=limits.get("mem_bytes"))
            assert found.cause is cause, (task, found)

    def test_that_was_killed_shows_its_tasks_lost_with_it(self, local: LocalExecutor, tmp_path: Path) -> None:
        local.adopt("gone.1", python(tmp_path, "pass"))
        assert cause_of(local.status(["gone.1"])[0], BEGAN) is Cause.NODE
