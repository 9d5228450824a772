"""Made complexes have the geometry of real ones, as another program reads them."""

from __future__ import annotations

import csv
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


@pytest.fixture(scope="module")
def complexes() -> list[list[gemmi.Chain]]:
    return [read(complex_pdb(seed, 150, 120)) for seed in SEEDS]


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
