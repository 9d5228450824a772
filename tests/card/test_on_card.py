"""Each file of `on_card`, and each recipe of that of recipes, passes in a process whose torch has simulated cards."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.card import card

FOLDER = Path(__file__).with_name("on_card")
RECIPES = "test_recipes_on_card"
OF_A_RECIPE = "test_a_recipe_trains_evaluates_and_predicts_on_a_card_as_on_the_cpu"
# Named here, as what knows them takes seconds to import.
NAMES = (
    *("complex_docking", "contrastive_pair", "denovo_recursive", "encoder_finetune"),
    *("interface", "rna_ligand", "spectra_finetune"),
)
PARTS = [
    *sorted(file.stem for file in FOLDER.glob("test_*.py") if file.stem != RECIPES),
    *(f"{RECIPES}[{recipe}]" for recipe in NAMES),  # a minute each
]
IN_GATE = "test_refused_memory"
WITHIN_S = 900


def test_there_is_a_compiler_in_ci() -> None:
    assert os.environ.get("CI") != "true" or not card.why_not()


@pytest.mark.timeout(WITHIN_S + 60)
@pytest.mark.parametrize(
    "part",
    [
        pytest.param(part, marks=() if part == IN_GATE else pytest.mark.nightly, id=part.removeprefix("test_"))
        for part in PARTS
    ],
)
def test_on_card(part: str, tmp_path: Path) -> None:
    if reason := card.why_not():
        pytest.skip(f"no simulated card here: {reason}")
    options = ["-q", "-x", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'inner'}"]
    file, bracket, case = part.partition("[")
    test = f"{FOLDER / file}.py" + (f"::{OF_A_RECIPE}[{case}" if bracket else "")
    command = [sys.executable, "-m", "pytest", *options, test]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {card.INSIDE: "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=WITHIN_S, check=False, cwd=FOLDER.parents[2]
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
