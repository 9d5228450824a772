"""What a recursive model can say at a place: pepTRM's 24 letters, and where it is trained here modified residues too.

As published there are no modifications: they are cut off, and the letter is kept. Suffixes: V letters, L places.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from pipeline.readers import peptides
from pipeline.readers.peptides import LETTER_OF, RESIDUE_MASSES, RESIDUES

if TYPE_CHECKING:
    from numpy.typing import NDArray

SPECIAL = (PAD, SOS, EOS, UNK) = (0, 1, 2, 3)
PUBLISHED = "ARNDCEQGHILKMFPSTWYV"
PUBLISHED_MASSES = (
    *(71.03711, 156.10111, 114.04293, 115.02694, 103.00919, 129.04259, 128.05858, 57.02146, 137.05891, 113.08406),
    *(113.08406, 128.09496, 131.04049, 147.06841, 97.05276, 87.03203, 101.04768, 186.07931, 163.06333, 99.06841),
)
PUBLISHED_WATER, PUBLISHED_PROTON = 18.01056, 1.00727
MODIFIED = RESIDUES[20:]


@dataclass(frozen=True)
class Vocabulary:
    """The letters that a model knows: special ones, residues, and modified residues, as ProForma has them."""

    modified: tuple[str, ...] = MODIFIED
    as_published: bool = False

    @cached_property
    def names(self) -> tuple[str, ...]:
        return ("<PAD>", "<SOS>", "<EOS>", "<UNK>", *PUBLISHED, *(() if self.as_published else self.modified))

    @cached_property
    def codes_V(self) -> NDArray[np.int64]:
        """The code of each letter among `peptides.RESIDUES`; -1 of special ones."""
        return np.array([RESIDUES.index(name) if name in RESIDUES else -1 for name in self.names])

    @cached_property
    def masses_V(self) -> NDArray[np.float64]:
        """The mass of each letter, 0 of special ones."""
        if self.as_published:
            return np.array([0.0] * len(SPECIAL) + list(PUBLISHED_MASSES))
        return np.where(self.codes_V < 0, 0.0, RESIDUE_MASSES[self.codes_V])

    @cached_property
    def is_terminal_V(self) -> NDArray[np.bool_]:
        """Which letters stand before the first residue, and nowhere else."""
        return (self.codes_V >= 0) & (LETTER_OF[self.codes_V] < 0)

    @cached_property
    def is_modified_V(self) -> NDArray[np.bool_]:
        return self.codes_V >= 20

    @property
    def water(self) -> float:
        """What a peptide weighs more than its residues."""
        return PUBLISHED_WATER if self.as_published else peptides.WATER

    @property
    def proton(self) -> float:
        return PUBLISHED_PROTON if self.as_published else peptides.PROTON

    def letters(self, code_L: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return the letters of a peptide's codes; raise ValueError for a residue that has none."""
        code_L = np.asarray(code_L, np.int64)
        if self.as_published:
            code_L = LETTER_OF[code_L].astype(np.int64)
            code_L = code_L[code_L >= 0]
        is_letter_LV = code_L[:, None] == self.codes_V
        if not (is_known_L := is_letter_LV.any(1)).all():
            raise ValueError(RESIDUES[code_L[int(np.argmin(is_known_L))]])
        letter_L: NDArray[np.int64] = is_letter_LV.argmax(1)
        return letter_L

    def text(self, letter_L: NDArray[np.integer]) -> str:
        """Return letters up to the end as ProForma; special ones are left out."""
        end_L = np.flatnonzero(np.asarray(letter_L) == EOS)
        kept = letter_L[: end_L[0]] if len(end_L) else letter_L
        return "".join(self.names[letter] for letter in kept if letter >= len(SPECIAL))
