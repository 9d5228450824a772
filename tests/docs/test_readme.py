"""The README opens with one command, and the output that it shows is what that prints."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.docs.blocks import Page
from tests.docs.conftest import Demo, made_by_make
from tests.docs.reader import ENVIRONMENT
from tests.docs.shown import is_shown

ROOT = Path(__file__).resolve().parents[2]
README = Page(ROOT / "README.md")
PROOF = re.compile(r'\]\(tests/[\w/]+\.py "test_\w+"\)')


def test_the_first_command_is_make_demo_and_its_output_follows() -> None:
    first, second = README.blocks[:2]
    assert (first.what, first.commands) == ("demo", ["make demo"])
    assert (second.what, second.argument) == ("output", "demo")


def test_the_second_command_is_make_test_and_both_stand_in_the_opening() -> None:
    opening = README.path.read_text().partition("\n## ")[0]
    commands = [command for block in README.blocks for command in block.commands if f"$ {command}" in opening]
    assert commands == ["make demo", "make test"]
    sentences = opening.partition("```")[0]
    assert "`make demo`" in sentences
    assert "`make test`" in sentences
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"demo", "test"} <= set(targets)


def test_the_demo_learns_the_rule_that_is_planted_in_its_data_and_shows_it(demo: Demo) -> None:
    (log,) = demo.pristine.glob("models/*/epochs.jsonl")
    figures = [json.loads(line)["validation"]["contact_auroc"] for line in log.read_text().splitlines()]
    assert figures[-1] > 0.85 > figures[0] + 0.2
    assert f"contact_auroc from the first epoch to the last: {figures[0]:.4g} → " in demo.printed


def test_every_promise_links_to_a_test_that_shows_it() -> None:
    promises = re.split(
        r"^\d\. ", README.text.partition("## What is promised\n")[2].partition("\n## ")[0], flags=re.MULTILINE
    )
    assert len(promises) == 1 + 5
    assert [promise for promise in promises[1:] if len(PROOF.findall(promise)) < 2] == []


def test_make_shows_errors_of_pip_and_not_its_warnings() -> None:
    installs = re.findall(r"pip install (.*)", (ROOT / "Makefile").read_text())
    assert installs
    assert all(options.startswith("--quiet --quiet ") for options in installs)


def test_make_demo_prints_what_the_readme_shows(demo: Demo) -> None:
    if not made_by_make():
        pytest.skip("this environment was not made by make, which would first make one")
    assert is_shown(README.blocks[1].body, demo.printed), demo.printed


@pytest.mark.nightly
def test_every_command_that_the_demo_suggests_works_as_typed(demo: Demo) -> None:
    suggested = re.findall(r"^  (pipeline .*?)(?:   .*)?$", demo.printed, re.MULTILINE)
    assert len(suggested) >= 5
    for command in suggested:
        done = subprocess.run(
            command.split(), cwd=demo.made, env=ENVIRONMENT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (command, done.stderr)
