"""Made-up spectra and pairs, as many as wanted, for trials, tests and benchmarks, never for science.

    python -m pipeline.readers.made spectra FILE.mgf --count 100000 --seed 0      or FILE.h5
    python -m pipeline.readers.made molecules FILE.mgf --count 3000 --seed 0      three spectra of each
    python -m pipeline.readers.made pairs FILE.tsv --count 100000 --seed 0        or FILE.csv, FILE.h5
    python -m pipeline.readers.made sequences FILE.csv --count 1000 --seed 0      or FILE.tsv
    python -m pipeline.readers.made captions FILE.csv --count 1000 --seed 0       or FILE.tsv, with images beside it

An item depends only on the seed and its number: larger files begin with the items of smaller ones, and all formats have
the same items. Suffixes: L residues, P peaks, B items of a piece.
"""

from __future__ import annotations

import argparse
import csv
import sys
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pipeline.errors import ConfigError, PipelineError
from pipeline.readers import hdf5, images, peptides

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

SPLITS = ("train",) * 8 + ("val", "test")
PIECE = 1000  # items written at a time
SEEN = 0.8  # the chance of a fragment to be seen
OFF = 3e-6  # by how much of itself m/z is off
# How much each of the letters of `peptides.LETTERS` likes to be out of water (Kyte and Doolittle).
HYDROPATHY = np.array(
    (-0.4, 1.8, -0.8, -1.6, 4.2, -0.7, 2.5, 3.8, 4.5, -3.5, -3.5, -3.5, -3.9, -3.5, 1.9, -3.2, 2.8, -4.5, -1.3, -0.9)
)
NAMES = (
    "glycine", "alanine", "serine", "proline", "valine", "threonine", "cysteine", "leucine", "isoleucine",
    "asparagine", "aspartate", "glutamine", "lysine", "glutamate", "methionine", "histidine", "phenylalanine",
    "arginine", "tyrosine", "tryptophan",
)  # fmt: skip


class MadeSpectrum(NamedTuple):
    """A made spectrum, before it is written; `target` is the mean hydropathy of the peptide."""

    id: str
    split: str
    peptide: str
    precursor_mz: float
    charge: int
    target: float
    peak_P2: NDArray[np.float64]


SUBSTRUCTURES = 12  # of which molecules are made, and as many isomers of them
PARTS, OF_MOLECULE = 3, 3  # substructures of a molecule, and its spectra


class MadeSubstructure(NamedTuple):
    """A part of made molecules: its mass, its two fragments, and what it adds to a property."""

    mass: float
    fragment_2: NDArray[np.float64]
    value: float


class MadePair(NamedTuple):
    """A sequence (left) and a sentence about it (right)."""

    id: str
    split: str
    left: str
    right: str


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
    """Write spectra of random peptides of the first so many letters, each with at most so many peaks and noise."""
    fragments = 4 * (peptide_length[1] - 1)
    if not 2 <= peptide_length[0] <= peptide_length[1] or peaks < fragments:
        raise ConfigError(
            f"{peaks} peaks do not hold the {fragments} fragments of peptides of {peptide_length} residues",
            where="made.spectra",
            remedy=f"peptide_length=(2, 2) or longer, shortest first, with peaks={max(fragments, 4)} or more",
        )
    items = (spectrum(seed, number, peptide_length, peaks, letters) for number in range(count))
    write_hdf5 = partial(_hdf5_spectra, count=count, longest=peptide_length[1], peaks=peaks)
    _write(path, items, {".mgf": _mgf, **dict.fromkeys(hdf5.SUFFIXES, write_hdf5)})


def molecules(path: Path, count: int, seed: int = 0) -> None:
    """Write spectra of small molecules, three of each, with InChI keys (of no real molecule) and a property."""
    _write(path, (molecule(seed, number) for number in range(count)), {".mgf": _mgf_molecules})


def pairs(path: Path, count: int, seed: int = 0) -> None:
    """Write protein-like sequences, each with a sentence about its composition."""
    items = (pair(seed, number) for number in range(count))
    _write(path, items, {".tsv": _table, ".csv": _table, **dict.fromkeys(hdf5.SUFFIXES, _hdf5_pairs)})


def sequences(path: Path, count: int, seed: int = 0, longest: int = 60) -> None:
    """Write sequences with a number of each and a label of each residue."""
    items = (sequence(seed, number, longest) for number in range(count))
    _write(path, items, {".csv": partial(_table, kind=MadeSequence), ".tsv": partial(_table, kind=MadeSequence)})


def captions(path: Path, count: int, seed: int = 0) -> None:
    """Write pictures with captions, and what they are read with, into the folder of the table."""
    items = (images.picture(seed, number, SPLITS[number % len(SPLITS)]) for number in range(count))
    _write(path, items, {".csv": images.write_captions, ".tsv": images.write_captions})


