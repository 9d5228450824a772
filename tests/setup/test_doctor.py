"""`pipeline doctor` and `pipeline cache stat`: every check ends in a row, and a bad one in its exit code."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from pipeline.cluster import slurm, slurm_commands
from pipeline.cluster.accounting import CommandFailed
from pipeline.cluster.slurm import SlurmExecutor
from pipeline.config.load import read_config
from pipeline.config.schema import Config
from pipeline.setup import checkup
from pipeline.setup.checkup import CheckVerdict
from tests.setup.clusters import MIXED, PLAIN, site_of
from tests.testkit.command import Command
from tests.testkit.project import MakeProject, ProjectOf
from tests.testkit.stubs import program

ROOT = Path(__file__).resolve().parents[2]
SUBMIT = ("submit", "--stage", "scan", "--follow")


def verdicts(pipeline: Command, *words: str) -> tuple[int, dict[str, str]]:
    done = pipeline("doctor", "--json", *words)
    return done.code, {row["what"]: row["verdict"] for row in json.loads(done.out)}


def test_a_good_project_has_nothing_bad(pipeline: Command, make_project: MakeProject) -> None:
    make_project(3)
    code, found = verdicts(pipeline)
    assert code == 0
    assert {"python", "pipeline", "torch", "config", "data", "cache folder", "disk", "run folders"} <= set(found)
    assert "BAD" not in found.values()


def test_the_torch_that_is_tested_is_the_least_that_is_declared_and_the_one_that_is_pinned() -> None:
    declared = re.search(r'"torch>=([^"]+)"', (ROOT / "pyproject.toml").read_text())
    pinned = re.search(r"^torch==(\d+\.\d+)\.", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert declared is not None
    assert pinned is not None
    assert checkup.TESTED_TORCH == declared[1] == pinned[1]


def test_what_is_wrong_is_bad_and_has_a_remedy(pipeline: Command, make_project: MakeProject) -> None:
    make_project(3)
    for setting, what in {
        "data.path=nowhere": "data",
        "data.limt=3": "config",
        "cache.root=data": "cache",
        "cache.root=/proc/none": "cache folder",
        "cluster.runs=/proc/none": "run folders",
        "train.task=nowhere_at_all:Task": "task",
    }.items():
        done = pipeline("doctor", "--json", "--set", setting)
        bad = {row["what"]: row["remedy"] for row in json.loads(done.out) if row["verdict"] == "BAD"}
        assert (done.code, what in bad, "" in bad.values()) == (2, True, False), setting


RNA = "train.task=pipeline.tasks.rna_ligand:RnaLigand"


def test_doctor_and_config_check_find_the_same(
    pipeline: Command, make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_project(3)
    for without in ("wandb", "tensorboard"):
        for name in [name for name in sys.modules if name == without or name.startswith(f"{without}.")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, without, None)
    for settings, what in {
        ("embed.weights=nowhere.pt",): "weights",
        ("train.trackers=[wandb]",): "trackers",
        ("train.trackers=[tensorboard]",): "trackers",
        (RNA, "graph.nodes=atom", "structures.ligands=keep"): "task",
        ("train.task=nowhere_at_all:Task",): "task",
        ("data.path=nowhere",): "data",
    }.items():
        words = [word for setting in settings for word in ("--set", setting)]
        told = pipeline("doctor", "--json", *words)
        (row,) = (row for row in json.loads(told.out) if row["what"] == what)
        checked = pipeline("config", "check", *words)
        assert (told.code, row["verdict"], checked.code, checked.out) == (2, "BAD", 2, ""), settings
        assert row["found"] in checked.err, settings
        assert row["remedy"] in checked.err, settings


def test_weights_that_are_missing_are_reported_once_though_the_task_needs_them(
    pipeline: Command, project_of: ProjectOf
) -> None:
    project_of("graph")
    words = ("--set", "embed.weights=nowhere.pt", "--set", "train.task=pipeline.tasks.interface:Interface")
    rows = json.loads(pipeline("doctor", "--json", *words).out)
    assert [row["what"] for row in rows if row["verdict"] == "BAD"] == ["weights"]


def test_weights_that_nobody_named_and_items_that_are_refused_are_a_note_of_both(
    pipeline: Command, make_project: MakeProject
) -> None:
    folder = make_project(3)
    (folder / "data" / "c0.ent").write_bytes((folder / "data" / "c0.pdb").read_bytes())
    assert verdicts(pipeline)[1]["weights"] == "note"
    checked = pipeline("config", "check")
    assert (checked.code, "valid" in checked.out, "1 rejected" in checked.err) == (0, True, True)
    assert "next: pipeline weights fetch" in checked.err
    assert "next: pipeline submit scan" in checked.err


def test_settings_that_do_harm_are_named_with_their_source(
    pipeline: Command, make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_project(1)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:128")
    rows = json.loads(pipeline("doctor", "--json", "--set", "train.empty_cache_every=1").out)
    told = [row for row in rows if row["what"] == "settings"]
    assert ["max_split_size_mb" in row["found"] for row in told].count(True) == 1
    assert ["empty_cache()" in row["found"] for row in told].count(True) == 1
    assert all("https://" in row["remedy"] for row in told)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    assert "settings" not in {row["what"] for row in json.loads(pipeline("doctor", "--json").out)}


def test_files_that_are_missing_or_impossible_are_found(pipeline: Command, make_project: MakeProject) -> None:
    folder = make_project(1)
    rows = [
        "id,path,receptor_chains,ligand_chains",
        "a,data/c0.pdb,A,B",
        "b,data/gone.pdb,A,B",
        f"c,{'x' * 300}.pdb,A,B",
    ]
    (folder / "m.csv").write_text("\n".join(rows) + "\n")
    (folder / "pipeline.yaml").write_text("data: {path: m.csv}\n")
    done = pipeline("doctor")
    assert done.code == 3
    assert "2 files of the first 3 items are missing or unreadable" in done.out


@pytest.fixture
def no_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A PATH with nothing on it."""
    tools = tmp_path / "bin"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    return tools


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Config]:
    """Return what a command line on a cluster would have."""

    def read(*sets: str) -> Config:
        return read_config(None, [f"data.path={tmp_path}", "cluster.executor=slurm", *sets]).config

    return read


