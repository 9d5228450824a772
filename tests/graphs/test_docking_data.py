"""The layouts of docking sets over real files: which residues become nodes, several chains a side, homomers."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

import numpy as np
import pytest

from pipeline.graphs.item_graph import GraphRecipe, ItemGraph
from pipeline.graphs.residue_graph import build_residue_graph
from pipeline.records import Item, Reason, Rejection, Role
from pipeline.structures.atoms import UnusableInput, name_text
from pipeline.structures.inventory import Complex
from pipeline.structures.sources.data_source import items
from pipeline.structures.sources.item_ids import SourceSpec
from tests.graphs.conftest import read_item
from tests.reference import document, recorded

RECIPE = GraphRecipe()
# DiffDock-PP leaves out all HETATM records. Where modified residues of a chain are written so, they are kept here.
KEPT_HERE = {"1KKL_r_u": ["MSE"] * 12}


def node_names(read: Complex, role: Role) -> list[str]:
    side = read.sides[role]
    residue_R = side.residues()
    return [name_text(side.structure.name_R[residue]) for residue in residue_R[side.structure.node_R[residue_R]]]


@pytest.mark.parametrize("state", ["bound", "unbound"])
def test_nodes_of_the_benchmarks_pairs_are_the_residues_that_diffdock_pp_keeps(
    state: str, bound: dict[str, Complex], unbound: dict[str, Complex]
) -> None:
    names, places = document("diffdock_pp/parsing"), recorded("diffdock_pp/parsing")
    pairs = bound if state == "bound" else unbound
    assert len(pairs) == 5
    for pair, read in pairs.items():
        for part in build_residue_graph(read, RECIPE).parts:
            file = f"{pair}_{part.role.value[0]}_{state[0]}"
            mine = node_names(read, part.role)
            ca_N3 = part.nodes["pos"][:, 1].astype(np.float64) + part.centre_3
            if extra := KEPT_HERE.get(file, []):
                is_extra_N = np.array([name in extra for name in mine])
                assert [mine[node] for node in np.flatnonzero(is_extra_N)] == extra
                mine, ca_N3 = [name for name in mine if name not in extra], ca_N3[~is_extra_N]
            assert mine == names[file]["names"], file
            np.testing.assert_allclose(ca_N3, places[next(key for key in places if key.startswith(file))], atol=2e-3)


def text_of(path: Path) -> str:
    return gzip.decompress(path.read_bytes()).decode()


def joined(to: Path, *files: Path) -> Path:
    """Write structures that stand in one frame as one file."""
    lines = (line for file in files for line in text_of(file).splitlines(keepends=True))
    to.write_text("".join(line for line in lines if line.startswith(("ATOM", "HETATM", "TER"))) + "END\n")
    return to


SUMMARY = "pdb\tHchain\tLchain\tmodel\tantigen_chain\tantigen_type\n"


def graph_of(item: Item) -> ItemGraph:
    return build_residue_graph(read_item(item), RECIPE)


def test_heavy_and_light_chain_against_the_antigen_come_from_a_summary_table_and_a_folder(
    tmp_path: Path, structures: Path, bound: dict[str, Complex]
) -> None:
    joined(tmp_path / "2vxt.pdb", *(structures / "pairs" / f"2VXT_{side}_b.pdb.gz" for side in "rl"))
    rows = "2vxt\tH\tL\t0\tI\tprotein\n2vxt\tH\tL\t0\tNA\tNA\n"
    (tmp_path / "sabdab_summary.tsv").write_text(SUMMARY + rows)
    item, without = items(SourceSpec("sabdab", tmp_path / "sabdab_summary.tsv"))
    assert isinstance(without, Rejection)
    graph, there = graph_of(item), build_residue_graph(bound["2VXT"], RECIPE)
    assert [[own.name for own in part.chains] for part in graph.parts] == [["H", "L"], ["I"]]
    np.testing.assert_array_equal(graph.labels["contact_pairs"], there.labels["contact_pairs"])
    assert graph.parts[1].size == there.parts[1].size


def test_bound_structures_that_do_not_touch_reject_the_unbound_input(tmp_path: Path, structures: Path) -> None:
    pairs = structures / "pairs"
    for file in ("1Z0K_r_u", "1Z0K_l_u", "1Z0K_r_b"):
        shutil.copy(pairs / f"{file}.pdb.gz", tmp_path)
    lines = (line for line in text_of(pairs / "1Z0K_l_b.pdb.gz").splitlines() if line.startswith("ATOM"))
    moved = [f"{line[:30]}{float(line[30:38]) + 900:8.3f}{line[38:]}" for line in lines]
    (tmp_path / "1Z0K_l_b.pdb").write_text("\n".join([*moved, "END\n"]))
    for state in ("bound", "unbound"):
        (item,) = items(SourceSpec("pairs", tmp_path, state=state))
        with pytest.raises(UnusableInput, match="nearest heavy atoms of the partners are") as caught:
            build_residue_graph(read_item(item), RECIPE)
        assert caught.value.reason is Reason.NO_CONTACTS
        assert ("in the bound structure" in caught.value.detail) == (state == "unbound")
