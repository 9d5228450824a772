"""The kit itself: what is made once is made once, and the rule of the gate fails what outgrows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.testkit.changed import reached_by
from tests.testkit.command import Command
from tests.testkit.once import Shelf
from tests.testkit.project import ProjectOf


def test_a_finished_stage_is_made_once_and_a_copy_of_it_has_nothing_to_do(
    project_of: ProjectOf, pipeline: Command, shelf: Shelf
) -> None:
    project_of("graph", 2)
    plans = pipeline("plan", "--stage", "graph", "--json").json()
    assert {plan["stage"]: plan["tasks"] for plan in plans} == {"scan": 0, "graph": 0}

    def again(_folder: Path) -> None:
        raise AssertionError("it was made before")

    shelf.pristine("graph-2", again)


def test_a_test_that_outgrows_the_gate_fails_and_a_nightly_one_does_not(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeini("[pytest]\nmarkers = nightly")
    pytester.makeconftest(
        "from tests.testkit import cost\n"
        "cost.LIMIT_S = 0.1\n"
        "def pytest_configure(config): config.pluginmanager.register(cost, 'cost')\n"
    )
    work = "    while time.process_time() - start < 0.5: pass\n"
    pytester.makepyfile(
        "import time, pytest\n"
        f"def test_grown():\n    start = time.process_time()\n{work}"
        f"@pytest.mark.nightly\ndef test_at_night():\n    start = time.process_time()\n{work}"
        "def test_small(): pass\n"
    )
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=2, failed=1)


def test_a_change_picks_what_imports_it_names_it_or_lies_next_to_it_and_a_setting_of_the_project_picks_all() -> None:
    assert "tests.readers.test_spectra" in (reached_by(["pipeline/readers/spectra.py"]) or ())
    assert "tests.store.test_contract" not in (reached_by(["pipeline/readers/spectra.py"]) or ())
    assert "tests.recipes.test_recipes" in (reached_by(["pipeline/tasks/rna_ligand.py"]) or ())
    assert "tests.slurm.test_runs" in (reached_by(["pipeline/engine/worker.py"]) or ())
    assert "tests.store.test_contract" in (reached_by(["tests/store/conftest.py"]) or ())
    assert "tests.docs.test_pages" in (reached_by(["docs/help.md"]) or ())
    assert reached_by(["CHANGELOG.md"]) == set()
    assert reached_by(["pyproject.toml"]) is None
