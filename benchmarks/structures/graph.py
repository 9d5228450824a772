"""Scan and graph against Biopython, kNN and edge features: complexes per second and core, real PDB files, in one run.

    python benchmarks/structures/graph.py [FOLDER] [--runs N] [--out FILE]

Both sides read each file from disk and end with the residue graph of each partner, k = 20; that the edges are the same
is checked before anything is timed. Ours also digests the bytes, makes the inventory, finds the native contacts, and
writes the graph to a cache with its writer. By Biopython there are two: `original` goes the way of DiffDock-PP (a
tensor per atom, local frames residue by residue), `vectorised` that of somebody who cares (one array per chain, loops
only where Biopython has no other way). Both then make the edge features of EquiDock, vectorised: distances in
Gaussians, and the neighbour in the local frame. Two more are vectorised by hand over gemmi and biotite (`by_hand.py`):
they find the same neighbours and native contacts, which is checked too, and need not digest, judge or write anything.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.circumstances import write
from benchmarks.structures.by_hand import HandMade, by_biotite, by_gemmi
from pipeline.graphs import residue_graph
from pipeline.graphs.item_graph import GraphRecipe as GraphRecipe
from pipeline.graphs.item_graph import ItemGraph, decode_graph, encode_graph
from pipeline.keys import content_digest, recipe_key
from pipeline.records import Item, Part, Role
from pipeline.stages.graph import open_writer
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.writer import StoreWriter
from pipeline.structures.inventory import Complex, ScanRecipe, examine_item
from pipeline.structures.parsing.read_structure import FileReading, parse_structure
from pipeline.structures.parsing.structure_files import File, plain_files, read_file
from pipeline.structures.policy import Policy, apply_policy

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared" / "structures" / "complexes"
LIMIT = 512 << 20
REACH, REACH_BY_HAND = 25.0, 1.5
NEIGHBOURS, GAUSSIANS, FARTHEST = 20, 16, 20.0
LEAST = 0.5  # seconds that a side is measured at least
TIE = 1e-4  # Å; float32 cannot tell such neighbours apart
RECIPE = GraphRecipe(neighbours=NEIGHBOURS)


def biopython(path: Path) -> Any:
    from Bio.PDB import PDBParser

    return PDBParser(QUIET=True).get_structure("x", str(path))[0]


def original(path: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return edges and edge features of each chain as the original comes to them."""
    found = {}
    for chain in biopython(path):
        names, positions = [], []
        for one in chain:
            if one.id[0] != " ":
                continue
            for atom in one:
                positions.append(torch.from_numpy(atom.get_coord()))
                names.append((atom.get_name(), atom.element))
        pos_A3 = torch.stack(positions, dim=0)
        n_N3, ca_N3, c_N3 = (
            torch.stack([pos_A3[at] for at in backbone]) for backbone in zip(*_backbones(names), strict=True)
        )
        frames = []
        for n, ca, c in zip(n_N3, ca_N3, c_N3, strict=True):
            u = (n - ca) / torch.linalg.vector_norm(n - ca)
            t = (c - ca) / torch.linalg.vector_norm(c - ca)
            normal = torch.linalg.cross(u, t)
            normal = normal / torch.linalg.vector_norm(normal)
            frames.append(torch.stack([normal, u, torch.linalg.cross(normal, u)]))
        found[chain.id] = features(ca_N3, torch.stack(frames))
    return found


def _backbones(names: list[tuple[str, str]]) -> Iterator[tuple[int, int, int]]:
    """Yield the places of N, CA and C of each residue that has them; they follow one another."""
    n = ca = -1
    for at, (name, _) in enumerate(names):
        if name == "N":
            n, ca = at, -1
        elif name == "CA" and n >= 0:
            ca = at
        elif name == "C" and n >= 0 and ca >= 0:
            yield n, ca, at
            n = -1


