"""Five minutes of the weeks that `python -m tests.weeks` plays, and that what it checks can fail."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import pytest

from pipeline.journal.run_folder import RunFolder
from pipeline.journal.run_status import State
from tests.slurm.conftest import cluster as cluster
from tests.testkit.cluster import Cluster
from tests.testkit.slurm_runs import Project, Run
from tests.weeks.one_project import BAD, Submitted, uncounted, untrue
from tests.weeks.play import EVENTS, play, sequence
from tests.weeks.scene import Scene, Untrue
from tests.weeks.shared_cache import Looked, untold
from tests.weeks.twins import Twin, agrees

SEED, MINUTES = 2, 5.0


@pytest.mark.slurm
@pytest.mark.fault
@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_after_every_event_all_models_are_those_of_a_quiet_run_and_nothing_is_left(cluster: Cluster) -> None:
    assert play(cluster, SEED, MINUTES).failed == []


def test_a_seed_plays_every_event_once_before_any_twice() -> None:
    first, again = (list(islice(sequence(SEED), 2 * len(EVENTS))) for _ in range(2))
    assert first == again
    assert sorted(first[: len(EVENTS)]) == sorted(first[len(EVENTS) :]) == sorted(EVENTS)
    assert first != list(islice(sequence(SEED + 1), 2 * len(EVENTS)))


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    """A scene on which nothing is played."""
    return Scene(Cluster(tmp_path), Project(tmp_path), tmp_path, random.Random(0), {"weight": b"bits"})


def test_a_half_file_that_is_left_is_found(scene: Scene) -> None:
    scene.nothing_left()
    (scene.folder / ".state.safetensors.0123abcd.partial").touch()
    with pytest.raises(Untrue, match="half files are left"):
        scene.nothing_left()


def test_a_model_that_is_not_its_twin_is_found() -> None:
    twins = [Twin("held-1", {"weight": b"bits"}), Twin("held-2", {"weight": b"others"})]
    assert agrees("held-1", {"weight": b"bits"}, twins) == ""
    for name, weights in [
        ("held-2", {"weight": b"bits"}),
        ("held-1", {}),
        ("held-1", {"weight": b"bits", "more": b""}),
        ("held-3", {"weight": b"bits"}),
    ]:
        assert agrees(name, weights, twins), name


def test_an_end_that_is_told_wrongly_is_found(scene: Scene) -> None:
    run = Run(scene.template, RunFolder(scene.folder))
    for state, cancelled, deeds, told, is_true in [
        (State.DONE, False, [], "done", True),
        (State.STOPPED, True, [], "cancelled by ann on here", True),
        (State.STOPPED, True, [], "cancelled by bob on here", False),
        (State.STOPPED, False, [], "cancelled by ann on here", False),
        (State.DONE, True, [], "done", False),
        (State.FAILED, False, [], "next: pipeline submit", False),
        (State.FAILED, False, ["a deed"], "next: pipeline submit", True),
        (State.FAILED, False, ["a deed"], "it failed", False),
    ]:
        found = untrue(told, state, Submitted(run, "train", {}, [], deeds, cancelled), "ann")
        assert bool(found) != is_true, (state, told, found)


def test_a_file_that_is_not_counted_or_not_named_is_found() -> None:
    files = {"c1.pdb": b"ATOM", "bad.pdb": BAD}
    told = "1 usable, 1 rejected (50.0%) no_atoms 1 bad"
    assert uncounted(told, ["bad"], files) == ""
    assert uncounted(told, [], files)
    assert uncounted("2 usable, 0 rejected", ["bad"], files)
    assert uncounted(told.removesuffix("bad"), ["bad"], files)
    one_went, three = "1 usable, 2 rejected: bad, c0", {**files, "c0.pdb": b"whole"}
    assert uncounted(one_went, ["bad", "c0"], three, {"c0"}) == ""
    assert uncounted(one_went, ["bad", "c0"], three)
    assert uncounted(one_went.removesuffix("c0"), ["bad", "c0"], three, {"c0"})


def test_damage_of_which_a_validation_is_silent_is_found() -> None:
    key, other = ("scan", "01"), ("scan", "02")
    before = Looked(0, frozenset(), {key: True, other: True}, {key: {"shard"}, other: {"another"}})
    gone = Looked(0, frozenset(), {other: True}, {})
    lost = {key: False, other: True}
    assert untold(before, Looked(0, frozenset(), {key: True, other: True}, {}), "shard") == ""
    assert untold(before, Looked(4, frozenset({"shard"}), lost, {}), "shard") == ""
    assert "nothing is said of 1 of its 1 records" in untold(before, gone, "shard")
    assert "1 records are lost, and the exit code is 0" in untold(before, Looked(0, frozenset(), lost, {}), "shard")
    assert untold(before, gone, "another shard") == ""
    assert untold(before, Looked(4, frozenset({"shard"}), {other: True}, {}), "shard") == ""
    assert untold(before, gone, "shard", is_indexed=False) == ""
