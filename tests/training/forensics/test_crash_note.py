"""A note that outlives a kill tells the next start on what the one before has died."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.training.forensics.step_bundle import CrashNote, PieceInFlight


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
