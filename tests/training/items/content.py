"""Made graphs and embeddings in a cache, and the plainest sampler over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.encoder.embedding_recipe import EmbeddingRecipe, Variant
from pipeline.graphs.item_graph import ChainText, ItemGraph, PartnerGraph, encode_graph
from pipeline.keys import recipe_key
from pipeline.records import Kind, Role
from pipeline.store.cache_folder import CacheFolder
from pipeline.training.items.batch import ItemBatch, TaskBatch, item_rng
from pipeline.training.items.item_source import CachedGraphs
from pipeline.training.items.item_table import ItemTable, TableBuilder
from pipeline.training.items.loader import Loader
from pipeline.training.items.residue_embeddings import Embeddings
from pipeline.training.sampling import BatchOrigin, MicroBatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from pipeline.store.store import Store

WIDTH = 6
PRECISION = Variant("fp16")
ENCODER = EmbeddingRecipe(weights="w", layer=3, context="chain", precision="fp16", storage="fp16")
LETTERS = np.array(list("ACDEFGHIKLMNPQRSTVWY"))
PAIR, ALONE = (Role.RECEPTOR, Role.LIGAND), (Role.WHOLE,)


def edges_of(rng: np.random.Generator, heads: int, tails: int, count: int) -> np.ndarray:
    found = np.unique(np.stack([rng.integers(heads, size=count), rng.integers(tails, size=count)]), axis=1)
    return found[::-1].copy()


def part_of(rng: np.random.Generator, role: Role, *, rna: bool = False, atoms: bool = False) -> PartnerGraph:
    """A partner of two protein chains, some of whose letters have no residue, and perhaps a strand of RNA between."""
    kinds = [Kind.PROTEIN, *([Kind.RNA] if rna else []), Kind.PROTEIN]
    chains = [
        ChainText(name, kind, "".join(rng.choice(LETTERS, rng.integers(3, 12))) if kind is Kind.PROTEIN else "")
        for name, kind in zip("ABC", kinds, strict=False)
    ]
    rows, first = [], 0
    for chain in chains:
        there = np.flatnonzero(rng.random(len(chain.sequence)) < 0.9)
        rows.append(first + there if chain.kind is Kind.PROTEIN else np.full(4, -1))
        first += len(chain.sequence)
    row_R = np.concatenate(rows).astype(np.int32)
    residues = {"row": row_R, "chain": np.zeros(len(row_R), np.uint8)}
    count = 3 * len(row_R) if atoms else len(row_R)
    nodes: dict[str, Any] = {
        "pos": rng.normal(size=(count, 4, 3)).astype(np.float32),
        "type": rng.integers(21, size=count).astype(np.uint8),
    }
    if atoms:
        nodes["residue"] = np.repeat(np.arange(len(row_R)), 3).astype(np.uint16)
        paths = {"angle": rng.integers(count, size=(7, 3))}
    else:
        nodes |= residues
    return PartnerGraph(
        role=role,
        chains=tuple(chains),
        centre_3=rng.normal(size=3),
        nodes=nodes,
        edges={"near": edges_of(rng, count, count, 4 * count)},
        residues=residues if atoms else {},
        paths=paths if atoms else {},
    )


def graph_of(
    seed: int, roles: Sequence[Role] = PAIR, *, rna: bool = False, atoms: bool = False, bound: bool = False
) -> ItemGraph:
    rng = np.random.default_rng(seed)
    parts = tuple(part_of(rng, role, rna=rna and role is not Role.LIGAND, atoms=atoms) for role in roles)
    if len(parts) == 1:
        return ItemGraph(parts)
    receptor, ligand = parts
    pairs = np.stack([rng.integers(receptor.size, size=5), rng.integers(ligand.size, size=5)], axis=1)
    labels: dict[str, Any] = {
        "contact_pairs": pairs.astype(np.uint16),
        "contact_nearest": rng.random(5).astype(np.float32),
    }
    if bound:
        labels["bound_centre"] = rng.normal(size=3)
        for part in parts:
            part.nodes["labelled"] = rng.random(part.size) < 0.5
            part.nodes["bound"] = rng.normal(size=(part.size, 3)).astype(np.float32)
    return ItemGraph(parts, {"near": edges_of(rng, receptor.size, ligand.size, 9)}, labels)


@dataclass
class Micros:
    """Hands out lists of items as micro-batches, one to a step."""

    lists: Sequence[Sequence[int]]
    epoch: int = 0
    first: int = 0
    next: tuple[int, int] = (0, 0)

    def drawn(self) -> Iterator[MicroBatch]:
        epoch, first = self.next = self.epoch, self.first
        steps = range(first, len(self.lists))
        return (MicroBatch(epoch, step, 0, 1, np.array(self.lists[step], np.int64)) for step in steps)

    def copies(self, items: Sequence[int]) -> tuple[int, ...]:
        return (0,) * len(items)

    def use(self, micro: BatchOrigin) -> None:
        self.next = (micro.epoch, micro.step + 1)
        if micro.step + 1 == len(self.lists):
            self.epoch, self.first = self.next = (micro.epoch + 1, 0)

    def count(self, epoch: int) -> int:
        return len(self.lists)

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self.first = self.next = (epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.next[0], "step": self.next[1]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch, self.first = self.next = (state["epoch"], state["step"])


@dataclass
class Made:
    """A data set whose every number is known."""

    root: Path
    graphs: dict[int, ItemGraph]
    table: ItemTable
    graph_store: Store
    embed_store: Store
    rows: dict[str, np.ndarray]  # text → what its embedding is

    def loader(self, lists: Sequence[Sequence[int]], **options: Any) -> Loader:
        embeddings = options.pop("embeddings", Embeddings(self.embed_store, (ENCODER, WIDTH)))
        graphs = options.pop("graphs", CachedGraphs(self.graph_store, self.table))
        sampler = options.pop("sampler", None) or Micros(lists)
        return Loader(graphs, embeddings, sampler, **options)

    def only(self, folder: Path, *numbers: int, refused: Sequence[int] = ()) -> CachedGraphs:
        """Return some of the graphs alone, and in the place of others why there are none."""
        store = CacheFolder(folder / "cache").kind("graph")
        with store.writer() as writer:
            for number in numbers:
                record = self.graph_store.get(self.table.key(number))
                writer.put(record.key, record.arrays, record.meta)
            for number in refused:
                writer.put(self.table.key(number), {}, {"reason": "no_contacts", "detail": "too far apart"})
        return CachedGraphs(store, self.table)

    def wanted_rows(self, part: PartnerGraph) -> tuple[np.ndarray, np.ndarray]:
        """What a partner's residues must have, worked out residue by residue."""
        joined = np.concatenate([self.rows[text] for text in part.texts])
        wanted = np.zeros((len(part.row_R), WIDTH), joined.dtype)
        for residue, row in enumerate(part.row_R.tolist()):
            if row >= 0:
                wanted[residue] = joined[row]
        return wanted, part.row_R >= 0


