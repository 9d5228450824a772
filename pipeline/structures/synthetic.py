"""Made complexes with real geometry: for the demo, the tests and the benchmarks, never for science.

A chain is drawn as helices, strands and loops, folded into a globule, and docked onto another until they touch. A
sequence always folds the same way, so an antigen that returns in many complexes is the same molecule in all of them.
Shapes: R residues, S segments, K candidates for a segment, L residues of the longest segment, A atoms, P poses. A
frame is a 4×4 rigid motion whose origin is a CA and whose x axis points along N→CA.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy.spatial import cKDTree
from scipy.spatial.distance import cdist
from scipy.spatial.transform import Rotation

from pipeline.structures.atoms import CB_WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

# One letter, three letters, percent in Swiss-Prot.
AMINO_ACIDS = (
    ("A", "ALA", 8.25), ("R", "ARG", 5.53), ("N", "ASN", 4.06), ("D", "ASP", 5.46), ("C", "CYS", 1.38),
    ("Q", "GLN", 3.93), ("E", "GLU", 6.72), ("G", "GLY", 7.07), ("H", "HIS", 2.27), ("I", "ILE", 5.91),
    ("L", "LEU", 9.65), ("K", "LYS", 5.80), ("M", "MET", 2.41), ("F", "PHE", 3.86), ("P", "PRO", 4.74),
    ("S", "SER", 6.65), ("T", "THR", 5.36), ("W", "TRP", 1.10), ("Y", "TYR", 2.92), ("V", "VAL", 6.86),
)  # fmt: skip
NAMES = {letter: name for letter, name, _ in AMINO_ACIDS}
ATOMS = ("N", "CA", "C", "O", "CB")

# Bond length in Å, and the angle in degrees at the atom before (Engh and Huber).
N_CA, CA_C, C_N, C_O = (1.458, 121.7), (1.525, 111.0), (1.329, 116.6), (1.231, 120.1)

# Phi and psi in degrees.
HELIX, STRAND = (-57.0, -47.0), (-119.0, 113.0)
LOOPS = np.array([(-70.0, -35.0), (-120.0, 130.0), (-65.0, 140.0), (-90.0, 0.0), (60.0, 45.0)])
LOOP_SHARES = (0.3, 0.25, 0.25, 0.15, 0.05)

CANDIDATES = 10
POSES = 12
APART_CA = 4.5  # Å at least between CA atoms three or more residues apart
TOUCH_CA, CONTACT_CA = 7.0, 11.0  # Å between partners when poses are compared, by every other CA
STICKY, STICKY_WITHIN = "FWY", 5.0  # the demo's residues that touch a partner: atoms at most so many Å apart
PLAIN = str.maketrans("FWY", "LAS")  # replaces them elsewhere
_distinct_pairs = cache(np.triu_indices)
SHAKE = 0.1  # Å, standard deviation of the errors of a shaken pair
TOUCH = 2.8  # Å between the nearest atoms of two partners in the end


@dataclass(frozen=True, slots=True)
class Fold:
    """A chain in space: N, CA, C, O and CB of every residue; of a glycine the CB does not exist."""

    sequence: str
    pos_R53: Floats

    def atoms(self) -> tuple[NDArray[np.int64], NDArray[np.int64], Floats]:
        """Return residue, atom name (as a position in ATOMS) and coordinates of the atoms that exist."""
        present_R5 = np.ones(self.pos_R53.shape[:2], dtype=bool)
        present_R5[:, 4] = np.frombuffer(self.sequence.encode(), dtype=np.uint8) != ord("G")
        residue_A, name_A = np.nonzero(present_R5)
        return residue_A, name_A, self.pos_R53[present_R5]


class _Placement(NamedTuple):
    """A segment in space: the frames of its residues and the one after, and the torsions that made them."""

    frame_L44: Floats
    torsion_L2: Floats


def complex_pdb(seed: int, n_receptor: int = 200, n_ligand: int = 200) -> bytes:
    """Return a PDB file of two chains, A and B, that touch."""
    rng = np.random.default_rng(seed)
    sequences = draw_sequence(rng, n_receptor), draw_sequence(rng, n_ligand)
    return to_pdb(dict(zip("AB", dock(rng, *map(fold_chain, sequences)), strict=True)))


def draw_sequence(rng: np.random.Generator, length: int) -> str:
    """Return a sequence of natural composition."""
    shares = np.array([percent for _, _, percent in AMINO_ACIDS])
    return "".join(rng.choice(list(NAMES), size=length, p=shares / shares.sum()))


@lru_cache(maxsize=256)
def fold_chain(sequence: str) -> Fold:
    """Return the sequence as a globule of helices, strands and loops, always the same one."""
    if not sequence or not set(sequence) <= set(NAMES):
        raise ValueError(f"not a sequence of the 20 amino acids: {sequence!r}")
    rng = np.random.default_rng(list(hashlib.blake2b(sequence.encode(), digest_size=16).digest()))
    placements = _pack(*_draw_segments(rng, len(sequence)))
    frame_R44 = np.concatenate([placement.frame_L44[:-1] for placement in placements])
    local_R53 = _residue_atoms(np.concatenate([placement.torsion_L2 for placement in placements]))
    pos_R53 = local_R53 @ frame_R44[:, :3, :3].transpose(0, 2, 1) + frame_R44[:, None, :3, 3]
    pos_R53 -= pos_R53[:, 1].mean(axis=0)
    pos_R53.flags.writeable = False
    return Fold(sequence, pos_R53)


def dock(rng: np.random.Generator, receptor: Fold, ligand: Fold) -> tuple[Fold, Fold]:
    """Return the partners face to face, in the one of some random poses that makes the most contacts."""
    w_x_y_z = rng.normal(size=(4, 2 * POSES))
    turn_2P33 = Rotation.from_quat(np.roll(w_x_y_z, -1, axis=0).T).as_matrix().reshape(2, POSES, 3, 3)
    contacts = [
        _contacts(receptor.pos_R53[::2, 1] @ turn_33, ligand.pos_R53[::2, 1] @ other_33)
        for turn_33, other_33 in zip(*turn_2P33, strict=True)
    ]
    receptor, ligand = (
        Fold(partner.sequence, partner.pos_R53 @ turn_P33[np.argmax(contacts)])
        for partner, turn_P33 in zip((receptor, ligand), turn_2P33, strict=True)
    )
    lift = _lift(receptor.atoms()[2], ligand.atoms()[2], TOUCH)
    return receptor, Fold(ligand.sequence, ligand.pos_R53 + np.array([0, 0, lift]))


def shaken_pair(pair: int, seed: int, length: int) -> tuple[Fold, Fold]:
    """Return two docked chains in another orientation: a pair always has the same shapes, with other sequences."""
    of_pair, own = np.random.default_rng(pair), np.random.default_rng((pair, seed))
    partners = dock(of_pair, *(fold_chain(draw_sequence(of_pair, length)) for _ in range(2)))
    turn_33 = Rotation.random(random_state=own.integers(1 << 31)).as_matrix()
    receptor, ligand = (
        Fold(draw_sequence(own, length), (partner.pos_R53 + own.normal(0, SHAKE, partner.pos_R53.shape)) @ turn_33.T)
        for partner in partners
    )
    return receptor, ligand


def to_pdb(chains: Mapping[str, Fold]) -> bytes:
    """Return a PDB file of chains under their one-letter names."""
    lines = ["HEADER    MADE BY PIPELINE, NOT A REAL PROTEIN"]
    for name, chain in chains.items():
        names, length = [NAMES[letter] for letter in chain.sequence], len(chain.sequence)
        rows = [" ".join(names[first : first + 13]) for first in range(0, length, 13)]
        lines += [f"SEQRES {number:3d} {name} {length:4d}  {row}" for number, row in enumerate(rows, start=1)]
    serial = 0
    for name, chain in chains.items():
        residues = [f"{NAMES[letter]} {name}{number:4d}" for number, letter in enumerate(chain.sequence, start=1)]
        for residue, atom, (x, y, z) in zip(*(column.tolist() for column in chain.atoms()), strict=True):
            serial += 1
            start = f"ATOM  {serial:5d}  {ATOMS[atom]:3} {residues[residue]}    {x:8.3f}{y:8.3f}{z:8.3f}"
            lines.append(f"{start}  1.00 20.00           {ATOMS[atom][0]}")
        serial += 1
        lines.append(f"TER   {serial:5d}      {residues[-1]}")
    return "\n".join([*lines, "END", ""]).encode()


def write_demo(folder: Path, n: int = 24, seed: int = 0) -> None:
    """Write `n` complexes, one file that is broken, and their manifest; the same bytes every time.

    A few antigens return in several complexes, each in one split only: antigens are the clusters. There is a rule to
    learn: where a receptor touches its antigen it has aromatic residues, and nowhere else.
    """
    rng = np.random.default_rng(seed)
    antigens = [draw_sequence(rng, int(rng.integers(60, 141))) for _ in range(min(n, max(3, n // 4)))]
    splits = ["train", "val", "test", *["train"] * n]
    (folder / "structures").mkdir(parents=True, exist_ok=True)
    with (folder / "manifest.csv").open("w", newline="", encoding="utf-8") as file:
        manifest = csv.writer(file, lineterminator="\n")
        manifest.writerow(("id", "path", "receptor_chains", "ligand_chains", "split", "cluster"))
        for number in range(n):
            cluster, name = number % len(antigens), f"demo-{number + 1:03d}"
            n_receptor, own = int(rng.integers(60, 141)), np.random.default_rng(int(rng.integers(1 << 32)))
            receptor, antigen = dock(own, fold_chain(draw_sequence(own, n_receptor)), fold_chain(antigens[cluster]))
            path = f"structures/{name}.pdb"
            (folder / path).write_bytes(to_pdb({"H": _sticky(receptor, antigen), "A": antigen}))
            manifest.writerow((name, path, "H", "A", splits[cluster], f"antigen-{cluster + 1}"))
        packed = gzip.compress(complex_pdb(int(rng.integers(1 << 32)), 60, 60), mtime=0)
        path = "structures/demo-broken.pdb.gz"
        (folder / path).write_bytes(packed[: len(packed) // 2])  # as an interrupted download leaves it
        manifest.writerow(("demo-broken", path, "H", "A", "train", "broken"))


def _sticky(receptor: Fold, antigen: Fold) -> Fold:
    """Return a receptor in the same shape, with aromatic residues where it touches the antigen, and only there."""
    residue_A, _, pos_A3 = receptor.atoms()
    near_A = cKDTree(antigen.atoms()[2]).query(pos_A3)[0] < STICKY_WITHIN
    touching, plain = set(residue_A[near_A].tolist()), receptor.sequence.translate(PLAIN)
    sequence = "".join(STICKY[at % len(STICKY)] if at in touching else letter for at, letter in enumerate(plain))
    return Fold(sequence, receptor.pos_R53)


def _draw_segments(rng: np.random.Generator, n_residues: int) -> tuple[Floats, NDArray[np.int64]]:
    """Draw segments, each a loop and then a helix or strand: candidate torsions, and how many residues are used."""
    n_segments = n_residues // 7 + 1
    is_helix_S = rng.random(n_segments) < 0.5
    loop_S = rng.integers(3, 7, n_segments)
    length_S = loop_S + np.where(is_helix_S, rng.integers(8, 17, n_segments), rng.integers(4, 9, n_segments))
    length_S = np.diff(np.minimum(length_S.cumsum(), n_residues), prepend=0)
    length_S = length_S[length_S > 0]
    shape = (len(length_S), CANDIDATES, length_S.max(), 2)
    loop_SKL2 = rng.choice(LOOPS, size=shape[:3], p=LOOP_SHARES) + rng.normal(0, 12, shape)
    ideal_S2 = np.where(is_helix_S[: len(length_S), None], HELIX, STRAND)
    regular_SKL2 = ideal_S2[:, None, None] + rng.normal(0, 4, (shape[0], 1, *shape[2:]))
    in_loop_SL = np.arange(shape[2]) < loop_S[: len(length_S), None]
    return np.radians(np.where(in_loop_SL[:, None, :, None], loop_SKL2, regular_SKL2)), length_S


def _pack(torsion_SKL2: Floats, length_S: NDArray[np.int64]) -> list[_Placement]:
    """Join the segments one by one, the best candidate first; where none fits, go back to the next best before."""
    frame_SKL44 = _frames(torsion_SKL2)
    placed: list[_Placement] = []
    waiting: list[list[_Placement]] = []  # what else would have fitted at every step, the best last
    tries = 0
    while len(placed) < len(length_S):
        segment, tries = len(placed), tries + 1
        length = length_S[segment]
        candidates = frame_SKL44[segment, :, : length + 1], torsion_SKL2[segment, :, :length]
        fits = _fitting(*candidates, placed, at_any_rate=tries > 10 * len(length_S))
        while not fits and waiting:
            placed.pop()
            fits = waiting.pop()
        if fits:
            placed.append(fits.pop())
            waiting.append(fits)
    return placed


def _fitting(
    frame_KL44: Floats, torsion_KL2: Floats, placed: list[_Placement], *, at_any_rate: bool
) -> list[_Placement]:
    """Return the candidates that meet nothing, the one nearest to the centre of the rest last."""
    earlier_R3 = np.concatenate([np.empty((0, 3)), *(placement.frame_L44[:-1, :3, 3] for placement in placed)])
    frame_KL44 = (placed[-1].frame_L44[-1] if placed else np.eye(4)) @ frame_KL44
    ca_KL3 = frame_KL44[:, :-1, :3, 3]
    clearance_K = np.minimum(_clearance(ca_KL3, earlier_R3), APART_CA)
    centre = earlier_R3.mean(axis=0) if placed else np.zeros(3)
    spread_K = ((ca_KL3 - centre) ** 2).sum(axis=2).mean(axis=1)
    order = np.lexsort((-spread_K, clearance_K))
    if placed and not at_any_rate:
        order = order[clearance_K[order] >= APART_CA]
    return [_Placement(frame_KL44[k], torsion_KL2[k]) for k in order]


def _clearance(ca_KL3: Floats, earlier_R3: Floats) -> Floats:
    """Return each candidate's smallest distance to itself and to the chain so far, three or more residues away."""
    n_candidates, length, _ = ca_KL3.shape
    first, second = _distinct_pairs(length, 3)
    apart = ca_KL3[:, first] - ca_KL3[:, second]
    within = np.sqrt(np.einsum("kpx,kpx->kp", apart, apart).min(axis=1, initial=np.inf))
    distance = cdist(ca_KL3.reshape(-1, 3), earlier_R3).reshape(n_candidates, length, -1)
    distance[:, 0, -2:] = distance[:, 1:2, -1:] = np.inf
    clearance_K: Floats = np.minimum(within, distance.min(axis=(1, 2), initial=np.inf))
    return clearance_K


