"""Checks cached records: rebuilds a sample from the source files and the weights, and compares.

Every graph is also checked for what a task needs of it. The sample depends on keys alone, so it is the same however
tasks divide a validation.

Whole numbers, names and texts must be the same. Coordinates and distances may differ by `CLOSE`. That is less than the
last digit in any file, and more than results differ between processors. Records that differ in any bit are counted.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.audit.item_index import ODD, ItemIndex, in_sample
from pipeline.encoder.embedding_recipe import STORED, EmbeddingRecipe, as_floats
from pipeline.encoder.engine.token_batches import EngineSettings
from pipeline.encoder.weights import checkpoint_facts, key_as_it_stands
from pipeline.errors import CacheDamaged, PipelineError, RecordMissing
from pipeline.graphs.graph_checks import wrong_graph
from pipeline.graphs.make_graphs import encoded_graph
from pipeline.keys import TAG_BYTES, content_digest, recipe_tag
from pipeline.records import Inventory, Item
from pipeline.store.maintenance.checking import WHOLE, Wrong, check
from pipeline.store.maintenance.damage_report import Checked
from pipeline.structures.atoms import UnusableInput
from pipeline.structures.inventory import examine_item, item_key
from pipeline.structures.parsing.structure_files import File, read_file

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping

    from pipeline.encoder.engine.embed_engine import Embedding, Engine
    from pipeline.encoder.engine.encoder_source import EncoderSource
    from pipeline.project.project import Encoding, Project
    from pipeline.store.format.record import Array, Record
    from pipeline.store.store import Store
    from pipeline.structures.inventory import Complex

CLOSE = 1e-4  # Å
CLOSE_SHARE = 1e-6  # and of the number itself: far from the origin float32 has fewer decimals
SHOWN = 3  # problems of one record
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
        _ = self._recipes  # read now, so that a failure is not reported as a fault of a record
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

    def _read_item_again(self, inventory_key: bytes) -> tuple[Inventory, Complex | None] | None:
        """Return an item as its files are now; None where it is unknown, or its files have changed."""
        line = self._data_set.items.get(inventory_key)
        if line is None:
            self._notes["not rebuilt: records outside this data set"] += 1
            return None
        item, recipe = Item.from_json(json.loads(line)), self._project.recipe
        with suppress(UnusableInput):
            data = {path: read_file(Path(path), recipe.max_file_bytes) for path in recipe.paths(item)}
            files = {path: File(content, content_digest(content).hex()) for path, content in data.items()}
            if item_key(item, recipe, {path: file.digest for path, file in files.items()}) == inventory_key:
                return examine_item(item, files, recipe)
        self._notes["not rebuilt: a source file was removed or changed"] += 1
        return None

    def _inventory_again(self, record: Record) -> Wrong | None:
        """Return where an inventory differs from what its files give."""
        if (rebuilt := self._read_item_again(record.key)) is None:
            return None
        inventory, read = rebuilt
        self._notes["inventories rebuilt"] += 1
        return _combined(differences(record, read.maps if read else {}, inventory.to_json()))

    def _graph_again(self, record: Record) -> Wrong | None:
        """Return where a graph differs from one that is built from its item's files."""
        key = self._data_set.inventories.get(record.key) if self._sample else None
        if key is None or not in_sample(bytes.fromhex(key), self._sample):
            return None
        if (rebuilt := self._read_item_again(bytes.fromhex(key))) is None:
            return None
        inventory, read = rebuilt
        if read is None:
            return Wrong(f"there is a graph; rebuilt, there is none ({inventory.reason})")
        arrays, meta = encoded_graph(read, self._project.graphs.recipe)
        self._notes["graphs rebuilt"] += 1
        self._notes["rebuilt graphs that differ in some bits"] += not same_bits(record, arrays)
        return _combined(differences(record, arrays, meta))

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

    # Inputs of the comparison

    @cached_property
    def _recipes(self) -> Mapping[bytes, Mapping[str, Any]]:
        """The recipes of graphs by their tag: those that were described, and that of this configuration."""
        mine = self._project.graphs.recipe.plain()
        known = (stat.recipe for stat in self._project.cache.recipes("graph"))
        return {recipe_tag("graph", recipe): recipe for recipe in (*known, mine)}

    @cached_property
    def _encoders(self) -> Mapping[str, EncodedAgain]:
        """The encoders of this configuration whose weights are here, by digest."""
        encoders = {}
        for view in self._project.encoders.values():
            with suppress(PipelineError):
                encoders[view.encoding.weights.digest] = EncodedAgain(view.encoding)
        return encoders

    @cached_property
    def _data_set(self) -> ItemIndex:
        """The items of the current data set, by the keys of their records."""
        index = ItemIndex()
        try:
            index.read(self._project, self._sample)
        except PipelineError as error:
            self._notes[f"the data set cannot be listed, so nothing is compared with it: {error.what}"] += 1
        return index


