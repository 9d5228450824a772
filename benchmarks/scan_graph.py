"""Scan and graph of real complexes, the whole command, against gemmi, biotite and Biopython vectorised by hand.

    python benchmarks/scan_graph.py [--files 207] [--rounds 3] [--save]

Files are copies of the real complexes, the first atom's B-factor changed, so that no two have the same bytes. Ours is
`pipeline submit graph --follow` into an empty cache: it digests, judges and writes. The peers are one process
that reads the same files with gemmi, biotite or Biopython, and makes the same arrays (N, CA, C, CB, side chains, types,
20 nearest neighbours, native contacts) without any loop over residues but Biopython's own. They write nothing. biotite
reads with its own `PDBFile`, and, where the package fastpdb is installed, with that one. Before anything is timed, the
arrays of both sides are compared. What a further file costs comes from two numbers of files.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from numpy.typing import NDArray

from benchmarks.measure import (
    Cost,
    Row,
    Spread,
    by_turns,
    cpu,
    itself,
    options,
    pipeline,
    publish,
    run,
    structures,
)

Array = NDArray[Any]
NEIGHBOURS, CONTACT = 20, 5.0
BACKBONE, CB, MAIN_CHAIN = ("N", "CA", "C"), "CB", ("N", "CA", "C", "O", "OXT")
CB_WEIGHTS = (0.56802827, -0.58273431, -0.54067466)
THREE = "ALA CYS ASP GLU PHE GLY HIS ILE LYS LEU MET ASN PRO GLN ARG SER THR VAL TRP TYR".split()  # noqa: SIM905
TIE = 1e-4  # Å; float32 cannot tell such neighbours apart
MORE, FEWER = 3, 0.2  # times the files, from which the cost of a further one is found; fewer for slow readers
FASTER = {"biotite": 5.5, "biopython": 11}  # times as fast as each, at least
ONE_TASK = "--set=cluster.scan.items_per_task=1000000"
CONFIG = f"""\
data: {{source: glob, path: data}}
graph: {{neighbours: {NEIGHBOURS}, contacts: {CONTACT}}}
cluster: {{executor: local}}
"""


# ---- the peers ----


@dataclass(frozen=True)
class Atoms:
    """The heavy atoms of the amino acids of a file, names as the parser has them."""

    pos_A3: Array
    name_A: Array
    resname_A: Array
    chain_A: Array
    number_A: Array
    icode_A: Array

    def take(self, chosen: Array) -> Atoms:
        """Return some of the atoms."""
        return Atoms(*(column[chosen] for column in vars(self).values()))


def by_gemmi(path: Path) -> Atoms:
    """Read with gemmi, and view its flat columns; names become numbers, which compare fastest."""
    import gemmi

    def words(names: Any) -> Array:
        return np.ascontiguousarray(names).view("<u8")[:, 0]

    flat = gemmi.FlatStructure(gemmi.read_pdb(str(path)))
    atoms = Atoms(
        flat.pos, words(flat.atom_names), words(flat.residue_names), words(flat.chain_ids), flat.resnums, flat.icodes
    )
    return atoms.take((flat.elements != 1) & (flat.het_flags == ord("A")))


def by_biopython(path: Path) -> Atoms:
    """Read with Biopython, and gather its atoms."""
    from Bio.PDB import PDBParser

    rows = [
        (atom.coord, atom.name, residue.resname, chain.id, residue.id[1], residue.id[2])
        for chain in PDBParser(QUIET=True).get_structure("x", str(path))[0]
        for residue in chain
        if residue.id[0] == " "
        for atom in residue
        if atom.element not in ("H", "D")
    ]
    return Atoms(*(np.array(column) for column in zip(*rows, strict=True)))


def by_biotite(path: Path, package: str = "biotite.structure.io.pdb") -> Atoms:
    """Read with biotite, and make numbers of names, as they are compared fastest."""
    array = import_module(package).PDBFile.read(str(path)).get_structure(model=1)
    array = array[~array.hetero & (array.element != "H") & (array.element != "D")]

    def words(names: Any) -> Array:
        return names.astype("S8").view("<u8")

    names = words(array.atom_name), words(array.res_name), words(array.chain_id)
    return Atoms(array.coord, *names, array.res_id, array.ins_code)


PEERS = {"gemmi": by_gemmi, "biotite": by_biotite, "biopython": by_biopython}
if find_spec("fastpdb"):
    PEERS["fastpdb"] = partial(by_biotite, package="fastpdb")


@dataclass(frozen=True)
class ByHand:
    """The graph of two chains."""

    pos_4N3: list[Array]
    side_N3: list[Array]
    type_N: list[Array]
    edges_2E: list[Array]
    contact_P2: Array
    contact_atoms_P: Array


def graph_of(atoms: Atoms) -> ByHand:
    """Return the graph of the first two chains."""

    def like(name: str, column: Array) -> Any:
        return int.from_bytes(name.encode(), "little") if column.dtype.kind == "u" else name

    changes_A = np.ones(len(atoms.name_A), np.bool_)
    changes_A[1:] = atoms.number_A[1:] != atoms.number_A[:-1]
    for column in (atoms.chain_A, atoms.icode_A):
        changes_A[1:] |= column[1:] != column[:-1]
    residue_A, first_R = np.cumsum(changes_A) - 1, np.flatnonzero(changes_A)
    place_4R = np.full((4, len(first_R)), -1)
    for row, name in enumerate((*BACKBONE, CB)):
        rows = np.flatnonzero(atoms.name_A == like(name, atoms.name_A))
        place_4R[row, residue_A[rows]] = rows
    whole_R = (place_4R[:3] >= 0).all(axis=0)
    if not whole_R.all():  # which is rare
        return graph_of(atoms.take(whole_R[residue_A]))
    pos_4R3 = atoms.pos_A3[place_4R]
    absent = np.flatnonzero(place_4R[3] < 0)
    forth, onwards = pos_4R3[1, absent] - pos_4R3[0, absent], pos_4R3[2, absent] - pos_4R3[1, absent]
    weights = zip(CB_WEIGHTS, (forth, np.cross(forth, onwards), onwards), strict=True)
    pos_4R3[3, absent] = pos_4R3[1, absent] + sum(weight * vector for weight, vector in weights)
    side_A = ~np.isin(atoms.name_A, [like(name, atoms.name_A) for name in MAIN_CHAIN])
    count_R = np.bincount(residue_A[side_A], minlength=len(first_R))
    side_R3 = np.stack([np.bincount(residue_A[side_A], x, len(first_R)) for x in atoms.pos_A3[side_A].T], axis=1)
    side_R3 = np.where(count_R[:, None] > 0, side_R3 / np.maximum(count_R, 1)[:, None], pos_4R3[3]) - pos_4R3[1]
    letters = np.array([like(name, atoms.resname_A) for name in THREE])
    order = np.argsort(letters)
    type_R = order[np.searchsorted(letters, atoms.resname_A[first_R], sorter=order).clip(max=len(order) - 1)]
    chain_R = atoms.chain_A[first_R]
    border = int(np.flatnonzero(chain_R != chain_R[0])[0])
    halves = (slice(0, border), slice(border, len(first_R)))
    return ByHand(
        [pos_4R3[:, half] for half in halves],
        [side_R3[half] for half in halves],
        [type_R[half] for half in halves],
        [nearest(pos_4R3[1, half]) for half in halves],
        *contacts(atoms.pos_A3, residue_A, int(first_R[border]), border),
    )


def nearest(ca_N3: Array) -> Array:
    """Return neighbour and node of each edge."""
    from scipy.spatial import cKDTree

    count = min(NEIGHBOURS, len(ca_N3) - 1)
    _, source_NK = cKDTree(ca_N3).query(ca_N3, count + 1)
    return np.stack([np.sort(source_NK[:, 1:], axis=1).ravel(), np.repeat(np.arange(len(ca_N3)), count)])


def contacts(pos_A3: Array, residue_A: Array, first: int, border: int) -> tuple[Array, Array]:
    """Return the pairs of residues with atoms within reach, and how many atoms."""
    from scipy.spatial import cKDTree

    trees = cKDTree(pos_A3[:first]), cKDTree(pos_A3[first:])
    pairs = trees[0].sparse_distance_matrix(trees[1], CONTACT, output_type="ndarray")
    key_E = residue_A[pairs["i"]] * len(residue_A) + residue_A[first + pairs["j"]] - border
    key_P, count_P = np.unique(key_E, return_counts=True)
    return np.stack(np.divmod(key_P, len(residue_A)), axis=1), count_P


def peer(name: str, folder: str, files: str) -> None:
    """Make the arrays of some files, as a script of a user would."""
    warnings.simplefilter("ignore")
    made = [graph_of(PEERS[name](path)) for path in sorted(Path(folder).glob("*.pdb"))[: int(files)]]
    assert len(made) == int(files)
    print(sum(len(graph.contact_P2) for graph in made))


# ---- both sides agree ----


def check_equal(path: Path, read: Callable[[Path], Atoms]) -> None:
    """Stop unless a peer has our nodes, neighbours and native contacts."""
    from pipeline.graphs.item_graph import GraphRecipe
    from pipeline.graphs.residue_graph import build_residue_graph
    from pipeline.records import Item, Part, Role
    from pipeline.structures.inventory import ScanRecipe, examine_item
    from pipeline.structures.parsing.structure_files import plain_files

    item = Item(path.stem, parts=(Part(Role.COMPLEX, str(path)),))
    inventory, complex_read = examine_item(item, plain_files(512 << 20).of(item), ScanRecipe())
    assert complex_read is not None, inventory
    ours, theirs = build_residue_graph(complex_read, GraphRecipe(neighbours=NEIGHBOURS)), graph_of(read(path))
    for at, part in enumerate(ours.parts):
        pos_N43 = theirs.pos_4N3[at].transpose(1, 0, 2) - part.centre_3
        np.testing.assert_allclose(part.nodes["pos"], pos_N43, atol=2e-3, err_msg=path.name)
        np.testing.assert_allclose(part.nodes["side"], theirs.side_N3[at], atol=2e-3, err_msg=path.name)
        np.testing.assert_array_equal(part.nodes["type"], theirs.type_N[at], err_msg=path.name)
        edges, size, ca_N3 = part.edges["near"], part.size, pos_N43[:, 1].astype(np.float64)
        source, node = theirs.edges_2E[at]
        odd = np.setxor1d(edges[1] * size + edges[0], node * size + source)
        apart = np.linalg.norm(ca_N3[odd // size] - ca_N3[odd % size], axis=1)
        for one in np.unique(odd // size):
            assert np.ptp(apart[odd // size == one]) < TIE, f"{path.name}: the neighbours of node {one} differ"
    np.testing.assert_array_equal(ours.labels["contact_pairs"], theirs.contact_P2, err_msg=path.name)
    np.testing.assert_array_equal(ours.labels["contact_atoms"], theirs.contact_atoms_P, err_msg=path.name)


# ---- what is timed ----


def ours(scratch: Path, files: int, *more: str) -> Cost:
    """Run the command in a project of that many files, from nothing; return what it took."""
    folder = scratch / f"project-{files}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "data").symlink_to(scratch / f"data-{files}")
    (folder / "pipeline.yaml").write_text(CONFIG)
    return run(pipeline("submit", "--stage", "graph", "--follow", *more), folder)


def another(text: bytes, number: int) -> bytes:
    """Return a file whose first atom has another B-factor, so that its bytes are its own."""
    first = text.index(b"ATOM  ")
    return text[: first + 60] + b"%6.2f" % (number / 100) + text[first + 66 :]


def graph_bytes(folder: Path, files: int) -> float:
    """Return the bytes of a graph in the cache; see that every file has one."""
    from pipeline.store.cache_folder import CacheFolder

    assert sum(1 for _ in CacheFolder(folder / "cache").kind("graph").keys()) == files  # noqa: SIM118 - it is no dict
    return sum(path.stat().st_size for path in (folder / "cache/graph/shards").iterdir()) / files


def main() -> int:
    """Compare, time by turns, and print the ratios."""
    typed = options(str(__doc__), 3, files={"type": int, "default": 207, "help": "files (default: 207)"})
    if typed.part:
        peer(*typed.part)
        return 0
    real = structures()
    for path in real:
        for read in PEERS.values():
            check_equal(path, read)
    with tempfile.TemporaryDirectory() as name:
        scratch, files = Path(name), typed.files
        sizes = {
            "ours": (files, MORE * files),
            **dict.fromkeys(PEERS, (int(FEWER * files), files)),
            "gemmi": (files, MORE * files),
        }
        for count in {count for pair in sizes.values() for count in pair}:
            data = scratch / f"data-{count}"
            data.mkdir()
            for number in range(count):
                (data / f"c{number:04d}.pdb").write_bytes(another(real[number % len(real)].read_bytes(), number))
        ways: dict[str, Callable[[], Cost]] = {"command": partial(ours, scratch, files)}
        for side, counts in sizes.items():
            for count in counts:
                peers = itself(__file__, "--part", side, scratch / f"data-{count}", str(count))
                one_task = partial(ours, scratch, count, ONE_TASK)
                ways[f"{side} {count}"] = one_task if side == "ours" else partial(run, peers)
        spent = {name: cpu(costs) for name, costs in by_turns(ways, typed.rounds, warm=False).items()}
        bytes_each = graph_bytes(scratch / f"project-{files}", files)
    further = {
        side: [
            (large - small) / (more - few)
            for small, large in zip(spent[f"{side} {few}"], spent[f"{side} {more}"], strict=True)
        ]
        for side, (few, more) in sizes.items()
    }
    whole = Spread.ratio(spent["command"], spent[f"gemmi {typed.files}"])
    each = Spread.ratio(further["ours"], further["gemmi"])
    slow = {side: Spread.ratio(further[side], further["ours"]) for side in PEERS if side != "gemmi"}
    is_reached = each.median <= 1.0 and all(slow[side].median >= least for side, least in FASTER.items())
    ours_ms = 1e3 * Spread.of(further["ours"]).median
    what = f"`submit graph` of {typed.files} files ({len(real)} real ones, repeated)"
    by_hand = "gemmi, numpy, scipy vectorised by hand"
    checks = "ours also digests, judges and writes"
    tasks = "two thirds of it are the start of the command and of its task"
    rows = [
        Row("scan_graph", f"{what}, CPU time of the process tree", f"{by_hand}; writes nothing", "≤ 1.4×",
            f"{whole:.2f×}", "scan_graph.py", reason(whole.median <= 1.4, tasks)),
        Row("scan_graph_file", f"each further file, scan in one task: {ours_ms:.1f} ms; its graph in the cache",
            f"the same; {', '.join(slow)}; the original's pickles, 598 kB",
            f"≤ 1.0×; ≥ {', '.join(f'{least}×' for least in FASTER.values())} faster; ≤ 80 kB",
            f"{each:.2f×}; {', '.join(f'{ratio:.1f×}' for ratio in slow.values())}; {bytes_each / 1e3:.1f} kB",
            "scan_graph.py", reason(is_reached and bytes_each <= 80e3, checks)),
    ]  # fmt: skip
    return publish(rows, save=typed.save)


def reason(reached: bool, why: str) -> str:  # noqa: FBT001 - it reads well
    """Return why a figure was missed; nothing where it was reached."""
    return "" if reached else f"Missed: {why}."


if __name__ == "__main__":
    sys.exit(main())
