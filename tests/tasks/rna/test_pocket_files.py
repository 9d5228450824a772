"""Files of pockets: AMBER's against the original's graphs, made ones, damaged ones, and which split each is in."""

from __future__ import annotations

import gzip
import re
import shutil

import numpy as np
import parmed
import pytest

from pipeline.errors import ConfigError, DataError
from pipeline.records import Reason
from pipeline.tasks.rna.pocket_reader import (
    RnaPockets,
    complex_of,
    drawn_splits,
    feature_statistics,
    ligand_of,
    main,
    read_pocket,
)
from tests.reference import document
from tests.tasks.originals import POCKET_FILES as FILES
from tests.tasks.originals import POCKETS, THEIR_KINDS, part
from tests.tasks.rna.made import files

HELIX_PDB = "ATOM      1  P     G A   1      {x:8.3f}   0.000   0.000  1.00  0.00           P\n"


def write(folder, name, topology, coordinates):
    folder.mkdir(exist_ok=True, parents=True)
    (folder / f"{name}_rna.prmtop").write_bytes(topology)
    if coordinates is not None:
        (folder / f"{name}_rna.inpcrd").write_bytes(coordinates)


# ---- against the original ----


@pytest.mark.parametrize("name", POCKETS)
def test_the_graph_of_a_topology_is_the_originals(name):
    theirs = {key: one.numpy() for key, one in part("rna3effi/inputs", f"graph.{name}.").items()}
    arrays = read_pocket((FILES / f"{name}_rna.prmtop").read_bytes(), (FILES / f"{name}_rna.inpcrd").read_bytes())
    assert np.array_equal(arrays["atoms.feature"], theirs["x_raw"])
    assert np.array_equal(arrays["atoms.pos"], theirs["pos"])
    for kind in THEIR_KINDS:
        atom_EP, constant_EK = arrays[f"{kind}.atom"], arrays[f"{kind}.constant"]
        if kind in ("bonds", "near"):  # theirs run both ways
            atom_EP = np.stack([atom_EP, atom_EP[:, ::-1]], 1).reshape(-1, 2)
            constant_EK = np.repeat(constant_EK, 2, 0)
        assert np.array_equal(atom_EP.T, theirs[f"{THEIR_KINDS[kind]}_index"])
        assert np.allclose(constant_EK, theirs[f"{THEIR_KINDS[kind]}_attr"], rtol=1e-6, atol=1e-6)
    assert arrays["atoms.feature"][:, 1].tolist() == [atom[5] for atom in document("rna3effi/atoms")["atoms"][name]]


def test_statistics_of_features_are_the_originals(tmp_path, capsys):
    mean_3, std_3 = feature_statistics(RnaPockets(FILES))
    assert np.allclose(mean_3, part("rna3effi/inputs", "norm.")["mean"].numpy(), rtol=1e-5)
    assert np.allclose(std_3, part("rna3effi/inputs", "norm.")["std"].numpy(), rtol=1e-5)
    assert main(["statistics", str(FILES), str(tmp_path / "n.npz")]) == 0
    with np.load(tmp_path / "n.npz") as file:
        assert np.array_equal(file["mean"], mean_3)
    assert "mean" in capsys.readouterr().out


def test_the_originals_splits_divide_complexes_and_are_refused_unless_that_is_allowed():
    path = str(FILES / "splits.json")
    with pytest.raises(ConfigError, match="models of 9aaa_ARG are in train and in test") as caught:
        list(RnaPockets(FILES, splits=path).entries())
    assert "data.options.divided=allow" in caught.value.remedy
    found = {entry.id: entry.split for entry in RnaPockets(FILES, splits=path, divided="allow").entries()}
    assert found == dict(zip(POCKETS, ("train", "val", "test"), strict=True))


