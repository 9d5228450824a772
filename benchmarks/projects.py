"""Synthetic data that several scripts measure on: projects of many small complexes, and a warm cache for training."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.measure import pipeline, run
from pipeline.structures.synthetic import Fold, complex_pdb, dock, draw_sequence, fold_chain, to_pdb

if TYPE_CHECKING:
    from pipeline.graphs.item_graph import ItemGraph

SHAPES = 128  # pairs of partners in space; each complex has one of them, and sequences of its own
RESIDUES, SMALL = (30, 60), (10, 16)  # of a partner, from and to
PER_FOLDER = 1000
VALIDATED = 32  # complexes in split `val`
STRUCTURES = 100  # different graphs of a warm cache
WIDTH = 1280  # of its embeddings, fp16
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
LOCAL = "cluster: {executor: local, runs: runs}\n"
SLURM = "cluster: {executor: slurm, runs: runs, scan: {parallel: 3}, graph: {parallel: 3}, train: {time: 6h}}\n"


# ---- projects of many small complexes ----


@cache
def shape(number: int, residues: tuple[int, int]) -> tuple[Fold, Fold]:
    """Return two partners that touch; folding and docking is most of the work."""
    rng = np.random.default_rng(number)
    lengths = rng.integers(*residues, 2, endpoint=True).tolist()
    return dock(rng, *(fold_chain(draw_sequence(rng, length)) for length in lengths))


def complex_of(number: int, residues: tuple[int, int] = RESIDUES) -> bytes:
    """Return a complex as PDB; no two numbers share a sequence."""
    rng = np.random.default_rng(1_000_000 + number)
    partners = (Fold(_like(fold.sequence, rng), fold.pos_R53) for fold in shape(number % SHAPES, residues))
    return to_pdb(dict(zip("AB", partners, strict=True)))


def _like(sequence: str, rng: np.random.Generator) -> str:
    """Return another sequence with the same backbone and CB atoms, so that the partners still touch."""
    drawn = draw_sequence(rng, len(sequence)).replace("G", "A")
    return "".join("G" if old == "G" else new for old, new in zip(sequence, drawn, strict=True))


def name_of(number: int) -> str:
    """Return the path of a complex below the data folder."""
    return f"structures/{number // PER_FOLDER:04d}/c{number:07d}.pdb"


def write_complex(data: Path, residues: tuple[int, int], number: int) -> None:
    """Write one complex."""
    (data / name_of(number)).write_bytes(complex_of(number, residues))


def make_project(
    folder: Path, complexes: int, residues: tuple[int, int] = RESIDUES, cluster: str = LOCAL, trained: int | None = None
) -> Path:
    """Write a project of that many complexes, of which `trained` (default: all but a few) are in split train."""
    data = folder / "data"
    for number in range(0, complexes, PER_FOLDER):
        (data / name_of(number)).parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(2) as pool:
        list(pool.map(partial(write_complex, data, residues), range(complexes), chunksize=200))
    with (data / "manifest.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("id", "path", "receptor_chains", "ligand_chains", "split"))
        validated = min(VALIDATED, complexes // 4)
        for number in range(complexes):
            later = trained is not None and number >= validated + trained
            split = "val" if number < validated else "later" if later else "train"
            writer.writerow((f"c{number:07d}", name_of(number), "A", "B", split))
    (folder / "pipeline.yaml").write_text(CONFIG + cluster)
    sizes = ("--layers", "2", "--dim", "32", "--heads", "4")
    run(pipeline("weights", "synth", *sizes, "--out", "weights/esm2_tiny.pt"), folder)
    return folder


# ---- a warm cache of graphs and wide embeddings, as a training reads it ----


def encoder() -> Any:
    """Return the recipe of the cache's embeddings."""
    from pipeline.encoder.embedding_recipe import EmbeddingRecipe

    return EmbeddingRecipe(weights="synthetic", layer=33, context="chain", precision="fp16", storage="fp16")