def _frames(torsion_SKL2: Floats) -> Floats:
    """Return the frame of every residue, and of the one after the last, relative to the first of its segment."""
    phi, psi = torsion_SKL2[..., 0], torsion_SKL2[..., 1]
    motion_SKL44 = _step(CA_C, phi) @ _step(C_N, psi) @ _step(N_CA, np.array(np.pi))
    frames = [np.broadcast_to(np.eye(4), motion_SKL44[:, :, 0].shape)]
    for position in range(motion_SKL44.shape[2]):
        frames.append(frames[-1] @ motion_SKL44[:, :, position])
    return np.stack(frames, axis=2)


def _step(bond: tuple[float, float], torsion: Floats) -> Floats:
    """Return the motion from one atom's frame to the next: turn about the bond, bend, and go along (NeRF)."""
    length, bend = bond[0], np.pi - np.radians(bond[1])
    motion = np.zeros((*torsion.shape, 4, 4))
    motion[..., 0, 0], motion[..., 0, 1] = np.cos(bend), -np.sin(bend)
    motion[..., 1, 0] = np.sin(bend) * np.cos(torsion)
    motion[..., 2, 0] = np.sin(bend) * np.sin(torsion)
    motion[..., 1, 1], motion[..., 1, 2] = np.cos(bend) * np.cos(torsion), -np.sin(torsion)
    motion[..., 2, 1], motion[..., 2, 2] = np.cos(bend) * np.sin(torsion), np.cos(torsion)
    motion[..., :3, 3] = length * motion[..., :3, 0]
    motion[..., 3, 3] = 1
    return motion