def test_a_structure_has_the_same_atoms_and_bonds_but_no_parameters():
    of_topology = {entry.id: entry.arrays for entry in RnaPockets(FILES).entries()}
    for entry in RnaPockets(FILES, force_field="absent").entries():
        told_arrays = of_topology[entry.id]
        assert np.array_equal(entry.arrays["atoms.feature"][:, 1], told_arrays["atoms.feature"][:, 1])
        assert np.allclose(entry.arrays["atoms.feature"][:, 2], told_arrays["atoms.feature"][:, 2], atol=0.01)
        assert not entry.arrays["atoms.feature"][:, 0].any()
        for kind in ("bonds", "near"):
            pairs, others = (set(map(tuple, arrays[f"{kind}.atom"].tolist())) for arrays in (entry.arrays, told_arrays))
            assert {tuple(sorted(pair)) for pair in pairs} == {tuple(sorted(pair)) for pair in others}
            assert not entry.arrays[f"{kind}.constant"][:, :2].any()


def test_of_an_mmcif_file_the_rna_alone_is_read_whatever_else_it_holds(structures, tmp_path):
    """4P5J has 83 nucleotides, ions and waters."""
    shutil.copy(structures / "varied" / "4p5j.cif.gz", tmp_path / "4p5j_XXX_model0_rna.cif.gz")
    (entry,) = RnaPockets(tmp_path, force_field="absent").entries()
    assert set(entry.arrays["atoms.feature"][:, 1].astype(int)) == {6, 7, 8, 15}
    assert 1700 < len(entry.arrays["atoms.pos"]) < 1850
    lengths = np.linalg.norm(np.subtract(*entry.arrays["atoms.pos"][entry.arrays["bonds.atom"].T]), axis=-1)
    assert 1.1 < lengths.min() < lengths.max() < 1.8


def test_a_damaged_structure_is_rejected_with_its_reason(tmp_path):
    (tmp_path / "a_X.pdb").write_text("REMARK nothing\nEND\n")
    (tmp_path / "c_X.cif").write_text("data_x\nloop_\n_atom_site.id\n")
    found = {one.id: one.detail for one in RnaPockets(tmp_path, force_field="absent").entries()}
    assert found.keys() == {"a_X", "c_X"}
    assert "no atoms" in found["a_X"]
    assert found["c_X"]


# ---- RNA alone ----


def test_what_is_no_rna_is_not_in_the_pocket_nor_any_term_of_it():
    topology, coordinates = files(0, 2)
    whole = read_pocket(topology, coordinates)
    text = topology.decode()
    labels = re.search(r"%FLAG RESIDUE_LABEL\n%FORMAT\(20a4\)\n(.*)\n", text)[1]
    with_ligand = text.replace(labels, labels[:-4] + "LIG ")
    part = read_pocket(with_ligand.encode(), coordinates)
    atoms = len(part["atoms.pos"])
    assert 0 < atoms < len(whole["atoms.pos"])
    assert np.array_equal(part["atoms.pos"], whole["atoms.pos"][:atoms])
    for kind in THEIR_KINDS:
        own = (whole[f"{kind}.atom"] < atoms).all(1)
        assert np.array_equal(part[f"{kind}.atom"], whole[f"{kind}.atom"][own])
        assert np.array_equal(part[f"{kind}.constant"], whole[f"{kind}.constant"][own])
        assert not own.all()
    assert len(read_pocket(with_ligand.encode(), coordinates, ("LIG",))["atoms.pos"]) == len(whole["atoms.pos"])


def test_made_pockets_are_topologies_that_parmed_reads(tmp_path):
    write(tmp_path, "1aaa_ARG_model0", *files(0))
    topology = tmp_path / "1aaa_ARG_model0_rna.prmtop"
    read = parmed.amber.AmberParm(str(topology), xyz=str(topology.with_suffix(".inpcrd")))
    ours = read_pocket(*files(0))
    assert (len(read.coordinates), len(read.bonds)) == (len(ours["atoms.pos"]), len(ours["bonds.atom"]))


def test_near_pairs_are_those_within_four_angstroms_that_no_bond_joins():
    arrays = read_pocket(*files(1, 2))
    pos, near_E2, constants = arrays["atoms.pos"].astype(np.float64), arrays["near.atom"], arrays["near.constant"]
    apart = np.linalg.norm(pos[:, None] - pos[None], axis=-1)
    bonded = {tuple(sorted(pair)) for pair in arrays["bonds.atom"].tolist()}
    wanted = [
        pair for pair in zip(*np.nonzero(np.triu(apart <= 4, 1)), strict=True) if tuple(map(int, pair)) not in bonded
    ]
    assert near_E2.tolist() == [list(map(int, pair)) for pair in wanted]
    assert np.allclose(constants[:, 2], apart[near_E2[:, 0], near_E2[:, 1]])
    assert (constants[:, :2] > 0).all()


