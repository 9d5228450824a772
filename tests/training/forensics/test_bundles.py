"""A step that went wrong can be told from what it left behind, and made again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipeline.errors import ConfigError, DataError
from pipeline.training.checkpoints.sealed_folder import MANIFEST, seal
from pipeline.training.forensics.step_bundle import (
    KEPT,
    Bundle,
    BundleCut,
    BundleKind,
    CrashNote,
    PieceInFlight,
    bundles_in,
    find_bundles,
    read_bundle,
    read_rng,
    write_bundle,
)
from tests.training.checkpoints.saved import kill_at_each_step, on_full_disk, spoil

RNG = "rng.safetensors"

BUNDLE_OF = Bundle(
    kind=BundleKind.OOM,
    epoch=2,
    step=123,
    epoch_step=23,
    rank=0,
    world=2,
    cuts=(
        BundleCut(("a", "b/../c"), (7, 3)),
        BundleCut(("d", "e", "f", "g", "ü"), (1, 2, 4, 5, 6)),
    ),
    failed=0,
    budget={"cost": 4 << 30},
    plan={"batch": 24, "crop": {"nodes": 500}},
    message="CUDA out of memory. Tried to allocate 2.00 GiB",
    checkpoint={"path": "checkpoints/step-00000100", "digest": "ab" * 16},
    time_s=1_800_000_000.5,
    torch="2.13.0",
    device="cpu",
    state={"numpy": {"state": [1, 2**70]}, "scale": 65536.0},
)
RNG_OF = {"cpu": torch.get_rng_state(), "cuda:0": torch.arange(16, dtype=torch.uint8)}


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_bundle_is_read_as_it_was_written(tmp_path):
    path = write_bundle(tmp_path / "bundles", BUNDLE_OF, RNG_OF)
    assert path.name == "step-00000123-oom-rank-0"
    assert names_in(path) == [MANIFEST, RNG]
    assert read_bundle(path) == BUNDLE_OF
    states = read_rng(path)
    assert states.keys() == RNG_OF.keys()
    assert all(torch.equal(states[name], state) for name, state in RNG_OF.items())
    assert write_bundle(path.parent, BUNDLE_OF, RNG_OF).name == f"{path.name}-2", "the same step may go wrong again"
    bare = replace(BUNDLE_OF, kind=BundleKind.NAN, checkpoint=None, failed=None, cuts=())
    assert read_bundle(write_bundle(tmp_path, bare, {})) == bare


def test_the_first_bundle_is_kept_and_the_newest(tmp_path):
    for step in range(1, 2 * KEPT + 5):
        path = write_bundle(tmp_path, replace(BUNDLE_OF, step=step, rank=step % 3), {})
        assert path.exists()
    steps = [read_bundle(path).step for path in bundles_in(tmp_path)]
    assert steps == [1, *range(KEPT + 5, 2 * KEPT + 5)]
    assert len(names_in(tmp_path)) == KEPT + 1


def test_bundles_are_found_by_step_and_rank(tmp_path):
    for step, rank in ((5, 0), (5, 1), (5, 11), (12, 0)):
        write_bundle(tmp_path, replace(BUNDLE_OF, step=step, rank=rank), {})
    assert [read_bundle(path).rank for path in find_bundles(tmp_path, 5)] == [0, 1, 11]
    assert [read_bundle(path).rank for path in find_bundles(tmp_path, 5, rank=1)] == [1]
    with pytest.raises(ConfigError, match="5, 12"):
        find_bundles(tmp_path, 7)
    with pytest.raises(ConfigError, match=r"no replay bundle of step 12 of rank 1"):
        find_bundles(tmp_path, 12, rank=1)
    with pytest.raises(ConfigError, match="pipeline status"):
        find_bundles(tmp_path / "empty", 7)


@pytest.mark.parametrize("file", [MANIFEST, RNG])
def test_a_damaged_bundle_is_named(tmp_path, file):
    path = write_bundle(tmp_path, BUNDLE_OF, RNG_OF)
    spoil(path / file, lambda content: content.__setitem__(-2, content[-2] ^ 1))
    with pytest.raises(DataError, match=file):
        read_rng(path)
    with pytest.raises(DataError, match=file):
        read_bundle(path)


def test_what_is_no_bundle_is_named(tmp_path):
    with pytest.raises(ConfigError, match="is not a replay bundle"):
        read_bundle(tmp_path / "nothing")
    seal(tmp_path / "other", {"rng": {}}, {"kind": "bad weather"})
    with pytest.raises(DataError, match="bundle cannot be read"):
        read_bundle(tmp_path / "other")


def test_a_full_disk_costs_the_bundle_and_not_the_run(tmp_path):
    def work():
        assert write_bundle(tmp_path, BUNDLE_OF, RNG_OF) is None

    on_full_disk(1000, work)
    assert names_in(tmp_path) == []


@pytest.mark.fault
def test_a_kill_at_any_moment_leaves_a_whole_bundle_or_none(tmp_path):
    steps = 19
    kill_at_each_step(lambda number: write_bundle(tmp_path / str(number), BUNDLE_OF, RNG_OF), steps)
    left = set()
    for number in range(1, steps + 1):
        folder = tmp_path / str(number)
        there = bundles_in(folder)
        assert all(read_bundle(path) == BUNDLE_OF and read_rng(path) for path in there)
        left.add(len(there))
        again = write_bundle(folder, replace(BUNDLE_OF, step=124), RNG_OF)
        assert sorted(folder.iterdir()) == [*there, again]
    assert left == {0, 1}


# A note that outlives a kill


def on(*ids: str, step: int = 5) -> PieceInFlight:
    """Return a piece of a step."""
    return PieceInFlight(step + 1, 0, step, ids, tuple(range(len(ids))), 0, 100)


def test_once_is_no_poison_and_twice_on_the_same_item_is(tmp_path: Path) -> None:
    path = tmp_path / "on"
    CrashNote(path).on(on("a", "b", "c"))  # and it is gone
    second = CrashNote(path)
    assert second.poison is None
    second.on(on("b"))
    third = CrashNote(path)
    assert third.poison == on("b")
    assert [one.ids for one in third.deaths] == [("a", "b", "c"), ("b",)]


def test_a_death_is_forgotten_once_its_step_has_passed(tmp_path: Path) -> None:
    path = tmp_path / "on"
    CrashNote(path).on(on("a"))
    second = CrashNote(path)
    second.on(on("a"))
    second.on(on("a", step=6))
    assert CrashNote(path).poison is None


def test_between_two_steps_and_after_an_orderly_end_nothing_is_blamed(tmp_path: Path) -> None:
    path = tmp_path / "on"
    CrashNote(path).on(on("a"))
    second = CrashNote(path)
    second.on(on("a"))
    second.off()
    third = CrashNote(path)
    assert third.poison is None
    third.on(on("a"))
    third.close()
    assert CrashNote(path).poison is None


@pytest.mark.parametrize("content", [b"", b"[[", b"[[], 5]\n", b"{}\n", b"[[{}], null]\n"])
def test_a_note_that_was_cut_says_nothing(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "on"
    path.write_bytes(content)
    breath = CrashNote(path)
    assert breath.poison is None
    assert breath.deaths == []
