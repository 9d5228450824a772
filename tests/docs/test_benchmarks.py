"""The page of benchmarks is what its results make of it; every figure that was promised has a row."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import all as every
from benchmarks import figures, page
from benchmarks.circumstances import write
from benchmarks.figures import Figure, Reach, day_and_machine, table, values

ROOT = Path(__file__).resolve().parents[2]
TABLE = table()
MEASURED = [one for one in TABLE.figures if one.read() is not None]


def test_the_page_is_what_the_results_make_of_it() -> None:
    assert page.PAGE.read_text() == page.page(), "python benchmarks/page.py writes it anew"


def test_the_picture_of_docked_complexes_is_what_the_results_make_of_it() -> None:
    assert page.PICTURE.read_text() == page.picture(), "python benchmarks/page.py writes it anew"


def test_figures_that_pages_quote_are_those_of_the_results() -> None:
    texts = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
    assert sum(len(page.QUOTED.findall(text)) for text in texts.values()) >= 6
    assert [name for name, text in texts.items() if page.quoting(text) != text] == [], "python benchmarks/page.py"


def test_a_quoted_figure_is_brought_up_to_date(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "RESULTS", results)
    write(results / "x.json", {"a": {"share": 0.25}})
    text = "It is <!-- figure: x.json a/share | .0% -->3%<!-- end --> of all."
    assert page.quoting(text) == text.replace(">3%<", ">25%<")


def test_every_figure_that_was_promised_has_a_row() -> None:
    assert len(TABLE.promised) == 20
    assert [name for name in TABLE.promised if not any(one.promise == name for one in TABLE.figures)] == []
    assert {one.promise for one in TABLE.figures} <= {*TABLE.promised, ""}


def test_what_is_not_measured_says_what_it_needs() -> None:
    assert [one.what for one in TABLE.figures if one.read() is None and not one.needs] == []


def test_every_result_says_on_what_machine_and_on_which_day_it_was_found() -> None:
    for one in MEASURED:
        day, machine = day_and_machine(one.read() or {}, one.value)
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", day), one.what
        assert re.search(r"\d+ cores of \w+", machine), one.what


@pytest.mark.parametrize(
    "command", sorted({one.command for one in (*TABLE.figures, *every.BENCHES)}), ids=lambda one: one.replace(" ", "_")
)
def test_every_command_is_a_script_that_has_these_options(command: str) -> None:
    script, *words = command.split()
    if script == "make":
        rules = (ROOT / "Makefile").read_text()
        assert f"\n{words[0]}: " in rules
        assert all(f"\n{word.partition('=')[0]} ?= " in rules for word in words[1:]), command
        return
    text = (ROOT / "benchmarks" / script).read_text()
    for word in words:
        option = f'"{word}"' if word.startswith("--") else word
        assert option in text or word.isdigit(), command
    assert '"--out"' in text, command


TYPED = {one.command.split()[0] for one in (*TABLE.figures, *every.BENCHES)} - {"make"}
PROOFS = set(re.findall(r"python benchmarks/(\S+\.py)", (ROOT / "Makefile").read_text()))


@pytest.mark.nightly
@pytest.mark.parametrize("script", sorted(TYPED | PROOFS))
def test_every_script_starts_as_it_is_typed(script: str) -> None:
    words = [sys.executable, f"benchmarks/{script}", "--help"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_every_test_that_is_said_to_hold_a_figure_is_there() -> None:
    held = [one.partition("::") for figure in TABLE.figures for one in figure.held]
    assert len(held) >= 5
    assert [name for path, _, name in held if f"def {name}(" not in (ROOT / path).read_text()] == []


def a_figure(**changed: object) -> Figure:
    told = {"what": "speed", "command": "x.py", "result": "x.json", "shown": "{a/*/ratio | .1f}×", "value": "a/*/ratio"}
    return Figure(**{**told, "reach": Reach(at_least=2.0), "short": "It is old.", **changed})


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    return tmp_path


def test_what_falls_short_is_bold_and_explained_and_what_does_not_is_neither(results: Path) -> None:
    write(results / "x.json", {"a": {"one": {"ratio": 2.5}, "two": {"ratio": 1.5}}})
    assert page.row(a_figure(), [])[3] == "**1.5 to 2.5×**"
    assert list(page.shortfalls([a_figure()])) == ["speed: 1.5 to 2.5×; to reach ≥ 2. It is old."]
    write(results / "x.json", {"a": {"one": {"ratio": 2.5}}})
    assert page.row(a_figure(), [])[3] == "2.5×"
    assert list(page.shortfalls([a_figure()])) == []


def test_what_could_not_be_measured_is_told_as_such(results: Path) -> None:
    assert page.row(a_figure(needs="no GPU was at hand"), [])[3] == "not measured: no GPU was at hand"
    assert list(page.shortfalls([a_figure()])) == ["speed: not measured yet."]


def test_a_value_that_is_not_there_is_an_error_and_no_figure(results: Path) -> None:
    write(results / "x.json", {"a": {"one": {"other": 2.5}}})
    with pytest.raises(KeyError, match="a/\\*/ratio"):
        page.row(a_figure(), [])


def test_a_part_of_a_result_has_its_own_day_and_machine(results: Path) -> None:
    old = {"date": "2026-01-01", "machine": "1 cores of other", "ratio": 3}
    write(results / "x.json", {"a": {"one": old}, "b": {"ratio": 1}})
    told = json.loads((results / "x.json").read_text())
    assert day_and_machine(told, "a/one/ratio") == ("2026-01-01", "1 cores of other")
    assert day_and_machine(told, "b/ratio") == (told["date"], told["machine"])


def test_what_several_parts_tell_is_as_old_as_the_oldest_of_them() -> None:
    old, new = ({"date": f"2026-01-0{day}", "machine": f"machine {day}", "ratio": day} for day in (1, 2))
    assert day_and_machine({"a": {"one": new, "other": old}}, "a/*/ratio") == ("2026-01-01", "machine 1")
    assert day_and_machine({"new": new, "old": old, "both": {"ratio": 2}}, "both/ratio") == ("2026-01-01", "machine 1")


def test_rows_of_a_list_are_found_by_what_they_call_themselves() -> None:
    told = {"rows": [{"what": "cold, all", "value": 1}, {"what": "warm", "value": [2, [3]]}]}
    assert values(told, "rows/cold, all/value") == [1]
    assert values(told, "rows/*/value") == [1, 2, 3]


def test_all_benchmarks_together_are_to_take_less_than_20_minutes() -> None:
    assert sum(one.about_s for one in every.BENCHES) < every.LIMIT_S
    assert "python benchmarks/all.py" in (ROOT / "Makefile").read_text()
    assert {one.result for one in every.BENCHES} <= {one.result for one in TABLE.figures}


def test_a_benchmark_that_fails_does_not_stop_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    ran = []

    def run(one: every.Bench) -> int:
        ran.append(one.name)
        return 3 if one.name == "scan" else 0

    assert every.measured(every.BENCHES, run) == ["scan"]
    assert ran == [one.name for one in every.BENCHES]
    assert "scan: 0 s, exit code 3" in capsys.readouterr().out
