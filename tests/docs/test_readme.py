"""The demo prints what the README shows, and each guarantee names the tests that prove it."""

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
from tests.testkit.cost import PROOF

ROOT = Path(__file__).resolve().parents[2]
README = Page(ROOT / "README.md")


def test_every_promise_links_to_tests_that_prove_it() -> None:
    guarantees = re.split(r"^## \d\. ", (ROOT / "docs/guarantees.md").read_text(), flags=re.MULTILINE)[1:]
    assert len(guarantees) == README.text.count("](docs/guarantees.md#") == 5
    assert min(len(PROOF.findall(guarantee)) for guarantee in guarantees) >= 2


def test_make_demo_prints_what_the_readme_shows(demo: Demo) -> None:
    if not made_by_make():
        pytest.skip("this environment was not made by make, which would first make one")
    (shown,) = (block for block in README.blocks if (block.what, block.argument) == ("output", "demo"))
    assert is_shown(shown.body, demo.printed), demo.printed


def test_the_demo_learns_the_rule_in_its_data_though_memory_runs_out_once(demo: Demo) -> None:
    (log,) = demo.pristine.glob("models/*/epochs.jsonl")
    epochs = [json.loads(line) for line in log.read_text().splitlines()]
    metrics = [epoch["validation"]["contact_auroc"] for epoch in epochs]
    assert metrics[-1] > 0.85 > metrics[0] + 0.2
    assert sum(epoch["ooms"] for epoch in epochs) == 1
    damage = json.loads((demo.pristine / "damage.jsonl").read_text().splitlines()[0])
    assert (damage["records"] - damage["whole"], damage["lost"]) == (1, 1)


@pytest.mark.nightly
def test_every_command_that_the_demo_suggests_works_as_typed(demo: Demo) -> None:
    suggested = re.findall(r"^  (pipeline .*?)(?:   .*)?$", demo.printed, re.MULTILINE)
    assert len(suggested) >= 5
    for command in suggested:
        done = subprocess.run(
            command.split(), cwd=demo.made, env=ENVIRONMENT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (command, done.stderr)
