"""An id, a chain, a run or a name in a manifest never makes, reads or removes a file outside its folder.

Ids of every adapter are tried in tests/structures/test_sources*.py; here a data set of hostile ones goes all the way.
"""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.files import cell_text
from pipeline.structures.synthetic import complex_pdb
from pipeline.training.evaluating.outputs import GatheredOutputs, OutputWriter, write_tables
from pipeline.training.forensics import step_bundle
from tests.testkit.command import Command
from tests.training.forensics.test_bundles import BUNDLE_OF, RNG_OF

HOSTILE = {
    "climbing": "../../outside",
    "climbing by Windows": "..\\..\\outside",
    "absolute": "/outside",
    "parent": "..",
    "here": ".",
    "home": "~/outside",
    "NUL": "a\0b",
    "long": "a" * 5000,
    "option": "-rf",
    "line": "a\nb",
    "substitution": "$(touch outside)",
    "escape": "a\x1b]0;owned\x07b",
    "override": "a\u202egnp.pdb",
    "formula": "=HYPERLINK(1)",
    "quoted formula": "'@SUM(1)",
}
FORMULAS = ("=HYPERLINK(1)", "'@SUM(1)")
FORMS = ("csv", "jsonl")


def tree(folder: Path) -> set[str]:
    """Return the names of all that is below a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def written(folder: Path, form: str) -> Path:
    """Write a data set of one good complex and the hostile ones, each of which names the good one's file."""
    (folder / "data").mkdir(parents=True)
    (folder / "data/good.pdb").write_bytes(complex_pdb(0, 40, 41))
    rows = [{"id": name, "path": "good.pdb"} for name in ("good", *HOSTILE.values())]
    path = folder / "data" / f"m.{form}"
    if form == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, ("id", "path"), delimiter="," if form == "csv" else "\t")
        table.writeheader()
        table.writerows(row for row in rows if "\n" not in row["id"] and "\0" not in row["id"])
    return path


@pytest.mark.parametrize("form", FORMS)
def test_a_data_set_of_hostile_ids_leaves_its_project_alone_and_is_counted(
    pipeline: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    project = tmp_path / "deep" / "down" / "project"
    manifest = written(project, form)
    (project / "pipeline.yaml").write_text(
        f"data: {{path: {manifest}, max_rejected_fraction: 1.0}}\ncluster: {{runs: runs}}\n"
    )
    monkeypatch.chdir(project)
    before = tree(tmp_path)
    done = pipeline("submit", "--stage", "scan", "--executor", "local", "--follow")
    assert done.code == 0, done.err
    made = tree(tmp_path) - before
    assert [name for name in made if not name.startswith(("deep/down/project/runs", "deep/down/project/cache"))] == []
    assert not [name for name in made if "outside" in name or "owned" in name]
    (rejected,) = project.glob("runs/2*/rejected.jsonl")
    found = [json.loads(line) for line in rejected.read_text().splitlines()]
    allowed = {"substitution", "home", "formula", "quoted formula"}  # words with no slash or dot first are names
    assert {one["reason"] for one in found} == {"bad_id"}
    assert len(found) >= len(HOSTILE) - len(allowed) - (0 if form == "jsonl" else 2)
    assert all(one["id"].isprintable() and len(one["id"]) <= 100 for one in found)
    assert "\x1b" not in done.out + done.err
    (inventory,) = project.glob("runs/2*/inventory.csv")
    with inventory.open(newline="") as file:
        cells = [row["id"] for row in csv.DictReader(file)]
    assert {f"'{name}" for name in FORMULAS} < set(cells), "a spreadsheet shows them as text"
    assert set(FORMULAS) < {row["id"] for row in json.loads(pipeline("items", "--json").out)}, "and they are read back"
    assert json.loads(pipeline("explain", FORMULAS[0], "--json").out)


def test_outputs_and_predictions_of_hostile_ids_are_rows_and_no_files(tmp_path: Path) -> None:
    ids = list(HOSTILE.values())
    with OutputWriter(tmp_path / "a/outputs", 0) as writer:
        writer.add(ids, range(len(ids)), {"score": [np.float32(-0.5)] * len(ids), "map": [np.zeros(3)] * len(ids)})
    write_tables(GatheredOutputs(tmp_path / "a/outputs"), tmp_path / "a/predictions")
    assert {path.name for path in tmp_path.iterdir()} == {"a"}
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"outputs", "predictions"}
    assert not [name for name in tree(tmp_path) if "outside" in name or name.count("/") > 3]
    lines = (tmp_path / "a/predictions/predictions.jsonl").read_text().split("\n")
    rows = [json.loads(line)["id"] for line in filter(None, lines)]
    assert rows == ids
    with (tmp_path / "a/predictions/predictions.csv").open(newline="") as file:
        cells = {cell_text(row["id"]): (row["id"], row["score"]) for row in csv.DictReader(file)}
    assert list(cells) == ids
    assert [cells[name] for name in FORMULAS] == [(f"'{name}", "-0.5") for name in FORMULAS]


def test_a_bundle_that_names_other_places_is_written_and_read_in_its_own(tmp_path: Path) -> None:
    cuts = (replace(BUNDLE_OF.cuts[0], ids=("../../outside", "/outside")),)
    made = step_bundle.write_bundle(
        tmp_path / "a/bundles", replace(BUNDLE_OF, cuts=cuts, message="../x\n\x1b[2J"), RNG_OF
    )
    assert made is not None
    assert step_bundle.read_bundle(made).cuts[0].ids == ("../../outside", "/outside")
    assert {path.name for path in tmp_path.iterdir()} == {"a"}
    assert {path.name for path in made.iterdir()} == {"manifest.json", "rng.safetensors"}


def test_no_command_takes_a_path_for_the_name_of_a_run(pipeline: Command, tmp_path: Path) -> None:
    (tmp_path / "pipeline.yaml").write_text("data: {path: m.csv}\n")
    (tmp_path / "runs").mkdir()
    for name in ("../../outside", "/etc", "..", "a/b", "x\n", "-h", "-rf", "$(touch outside)", "x; touch outside"):
        for verb in (("cancel", "--yes"), ("status",), ("logs",), ("resume",)):
            done = pipeline(*verb, "--", name)
            assert done.code == 2, (name, verb, done.out)
    assert tree(tmp_path) == {"pipeline.yaml", "runs"}
