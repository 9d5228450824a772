"""`pipeline demo --recipe NAME`: from nothing to the output that the recipe is for."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from pipeline.config.load import read_config
from pipeline.setup import demo_project
from pipeline.setup.demo_project import DEMOS, write_recipe_demo
from tests.conftest import ROOT
from tests.testkit.command import Command

# No model reaches these on the test items without training. Docking poses needs more than a demo's minute.
BEYOND_CHANCE = {
    "spectra_finetune": 0.2,
    "spectra_pretrain": 0.55,
    "encoder_finetune": 0.3,
    "denovo_recursive": 0.3,
    "rna_ligand": 0.6,
    "contrastive_pair": 0.3,
}

pytestmark = pytest.mark.timeout(900)  # it trains for real, on machines that are shared


def test_every_recipe_has_a_demo() -> None:
    assert set(DEMOS) == {path.stem for path in (ROOT / "configs" / "recipes").glob("*.yaml")}


@pytest.mark.nightly
@pytest.mark.parametrize("name", DEMOS)
def test_a_recipe_learns_the_rule_in_its_data_and_writes_its_own_output(
    name: str, pipeline: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = pipeline("demo", "here", "--recipe", name)
    assert done.code == 0, done.err
    (file,) = Path("here/models").glob("*/evaluations/*.json")
    test = json.loads(file.read_text())["evaluation"]
    assert test["items"] >= 20
    assert test["figures"][DEMOS[name].metric] > BEYOND_CHANCE.get(name, 0)
    for shown in DEMOS[name].shows:
        (table,) = Path("here/predictions").glob(f"*/{shown}")
        with table.open(newline="") as rows:
            assert list(csv.DictReader(rows)), table
        assert f"less predictions/{table.parent.name}/{shown}" in done.out


def test_the_settings_of_a_demo_are_the_recipes_own_but_for_what_makes_it_small(tmp_path: Path) -> None:
    small = read_config(write_recipe_demo(tmp_path / "here", "spectra_finetune")).config
    whole = read_config(ROOT / "configs" / "recipes" / "spectra_finetune.yaml").config
    assert small.train.task == whole.train.task
    assert small.train.batching == whole.train.batching
    assert small.train.options["layers"] < whole.train.options["layers"]


def test_a_file_in_the_way_of_a_demo_is_named_with_a_remedy(
    pipeline: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taken").touch()
    refused = pipeline("demo", "taken/demo")
    assert refused.code == 2
    assert "taken/demo" in refused.err
    assert "next: pipeline demo DIR" in refused.err


def test_a_recipe_that_does_not_exist_is_refused_and_nothing_is_written(
    pipeline: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = pipeline("demo", "here", "--recipe", "spectra_finetun")
    assert refused.code == 2
    assert "no recipe is called spectra_finetun; did you mean spectra_finetune?" in refused.err
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize(("name", "module"), [("rna_ligand", "h5py"), ("contrastive_pair", "PIL")])
def test_a_recipe_that_needs_an_extra_says_so_before_it_starts(
    name: str, module: str, pipeline: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo_project, "find_spec", lambda wanted: None if wanted == module else wanted)
    refused = pipeline("demo", "here", "--recipe", name)
    assert (refused.code, "next: pip install" in refused.err, Path("here").exists()) == (2, True, False)
