"""`pipeline doctor` and `pipeline cache stat`: every check ends in a row, and a bad one in its exit code."""

from __future__ import annotations

import json

import pytest

from tests.command import Command
from tests.runs.conftest import MakeProject

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


@pytest.mark.parametrize(
    ("setting", "what", "code"),
    [
        ("data.path=nowhere", "data", 2),
        ("data.limt=3", "config", 2),
        ("cache.root=data", "cache", 2),
        ("cache.root=/proc/none", "cache folder", 2),
        ("cluster.runs=/proc/none", "run folders", 2),
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
    assert pipeline("cache", "stat").out.strip().endswith("nothing was stored yet")
    pipeline(*SUBMIT)
    found = {one["kind"]: one for one in json.loads(pipeline("cache", "stat", "--json").out)["kinds"]}
    assert {kind: one["records"] for kind, one in found.items()} == {"scan": 5, "files": 5, "recipes": 1}
    assert all(one["index"] == "current" and not one["unreadable"] for one in found.values())


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
