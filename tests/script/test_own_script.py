"""A script of the user's own: what it is given, how its end is judged, and what follows."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.cluster.job_spec import Limits, TaskState, TaskStatus
from pipeline.cluster.processes import used_bytes
from pipeline.cluster.verdict import Cause, TaskVerdict, Word, judge_attempt, last_words
from pipeline.device import kinds
from pipeline.engine.repair import GiveUp, Retry, Situation, decide
from pipeline.errors import ConfigError, PipelineError, PlanInfeasible
from pipeline.journal.attempts import Ask, Attempt
from pipeline.script import script_process
from pipeline.script.command import (
    KNOWN,
    RANK_NAMES,
    Values,
    batches,
    parse_command,
    process_words,
    refuse_blind,
    reserved_port,
    script_environment,
)
from pipeline.script.script_process import ScriptOutcome, behind_launcher, figures_in, run_script, script_trouble
from tests.cluster.programs import await_true, is_running, written_pid

HERE = Path(__file__).parent / "scripts"
MIB = 1 << 20
LONG_S = 300  # a machine may be busy; this only ends what would never end
PLACES = {"run": Path("/runs/r"), "output": Path("/models/m"), "config": Path("/runs/r/config.json")}
VALUES = Values(effective_batch=8, micro_batch=4, accumulation=2, **PLACES)
ASK = Ask(mem_bytes=512 * MIB, time_s=600)
SHRINKABLE = "x --batch_size {micro_batch} --accumulate {accumulation}"


def ran(name: str, *arguments: str, tmp_path: Path, **more: Any) -> ScriptOutcome:
    with (tmp_path / "out").open("ab") as out, (tmp_path / "err").open("ab") as err:
        more = {"environment": dict(os.environ), "cwd": tmp_path, "out": out.fileno(), "err": err.fileno(), **more}
        return run_script([sys.executable, "-S" if name != "plain.py" else "-I", str(HERE / name), *arguments], **more)


def verdict(outcome: ScriptOutcome, state: TaskState = TaskState.FAILED) -> TaskVerdict:
    """Judge a script's end as a supervisor does."""
    word = Word(
        started=True, finished=outcome.finished, exit_code=outcome.code, what=outcome.what, kind=outcome.trouble
    )
    return judge_attempt(TaskStatus("1", 0, state, "", "", exit_code=outcome.code), word, "")


class TestCommand:
    def test_is_split_as_a_shell_would_and_has_its_placeholders_filled_wherever_they_stand(self) -> None:
        script = parse_command("python 'my script.py' --lr 1e-3 --name \"a b\" --batch_size={micro_batch}")
        assert script.words == ("python", "my script.py", "--lr", "1e-3", "--name", "a b", "--batch_size={micro_batch}")
        assert script.names == {"micro_batch"}
        script = parse_command(
            "train --b={micro_batch}x{accumulation} --out {output}/last --literal {{micro_batch}} {{}}"
        )
        wanted = "train --b=4x2 --out /models/m/last --literal {micro_batch} {}"
        assert process_words(script, VALUES) == wanted.split()
        filled = process_words(parse_command("x " + " ".join(f"{{{name}}}" for name in KNOWN)), VALUES)
        assert len(filled) == 1 + len(KNOWN)
        assert not any("{" in word for word in filled)

    def test_that_cannot_be_meant_is_refused_with_what_to_write_instead(self, tmp_path: Path) -> None:
        for command in [
            "",
            "python 'train.py",
            "x {micro_batch",
            "x micro_batch}",
            "x {}",
            "x {batchsize}",
            "x {micro_batch!r}",
            "x {micro_batch.__class__}",
            "x '{\"json\": 1}'",
            "python a.py && echo done",
            "python a.py > log",
            "OMP_NUM_THREADS=4 python a.py",
        ]:
            with pytest.raises(ConfigError) as refused:
                parse_command(command)
            assert (refused.value.where, bool(refused.value.remedy)) == ("train.command", True), command
        with pytest.raises(ConfigError, match="no-such-program"):
            run_script(["no-such-program"], environment={"PATH": "/usr/bin"}, cwd=tmp_path)

    @settings(deadline=None)
    @given(
        st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0{}")), min_size=1),
        st.text(st.characters(codec="utf-8", exclude_characters="\0/")).map(lambda text: f"; rm -rf {text}"),
    )
    def test_never_has_more_words_than_were_written(self, written: list[str], name: str) -> None:
        written = [f"x{word}".replace("=", "") for word in written]
        script = parse_command(" ".join(map(shlex.quote, written)) + " {output} --o={output}")
        output = Path("/models") / name
        assert process_words(script, replace(VALUES, output=output)) == [*written, str(output), f"--o={output}"]

    def test_is_started_without_a_shell(self, tmp_path: Path) -> None:
        shows = "import json, sys; print(json.dumps(sys.argv[1:]))"
        hostile = ["; rm -rf /", "$HOME", "`id`", "a b", "*", "", "'"]
        with (tmp_path / "out").open("wb") as out:
            outcome = run_script(
                [sys.executable, "-S", "-c", shows, *hostile], environment={}, cwd=tmp_path, out=out.fileno()
            )
        assert outcome.finished
        assert json.loads((tmp_path / "out").read_text()) == hostile


