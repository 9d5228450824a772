"""Checks cached records: rebuilds a sample from the source files and the weights, and compares.

Every graph is also checked for what a task needs of it. The sample depends on keys alone, so it is the same however
tasks divide a validation.
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

from pipeline.audit.item_index import ODD, ItemIndex, in_sample
from pipeline.audit.remade_records import EncodedAgain, allowed, differences, distance, read_again, same_bits
from pipeline.encoder.embedding_recipe import as_floats
from pipeline.encoder.weights import checkpoint_facts, key_as_it_stands
from pipeline.errors import CacheDamaged, PipelineError, RecordMissing
from pipeline.graphs.graph_checks import wrong_graph
from pipeline.graphs.make_graphs import encoded_graph
from pipeline.keys import TAG_BYTES, content_digest, recipe_tag
from pipeline.records import Inventory, Item
from pipeline.store.maintenance.damage_report import Checked
from pipeline.store.maintenance.shard_plans import WHOLE, Wrong, check
from pipeline.structures.atoms import UnusableInput
from pipeline.structures.parsing.structure_files import read_file

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping

    from pipeline.audit.remade_records import RebuiltItem
    from pipeline.project.project import Project
    from pipeline.store.format.record import Record
    from pipeline.store.store import Store

TOLD = 3  # things that are wrong with one record
WHOLE_COSINE, HALF_COSINE = 0.99999, 0.999  # those of the gate (encoder/parity.py): of a row in fp32, of all in half


class Semantic:
    """Checks the content of records."""

    def __init__(self, project: Project, sample: float) -> None:
        self._project, self._sample = project, sample
        self._notes: Counter[str] = Counter()

    def check(
        self,
        store: Store,
        part: Container[str] = WHOLE,
        *,
        with_index: bool = True,
        on: Callable[[str], object] = lambda _shard: None,
    ) -> Iterator[Checked]:
        """Judge some shards of one kind."""
        _ = self._recipes  # now, so that no record is blamed if this fails
        if self._sample:
            _ = self._data_set

        def judge(record: Record) -> Wrong | None:
            return self._judge(store.kind, record)

        for checked in check(store, part, with_index=with_index, judge=judge, on=on):
            yield replace(checked, notes=dict(self._notes))
            self._notes.clear()

    def _judge(self, kind: str, record: Record) -> Wrong | None:
        """Return the problem of a record: it is malformed, or differs from the rebuilt one."""
        try:
            if kind == "scan":
                Inventory.from_json(record.meta)
            if kind == "graph":
                problem = _combined(wrong_graph(record, self._recipes.get(record.key[:TAG_BYTES])))
                if problem:
                    return problem
        except ODD as error:
            return Wrong(f"it cannot be understood: {type(error).__name__} {error}")
        try:
            return self._compared(kind, record)
        except ODD as error:
            return Wrong(f"it cannot be compared: {type(error).__name__} {error}", lost=False)

    def _compared(self, kind: str, record: Record) -> Wrong | None:
        """Return where a record of the sample differs from the rebuilt one."""
        if kind == "graph":
            return self._graph_again(record)
        if kind == "sets" and self._sample:
            return _combined(self._sizes_again(record))
        again = {
            "weights": self._weights_again,
            "scan": self._inventory_again,
            "files": self._file_again,
            "embed": self._embedding_again,
        }.get(kind)
        return again(record) if again and in_sample(record.key, self._sample) else None

    # Rebuilt

    def _read_item_again(self, inventory_key: bytes) -> RebuiltItem | None:
        """Return the item of an inventory as its files are now; None where it is unknown, or its files have changed."""
        line = self._data_set.items.get(inventory_key)
        if line is None:
            self._notes["not rebuilt: records outside this data set"] += 1
            return None
        rebuilt = read_again(Item.from_json(json.loads(line)), self._project.recipe)
        if rebuilt is None or rebuilt.key != inventory_key:
            self._notes["not rebuilt: a source file was removed or changed"] += 1
            return None
        return rebuilt

    def _inventory_again(self, record: Record) -> Wrong | None:
        """Return where an inventory differs from what its files give."""
        rebuilt = self._read_item_again(record.key)
        if rebuilt is None:
            return None
        self._notes["inventories rebuilt"] += 1
        return _combined(_inventory_differences(record, rebuilt))

    def _graph_again(self, record: Record) -> Wrong | None:
        """Return where a graph differs from what is built of its item's files."""
        key = self._data_set.inventories.get(record.key) if self._sample else None
        if key is None or not in_sample(bytes.fromhex(key), self._sample):
            return None
        rebuilt = self._read_item_again(bytes.fromhex(key))
        return None if rebuilt is None else _combined(self._graph_differences(record, rebuilt))

    def _graph_differences(self, record: Record, rebuilt: RebuiltItem) -> Iterator[str]:
        """Yield where a graph differs from the rebuilt one."""
        if rebuilt.read is None:
            yield f"there is a graph; rebuilt, there is none ({rebuilt.inventory.reason})"
            return
        arrays, meta = encoded_graph(rebuilt.read, self._project.graphs.recipe)
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
            away = distance(as_floats(kept), as_floats(again), by_row=is_full)
            if not away <= most:  # also true for NaN
                what = f"{away:.2g} of their length from the recomputed values; at most {most:.2g} is accepted"
                return Wrong(f"the numbers of {name} are {what}")
        return None

    def _sizes_again(self, table: Record) -> Iterator[str]:
        """Yield items whose sizes in a table differ from those of their graphs; a graph that is missing is no fault."""
        graphs, sizes = self._project.graphs.store, table.meta["sizes"]
        for number, key in enumerate(map(bytes, table.arrays["key"])):
            if not in_sample(key, self._sample):
                continue
            with suppress(CacheDamaged, RecordMissing):
                theirs = graphs.get(key).meta.get("sizes")
                mine = {name: int(table.arrays[f"size.{name}"][number]) for name in sizes}
                if theirs not in (None, mine):
                    yield f"item {number}: its sizes are {mine}; those of its graph are {theirs}"

    # What must be known besides

    @cached_property
    def _recipes(self) -> Mapping[bytes, Mapping[str, Any]]:
        """The recipes of graphs by their tag: those that were described, and that of this configuration."""
        mine = self._project.graphs.recipe.plain()
        known = (stat.recipe for stat in self._project.cache.recipes("graph"))
        return {recipe_tag("graph", recipe): recipe for recipe in (*known, mine)}

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


def _inventory_differences(record: Record, rebuilt: RebuiltItem) -> Iterator[str]:
    """Yield where an inventory differs from what is made of its files."""
    maps = rebuilt.read.maps if rebuilt.read else {}
    return differences(record, maps, json.loads(json.dumps(rebuilt.inventory.to_json())))
