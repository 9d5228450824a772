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

from pipeline.encoder.batches import deal
from pipeline.encoder.residues import texts
from pipeline.encoder.schedule import costs
from pipeline.encoder.tokens import BadSequence, tokenize
from pipeline.records import Reason
from pipeline.runs import scanning, todo
from pipeline.runs.folder import writing
from pipeline.runs.left_out import left_out
from pipeline.runs.project import asked_bytes
from pipeline.runs.scanning import Known
from pipeline.runs.todo import Found, Lines, Shard
from pipeline.stages.embed import Texts, embed, name_of

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from numpy.typing import NDArray

    from pipeline.encoder.recipe import Recipe
    from pipeline.records import Tell
    from pipeline.runs.folder import RunFolder
    from pipeline.runs.only import Only
    from pipeline.runs.project import Project
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
    entries = todo.frozen_items(project, folder)
    with Lines(folder.todo(NAME) if folder else None) as lines:
        for chunk in todo.chunks(scanning.known(project, folder, entries), todo.LOOKED_UP_AT_ONCE):
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
    found: Sequence[str], recipe: Recipe, verifier: Verifier, seen: _Sequences, lines: Lines, only: Only
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


def refusal(text: str, recipe: Recipe) -> tuple[Reason, str] | None:
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
    costs_N = costs(lengths_N, recipe, weights.dim)
    tasks = _tasks(project, len(lengths_N), float(costs_N.sum()), at_once)
    dealt = deal(lengths_N, costs_N, tasks, _group(project)) if len(lengths_N) else []
    parts = [part for part in dealt if len(part)]
    if folder is not None:
        with writing(folder.order(NAME)), folder.order(NAME).open("wb") as file:
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
    shard = todo.read_shard(folder, NAME, task)
    rows_N2 = np.fromfile(folder.order(NAME), np.uint64, 2 * shard.items, offset=16 * shard.start).reshape(-1, 2)
    encoding = project.encoding
    if part[1] > 1:
        lengths_N = rows_N2[:, 1].astype(np.int64)
        costs_N = costs(lengths_N, encoding.recipe, encoding.weights.dim)
        rows_N2 = rows_N2[deal(lengths_N, costs_N, part[1], _group(project))[part[0]]]
    barred = left_out(folder, NAME)
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
