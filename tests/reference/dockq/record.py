"""What DockQ says of many poses, as a table: `python tests/reference/dockq/record.py tests/reference/structures`.

It needs only `pip install DockQ` (2.1.3 made the table), and nothing of this project. Each partner is handed over as
one merged chain, its residues numbered anew; poses are moved in memory, so that no rounding of files is in the numbers.
"""

from __future__ import annotations

import csv
import gzip
import sys
import tempfile
from pathlib import Path

import numpy as np

TABLE = Path(__file__).with_name("numbers.csv")
PAIRS = ("1HIA", "1KKL", "1R8S", "1Z0K", "2VXT")
COMPLEXES = ("1R0R",)
SIZES = ((0.0, 0.0), (0.5, 2.0), (1.0, 3.0), (2.0, 6.0), (3.0, 12.0), (5.0, 20.0), (8.0, 30.0), (15.0, 120.0))  # Å, °
MOVE = ("a", "b", "c", "x", "y", "z")  # an axis times radians, and a shift
SAID = ("fnat", "iRMSD", "LRMSD", "DockQ")


def turn_of(vector_3):
    """The rotation about an axis by its length."""
    angle = np.linalg.norm(vector_3)
    x, y, z = vector_3 / angle if angle else vector_3
    cross_33 = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return np.eye(3) + np.sin(angle) * cross_33 + (1 - np.cos(angle)) * cross_33 @ cross_33


def vector_of(turn_33):
    """An axis times radians; not for half turns."""
    angle = np.arccos(np.clip((np.trace(turn_33) - 1) / 2, -1, 1))
    axis_3 = np.array([turn_33[2, 1] - turn_33[1, 2], turn_33[0, 2] - turn_33[2, 0], turn_33[1, 0] - turn_33[0, 1]])
    return axis_3 * (0 if angle < 1e-9 else angle / (2 * np.sin(angle)))


def files_of(folder, source, name):
    """The files of receptor and ligand, as they are docked and in the truth, with the chain that is taken of each."""
    if source == "complex":
        return [[(folder / "complexes" / f"{name}.pdb", chain) for chain in "AB"]] * 2
    docked = "b" if source == "bound" else "u"
    return [[(folder / "pairs" / f"{name}_{side}_{kind}.pdb.gz", None) for side in "rl"] for kind in (docked, "b")]


def merged(files):
    """Both partners as chains A and B of one file."""
    lines = []
    for chain, (path, only) in zip("AB", files, strict=True):
        number, before = 0, None
        data = path.read_bytes()
        for line in (gzip.decompress(data) if path.suffix == ".gz" else data).decode().splitlines():
            if line.startswith("ATOM  ") and (only is None or line[21] == only):
                number += line[21:27] != before
                before = line[21:27]
                lines.append(f"{line[:21]}{chain}{number:4d} {line[27:]}\n")
    return "".join(lines)


def loaded(files, name):
    """Both partners as DockQ reads them."""
    from DockQ.DockQ import load_PDB

    with tempfile.NamedTemporaryFile("w", suffix=".pdb") as file:
        file.write(merged(files))
        file.flush()
        model = load_PDB(file.name)
    model.id = name
    return model


def ca_by_residue(chain):
    """CA atoms, in the order of the sequence's residues."""
    return [residue["CA"].coord if "CA" in residue else None for residue in chain]


def nearest(chain, onto):
    """The turn and the shift that bring a chain's CA atoms nearest to those of the same residues of another."""
    from Bio.SVDSuperimposer import SVDSuperimposer
    from DockQ.DockQ import align_chains

    mine, theirs = ca_by_residue(chain), ca_by_residue(onto)
    blocks = zip(*align_chains(chain, onto).aligned, strict=True)
    both = [pair for here, there in blocks for pair in zip(range(*here), range(*there), strict=True)]
    pairs = [(mine[a], theirs[b]) for a, b in both if mine[a] is not None and theirs[b] is not None]
    from_N3, to_N3 = (np.array(side, float) for side in zip(*pairs, strict=True))
    fit = SVDSuperimposer()
    fit.set(to_N3, from_N3)
    fit.run()
    turn_33, shift_3 = fit.get_rotran()
    return turn_33.T, shift_3


def base_move(docked, truth):
    """The move of a ligand that is nearest to the truth, in the frame of its receptor."""
    ligand, receptor = nearest(docked["B"], truth["B"]), nearest(truth["A"], docked["A"])
    return receptor[0] @ ligand[0], receptor[0] @ ligand[1] + receptor[1]


def moves_of(docked, truth, source, rng):
    """The nearest move, and further ones about it, turned about the ligand's centre."""
    turn_33, shift_3 = (np.eye(3), np.zeros(3)) if source != "unbound" else base_move(docked, truth)
    centre_3 = np.mean([coord for coord in ca_by_residue(docked["B"]) if coord is not None], axis=0, dtype=float)
    centre_3 = turn_33 @ centre_3 + shift_3
    for far, degrees in SIZES:
        axis_3, away_3 = rng.standard_normal((2, 3))
        more_33 = turn_of(axis_3 / np.linalg.norm(axis_3) * np.radians(degrees))
        away_3 *= far / np.linalg.norm(away_3)
        yield more_33 @ turn_33, more_33 @ (shift_3 - centre_3) + centre_3 + away_3


def file_places(docked):
    """All atoms of the ligand, every alternative of them, and where their file has them."""
    return [(atom, atom.coord.astype(float)) for residue in docked["B"] for atom in residue.get_unpacked_list()]


def quality(docked, truth, places, turn_33, shift_3):
    """What DockQ says of a pose; its caches go by names, which stay the same."""
    from DockQ import DockQ

    cached = ("align_chains", "get_aligned_residues", "get_residue_distances", "list_atoms_per_residue", "subset_atoms")
    for name in ("run_on_chains", *cached):
        getattr(DockQ, name).cache_clear()
    for atom, place_3 in places:
        atom.coord = (turn_33 @ place_3 + shift_3).astype("f")
    chains = (docked["A"], docked["B"]), (truth["A"], truth["B"])
    return DockQ.run_on_chains(*chains, small_molecule=False)


def rows(folder):
    """The rows of the table."""
    sources = [("bound", PAIRS), ("unbound", PAIRS), ("complex", COMPLEXES)]
    for source, name in [(source, name) for source, names in sources for name in names]:
        files = zip(files_of(folder, source, name), "dt", strict=True)
        docked, truth = (loaded(some, called) for some, called in files)
        rng = np.random.default_rng([ord(letter) for letter in source + name])
        places = file_places(docked)
        for pose, (turn_33, shift_3) in enumerate(list(moves_of(docked, truth, source, rng))):
            move = [*vector_of(turn_33), *shift_3]
            written = [f"{number:.6f}" for number in move]
            vector_3, exact_3 = np.array(written[:3], float), np.array(written[3:], float)
            said = quality(docked, truth, places, turn_of(vector_3), exact_3)
            yield [source, name, pose, *written, *(f"{said[key]:.5f}" for key in SAID)]


def main():
    """Write the table."""
    with TABLE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["source", "complex", "pose", *MOVE, *SAID])
        writer.writerows(rows(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
