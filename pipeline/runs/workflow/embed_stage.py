"""Stage embed in a run: which sequences have no embedding yet, cut into tasks of equal cost; and one task's work."""

from __future__ import annotations

import math
import os
from array import array
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from pipeline.encoder.embedding_recipe import BadSequence, texts, tokenize
from pipeline.encoder.engine.token_batches import deal_shards, recipe_costs
from pipeline.journal.attempts import left_out_items
from pipeline.journal.ledger import LedgerReader, write_rejections
from pipeline.journal.run_folder import writing_run
from pipeline.project.project import asked_bytes
from pipeline.records import EventKind, Reason, Rejection
from pipeline.runs.dataset import outcome, worklist
from pipeline.runs.dataset.outcome import Judged, patiently
from pipeline.runs.dataset.worklist import Found, Lines, Shard
from pipeline.runs.workflow import scan_stage
from pipeline.runs.workflow.scan_stage import Known
from pipeline.stages.embed import Texts, embed, name_of
from pipeline.store.key_lists import in_chunks

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from numpy.typing import NDArray

    from pipeline.encoder.embedding_recipe import EmbeddingRecipe, Variant
    from pipeline.journal.run_folder import RunFolder
    from pipeline.project.project import Project
    from pipeline.project.restriction import Only
    from pipeline.records import Tell
    from pipeline.stages.embed import Verifier

NAME = "embed"
BYTES_OF = {"fp32": 4, "fp16": 2, "bf16": 2}
RECORD_BYTES = 512  # what a record takes besides its rows
WORTHWHILE_S = 20  # from when on another task pays
RATE_OF_CORE, RATE_OF_GPU = 2e10, 2.5e13  # multiply-adds a second; cautious, and only for cutting work into tasks
BASE_BYTES = 1 << 30  # the interpreter with torch, buffers of results
WORKING_TOKENS = 8192
FEWEST_TOKENS = 1024  # longer sequences than fit are cut into windows, or computed on the CPU


@dataclass(slots=True)
class _Sequences:
    """What a survey keeps of each sequence it meets: 16 bytes, and 16 more where it is missing."""

    cached: array[int] = field(default_factory=lambda: array("Q"))
    refused: array[int] = field(default_factory=lambda: array("Q"))
    missing: array[int] = field(default_factory=lambda: array("Q"))
    unnamed: array[int] = field(default_factory=lambda: array("Q"))
    offsets: array[int] = field(default_factory=lambda: array("Q"))
    lengths: array[int] = field(default_factory=lambda: array("Q"))


def survey(project: Project, folder: RunFolder | None, at_once: int) -> Found:
    """Compare the sequences of a data set with the store, each once; write down those that are missing."""
    encoding = project.encoding
    seen, waiting, verifier = _Sequences(), 0, encoding.verifier()
    entries = worklist.frozen_items(project, folder)
    with Lines(folder.todo(NAME) if folder else None) as lines:
        for chunk in in_chunks(scan_stage.known(project, folder, entries), worklist.LOOKED_UP_AT_ONCE):
            items = [one for one in chunk if isinstance(one, Known)]
            waiting += sum(one.inventory is None for one in items)
            found = (text for one in items if one.inventory for text in texts(one.inventory, encoding.recipe.context))
            _look_up(list(dict.fromkeys(found)), encoding.recipe, verifier, seen, lines, project.only)
    missing, first = np.unique(array_of(seen.missing), return_index=True)
    lengths_N, offsets_N = array_of(seen.lengths)[first], array_of(seen.offsets)[first]
    counts = {
        "refused": len(np.unique(array_of(seen.refused))),
        "unusable": 0,
        "cached": len(np.unique(array_of(seen.cached))),
        "missing": len(missing),
        "waiting": waiting,
        "unnamed": len(np.unique(array_of(seen.unnamed))),
        "residues": int(lengths_N.sum()),
    }
    counts["items"] = sum(counts[name] for name in ("refused", "cached", "missing", "unnamed"))
    return _deal(project, folder, at_once, counts, lengths_N.astype(np.int64), offsets_N)


