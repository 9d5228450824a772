"""Stage embed: finds the sequences without an embedding, cuts them into tasks of equal cost, and embeds them."""

from __future__ import annotations

import math
import os
from array import array
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from pipeline.encoder.checkpoints.checkpoint_files import FAMILIES
from pipeline.encoder.embedding_recipe import BF16_PRODUCTS, BadSequence, refuse_letters, texts
from pipeline.encoder.engine.token_batches import deal_shards, recipe_costs
from pipeline.journal.attempts import left_out_items, refused_parts
from pipeline.journal.ledger import write_rejections
from pipeline.journal.run_folder import writing_run
from pipeline.project.project import asked_bytes
from pipeline.records import Reason, Rejection
from pipeline.runs.dataset import worklist
from pipeline.runs.dataset.standing import Standing, data_state, recall_standing, remember_standing
from pipeline.runs.dataset.worklist import KnownItem, Lines, Shard, StageSurvey
from pipeline.runs.workflow.stage import Judged, Stage, wait_until_complete
from pipeline.stage_names import StageName
from pipeline.stages.embed import Texts, embed_texts, sequence_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from numpy.typing import NDArray

    from pipeline.encoder.embedding_recipe import EmbeddingRecipe, Variant
    from pipeline.journal.run_folder import RunFolder
    from pipeline.project.project import Project
    from pipeline.project.restriction import Only
    from pipeline.records import TaskContext
    from pipeline.runs.workflow.stage import Outcomes
    from pipeline.stages.embed import EmbeddingVerifier

BYTES_OF = {"fp32": 4, "fp16": 2, "bf16": 2, BF16_PRODUCTS: 2}
RECORD_BYTES = 512  # what a record takes besides its rows
WORTHWHILE_S = 20  # from when on another task pays
RATE_OF_CORE, RATE_OF_GPU = 2e10, 2.5e13  # multiply-adds a second; cautious, and only for cutting work into tasks
BASE_BYTES = 1 << 30  # the interpreter with torch, buffers of results
WORKING_TOKENS = 8192
FEWEST_TOKENS = 1024  # sequences that do not fit are cut into windows, or computed on the CPU


