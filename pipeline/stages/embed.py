"""Stage embed: finds the sequences without an embedding, cuts them into tasks of equal cost, and embeds them.

For each encoder it counts the embedded, the rejected and the missing sequences.
"""

from __future__ import annotations

import math
import os
import struct
import sys
from array import array
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import IO, TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from pipeline.dataset import worklist
from pipeline.dataset.blocks import tallies
from pipeline.dataset.columns import ColumnFile, count_distinct, distinct_parts, in_files
from pipeline.dataset.worklist import KnownItem, Lines, Shard, StageSurvey
from pipeline.device.host import keep_freed_memory
from pipeline.encoder.checkpoint_files import FAMILIES
from pipeline.encoder.embed_texts import Texts, embed_texts, sequence_name
from pipeline.encoder.embedding_recipe import BF16_PRODUCTS, BadSequence, refuse_letters, texts
from pipeline.encoder.engine.token_batches import cap_shards, deal_shards, recipe_costs
from pipeline.journal.attempts import left_out_items, refused_parts
from pipeline.journal.run_folder import writing_run
from pipeline.memory.hardware.host_memory import kept_bytes
from pipeline.project.project import asked_bytes
from pipeline.records import Reason, Rejection
from pipeline.stage_names import StageName
from pipeline.stages.stage import Judged, Stage, StageTally, add_blocks, wait_until_complete
from pipeline.store.store import WholeRecords

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from numpy.typing import NDArray

    from pipeline.dataset.blocks import KnownBlock
    from pipeline.encoder.embed_texts import EmbeddingVerifier
    from pipeline.encoder.embedding_recipe import EmbeddingRecipe, Variant
    from pipeline.journal.run_folder import RunFolder
    from pipeline.project.project import Project
    from pipeline.project.restriction import Only
    from pipeline.records import Inventory, Item, TaskContext
    from pipeline.stages.stage import Outcomes

SEQUENCE, PACKED_SEQUENCE = np.dtype([("digest", "<u8"), ("length", "<u4"), ("kind", "u1")]), struct.Struct("<QIB")
MISSING, PACKED_MISSING = np.dtype([("digest", "<u8"), ("length", "<u4"), ("offset", "<u8")]), struct.Struct("<QIQ")
UNCOUNTED = dict.fromkeys(("items", "refused", "unusable", "cached", "missing", "waiting", "unnamed", "residues"), 0)


def refusal(text: str, recipe: EmbeddingRecipe) -> tuple[Reason, str] | None:
    """Return why a sequence cannot be embedded, or None."""
    if recipe.refuses(len(text)):
        what = f"a sequence of {len(text):,} residues; embed.long allows {recipe.length:,}"
        return Reason.SEQUENCE_TOO_LONG, what
    try:
        refuse_letters(text, recipe.letters)
    except BadSequence as error:
        return Reason.BAD_SEQUENCE, str(error)
    return None


def may_be_made(text: str, recipe: EmbeddingRecipe, only: Only) -> bool:
    """Tell whether a run may make a missing embedding: always, unless it is confined to a damage list."""
    return only.is_all or any(
        only.names(StageName.EMBED, recipe.key(text, variant)) for variant in recipe.accepted(len(text))
    )


def name_of(text: str, of: str) -> str:
    """Return the name of a sequence together with its encoder."""
    return f"{sequence_name(text)} of {of}" if of else sequence_name(text)


def digest(text: str) -> int:
    """Return a 64-bit hash of a text."""
    return xxhash.xxh3_64_intdigest(text.encode())


@dataclass(slots=True)
class Embedded(Judged):
    """The result of embedding a data set."""

    sequences: int = 0
    residues: int = 0
    longest: int = 0
    others: dict[str, int] = field(default_factory=dict)  # deviation (cut, other precision) → sequences
    parts: dict[str, dict[str, int]] = field(default_factory=dict)  # by encoder, if there are several


def describe(variant: Variant) -> str:
    """Return a variant in words."""
    if variant.cut is None:
        return f"in {variant.precision}"
    how = {"windows": "in windows of {}", "truncate": "truncated to {}"}[variant.cut.policy]
    return f"{how.format(variant.cut.length)} residues, in {variant.precision}"