def _look_up(
    found: Sequence[str], recipe: EmbeddingRecipe, verifier: Verifier, seen: _Sequences, lines: Lines, only: Only
) -> None:
    """Sort sequences into those that cannot be encoded, those that are cached, and those that are missing."""
    good = []
    for text in found:
        if refusal(text, recipe) is None:
            good.append(text)
        else:
            seen.refused.append(digest(text))
    for text, variant in zip(good, verifier.look_up(good), strict=True):
        if variant is not None:
            seen.cached.append(digest(text))
            continue
        if not any(only.names(NAME, recipe.key(text, one)) for one in recipe.accepted(len(text))):
            seen.unnamed.append(digest(text))
            continue
        seen.missing.append(digest(text))
        seen.offsets.append(lines.position)
        seen.lengths.append(len(text))
        lines.write(text)


def refusal(text: str, recipe: EmbeddingRecipe) -> tuple[Reason, str] | None:
    """Return why a sequence is not even tried."""
    if recipe.refuses(len(text)):
        what = f"a sequence of {len(text):,} residues; embed.long allows {recipe.length:,}"
        return Reason.SEQUENCE_TOO_LONG, what
    try:
        tokenize(text)
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
) -> Found:
    """Cut the missing sequences into tasks of equal cost, and write down which lines each takes."""
    weights, recipe = project.encoding.weights, project.encoding.recipe
    costs_N = recipe_costs(lengths_N, recipe, weights.dim)
    tasks = _tasks(project, len(lengths_N), float(costs_N.sum()), at_once)
    dealt = deal_shards(lengths_N, costs_N, tasks, _group(project)) if len(lengths_N) else []
    parts = [part for part in dealt if len(part)]
    if folder is not None:
        with writing_run(folder.order(NAME)), folder.order(NAME).open("wb") as file:
            for part in parts:
                np.stack([offsets_N[part], lengths_N[part].astype(np.uint64)], axis=1).tofile(file)
    ends = np.cumsum([len(part) for part in parts], dtype=np.int64).tolist()
    largest = [int(lengths_N[part].max()) for part in parts]
    shards = tuple(
        Shard(end - len(part), end, len(part), longest) for part, end, longest in zip(parts, ends, largest, strict=True)
    )
    row_bytes = weights.dim * BYTES_OF[recipe.storage]
    taken = int(lengths_N.sum()) * (row_bytes + 1) + len(lengths_N) * RECORD_BYTES
    return Found(counts, shards, bytes=taken, cost=float(costs_N.sum()))


def _group(project: Project) -> int:
    """Return how many neighbours in length stay together, so that equal batches can be cut from every task."""
    batch, asked = project.config.embed.batch, project.config.cluster.embed.items_per_task
    group = int(batch.cap) if batch.policy == "divisor" and batch.cap != "auto" else 1
    return group if asked == "auto" else min(group, int(asked))


def _tasks(project: Project, sequences: int, cost: float, at_once: int) -> int:
    """Return how many tasks there are: as configured, else of some minutes, and enough for all that can run at once."""
    resources = project.config.cluster.embed
    if resources.items_per_task != "auto":
        return max(1, math.ceil(sequences / int(resources.items_per_task)))
    rate = RATE_OF_GPU * resources.gpus or RATE_OF_CORE * resources.cpus
    worthwhile = min(at_once, math.ceil(cost / (rate * WORTHWHILE_S)))
    return min(
        max(1, math.ceil(cost / (rate * 60 * resources.minutes_per_task)), worthwhile),
        math.ceil(sequences / _group(project)),
    )


