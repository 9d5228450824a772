"""`pipeline submit scan`, as people type it: what it says, what it leaves, and its exit codes."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest

from pipeline import waiting
from pipeline.cluster import slurm
from pipeline.config.load import read_config
from pipeline.engine import worker
from pipeline.engine.lifecycle import new_run
from pipeline.journal import ledger
from pipeline.journal.run_folder import runs_in
from pipeline.project.project import Project
from pipeline.records import EventKind, TaskContext, TaskReport
from pipeline.stages import table as workflow
from pipeline.stages.scan import ScanStage
from tests.testkit.project import PIPELINE, TRAIN, settle, to_do, until, write_complex, write_config
from tests.testkit.stubs import SILENT, program
from tests.testkit.trained import SMALL, write_project

SUBMIT = ("submit", "--stage", "scan", "--executor", "local", "--follow")


def newest_status(folder: Path) -> dict:  # type: ignore[type-arg]
    """Return what `pipeline status --json` says."""
    done = subprocess.run([PIPELINE, "status", "--json"], cwd=folder, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_a_second_submit_does_nothing_again(pipeline, make_project):
    make_project(6)
    assert pipeline(*SUBMIT).code == 0
    assert pipeline(*SUBMIT).code == 0
    assert to_do() == {"scan": (6, 0)}


@pytest.mark.nightly
def test_one_added_file_costs_one_file(pipeline, make_project):
    folder = make_project(6)
    pipeline(*SUBMIT)
    write_complex(folder / "data" / "new.pdb", 77)
    assert pipeline(*SUBMIT).code == 0
    assert to_do() == {"scan": (6, 1)}


def test_a_dry_run_says_what_would_be_done_and_leaves_nothing(pipeline, make_project):
    folder = make_project(3)
    assert pipeline(*SUBMIT, "--dry-run").code == 0
    (scan,) = pipeline(*SUBMIT, "--dry-run", "--json").json()["stages"]
    counts = scan["counts"]
    assert (counts["items"], counts["cached"], counts["missing"], counts["tasks"]) == (3, 0, 3, 1)
    assert sorted(path.name for path in folder.iterdir()) == ["data", "pipeline.yaml"]


@pytest.mark.parametrize("is_installed", [True, False])
@pytest.mark.parametrize("json_too", [False, True])
def test_a_dry_run_shows_the_scripts_also_where_the_cluster_does_not_answer(
    pipeline, make_project, monkeypatch, is_installed, json_too
):
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
    monkeypatch.setattr(slurm, "TRIES_S", ())
    words = ("submit", "--stage", "scan", "--executor", "slurm", "--dry-run", *(["--json"] if json_too else []))
    done = pipeline(*words)
    assert done.code == 0, done.err
    scripts = json.loads(done.out)["scripts"].values() if json_too else done.out.split("# ----")[1:]
    assert len(scripts) == 2
    assert all("#SBATCH --job-name=RUN-" in script for script in scripts)
    why = "Unable to contact slurm controller" if is_installed else "sbatch: No such file or directory"
    assert why in done.err
    refused = pipeline("submit", "--stage", "scan", "--executor", "slurm")
    assert (refused.code, why in refused.err) == (6, True)


def test_every_kind_of_bad_input_is_a_counted_rejection(pipeline, make_project):
    folder = make_project(4, data__max_rejected_fraction=1)
    (folder / "data" / "empty.pdb").write_bytes(b"")
    (folder / "data" / "junk.cif").write_bytes(b"\x00\xff" * 500)
    (folder / "data" / "short.pdb.gz").write_bytes(b"\x1f\x8b\x08\x00")
    (folder / "data" / "noatoms.cif").write_text("data_x\n_cell.length_a 1\n")
    (folder / "data" / "one chain.pdb").write_text((folder / "data" / "c0.pdb").read_text())
    (folder / "data" / f"{'x' * 220}.pdb").write_text((folder / "data" / "c0.pdb").read_text())
    done = pipeline(*SUBMIT)
    assert done.code == 0, done.err
    (run,) = runs_in(folder / "runs")
    listed = [json.loads(line) for line in run.rejected.read_text().splitlines()]
    assert len(listed) == 6
    assert {one["reason"] for one in listed} >= {"empty_file", "parse_error", "truncated_file", "no_atoms", "bad_id"}
    assert all(one["detail"] for one in listed)
    assert newest_status(folder)["stages"][0]["census"]["accepted"] == 4


def test_too_many_rejections_end_the_run_with_the_reasons(pipeline, make_project):
    folder = make_project(4)
    for number in range(3):
        (folder / "data" / f"bad{number}.pdb").write_bytes(b"")
    done = pipeline(*SUBMIT)
    assert (done.code, "data.max_rejected_fraction" in done.err) == (3, True)
    assert "empty_file" in done.out
    assert "empty_file" in pipeline("status").out
    assert pipeline(*SUBMIT).code == 3  # what is known from before counts as well


def use_manifest(folder: Path, *rows: str) -> None:
    """Let a manifest of these rows be the data set."""
    (folder / "m.csv").write_text("\n".join(["id,path,receptor_chains,ligand_chains,split", *rows, ""]))
    write_config(folder, data={"path": "m.csv", "max_rejected_fraction": 0.5})


@pytest.mark.nightly
def test_a_sequence_in_two_splits_is_a_leak(pipeline, make_project):
    folder = make_project(2)
    shutil.copy(folder / "data" / "c0.pdb", folder / "data" / "twin.pdb")
    use_manifest(folder, "a,data/c0.pdb,A,B,train", "b,data/c1.pdb,A,B,train", "t,data/twin.pdb,A,B,test")
    done = pipeline(*SUBMIT)
    assert done.code == 3
    assert "a, t" in done.err
    warned = pipeline(*SUBMIT, "--set", "data.on_leak=warn")
    assert warned.code == 0
    assert pipeline(*SUBMIT, "--set", "data.on_leak=ignore").code == 0


def test_an_id_in_two_splits_is_a_leak_although_its_second_row_is_left_out(pipeline, make_project):
    folder = make_project(3)
    use_manifest(folder, "a,data/c0.pdb,A,B,train", "b,data/c1.pdb,A,B,train", "a,data/c2.pdb,A,B,test")
    assert pipeline(*SUBMIT).code == 3


@pytest.mark.parametrize(
    ("settings", "code", "said"),
    [
        ({"cluster__scan__cpus": 999}, 6, "999"),
        ({"cluster__scan__mem": "900TiB"}, 6, "of memory"),
        ({"cache__root": "data"}, 2, "neither a cache nor empty"),
        ({"cluster__scan": {"mem": "2G", "mem_per_gpu": "1G", "gpus": 1}}, 2, "mem_per_gpu"),
        ({"dta": {}}, 2, 'did you mean "data"'),
    ],
)
def test_what_cannot_be_is_refused_with_its_exit_code(pipeline, make_project, settings, code, said):
    make_project(2, **settings)
    done = pipeline(*SUBMIT)
    assert (done.code, said in done.err) == (code, True), done.err
    assert "next: " in done.err
    assert pipeline("plan", "--stage", "scan").code == code


@pytest.mark.parametrize("setting", ["data.state=unbound", "data.source=manifest", "data.source=pairs"])
def test_config_check_refuses_what_submit_would_refuse(pipeline, make_project, setting):
    make_project(2)
    assert pipeline("config", "check").code == 0
    checked, submitted = pipeline("config", "check", "--set", setting), pipeline(*SUBMIT, "--set", setting)
    assert checked.code == submitted.code != 0
    assert checked.err == submitted.err


def test_a_task_over_its_memory_is_begun_again_with_more_until_it_fits(pipeline, make_project):
    folder = make_project(4)
    done = pipeline(*SUBMIT, "--set", "cluster.scan.mem=20MiB")
    assert done.code == 0, done.err
    (stage,) = newest_status(folder)["stages"]
    (failure,) = stage["failures"]
    assert (failure["cause"], failure["ask"]["mem_bytes"]) == ("host_oom", 20 << 20)
    assert stage["census"]["accepted"] == 4


def test_a_task_that_does_not_fit_the_machine_ends_the_stage_and_names_the_remedy(pipeline, make_project):
    make_project(1)
    done = pipeline(*SUBMIT, "--set", "cluster.scan.mem=20MiB", "--set", "cluster.slots.mem=20MiB")
    assert done.code == 7
    assert "OUT_OF_MEMORY" in done.err
    assert "1536MiB" not in done.err, "it has no more"
    assert "more than 20MiB" in done.err
    assert pipeline(*SUBMIT).code == 0


@pytest.mark.nightly
@pytest.mark.fault
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_leaves_no_process_and_loses_nothing(make_project, number):
    folder = make_project(400)
    process = subprocess.Popen(
        [PIPELINE, *SUBMIT, "--set", "cluster.scan.items_per_task=10"], cwd=folder, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    until("a first shard", lambda: any((folder / "cache/scan").glob("shards/*")))
    process.send_signal(number)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert not processes_mentioning(str(folder))
    assert newest_status(folder)["state"] == "stopped"
    again = subprocess.run([PIPELINE, *SUBMIT], cwd=folder, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert newest_status(folder)["stages"][0]["census"]["accepted"] == 400
    assert to_do(folder)["scan"][0] > 0


@pytest.mark.fault
def test_a_run_whose_output_nobody_reads_any_more_is_stopped_and_no_bug(make_project):
    folder = make_project(3)
    unread, end = os.pipe()
    os.close(unread)  # as `2>&1 | head` does
    done = subprocess.run([PIPELINE, *SUBMIT], cwd=folder, stdout=end, stderr=end, check=False, timeout=300)
    os.close(end)
    assert done.returncode == 141
    assert newest_status(folder)["state"] == "stopped"
    assert not processes_mentioning(str(folder))


def test_a_run_is_stopped_before_the_bad_rest_is_read(pipeline, make_project, tmp_path):
    folder = make_project(1)
    for number in range(300):
        (folder / "data" / f"bad{number}.pdb").write_text(f"REMARK {number}\n")
    settle(folder / "data")
    done = pipeline(*SUBMIT, "--set", "cluster.scan.items_per_task=10", "--set", "cluster.slots.cpus=1")
    assert done.code == 3
    (stage,) = newest_status(tmp_path)["stages"]
    assert stage["items_done"] < stage["missing"]


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_a_full_disk_under_the_run_does_not_change_how_a_task_that_is_told_to_end_exits(
    make_project, monkeypatch, number
):
    run = new_run(read_config(make_project(3) / "pipeline.yaml").config, ["scan"])
    real = os.write

    def is_told(
        _stage: object,
        _project: object,
        _folder: object,
        _arguments: object,
        _part: object,
        news: worker.News,
        **_: object,
    ) -> None:
        monkeypatch.setattr(ledger.os, "write", full)
        news.record(EventKind.PROGRESS, TaskReport())
        stopped = worker.TaskStopped(number)
        stopped.came_further = True  # type: ignore[misc]
        raise stopped

    def full(file: int, data: bytes) -> int:
        if b'"kind"' in data:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data)

    monkeypatch.setattr(worker, "FORWARDED", ())
    monkeypatch.setattr(worker, "work_through", is_told)
    assert worker.main([str(run.path), "scan", "0"]) == (75 if number is signal.SIGUSR2 else 143)


def test_a_task_whose_frozen_configuration_cannot_be_read_records_why(make_project, monkeypatch):
    monkeypatch.setattr(worker, "FORWARDED", ())  # this process keeps its own handlers
    run = new_run(read_config(make_project(3) / "pipeline.yaml").config, ["scan"])
    run.config.write_text("no: [configuration")
    assert worker.main([str(run.path), "scan", "0"]) == 2
    events = [json.loads(line) for path in run.events.glob("scan-*") for line in path.read_text().splitlines()]
    assert [event["kind"] for event in events] == ["task_started", "task_failed"]
    assert run.config.name in events[-1]["what"]


@pytest.mark.nightly
@pytest.mark.fault
def test_a_worker_that_is_asked_to_end_publishes_what_it_has(make_project):
    folder = make_project(1500)
    process = subprocess.Popen(
        [PIPELINE, *SUBMIT, "--set", "cluster.scan.items_per_task=1500"],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    until("progress", lambda: any('"done"' in path.read_text() for path in (folder / "runs").glob("*/events/scan-*")))
    (worker,) = {*processes_mentioning("from pipeline.engine.worker import")} & {*processes_mentioning(str(folder))}
    os.kill(worker, signal.SIGTERM)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    (stage,) = newest_status(folder)["stages"]
    assert [failure["cause"] for failure in stage["failures"]] == ["interrupted"]
    assert stage["census"]["accepted"] == 1500


def test_fresh_files_that_appear_late_are_waited_for(make_project, monkeypatch):
    folder = make_project(3)
    config = read_config(folder / "pipeline.yaml").config
    run = new_run(config, ["scan"])
    project = Project.open(config)
    ScanStage().survey(project, run, at_once=1).write_shards(run, "scan")
    assert ScanStage().judge(project, run, patience_s=0.0).undone == 3

    def appear(_seconds: float) -> None:
        list(ScanStage().work(project, run, 0, TaskContext(lambda *_: None)))

    patient = partial(waiting.wait_for, sleep=appear)
    monkeypatch.setattr("pipeline.stages.stage.wait_for", patient)
    assert ScanStage().judge(project, run, patience_s=60.0).undone == 0


@pytest.mark.parametrize(("rejected", "total", "fraction"), [(29, 100, 0.29), (63, 90, 0.7), (0, 5, 0.0), (5, 5, 1.0)])
def test_a_fraction_allows_what_it_says_to_the_item(rejected, total, fraction):
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


UNFIT = {
    "train.split=Train": "--set train.split=train",
    "train.validation.split=Val": "--set train.validation.split=val",
    "train.evaluate.split=tset": "--set train.evaluate.split=test",
    "train.options.embedding_dim=64": "--set train.options.embedding_dim=16 ",
}


def test_splits_and_a_width_that_data_and_weights_do_not_have_are_refused_before_the_first_stage(pipeline, tmp_path):
    settings = {**SMALL, "train__task": TRAIN["train__task"]}
    write_project(tmp_path, settings, {}, ("train", "train", "val", "test"))
    for setting, remedy in UNFIT.items():
        for words in (("submit", "--stage", "all", "--follow"), ("config", "check"), ("plan", "--stage", "train")):
            done = pipeline(*words, "--set", setting)
            assert (done.code, f"next: {remedy}".rstrip() in done.err, runs_in(Path("runs"))) == (2, True, []), words
    table = Path("data/manifest.csv")
    table.write_text(table.read_text().replace(",test", ",test_a"))
    assert pipeline("config", "check").code == 0  # what no stage reads may keep the default of evaluate.split


@pytest.mark.nightly
def test_a_task_that_is_refused_is_told_once_with_what_helps(pipeline, tmp_path):
    own = (
        "from pipeline.errors import ConfigError",
        "from pipeline.tasks.interface import Interface",
        "class Own(Interface):",
        "    def collate(self, items, rng):",
        "        raise ConfigError('no way', remedy='--set train.x=1')",
    )
    settings = {**SMALL, "train__task": "own_task:Own", "train__epochs": 1}
    write_project(tmp_path, settings, {"own_task.py": "\n".join(own)}, ("train", "train"))
    done = pipeline("submit", "--stage", "train", "--follow")
    assert (done.code, done.said.count("no way"), done.err.strip().split("next: ")[-1]) == (7, 1, "--set train.x=1")
