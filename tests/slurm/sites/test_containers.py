"""Workers in containers on a real cluster: whatever runs out, comes too early or is taken away, the result is the same.

Apptainer itself is in no package of the distribution that these tests run on: `apptainer` beside this file stands in.
It takes the same words, isolates by a mount namespace, and ends as the real one does.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.journal.run_status import State
from tests.slurm import test_training as training
from tests.slurm.sites.images import (
    HERE,
    contained,
    import_image,
    make_image,
    why_no_namespaces,
    why_no_podman,
)
from tests.slurm.test_faults import HALF_MAY_FAIL, MIB, ONE_EACH, complete, failures
from tests.testkit.cluster import Cluster
from tests.testkit.slurm_runs import DEAF, DIES, EATS, LINGERS, Project, Run, make_project, until

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.fault,
    pytest.mark.skipif(bool(why_no_namespaces()), reason=f"no containers here: {why_no_namespaces()}"),
]

Make = Callable[..., Project]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an image."""
    return make_image(tmp_path_factory.mktemp("image") / "image.dir")


@pytest.fixture(scope="module")
def limited(cluster: Cluster, image: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Begin at once what meets a time limit: one that heeds its warning, one that does not hear it."""
    cluster.settle()
    runs = {}
    for name, act in (("heeded", LINGERS), ("unheard", DEAF)):
        folder = tmp_path_factory.mktemp(name) / "project"
        settings = contained(folder, image, cluster__scan__time="1m", cluster__scan__items_per_task=2)
        runs[name] = make_project(folder, 2, {"c1.pdb": act}, **settings).submits()
    return runs


@pytest.fixture
def make(tmp_path: Path, limited: dict[str, Run], cluster: Cluster, image: Path) -> Iterator[Make]:
    """Return a function that makes a project whose workers run in the image."""
    cluster.start()

    def made(*given: Any, **settings: Any) -> Project:
        return make_project(tmp_path / "project", *given, **contained(tmp_path / "project", image, **settings))

    yield made
    (tmp_path / "project" / "mischief" / "go").touch()


def events(run: Run, kind: str) -> list[dict[str, Any]]:
    """Return what the ledger has of a kind."""
    lines = [line for path in run.folder.events.iterdir() for line in path.read_text().splitlines()]
    return [event for event in map(json.loads, lines) if kind in json.dumps(event)]


trainable = training.project  # the fixture: a project of which all is done that comes before training


def preempt(cluster: Cluster, run: Run) -> None:
    """Submit a job that needs the node of a run's task 1."""
    urgent = ["--partition=urgent", "--exclusive", f"--nodelist={run.node_of(cluster, 1)}", "--output=/dev/null"]
    assert cluster.run("sbatch", *urgent, "--wrap=true").returncode == 0


def examined(project: Project, executor: str = "slurm", **environment: str) -> dict[str, Any]:
    """Return the rows of `pipeline doctor`, by what they are about."""
    done = project.types("doctor", "--json", f"--set=cluster.executor={executor}", **environment)
    assert done.out.startswith("["), done.said
    return {row["what"]: row for row in json.loads(done.out)}


@pytest.mark.nightly
def test_workers_alone_run_in_the_image_and_see_only_what_they_need(make: Make, image: Path, tmp_path: Path) -> None:
    project = make(2, **ONE_EACH)
    run = project.submits()
    complete(run, 2)
    for seen in project.seen():
        assert seen["image"] == str(image)
        assert ".singularity.d" in seen["root"]
        assert not {"boot", "home", "srv"} & set(seen["root"])
        assert str(project.folder / "runs" / ".code") in seen["code"]
        assert seen["tmp"].startswith(str(tmp_path / "scratch"))
    assert list((tmp_path / "scratch").iterdir()) == []
    scripts = {path.name: path.read_text() for path in run.folder.logs.glob("*.sbatch")}
    wrapped = [text for text in scripts.values() if "apptainer" in text.partition("command=(")[2]]
    assert 0 < len(wrapped) < len(scripts)
    assert all(f"--job-name={run.folder.unique}-scan" in text for text in wrapped)


@pytest.mark.nightly
def test_the_digest_of_the_image_stands_in_the_ledger_and_where_memory_is_remembered(make: Make, image: Path) -> None:
    project = make(2)
    run = project.submits()
    complete(run, 2)
    digest = json.loads(run.folder.config.read_text())["cluster"]["slurm"]["container"]["digest"]
    assert len(digest) == 32
    (started,) = events(run, "run_started")
    assert digest in json.dumps(started)
    (records,) = (project.folder / "runs" / ".profiles").glob("tasks-*.jsonl")
    assert f"slurm in {digest}" in records.read_text()


@pytest.mark.nightly
def test_a_task_above_its_memory_is_seen_to_be_and_gets_more(make: Make) -> None:
    project = make(3, {"c1.pdb": EATS}, **ONE_EACH)
    run = project.submits()
    complete(run, 3)
    assert failures(run) == [(1, "host_oom")]
    assert [(job["tasks"], job["ask"]["mem_bytes"] // MIB) for job in run.stage()["jobs"]] == [
        ("0-2", 576),
        ("1", 1152),
    ]


@pytest.mark.nightly
def test_a_crash_inside_is_that_of_the_task(make: Make) -> None:
    project = make(2, {"c1.pdb": DIES}, **ONE_EACH, **HALF_MAY_FAIL)
    run = project.submits()
    run.ends()
    assert failures(run) == [(1, "crashed"), (1, "crashed")]
    assert run.stage()["census"]["rejected"] == {"killed_its_task": 1}


@pytest.mark.nightly
def test_a_preempted_task_is_begun_again(make: Make, cluster: Cluster) -> None:
    project = make(2, {"c1.pdb": LINGERS}, cluster__scan__partition="preempt", **ONE_EACH)
    run = project.submits()
    run.arrives_at("c1.pdb")
    preempt(cluster, run)
    complete(run, 2)
    assert any("stopped by a signal" in json.dumps(event) for event in events(run, "task_failed"))
    assert len([one for one in project.seen() if one["file"] == "c1.pdb"]) == 2


@pytest.mark.nightly
def test_a_worker_that_heeds_the_warning_of_its_time_limit_goes_on_where_it_stopped(limited: dict[str, Run]) -> None:
    run = limited["heeded"]
    complete(run, 2)
    assert failures(run) == []
    assert [one["file"] for one in run.project.seen()].count("c1.pdb") == 2


@pytest.mark.nightly
def test_a_task_killed_at_its_time_limit_gets_more_time(limited: dict[str, Run]) -> None:
    run = limited["unheard"]
    complete(run, 2)
    assert failures(run) == [(0, "timeout")]
    assert [job["ask"]["time_s"] for job in run.stage()["jobs"]] == [60, 120]


@pytest.mark.nightly
def test_an_image_that_changes_during_a_run_ends_it(make: Make, image: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.dir"
    shutil.copytree(image, copy, symlinks=True)
    project = make(2, {"c1.pdb": EATS}, **{**ONE_EACH, "cluster__slurm__container__image": str(copy)})
    run = project.submits()
    until("a first task", lambda: project.seen())
    (copy / "etc" / "added").touch()
    ended = run.ends(State.FAILED)
    assert ended["exit_code"] == 6
    assert "the image changed" in ended["error"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"container__image": "/nowhere/pipeline.sif"}, "image not found"),
        ({"container__binds": ["/nowhere:/data"]}, "folder not found here"),
        ({"container__binds": []}, "no python3 starts in the image"),
        ({"container__env": {}}, "the image has no pipeline"),
        ({"container__runtime": "pyxis"}, "srun has no option --container-image here"),
    ],
    ids=["image", "bind", "nothing inside", "no pipeline", "pyxis"],
)
def test_what_could_not_run_is_refused_before_anything_is_queued(
    make: Make, settings: dict[str, Any], said: str
) -> None:
    project = make(1, **{f"cluster__slurm__{name}": value for name, value in settings.items()})
    done = project.types("submit", "--stage", "scan", "--executor", "slurm")
    assert (done.code, said in done.said) == (6, True), done.err
    assert "next: " in done.said
    assert not (project.folder / "runs").exists() or not list((project.folder / "runs").glob("2*"))
    rows = examined(project)
    assert (rows["container"]["verdict"], said in rows["container"]["found"]) == ("BAD", True)


