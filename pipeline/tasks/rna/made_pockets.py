"""Made pockets with ligands of their own, as many as wanted, for trials, tests and benchmarks, never for science.

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
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

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
ELEMENTS = ("C", "N", "O", "P")
NUMBER = {"C": 6, "N": 7, "O": 8, "P": 15}
MASS = {"C": 12.011, "N": 14.007, "O": 15.999, "P": 30.974}
CHARGE = {"C": 0.15, "N": -0.5, "O": -0.6, "P": 1.2}  # about, in e
SHIFT = {"A": 0.4, "U": 0.2, "G": -0.2, "C": -0.4}  # of every atom of a base's nucleotide, so that it tells itself
STIFF, BEND, BARRIER = 400.0, 70.0, 1.5  # kcal/mol: of a bond, of an angle, of a dihedral
DEPTH, RADIUS = 0.1, 3.4  # of the Lennard-Jones wells
LIKED = ("AA", "GC", "AG", "AU", "GG", "AC")  # steps of a strand, which tell themselves by bases and by stacking
PREFERENCE = 0.85  # how often a base pair of a complex is what its ligand likes


class MadePocket(NamedTuple):
    """A made pocket: a residue of each atom, and where it is."""

    names: list[str]
    residue_A: Integers
    residues: list[str]
    pos_A3: Floats

    @property
    def kind_A(self) -> Integers:
        """Return the element of each atom, as a place in ELEMENTS."""
        return np.array([ELEMENTS.index(name[0]) for name in self.names])


def made_pocket(rng: np.random.Generator, bases: str) -> MadePocket:
    """Return a helix of two strands, the first of these bases, its atoms shaken, turned at random."""
    names: list[str] = []
    residues: list[str] = []
    residue_A: list[int] = []
    places: list[Floats] = []
    for base, own_names, pos_A3 in (part for strand in _strands(bases) for part in strand):
        names += own_names
        residue_A += [len(residues)] * len(own_names)
        residues.append(base)
        places.append(pos_A3)
    pos_A3 = np.concatenate(places) + rng.normal(0, SHAKEN, (len(names), 3))
    turn_33 = Rotation.random(random_state=rng.integers(1 << 31)).as_matrix()
    return MadePocket(names, np.array(residue_A), residues, (pos_A3 - pos_A3.mean(0)) @ turn_33.T)


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
    kind_A, atoms = pocket.kind_A, len(pocket.names)
    bonds_B2 = np.sort(cKDTree(pocket.pos_A3).query_pairs(LONGEST_BOND, output_type="ndarray"), axis=1)
    bonds_B2 = bonds_B2[np.lexsort(bonds_B2.T[::-1])]
    paths = dict(zip(("bond", "angle", "dihedral"), bond_paths(bonds_B2, atoms, 3), strict=True))
    entries, types = {}, {}
    for kind, paths_PX in paths.items():
        of_ends = np.sort(kind_A[paths_PX[:, [0, -1]]], axis=1)
        types[kind], number_P = np.unique(of_ends, axis=0, return_inverse=True)
        # behind the first atom, because 0 has no sign: a dihedral's third and fourth atoms would say something by it
        ahead_PX = np.where((paths_PX[:, -1:] == 0) | (paths_PX[:, -2:-1] == 0), paths_PX[:, ::-1], paths_PX)
        entries[kind] = np.column_stack([3 * ahead_PX, number_P.reshape(-1) + 1]).ravel()
    lengths, angles = (1.3 + 0.05 * types["bond"].sum(1), np.radians(105 + 3.0 * types["angle"].sum(1)))
    first_R = np.flatnonzero(np.diff(pocket.residue_A, prepend=-1)) + 1
    pairs = len(ELEMENTS) * (len(ELEMENTS) + 1) // 2
    index = [max(row, column) * (max(row, column) + 1) // 2 + min(row, column) + 1
             for row in range(len(ELEMENTS)) for column in range(len(ELEMENTS))]  # fmt: skip
    radii = RADIUS + 0.05 * np.arange(pairs)
    counts = {kind: len(paths_PX) for kind, paths_PX in paths.items()}
    kinds = {kind: len(types[kind]) for kind in types}
    pointers = np.zeros(31, np.int64)
    pointers[[0, 1, 10, 11, 18]] = atoms, len(ELEMENTS), atoms, len(first_R), atoms
    pointers[[3, 12]], pointers[[5, 13]], pointers[[7, 14]] = counts["bond"], counts["angle"], counts["dihedral"]
    pointers[15:18] = kinds["bond"], kinds["angle"], kinds["dihedral"]
    sections: dict[str, tuple[str, Iterable[str]]] = {
        "TITLE": _words(["made"]),
        "POINTERS": _whole(pointers),
        "ATOM_NAME": _words(pocket.names),
        "CHARGE": _real(_charges(pocket)),
        "ATOMIC_NUMBER": _whole([NUMBER[name[0]] for name in pocket.names]),
        "MASS": _real([MASS[name[0]] for name in pocket.names]),
        "ATOM_TYPE_INDEX": _whole(kind_A + 1),
        "NONBONDED_PARM_INDEX": _whole(index),
        "RESIDUE_LABEL": _words(pocket.residues),
        "RESIDUE_POINTER": _whole(first_R),
        "BOND_FORCE_CONSTANT": _real(np.full(kinds["bond"], STIFF)),
        "BOND_EQUIL_VALUE": _real(lengths),
        "ANGLE_FORCE_CONSTANT": _real(np.full(kinds["angle"], BEND)),
        "ANGLE_EQUIL_VALUE": _real(angles),
        "DIHEDRAL_FORCE_CONSTANT": _real(np.full(kinds["dihedral"], BARRIER)),
        "DIHEDRAL_PERIODICITY": _real(1 + types["dihedral"].sum(1) % 3),
        "DIHEDRAL_PHASE": _real(np.pi * (types["dihedral"].sum(1) % 2)),
        "LENNARD_JONES_ACOEF": _real(DEPTH * radii**12),
        "LENNARD_JONES_BCOEF": _real(2 * DEPTH * radii**6),
        "BONDS_INC_HYDROGEN": _whole([]),
        "BONDS_WITHOUT_HYDROGEN": _whole(entries["bond"]),
        "ANGLES_WITHOUT_HYDROGEN": _whole(entries["angle"]),
        "DIHEDRALS_WITHOUT_HYDROGEN": _whole(entries["dihedral"]),
        "AMBER_ATOM_TYPE": _words(name[0] for name in pocket.names),
        # what other readers of topologies demand: nothing is excluded, and nothing has a hydrogen
        **dict.fromkeys(("ANGLES_INC_HYDROGEN", "DIHEDRALS_INC_HYDROGEN", "HBOND_ACOEF", "HBOND_BCOEF"), _whole([])),
        "NUMBER_EXCLUDED_ATOMS": _whole(np.ones(atoms)),
        **dict.fromkeys(("EXCLUDED_ATOMS_LIST", "JOIN_ARRAY", "IROTAT"), _whole(np.zeros(atoms))),
        "TREE_CHAIN_CLASSIFICATION": _words(["M"] * atoms),
        **dict.fromkeys(("SOLTY", "RADII", "SCREEN"), _real(np.ones(atoms))),
    }
    texts = [f"%FLAG {name}\n%FORMAT({form})\n{_lines(form, cells)}" for name, (form, cells) in sections.items()]
    return "".join(["%VERSION  VERSION_STAMP = V0001.000  DATE = 01/01/00  00:00:00\n", *texts]).encode()


def _charges(pocket: MadePocket) -> list[float]:
    """Return the charge of each atom, in a topology's unit."""
    bases = (pocket.residues[residue] for residue in pocket.residue_A)
    return [CHARGE_UNIT * (CHARGE[name[0]] + SHIFT[base]) for name, base in zip(pocket.names, bases, strict=True)]


