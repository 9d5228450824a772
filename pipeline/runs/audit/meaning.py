"""Judges whether what a cache holds makes sense: every record by itself, and with the records it belongs to.

A record that is fine by itself is compared: a graph with the inventory of its item, if the item is in the current data
set, and a sample of records with what the source files or the encoder give now. The sample depends on keys alone, so
it is the same however tasks divide a validation.
"""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.encoder.embedding_recipe import as_floats
from pipeline.encoder.weights import checkpoint_facts, key_as_it_stands
from pipeline.errors import CacheDamaged, PipelineError, RecordMissing
from pipeline.graphs.build_graph import encoded_graph
from pipeline.keys import TAG_BYTES, content_digest, recipe_tag
from pipeline.records import Inventory, Item
from pipeline.runs.audit.item_index import ODD, ItemIndex, in_sample
from pipeline.stages.encoder_checks import allowed, distance, wrong_embedding, wrong_limit, wrong_parity, wrong_weights
from pipeline.stages.remade_records import EncodedAgain, differences, read_again, same_bits
from pipeline.stages.structure_checks import (
    sampled_sizes,
    wrong,
    wrong_beside_inventory,
    wrong_file,
    wrong_inventory,
    wrong_recipe,
    wrong_table,
)
from pipeline.store.maintenance.damage_report import Checked
from pipeline.store.maintenance.shard_plans import WHOLE, Wrong, check
from pipeline.structures.atoms import UnusableInput
from pipeline.structures.inventory import plain_recipe
from pipeline.structures.parsing.structure_files import read_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from pipeline.project.project import Project
    from pipeline.stages.remade_records import Anew
    from pipeline.store.format.record import Record
    from pipeline.store.maintenance.shard_plans import Named, Subset
    from pipeline.store.store import Store

DEFAULT_SAMPLE = 0.0  # what is made anew takes the source files, the encoder and their time, so it must be asked for
TOLD = 3  # things that are wrong with one record
WHOLE_COSINE, HALF_COSINE = 0.99999, 0.999  # those of the gate (encoder/parity.py): of a row in fp32, of all in half


