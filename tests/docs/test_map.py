"""ARCHITECTURE.md's map names every module of the package in its room, and none that is not there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "pipeline"
MAP = (ROOT / "ARCHITECTURE.md").read_text().split("## The map")[1].split("```")[1]
ROOM = re.compile(r"^(\w+)/ (.*(?:\n .*)*)", re.MULTILINE)  # a room's name, and its lines: the first and those set in
MODULE = re.compile(r"\w+\.py\b")
ROOMS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


def named() -> dict[str, set[str]]:
    """Return which modules the map names, by room."""
    return {room: set(MODULE.findall(text)) for room, text in ROOM.findall(MAP)}


def modules_of(room: str) -> set[str]:
    """Return the modules of a room and of its folders, by their names alone."""
    return {path.name for path in (PACKAGE / room).rglob("*.py")} - {"__init__.py"}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_the_modules_that_the_map_names(room: str) -> None:
    told = named().get(room, set())
    assert sorted(modules_of(room) - told) == [], "not on the map"
    assert sorted(told - modules_of(room)) == [], "on the map alone"


def test_modules_outside_all_rooms_are_on_the_map() -> None:
    outside = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}
    assert outside <= set(MODULE.findall(MAP))