def _residue_atoms(torsion_R2: Floats) -> Floats:
    """Return N, CA, C, O and CB of every residue in its own frame."""
    phi_R, psi_R = torsion_R2.T
    c_R44 = _step(CA_C, phi_R)
    c_R3 = c_R44[:, :3, 3]
    o_R3 = (c_R44 @ _step(C_O, psi_R + np.pi))[:, :3, 3]
    ca_R3 = np.zeros_like(c_R3)
    n_R3 = ca_R3 - (N_CA[0], 0, 0)
    cb_R3 = np.stack([-n_R3, np.cross(-n_R3, c_R3), c_R3], axis=-1) @ CB_WEIGHTS
    return np.stack([n_R3, ca_R3, c_R3, o_R3, cb_R3], axis=1)


def _contacts(lower_R3: Floats, upper_R3: Floats) -> int:
    """Count the CA pairs within reach once the upper partner is let down onto the lower one."""
    lifted_R3 = upper_R3 + np.array([0, 0, _lift(lower_R3, upper_R3, TOUCH_CA)])
    return int(cKDTree(lower_R3).count_neighbors(cKDTree(lifted_R3), CONTACT_CA))


def _lift(lower_A3: Floats, upper_A3: Floats, touch: float) -> float:
    """Return how far to move the upper atoms along z so that the nearest pair is `touch` apart, and no other nearer.

    Only pairs nearer than `touch` in the plane can meet; each allows no less than its own distance along z.
    """
    pairs = cKDTree(lower_A3[:, :2]).sparse_distance_matrix(cKDTree(upper_A3[:, :2]), touch, output_type="ndarray")
    height = lower_A3[pairs["i"], 2] - upper_A3[pairs["j"], 2]
    needed = height + np.sqrt(touch**2 - pairs["v"] ** 2)
    return float(needed.max()) if len(needed) else 0.0
