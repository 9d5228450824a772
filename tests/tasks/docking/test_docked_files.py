"""A pose's file holds the atoms of the input with the ligand moved; a table has a row for each pose."""

from __future__ import annotations

import math
from dataclasses import replace

import gemmi
import numpy as np
import pytest

from pipeline.errors import DataError
from pipeline.records import Item, Part, Role
from pipeline.structures.inventory import ScanRecipe
from pipeline.structures.parsing.read_structure import PLAIN, FileReading, parse_structure
from pipeline.structures.parsing.structure_files import plain_files
from pipeline.tasks.docking.pose_quality import (
    EXPLODED,
    PoseRow,
    docking_truth,
    moved,
    pose_rows,
    shared_backbones,
)
from pipeline.tasks.docking.published_poses import LETTERS, DockedComplex, posed_file, write_docked
from tests.tasks.docking.docked import MAX_BYTES, as_moves, moves_from, nearest_move, pair_item, read, some_moves

KEPT = ("name_A", "resname_A", "number_A", "icode_A", "altloc_A", "occupancy_A", "element_A", "hetero_A")
STAY = moves_from(np.zeros((1, 3)), np.zeros((1, 3)))
FAR = moves_from([[0.4, -1.1, 0.7]], [[21.5, -7.25, 3.125]])

SMALL = """\
HEADER    A COMPLEX
REMARK   2 RESOLUTION
CRYST1   50.000   50.000   50.000  90.00  90.00  90.00 P 1           1
MODEL        1
ATOM      1  N   GLY A   1      11.000   2.000   3.000  1.00 10.00           N
ATOM      2  CA  GLY A   1      12.000   2.000   3.000  1.00 10.00           C
ANISOU    2  CA  GLY A   1      100    100    100      0      0      0       C
ATOM      3  C   GLY A   1      13.000   2.000   3.000  1.00 10.00           C
TER       4      GLY A   1
ATOM      5  N   ALA B -99A      1.000   2.000   3.000  1.00 20.00           N
ATOM      6  CA AALA B -99A      2.000   2.000   3.000  0.60 20.00           C
ANISOU    6  CA AALA B -99A     100    100    100      0      0      0       C
ATOM      7  CA BALA B -99A      2.500   2.000   3.000  0.40 20.00           C
ATOM      8  C   ALA B -99A      3.000   2.000   3.000  1.00 20.00           C1-
ATOM      9  HA  ALA B -99A      4.000   2.000   3.000  1.00 20.00           H
TER      10      ALA B -99A
HETATM   11  C1  LIG A 301      20.000   2.000   3.000  1.00 30.00           C
HETATM   12 ZN    ZN B 302       6.000   2.000   3.000  1.00 30.00          ZN
HETATM   13  O   HOH B 401       7.000   2.000   3.000  1.00 30.00           O
ATOM     14  CA  GLY C   1      50.000   2.000   3.000  1.00 10.00           C
ENDMDL
MODEL        2
ATOM      1  N   GLY A   1      91.000   2.000   3.000  1.00 10.00           N
ENDMDL
CONECT   11   12
MASTER        0    0
END
"""


def docked(item, recipe=None):
    recipe = recipe or ScanRecipe()
    return DockedComplex(item, read(item, recipe), plain_files(MAX_BYTES).of(item), recipe.reading)


def small(tmp_path, name="small.pdb", text=SMALL, receptor=("A",), ligand=("B",), recipe=None):
    path = tmp_path / name
    path.write_text(text)
    return docked(Item("s", (Part(Role.RECEPTOR, str(path), receptor), Part(Role.LIGAND, str(path), ligand))), recipe)


def as_cif(text):
    structure = gemmi.read_pdb_string(text)
    del structure[1:]
    structure.setup_entities()
    structure.assign_label_seq_id()
    return structure.make_mmcif_document().as_string()


def two_files(tmp_path, forms=("pdb", "pdb")):
    """A receptor and a ligand that both call their chain A."""
    atoms = [line for line in SMALL.splitlines() if line[:6].strip() in ("ATOM", "HETATM")]
    own = [line for line in atoms if line[21] == "A" and line[30:33] != "  9"]
    theirs = [line[:21] + "A" + line[22:] for line in atoms if line[21] == "B"]
    parts = []
    for role, lines, form in zip((Role.RECEPTOR, Role.LIGAND), (own, theirs), forms, strict=True):
        text = "\n".join(["SEQRES   1 A    1  GLY", *lines, "CONECT    5    6" if role is Role.LIGAND else "", "END\n"])
        path = tmp_path / f"{role.value}.{form}"
        path.write_text(text if form == "pdb" else as_cif(text))
        parts.append(Part(role, str(path)))
    return docked(Item("two", tuple(parts)))


