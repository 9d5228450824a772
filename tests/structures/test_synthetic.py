"""Made complexes have the geometry of real ones, as another program reads them."""

from __future__ import annotations

import csv
import gzip
import math
from collections import defaultdict
from typing import TYPE_CHECKING

import gemmi
import numpy as np
import pytest
from scipy.spatial.distance import cdist

from pipeline.structures.synthetic import AMINO_ACIDS, complex_pdb, draw_sequence, fold_chain, write_demo

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

SEEDS = range(6)


def read(data: bytes) -> list[gemmi.Chain]:
    structure = gemmi.read_pdb_string(data, max_line_length=80)
    assert len(structure) == 1
    return list(structure[0])


def positions(chain: gemmi.Chain, name: str | None = None) -> NDArray[np.float64]:
    atoms = (atom for residue in chain for atom in residue if name in (None, atom.name))
    return np.array([atom.pos.tolist() for atom in atoms])


def neighbours(chain: gemmi.Chain, n: int) -> list[tuple[gemmi.Residue, ...]]:
    residues = list(chain)
    return list(zip(*(residues[start : len(residues) - n + 1 + start] for start in range(n)), strict=True))


@pytest.fixture(scope="module")
def complexes() -> list[list[gemmi.Chain]]:
    return [read(complex_pdb(seed, 150, 120)) for seed in SEEDS]


@pytest.fixture(scope="module")
def chains(complexes: list[list[gemmi.Chain]]) -> list[gemmi.Chain]:
    return [chain for partners in complexes for chain in partners]


def test_chains_have_the_names_and_lengths_asked_for() -> None:
    partners = read(complex_pdb(1, 30, 41, chains=("H", "x")))
    assert [(chain.name, len(chain)) for chain in partners] == [("H", 30), ("x", 41)]


def test_neighbouring_ca_atoms_are_a_trans_peptide_apart(chains: list[gemmi.Chain]) -> None:
    for chain in chains:
        step = np.linalg.norm(np.diff(positions(chain, "CA"), axis=0), axis=1)
        assert np.abs(step - 3.8).max() < 0.05


def test_bonds_and_angles_are_ideal(chains: list[gemmi.Chain]) -> None:
    for residue, following in neighbours(chains[0], 2):
        n, ca, c, o = (residue[name][0].pos for name in ("N", "CA", "C", "O"))
        after = following["N"][0].pos
        assert n.dist(ca) == pytest.approx(1.458, abs=0.003)
        assert ca.dist(c) == pytest.approx(1.525, abs=0.003)
        assert c.dist(o) == pytest.approx(1.231, abs=0.003)
        assert c.dist(after) == pytest.approx(1.329, abs=0.003)
        assert math.degrees(gemmi.calculate_angle(n, ca, c)) == pytest.approx(111.0, abs=0.3)
        assert math.degrees(gemmi.calculate_angle(o, c, after)) == pytest.approx(123.3, abs=0.4)  # the rest of 360
        if residue.name != "GLY":
            assert ca.dist(residue["CB"][0].pos) == pytest.approx(1.53, abs=0.02)


def test_peptides_are_trans_and_residues_left_handed(chains: list[gemmi.Chain]) -> None:
    for residue, following in neighbours(chains[1], 2):
        assert abs(math.degrees(gemmi.calculate_omega(residue, following))) > 179
        if residue.name != "GLY":
            volume = residue["CA"][0].pos
            n, c, cb = (np.array((residue[name][0].pos - volume).tolist()) for name in ("N", "C", "CB"))
            assert np.dot(n, np.cross(c, cb)) > 2  # L amino acids, in Å^3


def test_helices_and_strands_are_where_ramachandran_allows_them(chains: list[gemmi.Chain]) -> None:
    degrees = np.degrees([gemmi.calculate_phi_psi(*trio) for chain in chains for trio in neighbours(chain, 3)])
    helix = (np.abs(degrees - (-57, -47)) < 15).all(axis=1).mean()
    strand = (np.abs(degrees - (-119, 113)) < 15).all(axis=1).mean()
    assert 0.2 < helix < 0.8
    assert 0.1 < strand < 0.6
    assert helix + strand > 0.5


def test_every_residue_has_its_backbone_and_only_glycine_lacks_cb(chains: list[gemmi.Chain]) -> None:
    for chain in chains:
        for residue in chain:
            names = [atom.name for atom in residue]
            assert names == ["N", "CA", "C", "O", "CB"][: 4 if residue.name == "GLY" else 5]
            assert [atom.element.name for atom in residue] == [name[0] for name in names]


def test_chains_are_globules_that_avoid_themselves(chains: list[gemmi.Chain]) -> None:
    for chain in chains:
        ca = positions(chain, "CA")
        first, second = np.triu_indices(len(ca), 3)
        assert cdist(ca, ca)[first, second].min() > 3.9
        gyration = np.sqrt(((ca - ca.mean(axis=0)) ** 2).sum(axis=1).mean())
        assert gyration < 2 * 2.2 * len(ca) ** 0.38  # twice that of natural globules; a stretched chain has ten times