def _whole(values: Iterable[int]) -> tuple[str, list[str]]:
    return "10I8", [f"{int(value):8d}" for value in values]


def _real(values: Iterable[float]) -> tuple[str, list[str]]:
    return "5E16.8", [f"{float(value):16.8E}" for value in values]


def _words(words: Iterable[str]) -> tuple[str, list[str]]:
    return "20a4", [f"{word:<4}" for word in words]


def _lines(form: str, cells: Iterable[str]) -> str:
    """Return cells as lines of so many as the format says; an empty line where there are none."""
    cells, most = list(cells), int("".join(letter for letter in form.split(".")[0][:2] if letter.isdigit()))
    return "".join(f"{''.join(cells[at : at + most])}\n" for at in range(0, max(len(cells), 1), most))


def coordinates(pocket: MadePocket) -> bytes:
    """Return a pocket's restart file."""
    cells = [f"{value:12.7f}" for value in pocket.pos_A3.ravel()]
    lines = ["".join(cells[at : at + 6]) for at in range(0, len(cells), 6)]
    return "\n".join(["made", f"{len(pocket.names):5d}", *lines, ""]).encode()


# ---- a data set ----


def write_pockets(
    folder: Path, complexes: int, *, ligands: int = 6, width: int = 32, pairs: int = 4, models: int = 1, seed: int = 0
) -> None:
    """Write complexes with so many base pairs and models each, their targets, and a library of all ligands."""
    rng = np.random.default_rng(seed)
    vector_LD = rng.normal(size=(ligands, width)).astype(np.float32)
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


OPTIONS = {
    "complexes": (60, "how many"),
    "ligands": (6, "number of distinct ligands"),
    "width": (32, "numbers of a ligand's embedding"),
    "pairs": (4, "base pairs of a pocket"),
    "models": (1, "models of a complex"),
    "seed": (0, "random seed"),
}


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        "python -m pipeline.tasks.rna.made_pockets", description="Write synthetic pockets."
    )
    parser.add_argument("folder", type=Path)
    for name, (usual, what) in OPTIONS.items():
        parser.add_argument(f"--{name}", type=int, default=usual, help=f"{what} ({usual})")
    told = vars(parser.parse_args(words))
    folder, complexes = told.pop("folder"), told.pop("complexes")
    try:
        write_pockets(folder, complexes, **told)
    except PipelineError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(f"{folder}: {complexes:,} complexes\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