def spectrum(
    seed: int, number: int, peptide_length: tuple[int, int] = (7, 30), peaks: int = 150, letters: int = 20
) -> MadeSpectrum:
    """Return one spectrum of a tryptic peptide."""
    rng = np.random.default_rng((seed, number))
    residue_L = rng.integers(0, letters, rng.integers(*peptide_length, endpoint=True))
    residue_L[-1] = peptides.LETTERS.index(rng.choice(["K", "R"]))
    charge = int(rng.choice([2, 3], p=[0.7, 0.3]))
    mass = peptides.mass(residue_L)
    return MadeSpectrum(
        id=f"made-{number:07d}",
        split=SPLITS[number % len(SPLITS)],
        peptide=peptides.peptide_text(residue_L),
        precursor_mz=round(mass / charge + peptides.PROTON, 5),
        charge=charge,
        target=round(float(HYDROPATHY[residue_L].mean()), 4),
        peak_P2=_peaks(rng, residue_L, charge, mass, peaks),
    )


@cache
def substructures() -> tuple[MadeSubstructure, ...]:
    """Return the parts of made molecules, of any seed, each next to an isomer with fragments of its own."""
    rng, found = np.random.default_rng(0), []
    for mass in rng.uniform(60, 280, SUBSTRUCTURES):
        found += [MadeSubstructure(mass, mass * rng.uniform(0.3, 1, 2), float(rng.normal())) for _ in range(2)]
    return tuple(found)


