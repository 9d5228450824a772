"""Bonds: templates against chemistry and against covalent radii, and what stands in for them."""

from __future__ import annotations

from pathlib import Path

import gemmi
import numpy as np
from scipy.spatial import cKDTree

from pipeline.graphs import atom_graph, bonds
from pipeline.graphs.item_graph import GraphRecipe
from pipeline.records import Role
from pipeline.structures.atoms import name_text
from pipeline.structures.inventory import Complex
from tests.graphs.complexes import complex_in, complex_of
from tests.structures.pdb_text import atom as line

ALANINE = {"N": (0, 0, 0), "CA": (1.46, 0, 0), "C": (2.0, 1.42, 0), "O": (1.25, 2.39, 0), "CB": (1.99, -0.77, -1.2)}

# heavy atoms and bonds of each residue within a chain: without OXT and OP3
SIZES = {
    "GLY": (4, 3), "ALA": (5, 4), "SER": (6, 5), "CYS": (6, 5), "THR": (7, 6), "VAL": (7, 6), "PRO": (7, 7),
    "LEU": (8, 7), "ILE": (8, 7), "ASP": (8, 7), "ASN": (8, 7), "MET": (8, 7), "GLU": (9, 8), "GLN": (9, 8),
    "LYS": (9, 8), "HIS": (10, 10), "PHE": (11, 11), "ARG": (11, 10), "TYR": (12, 12), "TRP": (14, 15),
    "A": (22, 24), "G": (23, 25), "C": (20, 21), "U": (20, 21),
    "DA": (21, 23), "DG": (22, 24), "DC": (19, 20), "DT": (20, 21), "DI": (21, 23),
}  # fmt: skip
ONLY_ELSEWHERE = {"OXT", "OP3"}
REAL = [
    "4p5j.cif.gz", "1LCD.pdb.gz", "5ugo.pdb.gz", "1pfe.cif.gz", "1aki.cif.gz", "1A8O.cif.gz", "3JQH.cif.gz",
]  # fmt: skip
# Within covalent radii, but no bonds, each for its reason.
NOT_BONDS = {
    "4p5j.cif.gz": {"A40.OP2-MG102.MG"},  # coordination
    "1LCD.pdb.gz": {"DT4.OP1-NA12.NA"},
    "5ugo.pdb.gz": {
        f"{name}-CA{number}.CA"
        for number, names in {
            402: ["DC11.OP1", "ASP190.OD1", "ASP192.OD2", "2PN401.O2", "2PN401.O6"],
            403: ["DC10.O3'", "DC11.OP1", "ASP190.OD1", "ASP190.OD2", "ASP190.CG", "ASP192.OD1", "ASP256.OD2"],
        }.items()
        for name in names
    },
}


def of_name(name: str) -> list[tuple[str, str]]:
    """Return the bonds of a residue's template that every such residue of a chain has."""
    pairs = [pair for pair in bonds.bonds_of(name) if not ONLY_ELSEWHERE & set(pair)]
    if name == "GLY":
        pairs.remove(("CA", "CB"))
    return [pair for pair in pairs if not (name.startswith("D") and "O2'" in pair)]


def test_templates_are_those_of_chemistry() -> None:
    most = {"C": 3, "N": 3, "O": 2, "S": 2, "P": 5}
    for name, wanted in SIZES.items():
        pairs = of_name(name)
        assert (len({one for pair in pairs for one in pair}), len({frozenset(pair) for pair in pairs})) == wanted, name
        names = [one for pair in bonds.bonds_of(name) for one in pair]
        assert not {one for one in names if names.count(one) > most[one[0]]}, name
    assert bonds.bonds_of("HSD") == bonds.bonds_of("HIS")  # as molecular dynamics call it
    assert bonds.bonds_of("CYX") == bonds.bonds_of("CYS")
    assert not bonds.bonds_of("PSU")


def chosen_of(read: Complex, recipe: GraphRecipe | None = None) -> atom_graph.ChosenAtoms:
    return atom_graph._choose(Role.WHOLE, read.sides[Role.WHOLE], recipe or GraphRecipe(nodes="atom"))


def label(chosen: atom_graph.ChosenAtoms, index: int) -> str:
    structure, residue = chosen.side.structure, chosen.residue_R[chosen.residue_A[index]]
    name = name_text(structure.name_A[chosen.atom_A[index]])
    return f"{name_text(structure.name_R[residue])}{structure.number_R[residue]}.{name}"


def listed(read: Complex, recipe: GraphRecipe | None = None) -> list[str]:
    """Return the bonds by name, which say nothing of chains."""
    chosen = chosen_of(read, recipe)
    return ["-".join(label(chosen, one) for one in pair) for pair in atom_graph._bonds(chosen).tolist()]


def found(read: Complex, recipe: GraphRecipe | None = None) -> set[str]:
    """Return the bonds of a single chain by name."""
    return set(listed(read, recipe))


