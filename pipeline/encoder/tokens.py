"""Letters to the tokens of ESM-2, by one table look-up; what is no residue letter is refused by name and position.

Shapes: L residues of a sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipeline.records import Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pipeline.records import Inventory, Partner

# The vocabulary of every ESM-2 checkpoint, in the order of its embedding table.
VOCABULARY = (
    "<cls>", "<pad>", "<eos>", "<unk>",
    *"LAGVSERTIDPKQNFYMHWCXBUZO",
    ".", "-", "<null_1>", "<mask>",
)  # fmt: skip
CLS, PAD, EOS, MASK = (VOCABULARY.index(name) for name in ("<cls>", "<pad>", "<eos>", "<mask>"))
ENDS = 2  # tokens that a sequence has besides its residues
LETTERS = "".join(sorted(name for name in VOCABULARY if name.isalpha()))
_NONE = 255
_TABLE = np.full(256, _NONE, np.uint8)
_TABLE[list(LETTERS.encode())] = [VOCABULARY.index(letter) for letter in LETTERS]


class BadSequence(ValueError):
    """A sequence that the encoder cannot read."""


def tokenize(sequence: str) -> NDArray[np.uint8]:
    """Return the tokens of a sequence's residues, without the two that stand around them."""
    if not sequence:
        raise BadSequence("the sequence is empty")
    tokens_L = _TABLE[np.frombuffer(sequence.encode("latin-1", "replace"), np.uint8)]
    wrong = np.flatnonzero(tokens_L == _NONE)
    if len(wrong):
        at = int(wrong[0])
        raise BadSequence(f"{sequence[at]!r} at position {at + 1} is no residue that ESM-2 knows")
    return tokens_L


def texts(inventory: Inventory, context: str) -> list[str]:
    """Return the sequences that must be encoded for an item, each once."""
    found = (text for partner in inventory.partners for text in partner_texts(partner, context))
    return list(dict.fromkeys(found))


def partner_texts(partner: Partner, context: str) -> list[str]:
    """Return the sequences of a partner: those of its protein chains, or all of them joined without a linker."""
    chains = [chain.sequence for chain in partner.chains if chain.kind is Kind.PROTEIN]
    if context == "partner":
        return ["".join(chains)] if chains else []
    return chains