def table_of(text, form, reading=PLAIN):
    return parse_structure(text, {"cif": "mmcif"}.get(form, form), reading)


def check_whole(found, forms, text, move):
    """A file of two has the atoms of both, the receptor's first; return the chains of each side."""
    parts = zip(found.item.parts, forms, strict=True)
    receptor, ligand = (table_of(found.files[part.path].data, form) for part, form in parts)
    both = {name: np.concatenate([getattr(table, name) for table in (receptor, ligand)]) for name in (*KEPT, "pos_A3")}
    after = table_of(text, "cif" if "cif" in forms else "pdb")
    is_ligand_A = np.arange(len(both["name_A"])) >= len(receptor.name_A)
    check_moved(replace(receptor, **both), after, is_ligand_A, move)
    return [[*dict.fromkeys(chains_of(after)[chosen_A].tolist())] for chosen_A in (~is_ligand_A, is_ligand_A)]


def chains_of(table):
    return np.array([table.chain_name(code) for code in table.chain_A])


def check_moved(before, after, is_moved_A, move):
    """All columns are as before, and so are the places of atoms that stay."""
    assert {name: (getattr(before, name) != getattr(after, name)).sum() for name in KEPT} == dict.fromkeys(KEPT, 0)
    np.testing.assert_array_equal(after.pos_A3[~is_moved_A], before.pos_A3[~is_moved_A])
    expected = moved(np.ascontiguousarray(before.pos_A3[is_moved_A]), move)[0]
    np.testing.assert_allclose(after.pos_A3[is_moved_A], expected, atol=5.001e-4)


@pytest.mark.parametrize("form", ["pdb", "cif"])
def test_a_written_pose_reads_back_as_the_input_with_its_ligand_moved(tmp_path, form):
    text = SMALL if form == "pdb" else as_cif(SMALL)
    posed = posed_file(small(tmp_path, f"small.{form}", text)).pose(FAR[0], ["A REMARK"])
    before, after = table_of(text.encode(), form), table_of(posed, form)
    check_moved(before, after, chains_of(before) == "B", FAR)
    assert chains_of(after).tolist() == chains_of(before).tolist()
    structure = (
        gemmi.read_pdb_string(posed)
        if form == "pdb"
        else gemmi.make_structure_from_block(gemmi.cif.read_string(posed)[0])
    )
    atoms = [(chain.name, atom) for chain in structure[0] for residue in chain for atom in residue]
    assert (len(structure), len(atoms), structure.cell.a) == (1, 12, 50)
    assert {name: {atom.b_iso for chain, atom in atoms if chain == name} for name in "ABC"} == {
        "A": {10, 30},
        "B": {20, 30},
        "C": {10},
    }
    assert [chain for chain, atom in atoms if atom.aniso.nonzero()] == ["A"]  # a ligand's would have to turn


def test_molecules_that_are_named_singly_go_with_the_side_that_names_them(tmp_path):
    recipe = ScanRecipe(policy=replace(ScanRecipe().policy, ligands="keep"))
    kept = small(tmp_path, receptor=("A", "B:ZN:302"), ligand=("B", "A:LIG:301"), recipe=recipe)
    before = table_of(SMALL.encode(), "pdb")
    after = table_of(posed_file(kept).pose(FAR[0], []), "pdb")
    names = [gemmi.Element(int(number)).name for number in before.element_A]
    is_moved_A = (chains_of(before) == "B") & (np.array(names) != "Zn")
    is_moved_A |= (chains_of(before) == "A") & (before.number_A == 301)
    check_moved(before, after, is_moved_A, FAR)


@pytest.mark.parametrize("forms", [("pdb", "pdb"), ("cif", "cif"), ("pdb", "cif")], ids="-".join)
def test_two_files_become_one_in_which_chains_of_one_name_are_told_apart(tmp_path, forms):
    found = two_files(tmp_path, forms)
    posed = posed_file(found)
    form = "pdb" if set(forms) == {"pdb"} else "cif"
    assert posed.suffix == f".{form}"
    text = posed.pose(FAR[0], [])
    assert check_whole(found, forms, text, FAR) == [["A"], ["B"]]
    assert b"ENAMED B" in text.upper()


