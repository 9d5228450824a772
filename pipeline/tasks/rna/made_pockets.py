"""Synthetic pockets with ligands of their own, for trials, tests and benchmarks, never for science.

    python -m pipeline.tasks.rna.made_pockets FOLDER --complexes 60 --ligands 6 --width 32 --seed 0

    FOLDER/pockets/m000_L03_model0_rna.prmtop      and .inpcrd: a helix of RNA, with constants of about the right size
    FOLDER/ligand_embeddings.h5                    a target for each complex: m000_L03
    FOLDER/ligand_library.h5                       the same for each ligand: L03

Which ligand a complex has can be read off its bases: each ligand has base pairs that it likes. Shapes: A atoms, B
bonds, P paths of bonded atoms, L ligands, D numbers of an embedding.
"""

from __future__ import annotations

import argparse
import sys
from functools import cache
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy.spatial import cKDTree
from scipy.spatial.transform import Rotation

from pipeline.errors import PipelineError
from pipeline.graphs.bonds import bond_paths
from pipeline.readers.hdf5 import library
from pipeline.tasks.rna.pocket_reader import CHARGE_UNIT

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]

TWIST, RISE = np.radians(32.7), 2.81  # from one base pair of A-form RNA to the next
DYAD, MIDDLE = np.radians(38.0), -1.4  # about which half a turn makes one strand the other: its angle, where on z
# A nucleotide in that helix, as residues 33 to 36 of 4P5J have it; moved by 0.4 Å so that base pairs are 2.9 Å wide.
BACKBONE = """
    P 7.40 -5.24 1.95   OP1 8.34 -5.84 2.95   OP2 5.92 -5.30 2.08   O5' 7.81 -3.70 1.83   C5' 9.14 -3.34 1.47
    C4' 9.23 -1.88 1.12   O4' 8.45 -1.61 -0.08   C3' 8.65 -0.93 2.14   O3' 9.50 -0.73 3.25   C2' 8.37 0.32 1.32
    O2' 9.57 1.03 1.07   C1' 7.90 -0.30 0.00 """
BASES = {
    "A": """ N9 6.45 -0.37 -0.16   C8 5.61 -1.46 -0.03   N7 4.34 -1.19 -0.29   C5 4.37 0.16 -0.61   C6 3.36 1.05 -0.99
        N6 2.06 0.71 -1.09   N1 3.72 2.32 -1.26   C2 5.01 2.66 -1.15   N3 6.06 1.91 -0.80   C4 5.66 0.67 -0.55""",
    "G": """ N9 6.42 -0.42 -0.07   C8 5.68 -1.57 0.03   N7 4.39 -1.39 -0.05   C5 4.26 -0.02 -0.22   C6 3.09 0.77 -0.39
        O6 1.91 0.38 -0.40   N1 3.40 2.13 -0.53   C2 4.69 2.64 -0.53   N2 4.83 3.96 -0.69   N3 5.79 1.90 -0.38
        C4 5.51 0.59 -0.24""",
    "C": """ N1 6.42 -0.37 -0.12   C2 5.70 0.77 -0.51   O2 6.32 1.83 -0.73   N3 4.34 0.72 -0.64   C4 3.71 -0.43 -0.42
        N4 2.38 -0.45 -0.56   C5 4.42 -1.60 -0.03   C6 5.76 -1.54 0.11""",
    "U": """ N1 6.41 -0.42 -0.07   C2 5.78 0.74 -0.43   O2 6.38 1.81 -0.61   N3 4.43 0.63 -0.57   C4 3.67 -0.49 -0.41
        O4 2.47 -0.36 -0.61   C5 4.39 -1.68 -0.04   C6 5.72 -1.60 0.11""",
}
PAIRED = dict(zip("ACGU", "UGCA", strict=True))
STRANDS = 2
SHAKEN = 0.05  # Å by which atoms of a model lie off the helix
LONGEST_BOND = 1.75  # Å
ELEMENTS = {
    "C": (6, 12.011, 0.15),
    "N": (7, 14.007, -0.5),
    "O": (8, 15.999, -0.6),
    "P": (15, 30.974, 1.2),
}  # charge: about
SHIFT = {"A": 0.4, "U": 0.2, "G": -0.2, "C": -0.4}  # of every atom of a base's nucleotide: charges identify the base
STIFF, BEND, BARRIER = 400.0, 70.0, 1.5  # kcal/mol: of a bond, of an angle, of a dihedral
DEPTH, RADIUS = 0.1, 3.4  # of the Lennard-Jones wells
LIKED = ("AA", "GC", "AG", "AU", "GG", "AC")  # pairs of neighbouring bases in a strand
OPTIONS = {
    "complexes": (60, "Number of complexes"),
    "ligands": (6, "Number of distinct ligands"),
    "width": (32, "Numbers of a ligand's embedding"),
    "pairs": (4, "Base pairs of a pocket"),
    "models": (1, "Models of a complex"),
    "seed": (0, "Random seed"),
}
PREFERENCE = 0.85  # how often a base pair of a complex is one that its ligand prefers