class EmbedStage(Stage):
    """The sequences of a data set in, an embedding of each in the store."""

    name = StageName.EMBED
    kinds = ("embed", "weights", "parity", "limits")
    needs = (StageName.SCAN,)
    of_entries = False
    process_per_gpu = True
    counts_items = False

    def inspect(self, project: Project) -> object:
        return project.encoding

    def survey(self, project: Project, folder: RunFolder | None, at_once: int) -> StageSurvey:
        """Look each distinct sequence up in the store, and list those that are missing."""
        if standing := recall_standing(project, folder, self.name, self.recipe(project)):
            return StageSurvey(standing.counts, ())
        recipe, verifier = project.encoding.recipe, project.encoding.verifier()
        columns, waiting = _Sequences(), 0
        entries = worklist.frozen_items(project, folder)
        with Lines(folder.todo(self.name) if folder else None) as lines:
            for chunk in worklist.known_items(project, folder, entries):
                items = [item for item in chunk if isinstance(item, KnownItem)]
                waiting += sum(item.inventory is None for item in items)
                sequences = (text for item in items if item.inventory for text in texts(item.inventory, recipe.context))
                _look_up(list(dict.fromkeys(sequences)), recipe, verifier, columns, lines, project.only)
        missing, first = np.unique(array_of(columns.missing), return_index=True)
        lengths_N, offsets_N = array_of(columns.lengths)[first], array_of(columns.offsets)[first]
        counts = {
            "refused": len(np.unique(array_of(columns.refused))),
            "unusable": 0,
            "cached": len(np.unique(array_of(columns.cached))),
            "missing": len(missing),
            "waiting": waiting,
            "unnamed": len(np.unique(array_of(columns.unnamed))),
            "residues": int(lengths_N.sum()),
        }
        counts["items"] = sum(counts[name] for name in ("refused", "cached", "missing", "unnamed"))
        return _deal(project, folder, at_once, counts, lengths_N.astype(np.int64), offsets_N)

    def mem_bytes(self, project: Project) -> int:
        """Return the memory of a task: for each process the interpreter, the weights as loaded and as used, a batch."""
        dim, processes = project.encoding.weights.dim, max(1, project.config.cluster.embed.gpus)
        return processes * (BASE_BYTES + 2 * 4 * _parameters(project) + WORKING_TOKENS * dim * 64)

    def gpu_bytes(self, project: Project) -> int:
        """Return the least memory of a GPU: for the card's context, the weights and a sequence of common length."""
        dim, recipe = project.encoding.weights.dim, project.encoding.recipe
        return BASE_BYTES + BYTES_OF[recipe.precision] * _parameters(project) + FEWEST_TOKENS * dim * 64

    def work(self, project: Project, folder: RunFolder, task: int, tell: TaskContext) -> Outcomes:
        """Embed the sequences of one task, or of one of its processes."""
        shard = worklist.read_shard(folder, self.name, task)
        rows_N2 = np.fromfile(folder.order(self.name), np.uint64, 2 * shard.items, offset=16 * shard.start).reshape(
            -1, 2
        )
        encoding, (number, processes) = project.encoding, tell.part
        if processes > 1:
            lengths_N = rows_N2[:, 1].astype(np.int64)
            costs_N = recipe_costs(lengths_N, encoding.recipe, encoding.weights.dim)
            rows_N2 = rows_N2[deal_shards(lengths_N, costs_N, processes, _group(project))[number]]
        with folder.todo(self.name).open("rb") as file:

            def read(wanted: Sequence[int]) -> list[str]:
                return [os.pread(file.fileno(), int(size), int(at)).decode() for at, size in rows_N2[list(wanted)]]

            if barred := left_out_items(folder, self.name):
                kept = [at for at in range(len(rows_N2)) if sequence_name(read([at])[0]) not in barred]
                rows_N2 = rows_N2[kept]
            todo = Texts(rows_N2[:, 1].astype(np.int64), read)
            task_bytes = tell.mem_bytes or asked_bytes(project.config.cluster.embed, self.mem_bytes(project))
            settings = replace(encoding.settings, mem_bytes=task_bytes // processes, shrink=tell.shrink)
            if tell.careful:
                settings = replace(settings, cap=1)
            yield from embed_texts(todo, encoding.source, encoding.recipe, settings, encoding.shelves, tell)

    def recipe(self, project: Project) -> Mapping[str, Any]:
        return project.encoding.recipe.plain(project.encoding.recipe.wanted(0))

    def judge(self, project: Project, folder: RunFolder, patience_s: float) -> Embedded:
        """Count what the store has of every item, and list what was left out."""
        if standing := recall_standing(project, folder, self.name, self.recipe(project)):
            return Embedded.standing(standing)
        state = data_state(project, folder)
        unusable = refused_parts(folder, self.name) | left_out_items(folder, self.name)

        def count() -> Embedded:
            embedded, sequences = Embedded(), _JudgedSequences()
            write_rejections(folder.rejected, _tally(project, folder, unusable, embedded, sequences))
            sequences.count(embedded)
            if not embedded.undone:
                worklist.remember_needed(project, self.name, sequences.keys)
            if not embedded.undone + embedded.unnamed and not embedded.others:
                counts = dict.fromkeys(("unusable", "missing", "waiting", "unnamed", "residues"), 0)
                counts |= {"refused": len(sequences.refused), "cached": embedded.sequences}
                counts["items"] = counts["refused"] + counts["cached"]
                found, keys = Standing(counts, embedded.to_json()), {"scan": sequences.known, "embed": sequences.keys}
                remember_standing(
                    project, folder, self.name, self.recipe(project), state, found, keys, [folder.rejected]
                )
            return embedded

        stores = (*project.shelves.stores(), project.encoding.shelves.embeddings)
        return wait_until_complete(stores, count, patience_s)

    def check(self, project: Project, folder: RunFolder, judged: Embedded) -> list[str]:  # noqa: ARG002
        """Return a warning for each kind of embeddings that are cut, or of another precision than was wanted."""
        return [
            f"{count:,} sequence{' is' if count == 1 else 's are'} embedded {name}"
            for name, count in judged.others.items()
        ]


@dataclass(slots=True)
class _Sequences:
    """Columns that a survey keeps of the sequences: digests, and offset and length of those that are missing."""

    cached: array[int] = field(default_factory=lambda: array("Q"))
    refused: array[int] = field(default_factory=lambda: array("Q"))
    missing: array[int] = field(default_factory=lambda: array("Q"))
    unnamed: array[int] = field(default_factory=lambda: array("Q"))
    offsets: array[int] = field(default_factory=lambda: array("Q"))
    lengths: array[int] = field(default_factory=lambda: array("Q"))


def _look_up(
    sequences: Sequence[str],
    recipe: EmbeddingRecipe,
    verifier: EmbeddingVerifier,
    columns: _Sequences,
    lines: Lines,
    only: Only,
) -> None:
    """Sort sequences into those that cannot be encoded, those that are cached, and those that are missing."""
    good = []
    for text in sequences:
        if refusal(text, recipe) is None:
            good.append(text)
        else:
            columns.refused.append(digest(text))
    for text, variant in zip(good, verifier.look_up(good), strict=True):
        if variant is not None:
            columns.cached.append(digest(text))
            continue
        if not any(only.names(StageName.EMBED, recipe.key(text, accepted)) for accepted in recipe.accepted(len(text))):
            columns.unnamed.append(digest(text))
            continue
        columns.missing.append(digest(text))
        columns.offsets.append(lines.position)
        columns.lengths.append(len(text))
        lines.write(text)


def refusal(text: str, recipe: EmbeddingRecipe) -> tuple[Reason, str] | None:
    """Return why a sequence cannot be embedded; None where it can."""
    if recipe.refuses(len(text)):
        what = f"a sequence of {len(text):,} residues; embed.long allows {recipe.length:,}"
        return Reason.SEQUENCE_TOO_LONG, what
    try:
        refuse_letters(text, recipe.letters)
    except BadSequence as error:
        return Reason.BAD_SEQUENCE, str(error)
    return None


def _deal(
    project: Project,
    folder: RunFolder | None,
    at_once: int,
    counts: dict[str, int],
    lengths_N: NDArray[np.int64],
    offsets_N: NDArray[np.uint64],
) -> StageSurvey:
    """Cut the missing sequences into tasks of equal cost, and write the order in which the tasks take them."""
    weights, recipe = project.encoding.weights, project.encoding.recipe
    costs_N = recipe_costs(lengths_N, recipe, weights.dim)
    tasks = _tasks(project, len(lengths_N), float(costs_N.sum()), at_once)
    dealt = deal_shards(lengths_N, costs_N, tasks, _group(project)) if len(lengths_N) else []
    parts = [part for part in dealt if len(part)]
    if folder is not None:
        with writing_run(folder.order(StageName.EMBED)), folder.order(StageName.EMBED).open("wb") as file:
            for part in parts:
                np.stack([offsets_N[part], lengths_N[part].astype(np.uint64)], axis=1).tofile(file)
    ends = np.cumsum([len(part) for part in parts], dtype=np.int64).tolist()
    largest = [int(lengths_N[part].max()) for part in parts]
    shards = tuple(
        Shard(end - len(part), end, len(part), longest) for part, end, longest in zip(parts, ends, largest, strict=True)
    )
    row_bytes = weights.dim * BYTES_OF[recipe.storage]
    taken = int(lengths_N.sum()) * (row_bytes + 1) + len(lengths_N) * RECORD_BYTES
    return StageSurvey(counts, shards, bytes=taken, cost=float(costs_N.sum()))


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


def _parameters(project: Project) -> int:
    """Return the approximate number of the encoder's parameters."""
    weights = project.encoding.weights
    if weights.family not in FAMILIES:  # 4 bytes each at most as they are stored; more where they are of half precision
        return weights.bytes // 3
    return weights.layers * (12 * weights.dim**2 + 13 * weights.dim)


def digest(text: str) -> int:
    """Return a 64-bit hash of a text."""
    return xxhash.xxh3_64_intdigest(text.encode())


def array_of(column: array[int]) -> NDArray[np.uint64]:
    """Return a numpy view of a column."""
    return np.frombuffer(column, np.uint64)


@dataclass(slots=True)
class Embedded(Judged):
    """The result of embedding a data set."""

    sequences: int = 0
    residues: int = 0
    longest: int = 0
    others: dict[str, int] = field(default_factory=dict)  # cut sequences, and other precisions than wanted → count


@dataclass(slots=True)
class _JudgedSequences:
    """Columns about the sequences of all items, until each distinct one is counted: 33 bytes of each."""

    digests: array[int] = field(default_factory=lambda: array("Q"))
    lengths: array[int] = field(default_factory=lambda: array("Q"))
    kinds: array[int] = field(default_factory=lambda: array("B"))
    keys: bytearray = field(default_factory=bytearray)  # of the records that were found
    known: bytearray = field(default_factory=bytearray)  # of the inventories that were
    refused: set[int] = field(default_factory=set)  # digests of those that cannot be encoded
    names: list[str] = field(default_factory=lambda: [""])  # of the kinds; the first is the wanted variant

    def add(self, text: str, variant: Variant, recipe_wants: Variant) -> None:
        """Add a sequence that the store has."""
        name = "" if variant == recipe_wants and not variant.cut else describe(variant)
        if name not in self.names:
            self.names.append(name)
        self.digests.append(digest(text))
        self.lengths.append(len(text))
        self.kinds.append(self.names.index(name))

    def count(self, embedded: Embedded) -> None:
        """Count each distinct sequence."""
        _, first = np.unique(array_of(self.digests), return_index=True)
        lengths_N = array_of(self.lengths)[first]
        kinds = np.bincount(np.frombuffer(self.kinds, np.uint8)[first], minlength=len(self.names))
        embedded.sequences, embedded.residues = len(first), int(lengths_N.sum())
        embedded.longest = int(lengths_N.max(initial=0))
        embedded.others = {name: int(kinds[number]) for number, name in enumerate(self.names) if number}


def describe(variant: Variant) -> str:
    """Return a variant in words."""
    if variant.cut is None:
        return f"in {variant.precision}"
    how = {"windows": "in windows of {}", "truncate": "truncated to {}"}[variant.cut.policy]
    return f"{how.format(variant.cut.length)} residues, in {variant.precision}"


def _tally(
    project: Project,
    folder: RunFolder,
    unusable: Mapping[str, tuple[Reason, str]],
    embedded: Embedded,
    sequences: _JudgedSequences,
) -> Iterator[dict[str, Any]]:
    """Count every item and yield the rejected ones."""
    recipe, verifier = project.encoding.recipe, project.encoding.verifier()
    is_required = worklist.required_lines(folder, StageName.EMBED)
    for chunk in worklist.known_items(project, folder, worklist.read_items(folder.items), sequences.known):
        absent = _absent(chunk, recipe, verifier, sequences)
        sequences.refused |= {digest(text) for text in absent if refusal(text, recipe)}
        for entry in chunk:
            missing = [] if isinstance(entry, Rejection) else _missing_of(entry, absent, recipe)
            rejected = entry if isinstance(entry, Rejection) else _rejected(entry, missing, unusable, recipe)
            if rejected is not None:
                embedded.reject(rejected)
                yield rejected.to_json()
            elif isinstance(entry, KnownItem) and entry.inventory is not None and not missing:
                embedded.items += 1
            else:
                assert isinstance(entry, KnownItem)
                required = any(map(is_required, missing)) if missing else project.only.is_all
                embedded.miss(entry.item.id, required=required)


def _rejected(
    known: KnownItem, missing: list[str], unusable: Mapping[str, tuple[Reason, str]], recipe: EmbeddingRecipe
) -> Rejection | None:
    """Return the rejection of an item one of whose missing sequences cannot be embedded; None otherwise."""
    for text in missing:
        key = recipe.key(text, recipe.wanted(len(text))).hex()
        if why := refusal(text, recipe) or unusable.get(key) or unusable.get(sequence_name(text)):
            return worklist.rejection(known.item, *why)
    return None


def _missing_of(known: KnownItem, absent: set[str], recipe: EmbeddingRecipe) -> list[str]:
    """Return the sequences of an item that are absent from the store; none of an item that is not scanned."""
    return [text for text in texts(known.inventory, recipe.context) if text in absent] if known.inventory else []


def _absent(
    chunk: Iterable[KnownItem | Rejection],
    recipe: EmbeddingRecipe,
    verifier: EmbeddingVerifier,
    sequences: _JudgedSequences,
) -> set[str]:
    """Return the sequences of some items that are absent from the store; add the others to `sequences`."""
    inventories = [known.inventory for known in chunk if isinstance(known, KnownItem) and known.inventory]
    wanted = list({text: None for inventory in inventories for text in texts(inventory, recipe.context)})
    variants = verifier.look_up(wanted)
    for text, variant in zip(wanted, variants, strict=True):
        if variant is not None:
            sequences.add(text, variant, recipe.wanted(len(text)))
            sequences.keys += recipe.key(text, variant)
    return {text for text, variant in zip(wanted, variants, strict=True) if variant is None}
