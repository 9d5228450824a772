"""The day on a GPU: what crashes or hangs costs only itself, what is known is kept, and all of it can be rehearsed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_parts.day import Asking, Day, Part
from benchmarks.gpu_parts.day_page import (
    MISSED,
    NOT_MEASURED,
    NOTHING_TO_REACH,
    REACHED,
    day_page,
    figures_of_the_day,
    judged,
    part_of,
)
from tests.card import card
from tests.docs.test_benchmarks import a_figure

ROOT = Path(__file__).resolve().parents[2]
REHEARSAL_S = 1800  # on machines that are shared; on two cores of its own it is to take less than ten minutes
ABOUT = {"device": "cpu", "card": "a card", "driver": "1", "torch": "2", "rehearsal": True}


# ---- cases that parts ask for, in processes of their own ----


def doubled(case: Mapping[str, Any]) -> dict[str, Any]:
    return {"value": 2 * case["number"]}


def crashed(_: Mapping[str, Any]) -> dict[str, Any]:
    sys.stderr.write("it is about to crash\n")
    os.kill(os.getpid(), 11)
    return {}


def hung(_: Mapping[str, Any]) -> dict[str, Any]:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    sys.stderr.write(f"waiting for {other.pid}\n")
    other.wait()
    return {}


def a_day(tmp_path: Path, minutes: float = 10.0, **about: Any) -> Day:
    return Day(tmp_path, tmp_path, {**ABOUT, **about}, time.monotonic() + 60 * minutes)


def a_part(run: Callable[[Asking], object], **given: Any) -> Part:
    return Part("oom", "made up", 1.0, run, lambda cases: {"sum": sum(row["value"] for row in cases.values())}, **given)


def cases_of(day: Day) -> dict[str, Any]:
    cases: dict[str, Any] = json.loads(day.path("oom").read_text())["cases"]
    return cases


@pytest.mark.nightly
def test_a_case_that_crashes_or_hangs_costs_only_itself(tmp_path: Path) -> None:
    def run(asking: Asking) -> None:
        asking.ask("crash", f"{__name__}:crashed", 60)
        asking.ask("hang", f"{__name__}:hung", 30)
        asking.ask("whole", f"{__name__}:doubled", 60, number=4)

    day = a_day(tmp_path)
    assert day.run(a_part(run), day.end)
    found = cases_of(day)
    assert found["crash"]["error"] == "its process ended with -11: it is about to crash"
    assert found["hang"]["error"].startswith("it took more than 30 s: waiting for ")
    pid = int(found["hang"]["error"].rpartition(" ")[2])
    assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]
    assert json.loads(day.path("oom").read_text())["figures"] == {"sum": 8}
    page = day_page(day, [a_part(run)])
    assert "oom: crash: its process ended with -11" in page
    assert (tmp_path / "logs" / "oom-crash.log").read_text() == "it is about to crash\n"


@pytest.mark.nightly
def test_a_day_that_is_run_again_takes_up_what_is_missing(tmp_path: Path) -> None:
    def run(asking: Asking) -> None:
        for number in (1, 2):
            asking.ask(f"number {number}", f"{__name__}:doubled", 60, number=number)

    over = a_day(tmp_path, minutes=0)
    assert not over.run(a_part(run), over.end)
    left_out = "oom: the time was over before number 1, number 2; run it again to take it up"
    assert left_out in day_page(over, [a_part(run)])
    first = a_day(tmp_path)
    first.run(a_part(lambda asking: asking.ask("number 1", f"{__name__}:doubled", 60, number=50)), first.end)
    again = a_day(tmp_path)
    assert again.run(a_part(run), again.end)
    assert {name: row["value"] for name, row in cases_of(again).items()} == {"number 1": 100, "number 2": 4}


@pytest.mark.nightly
def test_an_error_of_something_that_is_no_result_is_gone_once_it_went_well(tmp_path: Path) -> None:
    day = a_day(tmp_path)
    for case in ("crashed", "doubled"):
        calls = f"{__name__}:{case}"
        day.run(a_part(lambda asking, calls=calls: asking.ask("data", calls, 60, keep=False, number=1)), day.end)
        assert ("data" in cases_of(day)) == (case == "crashed")


def test_results_of_another_card_are_not_mixed_with_these(tmp_path: Path) -> None:
    day = a_day(tmp_path)
    day.run(a_part(lambda asking: asking.ask("one", f"{__name__}:doubled", 60, number=1)), day.end)
    assert day.others(["oom"]) == ""
    assert "is of card 'a card', and this is 'another'" in a_day(tmp_path, card="another").others(["oom"])


def test_a_part_that_fails_itself_ends_neither_the_day_nor_what_its_cases_said(tmp_path: Path) -> None:
    def run(asking: Asking) -> None:
        asking.ask("one", f"{__name__}:doubled", 60, number=1)
        raise OSError("no space")

    day = a_day(tmp_path)
    part = replace(a_part(run), figures=lambda cases: {"first": cases["none"]})
    assert day.run(part, day.end)
    assert cases_of(day)["one"]["value"] == 2
    page = day_page(day, [part])
    assert "oom: it ended early: OSError: no space" in page
    assert "oom: its figures: KeyError: 'none'" in page


def test_a_part_whose_modules_are_missing_says_so_and_runs_nothing(tmp_path: Path) -> None:
    day = a_day(tmp_path)
    part = a_part(lambda asking: asking.ask("one", f"{__name__}:crashed", 60), needs=("no_such_module",))
    assert day.run(part, day.end)
    assert "oom: no_such_module is not installed, so that none of it can be run" in day_page(day, [part])


def test_marks_come_from_what_was_measured_alone() -> None:
    told = {"a": {"one": {"ratio": 2.5}, "two": {"ratio": 1.5}}}
    assert judged(a_figure(), told) == ("1.5 to 2.5×", MISSED)
    assert judged(a_figure(), {"a": {"one": {"ratio": 2.5}}}) == ("2.5×", REACHED)
    assert judged(a_figure(reach=None), told) == ("1.5 to 2.5×", NOTHING_TO_REACH)
    for nothing in ({}, {"a": {}}, {"a": {"one": {"ratio": None}}}):
        assert judged(a_figure(), nothing) == (NOT_MEASURED, "")


@pytest.mark.nightly
def test_without_a_card_nothing_is_measured_and_it_says_what_to_do(tmp_path: Path) -> None:
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    words = ["--minutes", "1", "--out", str(tmp_path)]
    done = started(words, env=hidden, timeout=120)
    assert done.returncode == 2
    assert "no card here: asked for auto, and torch sees none" in done.stderr
    assert "--rehearse --device cpu" in done.stderr
    done = started(["--device", "cpu", *words], timeout=120)
    assert "cpu is no card: --rehearse shows that everything runs" in done.stderr


@pytest.mark.nightly
@pytest.mark.timeout(REHEARSAL_S + 60)
def test_the_whole_day_is_rehearsed_on_a_simulated_card(tmp_path: Path) -> None:
    if reason := card.why_not():
        pytest.skip(f"no simulated card here: {reason}")
    done = started(["--rehearse", "--device", "simcard", "--out", str(tmp_path)], timeout=REHEARSAL_S)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    page = (tmp_path / "README.md").read_text()
    assert "**This is a rehearsal, on Simulated Card" in page
    absent = {"figures/ratio/hugging_face_half"}  # it is measured where transformers is installed
    for figure in figures_of_the_day():
        result = json.loads((tmp_path / f"{part_of(figure)}.json").read_text())
        assert (result["left_out"], result["device"], result["rehearsal"]) == ([], "simcard", True)
        told, mark = judged(figure, result)
        if figure.value not in absent or mark:
            assert mark in (REACHED, MISSED, NOTHING_TO_REACH), figure.what
            assert f"| {told} | {mark} |" in page
    assert no_worse_than(tmp_path, "smoke", "missing", 0)
    assert no_worse_than(tmp_path, "oom", "lost", 0)
    assert no_worse_than(tmp_path, "embeddings", "refused", 0)


def no_worse_than(folder: Path, part: str, figure: str, most: float) -> bool:
    """Tell whether a figure that toy sizes do not change is as it is to be."""
    value: float = json.loads((folder / f"{part}.json").read_text())["figures"][figure]
    return value <= most


def started(words: list[str], **given: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, **given)
