"""What a data set has in embeddings, by what the store can serve."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pipeline.encoder.residues import texts
from pipeline.records import EventKind, Reason, Rejection
from pipeline.runs import remembered, scanning, todo
from pipeline.runs.embedding import NAME, array_of, digest, refusal
from pipeline.runs.judged import Judged
from pipeline.runs.ledger import Reader, write_rejections
from pipeline.runs.left_out import left_out
from pipeline.runs.patience import patiently
from pipeline.runs.scanning import Known
from pipeline.stages.embed import name_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Any

    from pipeline.encoder.recipe import Recipe, Variant
    from pipeline.runs.folder import RunFolder
    from pipeline.runs.project import Project
    from pipeline.stages.embed import Verifier


@dataclass(slots=True)
class Embedded(Judged):
    """The numbers of an embedded data set."""

    sequences: int = 0
    residues: int = 0
    longest: int = 0
    others: dict[str, int] = field(default_factory=dict)  # cut sequences, and stand-ins for what was wanted → sequences


@dataclass(slots=True)
class _Sequences:
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
    refused, barred = _refused(folder), left_out(folder, NAME)

    def look() -> Embedded:
        embedded, sequences = Embedded(), _Sequences()
        write_rejections(folder.rejected, _tally(project, folder, refused | barred, embedded, sequences))
        sequences.count(embedded)
        if not embedded.undone:
            remembered.keep(project, NAME, sequences.keys)
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
    events = (event for event in Reader(folder).fresh() if event.kind is EventKind.REFUSED)
    return {event.data["key"]: (Reason(event.data["reason"]), event.data["detail"]) for event in events}


def _tally(
    project: Project,
    folder: RunFolder,
    refused: Mapping[str, tuple[Reason, str]],
    embedded: Embedded,
    sequences: _Sequences,
) -> Iterator[dict[str, Any]]:
    """Count every item and yield the rejected ones."""
    recipe, verifier = project.encoding.recipe, project.encoding.verifier()
    asked = todo.asked(folder, NAME)
    for chunk in todo.chunks(scanning.known(project, folder, todo.read_items(folder.items)), todo.LOOKED_UP_AT_ONCE):
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
    one: Known, absent: set[str], refused: Mapping[str, tuple[Reason, str]], recipe: Recipe
) -> Rejection | bool:
    """Say whether everything of an item is embedded; or why it never will be."""
    if one.inventory is None:
        return False
    missing = _lacks(one, absent, recipe)
    for text in missing:
        key = recipe.key(text, recipe.wanted(len(text))).hex()
        if why := refusal(text, recipe) or refused.get(key) or refused.get(name_of(text)):
            return scanning.rejection(one.item, *why)
    return not missing


def _lacks(one: Known, absent: set[str], recipe: Recipe) -> list[str]:
    """Return the sequences of an item that the store does not have, as far as they are known."""
    return [text for text in texts(one.inventory, recipe.context) if text in absent] if one.inventory else []


def _absent(chunk: Iterable[Known | Rejection], recipe: Recipe, verifier: Verifier, sequences: _Sequences) -> set[str]:
    """Return which sequences of some items the store does not have; those that it has are kept for counting."""
    inventories = [one.inventory for one in chunk if isinstance(one, Known) and one.inventory]
    wanted = list({text: None for one in inventories for text in texts(one, recipe.context)})
    variants = verifier.look_up(wanted)
    for text, variant in zip(wanted, variants, strict=True):
        if variant is not None:
            sequences.add(text, variant, recipe.wanted(len(text)))
            sequences.keys += recipe.key(text, variant)
    return {text for text, variant in zip(wanted, variants, strict=True) if variant is None}