# ---- damage ----


def flag(text, name, change):
    """Change the body of one list of a topology."""
    head, body = text.split(f"%FLAG {name}\n")
    own, *others = body.split("%FLAG ")
    form, _, cells = own.partition("\n")
    return "%FLAG ".join([f"{head}%FLAG {name}\n{form}\n{change(cells)}", *others])


def first_cell(value):
    return lambda cells: value + cells[len(value) :]


def same(text):
    return text


def of_list(name, change):
    """Return what changes one list of a topology."""
    return lambda text: flag(text, name, change)


def piled(text):
    """Put two atoms of each line at one place."""
    return re.sub(r"( *-?\d+\.\d{7}){6}(?=\n)", "   1.0000000" * 6, text)


DAMAGES = {  # what becomes of the topology and of the coordinates, and what is said
    "empty": (lambda _: "", same, "not an AMBER topology"),
    "another file": (lambda text: "HEADER RNA\n" + text, same, "not an AMBER topology"),
    "ends early": (lambda text: text[: len(text) // 2], same, "the topology has no %FLAG|holds .* values"),
    "no charges": (lambda text: text.replace("%FLAG CHARGE", "%FLAG Q"), same, "the topology has no %FLAG CHARGE"),
    "no number": (of_list("MASS", first_cell(" 1.200x000E+01 ")), same, "%FLAG MASS: could not convert"),
    "not finite": (of_list("CHARGE", first_cell("             NaN")), same, "value 1 is not finite"),
    "a far atom": (of_list("BONDS_WITHOUT_HYDROGEN", first_cell("  999999")), same, "names atom 333334"),
    "a far parameter": (
        of_list("ANGLES_WITHOUT_HYDROGEN", lambda cells: cells[:24] + "     999" + cells[32:]),
        same,
        "names parameter 999",
    ),
    "a negative coefficient": (of_list("LENNARD_JONES_ACOEF", first_cell(" -1.00000000E+00")), same, "below 0"),
    "no RNA": (of_list("RESIDUE_LABEL", lambda _: "XXX " * 2 + "\n"), same, "no residue is RNA: XXX"),
    "no coordinates": (same, lambda _: None, "missing coordinates"),
    "of others": (same, lambda text: text.replace(text.split("\n")[1], "   12"), "are of 12 atoms"),
    "at one place": (same, piled, "the same position"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_pocket_is_rejected_with_its_reason(tmp_path, damage):
    of_topology, of_coordinates, why = DAMAGES[damage]
    topology, coordinates = (data.decode() for data in files(0))
    beside = of_coordinates(coordinates)
    write(tmp_path, "1aaa_ARG_model0", of_topology(topology).encode(), None if beside is None else beside.encode())
    (rejection,) = RnaPockets(tmp_path).entries()
    assert (rejection.id, rejection.reason) == ("1aaa_ARG_model0", Reason.BAD_ENTRY)
    assert re.search(why, rejection.detail), rejection.detail
    with pytest.raises(DataError, match="no pocket at"):
        RnaPockets(tmp_path).read("1aaa_ARG_model0_rna.prmtop")


def test_a_folder_of_structures_alone_says_what_a_topology_is_for(tmp_path):
    (tmp_path / "1aaa_ARG_model0_rna.pdb").write_text(HELIX_PDB.format(x=0))
    with pytest.raises(ConfigError, match="no AMBER topologies") as caught:
        RnaPockets(tmp_path)
    assert "tleap" in caught.value.remedy
    assert "data.options.force_field=absent" in caught.value.remedy


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"force_field": "amber"}, "force_field"),
        ({"split_by": "ligands"}, "split_by"),
        ({"splits": "splits.json"}, "splits"),
        ({"residues": "PSU"}, "residues"),
        ({"divided": True}, "divided"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(tmp_path, options, name):
    write(tmp_path, "1aaa_ARG_model0", *files(0))
    with pytest.raises(ConfigError) as caught:
        RnaPockets(tmp_path, **options)
    assert caught.value.where == f"data.options.{name}"


def test_packed_files_and_folders_below_are_read_and_an_entry_is_read_again_the_same(tmp_path):
    topology, coordinates = files(0)
    write(tmp_path / "a", "1aaa_ARG_model0", topology, coordinates)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "2bbb_FMN_model1_rna.parm7.gz").write_bytes(gzip.compress(topology))
    (tmp_path / "b" / "2bbb_FMN_model1_rna.rst7.gz").write_bytes(gzip.compress(coordinates))
    reader = RnaPockets(tmp_path)
    entries = list(reader.entries())
    assert [entry.id for entry in entries] == ["1aaa_ARG_model0", "2bbb_FMN_model1"]
    assert len(reader.files()) == 4
    for entry in entries:
        again = reader.read(entry.place)
        assert again.keys() == entry.arrays.keys()
        assert all(np.array_equal(again[name], array) for name, array in entry.arrays.items())


def test_a_packed_file_that_is_cut_short_is_rejected(tmp_path):
    topology, coordinates = files(0)
    (tmp_path / "1aaa_ARG_model0_rna.prmtop.gz").write_bytes(gzip.compress(topology)[:-20])
    (tmp_path / "1aaa_ARG_model0_rna.inpcrd").write_bytes(coordinates)
    (rejection,) = RnaPockets(tmp_path).entries()
    assert "1aaa_ARG_model0_rna.prmtop.gz cannot be unpacked" in rejection.detail


# ---- splits ----


def test_ids_tell_complex_and_ligand():
    assert complex_of("9aac_GTP_model12") == "9aac_GTP"
    assert ligand_of("9aac_GTP_model12") == ligand_of("9aac_GTP") == "GTP"
    assert ligand_of("pocket") == "pocket"


def test_models_of_a_complex_are_in_one_split_whichever_else_there_are():
    ids = [f"{number:04d}_L{number % 7}_model{model}" for number in range(50) for model in range(4)]
    split_of = drawn_splits({name: complex_of(name) for name in ids})
    of_complex = {name: {split_of[one] for one in ids if complex_of(one) == name} for name in map(complex_of, ids)}
    assert all(len(splits) == 1 for splits in of_complex.values())
    counts = [sum(splits == {name} for splits in of_complex.values()) for name in ("train", "val", "test")]
    assert counts == [40, 5, 5]
    assert drawn_splits({name: complex_of(name) for name in reversed(ids)}) == split_of


def test_splits_by_ligand_divide_no_ligand_and_of_one_or_two_groups_nothing_is_held_out(tmp_path):
    for number in range(12):
        write(tmp_path, f"{number:04d}_L{number % 4}_model0", *files(0))
    found = {entry.id: entry.split for entry in RnaPockets(tmp_path, split_by="ligand").entries()}
    assert set(found.values()) == {"train", "val", "test"}
    assert len({(ligand_of(name), split) for name, split in found.items()}) == 4
    assert set(drawn_splits({"a": "a", "b": "b"}).values()) == {"train"}


@pytest.mark.parametrize("content", ["", "[1]", '{"train": 3}'])
def test_splits_that_are_no_lists_are_refused_with_what_to_write(tmp_path, content):
    write(tmp_path / "p", "1aaa_ARG_model0", *files(0))
    (tmp_path / "s.json").write_text(content)
    with pytest.raises(DataError, match="not a JSON object of id lists"):
        list(RnaPockets(tmp_path / "p", splits=str(tmp_path / "s.json")).entries())


def test_a_lennard_jones_pair_of_hydrogen_bonds_has_no_coefficients():
    topology, coordinates = files(0)
    changed = flag(topology.decode(), "NONBONDED_PARM_INDEX", lambda cells: cells.replace("       1", "      -1", 1))
    arrays = read_pocket(changed.encode(), coordinates)
    carbon_E = (arrays["atoms.feature"][:, 1][arrays["near.atom"]] == 6).all(1)
    assert carbon_E.any()
    assert not arrays["near.constant"][carbon_E, :2].any()
