"""Made complexes have the geometry of real ones, as another program reads them."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from typing import TYPE_CHECKING

import gemmi
import numpy as np
import pytest
from scipy.spatial.distance import cdist

from pipeline.structures.synthetic import complex_pdb, write_demo

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


def test_every_residue_has_its_backbone_and_only_glycine_lacks_cb(chains: list[gemmi.Chain]) -> None:
    for chain in chains:
        for residue in chain:
            names = [atom.name for atom in residue]
            assert names == ["N", "CA", "C", "O", "CB"][: 4 if residue.name == "GLY" else 5]
            assert [atom.element.name for atom in residue] == [name[0] for name in names]


def test_partners_touch_without_clashing(complexes: list[list[gemmi.Chain]]) -> None:
    for receptor, ligand in complexes:
        distance = cdist(positions(receptor), positions(ligand))
        assert distance.min() > 2.5
        assert (distance < 5).sum() >= 5
        assert (cdist(positions(receptor, "CA"), positions(ligand, "CA")) < 10).sum() >= 10


def test_partners_of_any_size_dock() -> None:
    for lengths in ((1, 1), (2, 5), (300, 3)):
        receptor, ligand = read(complex_pdb(1, *lengths))
        assert (len(receptor), len(ligand)) == lengths
        assert cdist(positions(receptor), positions(ligand)).min() > 2.5


def manifest(folder: Path) -> list[dict[str, str]]:
    with (folder / "manifest.csv").open() as file:
        return list(csv.DictReader(file))


def test_demo_is_reproducible_and_lists_what_is_there(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_demo(tmp_path / name, n=5, seed=1)
    rows = manifest(tmp_path / "a")
    for name in ("manifest.csv", *(row["path"] for row in rows)):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert len({row["id"] for row in rows}) == 6


def test_demo_splits_share_no_sequence_and_no_cluster(tmp_path: Path) -> None:
    write_demo(tmp_path, n=12)
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
    assert len(manifest(tmp_path)) == 13
