"""Stage graph: from structures to a graph of each item in the store, or the reason why it has none.

`build_graph` makes the graph of one item by a recipe.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pipeline.graphs.item_graph import encode_graph
from pipeline.records import Reason
from pipeline.store.cache_folder import update_index
from pipeline.store.store import WholeRecords
from pipeline.structures.atoms import UnusableInput
from pipeline.structures.inventory import examine_item, item_key
from pipeline.structures.parsing.structure_files import plain_files

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping
    from typing import Any

    from pipeline.graphs.item_graph import Array, GraphRecipe, ItemGraph
    from pipeline.records import Item
    from pipeline.store.store import Store, StoreWriter
    from pipeline.structures.inventory import Complex
    from pipeline.structures.inventory import ScanRecipe as Structures
    from pipeline.structures.parsing.structure_files import File

log = logging.getLogger(__name__)

HEADER_BYTES = 2 << 20  # of a shard; a graph has some 25 arrays, whose names and places take 3 kB there


def build_graph(read: Complex, recipe: GraphRecipe) -> ItemGraph:
    """Return the graph of an item; raise UnusableInput if it cannot have one."""
    from pipeline.graphs import (  # importing scipy takes half of a command's start, and few commands build graphs
        atom_graph,
        residue_graph,
    )

    if recipe.nodes == "atom":
        return atom_graph.build_atom_graph(read, recipe)
    return residue_graph.build_residue_graph(read, recipe)


def encoded_graph(read: Complex, recipe: GraphRecipe) -> tuple[dict[str, Array], dict[str, Any]]:
    """Return the arrays and JSON of an item's record: its graph, or the reason why it has none."""
    try:
        return encode_graph(build_graph(read, recipe))
    except UnusableInput as problem:
        return {}, {"reason": problem.reason.value, "detail": problem.detail}
    except (MemoryError, ImportError, OSError):  # a fault of this machine, not of the item
        raise
    except Exception as error:  # a bug costs this item, not the run
        log.exception("a graph could not be built")
        return {}, {"reason": Reason.GRAPH_FAILED.value, "detail": f"{type(error).__name__}: {error}"[:200]}


def open_writer(store: Store, shard_bytes: int) -> StoreWriter:
    """Return a writer with room for the names of many small arrays."""
    return store.writer(shard_bytes=shard_bytes, header_bytes=HEADER_BYTES)


class Maker:
    """Makes and stores the graphs of items."""

    def __init__(
        self,
        recipe: GraphRecipe,
        store: Store,
        writer: StoreWriter,
        is_wanted: Callable[[bytes], bool] = lambda _key: True,
    ) -> None:
        self._recipe, self._store, self._writer, self._is_wanted = recipe, store, writer, is_wanted
        self._refused: dict[bytes, Reason] = {}  # of graphs that are not published yet

    def make(self, key: bytes, read: Complex) -> Reason | None:
        """Store the graph of an item, given the key of its inventory; return why it has none."""
        own = self._recipe.key(key)
        if self._is_wanted(own) and not self.has(key):
            arrays, meta = encoded_graph(read, self._recipe)
            self._writer.put(own, arrays, meta)
            if "reason" in meta:
                self._refused[own] = Reason(meta["reason"])
        return self._refused.get(own)

    def has(self, key: bytes) -> bool:
        """Return whether the graph of an item was made here or is in the store."""
        own = self._recipe.key(key)
        return own in self._writer or own in WholeRecords(self._store).metas([own])

    def publish(self) -> None:
        """Write new graphs to disk; from now on they are looked up there."""
        self._writer.flush()
        self._refused.clear()
        update_index(self._store, far_behind=True)


def graph(
    items: Iterable[Item], structures: Structures, recipe: GraphRecipe, store: Store, shard_bytes: int
) -> Generator[Reason | None, None, None]:
    """Build the graphs that are not in the store yet, and publish them at least every minute."""
    files = plain_files(structures.max_file_bytes, structures.paths)
    with open_writer(store, shard_bytes) as writer:
        maker = Maker(recipe, store, writer)
        for item in items:
            try:
                read = files.of(item)
            except UnusableInput as problem:  # a file was removed since its scan: the next scan reports it
                yield problem.reason
                continue
            key = item_key(item, structures, {path: file.digest for path, file in read.items()})
            if maker.has(key):
                yield None
                continue
            yield _make(item, key, read, structures, maker)
            if writer.is_due:
                maker.publish()


def _make(item: Item, key: bytes, read: Mapping[str, File], structures: Structures, maker: Maker) -> Reason | None:
    """Make the graph of an item; return why it has none."""
    try:
        inventory, structure = examine_item(item, read, structures)
    except MemoryError as error:
        raise MemoryError(f"out of memory while reading {item.id}") from error
    except Exception:  # a bug here or in a parser costs this item, not the task
        log.exception("%s could not be read", item.id)
        return Reason.SCAN_FAILED
    return maker.make(key, structure) if structure else inventory.reason or Reason.NO_NODES