def test_bonds_and_sequences_of_two_pdb_files_are_kept_with_their_new_names(tmp_path):
    text = posed_file(two_files(tmp_path)).pose(STAY[0], []).decode()
    lines = [line.rstrip() for line in text.splitlines()]
    assert [line for line in lines if line.startswith("SEQRES")] == [
        "SEQRES   1 A    1  GLY",
        "SEQRES   1 B    1  GLY",
    ]
    atoms = [line for line in lines if line.startswith(("ATOM", "HETATM")) and line[21] == "B"]
    serials = {line[12:17].strip(): line[6:11] for line in atoms}
    assert [line for line in lines if line.startswith("CONECT")] == [
        f"CONECT{serials['N']}{serials['CA A']}",
        f"CONECT{serials['CA A']}{serials['N']}",
    ]


@pytest.mark.parametrize("form", ["pdb", "cif"])
def test_a_file_of_two_chains_needs_no_names(tmp_path, form):
    text = "".join(line for line in SMALL.splitlines(keepends=True) if line[21:22] != "C")
    path = tmp_path / f"both.{form}"
    path.write_text(text if form == "pdb" else as_cif(text))
    posed = posed_file(docked(Item("both", (Part(Role.COMPLEX, str(path)),)))).pose(FAR[0], [])
    before = table_of(path.read_bytes(), form)
    check_moved(before, table_of(posed, form), chains_of(before) == "B", FAR)


@pytest.mark.parametrize("names", ["author", "label"])
def test_a_real_mmcif_file_keeps_all_its_categories(structures, tmp_path, names):
    path = str(structures / "varied" / "1pfe.cif.gz")
    parts = (Part(Role.RECEPTOR, path, ("A",)), Part(Role.LIGAND, path, ("B",)))
    found = docked(Item("1pfe", parts), ScanRecipe(reading=FileReading(chain_names=names)))
    data = found.files[path].data
    posed = posed_file(found).pose(FAR[0], [])
    blocks = [gemmi.cif.read_string(text)[0] for text in (data, posed)]
    categories, left = ([*block.get_mmcif_category_names()] for block in blocks)
    assert left == categories
    before = table_of(data, "cif")
    check_moved(before, table_of(posed, "cif"), chains_of(before) == "B", FAR)
    for name in set(categories) - {"_atom_site.", "_atom_site_anisotrop."}:
        assert blocks[0].get_mmcif_category(name) == blocks[1].get_mmcif_category(name)


def test_another_model_is_written_where_the_item_names_it(tmp_path):
    first = SMALL[SMALL.index("ATOM") : SMALL.index("ENDMDL")]
    second = "MODEL        2\n" + first.replace("   2.000   3.000", "   2.500   3.500")
    twice = SMALL.replace("MODEL        2\n", second)
    path = tmp_path / "models.pdb"
    path.write_text(twice)
    parts = (Part(Role.RECEPTOR, str(path), ("A",), model=2), Part(Role.LIGAND, str(path), ("B",), model=2))
    posed = posed_file(docked(Item("m", parts))).pose(STAY[0], [])
    assert set(table_of(posed, "pdb").pos_A3[:-1, 1]) == {2.5}


def test_what_has_no_text_to_rewrite_is_refused(tmp_path):
    found = small(tmp_path)
    with pytest.raises(DataError, match="assembly"):
        posed_file(replace(found, reading=FileReading(assembly="1")))
    other = replace(found.item, parts=tuple(replace(part, path="x.bcif") for part in found.item.parts))
    with pytest.raises(DataError, match="PDB and mmCIF"):
        posed_file(replace(found, item=other, files={"x.bcif": next(iter(found.files.values()))}))


def test_more_chains_than_letters_are_refused(tmp_path):
    line = "ATOM  {:5d}  CA  GLY {}   1    {:8.3f}   2.000   3.000  1.00 10.00           C  \n"
    parts = []
    for role, letters in ((Role.RECEPTOR, LETTERS), (Role.LIGAND, "A")):
        path = tmp_path / f"{role.value}.pdb"
        path.write_text("".join(line.format(at, letter, 4.0 * at) for at, letter in enumerate(letters, 1)))
        parts.append(Part(role, str(path)))
    with pytest.raises(DataError, match="62 chains"):
        posed_file(docked(Item("many", tuple(parts))))


@pytest.mark.parametrize("name", ["1HIA", "1KKL", "1R8S", "2VXT"])
@pytest.mark.parametrize("unbound", [False, True], ids=["bound", "unbound"])
def test_real_pairs_are_written_whole(structures, name, unbound):
    found = docked(pair_item(structures, name, unbound=unbound))
    move = some_moves(found.read, 2)[1:]
    text = posed_file(found).pose(move[0], ["POSE"])
    receptor, ligand = check_whole(found, ("pdb", "pdb"), text, move)
    assert not set(receptor) & set(ligand)