@dataclass
class Sequences:
    """The sequences of all items for one encoder, until each distinct one is counted."""

    rows: bytearray = field(default_factory=bytearray)  # a SEQUENCE for each stored one
    names: dict[str, int] = field(default_factory=lambda: {"": 0})  # indices of variants; the first is the wanted one
    refused: array[int] = field(default_factory=lambda: array("Q"))  # digests of sequences that cannot be encoded

    def add(self, text: str, variant: Variant, wanted: Variant) -> None:
        """Add a stored sequence."""
        name = "" if variant == wanted and not variant.cut else describe(variant)
        self.rows += PACKED_SEQUENCE.pack(digest(text), len(text), self.names.setdefault(name, len(self.names)))

    def add_all(self, others: Sequences) -> None:
        """Add the sequences of other items."""
        number_of = np.array([self.names.setdefault(name, len(self.names)) for name in others.names], np.uint8)
        rows = np.frombuffer(others.rows, SEQUENCE).copy()
        rows["kind"] = number_of[rows["kind"]]
        self.rows.extend(rows.tobytes())
        self.refused.extend(others.refused)

    def count(self) -> Embedded:
        """Count each distinct sequence."""
        counted, kinds = Embedded(), np.zeros(len(self.names), np.int64)
        for rows in distinct_parts(self.rows, SEQUENCE):
            counted.sequences += len(rows)
            counted.residues += int(rows["length"].sum())
            counted.longest = max(counted.longest, int(rows["length"].max(initial=0)))
            kinds += np.bincount(rows["kind"], minlength=len(kinds))
        counted.others = {name: int(kinds[number]) for name, number in self.names.items() if number}
        return counted


class LackingItem(NamedTuple):
    """An item and its missing sequences with their encoders; none if it is not scanned."""

    item: Item
    missing: list[tuple[str, str]]


@dataclass
class EmbedTally(StageTally):
    """Counts items by the state of each of their sequences, for every encoder."""

    parts: dict[str, Sequences] = field(default_factory=dict)

    def embedded(self) -> Embedded:
        """Return the counts of all encoders together and of each."""
        embedded = self.result(Embedded, parts={})
        for name, part in self.parts.items():
            counted, of = part.count(), f" by {name}" if name else ""
            embedded.sequences += counted.sequences
            embedded.residues += counted.residues
            embedded.longest = max(embedded.longest, counted.longest)
            embedded.others |= {f"{other}{of}": count for other, count in counted.others.items()}
            if name:
                refused = count_distinct(part.refused)
                items = counted.sequences + refused
                embedded.parts[name] = {"items": items, "refused": refused, "cached": counted.sequences}
        return embedded


def embed_tallies(
    project: Project, views: Mapping[str, Project], folder: RunFolder | None, recipe: Mapping[str, Any]
) -> Iterator[EmbedTally]:
    """Yield the tally of each block of the data set."""
    verifiers = {name: view.encoding.verifier() for name, view in views.items()}
    recipes = {name: view.encoding.recipe for name, view in views.items()}
    unusable = refused_parts(folder, StageName.EMBED) | left_out_items(folder, StageName.EMBED)

    def empty() -> EmbedTally:
        return EmbedTally(parts={name: Sequences() for name in views})

    def count(block: KnownBlock) -> EmbedTally:
        tally = empty()
        tally.keys["embed"] = bytearray()
        known = [entry for entry in block.entries if isinstance(entry, KnownItem)]
        inventories = [entry.inventory for entry in known if entry.inventory]
        absent = {name: _absent(inventories, recipes[name], verifiers[name], tally, name) for name in views}
        for entry in block.entries:
            missing = [] if isinstance(entry, Rejection) else list(_missing(entry, recipes, absent))
            rejected = entry if isinstance(entry, Rejection) else _rejected(entry.item, missing, recipes, unusable)
            if rejected is not None:
                tally.reject(rejected)
                continue
            assert isinstance(entry, KnownItem)
            if entry.inventory is None or missing:
                tally.absent.append(LackingItem(entry.item, missing))
            else:
                tally.items += 1
        return tally

    records = {"embed": WholeRecords(project.encoding.shelves.embeddings, project.config.cache.verify_bytes)}
    return tallies(project, folder, StageName.EMBED, recipe, empty, count, records)


def _absent(
    inventories: Iterable[Inventory], recipe: EmbeddingRecipe, verifier: EmbeddingVerifier, tally: EmbedTally, name: str
) -> set[str]:
    """Return the sequences of some items that the store lacks; count the others."""
    absent, part = set[str](), tally.parts[name]
    wanted = (text for inventory in inventories for text in texts(inventory, recipe.context))
    for text, variant in verifier.look_up(wanted).items():
        if variant is None:
            absent.add(text)
        else:
            part.add(text, variant, recipe.wanted(len(text)))
            tally.keys["embed"] += recipe.key(text, variant)
    part.refused.extend(digest(text) for text in absent if refusal(text, recipe))
    tally.is_final = tally.is_final and len(part.names) == 1
    return absent


