"""Residues of which atoms are missing: kept and flagged where they have a CA, left out by name where they have none."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pipeline.graphs import residue_graph
from pipeline.graphs.item_graph import GraphRecipe
from pipeline.graphs.residue_graph import INCOMPLETE, NO_BACKBONE
from pipeline.journal.run_folder import runs_in
from pipeline.records import Inventory, Item, Part, Role
from pipeline.structures.inventory import ScanRecipe, examine_item
from pipeline.structures.parsing.structure_files import File
from tests.structures.pdb_text import chain, residue
from tests.testkit.command import Command
from tests.testkit.project import settle

BOTH = Part(Role.COMPLEX, "c.pdb")
GAPS = (
    residue("ALA", "A", 1)
    + residue("GLY", "A", 2, ("CA", "C", "O"))
    + residue("SER", "A", 3, ("N", "CA", "CB"))
    + residue("LYS", "A", 391, ("N",))
    + residue("VAL", "A", 392, ("N", "C", "O"))
    + "TER\n"
    + chain("B", "ALA", "GLY", first=500)
    + "END\n"
)


def examined(lines: str, recipe: ScanRecipe | None = None):
    file = File(lines.encode(), "00")
    return examine_item(Item("c", parts=(BOTH,)), {"c.pdb": file}, recipe or ScanRecipe())


def test_a_residue_with_a_ca_is_a_node_whose_missing_atoms_are_flagged() -> None:
    _, read = examined(GAPS)
    nodes = residue_graph.build_residue_graph(read, GraphRecipe(contacts=None)).parts[0].nodes
    assert nodes["number"].tolist() == [1, 2, 3]
    absent = np.isnan(nodes["pos"]).all(axis=2)
    assert absent[:, :3].tolist() == [[False] * 3, [True, False, False], [False, False, True]]
    flags = nodes["flags"]
    assert ((flags & NO_BACKBONE) > 0).tolist() == [False, True, True]
    assert ((flags & INCOMPLETE) > 0).tolist() == [True, True, True]  # of the first, CB
    assert np.isfinite(nodes["pos"][:, 1]).all()


def test_a_residue_without_a_ca_is_left_out_by_name_with_the_atoms_that_it_has() -> None:
    inventory, _ = examined(GAPS)
    receptor = inventory.partners[0]
    assert receptor.left_out == (("A", "LYS", "391", "N"), ("A", "VAL", "392", "N C O"))
    assert (receptor.nodes, receptor.notes["incomplete"]) == (3, 2)
    assert receptor.chains[0].sequence == "AGSKV"  # what is encoded is as it was
    assert Inventory.from_json(json.loads(json.dumps(inventory.to_json()))) == inventory


def test_what_is_left_out_is_counted_and_listed_where_people_look(
    tmp_path: Path, monkeypatch, pipeline: Command, make_project: Callable[..., Path]
) -> None:
    folder = make_project(2)
    (folder / "data" / "gaps.pdb").write_text(GAPS)
    settle(folder / "data")
    monkeypatch.chdir(folder)
    said = pipeline("submit", "--stage", "scan", "--executor", "local", "--follow")
    assert said.code == 0, said.err
    run = runs_in(folder / "runs")[-1]
    with run.residues_left_out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [tuple(row.values()) for row in rows] == [
        ("gaps", "receptor", "A", "LYS", "391", "N"),
        ("gaps", "receptor", "A", "VAL", "392", "N C O"),
    ]
    scan = json.loads(pipeline("status", "--json").out)["stages"][0]["census"]
    assert (scan["residues_left_out"], scan["items_incomplete"]) == (2, 1)
    line, details = "residues left out: 2 in 1 item", pipeline("status", "-v").out
    assert line in details
    assert run.residues_left_out.name in details
    assert line in pipeline("report", "--html", "-").out
