"""Made complexes by the hundred thousand: files in folders of a thousand, a manifest, tiny weights, a configuration."""

from __future__ import annotations

import csv
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path

import numpy as np

from pipeline.structures.synthetic import Fold, dock, draw_sequence, fold_chain, to_pdb

PIPELINE = Path(sys.executable).with_name("pipeline")
SHAPES = 128  # pairs of partners in space; every complex has one of them, and sequences of its own
RESIDUES, SMALL = (30, 60), (10, 16)  # of a partner, from and to
PER_FOLDER = 1000
VALIDATED = 32  # complexes in split `val`, whatever the size of the data set
LAYERS, DIM, HEADS = 2, 32, 4
CONFIG = """\
data: {source: manifest, path: data/manifest.csv}
embed: {weights: weights/esm2_tiny.pt}
train:
  task: "pipeline.tasks.interface:Interface"
  options: {embedding_dim: 32, width: 16, layers: 2, pair_width: 8}
  models: models
  epochs: 1
  effective_batch: 64
cache: {root: cache}
"""
HERE = "cluster: {executor: local, runs: runs}"
ON_SLURM = "cluster: {executor: slurm, runs: runs, scan: {parallel: 3}, graph: {parallel: 3}, train: {time: 6h}}"


@cache
def shape(number: int, residues: tuple[int, int]) -> tuple[Fold, Fold]:
    """Return two partners that touch; folding and docking is what making a complex mostly costs."""
    rng = np.random.default_rng(number)
    lengths = rng.integers(*residues, 2, endpoint=True).tolist()
    return dock(rng, *(fold_chain(draw_sequence(rng, length)) for length in lengths))


def complex_of(number: int, residues: tuple[int, int] = RESIDUES) -> bytes:
    """Return a complex as PDB; no two numbers share a sequence."""
    rng = np.random.default_rng(1_000_000 + number)
    partners = (Fold(like(one.sequence, rng), one.pos_R53) for one in shape(number % SHAPES, residues))
    return to_pdb(dict(zip("AB", partners, strict=True)))


def like(sequence: str, rng: np.random.Generator) -> str:
    """Return another sequence with the same atoms of backbone and CB: those by which the partners touch."""
    drawn = draw_sequence(rng, len(sequence)).replace("G", "A")
    return "".join("G" if old == "G" else new for old, new in zip(sequence, drawn, strict=True))


def name_of(number: int) -> str:
    """Return the path of a complex below the folder of data."""
    return f"structures/{number // PER_FOLDER:04d}/c{number:07d}.pdb"


def write_complex(folder: Path, residues: tuple[int, int], number: int) -> None:
    """Write one complex."""
    (folder / name_of(number)).write_bytes(complex_of(number, residues))


def write_manifest(path: Path, complexes: int) -> None:
    """Write the rows of a data set; the first few are for validation."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("id", "path", "receptor_chains", "ligand_chains", "split"))
        for number in range(complexes):
            split = "val" if number < min(VALIDATED, complexes // 4) else "train"
            writer.writerow((f"c{number:07d}", name_of(number), "A", "B", split))


def make_project(folder: Path, complexes: int, residues: tuple[int, int] = RESIDUES, cluster: str = HERE) -> None:
    """Write a project of so many complexes."""
    data = folder / "data"
    for number in range(0, complexes, PER_FOLDER):
        (data / name_of(number)).parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(2) as pool:
        list(pool.map(partial(write_complex, data, residues), range(complexes), chunksize=200))
    write_manifest(data / "manifest.csv", complexes)
    (folder / "pipeline.yaml").write_text(f"{CONFIG}{cluster}\n")
    words = ["weights", "synth", "--layers", LAYERS, "--dim", DIM, "--heads", HEADS, "--out", "weights/esm2_tiny.pt"]
    subprocess.run([PIPELINE, *map(str, words)], cwd=folder, check=True, capture_output=True)