class Semantic:
    """Judges what records say; what else it must know, it looks up when it first needs it."""

    def __init__(self, project: Project, sample: float = DEFAULT_SAMPLE) -> None:
        self._project, self._sample = project, sample
        self._notes: Counter[str] = Counter()

    def check(
        self, store: Store, part: Subset | Named = WHOLE, *, on: Callable[[str], object] = lambda _shard: None
    ) -> Iterator[Checked]:
        """Judge some shards of one kind."""

        def judge(record: Record) -> Wrong | None:
            return self._judge(store.kind, record)

        for checked in check(store, part, judge=judge, on=on):
            yield replace(checked, notes=dict(self._notes))
            self._notes.clear()

    def _judge(self, kind: str, record: Record) -> Wrong | None:
        """Return what is wrong with a record; one that is wrong by itself is lost."""
        self._look_up_first(kind)
        try:
            problem = _combined(self._wrong(kind, record, self._recipes.get((kind, record.key[:TAG_BYTES]))))
        except ODD as error:
            return Wrong(f"it cannot be understood: {type(error).__name__} {error}")
        try:
            return problem or self._compared(kind, record)
        except ODD as error:
            return Wrong(f"it cannot be compared: {type(error).__name__} {error}", lost=False)

    def _look_up_first(self, kind: str) -> None:
        """Look up what this kind needs before a record is judged, so that no record is blamed where that fails."""
        _ = self._recipes
        if kind == "graph" or (self._sample and kind in ("scan", "files")):
            _ = self._data_set

    def _wrong(self, kind: str, record: Record, recipe: Mapping[str, Any] | None) -> Iterable[str]:
        """Yield what is wrong with a record by itself."""
        if kind == "graph":
            return wrong(record, recipe)
        if kind == "scan":
            return wrong_inventory(record, recipe)
        if kind == "embed":
            return wrong_embedding(record, recipe)
        judge = _ALONE.get(kind)
        if judge is None:
            self._notes[f"records of the unknown kind {kind}: only checksums were verified"] += 1
            return ()
        return judge(record)

    def _compared(self, kind: str, record: Record) -> Wrong | None:
        """Return what is wrong with a record beside other records, and beside what is made anew."""
        if kind == "graph":
            return self._wrong_beside_inventory(record) or self._graph_again(record)
        is_sampled = in_sample(record.key, self._sample)
        if kind == "weights":
            return self._weights_again(record) if is_sampled else None
        if kind == "scan" and is_sampled:
            return self._inventory_again(record)
        if kind == "files" and is_sampled:
            return self._file_again(record)
        if kind == "embed" and is_sampled:
            return self._embedding_again(record)
        if kind == "sets" and self._sample:
            return _combined(
                sampled_sizes(record, self._project.graphs.store, lambda key: in_sample(key, self._sample))
            )
        return None

    # Beside others

    def _wrong_beside_inventory(self, graph: Record) -> Wrong | None:
        """Return where a graph and its inventory contradict each other; a sample shows which of them is wrong."""
        key = self._data_set.inventories.get(graph.key)
        if key is None:
            self._notes["graphs outside this data set: checked on their own"] += 1
            return None
        try:
            inventory = self._project.shelves.inventories.get(bytes.fromhex(key))
        except (CacheDamaged, RecordMissing):
            return None
        if not _is_in_order(inventory):  # that is found where inventories are judged
            return None
        recipe = self._project.graphs.recipe.plain()
        return _combined(wrong_beside_inventory(graph, Inventory.from_json(inventory.meta), inventory.arrays, recipe))

    # Made anew

    def _read_item_again(self, inventory_key: bytes) -> Anew | None:
        """Return the item of an inventory as its files are now; None where it is unknown, or its files have changed."""
        line = self._data_set.items.get(inventory_key)
        if line is None:
            self._notes["not rebuilt: records outside this data set"] += 1
            return None
        anew = read_again(Item.from_json(json.loads(line)), self._project.recipe)
        if anew is None or anew.key != inventory_key:
            self._notes["not rebuilt: a source file was removed or changed"] += 1
            return None
        return anew

    def _inventory_again(self, record: Record) -> Wrong | None:
        """Return where an inventory differs from what its files give."""
        anew = self._read_item_again(record.key)
        if anew is None:
            return None
        self._notes["inventories rebuilt"] += 1
        return _combined(_inventory_differences(record, anew))

    def _graph_again(self, record: Record) -> Wrong | None:
        """Return where a graph differs from what is built of its item's files."""
        key = self._data_set.inventories.get(record.key)
        if key is None or not in_sample(bytes.fromhex(key), self._sample):
            return None
        anew = self._read_item_again(bytes.fromhex(key))
        return None if anew is None else _combined(self._graph_differences(record, anew, count=True))

    def _graph_differences(self, record: Record, anew: Anew, *, count: bool = False) -> Iterator[str]:
        """Yield where a graph differs from one that is built anew."""
        if anew.read is None:
            yield f"there is a graph; rebuilt, there is none ({anew.inventory.reason})"
            return
        arrays, meta = encoded_graph(anew.read, self._project.graphs.recipe)
        if count:
            self._notes["graphs rebuilt"] += 1
            self._notes["rebuilt graphs that differ in some bits"] += not same_bits(record, arrays)
        yield from differences(record, arrays, json.loads(json.dumps(meta)))

    def _file_again(self, record: Record) -> Wrong | None:
        """Return where a file differs from its record."""
        path = self._data_set.paths.get(record.key)
        if path is None:
            self._notes["not read again: files outside this data set, or changed"] += 1
            return None
        self._notes["files read again"] += 1
        try:
            data = read_file(Path(path), self._project.recipe.max_file_bytes)
        except UnusableInput as problem:
            reason = record.meta.get("reason")
            difference = f"{path}: {problem.reason.value}; {reason or 'its content'} is recorded"
            return None if reason == problem.reason.value else Wrong(difference)
        meta = {"content": content_digest(data).hex(), "bytes": len(data)}
        return None if meta == record.meta else Wrong(f"{path} holds {meta}; {dict(record.meta)} is recorded")

    def _weights_again(self, record: Record) -> Wrong | None:
        """Return where a checkpoint differs from its record; one that was replaced since is not read."""
        place = Path(record.meta["path"])
        try:
            if key_as_it_stands(place) != record.key:
                raise FileNotFoundError
            facts = asdict(checkpoint_facts(place))
        except (OSError, PipelineError):
            self._notes["not read again: weights removed or changed"] += 1
            return None
        self._notes["weights read again"] += 1
        unlike = [name for name in facts if name not in ("path", "name") and facts[name] != record.meta[name]]
        return _combined(f"{name} is {record.meta[name]!r}; read again, {facts[name]!r}" for name in unlike)

    def _embedding_again(self, record: Record) -> Wrong | None:
        """Return how far an embedding is from what the encoder computes, if that is too far."""
        meta = record.meta
        encoder = self._encoders.get(meta["weights"])
        if encoder is None:
            self._notes["not recomputed: embeddings whose weights are missing"] += 1
            return None
        made = encoder.made(record)
        if made is None:
            self._notes["not recomputed: embeddings too long for this machine's memory"] += 1
            return None
        self._notes["embeddings recomputed"] += 1
        self._notes["recomputed embeddings that differ in some bits"] += not same_bits(record, made.arrays)
        is_full = meta["precision"] == "fp32"
        most = allowed(WHOLE_COSINE if is_full else HALF_COSINE)
        for name, kept in record.arrays.items():
            again = made.arrays[name]
            if again.shape != kept.shape:
                return Wrong(f"{name} is {list(kept.shape)}; recomputed, {list(again.shape)}")
            if (away := distance(as_floats(kept), as_floats(again), by_row=is_full)) > most:
                what = f"{away:.2g} of their length from the recomputed values; at most {most:.2g} is accepted"
                return Wrong(f"the numbers of {name} are {what}")
        return None

    # What must be known besides

    @cached_property
    def _recipes(self) -> Mapping[tuple[str, bytes], Mapping[str, Any]]:
        """The recipes that are known: those that were described, and those of this configuration."""
        known = {
            (kind, recipe_tag(kind, stat.recipe)): stat.recipe
            for kind in ("scan", "graph", "embed")
            for stat in self._project.cache.recipes(kind)
        }
        return known | {(kind, recipe_tag(kind, recipe)): recipe for kind, recipe in self._mine.items()}

    @cached_property
    def _mine(self) -> Mapping[str, Mapping[str, Any]]:
        """The recipes of this configuration, by kind: these lack nothing."""
        return {"scan": plain_recipe(self._project.recipe), "graph": self._project.graphs.recipe.plain()}

    @cached_property
    def _encoders(self) -> Mapping[str, EncodedAgain]:
        """What computes with the weights of this configuration that are here, by their digest."""
        encoders = {}
        for view in self._project.encoders.values():
            with suppress(PipelineError):
                encoding = view.encoding
                digest = encoding.weights.digest
                encoders[digest] = EncodedAgain(encoding.source, digest, encoding.settings.threads)
        return encoders

    @cached_property
    def _data_set(self) -> ItemIndex:
        """The items of the current data set, by the keys of what is made of them."""
        index = ItemIndex()
        try:
            index.read(self._project, self._sample)
        except PipelineError as error:
            self._notes[f"the data set cannot be listed, so nothing is compared with it: {error.what}"] += 1
        return index


def _combined(problems: Iterable[str]) -> Wrong | None:
    """Return the first few problems of a record as one; None if there are none."""
    first = list(islice(problems, TOLD + 1))
    return Wrong("; ".join(first[:TOLD]) + ("; and more" if len(first) > TOLD else "")) if first else None


def _is_in_order(inventory: Record) -> bool:
    """Tell whether an inventory is in order by itself."""
    try:
        return not any(wrong_inventory(inventory))
    except ODD:
        return False


def _inventory_differences(record: Record, anew: Anew) -> Iterator[str]:
    """Yield where an inventory differs from what is made of its files."""
    maps = anew.read.maps if anew.read else {}
    return differences(record, maps, json.loads(json.dumps(anew.inventory.to_json())))


_ALONE = {
    "files": wrong_file,
    "weights": wrong_weights,
    "parity": wrong_parity,
    "limits": wrong_limit,
    "sets": wrong_table,
    "recipes": wrong_recipe,
}