def mem_bytes(project: Project) -> int:
    """Return the memory of a task: for each process the interpreter, the weights as stored and as used, a batch."""
    weights = project.encoding.weights
    parameters = weights.layers * (12 * weights.dim**2 + 13 * weights.dim)
    processes = max(1, project.config.cluster.embed.gpus)
    return processes * (BASE_BYTES + 2 * 4 * parameters + WORKING_TOKENS * weights.dim * 64)


def gpu_bytes(project: Project) -> int:
    """Return the memory that a card must have at least: a context, the weights, and one sequence of common length."""
    weights, recipe = project.encoding.weights, project.encoding.recipe
    parameters = weights.layers * (12 * weights.dim**2 + 13 * weights.dim)
    return BASE_BYTES + BYTES_OF[recipe.precision] * parameters + FEWEST_TOKENS * weights.dim * 64


def work(
    project: Project, folder: RunFolder, task: int, tell: Tell, part: tuple[int, int] = (0, 1)
) -> Generator[Reason | None, None, None]:
    """Embed the sequences of one task, or of one of its processes."""
    shard = worklist.read_shard(folder, NAME, task)
    rows_N2 = np.fromfile(folder.order(NAME), np.uint64, 2 * shard.items, offset=16 * shard.start).reshape(-1, 2)
    encoding = project.encoding
    if part[1] > 1:
        lengths_N = rows_N2[:, 1].astype(np.int64)
        costs_N = recipe_costs(lengths_N, encoding.recipe, encoding.weights.dim)
        rows_N2 = rows_N2[deal_shards(lengths_N, costs_N, part[1], _group(project))[part[0]]]
    barred = left_out_items(folder, NAME)
    with folder.todo(NAME).open("rb") as file:

        def read(wanted: Sequence[int]) -> list[str]:
            return [os.pread(file.fileno(), int(size), int(at)).decode() for at, size in rows_N2[list(wanted)]]

        if barred:
            kept = [at for at in range(len(rows_N2)) if name_of(read([at])[0]) not in barred]
            rows_N2 = rows_N2[kept]
        found = Texts(rows_N2[:, 1].astype(np.int64), read)
        task_bytes = tell.mem_bytes or asked_bytes(project.config.cluster.embed, mem_bytes(project))
        settings = replace(encoding.settings, mem_bytes=task_bytes // part[1], shrink=tell.shrink)
        if tell.careful:
            settings = replace(settings, cap=1)
        yield from embed(found, Path(encoding.weights.path), encoding.recipe, settings, encoding.shelves, tell)


def digest(text: str) -> int:
    """Return a number that stands for a text."""
    return xxhash.xxh3_64_intdigest(text.encode())


def array_of(column: array[int]) -> NDArray[np.uint64]:
    """View a column as numpy does."""
    return np.frombuffer(column, np.uint64)


@dataclass(slots=True)
class Embedded(Judged):
    """The numbers of an embedded data set."""

    sequences: int = 0
    residues: int = 0
    longest: int = 0
    others: dict[str, int] = field(default_factory=dict)  # cut sequences, and stand-ins for what was wanted → sequences


@dataclass(slots=True)
class _JudgedSequences:
    """What is kept of each sequence that was met, until each is counted once: 33 bytes."""

    digests: array[int] = field(default_factory=lambda: array("Q"))
    lengths: array[int] = field(default_factory=lambda: array("Q"))
    kinds: array[int] = field(default_factory=lambda: array("B"))
    keys: bytearray = field(default_factory=bytearray)  # of the records that were found
    names: list[str] = field(default_factory=lambda: [""])  # of the kinds; the first is the wanted variant

    def add(self, text: str, variant: Variant, recipe_wants: Variant) -> None:
        """Keep one sequence that the store has."""
        name = "" if variant == recipe_wants and not variant.cut else describe(variant)
        if name not in self.names:
            self.names.append(name)
        self.digests.append(digest(text))
        self.lengths.append(len(text))
        self.kinds.append(self.names.index(name))

    def count(self, embedded: Embedded) -> None:
        """Count each sequence once."""
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


def judge(project: Project, folder: RunFolder, patience_s: float) -> Embedded:
    """Count what the store has of every item, and list what was left out."""
    refused, barred = _refused(folder), left_out_items(folder, NAME)

    def look() -> Embedded:
        embedded, sequences = Embedded(), _JudgedSequences()
        write_rejections(folder.rejected, _tally(project, folder, refused | barred, embedded, sequences))
        sequences.count(embedded)
        if not embedded.undone:
            outcome.keep(project, NAME, sequences.keys)
        return embedded

    return patiently((*project.shelves.stores(), project.encoding.shelves.embeddings), look, patience_s)


def check(_project: Project, _folder: RunFolder, embedded: Embedded) -> list[str]:
    """Say which embeddings are not of a whole sequence, or of another precision that the configuration allows."""
    return [
        f"{count:,} sequence{' is' if count == 1 else 's are'} embedded {name}"
        for name, count in embedded.others.items()
    ]


def _refused(folder: RunFolder) -> dict[str, tuple[Reason, str]]:
    """Return what the tasks of this run could not embed, by key."""
    events = (event for event in LedgerReader(folder).fresh() if event.kind is EventKind.REFUSED)
    return {event.data["key"]: (Reason(event.data["reason"]), event.data["detail"]) for event in events}


def _tally(
    project: Project,
    folder: RunFolder,
    refused: Mapping[str, tuple[Reason, str]],
    embedded: Embedded,
    sequences: _JudgedSequences,
) -> Iterator[dict[str, Any]]:
    """Count every item and yield the rejected ones."""
    recipe, verifier = project.encoding.recipe, project.encoding.verifier()
    asked = worklist.asked(folder, NAME)
    for chunk in in_chunks(
        scan_stage.known(project, folder, worklist.read_items(folder.items)), worklist.LOOKED_UP_AT_ONCE
    ):
        absent = _absent(chunk, recipe, verifier, sequences)
        for one in chunk:
            judged = one if isinstance(one, Rejection) else _judge_item(one, absent, refused, recipe)
            if isinstance(judged, Rejection):
                embedded.reject(judged)
                yield judged.to_json()
            elif judged:
                embedded.items += 1
            else:
                assert isinstance(one, Known)
                lacks = _lacks(one, absent, recipe)
                embedded.miss(one.item.id, asked=any(map(asked, lacks)) if lacks else project.only.is_all)


def _judge_item(
    one: Known, absent: set[str], refused: Mapping[str, tuple[Reason, str]], recipe: EmbeddingRecipe
) -> Rejection | bool:
    """Say whether everything of an item is embedded; or why it never will be."""
    if one.inventory is None:
        return False
    missing = _lacks(one, absent, recipe)
    for text in missing:
        key = recipe.key(text, recipe.wanted(len(text))).hex()
        if why := refusal(text, recipe) or refused.get(key) or refused.get(name_of(text)):
            return scan_stage.rejection(one.item, *why)
    return not missing


def _lacks(one: Known, absent: set[str], recipe: EmbeddingRecipe) -> list[str]:
    """Return the sequences of an item that the store does not have, as far as they are known."""
    return [text for text in texts(one.inventory, recipe.context) if text in absent] if one.inventory else []


def _absent(
    chunk: Iterable[Known | Rejection], recipe: EmbeddingRecipe, verifier: Verifier, sequences: _JudgedSequences
) -> set[str]:
    """Return which sequences of some items the store does not have; those that it has are kept for counting."""
    inventories = [one.inventory for one in chunk if isinstance(one, Known) and one.inventory]
    wanted = list({text: None for one in inventories for text in texts(one, recipe.context)})
    variants = verifier.look_up(wanted)
    for text, variant in zip(wanted, variants, strict=True):
        if variant is not None:
            sequences.add(text, variant, recipe.wanted(len(text)))
            sequences.keys += recipe.key(text, variant)
    return {text for text, variant in zip(wanted, variants, strict=True) if variant is None}