@pytest.mark.parametrize("form", ["pdb", "cif"])
def test_a_trajectory_has_a_model_for_each_pose_of_the_ligand(tmp_path, form):
    found = small(tmp_path, f"small.{form}", SMALL if form == "pdb" else as_cif(SMALL))
    moves, text = some_moves(found.read, 4), posed_file(found)
    path = tmp_path / f"trajectory.{form}"
    path.write_bytes(text.trajectory(moves, ["THE WAY"]))
    structure = gemmi.read_structure(str(path))
    assert len(structure) == 4
    for model, pos_N3 in zip(structure, moved(text.pos_N3, moves), strict=True):
        atoms = [atom.pos.tolist() for chain in model for residue in chain for atom in residue]
        np.testing.assert_allclose(atoms, pos_N3, atol=5.001e-4)


def sampled(found, confidence=(0.1, 0.9, math.nan, 0.5, 0.9, 0.2)):
    """Poses of a complex, numbered from 10, the fourth and the sixth exploded."""
    poses = [
        PoseRow(
            found.item.id,
            found.item.split,
            None,
            10 + place,
            value,
            complex_rmsd=float(place),
            problem=EXPLODED if place in (3, 5) else "",
        )
        for place, value in enumerate(confidence)
    ]
    moves = some_moves(found.read, len(poses))
    moves[[3, 5]] = np.nan
    return poses, moves


def test_poses_are_ranked_by_confidence_and_what_is_of_no_use_is_named(structures, tmp_path):
    found = docked(replace(pair_item(structures, "1Z0K"), split="test"))
    rows = write_docked(tmp_path, found, *sampled(found), top=2)
    assert [(row.rank, row.sample, row.problem) for row in rows] == [
        (1, 11, ""),
        (2, 14, ""),
        (3, 10, ""),
        (None, 12, "no confidence"),
        (None, 13, EXPLODED),
        (None, 15, EXPLODED),
    ]
    assert [row.file for row in rows] == ["1Z0K/rank-01.pdb", "1Z0K/rank-02.pdb", "", "", "", ""]
    assert sorted(path.name for path in (tmp_path / "1Z0K").iterdir()) == ["rank-01.pdb", "rank-02.pdb"]
    assert "RANK 1, SAMPLE 11, CONFIDENCE 0.9000" in (tmp_path / rows[0].file).read_text()
    assert {row.split for row in rows} == {"test"}
    assert [row.complex_rmsd for row in rows] == [1, 4, 0, 2, 3, 5]
    assert all(math.isnan(row.dockq) and row.clashes is None for row in rows[3:])
    unmoved = rows[2]
    assert (unmoved.fnat, unmoved.capri) == (1.0, "high")
    assert [unmoved.irmsd, unmoved.lrmsd] == pytest.approx([0] * 2, abs=1e-6)


def test_a_pose_whose_move_is_no_number_has_exploded():
    rows = pose_rows({"move": [np.zeros(6), np.array([1.0, np.nan, 0, 0, 0, 0])], "complex_rmsd": [2.0, 3.0]}, "move")
    assert [(row.problem, row.complex_rmsd) for row in rows] == [("", 2.0), (EXPLODED, 3.0)]


def test_without_truth_only_what_needs_none_is_measured(structures, tmp_path):
    found = replace(docked(pair_item(structures, "1Z0K")), has_truth=False)
    row = write_docked(tmp_path, found, *sampled(found))[0]
    assert (row.clashes is not None, math.isnan(row.dockq), row.capri) == (True, True, "")


def test_an_unbound_ligand_where_the_bound_one_is_is_near_the_truth(structures, tmp_path):
    found = docked(pair_item(structures, "2VXT", unbound=True))
    truth = docking_truth(found.read)
    receptor, ligand = (
        shared_backbones(pair, np.arange(len(pair.shared_R2))) for pair in (truth.receptor, truth.ligand)
    )
    (frame_33, frame_3), (truth_33, truth_3) = nearest_move(*reversed(receptor)), nearest_move(*ligand)
    move = as_moves((frame_33 @ truth_33)[None], (frame_33 @ truth_3 + frame_3)[None])
    row = write_docked(tmp_path, found, [PoseRow(found.item.id)], move)[0]
    assert (row.rank, row.dockq > 0.6) == (1, True)
