"""Made pockets: a helix of RNA with a ligand beside it and its bonds, as a PDB file."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from scipy.spatial import cKDTree
from scipy.spatial.transform import Rotation

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

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
STRANDS, LIGAND, LIGAND_NAME = ("A", "B"), "L", "LIG"
BOND, APART, STEP = 1.40, 3.0, 0.25  # of the rings; of the ligand from all else; by which it is pushed
ELEMENTS, SHARES = ("C", "N", "O"), (0.75, 0.15, 0.10)  # of the ligand


def pocket_pdb(seed: int, nucleotides: int = 46, ligand_atoms: int = 24) -> bytes:
    """Return a PDB file of two strands (chains A and B) and a ligand (chain L) with its bonds."""
    rng = np.random.default_rng(seed)
    first = "".join(rng.choice(list(BASES), size=-(-nucleotides // 2)))
    strands = _strands(first, nucleotides // 2)
    rna_A3 = np.concatenate([pos_A3 for strand in strands for _, _, pos_A3 in strand])
    flake_A3 = _flake(ligand_atoms)
    placed_A3 = _placed(rng, flake_A3, rna_A3)
    lines: list[str] = []
    for chain, strand in zip(STRANDS, strands, strict=True):
        for number, (base, names, pos_A3) in enumerate(strand, 1):
            lines += [_line("ATOM", len(lines) + place, name, base, chain, number, pos_3, name[0])
                      for place, (name, pos_3) in enumerate(zip(names, pos_A3, strict=True), 1)]  # fmt: skip
    start = len(lines) + 1
    elements = rng.choice(ELEMENTS, p=SHARES, size=ligand_atoms).tolist()
    lines += [
        _line("HETATM", start + place, f"{element}{place + 1}", LIGAND_NAME, LIGAND, 1, pos_3, element)
        for place, (element, pos_3) in enumerate(zip(elements, placed_A3, strict=True))
    ]
    bonds = cKDTree(flake_A3).query_pairs(1.1 * BOND, output_type="ndarray") + start
    lines += [f"CONECT{left:5d}{right:5d}\n" for left, right in sorted(map(tuple, bonds.tolist()))]
    return "".join([*lines, "END\n"]).encode()


def _strands(first: str, paired: int) -> tuple[list[tuple[str, list[str], Floats]], ...]:
    """Return the nucleotides of both strands from 5' to 3': base, atom names, where they are."""
    turn_33 = Rotation.from_rotvec(np.pi * np.array([np.cos(DYAD), np.sin(DYAD), 0.0])).as_matrix()
    ahead = [(base, *_atoms(base, step)) for step, base in enumerate(first)]
    back = [(PAIRED[first[step]], *_atoms(PAIRED[first[step]], -step)) for step in reversed(range(paired))]
    shift_3 = np.array([0.0, 0.0, 2 * MIDDLE])
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


def _flake(atoms: int) -> Floats:
    """Return so many places of a lattice of six-membered rings, the innermost first."""
    width = np.arange(-atoms, atoms + 1)
    cells_S2 = np.stack(np.meshgrid(width, width), -1).reshape(-1, 2) @ np.array(
        [[np.sqrt(3), 0.0], [np.sqrt(3) / 2, 1.5]]
    )
    places_S2 = BOND * np.concatenate([cells_S2, cells_S2 + np.array([0.0, 1.0])])
    order = np.argsort(np.square(places_S2 - [0.0, -BOND]).sum(-1), kind="stable")[:atoms]
    return np.pad(places_S2[order], ((0, 0), (0, 1)))


def _placed(rng: np.random.Generator, flake_A3: Floats, rna_A3: Floats) -> Floats:
    """Return the flake turned at random, at the middle of the helix and so far out that it touches nothing."""
    turned_A3 = flake_A3 @ Rotation.random(random_state=rng.integers(1 << 31)).as_matrix().T
    angle = rng.uniform(0, 2 * np.pi)
    out_3, middle_3 = np.array([np.cos(angle), np.sin(angle), 0.0]), rna_A3.mean(0) * [0, 0, 1]
    tree, far = cKDTree(rna_A3), 0.0
    while tree.query(turned_A3 + middle_3 + far * out_3)[0].min() < APART:
        far += STEP
    placed_A3: Floats = turned_A3 + middle_3 + far * out_3
    return placed_A3


def _line(
    record: str, serial: int, name: str, residue: str, chain: str, number: int, pos_3: Floats, element: str
) -> str:
    x, y, z = pos_3
    return (
        f"{record:<6}{serial:>5} {f' {name}':<4} {residue:>3} {chain}{number:>4}    "
        f"{x:8.3f}{y:8.3f}{z:8.3f}  1.00 20.00          {element:>2}\n"
    )
