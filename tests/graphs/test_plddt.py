"""pLDDT of predicted structures: a field of nodes, a limit that drops or masks, and files that are no predictions."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from pipeline.graphs.graph_checks import wrong_graph
from pipeline.graphs.item_graph import GraphRecipe, decode_graph, encode_graph
from pipeline.graphs.make_graphs import build_graph
from pipeline.graphs.residue_graph import UNSURE
from pipeline.records import Inventory, Part, Reason, Role
from pipeline.store.format.record import Record
from pipeline.structures.inventory import ScanRecipe
from pipeline.structures.parsing.read_structure import FileReading
from pipeline.structures.policy import Policy
from tests.graphs.complexes import examined, side
from tests.testkit.command import Command
from tests.testkit.project import MakeProject, settle

NAMES = ("MET", "GLY", "LYS", "TRP", "ALA", "SER", "VAL", "LEU")
PLDDT = {
    "A": (95.25, 91.5, 88.0, 70.0, 69.99, 50.12, 35.5, 97.0),
    "B": (60.0, 98.98, 97.0, 96.0, 95.0, 90.0, 85.0, 80.0),
}
ATOMS = (("N", 0.0, 1.2), ("CA", 1.0, 0.0), ("C", 2.0, 1.1), ("O", 2.1, 2.3), ("CB", 0.9, -1.5))
GRAPHS = (GraphRecipe(), GraphRecipe(nodes="atom"))
ALPHAFOLD_PDB = """\
HEADER                                            01-JUN-22
TITLE     ALPHAFOLD MONOMER V2.0 PREDICTION FOR A MADE PROTEIN (P00000)
COMPND    MOL_ID: 1;
REMARK   1 DISCLAIMERS
CRYST1    1.000    1.000    1.000  90.00  90.00  90.00 P 1           1
MODEL        1
"""
SOLVED_WITH_IT = """\
HEADER    HYDROLASE                               01-JUN-22   7XXX
TITLE     STRUCTURE OF A MADE PROTEIN
EXPDTA    X-RAY DIFFRACTION
REMARK 200 STARTING MODEL: ALPHAFOLD
"""
QUALITY_CIF = """\
loop_
_ma_qa_metric.id
_ma_qa_metric.mode
_ma_qa_metric.name
_ma_qa_metric.software_group_id
_ma_qa_metric.type
1 global pLDDT 1 pLDDT
2 local  pLDDT 1 pLDDT
#
"""
TAGS = """
    group_PDB id type_symbol label_atom_id label_alt_id label_comp_id label_asym_id label_entity_id label_seq_id
    pdbx_PDB_ins_code Cartn_x Cartn_y Cartn_z occupancy B_iso_or_equiv auth_seq_id auth_asym_id pdbx_PDB_model_num
