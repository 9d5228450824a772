"""What every recipe predicts is a table that can be sorted: each item has a number of its own."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch

RECIPES = ("interface", "complex_docking", "rna_ligand", "denovo_recursive", "spectra_finetune", "contrastive_pair")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_gives_each_item_a_number_to_sort_by(recipe: str) -> None:
    tests = importlib.import_module(f"tests.tasks.test_{recipe}")
    task = replace(tests.SMALL, targets=1) if recipe == "spectra_finetune" else tests.SMALL  # several are columns
    with torch.no_grad():
        outputs = task.outputs(task.model(), task.example(tests.SIZES[0]))
    numbers = {name for name, values in outputs.items() if all(value.numel() == 1 for value in values)}
    assert numbers, {name: [tuple(value.shape) for value in values] for name, values in outputs.items()}