def by_radii(chosen: atom_graph.ChosenAtoms) -> set[tuple[int, int]]:
    """Return all pairs within covalent radii: another way to see bonds, which knows no names."""
    pairs_B2 = np.sort(cKDTree(chosen.pos_N3).query_pairs(3.0, output_type="ndarray"), axis=1)
    radius_A = np.array([gemmi.Element(int(one)).covalent_r for one in chosen.element_A])
    apart_B = np.linalg.norm(np.subtract(*chosen.pos_N3[pairs_B2.T]), axis=1)
    return set(map(tuple, pairs_B2[apart_B <= radius_A[pairs_B2].sum(axis=1) + 0.4].tolist()))


def disagreement(path: Path) -> tuple[set[str], set[str]]:
    """Return the bonds that only we see, and those that only radii see."""
    chosen = chosen_of(complex_in(path))
    ours, theirs = set(map(tuple, atom_graph._bonds(chosen).tolist())), by_radii(chosen)
    assert len(ours) > 150
    only_ours, only_theirs = (
        {"-".join(label(chosen, one) for one in pair) for pair in some} for some in (ours - theirs, theirs - ours)
    )
    return only_ours, only_theirs


def test_bonds_are_those_within_covalent_radii(structures: Path) -> None:
    paths = [*(structures / "varied" / name for name in REAL), *sorted(structures.glob("complexes/*.pdb"))]
    for path in paths:
        assert disagreement(path) == (set(), NOT_BONDS.get(path.name, set())), path.name


def peptide(gap: float, *names: str) -> str:
    """Return residues in a row, each `gap` Å behind the carbonyl of the one before."""
    lines = ""
    for index, name in enumerate(names):
        for one, (x, y, z) in ALANINE.items():
            lines += line(one, name, "A", index + 1, xyz=(x + index * (2.0 + gap), y + index * 1.42, z))
    return lines + "TER\n"


def cysteines(apart: float) -> str:
    pair = peptide(9.0, "CYS", "CYS")
    return pair.replace("TER\n", "") + "".join(
        line("SG", "CYS", "A", number, xyz=(20.0 + apart * number, 0, 0)) for number in (1, 2)
    )


LINK = "LINK         ND2 ASN A   1                 C1  NAG A 101     1555   1555  1.45  \n"
METAL = "LINK        ZN    ZN A 102                 ND2 ASN A   1     1555   1555  2.05  \n"
OTHER = "LINK         C1  NAG A 101                 C2  NAG A 101     1555   1555  1.50  \n"
SSBOND = "SSBOND   1 CYS A    1    CYS A    2                          1555   1555  2.80  \n"
GLYCAN = (
    peptide(1.33, "ASN").replace("TER\n", "")
    + line("ND2", "ASN", "A", 1, xyz=(10, 0, 0))
    + "TER\n"
    + line("C1", "NAG", "A", 101, xyz=(11.45, 0, 0), record="HETATM")
    + line("C2", "NAG", "A", 101, xyz=(12.2, 1.3, 0), record="HETATM")
    + line("ZN", "ZN", "A", 102, xyz=(10, 2.0, 0), element="ZN", record="HETATM")
)
EXTRA = line("XD", "ALA", "A", 1, xyz=(3.4, -0.8, -1.2), element="C")
DISULFIDE, GLYCOSIDE = "CYS1.SG-CYS2.SG", "ASN1.ND2-NAG101.C1"
CASES = {  # lines, a bond, and whether it is one
    "neighbours in a chain": (peptide(1.33, "ALA", "ALA"), "ALA1.C-ALA2.N", True),
    "across a break": (peptide(3.0, "ALA", "ALA"), "ALA1.C-ALA2.N", False),
    "an atom that the template lacks": (peptide(1.33, "ALA").replace("TER\n", "") + EXTRA, "ALA1.CB-ALA1.XD", True),
    "near sulfurs": (cysteines(2.05), DISULFIDE, True),
    "sulfurs too far apart": (cysteines(2.8), DISULFIDE, False),
    "sulfurs that the file names": (SSBOND + cysteines(2.8), DISULFIDE, True),
    "far sulfurs that the file names": (SSBOND + cysteines(5.0), DISULFIDE, False),
    "a link": (LINK + METAL + GLYCAN, GLYCOSIDE, True),
    "a molecule whose neighbour is not named": (LINK + METAL + GLYCAN, "NAG101.C1-NAG101.C2", True),
    "coordination of a metal": (LINK + METAL + GLYCAN, "ASN1.ND2-ZN102.ZN", False),
    "radii, where the file names nothing": (GLYCAN, GLYCOSIDE, True),
    "radii, where the file names others": (OTHER + GLYCAN, GLYCOSIDE, False),
}


def test_what_is_a_bond_and_what_is_none() -> None:
    for name, (lines, bond, is_one) in CASES.items():
        assert (bond in found(complex_of(lines))) == is_one, name
    far = peptide(1.33, "ALA").replace("   1.990  -0.770  -1.200", "  90.000   0.000   0.000")
    assert found(complex_of(far)) == {"ALA1.N-ALA1.CA", "ALA1.CA-ALA1.C", "ALA1.C-ALA1.O"}


