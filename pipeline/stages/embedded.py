"""What became of the sequences of a data set: which are embedded, cannot be, or are missing, by each encoder."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from pipeline.dataset import worklist
from pipeline.dataset.blocks import tallies
from pipeline.dataset.worklist import KnownItem
from pipeline.encoder.embed_texts import sequence_name
from pipeline.encoder.embedding_recipe import BadSequence, refuse_letters, texts
from pipeline.journal.attempts import left_out_items, refused_parts
from pipeline.records import Reason, Rejection
from pipeline.stage_names import StageName
from pipeline.stages.stage import Judged, StageTally
from pipeline.store.store import WholeRecords

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Any

    from numpy.typing import NDArray

    from pipeline.dataset.blocks import KnownBlock
    from pipeline.encoder.embed_texts import EmbeddingVerifier
    from pipeline.encoder.embedding_recipe import EmbeddingRecipe, Variant
    from pipeline.journal.run_folder import RunFolder
    from pipeline.project.project import Project
    from pipeline.project.restriction import Only
    from pipeline.records import Inventory, Item

UNCOUNTED = dict.fromkeys(("items", "refused", "unusable", "cached", "missing", "waiting", "unnamed", "residues"), 0)


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


def may_be_made(text: str, recipe: EmbeddingRecipe, only: Only) -> bool:
    """Tell whether a run may make an embedding that is missing: it does all, unless it is confined to a list."""
    return only.is_all or any(
        only.names(StageName.EMBED, recipe.key(text, variant)) for variant in recipe.accepted(len(text))
    )


def name_of(text: str, of: str) -> str:
    """Return the name of a sequence as what one of several encoders works on."""
    return f"{sequence_name(text)} of {of}" if of else sequence_name(text)


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
    parts: dict[str, dict[str, int]] = field(default_factory=dict)  # of each encoder, where there are several


def describe(variant: Variant) -> str:
    """Return a variant in words."""
    if variant.cut is None:
        return f"in {variant.precision}"
    how = {"windows": "in windows of {}", "truncate": "truncated to {}"}[variant.cut.policy]
    return f"{how.format(variant.cut.length)} residues, in {variant.precision}"


@dataclass
class Sequences:
    """Columns about the sequences of all items by one encoder, until each distinct one is counted: 17 bytes of each."""

    digests: array[int] = field(default_factory=lambda: array("Q"))  # of those that the store has
    lengths: array[int] = field(default_factory=lambda: array("Q"))
    kinds: array[int] = field(default_factory=lambda: array("B"))
    names: dict[str, int] = field(default_factory=lambda: {"": 0})  # of the kinds; the first is the wanted variant
    refused: array[int] = field(default_factory=lambda: array("Q"))  # digests of those that cannot be encoded

    def add(self, text: str, variant: Variant, wanted: Variant) -> None:
        """Add a sequence that the store has."""
        name = "" if variant == wanted and not variant.cut else describe(variant)
        self.digests.append(digest(text))
        self.lengths.append(len(text))
        self.kinds.append(self.names.setdefault(name, len(self.names)))

    def add_all(self, others: Sequences) -> None:
        """Add the sequences of other items."""
        number_of = bytes(self.names.setdefault(name, len(self.names)) for name in others.names)
        self.kinds.frombytes(others.kinds.tobytes().translate(number_of.ljust(256, b"\0")))
        for mine, more in (
            (self.digests, others.digests),
            (self.lengths, others.lengths),
            (self.refused, others.refused),
        ):
            mine.extend(more)

    def count(self) -> Embedded:
        """Count each distinct sequence."""
        _, first = np.unique(array_of(self.digests), return_index=True)
        lengths_N = array_of(self.lengths)[first]
        kinds = np.bincount(np.frombuffer(self.kinds, np.uint8)[first], minlength=len(self.names))
        return Embedded(
            sequences=len(first),
            residues=int(lengths_N.sum()),
            longest=int(lengths_N.max(initial=0)),
            others={name: int(kinds[number]) for name, number in self.names.items() if number},
        )


class LackingItem(NamedTuple):
    """An item and its missing sequences, with the names of their encoders; none if it is not scanned."""

    item: Item
    missing: list[tuple[str, str]]


@dataclass
class EmbedTally(StageTally):
    """Counts items by what the store has of each of their sequences, of every encoder."""

    parts: dict[str, Sequences] = field(default_factory=dict)

    def embedded(self) -> Embedded:
        """Return what was counted, of all encoders and of each."""
        embedded = self.result(Embedded, parts={})
        for name, part in self.parts.items():
            counted, of = part.count(), f" by {name}" if name else ""
            embedded.sequences += counted.sequences
            embedded.residues += counted.residues
            embedded.longest = max(embedded.longest, counted.longest)
            embedded.others |= {f"{other}{of}": count for other, count in counted.others.items()}
            if name:
                refused = len(np.unique(array_of(part.refused)))
                items = counted.sequences + refused
                embedded.parts[name] = {"items": items, "refused": refused, "cached": counted.sequences}
        return embedded


def embed_tallies(
    project: Project, views: Mapping[str, Project], folder: RunFolder | None, recipe: Mapping[str, Any]
) -> Iterator[EmbedTally]:
    """Yield what the store has of each block of the data set, by the names of the encoders."""
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
    """Return the sequences of some items that are absent from the store; add the others to what is counted."""
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
