"""Each file of `on_card`, and each recipe of that of recipes, passes in a process whose torch has simulated cards."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.card import card
from tests.testkit import cost

FOLDER = Path(__file__).with_name("on_card")
RECIPES = "test_recipes_on_card"
OF_A_RECIPE = "test_a_recipe_trains_evaluates_and_predicts_on_a_card_as_on_the_cpu"
# Named here, as what knows them takes seconds to import.
NAMES = (
    *("complex_docking", "contrastive_pair", "denovo_recursive", "encoder_finetune"),
    *("interface", "rna_ligand", "spectra_finetune", "spectra_pretrain"),
)
GATE = "gate"  # refused memory, moved batches, and plans: what shows most within seconds
REFUSED = "test_refused_memory.py::test_a_step_survives_the_refusal_of_any_allocation_with_the_same_bits"
PLANS = "test_plans.py::test_a_plan_is_what_the_card_takes"
PARTS = {
    GATE: [*(f"{REFUSED}[{one}]" for one in ("dropout", "weighted")), f"{PLANS}[gnn-fp32]", "test_transfer.py"],
    **{file.stem: [file.name] for file in sorted(FOLDER.glob("test_*.py")) if file.stem != RECIPES},
    **{recipe: [f"{RECIPES}.py::{OF_A_RECIPE}[{recipe}]"] for recipe in NAMES},  # a minute each
}
WITHIN_S = 900


def test_there_is_a_compiler_in_ci() -> None:
    assert os.environ.get("CI") != "true" or not card.why_not()


@pytest.mark.timeout(WITHIN_S + 60)
@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=() if part == GATE else pytest.mark.nightly) for part in PARTS]
)
def test_on_card(part: str, tmp_path: Path) -> None:
    if reason := card.why_not():
        pytest.skip(f"no simulated card here: {reason}")
    options = ["-q", "-x", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'inner'}"]
    command = [sys.executable, "-m", "pytest", *options, *(str(FOLDER / test) for test in PARTS[part])]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {card.INSIDE: "1"}
    given = {"env": environment, "cwd": FOLDER.parents[2], "timeout": WITHIN_S}
    with cost.uncounted() if part == GATE else nullcontext():
        done = subprocess.run(command, capture_output=True, text=True, check=False, **given)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