def molecule(seed: int, number: int) -> MadeSpectrum:
    """Return one spectrum of a molecule; `peptide` is its InChI key, `target` the sum of what its parts add."""
    of_molecule = np.random.default_rng((seed, number // OF_MOLECULE, 1))
    parts = substructures()
    places = sorted(2 * of_molecule.choice(SUBSTRUCTURES, PARTS, replace=False) + of_molecule.integers(0, 2, PARTS))
    own = [parts[place] for place in places]
    rng = np.random.default_rng((seed, number, 2))
    fragment_P = np.concatenate([part.fragment_2 for part in own])
    fragment_P = fragment_P[rng.random(len(fragment_P)) < SEEN]
    noise = int(rng.integers(3, 12))
    mz_P = np.concatenate([fragment_P * rng.normal(1, OFF, len(fragment_P)), rng.uniform(50, 300, noise)])
    high_P = np.concatenate([1000 * rng.lognormal(0, 0.5, len(fragment_P)), 30 * rng.lognormal(0, 0.8, noise)])
    order = np.argsort(mz_P, kind="stable")
    return MadeSpectrum(
        id=f"made-{number:07d}",
        split=SPLITS[number // OF_MOLECULE % len(SPLITS)],
        peptide=f"{''.join(chr(65 + place) for place in places):A<14}-UHFFFAOYSA-N",
        precursor_mz=round(sum(part.mass for part in own) + peptides.PROTON, 5),
        charge=1,
        target=round(sum(part.value for part in own), 4),
        peak_P2=np.stack([np.round(mz_P[order], 4), np.ceil(high_P[order])], axis=1),
    )


def pair(seed: int, number: int) -> MadePair:
    """Return one sequence, whose composition is its own, and a sentence about it."""
    rng = np.random.default_rng((seed, number))
    residue_L = rng.choice(20, rng.integers(60, 301), p=rng.dirichlet(np.full(20, 0.7)))
    share = np.bincount(residue_L, minlength=20) / len(residue_L)
    order = np.argsort(-share, kind="stable")
    rich = [f"{NAMES[code]} ({share[code]:.0%})" for code in order[:3]]
    poor = [NAMES[code] for code in order[-2:]]
    sentence = f"{len(residue_L)} residues, rich in {rich[0]}, {rich[1]} and {rich[2]}, poor in {poor[0]} and {poor[1]}"
    return MadePair(f"made-{number:07d}", SPLITS[number % len(SPLITS)], peptides.peptide_text(residue_L), sentence)


def sequence(seed: int, number: int, longest: int = 60) -> MadeSequence:
    """Return one sequence, whose composition is its own."""
    rng = np.random.default_rng((seed, number, 3))
    residue_L = rng.choice(20, rng.integers(longest // 2, longest + 1), p=rng.dirichlet(np.full(20, 0.7)))
    text = peptides.peptide_text(residue_L)
    sites = "".join("1" if letter in "FHWY" else "0" for letter in text)
    target = round(float(HYDROPATHY[residue_L].mean()), 4)
    return MadeSequence(f"made-{number:07d}", SPLITS[number % len(SPLITS)], text, target, sites)


def _peaks(
    rng: np.random.Generator, residue_L: NDArray[np.int64], charge: int, mass: float, most: int
) -> NDArray[np.float64]:
    """Return peaks of noise and of fragments of all charges below the precursor's, in order of m/z."""
    charges = range(1, charge)
    kinds = [(ions(residue_L, z), high / z) for z in charges for ions, high in _KINDS]
    mz_P = np.concatenate([mz for mz, _ in kinds])
    high_P = np.concatenate([np.full(len(mz), high) for mz, high in kinds]) * rng.lognormal(0, 0.7, len(mz_P))
    is_seen_P = rng.random(len(mz_P)) < SEEN
    mz_P = mz_P[is_seen_P] * rng.normal(1, OFF, is_seen_P.sum())
    noise = int(rng.integers(0, most - len(mz_P), endpoint=True))
    mz_P = np.concatenate([mz_P, rng.uniform(80, mass, noise)])
    high_P = np.concatenate([high_P[is_seen_P], 30 * rng.lognormal(0, 0.8, noise)])
    order = np.argsort(mz_P, kind="stable")
    return np.stack([np.round(mz_P[order], 4), np.ceil(high_P[order])], axis=1)


_KINDS = ((peptides.b_ions, 400.0), (peptides.y_ions, 1000.0))  # and how high they are


def _write(path: Path, made: Iterator[Any], writers: dict[str, Callable[[Path, Iterator[Any]], None]]) -> None:
    suffix = path.suffix.lower()
    if suffix not in writers:
        remedy = f"name it {path.with_suffix(next(iter(writers)))}"
        raise ConfigError(f"a synthetic file ends with {', '.join(writers)}", where=str(path), remedy=remedy)
    path.parent.mkdir(parents=True, exist_ok=True)
    writers[suffix](path, made)


def _mgf_molecules(path: Path, made: Iterable[MadeSpectrum]) -> None:
    _mgf(path, made, "INCHIKEY")


def _mgf(path: Path, made: Iterable[MadeSpectrum], of: str = "SEQ") -> None:
    with path.open("w", encoding="ascii", newline="\n") as file:
        for spectrum in made:
            peaks = "%.4f %d\n" * len(spectrum.peak_P2) % tuple(spectrum.peak_P2.ravel().tolist())
            file.write(
                f"BEGIN IONS\nTITLE={spectrum.id}\nPEPMASS={spectrum.precursor_mz:.5f}\nCHARGE={spectrum.charge}+\n"
                f"{of}={spectrum.peptide}\nSPLIT={spectrum.split}\nTARGET={spectrum.target:.4f}\n{peaks}END IONS\n\n"
            )


def _hdf5_spectra(path: Path, made: Iterator[MadeSpectrum], count: int, longest: int, peaks: int) -> None:
    """Write so many spectra in the layout of DreaMS."""

    def padded(spectrum: MadeSpectrum) -> NDArray[np.float64]:
        return np.pad(spectrum.peak_P2.T, ((0, 0), (0, peaks - len(spectrum.peak_P2))))

    columns: dict[str, tuple[str, Callable[[MadeSpectrum], Any]]] = {
        "spectrum": (f"(2,{peaks})f4", padded),
        "precursor_mz": ("f8", lambda spectrum: spectrum.precursor_mz),
        "charge": ("i1", lambda spectrum: spectrum.charge),
        "target": ("f8", lambda spectrum: spectrum.target),
        "name": ("S32", lambda spectrum: spectrum.id.encode()),
        "fold": ("S5", lambda spectrum: spectrum.split.encode()),
        "sequence": (f"S{longest}", lambda spectrum: spectrum.peptide.encode()),
    }
    with hdf5.library(path).File(path, "w") as file:
        for name, (kind, _) in columns.items():
            dtype = np.dtype(kind)
            file.create_dataset(name, (count, *dtype.shape), dtype.base)
        for start in range(0, count, PIECE):
            piece = list(islice(made, PIECE))
            for name, (_, value_of) in columns.items():
                file[name][start : start + len(piece)] = np.array([value_of(spectrum) for spectrum in piece])


def _table(path: Path, made: Iterable[Any], kind: Any = MadePair) -> None:
    with path.open("w", encoding="ascii", newline="") as file:
        writer = csv.writer(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", lineterminator="\n")
        writer.writerow(kind._fields)
        writer.writerows(made)


def _hdf5_pairs(path: Path, made: Iterator[MadePair]) -> None:
    h5py = hdf5.library(path)
    with h5py.File(path, "w") as file:
        for name in MadePair._fields:
            file.create_dataset(name, (0,), h5py.string_dtype(), maxshape=(None,), chunks=(PIECE,))
        while piece := list(islice(made, PIECE)):
            for name, values in zip(MadePair._fields, zip(*piece, strict=True), strict=True):
                column = file[name]
                column.resize(len(column) + len(piece), axis=0)
                column[-len(piece) :] = values


WRITERS: dict[str, Callable[[Path, int, int], None]] = {
    "spectra": spectra,
    "molecules": molecules,
    "pairs": pairs,
    "sequences": sequences,
    "captions": captions,
}


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser("python -m pipeline.readers.made", description="Write synthetic data.")
    parser.add_argument("what", choices=tuple(WRITERS))
    parser.add_argument("path", type=Path, help="the file to write: .mgf or .h5; .tsv, .csv or .h5; .csv or .tsv")
    parser.add_argument("--count", type=int, default=1000, help="how many items (1000)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (0)")
    arguments = parser.parse_args(words)
    try:
        WRITERS[arguments.what](arguments.path, arguments.count, arguments.seed)
    except PipelineError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(f"{arguments.path}: {arguments.count:,} {arguments.what}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