class TestBatches:
    @given(st.integers(1, 200), st.integers(1, 8), st.integers(1, 200), st.integers(0, 9))
    def test_always_make_the_effective_batch_or_are_refused(
        self, share: int, ranks: int, micro: int, shrink: int
    ) -> None:
        try:
            found, accumulation = batches(share * ranks, ranks, micro, shrink)
        except ConfigError:
            assert share % micro
            return
        except PlanInfeasible:
            assert shrink > 0
            return
        assert found * accumulation * ranks == share * ranks
        assert found <= micro >> shrink or (found, shrink) == (micro, 0)

    @given(st.integers(1, 500))
    def test_get_smaller_with_every_shrink_until_a_single_item_is_left(self, share: int) -> None:
        sizes = [share]
        while sizes[-1] > 1:
            sizes.append(batches(share, 1, "auto", len(sizes))[0])
            assert sizes[-1] <= sizes[-2] // 2
        with pytest.raises(PlanInfeasible, match="one item"):
            batches(share, 1, "auto", len(sizes))

    def test_that_cannot_be_shared_name_one_that_can(self) -> None:
        for effective, ranks, micro, nearest in [
            (10, 4, "auto", ["train.effective_batch=12"]),
            (12, 1, 5, ["train.micro_batch=4"]),
            (4, 1, 8, ["train.micro_batch=4"]),
        ]:
            with pytest.raises(ConfigError) as refused:
                batches(effective, ranks, micro)
            assert [word for word in refused.value.remedy.split() if "=" in word] == nearest

    def test_of_a_command_that_names_none_are_refused_and_not_repeated_in_vain(self) -> None:
        silent = parse_command("x --batch_size {micro_batch}")
        assert process_words(silent, replace(VALUES, micro_batch=8, accumulation=1))
        with pytest.raises(ConfigError, match=r"\{accumulation\}"):
            process_words(silent, VALUES)
        assert process_words(parse_command("x {micro_batch} {effective_batch}"), VALUES) == ["x", "4", "8"]
        refuse_blind(parse_command("x"), shrink=0)
        refuse_blind(parse_command(SHRINKABLE), shrink=3)
        with pytest.raises(PlanInfeasible, match=r"\{micro_batch\}"):
            refuse_blind(parse_command("x"), shrink=1)


class TestEnvironment:
    def test_of_one_process_is_as_if_started_by_hand_and_of_several_that_of_torchrun(self) -> None:
        def of(command: str = "x", base: dict[str, str] | None = None, **changes: Any) -> dict[str, str]:
            return script_environment(parse_command(command), replace(VALUES, **changes), base or {}, threads=3)

        found = of(base={"HOME": "/h", "RANK": "5", "MASTER_PORT": "1"})
        assert not set(found) & set(RANK_NAMES)
        assert (found["HOME"], found["OMP_NUM_THREADS"]) == ("/h", "3")
        assert (found["PIPELINE_RUN"], found["PIPELINE_OUTPUT"]) == ("/runs/r", "/models/m")
        place = {"ranks": 4, "rank": 3, "local_rank": 1, "processes": 2, "nodes": 2, "node": 1}
        found = of(**place, master_address="n1", master_port=99, attempt=2)
        told = ("3", "4", "1", "2", "1", "2", "n1", "99", "r-2")
        assert {name: found[name] for name in RANK_NAMES} == dict(zip(RANK_NAMES, told, strict=True))
        command = "torchrun --nproc_per_node {gpus} train.py"  # which starts processes itself
        assert not set(of(command, ranks=4, gpus=4)) & set(RANK_NAMES)

    def test_has_the_allocator_s_settings_by_one_name_only_where_there_is_a_plan(self) -> None:
        script, ours = parse_command("x"), {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
        assert script_environment(script, VALUES, ours)["PYTORCH_CUDA_ALLOC_CONF"] == "backend:cudaMallocAsync"
        planned = script_environment(script, VALUES, ours, allocator="expandable_segments:True")
        assert [(name, value) for name, value in planned.items() if "ALLOC_CONF" in name] == [
            ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync,expandable_segments:True")
        ]


class TestRanks:
    @pytest.mark.nightly
    def test_that_are_torch_s_add_up_over_a_port_that_stays_reserved(self, tmp_path: Path) -> None:
        script = parse_command(f"{shlex.quote(sys.executable)} {shlex.quote(str(HERE / 'ranks.py'))}")
        with reserved_port() as port:
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("", port))
            started = []
            for rank in (0, 1):
                place = replace(VALUES, ranks=2, rank=rank, local_rank=rank, processes=2, master_port=port)
                known = script_environment(script, place, os.environ)
                words = process_words(script, place)
                started.append(subprocess.Popen(words, env=known, cwd=tmp_path, text=True, stdout=subprocess.PIPE))
            said = [process.communicate(timeout=LONG_S)[0].strip() for process in started]
        assert said == ["sum 3 of 2 here 0", "sum 3 of 2 here 1"]


