"""`pipeline submit --stage scan`, as people type it: what it says, what it leaves, and its exit codes."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline import waiting
from pipeline.config.load import read_config
from pipeline.journal import ledger
from pipeline.journal.ledger import Note
from pipeline.journal.run_folder import runs_in
from pipeline.project.project import Project
from pipeline.records import EventKind, TaskContext, TaskReport
from pipeline.runs.engine import run_task
from pipeline.runs.engine.lifecycle import new_run
from pipeline.runs.workflow import table as workflow
from pipeline.runs.workflow.scan_stage import ScanStage
from tests.testkit.command import Command
from tests.testkit.project import MakeProject, settle, write_complex
from tests.testkit.stubs import SILENT, program

SUBMIT = ("submit", "--stage", "scan", "--executor", "local", "--follow")
PIPELINE = str(Path(sys.executable).with_name("pipeline"))
DEADLINE_S = 60.0


def wait_for(what: str, condition) -> None:  # type: ignore[no-untyped-def]
    """Wait until something is so; fail by name when it never is."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)


def newest_status(folder: Path) -> dict:  # type: ignore[type-arg]
    """Return what `pipeline status --json` says."""
    done = subprocess.run([PIPELINE, "status", "--json"], cwd=folder, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_three_real_files_are_scanned(pipeline: Command, tmp_path: Path, structures: Path) -> None:
    names = ("1LFD", "1R0R", "3H2V")
    (tmp_path / "data").mkdir()
    for name in names:
        shutil.copy(structures / "complexes" / f"{name}.pdb", tmp_path / "data")
    (tmp_path / "pipeline.yaml").write_text("data: {source: glob, path: data}\n")
    done = pipeline(*SUBMIT)
    assert done.code == 0, done.err
    assert "3 items: 3 accepted, 0 rejected" in done.out
    assert "scan: 3 items: 0 cached, 3 to do" in done.err


def test_a_second_submit_does_nothing_again(pipeline: Command, make_project: MakeProject) -> None:
    make_project(6)
    assert pipeline(*SUBMIT).code == 0
    again = pipeline(*SUBMIT)
    assert again.code == 0
    assert "6 cached, 0 to do" in again.err


@pytest.mark.nightly
def test_one_added_file_costs_one_file(pipeline: Command, make_project: MakeProject) -> None:
    folder = make_project(6)
    pipeline(*SUBMIT)
    write_complex(folder / "data" / "new.pdb", 77)
    again = pipeline(*SUBMIT)
    assert "7 items: 6 cached, 1 to do in 1 task" in again.err
    assert "7 accepted" in again.out


def test_a_dry_run_says_what_would_be_done_and_leaves_nothing(pipeline: Command, make_project: MakeProject) -> None:
    folder = make_project(3)
    done = pipeline(*SUBMIT, "--dry-run")
    assert done.code == 0
    table, why = done.out.replace(" GiB", "GiB").splitlines()[:2], done.out.splitlines()[2]
    shown = dict(zip(*(line.split() for line in table), strict=False))
    assert why.startswith("scan: memory ")
    assert (shown["items"], shown["cached"], shown["missing"], shown["tasks"], shown["mem"]) == (
        "3",
        "0",
        "3",
        "1",
        "1.5GiB",
    )
    assert sorted(path.name for path in folder.iterdir()) == ["data", "pipeline.yaml"]


@pytest.mark.parametrize("is_installed", [True, False])
@pytest.mark.parametrize("json_too", [False, True])
def test_a_dry_run_shows_the_scripts_also_where_the_cluster_does_not_answer(
    pipeline: Command, make_project: MakeProject, monkeypatch: pytest.MonkeyPatch, is_installed: bool, json_too: bool
) -> None:
    folder = make_project(3)
    commands = folder / "commands"
    commands.mkdir()
    if is_installed:
        for name in (*SILENT, "sbatch", "srun"):
            program(
                commands,
                name,
                f"echo '{name}: error: Unable to contact slurm controller (connect failure)' >&2; exit 1",
            )
        (commands / "env").symlink_to("/usr/bin/env")
        (commands / "bash").symlink_to("/bin/bash")
    monkeypatch.setenv("PATH", str(commands))
    words = ("submit", "--stage", "scan", "--executor", "slurm", "--dry-run", *(["--json"] if json_too else []))
    done = pipeline(*words)
    assert done.code == 0, done.err
    scripts = json.loads(done.out)["scripts"].values() if json_too else done.out.split("# ----")[1:]
    assert len(scripts) == 2
    assert all("#SBATCH --job-name=RUN-" in script for script in scripts)
    why = "Unable to contact slurm controller" if is_installed else "sbatch: No such file or directory"
    assert done.err.count("note: whether the cluster takes these jobs could not be checked") == 1
    assert why in done.err
    refused = pipeline("submit", "--stage", "scan", "--executor", "slurm")
    assert (refused.code, why in refused.err) == (6, True)


def test_every_kind_of_bad_input_is_a_counted_rejection(pipeline: Command, make_project: MakeProject) -> None:
    folder = make_project(4, data__max_rejected_fraction=1)
    (folder / "data" / "empty.pdb").write_bytes(b"")
    (folder / "data" / "junk.cif").write_bytes(b"\x00\xff" * 500)
    (folder / "data" / "short.pdb.gz").write_bytes(b"\x1f\x8b\x08\x00")
    (folder / "data" / "noatoms.cif").write_text("data_x\n_cell.length_a 1\n")
    (folder / "data" / "one chain.pdb").write_text((folder / "data" / "c0.pdb").read_text())
    (folder / "data" / f"{'x' * 220}.pdb").write_text((folder / "data" / "c0.pdb").read_text())
    done = pipeline(*SUBMIT)
    assert done.code == 0, done.err
    assert "10 items: 4 accepted, 6 rejected" in done.out
    for reason in ("empty_file", "parse_error", "truncated_file", "no_atoms", "bad_id"):
        assert reason in done.out
    (run,) = runs_in(folder / "runs")
    listed = [json.loads(line) for line in run.rejected.read_text().splitlines()]
    assert len(listed) == 6
    assert all(one["detail"] and one["reason"] for one in listed)


def test_too_many_rejections_end_the_run_with_the_reasons(pipeline: Command, make_project: MakeProject) -> None:
    folder = make_project(4)
    for number in range(3):
        (folder / "data" / f"bad{number}.pdb").write_bytes(b"")
    done = pipeline(*SUBMIT)
    assert done.code == 3
    assert "of 7 items cannot be used, more than data.max_rejected_fraction (5.0%)" in done.err
    assert "empty_file" in done.out
    assert "empty_file" in pipeline("status").out


def test_where_every_item_is_rejected_no_more_rejections_are_advised(
    pipeline: Command, make_project: MakeProject
) -> None:
    folder = make_project(1)
    (folder / "data" / "c0.pdb").write_bytes(b"")
    (folder / "runs here").mkdir()
    done = pipeline(*SUBMIT, "--set", "cluster.runs=runs here")
    (rejected,) = (folder / "runs here").glob("*/rejected.jsonl")
    assert done.err.rstrip().endswith(f"allows\n  next: less '{rejected}'"), done.err


@pytest.mark.nightly
def test_rejections_known_from_before_end_the_run_as_well(pipeline: Command, make_project: MakeProject) -> None:
    folder = make_project(4)
    (folder / "data" / "bad.pdb").write_bytes(b"")
    assert pipeline(*SUBMIT).code == 3
    again = pipeline(*SUBMIT)
    assert again.code == 3
    assert "1 of 5 items" in again.err


def use_manifest(folder: Path, *rows: str) -> None:
    """Let a manifest of these rows be the data set."""
    (folder / "m.csv").write_text("\n".join(["id,path,receptor_chains,ligand_chains,split", *rows, ""]))
    (folder / "pipeline.yaml").write_text("data: {path: m.csv, max_rejected_fraction: 0.5}\n")


@pytest.mark.nightly
def test_a_sequence_in_two_splits_is_a_leak(pipeline: Command, make_project: MakeProject) -> None:
    folder = make_project(2)
    shutil.copy(folder / "data" / "c0.pdb", folder / "data" / "twin.pdb")
    use_manifest(folder, "a,data/c0.pdb,A,B,train", "b,data/c1.pdb,A,B,train", "t,data/twin.pdb,A,B,test")
    done = pipeline(*SUBMIT)
    assert done.code == 3
    assert "the same sequence is in the splits train and test: a, t" in done.err
    warned = pipeline(*SUBMIT, "--set", "data.on_leak=warn")
    assert warned.code == 0
    assert "warning: the same sequence" in warned.out
    assert pipeline(*SUBMIT, "--set", "data.on_leak=ignore").code == 0


def test_an_id_in_two_splits_is_a_leak_although_its_second_row_is_left_out(
    pipeline: Command, make_project: MakeProject
) -> None:
    folder = make_project(3)
    use_manifest(folder, "a,data/c0.pdb,A,B,train", "b,data/c1.pdb,A,B,train", "a,data/c2.pdb,A,B,test")
    done = pipeline(*SUBMIT)
    assert done.code == 3
    assert "the same id is in the splits train and test" in done.err


@pytest.mark.parametrize(
    ("settings", "code", "said"),
    [
        ({"cluster__scan__cpus": 999}, 6, "999"),
        ({"cluster__scan__mem": "900TiB"}, 6, "of memory"),
        ({"cache__root": "data"}, 2, "not a cache"),
        ({"cluster__scan": {"mem": "2G", "mem_per_gpu": "1G", "gpus": 1}}, 2, "mem_per_gpu"),
        ({"dta": {}}, 2, 'did you mean "data"'),
    ],
)
def test_what_cannot_be_is_refused_with_its_exit_code(
    pipeline: Command, make_project: MakeProject, settings: dict[str, Any], code: int, said: str
) -> None:
    make_project(2, **settings)
    done = pipeline(*SUBMIT)
    assert (done.code, said in done.err) == (code, True), done.err
    assert "next: " in done.err


@pytest.mark.parametrize("setting", ["data.state=unbound", "data.source=manifest", "data.source=pairs"])
def test_config_check_refuses_what_submit_would_refuse(
    pipeline: Command, make_project: MakeProject, setting: str
) -> None:
    make_project(2)
    assert pipeline("config", "check").code == 0
    checked, submitted = pipeline("config", "check", "--set", setting), pipeline(*SUBMIT, "--set", setting)
    assert checked.code == submitted.code != 0
    assert checked.err == submitted.err


def test_without_a_configuration_the_first_step_is_named(pipeline: Command) -> None:
    done = pipeline(*SUBMIT)
    assert done.code == 2
    assert "pipeline demo DIR" in done.err


@pytest.mark.nightly
def test_a_submitted_run_goes_on_by_itself(make_project: MakeProject, pipeline: Command) -> None:
    folder = make_project(5)
    done = pipeline("submit", "--stage", "scan")
    assert done.code == 0
    assert "pipeline status" in done.out
    wait_for("the run to end", lambda: newest_status(folder)["state"] == "done")
    assert newest_status(folder)["stages"][0]["census"]["accepted"] == 5


def test_a_task_over_its_memory_is_begun_again_with_more_until_it_fits(
    pipeline: Command, make_project: MakeProject
) -> None:
    make_project(4)
    done = pipeline(*SUBMIT, "--set", "cluster.scan.mem=20MiB")
    assert done.code == 0, done.err
    assert "4 accepted" in done.out
    assert "task 0, attempt 1: host_oom with 20.0 MiB" in done.out
    assert "then: again with 64MiB of memory" in done.out


def test_a_task_that_does_not_fit_the_machine_ends_the_stage_and_names_the_remedy(
    pipeline: Command, make_project: MakeProject
) -> None:
    make_project(1)
    done = pipeline(*SUBMIT, "--set", "cluster.scan.mem=20MiB", "--set", "cluster.slots.mem=20MiB")
    assert done.code == 7
    assert "OUT_OF_MEMORY" in done.err
    assert "it does not even begin" in done.err
    assert "--set cluster.scan.mem=1536MiB" in done.err
    assert pipeline(*SUBMIT).code == 0


@pytest.mark.nightly
@pytest.mark.fault
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_leaves_no_process_and_loses_nothing(make_project: MakeProject, number: signal.Signals) -> None:
    folder = make_project(400)
    process = subprocess.Popen(
        [PIPELINE, *SUBMIT, "--set", "cluster.scan.items_per_task=10"], cwd=folder, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for("a first shard", lambda: any((folder / "cache/scan").glob("shards/*")))
    process.send_signal(number)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, err
    assert "run the same command again" in err
    assert "Traceback" not in err
    assert not processes_mentioning(str(folder))
    assert newest_status(folder)["state"] == "stopped"
    again = subprocess.run([PIPELINE, *SUBMIT], cwd=folder, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert "400 accepted" in again.stdout
    assert " 0 cached" not in again.stderr


@pytest.mark.fault
def test_a_run_whose_output_nobody_reads_any_more_is_stopped_and_no_bug(make_project: MakeProject) -> None:
    folder = make_project(3)
    unread, end = os.pipe()
    os.close(unread)  # as `2>&1 | head` does
    done = subprocess.run([PIPELINE, *SUBMIT], cwd=folder, stdout=end, stderr=end, check=False, timeout=DEADLINE_S)
    os.close(end)
    assert done.returncode == 141
    assert newest_status(folder)["state"] == "stopped"
    assert not processes_mentioning(str(folder))


@pytest.mark.nightly
@pytest.mark.fault
def test_a_run_under_nohup_outlives_its_terminal(make_project: MakeProject) -> None:
    folder = make_project(200)
    process = subprocess.Popen(
        ["nohup", PIPELINE, *SUBMIT, "--set", "cluster.scan.items_per_task=10"], cwd=folder, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for("a first shard", lambda: any((folder / "cache/scan").glob("shards/*")))
    process.send_signal(signal.SIGHUP)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    assert "200 accepted" in out


@pytest.mark.nightly
@pytest.mark.fault
def test_a_killed_supervisor_is_named_and_its_work_is_kept(make_project: MakeProject) -> None:
    folder = make_project(300)
    subprocess.run(
        [PIPELINE, "submit", "--stage", "scan", "--set", "cluster.scan.items_per_task=10"],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    wait_for(
        "a first shard",
        lambda: (folder / "cache/scan/shards").is_dir() and list((folder / "cache/scan/shards").iterdir()),
    )
    status = newest_status(folder)
    assert status["state"] == "running"
    os.kill(status["pid"], signal.SIGKILL)
    wait_for("the run to be found abandoned", lambda: newest_status(folder)["state"] == "abandoned")
    wait_for("its tasks to end", lambda: not processes_mentioning(str(folder)))
    again = subprocess.run([PIPELINE, *SUBMIT], cwd=folder, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert " 0 cached" not in again.stderr


def test_a_run_is_stopped_before_the_bad_rest_is_read(pipeline: Command, make_project: MakeProject) -> None:
    folder = make_project(1)
    for number in range(300):
        (folder / "data" / f"bad{number}.pdb").write_text(f"REMARK {number}\n")
    settle(folder / "data")
    done = pipeline(*SUBMIT, "--set", "cluster.scan.items_per_task=10", "--set", "cluster.slots.cpus=1")
    assert done.code == 3
    assert "were not looked at any more" in done.err
    assert "not done" in done.out


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_a_full_disk_under_the_run_does_not_change_how_a_task_that_is_told_to_end_exits(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Before, code 75, by which it asks to go on, became 1: a bug, that is not tried again."""
    run = new_run(read_config(make_project(3) / "pipeline.yaml").config, ["scan"])
    real = os.write

    def is_told(
        _project: object, _folder: object, _arguments: object, _part: object, news: run_task.News, **_: object
    ) -> None:
        monkeypatch.setattr(ledger.os, "write", full)
        news.tell(EventKind.PROGRESS, TaskReport())
        stopped = run_task.TaskStopped(number)
        stopped.came_further = True  # type: ignore[misc]
        raise stopped

    def full(file: int, data: bytes) -> int:
        if b'"kind"' in data:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data)

    monkeypatch.setattr(run_task, "ENDING", ())
    monkeypatch.setattr(run_task, "work_through", is_told)
    assert run_task.run_task([str(run.path), "scan", "0"]) == (75 if number is signal.SIGUSR2 else 143)


def test_a_note_that_a_full_disk_does_not_take_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note = Note(tmp_path / "note", 1)
    monkeypatch.setattr(ledger.os, "pwrite", partial(_raise, OSError(errno.ENOSPC, "No space left on device")))
    note.write(3, ["a"])
    note.close()


def _raise(error: Exception, *_arguments: object) -> int:
    raise error


@pytest.mark.nightly
@pytest.mark.fault
def test_a_worker_that_is_asked_to_end_publishes_what_it_has(make_project: MakeProject) -> None:
    folder = make_project(1500)
    process = subprocess.Popen(
        [PIPELINE, *SUBMIT, "--set", "cluster.scan.items_per_task=1500"],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for(
        "progress", lambda: any('"done"' in path.read_text() for path in (folder / "runs").glob("*/events/scan-*"))
    )
    (worker,) = {*processes_mentioning("from pipeline.runs.worker import")} & {*processes_mentioning(str(folder))}
    os.kill(worker, signal.SIGTERM)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    assert "task 0, attempt 1: interrupted" in out
    assert "then: it goes on where it stopped" in out
    assert "1,500 accepted" in out


def test_fresh_files_that_appear_late_are_waited_for(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_project(3)
    config = read_config(folder / "pipeline.yaml").config
    run = new_run(config, ["scan"])
    project = Project.open(config)
    ScanStage().survey(project, run, at_once=1).write_shards(run, "scan")
    assert ScanStage().judge(project, run, patience_s=0.0).undone == 3

    def appear(_seconds: float) -> None:
        list(ScanStage().work(project, run, 0, TaskContext(lambda *_: None)))

    patient = partial(waiting.wait_for, sleep=appear)
    monkeypatch.setattr("pipeline.runs.workflow.stage.wait_for", patient)
    assert ScanStage().judge(project, run, patience_s=60.0).undone == 0


@pytest.mark.parametrize(("rejected", "total", "fraction"), [(29, 100, 0.29), (63, 90, 0.7), (0, 5, 0.0), (5, 5, 1.0)])
def test_a_fraction_allows_what_it_says_to_the_item(rejected: int, total: int, fraction: float) -> None:
    assert not workflow.too_many(rejected, total, fraction)
    assert workflow.too_many(rejected + 1, total, fraction)


def processes_mentioning(text: str) -> list[int]:
    """Return the processes whose command line holds a text."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if text.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found