def _missing(
    known: KnownItem, recipes: Mapping[str, EmbeddingRecipe], absent: Mapping[str, set[str]]
) -> Iterator[tuple[str, str]]:
    """Yield the sequences of an item that the store lacks, with their encoders; none of an item that is not scanned."""
    for name, lacks in absent.items() if known.inventory else ():
        for text in texts(known.inventory, recipes[name].context) if lacks and known.inventory else ():
            if text in lacks:
                yield name, text


def _rejected(
    item: Item,
    missing: Iterable[tuple[str, str]],
    recipes: Mapping[str, EmbeddingRecipe],
    unusable: Mapping[str, tuple[Reason, str]],
) -> Rejection | None:
    """Return the rejection of an item one of whose missing sequences cannot be embedded; None otherwise."""
    for name, text in missing:
        recipe = recipes[name]
        reported = unusable.get(recipe.key(text, recipe.wanted(len(text))).hex()) or unusable.get(name_of(text, name))
        if why := refusal(text, recipe) or reported:
            return worklist.rejection(item, *why)
    return None


# The stage


BYTES_OF = {"fp32": 4, "fp16": 2, "bf16": 2, BF16_PRODUCTS: 2}
RECORD_BYTES = 512  # what a record takes besides its rows
WORTHWHILE_S = 20  # below this, another task costs more than it saves
MOST_PER_PROCESS = 100_000  # sequences: a process keeps some hundred bytes of each
RATE_OF_CORE, RATE_OF_GPU = 2e10, 2.5e13  # multiply-adds a second; a cautious value, used only to size tasks
BASE_BYTES = 1 << 30  # the interpreter with torch, buffers of results
WORKING_TOKENS = 8192
FEWEST_TOKENS = 1024  # longer sequences are cut into windows, or computed on the CPU