def numbered(lines: str) -> str:
    """Give atoms serial numbers in order, to which CONECT refers."""
    rows = lines.splitlines(keepends=True)
    return "".join(f"{row[:6]}{index:>5}{row[11:]}" for index, row in enumerate(rows, start=1))


def test_conect_bonds_what_radii_would_not_but_not_a_metal() -> None:
    lines = "".join(
        line(name, name[:2] if name == "ZN" else "LIG", "A", number, xyz=(x, 0, 0), element=element, record="HETATM")
        for name, number, x, element in (("C1", 1, 0.0, "C"), ("C2", 1, 2.3, "C"), ("ZN", 2, 4.5, "ZN"))
    )
    seen = found(complex_of(numbered(lines) + "CONECT    1    2\nCONECT    2    1    3\n"))
    assert seen == {"LIG1.C1-LIG1.C2"}


def test_a_hydrogen_is_bonded_to_the_nearest_heavy_atom_of_its_residue() -> None:
    lines = peptide(1.33, "ALA").replace("TER\n", "")
    for name, xyz in (("HA", (1.9, -0.3, 0.9)), ("H", (-0.4, 0.9, 0.2)), ("HB1", (3.08, -0.7, -1.2))):
        lines += line(name, "ALA", "A", 1, xyz=xyz, element="H")
    lines += line("DB2", "ALA", "A", 1, xyz=(1.6, -1.8, -1.3), element="D")
    seen = found(complex_of(lines), GraphRecipe(nodes="atom", hydrogens=True)) - found(complex_of(lines))
    assert seen == {"ALA1.N-ALA1.H", "ALA1.CA-ALA1.HA", "ALA1.CB-ALA1.HB1", "ALA1.CB-ALA1.DB2"}


def test_heme_has_the_bonds_of_the_dictionary_of_components(structures: Path) -> None:
    block = gemmi.cif.read(str(structures / "varied" / "HEM.cif.gz")).sole_block()
    atoms = block.find(
        "_chem_comp_atom.", ["atom_id", "type_symbol", "model_Cartn_x", "model_Cartn_y", "model_Cartn_z"]
    )
    lines, heavy = "", set()
    for row in atoms:
        name = gemmi.cif.as_string(row[0])
        if row[1] != "H":
            heavy.add(name)
            xyz = (float(row[2]), float(row[3]), float(row[4]))
            lines += line(name, "HEM", "A", 1, xyz=xyz, element=row[1].upper(), record="HETATM")
    pairs = block.find("_chem_comp_bond.", ["atom_id_1", "atom_id_2"])
    wanted = {frozenset((gemmi.cif.as_string(row[0]), gemmi.cif.as_string(row[1]))) for row in pairs}
    seen = {frozenset(one.removeprefix("HEM1.") for one in pair.split("-")) for pair in found(complex_of(lines))}
    assert seen == {pair for pair in wanted if pair <= heavy}
    assert len(seen) == 50  # with the four of the iron


PSEUDOURIDINE = {"N1": "C5", "C2": "C4", "O2": "O4", "C4": "C2", "O4": "O2", "C5": "N1"}  # which atom of U stands there


def test_the_base_of_pseudouridine_hangs_on_its_carbon(structures: Path) -> None:
    read = complex_in(structures / "varied" / "4p5j.cif.gz")
    structure = read.sides[Role.WHOLE].structure
    residue = next(at for at, name in enumerate(structure.name_R) if name_text(name) == "U")
    is_heavy_A = ~bonds.is_hydrogen(structure.element_A)
    lines = ""
    for index in np.flatnonzero(is_heavy_A & (structure.residue_A == residue)):
        name = name_text(structure.name_A[index])
        xyz = tuple(structure.pos_A3[index].tolist())
        lines += line(PSEUDOURIDINE.get(name, name), "PSU", "A", 1, xyz=xyz, record="HETATM")
    seen = found(complex_of(lines))
    assert len(seen) == 21  # 20 atoms and two rings
    assert {"PSU1.C1'-PSU1.C5", "PSU1.C5-PSU1.C6"} <= seen
    assert "PSU1.C1'-PSU1.N1" not in seen


def test_nucleotides_are_joined_by_phosphodiesters_within_their_strands(structures: Path) -> None:
    counts = {}
    for name in ("4p5j.cif.gz", "1LCD.pdb.gz", "5ugo.pdb.gz"):
        seen = listed(complex_in(structures / "varied" / name))
        counts[name] = sum("O3'" in bond and bond.endswith(".P") for bond in seen)
    assert counts == {"4p5j.cif.gz": 84 - 1, "1LCD.pdb.gz": 2 * 11 - 2, "5ugo.pdb.gz": 16 + 11 + 5 - 3}