def vectorised(path: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return edges and edge features of each chain with no loop but over residues of Biopython's."""
    found = {}
    for chain in biopython(path):
        rows = []
        for one in chain:
            if one.id[0] == " " and "N" in one and "CA" in one and "C" in one:
                n, ca, c = one["N"].coord, one["CA"].coord, one["C"].coord
                rows.append((n, ca, c, one["CB"].coord if "CB" in one else ca))
        pos_N43 = torch.from_numpy(np.array(rows))
        n_N3, ca_N3, c_N3, _ = pos_N43.unbind(1)
        u_N3 = torch.nn.functional.normalize(n_N3 - ca_N3, dim=1)
        t_N3 = torch.nn.functional.normalize(c_N3 - ca_N3, dim=1)
        normal_N3 = torch.nn.functional.normalize(torch.linalg.cross(u_N3, t_N3), dim=1)
        frames_N33 = torch.stack([normal_N3, u_N3, torch.linalg.cross(normal_N3, u_N3)], dim=1)
        found[chain.id] = features(ca_N3, frames_N33)
    return found


def features(ca_N3: torch.Tensor, frames_N33: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the nearest neighbours and what EquiDock says of each edge."""
    apart_NN = torch.cdist(ca_N3, ca_N3, compute_mode="donot_use_mm_for_euclid_dist").fill_diagonal_(torch.inf)
    nearest = min(NEIGHBOURS, len(ca_N3) - 1)
    apart_NK, source_NK = apart_NN.topk(nearest, largest=False)
    source_E, apart_E = source_NK.flatten(), apart_NK.flatten()
    node_E = torch.arange(len(ca_N3)).repeat_interleave(nearest)
    centres_G = torch.linspace(0, FARTHEST, GAUSSIANS)
    gaussians_EG = torch.exp(-(((apart_E[:, None] - centres_G) / (FARTHEST / GAUSSIANS)) ** 2))
    frame_E33 = frames_N33[node_E]
    place_E3 = torch.einsum("eij,ej->ei", frame_E33, ca_N3[source_E] - ca_N3[node_E])
    turned_E33 = torch.einsum("eij,ekj->eki", frame_E33, frames_N33[source_E])
    return torch.stack([source_E, node_E]), torch.cat([gaussians_EG, place_E3, turned_E33.flatten(1)], dim=1)


def scanned(path: Path) -> Complex:
    """Do what the scan does with a file."""
    item = Item(path.stem, parts=(Part(Role.COMPLEX, str(path)),))
    inventory, read = examine_item(item, plain_files(LIMIT).of(item), ScanRecipe())
    assert read is not None, inventory
    return read


def check_equal(path: Path) -> None:
    """Stop unless both sides find the same neighbours, but for what float32 cannot tell apart."""
    graph, theirs = residue_graph.build_residue_graph(scanned(path), RECIPE), original(path)
    also = vectorised(path)
    for part in graph.parts:
        edges, name = part.edges["near"], part.chains[0].name
        assert torch.equal(theirs[name][0], also[name][0]), f"{path.name}: the two baselines differ"
        size, ca_N3 = part.size, part.nodes["pos"][:, 1].astype(np.float64)
        source, node = theirs[name][0].numpy()
        odd = np.setxor1d(edges[1] * size + edges[0], node * size + source)
        apart = np.linalg.norm(ca_N3[odd // size] - ca_N3[odd % size], axis=1)
        for one in np.unique(odd // size):
            assert np.ptp(apart[odd // size == one]) < TIE, f"{path.name}: the neighbours of node {one} differ"


def check_by_hand(path: Path, theirs: HandMade, name: str) -> None:
    """Stop unless a graph made by hand has our nodes, neighbours and native contacts."""
    graph = residue_graph.build_residue_graph(scanned(path), RECIPE)
    for at, part in enumerate(graph.parts):
        ours, pos_N43 = part.nodes, theirs.pos_N43[at].transpose(1, 0, 2) - part.centre_3
        np.testing.assert_allclose(ours["pos"], pos_N43, atol=2e-3, err_msg=f"{path.name} {name}")
        np.testing.assert_allclose(ours["side"], theirs.side_N3[at], atol=2e-3, err_msg=f"{path.name} {name}")
        np.testing.assert_array_equal(ours["type"], theirs.type_N[at], err_msg=f"{path.name} {name}")
        edges, size, ca_N3 = part.edges["near"], part.size, pos_N43[:, 1].astype(np.float64)
        source, node = theirs.edges_2E[at]
        odd = np.setxor1d(edges[1] * size + edges[0], node * size + source)
        apart = np.linalg.norm(ca_N3[odd // size] - ca_N3[odd % size], axis=1)
        for one in np.unique(odd // size):
            assert np.ptp(apart[odd // size == one]) < TIE, f"{path.name}: {name} has other neighbours of node {one}"
    labels = graph.labels
    np.testing.assert_array_equal(labels["contact_pairs"], theirs.contact_P2, err_msg=f"{path.name} {name}")
    np.testing.assert_array_equal(labels["contact_atoms"], theirs.contact_atoms_P, err_msg=f"{path.name} {name}")
    np.testing.assert_allclose(labels["contact_nearest"], theirs.contact_nearest_P, atol=1e-4)


@contextmanager
def writer(folder: Path) -> Iterator[StoreWriter]:
    with open_writer(CacheFolder(folder).kind("graph"), 256 << 20) as one:
        yield one


def by_pipeline(writer: StoreWriter) -> Callable[[Path], None]:
    """Return what does a file as scan and graph do in one go; each time it is a new record."""
    numbers = count()

    def work(path: Path) -> None:
        graph = residue_graph.build_residue_graph(scanned(path), RECIPE)
        writer.put(recipe_key("benchmark", {"number": next(numbers)}), *encode_graph(graph))

    return work


def seconds(work: Callable[[Path], object], files: list[Path]) -> float:
    """Return the CPU seconds that this process spends on all files, once it has got into it.

    Both sides make and drop so much memory that the first files after the other side pay for its pages. The files are
    gone through until so much time is spent that a moment of another tenant does not decide: `LEAST` seconds.
    """
    for path in files:
        work(path)
    gc.collect()
    start, passes, spent = time.process_time(), 0, 0.0
    while spent < LEAST:
        for path in files:
            work(path)
        passes, spent = passes + 1, time.process_time() - start
    return spent / passes


def steps(files: list[Path], folder: Path, runs: int) -> dict[str, float]:
    """Return the milliseconds of each of our steps, medians over runs of their means over files."""
    rounds = []
    for number in range(runs):
        spent: dict[str, float] = {}
        with writer(folder) as one:
            for path in files:
                _steps_of(path, one, number, spent)
        rounds.append({name: 1000 * spent[name] / len(files) for name in spent})
    return {name: round(statistics.median(each[name] for each in rounds), 3) for name in rounds[0]}


def _steps_of(path: Path, writer: StoreWriter, number: int, spent: dict[str, float]) -> None:
    """Do one file step by step."""

    def timed(name: str, work: Callable[[], Any]) -> Any:
        start = time.process_time()
        result = work()
        spent[name] = spent.get(name, 0.0) + time.process_time() - start
        return result

    data = timed("read", lambda: read_file(path, LIMIT))
    digest = timed("digest", lambda: content_digest(data).hex())
    table = timed("parse", lambda: parse_structure(data, "pdb", FileReading()))
    timed("policy", lambda: apply_policy(table, Policy()))
    item = Item(path.stem, parts=(Part(Role.COMPLEX, str(path)),))
    _, read = timed("examine", lambda: examine_item(item, {str(path): File(data, digest)}, ScanRecipe()))
    graph = timed("build", lambda: residue_graph.build_residue_graph(read, RECIPE))
    timed(
        "build_without_contacts",
        lambda: residue_graph.build_residue_graph(read, GraphRecipe(neighbours=NEIGHBOURS, contacts=None)),
    )
    key = recipe_key("benchmark", {"path": str(path), "step": number})
    arrays, meta = timed("encode", lambda: encode_graph(graph))
    timed("put", lambda: writer.put(key, arrays, meta))
    timed("decode", lambda: decode_graph(arrays, meta))


def record_bytes(graphs: list[ItemGraph], folder: Path) -> list[int]:
    """Return the bytes that each graph takes in the cache."""
    store, sizes = CacheFolder(folder).kind("graph"), []
    for number, graph in enumerate(graphs):
        key = recipe_key("benchmark", {"size": number})
        with store.writer() as one:
            one.put(key, *encode_graph(graph))
        sizes.append(store.locate([key])[0][0].length)
    return sizes


def main() -> int:
    """Compare, time in turns, and say the median ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=SHARED)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    files = sorted(options.folder.glob("*.pdb"))
    if not files:
        print(f"no PDB files in {options.folder}: nothing was measured", file=sys.stderr)
        return 1
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for path in files:
        check_equal(path)
        for name, theirs in (("gemmi", by_gemmi), ("biotite", by_biotite)):
            check_by_hand(path, theirs(path, NEIGHBOURS), name)
    with tempfile.TemporaryDirectory() as name:
        result = measured(files, Path(name), options.runs)
    print(json.dumps(result))
    write(options.out, result)
    return 0


def measured(files: list[Path], folder: Path, runs: int) -> dict[str, Any]:
    """Return every figure."""
    others: dict[str, Callable[[Path], object]] = {
        "original": original,
        "vectorised": vectorised,
        "biopython_alone": biopython,
        "gemmi_by_hand": lambda path: by_gemmi(path, NEIGHBOURS),
        "biotite_by_hand": lambda path: by_biotite(path, NEIGHBOURS),
    }
    rounds: list[dict[str, tuple[float, float]]] = []  # ours, and right after it the other's
    for _ in range(runs):
        with writer(folder) as one:
            ours = by_pipeline(one)
            rounds.append({name: (seconds(ours, files), seconds(work, files)) for name, work in others.items()})
    spent = {"ours": [mine for row in rounds for mine, _ in row.values()]}
    spent |= {name: [row[name][1] for row in rounds] for name in others}
    medians = {name: 1000 * statistics.median(some) / len(files) for name, some in spent.items()}
    ratios = {name: [theirs / mine for mine, theirs in (row[name] for row in rounds)] for name in others}
    sizes = record_bytes([residue_graph.build_residue_graph(scanned(path), RECIPE) for path in files], folder)
    print(f"{len(files)} files, {runs} runs: the same edges, and by hand the same contacts")
    for name, each in medians.items():
        print(f"{name:16}{each:8.2f} ms a complex, {1000 / each:6.1f}/s/core")
    for name, some in ratios.items():
        print(f"ratio to {name}: {statistics.median(some):.1f}x (lowest {min(some):.1f}x)")
    print(f"to reach {REACH:.0f}x of original, {REACH_BY_HAND:.1f}x of gemmi_by_hand")
    return {
        "what": "scan and residue graph (k = 20, contacts, written) of real PDB complexes against Biopython, kNN and "
        "edge features, and against gemmi and biotite vectorised by hand, CPU time of one core",
        "files": len(files),
        "runs": runs,
        **{f"{name}_ms": round(each, 2) for name, each in medians.items()},
        "ratio_median": round(statistics.median(ratios["original"]), 1),
        "ratio_min": round(min(ratios["original"]), 1),
        **{
            f"ratio_{name}_{word}": round(function(ratios[name]), 2)
            for name in others
            if name not in ("original", "biopython_alone")
            for word, function in (("median", statistics.median), ("min", min))
        },
        "reach": REACH,
        "reach_by_hand": REACH_BY_HAND,
        "steps_ms": steps(files, folder, runs),
        "bytes_mean": round(statistics.mean(sizes)),
        "bytes_max": max(sizes),
    }


if __name__ == "__main__":
    sys.exit(main())