def test_a_cluster_without_its_commands_or_an_answer_is_a_refusal(
    pipeline: Command, make_project: MakeProject, no_slurm: Path
) -> None:
    def slurm() -> Any:
        done = pipeline("doctor", "--json", "--set", "cluster.executor=slurm")
        (row,) = (row for row in json.loads(done.out) if row["what"] == "slurm")
        assert (done.code, row["verdict"], row["exit_code"]) == (6, "BAD", 6)
        return row

    make_project(1)
    assert "sbatch, srun" in slurm()["found"]
    assert "cluster.executor=local" in slurm()["remedy"]
    for name in checkup.COMMANDS:
        program(no_slurm, name, "echo 'slurm_load_ctl_conf error: Connection refused' >&2; exit 1")
    assert "slurm_load_ctl_conf error: Connection refused" in slurm()["found"]
    local, rows = verdicts(pipeline)
    assert (local, rows["cluster"]) == (0, "note")  # nobody waits for a cluster that is not used


def test_partitions_that_settings_name_must_be_there(config: Callable[..., Config]) -> None:
    for setting, found, code in [
        ("cluster.slurm.partition=mian", "main?", 6),
        ("cluster.supervisor.partition=other", "cluster.supervisor.partition", 6),
        ("cluster.slurm.cards=[{mem: 9GiB, partition: x}]", "cluster.slurm.cards", 6),
    ]:
        (row,) = checkup.check_partitions(config(setting), site_of(PLAIN))
        assert (row.exit_code, found in row.found, bool(row.remedy)) == (code, True, bool(code)), setting
    (old,) = checkup.check_partitions(config("cluster.slurm.partition=old"), site_of(MIXED))
    assert old.verdict is CheckVerdict.NOTE  # it is down


def test_the_scheduler_is_asked_about_each_job_planned_or_not(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a stage that cannot be planned yet, as embed without weights, about what is configured."""

    def ask(words: Sequence[str], *_more: object, stdin: str = "") -> str:
        if "sbatch" in words and "--partition=short" in stdin:
            raise CommandFailed("sbatch: error: Invalid account or account/partition combination specified")
        return ""

    monkeypatch.setattr(slurm, "run_command", ask)
    monkeypatch.setattr(slurm_commands, "run_command", ask)
    monkeypatch.setattr(slurm_commands, "is_there", lambda: True)
    asked = config("cluster.embed.partition=short", "embed.weights=nowhere.pt")
    rows = {row.what: row for row in checkup.check_jobs(asked, SlurmExecutor(asked.cluster.slurm))}
    assert {name for name, row in rows.items() if row.exit_code} == {"job embed"}
    assert (rows["job embed"].exit_code, "cluster.slurm.account" in rows["job embed"].remedy) == (6, True)
    assert {"job scan", "job graph", "job supervise"} <= rows.keys()


def test_folders_that_nodes_may_not_see_are_told_with_why(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = {"/": "ext4", "/group": "nfs4", "/group/my scratch": "tmpfs"}
    mounts = [SimpleNamespace(mountpoint=place, fstype=kind) for place, kind in kinds.items()]
    monkeypatch.setattr(psutil, "disk_partitions", lambda **_more: mounts)
    monkeypatch.delenv("TMPDIR", raising=False)
    sets = ("data.path=/group/a.csv", "cache.root=/group/my scratch/cache", "cluster.runs=/tmp/runs")
    rows = {row.found for row in checkup.check_folders(config(*sets))}
    assert "run folders: below /tmp, which is local to each machine" in rows
    assert "cache: on tmpfs, which is local to each machine" in rows
    assert not any("data" in row for row in rows)
