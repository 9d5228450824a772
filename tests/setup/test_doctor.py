"""`pipeline doctor` and `pipeline cache stat`: every check ends in a row, and a bad one in its exit code."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from pipeline.config.load import read_config
from pipeline.config.schema import Config
from pipeline.setup import checkup, slurm_checks
from pipeline.setup.slurm_checks import CheckVerdict
from tests.setup.clusters import BARE, MIXED, PLAIN, site_of
from tests.testkit.command import Command
from tests.testkit.project import MakeProject

ROOT = Path(__file__).resolve().parents[2]
SUBMIT = ("submit", "--stage", "scan", "--follow")


def verdicts(pipeline: Command, *words: str) -> tuple[int, dict[str, str]]:
    done = pipeline("doctor", "--json", *words)
    return done.code, {row["what"]: row["verdict"] for row in json.loads(done.out)}


def test_a_good_project_has_nothing_bad(pipeline: Command, make_project: MakeProject) -> None:
    make_project(3)
    code, found = verdicts(pipeline)
    assert code == 0
    assert {"python", "packages", "config", "data", "cache", "cache folder", "disk", "run folders", "machine"} <= set(
        found
    )
    assert "BAD" not in found.values()


def test_the_torch_that_is_tested_is_the_least_that_is_declared_and_the_one_that_is_pinned() -> None:
    declared = re.search(r'"torch>=([^"]+)"', (ROOT / "pyproject.toml").read_text())
    pinned = re.search(r"^torch==(\d+\.\d+)\.", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert declared is not None
    assert pinned is not None
    assert checkup.TESTED_TORCH == declared[1] == pinned[1]


@pytest.mark.parametrize(
    ("found", "verdict"), [("2.13.4+cu130", "ok"), ("2.130.0", "note"), ("2.15.0", "note"), ("2.9.1", "note")]
)
def test_a_torch_that_was_not_tested_is_noted_and_no_failure(
    pipeline: Command, make_project: MakeProject, monkeypatch: pytest.MonkeyPatch, found: str, verdict: str
) -> None:
    make_project(3)
    monkeypatch.setattr(checkup, "version", lambda name: found if name == "torch" else version(name))
    done = pipeline("doctor", "--json")
    (row,) = [row for row in json.loads(done.out) if row["what"] == "torch"]
    assert (done.code, row["verdict"]) == (0, verdict)
    assert found in row["found"]
    assert (checkup.TESTED_TORCH in row["remedy"]) == (verdict == "note")


@pytest.mark.parametrize(
    ("setting", "what", "code"),
    [
        ("data.path=nowhere", "data", 2),
        ("data.limt=3", "config", 2),
        ("cache.root=data", "cache", 2),
        ("cache.root=/proc/none", "cache folder", 2),
        ("cluster.runs=/proc/none", "run folders", 2),
        ("train.task=nowhere_at_all:Task", "task", 2),
    ],
)
def test_what_is_wrong_is_bad_and_has_a_remedy(
    pipeline: Command, make_project: MakeProject, setting: str, what: str, code: int
) -> None:
    make_project(3)
    found, rows = verdicts(pipeline, "--set", setting)
    assert (found, rows[what]) == (code, "BAD")
    for row in json.loads(pipeline("doctor", "--json", "--set", setting).out):
        assert row["verdict"] != "BAD" or row["remedy"]


RNA = "train.task=pipeline.tasks.rna_ligand:RnaLigand"


@pytest.mark.parametrize(
    ("setting", "without", "what", "said"),
    [
        ("embed.weights=nowhere.pt", "", "weights", "there is no checkpoint at this path"),
        ("train.trackers=[wandb]", "wandb", "trackers", "wandb is not installed"),
        (
            "train.trackers=[tensorboard]",
            "tensorboard",
            "trackers",
            "pip install 'protein-training-pipeline[tensorboard]'",
        ),
        (RNA, "", "task", "the task reads RNA pockets"),
        ("train.task=nowhere_at_all:Task", "", "task", "nowhere_at_all"),
        ("data.path=nowhere", "", "data", "does not exist"),
    ],
)
def test_doctor_and_config_check_find_the_same(
    pipeline: Command,
    make_project: MakeProject,
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    without: str,
    what: str,
    said: str,
) -> None:
    make_project(3)
    graphs = ("--set", "graph.nodes=atom", "--set", "structures.ligands=keep") if setting == RNA else ()
    if without:
        for name in [name for name in sys.modules if name == without or name.startswith(f"{without}.")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, without, None)
    code, rows = verdicts(pipeline, "--set", setting, *graphs)
    assert (code, rows[what]) == (2, "BAD")
    checked = pipeline("config", "check", "--set", setting, *graphs)
    assert (checked.code, checked.out) == (2, "")
    assert said in checked.err
    (row,) = (
        row for row in json.loads(pipeline("doctor", "--json", "--set", setting, *graphs).out) if row["what"] == what
    )
    assert row["found"] in checked.err
    assert row["remedy"] in checked.err


def test_what_several_checks_stumble_over_is_said_once(pipeline: Command, make_project: MakeProject) -> None:
    (make_project(3) / "taken").write_text("a file")
    task = "train.task=pipeline.tasks.interface:Interface"
    checked = pipeline("config", "check", "--set", "cache.root=taken", "--set", task)
    assert checked.code == 2
    assert checked.err.count("the cache cannot be read: Not a directory") == 1


def test_weights_that_nobody_named_are_a_note_of_both(pipeline: Command, make_project: MakeProject) -> None:
    make_project(3)
    assert verdicts(pipeline)[1]["weights"] == "note"
    checked = pipeline("config", "check")
    assert (checked.code, "valid" in checked.out) == (0, True)
    assert "needed from the stage embed on" in checked.err
    assert "next: pipeline weights fetch" in checked.err


def test_items_that_the_source_refuses_are_a_note_with_what_lists_them(
    pipeline: Command, make_project: MakeProject
) -> None:
    project = make_project(2)
    (project / "data" / "c0.ent").write_bytes((project / "data" / "c0.pdb").read_bytes())
    checked = pipeline("config", "check")
    assert checked.code == 0
    assert "1 refused" in checked.err
    assert "next: pipeline submit --stage scan" in checked.err


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


def test_cache_stat_counts_what_a_run_has_stored(pipeline: Command, make_project: MakeProject) -> None:
    make_project(5)
    assert "no cache is there yet: pipeline submit --stage all" in pipeline("cache", "stat").out
    pipeline(*SUBMIT)
    found = {one["kind"]: one for one in json.loads(pipeline("cache", "stat", "--json").out)["kinds"]}
    assert {kind: one["records"] for kind, one in found.items()} == {"scan": 5, "files": 5, "recipes": 1}
    assert all(one["index"] == "current" and not one["unreadable"] for one in found.values())


@pytest.mark.nightly
def test_an_unreadable_shard_is_named_and_its_records_are_made_anew(
    pipeline: Command, make_project: MakeProject
) -> None:
    folder = make_project(5)
    pipeline(*SUBMIT)
    (shard,) = (folder / "cache/scan/shards").iterdir()
    shard.chmod(0o644)
    shard.write_bytes(shard.read_bytes()[:-7])
    assert shard.name in pipeline("cache", "stat").out
    again = pipeline(*SUBMIT)
    assert (again.code, "0 cached, 5 to do" in again.err) == (0, True), again.err
    assert "5 cached, 0 to do" in pipeline(*SUBMIT).err


def test_a_read_only_cache_serves_a_run_that_has_nothing_to_store(
    pipeline: Command, make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_project(3)
    pipeline(*SUBMIT)
    monkeypatch.setattr("pipeline.store.store.Store.write_index", lambda _store: pytest.fail("the cache was written"))
    assert pipeline(*SUBMIT).code == 0


def test_a_purged_marker_costs_nothing(pipeline: Command, make_project: MakeProject) -> None:
    folder = make_project(3)
    pipeline(*SUBMIT)
    (folder / "cache/pipeline-cache.json").unlink()
    again = pipeline(*SUBMIT)
    assert (again.code, "3 cached, 0 to do" in again.err) == (0, True), again.err


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


def test_a_cluster_without_its_commands_is_a_refusal(
    pipeline: Command, make_project: MakeProject, no_slurm: Path
) -> None:
    make_project(1)
    done = pipeline("doctor", "--json", "--set", "cluster.executor=slurm")
    (row,) = (row for row in json.loads(done.out) if row["what"] == "slurm")
    assert (done.code, row["verdict"], row["exit_code"]) == (6, "BAD", 6)
    assert "not on the PATH: sbatch, srun" in row["found"]
    assert "cluster.executor=local" in row["remedy"]


def test_a_controller_that_does_not_answer_is_a_refusal_in_its_own_words(
    pipeline: Command, make_project: MakeProject, no_slurm: Path
) -> None:
    for name in slurm_checks.COMMANDS:
        (no_slurm / name).write_text("#!/bin/sh\necho 'slurm_load_ctl_conf error: Connection refused' >&2\nexit 1\n")
        (no_slurm / name).chmod(0o755)
    make_project(1)
    done = pipeline("doctor", "--json", "--set", "cluster.executor=slurm")
    (row,) = (row for row in json.loads(done.out) if row["what"] == "slurm")
    assert (done.code, row["verdict"]) == (6, "BAD")
    assert "slurm_load_ctl_conf error: Connection refused" in row["found"]
    local, rows = verdicts(pipeline)
    assert (local, rows["cluster"]) == (0, "note")  # nobody waits for a cluster that is not used


@pytest.mark.parametrize(
    ("settings", "what", "found", "code"),
    [
        ((), "partition", "main is up: 3 nodes, at most 1-00:00:00", 0),
        (("cluster.slurm.partition=mian",), "partition", "did you mean main?", 6),
        (
            ("cluster.supervisor.partition=other",),
            "partition",
            "other (cluster.supervisor.partition) does not exist",
            6,
        ),
        (
            ("cluster.slurm.cards=[{mem: 9GiB, partition: x}]",),
            "partition",
            "x (cluster.slurm.cards) does not exist",
            6,
        ),
        (("cluster.graph.partition=short",), "time", "graph asks for 01:00:00, and short gives at most 00:02:00", 6),
    ],
)
def test_partitions_that_jobs_name_must_be_there_and_give_the_time(
    config: Callable[..., Config], no_slurm: Path, settings: tuple[str, ...], what: str, found: str, code: int
) -> None:
    rows = list(slurm_checks.check_partitions(config(*settings), site_of(PLAIN)))
    assert [row.exit_code for row in rows if row.what == what and found in row.found] == [code]
    assert all(row.remedy for row in rows if row.exit_code)


def test_a_partition_that_is_down_or_a_cluster_without_a_default_is_told(
    config: Callable[..., Config], no_slurm: Path
) -> None:
    (old, *_) = slurm_checks.check_partitions(config("cluster.slurm.partition=old"), site_of(MIXED))
    assert (old.verdict, "they would wait" in old.found) == (CheckVerdict.NOTE, True)
    (none,) = slurm_checks.check_partitions(config(), site_of(BARE))
    assert (none.exit_code, "has no default; there are no, gpu:fast" in none.found) == (6, True)


@pytest.mark.parametrize(
    ("settings", "found", "code"),
    [
        ((), "your default, lab", 0),
        (("cluster.slurm.account=root",), "account root", 0),
        (("cluster.slurm.account=lob",), "account lob is not among yours: lab, root", 6),
        (("cluster.slurm.qos=huge",), "qos huge is not among yours: normal, tiny", 6),
    ],
)
def test_accounts_and_qos_must_be_ones_own(
    config: Callable[..., Config], settings: tuple[str, ...], found: str, code: int
) -> None:
    (row,) = slurm_checks.check_charging(config(*settings), site_of(PLAIN))
    assert (row.found, row.exit_code) == (found, code)


def test_an_accounting_that_tells_nothing_refuses_nothing(config: Callable[..., Config]) -> None:
    assert list(slurm_checks.check_charging(config(), site_of(BARE))) == []
    (row,) = slurm_checks.check_charging(config("cluster.slurm.account=x"), site_of(BARE))
    assert (row.verdict, row.exit_code) == (CheckVerdict.NOTE, 0)


@pytest.mark.parametrize(
    ("printed", "settings", "verdict", "found"),
    [
        (PLAIN, (), CheckVerdict.OK, "is stopped"),
        (PLAIN, ("cluster.slurm.memory=none",), CheckVerdict.NOTE, "is not stopped"),
        (BARE, (), CheckVerdict.NOTE, "memory is not given out here (SelectTypeParameters=CR_CPU)"),
        (BARE, ("cluster.slurm.memory=none",), CheckVerdict.NOTE, "may fill its node"),
        (MIXED, (), CheckVerdict.NOTE, "was not told"),
    ],
)
def test_whether_memory_is_watched_is_said(
    config: Callable[..., Config], printed: dict[str, str], settings: tuple[str, ...], verdict: CheckVerdict, found: str
) -> None:
    (row,) = slurm_checks.check_memory(config(*settings), site_of(printed))
    assert (row.verdict, found in row.found) == (verdict, True)


def test_preemption_is_told_of_the_partitions_that_are_used(config: Callable[..., Config]) -> None:
    assert list(slurm_checks.check_preemption(config(), site_of(PLAIN))) == []
    (row,) = slurm_checks.check_preemption(config("cluster.graph.partition=preempt"), site_of(PLAIN))
    assert "preempt: REQUEUE: tasks that have to make room are told by SIGTERM, and have 5 s" in row.found
    signalled = PLAIN | {"config": PLAIN["config"] + "PreemptParameters = send_user_signal\n"}
    (row,) = slurm_checks.check_preemption(config("cluster.graph.partition=preempt"), site_of(signalled))
    assert "the signal we ask for" in row.found
    (row,) = slurm_checks.check_preemption(config(), site_of(MIXED))
    assert "JobRequeue=0" in row.found


def test_folders_that_nodes_may_not_see_are_told_with_why(
    config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/sda1 / ext4 rw 0 0\nserver:/x /group nfs4 rw 0 0\ntmpfs /group/my\\040scratch tmpfs rw 0 0\nsysfs\n"
    )
    monkeypatch.setattr(slurm_checks, "MOUNTS", mounts)
    monkeypatch.delenv("TMPDIR", raising=False)
    sets = ("data.path=/group/a.csv", "cache.root=/group/my scratch/cache", "cluster.runs=/tmp/runs")
    rows = {row.found for row in slurm_checks.check_folders(config(*sets), site_of(PLAIN))}
    assert "run folders: below /tmp, which every machine has for itself" in rows
    assert "cache: on tmpfs, which every machine has for itself" in rows
    assert not any("data" in row for row in rows)


def test_no_accounting_is_a_note_and_no_failure(config: Callable[..., Config], no_slurm: Path) -> None:
    (row,) = slurm_checks.check_accounting(config(), site_of(PLAIN))
    assert (row.verdict, row.exit_code) == (CheckVerdict.NOTE, 0)
    none = PLAIN | {"config": PLAIN["config"].replace("accounting_storage/slurmdbd", "accounting_storage/none")}
    (row,) = slurm_checks.check_accounting(config(), site_of(none))
    assert "keeps none" in row.found
