"""Synthetic spectra, sequences and pictures, as many as wanted, for trials, tests and benchmarks, never for science.

    python -m pipeline.readers.made spectra FILE.mgf --count 100000 --seed 0
    python -m pipeline.readers.made molecules FILE.mgf --count 3000 --seed 0      three spectra of each
    python -m pipeline.readers.made sequences FILE.csv --count 1000 --seed 0      or FILE.tsv
    python -m pipeline.readers.made captions FILE.csv --count 1000 --seed 0       or FILE.tsv

An item depends only on the seed and its number: larger files begin with the items of smaller ones. Next to a table of
captions are `images/`, `classes.txt` (the left figures, as in column `class`) and `merges.txt`, which makes each word
one token. Suffixes: L residues, P peaks, H × W pixels, C colours.
"""

from __future__ import annotations

import argparse
import csv
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pipeline.errors import ConfigError, PipelineError
from pipeline.readers import peptides
from pipeline.readers.captions import image_library

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

SPLITS = ("train",) * 8 + ("val", "test")
SEEN = 0.8  # the chance of a fragment to be seen
OFF = 3e-6  # by how much of itself m/z is off
# How much each of the letters of `peptides.LETTERS` likes to be out of water (Kyte and Doolittle).
HYDROPATHY = np.array(
    (-0.4, 1.8, -0.8, -1.6, 4.2, -0.7, 2.5, 3.8, 4.5, -3.5, -3.5, -3.5, -3.9, -3.5, 1.9, -3.2, 2.8, -4.5, -1.3, -0.9)
)


SUBSTRUCTURES = 12  # of which molecules are made, and as many isomers of them
PARTS, OF_MOLECULE = 3, 3  # substructures of a molecule, and its spectra


class MadeSequence(NamedTuple):
    """A protein-like sequence; its mean hydropathy, and which residues are aromatic."""

    id: str
    split: str
    sequence: str
    target: float
    sites: str


def spectra(
    path: Path,
    count: int,
    seed: int = 0,
    peptide_length: tuple[int, int] = (7, 30),
    peaks: int = 150,
    letters: int = 20,
) -> None:
    """Write spectra of random peptides from the first `letters` residues, each with at most `peaks` peaks."""
    fragments = 4 * (peptide_length[1] - 1)
    assert peaks >= fragments, f"{peaks} peaks do not hold {fragments} fragments"
    _mgf(path, (_of_peptide(seed, number, peptide_length, peaks, letters) for number in range(count)))


def molecules(path: Path, count: int, seed: int = 0) -> None:
    """Write spectra of small molecules, three of each, with InChI keys (of no real molecule) and a property."""
    _mgf(path, (_of_molecule(seed, number) for number in range(count)))


def sequences(path: Path, count: int, seed: int = 0) -> None:
    """Write sequences with a number of each and a label of each residue."""
    _table(path, MadeSequence._fields, (sequence(seed, number) for number in range(count)))


def captions(path: Path, count: int, seed: int = 0) -> None:
    """Write pictures with captions, their classes and the merges of their words into the folder of the table."""
    folder = path.parent / "images"
    folder.mkdir(parents=True, exist_ok=True)
    (path.parent / "classes.txt").write_text("\n".join([*CLASSES, ""]), encoding="utf-8")
    (path.parent / "merges.txt").write_text("\n".join(["#version: made", *merges(WORDS), ""]), encoding="utf-8")
    _table(path, COLUMNS, (_picture(seed, number, folder) for number in range(count)))


def _of_peptide(seed: int, number: int, peptide_length: tuple[int, int], most_peaks: int, letters: int) -> str:
    """Return one spectrum of a tryptic peptide; its target is the mean hydropathy of the residues."""
    rng = np.random.default_rng((seed, number))
    residue_L = rng.integers(0, letters, rng.integers(*peptide_length, endpoint=True))
    residue_L[-1] = peptides.LETTERS.index(rng.choice(["K", "R"]))
    charge = int(rng.choice([2, 3], p=[0.7, 0.3]))
    mass = peptides.mass(residue_L)
    heights = ((peptides.b_ions, 400.0), (peptides.y_ions, 1000.0))
    kinds = [(ions(residue_L, z), high / z) for z in range(1, charge) for ions, high in heights]
    mz_P = np.concatenate([mz for mz, _ in kinds])
    high_P = np.concatenate([np.full(len(mz), high) for mz, high in kinds]) * rng.lognormal(0, 0.7, len(mz_P))
    is_seen_P = rng.random(len(mz_P)) < SEEN
    mz_P = mz_P[is_seen_P] * rng.normal(1, OFF, is_seen_P.sum())
    noise = int(rng.integers(0, most_peaks - len(mz_P), endpoint=True))
    mz_P = np.concatenate([mz_P, rng.uniform(80, mass, noise)])
    high_P = np.concatenate([high_P[is_seen_P], 30 * rng.lognormal(0, 0.8, noise)])
    headers = {
        "PEPMASS": f"{mass / charge + peptides.PROTON:.5f}",
        "CHARGE": f"{charge}+",
        "SEQ": peptides.peptide_text(residue_L),
        "SPLIT": _split(number),
        "TARGET": f"{HYDROPATHY[residue_L].mean():.4f}",
    }
    return _block(number, headers, mz_P, high_P)