def graph_of(number: int) -> ItemGraph:
    """Return the graph of a synthetic complex of realistic size."""
    from pipeline.graphs.item_graph import GraphRecipe
    from pipeline.graphs.make_graphs import build_graph
    from pipeline.keys import content_digest
    from pipeline.records import Item, Part, Role
    from pipeline.structures import inventory
    from pipeline.structures.parsing.structure_files import File

    rng = np.random.default_rng(number)
    receptor, ligand = (np.clip(rng.lognormal(mean, 0.5), 30, 1000) for mean in (5.6, 5.0))
    data = complex_pdb(number, int(receptor), int(ligand))
    item = Item("x", parts=(Part(Role.COMPLEX, "x.pdb"),))
    files = {"x.pdb": File(data, content_digest(data).hex())}
    examined, read = inventory.examine_item(item, files, inventory.ScanRecipe())
    assert read is not None, examined
    return build_graph(read, GraphRecipe())


def varied(graph: ItemGraph, number: int, *, own_sequences: bool) -> ItemGraph:
    """Return a graph with other coordinates, and with other sequences if they are to be its own."""
    rng, parts = np.random.default_rng(number), []
    for part in graph.parts:
        noise = rng.normal(0, 0.1, part.nodes["pos"].shape).astype(np.float32)
        chains = part.chains
        if own_sequences:
            chains = tuple(replace(chain, sequence="".join(rng.permutation(list(chain.sequence)))) for chain in chains)
        parts.append(replace(part, nodes={**part.nodes, "pos": part.nodes["pos"] + noise}, chains=chains))
    return replace(graph, parts=tuple(parts))


def fill_cache(root: Path, items: int, own_sequences: int) -> bytes:
    """Fill a cache; the first items have sequences, so embeddings, of their own. Return the key of its table."""
    from pipeline.encoder.embedding_recipe import Variant
    from pipeline.graphs.item_graph import GraphRecipe, encode_graph
    from pipeline.keys import recipe_key
    from pipeline.store.cache_folder import CacheFolder
    from pipeline.training.items.item_table import TableBuilder

    stores, builder, texts = CacheFolder(root), TableBuilder(), {}
    graphs = [graph_of(number) for number in range(min(STRUCTURES, items))]
    with stores.kind("graph").writer() as writer:
        for number in range(items):
            graph = varied(graphs[number % len(graphs)], number, own_sequences=number < own_sequences)
            key = GraphRecipe().key(recipe_key("synthetic", {"number": number}))
            writer.put(key, *encode_graph(graph))
            builder.add(f"item{number:06d}", key, "train", graph.sizes())
            texts |= {text: None for part in graph.parts for text in part.texts}
    rows_LD = np.random.default_rng(0).normal(size=(2000, WIDTH)).astype(np.float16)
    with stores.kind("embed").writer() as writer:
        for number, text in enumerate(texts):
            rows = np.roll(rows_LD, number, axis=0)[: len(text)]
            writer.put(encoder().key(text, Variant("fp16")), {"rows": rows}, {"text": text})
    for kind in ("graph", "embed"):
        stores.kind(kind).write_index()
    return builder.write(stores.kind("sets"))


def table_of(root: Path, key: bytes) -> Any:
    """Return the table of a cache's items."""
    from pipeline.store.cache_folder import CacheFolder
    from pipeline.training.items.item_table import ItemTable

    return ItemTable.read(CacheFolder(root).kind("sets"), key)


def loader_of(root: Path, key: bytes, numbers: Sequence[int] | None = None, batch: int = 16, **more: Any) -> Any:
    """Return the loader of a cache, or of some of its items in order."""
    from pipeline.store.cache_folder import CacheFolder
    from pipeline.training.items.item_source import CachedGraphs
    from pipeline.training.items.loader import Loader
    from pipeline.training.items.residue_embeddings import Embeddings
    from pipeline.training.sampling import Sampler, SamplerSettings

    stores, table = CacheFolder(root), table_of(root, key)
    if numbers is not None:
        table = table.take(np.array(numbers))
    sampler = Sampler(table.sizes, SamplerSettings(batch=batch, padding=None))
    embeddings = Embeddings(stores.kind("embed"), (encoder(), WIDTH))
    return Loader(CachedGraphs(stores.kind("graph"), table), embeddings, sampler, **more)
