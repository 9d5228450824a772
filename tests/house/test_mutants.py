"""Mutants of the pure cores: how they are made and put in place, and that those called equivalent are there."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.mutant_kinds import mutants_of
from benchmarks.mutants import CORES, Core

ROOT = Path(__file__).resolve().parents[2]
TOY = '''"""A toy."""
from dataclasses import dataclass

LIMIT = 3


@dataclass(frozen=True, slots=True)
class Basket:
    apples: int = 2

    @property
    def is_full(self) -> bool:
        """Say so."""
        return self.apples > LIMIT and not self.apples == 9


def largest(numbers: list[int], least: int = 0) -> int:
    found = [least]
    for number in numbers:
        if number < 0:
            raise ValueError(f"{number} is less than 0")
        found.append(number)
    return max(found)
'''


def test_each_small_change_of_what_decides_is_a_mutant_and_what_people_read_is_not() -> None:
    names = [mutant.name for mutant in mutants_of("toy.py", ast.parse(TOY))]
    assert sorted(name for name in names if name.startswith("Basket.is_full")) == sorted(
        f"Basket.is_full: {change}"
        for change in (
            "self.apples > LIMIT and (not self.apples == 9) → self.apples > LIMIT or not self.apples == 9",
            "self.apples > LIMIT and (not self.apples == 9) → not self.apples == 9",
            "self.apples > LIMIT and (not self.apples == 9) → self.apples > LIMIT",
            "self.apples > LIMIT → self.apples >= LIMIT",
            "not self.apples == 9 → self.apples == 9",
            "self.apples == 9 → self.apples != 9",
            "9 → 10",
            "9 → 8",
        )
    )
    assert {"LIMIT: 3 → 4", "Basket: 2 → 1", "largest: max → min", "largest: found.append(number) → pass"} <= {*names}
    assert {"largest: if number < 0: → if False:", "largest: 0 → 1", "largest: 0 → 1 (2)"} <= {*names}
    assert "largest: 0 → 1 (3)" not in names


@pytest.mark.parametrize(
    ("change", "asked", "before", "after"),
    [
        ("LIMIT: 3 → 4", "Basket(4).is_full", True, False),
        ("Basket: 2 → 3", "Basket().apples", 2, 3),
        ("Basket.is_full: self.apples > LIMIT → self.apples >= LIMIT", "Basket(3).is_full", False, True),
        ("largest: 0 → 1", "largest([])", 0, 1),
        ("largest: max → min", "largest([5])", 5, 0),
    ],
)
def test_a_mutant_takes_the_place_of_what_was_imported(
    change: str, asked: str, before: object, after: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toy_core.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "toy_core", raising=False)
    toy, tree = importlib.import_module("toy_core"), ast.parse(TOY)
    names = dict(vars(toy))  # as a test has them that was imported before
    assert eval(asked, names) == before
    (mutant,) = [found for found in mutants_of("toy_core.py", tree) if found.name == change]
    mutant.install(tree)
    assert eval(asked, names) == after


@pytest.mark.parametrize("name", CORES)
def test_what_is_called_equivalent_is_a_mutant_and_says_why(name: str, tmp_path: Path) -> None:
    core = Core(name, tmp_path / "state")
    assert len({mutant.name for mutant in core.mutants}) == len(core.mutants) > 20
    assert all(len(why) > 10 for why in core.equivalent.values())
    assert all((ROOT / test.partition("::")[0]).exists() for test in (*core.tests, *core.skipped))


@pytest.mark.nightly
def test_mutants_are_tried_one_by_one_and_what_is_known_is_not_tried_again(tmp_path: Path) -> None:
    words = ["--core", "pruning", "--state", f"{tmp_path}/state", "--out", f"{tmp_path}/out.json", "--most"]
    for most in ("2", "3"):
        command = [sys.executable, "benchmarks/mutants.py", *words, most]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=240)
        told = json.loads((tmp_path / "out.json").read_text())["cores"]
        tried = told["pruning"]
        assert tried["made"] == tried["killed"] + tried["killed_by_time"] + len(tried["survivors"]) <= int(most)
        assert told["repair"]["made"] == 0
    keys = [json.loads(line)["key"] for line in (tmp_path / "state").read_text().splitlines()]
    assert len({*keys}) == len(keys) >= tried["made"] > 0