def _combined(problems: Iterable[str]) -> Wrong | None:
    """Return the first few problems of a record as one; None if there are none."""
    first = list(islice(problems, SHOWN + 1))
    return Wrong("; ".join(first[:SHOWN]) + ("; and more" if len(first) > SHOWN else "")) if first else None


def differences(record: Record, arrays: Mapping[str, Array], meta: Mapping[str, Any]) -> Iterator[str]:
    """Yield where a record differs from the rebuilt one."""
    kept, meta = record.meta, json.loads(json.dumps(meta))
    if kept.get("reason") != meta.get("reason"):
        yield f"it says {kept.get('reason') or 'no rejection'}; rebuilt, {meta.get('reason') or 'no rejection'}"
        return
    for name in sorted((kept.keys() | meta.keys()) - {"detail"}):
        if kept.get(name) != meta.get(name):
            yield f"{name} is {_short(kept.get(name))}; rebuilt, {_short(meta.get(name))}"
    for name in sorted(record.arrays.keys() ^ arrays.keys()):
        yield f"{name} is {'there' if name in record.arrays else 'not there'}; rebuilt, it is the opposite"
    for name in sorted(record.arrays.keys() & arrays.keys()):
        yield from _array(name, record.arrays[name], arrays[name])


def same_bits(record: Record, arrays: Mapping[str, Array]) -> bool:
    """Tell whether the arrays are the same bit for bit."""
    return record.arrays.keys() == arrays.keys() and all(
        array.tobytes() == np.ascontiguousarray(arrays[name]).tobytes() for name, array in record.arrays.items()
    )


def _array(name: str, kept: Array, made: Array) -> Iterator[str]:
    """Yield where two arrays differ."""
    if kept.dtype != made.dtype or kept.shape != made.shape:
        yield f"{name} is {kept.dtype} {list(kept.shape)}; rebuilt, {made.dtype} {list(made.shape)}"
        return
    if kept.dtype.kind == "f":
        unlike = ~np.isclose(kept, made, rtol=CLOSE_SHARE, atol=CLOSE, equal_nan=True)
    else:
        unlike = kept != made
    if np.any(unlike):
        at = np.unravel_index(int(np.argmax(unlike)), unlike.shape)
        count = int(np.count_nonzero(unlike)) - 1
        more = f" (and {count} more)" if count else ""
        place = ", ".join(map(str, at))
        yield f"{name}[{place}] is {kept[at]}; rebuilt, {made[at]}{more}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class EncodedAgain:
    """Computes embeddings of one encoder again; each recipe of cutting needs an engine of its own."""

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding
        self._engines: dict[EmbeddingRecipe, Engine] = {}

    @cached_property
    def _source(self) -> EncoderSource:
        return self._encoding.source()

    def made(self, record: Record) -> Embedding | None:
        """Return the embedding in the storage precision of the record; None where memory does not suffice."""
        text, taken = record.meta["text"], list["Embedding"]()
        for _ in self._engine(record).run(np.array([len(text)]), lambda _places: [text], taken.append):
            pass
        return taken[0] if taken else None

    def _engine(self, record: Record) -> Engine:
        """Return the engine for the recipe of a record, in fp32."""
        from pipeline.encoder.engine import memory_ladder
        from pipeline.encoder.engine.embed_engine import Engine

        meta, cut = record.meta, record.meta["cut"]
        how = {"long": cut["policy"], "length": cut["length"], "overlap": cut["overlap"]} if cut else {"long": "full"}
        recipe = EmbeddingRecipe(
            weights=self._encoding.weights.digest,
            layer=meta["layer"],
            context=meta["context"],
            precision="fp32",
            storage=STORED[record.arrays["rows"].dtype.name],
            on_oom="cpu",
            cls="cls" in record.arrays,
            **how,
        )
        if recipe not in self._engines:
            threads = self._encoding.settings.threads
            settings = EngineSettings(policy="tokens", cap=1, budget="auto", device="cpu", threads=threads)
            settings = memory_ladder.on_its_device(settings)
            self._engines.clear()  # one at a time: each has its own copy of the weights
            self._engines[recipe] = Engine(self._source, recipe, settings)
        return self._engines[recipe]


def distance(mine_LD: Array, theirs_LD: Array, *, by_row: bool) -> float:
    """Return how far two embeddings are from each other, as a share of their length: of the worst row, or of all."""
    mine, theirs = (rows_LD.astype(np.float64) for rows_LD in (mine_LD, theirs_LD))
    axis = -1 if by_row else None
    length = np.maximum(np.linalg.norm(theirs, axis=axis), np.finfo(np.float64).tiny)
    return float(np.max(np.linalg.norm(mine - theirs, axis=axis) / length))


def allowed(cosine: float) -> float:
    """Return the distance of two vectors of one length whose cosine is this."""
    return math.sqrt(2 * (1 - cosine))