@pytest.mark.nightly
def test_a_node_without_the_runtime_is_no_fault_of_the_task(make: Make) -> None:
    project = make(1, cluster__slurm__setup=[f'[ -n "$SLURM_JOB_ID" ] || export PATH={HERE}:$PATH'])
    run = project.submits()
    ended = run.ends(State.FAILED)
    assert "apptainer: No such file or directory" in ended["error"]
    assert {cause for _, cause in failures(run)} == {"node"}


@pytest.fixture(scope="module")
def by_podman(image: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the settings by which podman starts workers, in the image that it has imported."""
    if why_no_podman():
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(why_no_podman())
    line = import_image(image, tmp_path_factory.mktemp("podman"), "pipeline-test")
    return {
        "cluster__slurm__container__runtime": "podman",
        "cluster__slurm__container__image": "localhost/pipeline-test",
        "cluster__slurm__setup": [f"export PATH={HERE}:$PATH", line],
    }


@pytest.mark.nightly
def test_podman_leaves_a_task_in_the_cgroup_of_its_job_where_its_memory_is_limited(
    make: Make, by_podman: dict[str, Any]
) -> None:
    project = make(3, {"c1.pdb": EATS}, **{**by_podman, **ONE_EACH})
    run = project.submits()
    complete(run, 3)
    assert failures(run) == [(1, "host_oom")]
    assert all(".singularity.d" in seen["root"] and "boot" not in seen["root"] for seen in project.seen())


@pytest.mark.nightly
def test_podman_passes_on_the_signal_of_a_preemption(make: Make, by_podman: dict[str, Any], cluster: Cluster) -> None:
    project = make(2, {"c1.pdb": LINGERS}, **{**by_podman, **ONE_EACH}, cluster__scan__partition="preempt")
    run = project.submits()
    run.arrives_at("c1.pdb")
    preempt(cluster, run)
    complete(run, 2)
    assert {cause for _, cause in failures(run)} <= {"interrupted", "preempted"}
    assert any("stopped by a signal" in json.dumps(event) for event in events(run, "task_failed"))


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_training_on_two_nodes_that_is_preempted_inside_has_the_bits_of_one_outside(
    trainable: Project, cluster: Cluster, image: Path
) -> None:
    outside = training.trains(trainable, "outside")
    place = trainable.folder.with_name("inside")
    settings = contained(place, image, cluster__train__partition="preempt")
    settings["cluster__slurm__setup"] += [f"export {training.ACT}=slow {training.PLACE}={place}"]
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in settings.items()}
    inside = training.trains(trainable, "inside", "slow", **texts)
    figures = inside.project.folder / "models"
    until("a step", lambda: any(path.stat().st_size for path in figures.glob("*/figures.jsonl")), 180, inside.story)
    (job,) = inside.jobs(cluster, "train")
    first = cluster.run("scontrol", "show", "hostnames", job["node"]).stdout.split()[0]
    urgent = ["--partition=urgent", "--exclusive", f"--nodelist={first}", "--output=/dev/null", "--wrap=true"]
    assert cluster.run("sbatch", *urgent).returncode == 0
    for run in (outside, inside):
        run.ends(timeout_s=400)
    assert training.failures(inside) in ([], ["interrupted"])
    assert training.restarts(inside) == 1
    assert training.weights(training.model(inside)) == training.weights(training.model(outside))


@pytest.mark.nightly
def test_doctor_says_what_is_well_and_that_sbatch_is_missing_inside(make: Make, image: Path, tmp_path: Path) -> None:
    project = make(1)
    rows = examined(project)
    assert rows["container"]["verdict"] == "ok", rows["container"]
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "bash").symlink_to(str(shutil.which("bash")))
    rows = examined(project, PATH=f"{sys.prefix}/bin:{tmp_path}/bin")
    assert rows["slurm"]["verdict"] == "BAD"
    assert "sbatch" in rows["slurm"]["found"]
    assert "outside of containers" in rows["slurm"]["remedy"]
