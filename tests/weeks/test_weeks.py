"""Five minutes of the weeks that `python -m tests.weeks` plays, and that what it checks can fail."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.conftest import cluster as cluster
from tests.slurm.runs import Project
from tests.weeks.play import EVENTS, play, sequence
from tests.weeks.scene import Scene, Untrue

SEED, MINUTES = 2, 5.0


@pytest.mark.slurm
@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_after_every_event_all_models_are_those_of_a_quiet_run_and_nothing_is_left(cluster: Cluster) -> None:
    assert play(cluster, SEED, MINUTES) == []


def test_a_seed_plays_every_event_once_before_any_twice() -> None:
    first, again = (list(islice(sequence(SEED), 2 * len(EVENTS))) for _ in range(2))
    assert first == again
    assert sorted(first[: len(EVENTS)]) == sorted(first[len(EVENTS) :]) == sorted(EVENTS)
    assert first != list(islice(sequence(SEED + 1), 2 * len(EVENTS)))


def test_every_event_says_what_happens_and_what_must_be_said() -> None:
    assert [name for name, event in EVENTS.items() if ":" not in (event.__doc__ or "")] == []


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    """A scene on which nothing is played."""
    return Scene(Cluster(tmp_path), Project(tmp_path), tmp_path, random.Random(0), {"weight": b"bits"})


def test_a_half_file_that_is_left_is_found(scene: Scene) -> None:
    scene.nothing_left()
    (scene.folder / ".state.safetensors.0123abcd.partial").touch()
    with pytest.raises(Untrue, match="half files are left"):
        scene.nothing_left()


def test_what_was_not_said_is_missed(scene: Scene) -> None:
    scene.says("the disk is full; next: make room", "full", "next:")
    with pytest.raises(Untrue, match="nobody said 'held'"):
        scene.says("it waits", "held")
