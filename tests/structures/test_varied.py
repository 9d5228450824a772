"""Awkward real files: each reads as documented here, or is rejected for the right reason; a second parser agrees."""

from __future__ import annotations

import gzip
import io
import warnings
from pathlib import Path

import numpy as np
import pytest

from pipeline.records import Item, Part, Reason, Role
from pipeline.structures.atoms import UnusableInput
from pipeline.structures.inventory import ScanRecipe, examine_item
from pipeline.structures.parsing.read_structure import FileReading, parse_structure
from pipeline.structures.parsing.structure_files import File, format_of, read_file
from pipeline.structures.policy import Policy, Structure, apply_policy, check_chain

LIMIT = 64 << 20

# file → chain → (kind, residues, nodes)
EXPECTED = {
    "1A8O.cif.gz": {"A": ("protein", 70, 70)},  # four MSE
    "1LCD.pdb.gz": {"A": ("protein", 51, 51), "B": ("dna", 11, 11), "C": ("dna", 11, 11)},  # NMR, three models
    "1aki.bcif.gz": {"A": ("protein", 129, 129)},
    "1aki.cif.gz": {"A": ("protein", 129, 129)},
    "1aki.pdb.gz": {"A": ("protein", 129, 129)},
    "1lzh.pdb.gz": {"A": ("protein", 129, 129), "B": ("protein", 129, 129)},  # CA trace
    "1pfe.cif.gz": {"A": ("dna", 8, 8), "B": ("protein", 8, 8)},  # mixed residues N2C/NCY
    "3JQH.cif.gz": {"A": ("protein", 23, 23)},  # three mixed residues
    "4p5j.cif.gz": {"A": ("rna", 84, 84)},  # A23 is a modified A
    "5ugo.pdb.gz": {"T": ("dna", 16, 16), "P": ("dna", 11, 11), "D": ("dna", 5, 5), "A": ("protein", 326, 326)},
}


def read(folder: Path, name: str, policy: Policy | None = None, reading: FileReading | None = None) -> Structure:
    path = folder / "varied" / name
    structure = apply_policy(
        parse_structure(read_file(path, LIMIT), format_of(path), reading or FileReading()), policy or Policy()
    )
    for chain in structure.chains:
        check_chain(structure, chain, policy or Policy())
    return structure


def test_chains_and_residues_are_as_documented_and_as_biotite_counts_them(structures: Path) -> None:
    for name, wanted in EXPECTED.items():
        chains = read(structures, name).chains
        found = {chain.name: (chain.kind.value, chain.last - chain.first, chain.nodes) for chain in chains}
        assert found == wanted, name
        atoms, theirs = biotite_polymer_atoms(structures / "varied" / name), {}
        for chain in dict.fromkeys(atoms.chain_id.tolist()):
            here = atoms[atoms.chain_id == chain]
            theirs[chain] = len(dict.fromkeys(zip(here.res_id.tolist(), here.ins_code.tolist(), strict=True)))
        assert {chain.name: chain.last - chain.first for chain in chains} == theirs, name


def test_a_dictionary_entry_of_a_ligand_is_no_structure(structures: Path) -> None:
    with pytest.raises(UnusableInput) as caught:
        read(structures, "HEM.cif.gz")
    assert caught.value.reason is Reason.NO_ATOMS


def test_biotite_sees_the_same_coordinates(structures: Path) -> None:
    for name in ("1A8O.cif.gz", "1aki.bcif.gz", "1aki.pdb.gz", "1LCD.pdb.gz", "5ugo.pdb.gz", "3JQH.cif.gz"):
        atoms = biotite_polymer_atoms(structures / "varied" / name)
        theirs = {tuple(position) for position in np.round(atoms.coord.astype(np.float64), 3).tolist()}
        ours = {tuple(position) for position in np.round(read(structures, name).pos_A3, 3).tolist()}
        assert ours == {tuple(round(value, 3) for value in position) for position in theirs}, name


def test_three_formats_of_one_structure_hold_the_same_atoms(structures: Path) -> None:
    pdb, cif, bcif = (read(structures, f"1aki.{suffix}.gz") for suffix in ("pdb", "cif", "bcif"))
    for other in (cif, bcif):
        np.testing.assert_allclose(pdb.pos_A3, other.pos_A3, atol=1e-3)
        assert (pdb.name_A == other.name_A).all()
        assert [chain.sequence for chain in pdb.chains] == [chain.sequence for chain in other.chains]