class MadePocket(NamedTuple):
    """A synthetic pocket: its atoms with their residues and places."""

    names: list[str]
    residue_A: Integers
    residues: list[str]
    pos_A3: Floats


def made_pocket(rng: np.random.Generator, bases: str) -> MadePocket:
    """Return a helix of two strands, the first of these bases, its atoms shaken, turned at random."""
    residues, names, places = zip(*(part for strand in _strands(bases) for part in strand), strict=True)
    residue_A = np.repeat(np.arange(len(residues)), [len(own) for own in names])
    pos_A3 = np.concatenate(places) + rng.normal(0, SHAKEN, (len(residue_A), 3))
    turn_33 = Rotation.random(random_state=rng.integers(1 << 31)).as_matrix()
    return MadePocket([*chain(*names)], residue_A, [*residues], (pos_A3 - pos_A3.mean(0)) @ turn_33.T)


def _strands(first: str) -> tuple[list[tuple[str, list[str], Floats]], ...]:
    """Return the nucleotides of both strands from 5' to 3': base, atom names, where they are."""
    turn_33 = Rotation.from_rotvec(np.pi * np.array([np.cos(DYAD), np.sin(DYAD), 0.0])).as_matrix()
    ahead = [(base, *_atoms(base, step)) for step, base in enumerate(first)]
    back = [(PAIRED[first[step]], *_atoms(PAIRED[first[step]], -step)) for step in reversed(range(len(first)))]
    shift_3 = np.array([0.0, 0.0, STRANDS * MIDDLE])
    return ahead, [(base, names, pos_A3 @ turn_33.T + shift_3) for base, names, pos_A3 in back]


@cache
def _template(base: str) -> tuple[list[str], Floats]:
    """Return the names of a nucleotide's atoms, and where they are."""
    words = (BACKBONE + BASES[base]).split()
    return words[::4], np.array([words[1::4], words[2::4], words[3::4]], np.float64).T


def _atoms(base: str, step: int) -> tuple[list[str], Floats]:
    names, pos_A3 = _template(base)
    turn_33 = Rotation.from_rotvec([0.0, 0.0, step * TWIST]).as_matrix()
    return names, pos_A3 @ turn_33.T + np.array([0.0, 0.0, step * RISE])


# ---- AMBER's files ----