@cache
def substructures() -> tuple[tuple[float, NDArray[np.float64], float], ...]:
    """Return the parts of molecules, each next to an isomer: their mass, two fragments, and share of the property."""
    rng = np.random.default_rng(0)
    twice = np.repeat(rng.uniform(60, 280, SUBSTRUCTURES), 2)
    return tuple((mass, mass * rng.uniform(0.3, 1, 2), float(rng.normal())) for mass in twice)


def _of_molecule(seed: int, number: int) -> str:
    """Return one spectrum of a molecule; its target is the sum of what its parts add."""
    of_molecule = np.random.default_rng((seed, number // OF_MOLECULE, 1))
    places = sorted(2 * of_molecule.choice(SUBSTRUCTURES, PARTS, replace=False) + of_molecule.integers(0, 2, PARTS))
    masses, fragments, values = zip(*(substructures()[place] for place in places), strict=True)
    rng = np.random.default_rng((seed, number, 2))
    fragment_P = np.concatenate(fragments)
    fragment_P = fragment_P[rng.random(len(fragment_P)) < SEEN]
    noise = int(rng.integers(3, 12))
    mz_P = np.concatenate([fragment_P * rng.normal(1, OFF, len(fragment_P)), rng.uniform(50, 300, noise)])
    high_P = np.concatenate([1000 * rng.lognormal(0, 0.5, len(fragment_P)), 30 * rng.lognormal(0, 0.8, noise)])
    headers = {
        "PEPMASS": f"{sum(masses) + peptides.PROTON:.5f}",
        "CHARGE": "1+",
        "INCHIKEY": f"{''.join(chr(65 + place) for place in places):A<14}-UHFFFAOYSA-N",
        "SPLIT": _split(number // OF_MOLECULE),
        "TARGET": f"{sum(values):.4f}",
        "RTINSECONDS": f"{600 + 100 * sum(values) + rng.normal():.2f}",
    }
    return _block(number, headers, mz_P, high_P)


def sequence(seed: int, number: int) -> MadeSequence:
    """Return one sequence of 30 to 60 residues, whose composition is its own."""
    rng = np.random.default_rng((seed, number, 3))
    residue_L = rng.choice(20, rng.integers(30, 61), p=rng.dirichlet(np.full(20, 0.7)))
    text = peptides.peptide_text(residue_L)
    sites = "".join("1" if letter in "FHWY" else "0" for letter in text)
    return MadeSequence(_id(number), _split(number), text, round(float(HYDROPATHY[residue_L].mean()), 4), sites)


def _id(number: int) -> str:
    return f"made-{number:07d}"


def _split(number: int) -> str:
    return SPLITS[number % len(SPLITS)]


def _block(number: int, headers: Mapping[str, str], mz_P: NDArray[np.float64], high_P: NDArray[np.float64]) -> str:
    """Return a spectrum of MGF, its peaks in order of m/z."""
    order = np.argsort(mz_P, kind="stable")
    peak_P2 = np.stack([np.round(mz_P[order], 4), np.ceil(high_P[order])], axis=1)
    lines = "".join(f"{key}={value}\n" for key, value in {"TITLE": _id(number), **headers}.items())
    peaks = "%.4f %d\n" * len(peak_P2) % tuple(peak_P2.ravel().tolist())
    return f"BEGIN IONS\n{lines}{peaks}END IONS\n\n"


def _check_suffix(path: Path, *suffixes: str) -> None:
    if path.suffix.lower() not in suffixes:
        remedy = f"name it {path.with_suffix(suffixes[0])}"
        raise ConfigError(f"a synthetic file ends with {', '.join(suffixes)}", where=str(path), remedy=remedy)
    path.parent.mkdir(parents=True, exist_ok=True)


def _mgf(path: Path, blocks: Iterable[str]) -> None:
    _check_suffix(path, ".mgf")
    with path.open("w", encoding="ascii", newline="\n") as file:
        file.writelines(blocks)


def _table(path: Path, columns: Sequence[str], rows: Iterable[Iterable[Any]]) -> None:
    _check_suffix(path, ".csv", ".tsv")
    with path.open("w", encoding="ascii", newline="") as file:
        writer = csv.writer(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)


# Pictures with captions

COLOURS = {
    "red": (220, 40, 40), "green": (40, 180, 60), "blue": (40, 70, 220), "yellow": (235, 220, 50),
    "purple": (150, 50, 190), "white": (245, 245, 245), "black": (15, 15, 15), "orange": (240, 140, 30),
}  # fmt: skip
FIGURES = ("disc", "square", "ring", "cross")
CLASSES = tuple(f"{colour} {figure}" for colour in COLOURS for figure in FIGURES)
SIDE = 48  # pixels
WORDS = (*COLOURS, *FIGURES, "left", "of")
COLUMNS = ("id", "split", "filepath", "title", "class")


def _picture(seed: int, number: int, folder: Path) -> tuple[str, ...]:
    """Write a picture of two figures, each somewhere in its half; return its row, with a caption of both."""
    rng = np.random.default_rng((seed, number))
    left, right = (CLASSES[kind] for kind in rng.integers(len(CLASSES), size=2))
    pixel_HWC = rng.integers(100, 140, (SIDE, SIDE, 3)).astype(np.uint8)
    for half, name in enumerate((left, right)):
        colour, figure = name.split()
        centre = rng.uniform((0.35, 0.2 + 0.5 * half), (0.65, 0.3 + 0.5 * half)) * SIDE
        pixel_HWC[_is_in(figure, centre, float(rng.uniform(0.14, 0.2)) * SIDE)] = COLOURS[colour]
    name = f"{_id(number)}.png"
    image_library().fromarray(pixel_HWC).save(folder / name)
    return _id(number), _split(number), f"images/{name}", f"a {left} left of a {right}", left


def _is_in(figure: str, centre: NDArray[np.float64], reach: float) -> NDArray[np.bool_]:
    """Return which pixels a figure covers."""
    down_HW, right_HW = np.mgrid[:SIDE, :SIDE] - centre[:, None, None]
    far_HW, wide_HW = np.hypot(down_HW, right_HW), np.maximum(abs(down_HW), abs(right_HW))
    narrow_HW = np.minimum(abs(down_HW), abs(right_HW))
    covered: dict[str, NDArray[np.bool_]] = {
        "disc": far_HW < reach,
        "square": wide_HW < 0.9 * reach,
        "ring": (far_HW < reach) & (far_HW > 0.55 * reach),
        "cross": (wide_HW < reach) & (narrow_HW < 0.3 * reach),
    }
    return covered[figure]


def merges(words: Iterable[str]) -> list[str]:
    """Return the lines of a file of merges by which each of these words is one token."""
    rank: dict[tuple[str, str], int] = {}
    for word in words:
        parts = [*word[:-1], f"{word[-1]}</w>"]
        while len(parts) > 1:
            known = [place for place in range(len(parts) - 1) if (parts[place], parts[place + 1]) in rank]
            place = min(known, key=lambda place: rank[parts[place], parts[place + 1]]) if known else 0
            rank.setdefault((parts[place], parts[place + 1]), len(rank))
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return [f"{left} {right}" for left, right in rank]


WRITERS = {make.__name__: make for make in (spectra, molecules, sequences, captions)}


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser("python -m pipeline.readers.made", description="Write synthetic data.")
    parser.add_argument("what", choices=tuple(WRITERS))
    parser.add_argument("path", type=Path, help="the file to write: .mgf for spectra and molecules, else .csv or .tsv")
    parser.add_argument("--count", type=int, default=1000, help="how many items (1000)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (0)")
    arguments = parser.parse_args()
    try:
        WRITERS[arguments.what](arguments.path, arguments.count, arguments.seed)
    except PipelineError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(f"{arguments.path}: {arguments.count:,} {arguments.what}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