class TestEnding:
    def test_well_is_all_that_counts(self, tmp_path: Path) -> None:
        outcome = ran("swallows.py", tmp_path=tmp_path)
        assert (outcome.finished, outcome.code, outcome.trouble) == (True, 0, "")
        assert outcome.last_lines == ("WARNING: CUDA out of memory. Skipping this batch.",)
        assert verdict(outcome, TaskState.COMPLETED).cause is Cause.DONE

    def test_badly_after_a_word_on_memory_is_for_memory_unless_it_survived_that(self, tmp_path: Path) -> None:
        outcome = ran("swallows.py", "--code", "3", tmp_path=tmp_path)
        assert (outcome.trouble, outcome.code) == ("gpu_oom", 1)
        assert verdict(outcome).cause is Cause.GPU_OOM
        outcome = ran("swallows.py", "--code", "3", "--steps_after", "60", tmp_path=tmp_path)
        assert (outcome.trouble, verdict(outcome).cause) == ("", Cause.FAILED)
        for code in (3, 4, 5, 6):  # which are ours, of our data or cache
            assert verdict(ScriptOutcome(code)).cause is Cause.FAILED
        for code, killed_by in ((None, 9), (137, None)):
            assert script_trouble(code, killed_by, ["step 3"], at_limit=True)[0] == "host_oom"
            assert script_trouble(code, killed_by, ["step 3"], at_limit=False)[0] == ""
            assert verdict(ScriptOutcome(code, killed_by)).cause is Cause.CRASHED

    def test_has_its_reason_read_from_the_output(self, tmp_path: Path) -> None:
        assert ran("swallows.py", "--code", "1", "--says", "MemoryError", tmp_path=tmp_path).trouble == "host_oom"
        on_gpu = "OOM when allocating tensor with shape[8,9] and type float on /device:GPU:0 by allocator GPU_0_bfc"
        for says, trouble in {
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.": "gpu_oom",
            "RuntimeError: CUDA error: out of memory": "gpu_oom",
            "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`": "gpu_oom",
            "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED": "gpu_oom",
            "n1:7:9 [3] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'": "gpu_oom",
            "n1:7:9 [3] NCCL WARN Cuda failure 2 'out of memory'": "gpu_oom",
            "XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4770354232 bytes.": "gpu_oom",
            "RESOURCE_EXHAUSTED: Failed to allocate request for 2.99GiB (3206250496B) on device ordinal 0": "gpu_oom",
            on_gpu: "gpu_oom",
            on_gpu.replace("GPU:0", "CPU:0").replace("GPU_0_bfc", "cpu"): "host_oom",
            "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED": "host_oom",
            "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.": "host_oom",
            "OSError: [Errno 28] No space left on device: 'last.ckpt'": "disk_full",
            "StatusCode.RESOURCE_EXHAUSTED: Received message larger than max": "",
            "KeyError: 'memory'": "",
        }.items():
            found, what = script_trouble(1, None, ["step 3", says], at_limit=False)
            assert (found, not trouble or says in what) == (trouble, True), says
        for text in kinds.HOST_IS_FULL + kinds.CARD_IS_FULL:
            found = last_words(f"RuntimeError: {text}")
            assert found is not None, text
            assert found[0] in (Cause.GPU_OOM, Cause.HOST_OOM)

    def test_is_found_above_the_long_account_of_jax_and_in_what_slurm_says_of_a_step_of_the_scripts(self) -> None:
        account = [f"\tBuffer {number}:" for number in range(120)]
        lines = ["XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.", *account]
        assert script_trouble(1, None, lines, at_limit=False)[0] == "gpu_oom"
        later = [*lines, "Traceback (most recent call last):", "KeyError: 'loss'"]
        assert script_trouble(1, None, later, at_limit=False)[0] == ""
        lines = ["srun: error: n2: task 1: Out Of Memory", "srun: error: n1: task 0: Terminated"]
        assert script_trouble(1, None, lines, at_limit=False) == ("host_oom", lines[0])
        assert script_trouble(1, None, ["epoch 3: Out Of Memory was seen"], at_limit=False)[0] == ""

    def test_of_a_launcher_s_worker_is_found_above_what_the_launcher_says_of_itself(self) -> None:
        failed = "E0101 10:00:00.0 7 elastic/multiprocessing/api.py:869] failed (exitcode: {}) local_rank: 1 (pid: 7)"
        about_itself = [f"  File torchrun line {number}" for number in range(60)]
        lines = ["torch.OutOfMemoryError: CUDA out of memory.", failed.format(1), *about_itself, "ChildFailedError: "]
        assert script_trouble(1, None, lines, at_limit=False)[0] == "gpu_oom"
        killed = ["step 3", failed.format(-9), *about_itself]
        assert script_trouble(1, None, killed, at_limit=True)[0] == "host_oom"
        assert script_trouble(1, None, killed, at_limit=False)[0] == ""
        saved = ["step 3", failed.format(75), *about_itself]
        assert [behind_launcher(code, saved) for code in (0, 1, 2)] == [0, 75, 2]
        assert behind_launcher(1, killed) == 1

    def test_by_a_segmentation_fault_is_a_crash(self, tmp_path: Path) -> None:
        faults = "import resource, ctypes; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); ctypes.string_at(0)"
        outcome = run_script([sys.executable, "-S", "-c", faults], environment={}, cwd=tmp_path)
        assert (outcome.signal, outcome.code, verdict(outcome).cause) == (11, 139, Cause.CRASHED)

    def test_leaves_no_process_behind(self, tmp_path: Path) -> None:
        child = "[sys.executable, '-S', '-c', 'import signal; signal.pause()']"
        stays = f"import subprocess, sys; print(subprocess.Popen({child}).pid)"
        with (tmp_path / "out").open("wb") as out:
            run_script([sys.executable, "-S", "-c", stays], environment={}, cwd=tmp_path, out=out.fileno())
        pid = written_pid(tmp_path / "out")
        await_true(lambda: not is_running(pid))

    def test_reports_at_least_the_memory_it_took(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def measured(pids: list[int]) -> int:
            used = used_bytes(pids)
            if used > 700 * MIB:  # however long that takes on a busy machine, it holds all of it now
                (tmp_path / "go").touch()
            return used

        monkeypatch.setattr(script_process, "used_bytes", measured)
        outcome = ran("hungry.py", "--mib", "700", "--until", str(tmp_path / "go"), tmp_path=tmp_path)
        assert 700 * MIB < outcome.peak_rss_bytes < 1000 * MIB


class TestOutput:
    def test_passes_through_byte_for_byte_each_to_its_own(self, tmp_path: Path) -> None:
        writes = "import os; os.write(1, bytes(range(256)) * 4096); os.write(2, b'e' * 300_000 + b'\\nlast')"
        with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
            ends = {"out": out.fileno(), "err": err.fileno()}
            outcome = run_script([sys.executable, "-S", "-c", writes], environment={}, cwd=tmp_path, **ends)
        assert (tmp_path / "out").read_bytes() == bytes(range(256)) * 4096
        assert (tmp_path / "err").read_bytes() == b"e" * 300_000 + b"\nlast"
        assert "last" in outcome.last_lines
        assert sum(map(len, outcome.last_lines)) < MIB

    def test_to_a_full_disk_ends_no_training(self, tmp_path: Path) -> None:
        with Path("/dev/full").open("wb") as full:
            outcome = ran("swallows.py", "--steps_after", "9", tmp_path=tmp_path, out=full.fileno())
        assert outcome.finished

    def test_with_figures_is_told(self, tmp_path: Path) -> None:
        told: list[Any] = []
        outcome = ran("saves.py", "--out", str(tmp_path), "--steps", "3", tmp_path=tmp_path, on_figures=told.append)
        assert told == [{"step": 1.0}, {"step": 2.0}, {"step": 3.0}]
        assert outcome.step == 3

    def test_that_is_not_figures_is_words(self) -> None:
        for line, figures in {
            'pipeline: {"step": 1, "loss": 0.5}': {"step": 1, "loss": 0.5},
            'pipeline: {"loss": NaN, "step": 2}': {"step": 2},
            'pipeline: {"a": true, "b": "c", "d": [1], "e": null}': {},
            'pipeline: {"huge": 1' + "0" * 400 + "}": {},
            'pipeline: {"step": 1': {},
            "pipeline: " + '{"a":' * 5000: {},
            '{"step": 1}': {},
        }.items():
            assert figures_in(line) == figures, line[:40]


@contextmanager
def worker(folder: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a worker that runs a script, and wait until the script is ready."""
    argv = [sys.executable, str(HERE / "worker.py"), str(folder / "told"), "0", *command]
    variables = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    with ExitStack() as stack:
        log = stack.enter_context((folder / "log").open("wb"))
        started = subprocess.Popen(argv, env=variables, stdout=log, stderr=log)
        stack.enter_context(started)
        stack.callback(started.kill)
        await_true(lambda: (folder / "ready").exists() or started.poll() is not None)
        assert started.poll() is None, (folder / "log").read_text()
        yield started


class TestSignals:
    def saves(self, folder: Path, number: int, *more: str) -> tuple[int, dict[str, Any]]:
        script = (sys.executable, "-S", str(HERE / "saves.py"), "--out", str(folder), *more)
        with worker(folder, *script) as started:
            started.send_signal(number)
            code = started.wait(LONG_S)
        return code, json.loads((folder / "told").read_text())

    @pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
    @pytest.mark.parametrize("code", [75, 0])
    def test_let_a_script_save_and_ask_for_another_start(self, tmp_path: Path, number: int, code: int) -> None:
        ended, told = self.saves(tmp_path, number, "--steps", "1000000", "--code", str(code))
        saved = json.loads((tmp_path / "checkpoint.json").read_text())
        assert (ended, told["exit_code"], told["handled_signal"], told["goes_on"]) == (75, code, number, True)
        assert saved["told"] == [number]
        assert told["step"] == saved["step"] > 0
        again = ran("saves.py", "--out", str(tmp_path), "--steps", str(saved["step"] + 2), tmp_path=tmp_path)
        assert (again.finished, again.step) == (True, saved["step"] + 2)

    def test_that_a_script_fails_to_heed_in_order_end_it(self, tmp_path: Path) -> None:
        ended, told = self.saves(tmp_path, signal.SIGTERM, "--steps", "1000000", "--code", "1")
        assert (ended, told["trouble"], told["goes_on"]) == (143, "", False)

    def test_that_warn_do_not_kill_who_does_not_listen(self, tmp_path: Path) -> None:
        with worker(tmp_path, sys.executable, "-S", str(HERE / "deaf.py"), str(tmp_path)) as started:
            started.send_signal(signal.SIGUSR2)
            child = written_pid(tmp_path / "child")
            await_true(lambda: not _pending(started.pid, signal.SIGUSR2))
            assert is_running(child)
            (tmp_path / "go").touch()
            assert started.wait(LONG_S) == 0
        assert not is_running(child)
        assert json.loads((tmp_path / "told").read_text())["handled_signal"] is None

    def test_that_end_reach_every_process_of_a_script_that_does_not_listen(self, tmp_path: Path) -> None:
        with worker(tmp_path, sys.executable, "-S", str(HERE / "deaf.py"), str(tmp_path)) as started:
            started.send_signal(signal.SIGTERM)
            assert started.wait(LONG_S) == 143
        assert not is_running(written_pid(tmp_path / "child"))
        assert json.loads((tmp_path / "told").read_text())["signal"] == signal.SIGTERM

    def test_reach_the_script_behind_a_shell_and_the_save_is_waited_for(self, tmp_path: Path) -> None:
        script = shlex.join(
            [sys.executable, "-S", str(HERE / "saves.py"), "--out", str(tmp_path), "--steps", "1000000"]
        )
        with worker(tmp_path, "bash", "-c", f"{script}; exit $?") as started:
            started.send_signal(signal.SIGUSR2)
            assert started.wait(LONG_S) == 75
        assert (tmp_path / "checkpoint.json").exists()

    def test_that_end_a_shell_at_once_leave_the_script_behind_it_time_to_save(self, tmp_path: Path) -> None:
        gate = ["--out", str(tmp_path), "--steps", "1000000", "--gate", str(tmp_path / "gate")]
        script = shlex.join([sys.executable, "-S", str(HERE / "saves.py"), *gate])
        shell = f"echo $$ > {shlex.quote(str(tmp_path / 'shell'))}; {script}; exit $?"
        with worker(tmp_path, "bash", "-c", shell) as started:
            for name in ("shell", "ready"):  # as Slurm does: all processes of a job, and the worker is the last to hear
                os.kill(int((tmp_path / name).read_text()), signal.SIGTERM)
            await_true(lambda: not _selects(started.pid))
            (tmp_path / "gate").touch()
            assert started.wait(LONG_S) == 143
        assert (tmp_path / "checkpoint.json").exists()

    def test_that_preempt_are_followed_by_another_start(self) -> None:
        ended = ScriptOutcome(None, signal.SIGTERM, handled_signal=signal.SIGTERM)
        assert verdict(ended, TaskState.PREEMPTED).cause is Cause.PREEMPTED
        assert verdict(ended, TaskState.CANCELLED).cause is Cause.CANCELLED
        assert verdict(ended).cause is verdict(ScriptOutcome(75)).cause is Cause.INTERRUPTED


def _selects(pid: int) -> bool:
    """Tell whether a worker still follows a script: it has not seen its first process end."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # it is closed just now
            if "eventpoll" in os.readlink(entry):  # noqa: PTH115 - no file is meant
                return True
    return False


def _pending(pid: int, number: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd", "ShdPnd"))]
    return any(mask >> (number - 1) & 1 for mask in masks)


def test_the_ladder_ends_with_a_micro_batch_that_fits_or_where_nothing_can_be_made_smaller(tmp_path: Path) -> None:
    """Run, judge, decide, run again: what a supervisor does, without a scheduler."""
    situation = Situation(Limits(mem_bytes=4096 * MIB, time_s=3600), items=1, tries=3)

    def climbed(arguments: str, effective_batch: int) -> tuple[list[Attempt], list[ScriptOutcome]]:
        script = parse_command(f"{shlex.quote(sys.executable)} -S small_card.py {arguments}")
        history, outcomes, ask = list[Attempt](), list[ScriptOutcome](), ASK
        while True:
            try:
                refuse_blind(script, ask.shrink)
                micro, accumulation = batches(effective_batch, 1, "auto", ask.shrink)
            except PipelineError as error:
                word = Word(started=True, exit_code=error.exit_code, what=str(error))
                failed = TaskStatus("1", 0, TaskState.FAILED, "", "", exit_code=error.exit_code)
                judged = judge_attempt(failed, word, "")
            else:
                values = replace(VALUES, effective_batch=effective_batch, micro_batch=micro, accumulation=accumulation)
                known = script_environment(script, values, os.environ)
                with (tmp_path / "log").open("ab") as log:
                    ends = {"out": log.fileno(), "err": log.fileno()}
                    outcomes.append(run_script(process_words(script, values), environment=known, cwd=HERE, **ends))
                if outcomes[-1].finished:
                    return history, outcomes
                judged = verdict(outcomes[-1])
            history.append(Attempt(0, len(history) + 1, ask, judged.cause, judged.reason))
            decision = decide(history, situation)
            if isinstance(decision, GiveUp):
                return history, outcomes
            assert isinstance(decision, Retry)
            ask = decision.ask

    given = "--batch_size {micro_batch} --accumulate {accumulation}"
    history, outcomes = climbed(given, 8)
    assert [(one.cause, one.ask.shrink) for one in history] == [(Cause.GPU_OOM, 0), (Cause.GPU_OOM, 1)]
    assert all(one.ask.mem_bytes == ASK.mem_bytes for one in history)
    assert outcomes[-1].last_lines == ("trained with 4 times 2",)
    for arguments, tries in {f"--room 0 {given}": 3, "--batch_size 8": 1, "--batchsize {micro_batch}": 1}.items():
        history, outcomes = climbed(arguments, 4)
        assert (len(outcomes), outcomes[-1].finished) == (tries, False), arguments
    assert history[-1].cause is Cause.REFUSED, "a word too many for argparse"
