"""`pipeline submit validate`: tasks look at the files of a cache, and their findings become one damage list."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pipeline.codec import plain
from pipeline.config.load import read_config
from pipeline.dataset import worklist
from pipeline.engine.lifecycle import new_run, refuse_double
from pipeline.errors import CacheDamaged
from pipeline.journal.attempts import leave_out
from pipeline.journal.run_folder import RunFolder, runs_in
from pipeline.project.project import Project
from pipeline.records import Reason, TaskContext
from pipeline.stage_names import StageName
from pipeline.stages.validate import MEM_BYTES, Validated, ValidateStage
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format.cache_layout import REPORT_NAME
from pipeline.store.maintenance.checking import check
from pipeline.store.maintenance.damage_report import Fault, Summary, last_report, read_report
from tests.store.content import put
from tests.testkit.caches import Cached
from tests.testkit.project import DATA, write_config

FILES = 8  # of the cache that is made by hand, with two indexes
SHARDS = ("scan", "graph")


@pytest.fixture
def cache(tmp_path: Path) -> CacheFolder:
    """A cache of two kinds, three files each, with indexes."""
    made = CacheFolder(tmp_path / "cache")
    for kind in SHARDS:
        store = made.kind(kind)
        for number in range(0, 9, 3):
            with store.writer() as writer:
                put(writer, *range(number, number + 3))
        store.write_index()
    return made


@dataclass
class Stage:
    """The stage, step by step, without processes."""

    project: Project
    folder: RunFolder
    on: list[str] = field(default_factory=list)

    def survey(self) -> int:
        """Cut the work into tasks and return how many there are."""
        found = ValidateStage().survey(self.project, self.folder, 1)
        found.write_shards(self.folder, StageName.VALIDATE)
        return len(found.shards)

    def work(self, task: int) -> int:
        """Do one task; return how many files it has told of."""
        context = TaskContext(lambda *_: None, on=self.on.extend)
        return sum(reason is None for reason in ValidateStage().work(self.project, self.folder, task, context))

    def judge(self) -> Validated:
        """Put together what was found."""
        return ValidateStage().judge(self.project, self.folder, 0.0)


@pytest.fixture
def stage(tmp_path: Path, cache: CacheFolder) -> Callable[..., Stage]:
    """Return a function that makes a run which validates that cache."""

    def made(*sets: str) -> Stage:
        write_config(tmp_path, **DATA)
        sets = (f"cluster.runs={tmp_path / 'runs'}", "cluster.validate.items_per_task=3", *sets)
        config = read_config(tmp_path / "pipeline.yaml", [f"cache.root={cache.root}", *sets]).config
        return Stage(Project.open(config), new_run(config, [StageName.VALIDATE]))

    return made


def damage(path: Path, at: int = 5000) -> None:
    """Change a byte of a file; without a place, one in the middle."""
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[at if at < len(data) else len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def shards(cache: CacheFolder, kind: str) -> list[Path]:
    return sorted((cache.root / kind / "shards").iterdir())


def at_once(cache: CacheFolder) -> tuple[Summary, set[str]]:
    """Return what a validation in one go finds."""
    summary, findings = Summary("full"), set[str]()
    for kind in cache.kinds():
        for checked in check(cache.kind(kind)):
            summary.take(checked)
            findings |= {json.dumps(plain(one)) for one in checked.findings}
    return summary, findings


def test_tasks_find_together_what_one_validation_finds(cache, stage):
    damage(shards(cache, "scan")[0])
    shards(cache, "graph")[1].unlink()
    damage(shards(cache, "graph")[1], -3)
    run = stage()
    tasks = run.survey()
    assert tasks == 3
    assert sum(map(run.work, range(tasks))) == FILES
    assert set(run.on) >= {f"scan/{path.name}" for path in shards(cache, "scan")} | {"scan/index", "graph/index"}
    judged = run.judge()
    summary, findings = at_once(cache)
    assert (judged.items, judged.undone, judged.accepted) == (FILES, 0, FILES)
    assert judged.shards == FILES - len(SHARDS)
    report = last_report(cache.disk, cache.root)
    assert report is not None
    assert REPORT_NAME.fullmatch(report.path.name)
    assert str(report.path) == judged.report
    assert {json.dumps(plain(one)) for one in report.findings()} == findings
    assert len(findings) >= 3
    for name in ("shards", "records", "whole", "findings", "lost", "faults", "kinds"):
        assert getattr(report.summary, name) == getattr(summary, name), name
    with pytest.raises(CacheDamaged) as raised:
        ValidateStage().check(run.project, run.folder, judged)
    assert raised.value.remedy == f"pipeline cache repair --list {report.path}"


def test_a_task_that_was_killed_midway_leaves_nothing_that_counts(cache, stage):
    run = stage()
    tasks = run.survey()
    for task in range(1, tasks):
        run.work(task)
    begun = ValidateStage().work(run.project, run.folder, 0, TaskContext(lambda *_: None))
    next(begun)
    begun.close()
    judged = run.judge()
    assert (judged.undone, judged.first_undone, judged.report) == (3, "graph/index", "")
    assert last_report(cache.disk, cache.root) is None
    assert list(run.folder.found(StageName.VALIDATE).glob("*.partial")) == []
    run.work(0)
    assert run.judge().undone == 0


def test_halves_of_a_task_count_once_beside_the_whole(cache, stage):
    damage(shards(cache, "scan")[0])
    run = stage("cluster.validate.items_per_task=8")
    assert run.survey() == 1
    halve = lambda folder, shard: worklist.halve_lines(folder.todo(StageName.VALIDATE), shard)  # noqa: E731
    (halves,) = worklist.split_shards(run.folder, StageName.VALIDATE, [0], halve).values()
    run.work(halves[0])
    assert run.judge().undone == FILES // 2
    run.work(halves[1])
    by_halves = run.judge().summary
    run.work(0)
    for summary in (by_halves, run.judge().summary):
        assert (summary.findings, summary.shards) == (at_once(cache)[0].findings, FILES - 2)


def test_a_file_that_kills_whoever_reads_it_is_left_out_and_reported(cache, stage):
    run = stage()
    tasks = run.survey()
    bad = shards(cache, "scan")[1].name
    leave_out(run.folder, StageName.VALIDATE, [f"scan/{bad}"], Reason.KILLED_ITS_TASK, "task 2 died of it: SIGBUS")
    assert sum(map(run.work, range(tasks))) == FILES - 1
    judged = run.judge()
    (found,) = read_report(Path(judged.report)).findings()
    assert (found.kind, found.shard, found.fault) == ("scan", bad, Fault.UNREADABLE)
    assert "SIGBUS" in found.what


def test_a_validation_may_go_on_beside_a_run_that_writes(stage):
    config = stage().project.config
    validation = runs_in(config.cluster.runs)[-1]
    assert refuse_double(config, ["scan"]) is None
    scan = new_run(config, ["scan"])
    assert refuse_double(config, [StageName.VALIDATE]) == validation
    assert refuse_double(config, ["scan"]) == scan


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class TestTyped:
    """As people type it, on a cache with records of every kind."""

    @pytest.mark.nightly
    def test_a_whole_cache_without_its_data_set_is_whole_and_stays_as_it_is(self, cached):
        before = files_of(cached.cache.root)
        done = cached.submits("validate", "--set=data.path=nowhere", "--set=cluster.validate.items_per_task=20")
        assert done.code == 0, done.err
        after = files_of(cached.cache.root)
        (report,) = after.keys() - before.keys()
        assert report.startswith("_reports/")
        assert {name: after[name] for name in before} == before
        summary = cached.report().summary
        assert (summary.how, summary.findings) == ("full", 0)
        assert summary.records == summary.whole == sum(map(len, cached.keys().values()))
        assert cached.census("validate")["items"] == summary.shards + len(cached.cache.kinds())

    @pytest.mark.nightly
    def test_damage_ends_the_run_with_4_and_status_names_the_list_and_what_to_do(self, cached):
        damage(cached.shards("graph")[0])
        done = cached.submits("validate")
        report = cached.report()
        assert done.code == 4, done.err
        assert str(report.path) in done.err
        (found,) = report.findings()
        assert (found.kind, found.fault, found.lost) == ("graph", Fault.RECORD, True)
        assert str(report.path) in cached.types("status").out

    @pytest.mark.nightly
    def test_semantic_validation_with_a_sample_makes_records_anew_in_tasks(self, cached):
        sets = ("--set=cache.check=semantic", "--set=cache.sample=1", "--set=cluster.validate.items_per_task=20")
        done = cached.submits("validate", *sets)
        assert done.code == 0, done.err + done.out
        keys, notes = cached.keys(), cached.report().summary.notes
        anew = ("graphs rebuilt", "inventories rebuilt", "embeddings recomputed", "files read again")
        assert [notes[name] for name in anew] == [len(keys[kind]) for kind in ("graph", "scan", "embed", "files")]

    def test_a_plan_says_how_many_files_there_are_and_reads_none(self, cached):
        done = cached.types("plan", "--stage", "validate", "--json", "--set=cluster.validate.items_per_task=10")
        assert done.code == 0, done.err
        (plan,) = json.loads(done.out)
        files = sum(len(cached.shards(kind)) + 1 for kind in cached.cache.kinds())
        assert (plan["counts"]["items"], plan["tasks"]) == (files, -(-files // 10))
        assert plan["mem_bytes"] == MEM_BYTES

    @pytest.mark.parametrize("stage", ["validate", "regenerate"])
    def test_where_no_cache_is_nothing_is_begun(self, make_project, tmp_path, stage):
        make_project(1)
        done = Cached(tmp_path).submits(stage)
        assert done.code == 2
        assert not (tmp_path / "cache").exists()
        assert not (tmp_path / "runs").exists()
