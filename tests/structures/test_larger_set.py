"""A larger set of real structures, where one lies in ../shared/structures: the same as the reference set, by night."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from pipeline.graphs.item_graph import GraphRecipe
from pipeline.graphs.residue_graph import build_residue_graph
from pipeline.records import Item, Part, Role
from pipeline.structures.atoms import UnusableInput
from pipeline.structures.parsing.read_structure import FileReading, parse_structure
from pipeline.structures.parsing.structure_files import format_of, read_file
from pipeline.structures.policy import Policy, apply_policy
from tests.conftest import ROOT
from tests.graphs.complexes import LIMIT
from tests.graphs.conftest import read_item, read_pairs
from tests.graphs.test_atom import check_contacts
from tests.graphs.test_bonds import disagreement
from tests.graphs.test_residue import labelled
from tests.structures.parsing.test_plain_pdb import is_plain, unzipped
from tests.structures.second_parser import NotComparable, disagreements, read_second

LARGER = ROOT.parent / "shared" / "structures"
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not LARGER.is_dir(), reason=f"no larger set of structures in {LARGER}"),
]
# Of LYS 391 of chain A of 3R9A only N was observed; a node needs N, CA and C.
NOT_A_NODE = {("3R9A", 0, "391")}
NOT_BONDS = {"1JZD": {"ALA124.C-ASN125.ND2"}}  # a side chain 1.72 Å from the carbonyl before it: as deposited


def complexes() -> list[Path]:
    return sorted((LARGER / "complexes").glob("*.pdb"))


def test_contacts_of_every_complex_are_those_of_its_table() -> None:
    for path in complexes():
        check_contacts(path)
        read = read_item(Item(path.stem, parts=(Part(Role.COMPLEX, str(path)),)))
        rows = [line.split() for line in path.with_suffix(".contacts5.txt").read_text().splitlines()]
        theirs = Counter((row[0], row[3]) for row in rows)
        for pair in list(theirs):
            if {(path.stem, at, residue) for at, residue in enumerate(pair)} & NOT_A_NODE:
                del theirs[pair]
        assert labelled(build_residue_graph(read, GraphRecipe())) == theirs, path.name


def test_bonds_of_every_complex_are_those_within_covalent_radii() -> None:
    for path in complexes():
        assert disagreement(path) == (set(), NOT_BONDS.get(path.stem, set())), path.name


def test_every_pair_has_a_graph_bound_and_unbound() -> None:
    for state in ("bound", "unbound"):
        for name, read in read_pairs(LARGER / "pairs", state).items():
            graph = build_residue_graph(read, GraphRecipe())
            assert len(graph.labels["contact_pairs"]) > 10, (name, state)
            assert all(np.isfinite(part.nodes["pos"]).all() for part in graph.parts), (name, state)


def test_every_file_is_read_as_gemmi_and_as_biotite_read_it() -> None:
    plain, refused = 0, []
    for path in sorted(LARGER.glob("*/*")):
        if path.suffix in (".txt", ".csv") or path.name in ("occupancy.pdb", "1aki.bcif", "HEM.cif"):
            continue
        form, data = format_of(path), read_file(path, LIMIT)
        plain += form == "pdb" and is_plain(unzipped(path))
        try:
            structure = apply_policy(parse_structure(data, form, FileReading()), Policy())
            atoms = read_second(data, form, FileReading())
        except (NotComparable, UnusableInput):
            refused.append(path.parent.name)
            continue
        found = [what for chain in structure.chains for what in disagreements(atoms, structure, chain)]
        assert not found, (path.name, found[:3])
    assert plain >= 20 + 25
    assert set(refused) <= {"varied"}