def topology(pocket: MadePocket) -> bytes:
    """Return a pocket as a topology with a force field: constants of each kind of bond, angle, dihedral and pair."""
    letters, atoms, types = [name[0] for name in pocket.names], len(pocket.names), len(ELEMENTS)
    number_A, mass_A, charge_A = np.array([ELEMENTS[letter] for letter in letters]).T
    kind_A = np.array([[*ELEMENTS].index(letter) for letter in letters])
    shift_A = np.array([SHIFT[base] for base in pocket.residues])[pocket.residue_A]  # charges identify the base
    bonds_B2 = np.sort(cKDTree(pocket.pos_A3).query_pairs(LONGEST_BOND, output_type="ndarray"), axis=1)
    bonds_B2 = bonds_B2[np.lexsort(bonds_B2.T[::-1])]
    entries, counts, sums = [], [], []
    for paths_PX in bond_paths(bonds_B2, atoms, 3):
        of_ends = np.sort(kind_A[paths_PX[:, [0, -1]]], axis=1)
        ends, number_P = np.unique(of_ends, axis=0, return_inverse=True)
        # behind the first atom, because 0 has no sign: a dihedral's third and fourth atoms would say something by it
        ahead_PX = np.where((paths_PX[:, -1:] == 0) | (paths_PX[:, -2:-1] == 0), paths_PX[:, ::-1], paths_PX)
        entries.append(np.column_stack([3 * ahead_PX, number_P.reshape(-1) + 1]).ravel())
        counts.append(len(paths_PX))
        sums.append(ends.sum(1))
    first_R = np.flatnonzero(np.diff(pocket.residue_A, prepend=-1)) + 1
    pairs = [(max(pair), min(pair)) for pair in product(range(types), repeat=2)]
    radii = RADIUS + 0.05 * np.arange(types * (types + 1) // 2)
    pointers = np.zeros(31, np.int64)
    pointers[[0, 1, 10, 11, 18]] = atoms, types, atoms, len(first_R), atoms
    pointers[[3, 12]], pointers[[5, 13]], pointers[[7, 14]] = counts
    pointers[15:18] = list(map(len, sums))
    sections = {
        "POINTERS": _cells("10I8", pointers),
        "ATOM_NAME": _cells("20a4", pocket.names),
        "CHARGE": _cells("5E16.8", CHARGE_UNIT * (charge_A + shift_A)),
        "ATOMIC_NUMBER": _cells("10I8", number_A),
        "MASS": _cells("5E16.8", mass_A),
        "ATOM_TYPE_INDEX": _cells("10I8", kind_A + 1),
        "NONBONDED_PARM_INDEX": _cells("10I8", [most * (most + 1) // 2 + least + 1 for most, least in pairs]),
        "RESIDUE_LABEL": _cells("20a4", pocket.residues),
        "RESIDUE_POINTER": _cells("10I8", first_R),
        "BOND_FORCE_CONSTANT": _cells("5E16.8", np.full(len(sums[0]), STIFF)),
        "BOND_EQUIL_VALUE": _cells("5E16.8", 1.3 + 0.05 * sums[0]),
        "ANGLE_FORCE_CONSTANT": _cells("5E16.8", np.full(len(sums[1]), BEND)),
        "ANGLE_EQUIL_VALUE": _cells("5E16.8", np.radians(105 + 3.0 * sums[1])),
        "DIHEDRAL_FORCE_CONSTANT": _cells("5E16.8", np.full(len(sums[2]), BARRIER)),
        "DIHEDRAL_PERIODICITY": _cells("5E16.8", 1 + sums[2] % 3),
        "DIHEDRAL_PHASE": _cells("5E16.8", np.pi * (sums[2] % 2)),
        "LENNARD_JONES_ACOEF": _cells("5E16.8", DEPTH * radii**12),
        "LENNARD_JONES_BCOEF": _cells("5E16.8", 2 * DEPTH * radii**6),
        "BONDS_INC_HYDROGEN": _cells("10I8", []),
        "BONDS_WITHOUT_HYDROGEN": _cells("10I8", entries[0]),
        "ANGLES_WITHOUT_HYDROGEN": _cells("10I8", entries[1]),
        "DIHEDRALS_WITHOUT_HYDROGEN": _cells("10I8", entries[2]),
        # Other readers of topologies, such as ParmEd, require these: nothing is excluded, nothing has a hydrogen
        "TITLE": _cells("20a4", ["made"]),
        "AMBER_ATOM_TYPE": _cells("20a4", letters),
        **dict.fromkeys(
            ("ANGLES_INC_HYDROGEN", "DIHEDRALS_INC_HYDROGEN", "HBOND_ACOEF", "HBOND_BCOEF"), _cells("10I8", [])
        ),
        "NUMBER_EXCLUDED_ATOMS": _cells("10I8", np.ones(atoms)),
        **dict.fromkeys(("EXCLUDED_ATOMS_LIST", "JOIN_ARRAY", "IROTAT"), _cells("10I8", np.zeros(atoms))),
        "TREE_CHAIN_CLASSIFICATION": _cells("20a4", ["M"] * atoms),
        **dict.fromkeys(("SOLTY", "RADII", "SCREEN"), _cells("5E16.8", np.ones(atoms))),
    }
    texts = [f"%FLAG {name}\n{text}" for name, text in sections.items()]
    return "".join(["%VERSION  VERSION_STAMP = V0001.000  DATE = 01/01/00  00:00:00\n", *texts]).encode()


def _cells(form: str, values: Iterable[Any]) -> str:
    """Return the values of a section, as many on a line as its format says; an empty line where there are none."""
    most, cell = {"10I8": (10, "{:8.0f}"), "5E16.8": (5, "{:16.8E}"), "20a4": (20, "{:<4}")}[form]
    cells = [cell.format(value) for value in values]
    lines = ["".join(cells[at : at + most]) for at in range(0, max(len(cells), 1), most)]
    return "\n".join([f"%FORMAT({form})", *lines, ""])


def coordinates(pocket: MadePocket) -> bytes:
    """Return a pocket's restart file."""
    cells = [f"{value:12.7f}" for value in pocket.pos_A3.ravel()]
    lines = ["".join(cells[at : at + 6]) for at in range(0, len(cells), 6)]
    return "\n".join(["made", f"{len(pocket.names):5d}", *lines, ""]).encode()


# ---- a data set ----


def write_pockets(
    folder: Path, complexes: int, *, ligands: int = 6, width: int = 32, pairs: int = 4, models: int = 1, seed: int = 0
) -> None:
    """Write complexes with a number of base pairs and models each, their targets, and a library of all ligands."""
    vector_LD = np.random.default_rng(seed).normal(size=(ligands, width)).astype(np.float32)
    liked = [LIKED[ligand % len(LIKED)] for ligand in range(ligands)]
    pockets = folder / "pockets"
    pockets.mkdir(parents=True, exist_ok=True)
    h5py = library(folder)
    with h5py.File(folder / "ligand_embeddings.h5", "w") as targets:
        for number in range(complexes):
            own, ligand = np.random.default_rng((seed, number)), number % ligands
            name = f"m{number:03d}_{ligand_name(ligand)}"
            targets[name] = vector_LD[ligand]
            bases = _bases(own, liked[ligand], pairs)
            for model in range(models):
                pocket = made_pocket(own, bases)
                stem = pockets / f"{name}_model{model}_rna"
                stem.with_suffix(".prmtop").write_bytes(topology(pocket))
                stem.with_suffix(".inpcrd").write_bytes(coordinates(pocket))
    with h5py.File(folder / "ligand_library.h5", "w") as file:
        for ligand in range(ligands):
            file[ligand_name(ligand)] = vector_LD[ligand]


def ligand_name(ligand: int) -> str:
    """Return the name of a made ligand."""
    return f"L{ligand:02d}"


def _bases(rng: np.random.Generator, liked: str, pairs: int) -> str:
    """Return bases of a strand, most of them those that a ligand likes."""
    any_B = rng.choice(list(BASES), size=pairs)
    liked_B = np.array([liked[place % 2] for place in range(pairs)])
    return "".join(np.where(rng.random(pairs) < PREFERENCE, liked_B, any_B))


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        "python -m pipeline.tasks.rna.made_pockets", description="Write synthetic pockets."
    )
    parser.add_argument("folder", type=Path)
    for name, (usual, what) in OPTIONS.items():
        parser.add_argument(f"--{name}", type=int, default=usual, help=f"{what}. Default: {usual}.")
    given = vars(parser.parse_args(words))
    try:
        write_pockets(**given)
    except PipelineError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(f"{given['folder']}: {given['complexes']:,} complexes\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