def test_modified_residues_have_their_parents_letter(structures: Path) -> None:
    assert read(structures, "1A8O.cif.gz").chains[0].sequence.startswith("MDIRQGPKEPFRDY")
    unknown = read(structures, "1A8O.cif.gz", Policy(modified="unknown")).chains[0].sequence
    assert unknown.startswith("XDIRQGPKEPFRDY")
    with pytest.raises(UnusableInput) as caught:
        read(structures, "1A8O.cif.gz", Policy(modified="reject"))
    assert caught.value.reason is Reason.MODIFIED_RESIDUES


def test_each_model_can_be_chosen_and_a_missing_one_is_named(structures: Path) -> None:
    first, third = (read(structures, "1LCD.pdb.gz", reading=FileReading(model=number)) for number in (1, 3))
    assert len(first.pos_A3) == len(third.pos_A3)
    assert not np.allclose(first.pos_A3, third.pos_A3)
    with pytest.raises(UnusableInput) as caught:
        read(structures, "1LCD.pdb.gz", reading=FileReading(model=4))
    assert caught.value.reason is Reason.MISSING_MODEL


def test_an_assembly_can_be_chosen_and_a_missing_one_is_named(structures: Path) -> None:
    assert [chain.name for chain in read(structures, "1lzh.pdb.gz", reading=FileReading(assembly="2")).chains] == ["B"]
    with pytest.raises(UnusableInput) as caught:
        read(structures, "1lzh.pdb.gz", reading=FileReading(assembly="3"))
    assert caught.value.reason is Reason.MISSING_ASSEMBLY


def test_label_names_are_taken_when_asked(structures: Path) -> None:
    item = Item("x", parts=(Part(Role.WHOLE, "1aki.cif.gz", ("B",)),))
    inventory, _ = examine_item(
        item, {"1aki.cif.gz": file(structures, "1aki.cif.gz")}, ScanRecipe(FileReading(chain_names="label"))
    )
    assert inventory.reason is Reason.CHAIN_WITHOUT_POLYMER  # label B is the water
    with pytest.raises(UnusableInput, match="no label chain names"):
        read(structures, "1aki.pdb.gz", reading=FileReading(chain_names="label"))


def test_seqres_rows_skip_what_was_not_observed(structures: Path) -> None:
    item = Item("x", parts=(Part(Role.WHOLE, "3JQH.cif.gz"),))
    inventory, complex_read = examine_item(
        item, {"3JQH.cif.gz": file(structures, "3JQH.cif.gz")}, ScanRecipe(FileReading(seqres=True))
    )
    sequence, rows = inventory.partners[0].chains[0].sequence, complex_read.maps["rows.whole"]
    observed = read(structures, "3JQH.cif.gz").chains[0].sequence
    assert len(sequence) == 167
    assert "".join(sequence[row] for row in rows) == observed


def file(folder: Path, name: str) -> File:
    return File(read_file(folder / "varied" / name, LIMIT), "00")


def biotite_polymer_atoms(path: Path):  # biotite has no types
    """Return the polymer atoms of the first model as biotite reads them, one conformer, no caps, no ligands."""
    import biotite.structure as struc
    from biotite.structure.io import pdb, pdbx

    plain = path.name.removesuffix(".gz")
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    fields = ["occupancy"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if plain.endswith(".pdb"):
            atoms = pdb.PDBFile.read(io.StringIO(data.decode())).get_structure(
                model=1, altloc="occupancy", extra_fields=fields
            )
        elif plain.endswith(".bcif"):
            atoms = pdbx.get_structure(pdbx.BinaryCIFFile.read(io.BytesIO(data)), model=1, altloc="occupancy")
        else:
            atoms = pdbx.get_structure(pdbx.CIFFile.read(io.StringIO(data.decode())), model=1, altloc="occupancy")
        modified = np.isin(atoms.res_name, ["MSE", "N2C", "NCY", "DSN", "MVA", "A23"])
        return atoms[struc.filter_amino_acids(atoms) | struc.filter_nucleotides(atoms) | modified]