"""
SITES = "loop_\n" + "".join(f"_atom_site.{tag}\n" for tag in TAGS.split())


def atoms(scale: float = 1.0):
    """Yield chain, residue name, number, atom name, place and pLDDT of a model of two chains."""
    for chain, (number, name) in product("AB", enumerate(NAMES, 1)):
        for atom, x, y in ATOMS[: 4 if name == "GLY" else 5]:
            place = (3.8 * number + x, y + (4.0 if chain == "B" else 0.0), 0.5 * number)
            yield chain, name, number, atom, place, scale * PLDDT[chain][number - 1]


def pdb(heading: str = ALPHAFOLD_PDB, scale: float = 1.0) -> bytes:
    """Write the model as a PDB file; without a heading, as most programs do."""
    lines, serial, last = [heading], 0, "A"
    for chain, name, number, atom, (x, y, z), plddt in atoms(scale):
        if chain != last:
            lines.append("TER\n")
        serial, last = serial + 1, chain
        lines.append(
            f"ATOM  {serial:>5}  {atom:<3} {name} {chain}{number:>4}    {x:8.3f}{y:8.3f}{z:8.3f}"
            f"{1.0:6.2f}{plddt:6.2f}          {atom[0]:>2}  \n"
        )
    return "".join([*lines, "TER\n", "ENDMDL\n" if "MODEL" in heading else "", "END\n"]).encode()


def cif(quality: str = QUALITY_CIF) -> bytes:
    """Write the model as AlphaFold DB writes mmCIF: pLDDT as a metric of quality, and as B-factors."""
    lines = ["data_AF-P00000-F1\n#\n_entry.id AF-P00000-F1\n#\n", quality]
    tags = "label_asym_id label_comp_id label_seq_id metric_id metric_value model_id ordinal_id"
    local = ["loop_\n", *(f"_ma_qa_metric_local.{tag}\n" for tag in tags.split())]
    for ordinal, (chain, number) in enumerate(product("AB", range(1, len(NAMES) + 1)), 1):
        local.append(f"{chain} {NAMES[number - 1]} {number} 2 {PLDDT[chain][number - 1]:.2f} 1 {ordinal}\n")
    lines += [*local, "#\n", SITES]
    for serial, (chain, name, number, atom, (x, y, z), plddt) in enumerate(atoms(), 1):
        lines.append(
            f"ATOM {serial} {atom[0]} {atom} . {name} {chain} {'AB'.index(chain) + 1} {number} ? "
            f"{x:.3f} {y:.3f} {z:.3f} 1.0 {plddt:.2f} {number} {chain} 1\n"
        )
    return "".join([*lines, "#\n"]).encode()


def recipe(plddt: str = "marked", least: float | None = None, low: str = "drop", **policy: str) -> ScanRecipe:
    chosen = Policy(plddt=plddt, min_plddt=least, low_plddt=low, **policy)
    return ScanRecipe(reading=FileReading(b_factors=plddt != "none"), policy=chosen)


PARTNERS = (side(Role.RECEPTOR, "A"), side(Role.LIGAND, "B"))


def inventory_of(data: bytes, chosen: ScanRecipe, suffix: str = "pdb") -> Inventory:
    return examined(data, *PARTNERS, recipe=chosen, suffix=suffix)[0]


def arrays_of(data: bytes, chosen: ScanRecipe, graph: GraphRecipe, suffix: str = "pdb") -> dict[str, np.ndarray]:
    """Return the arrays of a graph, which a check of the cache must find to be right."""
    read = examined(data, *PARTNERS, recipe=chosen, suffix=suffix)[1]
    arrays, meta = encode_graph(build_graph(read, graph))
    assert list(wrong_graph(Record(b"k" * 16, arrays, meta), graph.plain())) == []
    assert decode_graph(arrays, meta).parts[0].size > 0
    return arrays


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.nodes)
def test_mmcif_and_pdb_of_one_model_give_equal_numbers(graph: GraphRecipe) -> None:
    of_pdb, of_cif = (
        arrays_of(*file, graph, suffix) for file, suffix in (((pdb(), recipe()), "pdb"), ((cif(), recipe()), "cif"))
    )
    assert of_pdb.keys() == of_cif.keys()
    assert all(np.array_equal(of_pdb[name], of_cif[name], equal_nan=of_pdb[name].dtype.kind == "f") for name in of_pdb)
    for role, chain in (("receptor", "A"), ("ligand", "B")):
        plddt = of_pdb[f"{role}.node.plddt"]
        assert plddt.dtype == np.float32
        wanted = np.array(PLDDT[chain], np.float32)
        place = of_pdb[f"{role}.node.residue"] if graph.nodes == "atom" else np.arange(len(NAMES))
        assert np.array_equal(plddt, wanted[place])


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.nodes)
def test_residues_below_the_limit_are_no_nodes_and_are_listed(graph: GraphRecipe) -> None:
    chosen = recipe(least=70.0)
    inventory = inventory_of(pdb(), chosen)
    receptor, ligand = inventory.partners
    assert [(partner.notes["low_plddt"], partner.nodes) for partner in (receptor, ligand)] == [(3, 5), (1, 7)]
    assert [row[2] for row in receptor.left_out] == ["5", "6", "7"]
    assert receptor.chains[0].sequence == "MGKWASVL"  # which the encoder reads whole
    arrays = arrays_of(pdb(), chosen, graph)
    assert arrays["receptor.node.plddt"].min() == np.float32(70.0)
    rows = arrays["receptor.residue.row"] if graph.nodes == "atom" else arrays["receptor.node.row"]
    assert rows.tolist() == (list(range(8)) if graph.nodes == "atom" else [0, 1, 2, 3, 7])


def test_masked_residues_stay_and_have_a_flag() -> None:
    chosen = recipe(least=70.0, low="mask")
    inventory = inventory_of(cif(), chosen, "cif")
    assert [(partner.notes["low_plddt"], partner.nodes) for partner in inventory.partners] == [(3, 8), (1, 8)]
    flags = arrays_of(cif(), chosen, GraphRecipe(), "cif")["receptor.node.flags"]
    assert ((flags & UNSURE) > 0).tolist() == [value < 70 for value in PLDDT["A"]]


def test_b_factors_that_are_no_plddt_are_refused() -> None:
    for data, suffix, chosen in (
        (pdb(heading=""), "pdb", recipe()),
        (pdb(heading=SOLVED_WITH_IT), "pdb", recipe()),
        (cif(quality=""), "cif", recipe()),
        (cif(quality=QUALITY_CIF + "_exptl.method 'X-RAY DIFFRACTION'\n#\n"), "cif", recipe()),
        (pdb(scale=1.5), "pdb", recipe()),
        (pdb(scale=-1), "pdb", recipe("every")),
        (pdb(heading="", scale=0.01), "pdb", recipe("every")),
    ):
        inventory = inventory_of(data, chosen, suffix)
        assert (inventory.reason, bool(inventory.detail)) == (Reason.NO_PLDDT, True)


@pytest.mark.parametrize("heading", ["", "EXPDTA    THEORETICAL MODEL\nREMARK   1 COLABFOLD\n"])
def test_files_that_say_nothing_are_taken_where_all_are_said_to_be_predictions(heading: str) -> None:
    arrays = arrays_of(pdb(heading), recipe("every"), GraphRecipe())
    assert np.array_equal(arrays["receptor.node.plddt"], np.array(PLDDT["A"], np.float32))
    if heading:
        assert inventory_of(pdb(heading), recipe()).reason is None


def test_nothing_is_left_where_all_is_unsure_and_the_reason_names_the_limit() -> None:
    inventory = inventory_of(pdb(), recipe(least=99.0))
    assert inventory.reason is Reason.INCOMPLETE_RESIDUES
    assert inventory_of(pdb(), recipe(least=70.0, incomplete="reject")).reason is None  # what is dropped is complete


def test_bound_structures_are_read_as_experiments() -> None:
    from pipeline.records import Item
    from pipeline.structures.inventory import examine_item
    from pipeline.structures.parsing.structure_files import File

    files = {"p.pdb": File(pdb(), "1"), "x.pdb": File(pdb(heading=SOLVED_WITH_IT), "2")}
    parts = [tuple(Part(part.role, path, part.chains) for part in PARTNERS) for path in files]
    inventory, read = examine_item(Item("i", parts[0], parts[1]), files, recipe(least=70.0))
    assert inventory.reason is None
    assert build_graph(read, GraphRecipe()).parts[0].nodes["labelled"].all()


def test_a_scan_counts_them_and_rejects_what_is_no_prediction(pipeline: Command, make_project: MakeProject) -> None:
    folder = make_project(0)
    (folder / "data" / "af.pdb").write_bytes(pdb())
    (folder / "data" / "afc.cif").write_bytes(cif())
    (folder / "data" / "solved.pdb").write_bytes(pdb(heading=SOLVED_WITH_IT))
    settle(folder / "data")
    sets = ("--set", "structures.min_plddt=70", "--set", "data.max_rejected_fraction=0.5")
    wrong = pipeline("submit", "--stage", "scan", *sets)
    assert wrong.code == 2
    assert "set structures.plddt: marked (or every)" in wrong.err
    words = ("submit", "--stage", "graph", "--executor", "local", "--follow", *sets, "--set", "structures.plddt=marked")
    assert pipeline(*words).code == 0
    details = pipeline("status", "-v").out
    assert "residues below structures.min_plddt: 8" in details
    assert "residues left out: 8 in 2 items" in details
    assert "no_plddt" in details