class EmbedStage(Stage):
    """Stores an embedding of each sequence of the data set."""

    name = StageName.EMBED
    kinds = ("embed", "weights", "parity")
    needs = (StageName.SCAN,)
    of_entries = False
    counts_items = False

    def inspect(self, project: Project) -> object:
        return [view.encoding for view in project.encoders.values()]

    def at(self, project: Project, name: str) -> Project:
        return project.encoders[name] if name else project

    def views(self, project: Project) -> Mapping[str, Project]:
        """Return the project as it is for each encoder, by the name that its tasks have."""
        return project.encoders if len(project.encoders) > 1 else {"": project}

    def survey(self, project: Project, folder: RunFolder | None, at_once: int) -> StageSurvey:
        """Look up each distinct sequence in the store, for each encoder; list the missing ones."""
        searches, waiting = {name: _Search.of(view, folder) for name, view in self.views(project).items()}, 0
        with Lines(folder.todo(self.name) if folder else None) as lines:
            for tally in embed_tallies(project, self.views(project), folder, self.recipe(project)):
                waiting += sum(not lacking.missing for lacking in tally.absent)
                for name, part in tally.parts.items():
                    searches[name].found.add_all(part)
                for name, text in dict.fromkeys(lost for lacking in tally.absent for lost in lacking.missing):
                    searches[name].miss(text, lines)
        with _order(folder) as order:
            parts = {name: search.deal(name, order, at_once) for name, search in searches.items()}
        survey = StageSurvey.together(parts) if len(parts) > 1 else parts[""]
        return replace(survey, counts={**survey.counts, "waiting": waiting})

    def processes(self, project: Project) -> int:
        return max(1, project.config.cluster.embed.gpus)

    def mem_bytes(self, project: Project) -> int:
        """Return the memory of a task of the largest encoder."""
        return max(map(embed_bytes, self.views(project).values()))

    def gpu_bytes(self, project: Project) -> int:
        """Return the least memory of a GPU; all encoders use the same GPUs."""
        return max(map(_gpu_bytes, self.views(project).values()))

    def work(self, project: Project, folder: RunFolder, task: int, context: TaskContext) -> Outcomes:
        """Embed the sequences of one task, or of one of its processes."""
        shard = worklist.read_shard(folder, self.name, task)
        project, context = self.at(project, shard.of), _naming_encoder(shard.of, context)
        rows_N2 = np.fromfile(folder.order(self.name), np.uint64, 2 * shard.items, offset=16 * shard.start).reshape(
            -1, 2
        )
        encoding, number, processes = project.encoding, context.place.rank, context.place.world
        if processes > 1:
            lengths_N = rows_N2[:, 1].astype(np.int64)
            costs_N = recipe_costs(lengths_N, encoding.recipe, encoding.weights.dim)
            rows_N2 = rows_N2[deal_shards(lengths_N, costs_N, processes, _group(project))[number]]
        with folder.todo(self.name).open("rb") as file:

            def read(wanted: Sequence[int]) -> list[str]:
                return [os.pread(file.fileno(), int(size), int(at)).decode() for at, size in rows_N2[list(wanted)]]

            if barred := left_out_items(folder, self.name):
                kept = [at for at in range(len(rows_N2)) if name_of(read([at])[0], shard.of) not in barred]
                rows_N2 = rows_N2[kept]
            todo = Texts(rows_N2[:, 1].astype(np.int64), read)
            task_bytes = context.mem_bytes or asked_bytes(project.config.cluster.embed, embed_bytes(project))
            settings = replace(encoding.settings, mem_bytes=task_bytes // processes, shrink=context.shrink)
            if not project.config.cluster.embed.gpus:
                half = WORKING_TOKENS * encoding.weights.dim * 64 // 2
                keep_freed_memory(kept_bytes(half, half + task_bytes - embed_bytes(project)))
            if context.careful:
                settings = replace(settings, cap=1)
            yield from embed_texts(todo, encoding.source, encoding.recipe, settings, encoding.shelves, context)

    def recipe(self, project: Project) -> Mapping[str, Any]:
        plain = dict(zip(self.views(project), self.recipes(project), strict=True))
        return plain if len(plain) > 1 else plain[""]

    def recipes(self, project: Project) -> Sequence[Mapping[str, Any]]:
        recipes = [view.encoding.recipe for view in self.views(project).values()]
        return [recipe.plain(recipe.wanted(0)) for recipe in recipes]

    def judge(self, project: Project, folder: RunFolder, patience_s: float) -> Embedded:
        """Count the items by the content of the store; list the rejected ones."""
        views, recipe = self.views(project), self.recipe(project)

        def required(lacking: LackingItem) -> bool:
            recipes = ((text, views[name].encoding.recipe) for name, text in lacking.missing)
            may_be = [may_be_made(text, recipe, project.only) for text, recipe in recipes]
            return any(may_be) if may_be else project.only.is_all

        def count() -> Embedded:
            total = EmbedTally(parts={name: Sequences() for name in views}, keys={"embed": bytearray()})
            add_blocks(total, folder, embed_tallies(project, views, folder, recipe), required)
            if not total.undone:
                worklist.remember_needed(project, self.name, total.keys["embed"])
            return total.embedded()

        embeddings = (view.encoding.shelves.embeddings for view in views.values())
        return wait_until_complete((*project.shelves.stores(), *embeddings), count, patience_s)

    def check(self, project: Project, folder: RunFolder, judged: Embedded) -> list[str]:  # noqa: ARG002
        """Return a warning for each kind of embeddings that deviate: cut, or of another precision."""
        return [
            f"{count:,} sequence{' is' if count == 1 else 's are'} embedded {name}"
            for name, count in judged.others.items()
        ]


def embed_bytes(project: Project) -> int:
    """Return the memory of one encoder's task: for each process the interpreter, the weights twice, and a batch."""
    dim, processes = project.encoding.weights.dim, max(1, project.config.cluster.embed.gpus)
    return processes * (BASE_BYTES + 2 * 4 * _parameters(project) + WORKING_TOKENS * dim * 64)


def _gpu_bytes(project: Project) -> int:
    """Return the least memory of one encoder's GPU: its context, the weights and a sequence of common length."""
    dim, recipe = project.encoding.weights.dim, project.encoding.recipe
    return BASE_BYTES + BYTES_OF[recipe.precision] * _parameters(project) + FEWEST_TOKENS * dim * 64


@dataclass(slots=True)
class _Search:
    """The sequences for one encoder: their digests, and the places of the missing ones in the list."""

    project: Project
    found: Sequences
    missing: Any  # a column of MISSING
    unnamed: Any  # and of digests

    @classmethod
    def of(cls, project: Project, folder: RunFolder | None) -> _Search:
        """Begin to search; the columns are files of the run, if there is one."""
        if folder is None:
            return cls(project, Sequences(), bytearray(), array("Q"))
        return cls(project, in_files(Sequences(), folder.path), ColumnFile(folder.path), ColumnFile(folder.path))

    def miss(self, text: str, lines: Lines) -> None:
        """Note a missing sequence; list it if this run may embed it."""
        if not may_be_made(text, self.project.encoding.recipe, self.project.only):
            self.unnamed.extend(array("Q", [digest(text)]))
            return
        self.missing.extend(PACKED_MISSING.pack(digest(text), len(text), lines.position))
        lines.write(text)

    def deal(self, name: str, order: _Order, at_once: int) -> StageSurvey:
        """Count the sequences; deal the missing ones to tasks of equal cost."""
        rows_N = np.concatenate(list(distinct_parts(self.missing, MISSING)))
        lengths_N, offsets_N = rows_N["length"].astype(np.int64), rows_N["offset"]
        counts = UNCOUNTED | {
            "refused": count_distinct(self.found.refused),
            "cached": self.found.count().sequences,
            "missing": len(lengths_N),
            "unnamed": count_distinct(self.unnamed),
            "residues": int(lengths_N.sum()),
        }
        counts["items"] = sum(counts[name] for name in ("refused", "cached", "missing", "unnamed"))
        weights, recipe = self.project.encoding.weights, self.project.encoding.recipe
        costs_N = recipe_costs(lengths_N, recipe, weights.dim)
        tasks = _tasks(self.project, len(lengths_N), float(costs_N.sum()), at_once)
        dealt = deal_shards(lengths_N, costs_N, tasks, _group(self.project)) if len(lengths_N) else []
        parts = cap_shards(dealt, _most(self.project))
        shards = tuple(order.add(offsets_N, lengths_N, part, name) for part in parts)
        row_bytes = weights.dim * BYTES_OF[recipe.storage]
        mark_bytes = row_bytes if recipe.cls else 0
        taken = int(lengths_N.sum()) * (row_bytes + 1) + len(lengths_N) * (mark_bytes + RECORD_BYTES)
        return StageSurvey(counts, shards, bytes=taken, cost=float(costs_N.sum()))


@dataclass(slots=True)
class _Order:
    """The order in which tasks take sequences: offset and length of each in the list."""

    file: IO[bytes] | None
    rows: int = 0

    def add(
        self, offsets_N: NDArray[np.uint64], lengths_N: NDArray[np.int64], part: NDArray[np.int64], of: str
    ) -> Shard:
        """Add the sequences of one task."""
        if self.file is not None:
            np.stack([offsets_N[part], lengths_N[part].astype(np.uint64)], axis=1).tofile(self.file)
        start, self.rows = self.rows, self.rows + len(part)
        return Shard(start, self.rows, len(part), int(lengths_N[part].max()), of)


@contextmanager
def _order(folder: RunFolder | None) -> Iterator[_Order]:
    """Open the order file of a run; without a run only count."""
    if folder is None:
        yield _Order(None)
        return
    path = folder.order(StageName.EMBED)
    with writing_run(path), path.open("wb") as file:
        yield _Order(file)


def _naming_encoder(of: str, context: TaskContext) -> TaskContext:
    """Add the encoder to the names of items in work, so that only the encoder that they kill skips them."""
    return replace(context, on=lambda names: context.on([f"{name} of {of}" for name in names])) if of else context


def _group(project: Project) -> int:
    """Return how many sequences of similar length stay together, so that every task can form full batches."""
    batch, most = project.config.embed.batch, project.config.cluster.embed.items_per_task
    group = int(batch.cap) if batch.policy == "divisor" and batch.cap != "auto" else 1
    return group if most == "auto" else min(group, int(most))


def _tasks(project: Project, sequences: int, cost: float, at_once: int) -> int:
    """Return the number of tasks: as configured, else by minutes, and enough for all that can run at once."""
    resources = project.config.cluster.embed
    if resources.items_per_task != "auto":
        return max(1, math.ceil(sequences / int(resources.items_per_task)))
    rate = RATE_OF_GPU * resources.gpus or RATE_OF_CORE * resources.cpus
    tasks = worklist.tasks_for(cost / rate, resources.minutes_per_task, at_once, WORTHWHILE_S)
    return min(tasks, math.ceil(sequences / _group(project)))


def _most(project: Project) -> int:
    """Return the most sequences that a task by minutes may have."""
    resources = project.config.cluster.embed
    return MOST_PER_PROCESS * max(1, resources.gpus) if resources.items_per_task == "auto" else sys.maxsize


def _parameters(project: Project) -> int:
    """Return the approximate number of the encoder's parameters."""
    weights = project.encoding.weights
    if weights.family not in FAMILIES:  # 4 bytes each at most as they are stored; more where they are of half precision
        return weights.bytes // 3
    return weights.layers * (12 * weights.dim**2 + 13 * weights.dim)