def test_partners_touch_without_clashing(complexes: list[list[gemmi.Chain]]) -> None:
    for receptor, ligand in complexes:
        distance = cdist(positions(receptor), positions(ligand))
        assert distance.min() > 2.5
        assert (distance < 5).sum() >= 5
        assert (cdist(positions(receptor, "CA"), positions(ligand, "CA")) < 10).sum() >= 10


@pytest.mark.parametrize("lengths", [(1, 1), (2, 5), (300, 3)])
def test_partners_of_any_size_dock(lengths: tuple[int, int]) -> None:
    for seed in SEEDS:
        receptor, ligand = read(complex_pdb(seed, *lengths))
        assert cdist(positions(receptor), positions(ligand)).min() > 2.5


def test_same_seed_makes_the_same_bytes() -> None:
    assert complex_pdb(7, 60, 50) == complex_pdb(7, 60, 50)
    assert complex_pdb(7, 60, 50) != complex_pdb(8, 60, 50)


def test_given_antigen_returns_as_the_same_molecule() -> None:
    antigen = draw_sequence(np.random.default_rng(3), 80)
    first, second = (read(complex_pdb(seed, 60, ligand=antigen))[1] for seed in (1, 2))
    assert gemmi.one_letter_code([residue.name for residue in first]) == antigen
    a, b = (cdist(ca, ca) for ca in (positions(first, "CA"), positions(second, "CA")))
    assert np.abs(a - b).max() < 0.005  # three decimals in the file


def test_columns_are_those_of_the_pdb_format() -> None:
    data = complex_pdb(1, 40, 30)
    lines = data.decode("ascii").splitlines()
    atoms = [line for line in lines if line.startswith("ATOM")]
    assert {len(line) for line in atoms} == {78}
    assert all(line[30:54] == "".join(f"{float(line[a : a + 8]):8.3f}" for a in (30, 38, 46)) for line in atoms)
    assert [line[:3] for line in lines if line.startswith("TER")] == ["TER", "TER"]
    serials = [int(line[6:11]) for line in lines if line.startswith(("ATOM", "TER"))]
    assert serials == list(range(1, len(serials) + 1))
    assert lines[-1] == "END"


def test_seqres_is_the_sequence_of_the_atoms() -> None:
    structure = gemmi.read_pdb_string(complex_pdb(2, 33, 26))
    structure.setup_entities()
    for chain in structure[0]:
        assert list(structure.get_entity_of(chain.get_polymer()).full_sequence) == [residue.name for residue in chain]


def test_composition_is_natural() -> None:
    sequence = draw_sequence(np.random.default_rng(0), 50_000)
    for letter, _, percent in AMINO_ACIDS:
        assert 100 * sequence.count(letter) / len(sequence) == pytest.approx(percent, abs=0.5)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 7, 700])
def test_any_length_folds(length: int) -> None:
    pos = fold_chain(draw_sequence(np.random.default_rng(length), length)).pos_R53
    assert pos.shape == (length, 5, 3)
    assert np.isfinite(pos).all()


@pytest.mark.parametrize("sequence", ["", "ACDX", "acd"])
def test_only_the_twenty_letters_fold(sequence: str) -> None:
    with pytest.raises(ValueError, match="20 amino acids"):
        fold_chain(sequence)


def manifest(folder: Path) -> list[dict[str, str]]:
    with (folder / "manifest.csv").open() as file:
        return list(csv.DictReader(file))


def test_demo_is_reproducible_and_lists_what_is_there(tmp_path: Path) -> None:
    made = [write_demo(tmp_path / name, n=5, seed=1) for name in ("a", "b")]
    for first, second in zip(*([demo.manifest, *demo.structures, demo.broken] for demo in made), strict=True):
        assert first.read_bytes() == second.read_bytes()
    rows = manifest(tmp_path / "a")
    assert [tmp_path / "a" / row["path"] for row in rows] == [*made[0].structures, made[0].broken]
    assert len({row["id"] for row in rows}) == 6


def test_demo_splits_share_no_sequence_and_no_cluster(tmp_path: Path) -> None:
    demo = write_demo(tmp_path, n=12)
    splits = defaultdict(set)
    uses: dict[str, int] = defaultdict(int)
    for row in manifest(tmp_path)[:-1]:
        splits[row["cluster"]].add(row["split"])
        for chain, column in zip(
            read((tmp_path / row["path"]).read_bytes()), ("receptor_chains", "ligand_chains"), strict=True
        ):
            assert chain.name == row[column]
            assert 60 <= len(chain) <= 140
            sequence = gemmi.one_letter_code([residue.name for residue in chain])
            splits[sequence].add(row["split"])
            uses[sequence] += 1
    assert all(len(found) == 1 for found in splits.values())
    assert {split for found in splits.values() for split in found} == {"train", "val", "test"}
    assert sorted(uses.values())[-3:] == [4, 4, 4]  # the antigens
    assert len(demo.structures) == 12


def test_demo_holds_one_file_that_cannot_be_read(tmp_path: Path) -> None:
    demo = write_demo(tmp_path, n=1)
    with pytest.raises(EOFError):
        gzip.decompress(demo.broken.read_bytes())
