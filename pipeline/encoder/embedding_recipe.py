"""Everything that determines an embedding: the sequence's text and tokens, and every choice that can change it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from pipeline.keys import tagged_key
from pipeline.records import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    Span = tuple[int, int]  # the first residue, and the one behind the last
    from numpy.typing import NDArray

    from pipeline.records import Inventory, Partner

ENCODER_VERSION = 1  # raise it when the encoder's results change
BF16_PRODUCTS = "bf16-products"  # matrix products in bf16, all else in fp32: what bf16 is on a CPU
STORED = {"float32": "fp32", "float16": "fp16", "uint16": "bf16"}  # numpy's type of rows → their precision
_BFLOAT16_SHIFT = np.uint32(16)


# The vocabulary of ESM-2, ESM-1b, ESM-1v and (but for <null_1>) ESM C, in the order of its embedding table.
VOCABULARY = (
    "<cls>", "<pad>", "<eos>", "<unk>",
    *"LAGVSERTIDPKQNFYMHWCXBUZO",
    ".", "-", "<null_1>", "<mask>",
)  # fmt: skip
CLS, PAD, EOS, MASK = (VOCABULARY.index(name) for name in ("<cls>", "<pad>", "<eos>", "<mask>"))
ENDS = 2  # tokens that a sequence has besides its residues
LETTERS = "".join(sorted(name for name in VOCABULARY if name.isalpha()))
_TABLE = np.zeros(256, np.uint8)
_TABLE[list(LETTERS.encode())] = [VOCABULARY.index(letter) for letter in LETTERS]


@dataclass(frozen=True, slots=True)
class SequenceCut:
    """How a sequence that is not encoded as one is cut."""

    policy: str  # "windows" or "truncate"
    length: int
    overlap: int = 0


@dataclass(frozen=True, slots=True)
class Variant:
    """One way of computing an embedding; different variants give different numbers, and have different keys."""

    precision: str  # fp32, fp16 or bf16
    cut: SequenceCut | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingRecipe:
    """Every choice that determines how sequences are embedded, none left open."""

    weights: str  # the digest of the checkpoint
    layer: int
    context: str  # chain or partner
    precision: str
    storage: str
    long: str = "full"  # full, windows, truncate or error, for sequences longer than `length`
    length: int = 1022
    overlap: int = 256
    on_oom: str = "windows"  # windows or cpu
    half_fallback: bool = True
    letters: str = LETTERS  # that the encoder reads
    whole: int = 0  # residues that are encoded at once where `long` cuts only longer sequences; 0: `length`
    cls: bool = False  # whether the row of the mark before the residues is kept beside theirs

    def key(self, text: str, variant: Variant) -> bytes:
        return tagged_key("embed", self.plain(variant), text)

    def plain(self, variant: Variant) -> dict[str, Any]:
        """Return every choice that can change a number, as the JSON data of the key."""
        recipe: dict[str, Any] = {
            "version": ENCODER_VERSION,
            "weights": self.weights,
            "layer": self.layer,
            "context": self.context,
            "precision": variant.precision,
            "storage": self.storage,
        }
        if self.cls:
            recipe["cls"] = True
        if variant.cut is not None:
            recipe["cut"] = [variant.cut.policy, variant.cut.length, variant.cut.overlap]
        return recipe

    def wanted(self, residues: int) -> Variant:
        """Return the preferred variant for a sequence of that length."""
        if residues <= self.cut_beyond or self.long in ("full", "error"):
            return Variant(self.precision)
        return Variant(
            self.precision, SequenceCut(self.long, self.length, self.overlap if self.long == "windows" else 0)
        )

    @property
    def cut_beyond(self) -> int:
        """The residues up to which a sequence is encoded as one while memory suffices."""
        return max(self.length, self.whole)

    def variants(self) -> Iterator[Variant]:
        """Yield the variants that are accepted of some sequence, short or long; a few of them more than once."""
        for residues in (1, self.length + 1, self.cut_beyond + 1):
            yield from self.accepted(residues)

    def accepted(self, residues: int) -> tuple[Variant, ...]:
        """Return the accepted variants, best first: the wanted one, then those that the configuration allows."""
        cuts = [self.wanted(residues).cut]
        if self.windowed(residues) not in cuts:
            cuts.append(self.windowed(residues))
        may_be_full = self.precision != "fp32" and (self.half_fallback or self.on_oom == "cpu")  # the CPU computes so
        precisions = [self.precision, *(["fp32"] if may_be_full else [])]
        return tuple(Variant(precision, cut) for cut in cuts for precision in precisions)

    def windowed(self, residues: int) -> SequenceCut | None:
        """Return how a sequence is cut that does not fit the memory whole; None where it is not to be cut."""
        wanted = self.wanted(residues).cut
        if wanted is not None or self.on_oom != "windows" or residues <= self.length:
            return wanted
        return SequenceCut("windows", self.length, self.overlap)

    def refuses(self, residues: int) -> bool:
        return self.long == "error" and residues > self.length


def windows(length: int, window: int, overlap: int) -> list[Span]:
    """Return the windows that cover `length` residues, all of the full size unless the sequence is shorter."""
    if not 0 <= overlap < window:
        raise ValueError(f"windows of {window} residues cannot overlap by {overlap}")
    if length <= window:
        return [(0, length)]
    starts = [*range(0, length - window, window - overlap), length - window]
    return [(start, start + window) for start in starts]


def window_shares(spans: Sequence[Span]) -> list[Span]:
    """Return the range of residues whose rows are taken from each window; together they cover each residue once."""
    meets = [(end + start + 1) // 2 for (_, end), (start, _) in pairwise(spans)]
    return list(pairwise([spans[0][0], *meets, spans[-1][1]]))


def as_floats(rows_LD: NDArray[Any]) -> NDArray[Any]:
    """Return stored rows as numbers that numpy knows; bfloat16 is stored as its bits."""
    is_bits = rows_LD.dtype == np.uint16
    return (rows_LD.astype(np.uint32) << _BFLOAT16_SHIFT).view(np.float32) if is_bits else rows_LD


class BadSequence(ValueError):
    """A sequence that the encoder cannot read."""


def tokenize(sequence: str) -> NDArray[np.uint8]:
    """Return the tokens of a sequence's residues, without the two marks around them."""
    refuse_letters(sequence, LETTERS)
    return _TABLE[np.frombuffer(sequence.encode(), np.uint8)]


def refuse_letters(sequence: str, letters: str) -> None:
    """Refuse a sequence that an encoder of these letters cannot read."""
    if not sequence:
        raise BadSequence("the sequence is empty")
    if wrong := set(sequence).difference(letters):
        at = next(at for at, letter in enumerate(sequence) if letter in wrong)
        raise BadSequence(f"{sequence[at]!r} at position {at + 1} is not a residue that the encoder knows")


def texts(inventory: Inventory, context: str) -> list[str]:
    """Return the sequences that must be encoded for an item, each once."""
    return list(dict.fromkeys(text for partner in inventory.partners for text in partner_texts(partner, context)))


def partner_texts(partner: Partner, context: str) -> list[str]:
    """Return the sequences of a partner: those of its protein chains, or all of them joined without a linker."""
    chains = [chain.sequence for chain in partner.chains if chain.kind is Kind.PROTEIN]
    if context == "partner":
        return ["".join(chains)] if chains else []
    return chains