def made(cache: Any, graphs: Sequence[ItemGraph]) -> Made:
    """Store graphs with their embeddings, and a table of them."""
    graph_store, embed_store = cache.kind("graph"), cache.kind("embed")
    builder, rows = TableBuilder(), {}
    with graph_store.writer() as writer:
        for number, graph in enumerate(graphs):
            key = recipe_key("test", {"number": number})
            writer.put(key, *encode_graph(graph))
            builder.add(f"item{number}", key, "train", graph.sizes())
    rng = np.random.default_rng(1)
    with embed_store.writer() as writer:
        for text in dict.fromkeys(text for graph in graphs for part in graph.parts for text in part.texts):
            rows[text] = rng.normal(size=(len(text), WIDTH)).astype(np.float16)
            writer.put(ENCODER.key(text, PRECISION), {"rows": rows[text]}, {"text": text})
    return Made(cache.root, dict(enumerate(graphs)), builder.table(), graph_store, embed_store, rows)


def collated_by(task: Any, batch: ItemBatch) -> TaskBatch:
    """Return what a task makes of the items of a joined batch, and of any of them again."""

    def again(numbers: Sequence[int], origin: BatchOrigin) -> TaskBatch:
        places = [batch.numbers.index(number) for number in numbers]
        ids = tuple(batch.ids[place] for place in places)
        value = task.collate([batch.items[place] for place in places], item_rng(origin, "\n".join(ids)))
        return TaskBatch(tuple(numbers), ids, origin, value, read_again=again)

    return again(batch.numbers, batch.origin)
