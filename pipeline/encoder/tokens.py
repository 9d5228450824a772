"""Letters to the tokens of ESM-2, by one table look-up; what is no residue letter is refused by name and position.

Shapes: L residues of a sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
