"""Five minutes of the weeks that `python -m tests.weeks` plays, and that what it checks can fail."""

from __future__ import annotations

import json
import random
import re
from itertools import islice
from pathlib import Path

import pytest

from pipeline.journal.run_folder import RunFolder
from pipeline.journal.run_status import RunState
from tests.slurm.conftest import cluster as cluster
from tests.testkit.cluster import Cluster
from tests.testkit.slurm_runs import Project, Run
from tests.weeks.__main__ import put
from tests.weeks.one_project import BAD, Submitted, refused, uncounted, untrue
from tests.weeks.play import EVENTS, Played, play, sequence
from tests.weeks.scene import Scene, Untrue
from tests.weeks.shared_cache import Looked, untold
from tests.weeks.twins import Twin, agrees, digest_of

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


TWINS = [Twin("held-1", {"weight": b"bits"}), Twin("held-2", {"weight": b"others"})]


@pytest.mark.parametrize(
    ("name", "weights", "wrong"),
    [
        ("held-1", {"weight": b"bits"}, ""),
        ("held-2", {"weight": b"bits"}, r"other bits than its twin in \['weight'\]"),
        ("held-1", {}, r"other bits than its twin in \['weight'\]"),
        ("held-1", {"weight": b"bits", "more": b""}, r"in \['more'\]"),
        ("held-3", {"weight": b"bits"}, "of none of the data that its run can have seen"),
    ],
)
def test_a_model_that_is_not_its_twin_is_found(name: str, weights: dict[str, bytes], wrong: str) -> None:
    assert re.search(wrong, agrees(name, weights, TWINS))
    assert bool(agrees(name, weights, TWINS)) == bool(wrong)


def test_twins_are_of_their_settings_and_data() -> None:
    given = [
        ({"seed": 1}, {"a": b"x"}),
        ({"seed": 2}, {"a": b"x"}),
        ({"seed": 1}, {"a": b"y"}),
        ({"seed": 1}, {"b": b"x"}),
    ]
    assert len({digest_of(settings, files) for settings, files in given}) == len(given)
    assert digest_of({"b": 1, "a": 2}, {"x": b"", "y": b""}) == digest_of({"a": 2, "b": 1}, {"y": b"", "x": b""})


@pytest.mark.parametrize(
    ("state", "cancelled", "deeds", "told", "wrong"),
    [
        (RunState.DONE, False, [], "done", ""),
        (RunState.STOPPED, True, [], "cancelled by ann on here", ""),
        (RunState.STOPPED, True, [], "cancelled by bob on here", "nobody said that it was cancelled by ann"),
        (RunState.STOPPED, False, [], "cancelled by ann on here", "was not cancelled, and is stopped"),
        (RunState.DONE, True, [], "done", "was cancelled, and is done"),
        (RunState.FAILED, False, [], "next: pipeline submit", "nothing had been done to it"),
        (RunState.FAILED, False, ["a deed"], "next: pipeline submit", ""),
        (RunState.FAILED, False, ["a deed"], "it failed", "nobody said what to do next"),
    ],
)
def test_an_end_that_is_told_wrongly_is_found(
    scene: Scene, state: RunState, cancelled: bool, deeds: list[str], told: str, wrong: str
) -> None:
    run = Run(scene.template, RunFolder(scene.folder))
    found = untrue(told, state, Submitted(run, "train", {}, [], deeds, cancelled), "ann")
    assert wrong in found
    assert bool(found) == bool(wrong)


def test_a_file_that_is_not_counted_or_not_named_is_found() -> None:
    files = {"c1.pdb": b"ATOM", "bad.pdb": BAD}
    told = "1 accepted, 1 rejected (50.0%) no_atoms 1 bad"
    assert uncounted(told, ["bad"], files) == ""
    assert "left out are []" in uncounted(told, [], files)
    assert "nobody said that 1 items were accepted" in uncounted("2 accepted, 0 rejected", ["bad"], files)
    assert "nobody named bad" in uncounted(told.removesuffix("bad"), ["bad"], files)
    one_went = "1 accepted, 2 rejected: bad, c0"
    three = {**files, "c0.pdb": b"whole"}
    assert uncounted(one_went, ["bad", "c0"], three, {"c0"}) == ""
    assert "left out are ['bad', 'c0']" in uncounted(one_went, ["bad", "c0"], three)
    assert "nobody named c0" in uncounted(one_went.removesuffix("c0"), ["bad", "c0"], three, {"c0"})


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


def test_a_refusal_must_say_why_and_what_helps() -> None:
    assert refused(0, "") == ""
    assert refused(6, "squeue does not answer next: pipeline submit") == "refused"
    for said in ("squeue does not answer", "next: pipeline submit"):
        with pytest.raises(Untrue, match="a refusal without a reason"):
            refused(6, said)


def test_what_neighbours_did_is_counted() -> None:
    played = Played(SEED, 2.04)
    played.events.update(["disk_fills", "disk_fills"])
    played.steps.update(["model", "cancel"])
    played.failed.append("disk_fills")
    assert played.counts() == {
        "seed": SEED,
        "minutes": 2.0,
        "events": 2,
        "events_by_name": {"disk_fills": 2},
        "neighbours_steps": 2,
        "neighbours_steps_by_kind": {"cancel": 1, "model": 1},
        "models_compared": 1,
        "failures": 1,
        "failed": ["disk_fills"],
    }


def test_plays_of_several_seeds_add_up_in_one_file(tmp_path: Path) -> None:
    out = tmp_path / "weeks.json"
    for seed, minutes in ((1, 5.0), (2, 90.0), (2, 100.5)):  # what was played so far is written again and again
        put(out, Played(seed, minutes, failed=["disk_fills"]).counts())
    told = json.loads(out.read_text())
    assert (told["minutes"], told["failures"]) == (105.5, 2)
    assert {name: one["minutes"] for name, one in told["plays"].items()} == {"seed 1": 5.0, "seed 2": 100.5}
