"""What became of the sequences of a data set: which are embedded, cannot be, or are missing, by each encoder."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from pipeline.dataset import worklist
from pipeline.dataset.worklist import KnownItem
from pipeline.encoder.embed_texts import sequence_name
from pipeline.encoder.embedding_recipe import BadSequence, refuse_letters, texts
from pipeline.records import Reason, Rejection
from pipeline.stage_names import StageName
from pipeline.stages.stage import Judged

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from numpy.typing import NDArray

    from pipeline.encoder.embed_texts import EmbeddingVerifier
    from pipeline.encoder.embedding_recipe import EmbeddingRecipe, Variant
    from pipeline.journal.run_folder import RunFolder
    from pipeline.project.project import Project
    from pipeline.project.restriction import Only
    from pipeline.records import Inventory

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


@dataclass(slots=True)
class JudgedSequences:
    """Columns about the sequences of all items, until each distinct one is counted: 33 bytes of each."""

    digests: array[int] = field(default_factory=lambda: array("Q"))
    lengths: array[int] = field(default_factory=lambda: array("Q"))
    kinds: array[int] = field(default_factory=lambda: array("B"))
    keys: bytearray = field(default_factory=bytearray)  # of the records that were found
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

    def count(self) -> Embedded:
        """Count each distinct sequence."""
        _, first = np.unique(array_of(self.digests), return_index=True)
        lengths_N = array_of(self.lengths)[first]
        kinds = np.bincount(np.frombuffer(self.kinds, np.uint8)[first], minlength=len(self.names))
        return Embedded(
            sequences=len(first),
            residues=int(lengths_N.sum()),
            longest=int(lengths_N.max(initial=0)),
            others={name: int(kinds[number]) for number, name in enumerate(self.names) if number},
        )


def describe(variant: Variant) -> str:
    """Return a variant in words."""
    if variant.cut is None:
        return f"in {variant.precision}"
    how = {"windows": "in windows of {}", "truncate": "truncated to {}"}[variant.cut.policy]
    return f"{how.format(variant.cut.length)} residues, in {variant.precision}"


@dataclass(slots=True)
class JudgedEncoder:
    """What is counted of one encoder."""

    name: str
    recipe: EmbeddingRecipe
    verifier: EmbeddingVerifier
    sequences: JudgedSequences = field(default_factory=JudgedSequences)

    def absent(self, inventories: Sequence[Inventory]) -> set[str]:
        """Return the sequences of some items that are absent from the store; add the others to what is counted."""
        recipe, sequences = self.recipe, self.sequences
        wanted = list(dict.fromkeys(text for each in inventories for text in texts(each, recipe.context)))
        absent = set()
        for text, variant in zip(wanted, self.verifier.look_up(wanted), strict=True):
            if variant is None:
                absent.add(text)
            else:
                sequences.add(text, variant, recipe.wanted(len(text)))
                sequences.keys += recipe.key(text, variant)
        sequences.refused |= {digest(text) for text in absent if refusal(text, recipe)}
        return absent


@dataclass(slots=True)
class Tally:
    """Judges items by what the store has of each of their sequences, of every encoder."""

    parts: tuple[JudgedEncoder, ...]
    unusable: Mapping[str, tuple[Reason, str]]

    @classmethod
    def of(cls, views: Mapping[str, Project], unusable: Mapping[str, tuple[Reason, str]]) -> Tally:
        encodings = {name: view.encoding for name, view in views.items()}
        parts = (JudgedEncoder(name, encoding.recipe, encoding.verifier()) for name, encoding in encodings.items())
        return cls(tuple(parts), unusable)

    def items(
        self, project: Project, folder: RunFolder, embedded: Embedded, known: bytearray
    ) -> Iterator[dict[str, Any]]:
        """Count every item and yield the rejected ones."""
        for chunk in worklist.known_items(project, folder, worklist.read_items(folder.items), known):
            inventories = [entry.inventory for entry in chunk if isinstance(entry, KnownItem) and entry.inventory]
            absent = [part.absent(inventories) for part in self.parts]
            for entry in chunk:
                missing = [] if isinstance(entry, Rejection) else self._missing(entry, absent)
                rejected = entry if isinstance(entry, Rejection) else self._rejected(entry, missing)
                if rejected is not None:
                    embedded.reject(rejected)
                    yield rejected.to_json()
                elif isinstance(entry, KnownItem) and entry.inventory is not None and not missing:
                    embedded.items += 1
                else:
                    assert isinstance(entry, KnownItem)
                    may_be = (may_be_made(text, part.recipe, project.only) for part, text in missing)
                    embedded.miss(entry.item.id, required=any(may_be) if missing else project.only.is_all)

    def _missing(self, known: KnownItem, absent: Sequence[set[str]]) -> list[tuple[JudgedEncoder, str]]:
        """Return the sequences of an item that the store lacks; none of an item that is not scanned."""
        if known.inventory is None:
            return []
        return [
            (part, text)
            for part, lacks in zip(self.parts, absent, strict=True)
            for text in (texts(known.inventory, part.recipe.context) if lacks else ())
            if text in lacks
        ]

    def _rejected(self, known: KnownItem, missing: Sequence[tuple[JudgedEncoder, str]]) -> Rejection | None:
        """Return the rejection of an item one of whose missing sequences cannot be embedded; None otherwise."""
        for part, text in missing:
            key = part.recipe.key(text, part.recipe.wanted(len(text))).hex()
            told = self.unusable.get(key) or self.unusable.get(name_of(text, part.name))
            if why := refusal(text, part.recipe) or told:
                return worklist.rejection(known.item, *why)
        return None

    def count(self, embedded: Embedded) -> None:
        """Add what was counted of the sequences, of all encoders and of each."""
        for part in self.parts:
            counted = part.sequences.count()
            embedded.sequences += counted.sequences
            embedded.residues += counted.residues
            embedded.longest = max(embedded.longest, counted.longest)
            of = f" by {part.name}" if part.name else ""
            embedded.others |= {f"{name}{of}": count for name, count in counted.others.items()}
            if part.name:
                refused = len(part.sequences.refused)
                embedded.parts[part.name] = {
                    "items": counted.sequences + refused,
                    "refused": refused,
                    "cached": counted.sequences,
                }
