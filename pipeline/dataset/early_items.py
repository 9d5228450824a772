"""The items of a data set before their graphs exist, with sizes from a scan or from the command line.

They serve plans that are only shown. The training itself is planned from the table of graphs.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING

import numpy as np

from pipeline.command_line import Command
from pipeline.dataset.reader_items import is_reader, unmade
from pipeline.dataset.worklist import KnownItem, known_items, list_items
from pipeline.errors import ConfigError, DataError, PipelineError
from pipeline.keys import KEY_BYTES
from pipeline.protocol import ITEMS
from pipeline.records import Kind
from pipeline.training.items.item_table import ItemTable, PackedTexts, TableBuilder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pipeline.config.schema import Config
    from pipeline.config.schema_data import GraphSection
    from pipeline.project.project import Project
    from pipeline.protocol import Task
    from pipeline.records import Inventory

SIZES = "--sizes nodes=600,edges=12000,pairs=90000"  # of two partners with 300 residues each
MOST, MOST_ITEMS = 2**31 - 1, 10**7  # that can be typed
NEARLY = 0.7  # how alike the names of two splits are when one is meant by the other: tset, valid
LATER = {"train.evaluate.split": "test", "train.predict.split": "test"}
MOST_LISTED = 100_000  # items whose splits are looked at before a run: a second or two
NAMELESS = "an item of --sizes"
RESIDUES_PER_CUBIC_A = 0.0075  # in proteins: 135 cubic Å each


def refuse_sequences(config: Config) -> None:
    """Refuse to train on bare sequences."""
    if config.data.source == "fasta":
        what = "training needs graphs, and sequences have none"
        raise ConfigError(what, where="data.source is fasta", remedy=Command.submit("embed"))


def refuse_unknown_splits(project: Project) -> None:
    """Raise where a configured split has no items, or its name is a near miss of an existing split."""
    source, train = project.source, project.config.train
    if source.source == "reader":
        return  # which is known after its scan
    are_files = source.path.is_dir() and source.splits is None  # which have no splits
    wanted = {"train.split": train.split}
    wanted |= {f"train.{name}.split": getattr(train, name).split for name in ("validation", "evaluate", "predict")}
    names, there, listed = {*filter(None, wanted.values())}, set[str](), 0
    for listed, entry in enumerate(() if are_files else list_items(project), 1):
        there.add(entry.split)
        if names <= there or listed > MOST_LISTED:
            break
    splits = sorted(filter(None, there))
    usual = "" if splits else type(train).model_fields["split"].default  # means all items of a table without splits
    for key, name in wanted.items() if listed <= MOST_LISTED else ():
        cutoff = 1.0 if name == LATER.get(key) else NEARLY  # of a default that a later stage reads, if at all
        near = get_close_matches(str(name).lower(), {split.lower(): split for split in splits}, n=1, cutoff=cutoff)
        if name and name not in there and (near or (key == "train.split" and name != usual)):
            meant = next((split for split in splits if [split.lower()] == near), "null")
            what = f"no item is in split {name!r}; there are: {', '.join(map(repr, splits)) or 'none'}"
            raise ConfigError(what, where=key, remedy=f"--set {key}={meant}" + "   (every item)" * (meant == "null"))


def refuse_other_width(project: Project, task: Task) -> None:
    """Raise where a shipped task wants embeddings of another width than those of the weights."""
    is_shipped = any(base.__module__.startswith("pipeline.tasks.") for base in type(task).__mro__)
    if is_reader(project.config) or not is_shipped or not (wanted := getattr(task, "embedding_dim", 0)):
        return
    try:
        width = sum(view.encoding.weights.dim for view in project.encoders_read)
    except PipelineError:  # the stage embed, or the check of the weights, reports it better
        return
    if width != wanted:
        what = f"the task expects embeddings of width {wanted}, embed.weights gives {width}"
        remedy = f"--set train.options.embedding_dim={width}   (or choose other embed.weights)"
        raise ConfigError(what, where="train.options.embedding_dim", remedy=remedy)


def typed_sizes(text: str) -> dict[str, int]:
    """Read the sizes of an item that were typed: nodes=300,edges=6000; items=1000 says how many of them there are."""
    sizes = {}
    for part in text.split(","):
        name, _, number = (word.strip() for word in part.partition("="))
        least, most = (1, MOST_ITEMS) if name == ITEMS else (0, MOST)
        if not name or not number.isdecimal() or not least <= int(number) <= most:
            what = f"{part.strip()!r} is not a size: expected NAME=N, N from {least} to {most:,}"
            remedy = "--sizes nodes=300,edges=6000   (the names that cost() of your task reads)"
            raise ConfigError(what, where="--sizes", remedy=remedy)
        if name in sizes:
            raise ConfigError(f"{name} is given twice", where="--sizes", remedy=SIZES)
        sizes[name] = int(number)
    if not sizes.keys() - {ITEMS}:
        raise ConfigError(f"{text!r} names no size of an item", where="--sizes", remedy=SIZES)
    return sizes


def typed_table(typed: Mapping[str, int], batch: int) -> tuple[ItemTable, str]:
    """Return a data set of items with the typed sizes, by default as many as a step has, and a note on it."""
    sizes = {name: size for name, size in typed.items() if name != ITEMS}
    items = typed.get(ITEMS, batch)
    name_T, zero_N = np.frombuffer(NAMELESS.encode(), np.uint8), np.zeros(items, np.int64)
    table = ItemTable(
        ids=PackedTexts(name_T, zero_N, zero_N + len(name_T)),
        key_N16=np.zeros((items, KEY_BYTES), np.uint8),
        split_N=np.zeros(items, np.uint8),
        splits=("",),
        sizes={name: zero_N + size for name, size in sizes.items()},
    )
    each = ", ".join(f"{size:,} {name}" for name, size in sizes.items())
    many = "" if ITEMS in typed else f"; set their number with {ITEMS}=N"
    return table, f"sizes from --sizes: {each} per item{many}"


@contextmanager
def naming_sizes(config: Config) -> Iterator[None]:
    """Add to errors about the data set that a plan by --sizes needs none."""
    try:
        yield
    except (ConfigError, DataError) as error:
        sizes = "--sizes NAME=NUMBER,... (the names that cost() of your task reads)" if is_reader(config) else SIZES
        way, known = f"   or give sizes: {sizes}", error.next
        error.next = replace(known, then=known.then + way) if isinstance(known, Command) else known + way
        raise


def scanned_table(project: Project) -> tuple[ItemTable, str]:
    """Return the items that the cache knows from scans, with the sizes of their future graphs, and a note on it."""
    config = project.config
    with naming_sizes(config):
        table, waiting = _scanned(project)
        if not len(table):
            what = f"{unmade(config)}, and no scan to plan from"
            raise ConfigError(what, where=str(config.cluster.runs), remedy=Command.submit("scan"))
    edges = "exact" if _are_counted(config.graph) else f"estimated at {_edges_of_node(config.graph)} per node"
    left = f"; {waiting:,} more items are not scanned yet" if waiting else ""
    return table.table(), f"sizes from the scan of {len(table):,} items: no graphs yet, edges are {edges}{left}"


def _scanned(project: Project) -> tuple[TableBuilder, int]:
    """Return the usable items whose inventories the cache has, and how many it does not have."""
    table, waiting = TableBuilder(), 0
    for entry in known_items(project, None, list_items(project)):
        if not isinstance(entry, KnownItem):
            continue
        if entry.inventory is None or entry.key is None:
            waiting += 1
            continue
        sizes = _expected_sizes(entry.inventory, project.config.graph)
        table.add(entry.item.id, entry.key, entry.item.split, sizes)
    return table, waiting


def _expected_sizes(inventory: Inventory, graph: GraphSection) -> dict[str, int]:
    """Return the sizes that a graph will have, edges approximately; unpredictable sizes are left out."""
    promised = promised_sizes(inventory, graph)
    cross = {} if graph.cross_neighbours or graph.cross_radius else {"cross": 0}
    return {"edges": promised["nodes"] * _edges_of_node(graph), **cross, **promised}


def _edges_of_node(graph: GraphSection) -> int:
    """Return about how many edges a node has."""
    if graph.nodes == "atom":
        return edges_of_atom(graph)
    return max(graph.neighbours, int(RESIDUES_PER_CUBIC_A * 4.2 * (graph.radius or 0) ** 3))


def _are_counted(graph: GraphSection) -> bool:
    """Tell whether edges follow from the number of nodes alone."""
    return graph.nodes == "residue" and graph.radius is None


def promised_sizes(inventory: Inventory, graph: GraphSection) -> dict[str, int]:
    """Return the sizes of a graph that are known before it is built; atom graphs may have fewer nodes."""
    if graph.nodes == "atom":
        nodes = [partner.atoms for partner in inventory.partners]
    else:
        nodes = [
            sum(chain.nodes for chain in partner.chains if chain.kind is Kind.PROTEIN) for partner in inventory.partners
        ]
    ligand = nodes[1] if len(nodes) > 1 else 0
    sizes = {"nodes": sum(nodes), "receptor": nodes[0], "ligand": ligand, "pairs": nodes[0] * ligand}
    sizes["residues"] = sum(nodes if graph.nodes == "residue" else (partner.residues for partner in inventory.partners))
    if _are_counted(graph):
        sizes["edges"] = sum(count * min(graph.neighbours, max(0, count - 1)) for count in nodes)
    return sizes


def edges_of_atom(graph: GraphSection) -> int:
    """Return about how many edges an atom has: in proteins, 100 cubic Å hold 6 heavy atoms."""
    return 20 + int(0.06 * 4.2 * (graph.atom.radius or 0) ** 3)
