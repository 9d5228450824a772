"""Overlapping windows over a sequence that is not encoded as one, and how their rows become the rows of the sequence.

Windows start every `window - overlap` residues; the last is moved back to end with the sequence, so that none is short.
A residue that lies in several windows takes its row from the one in which it stands farthest from a cut, the earlier
one when two are equal: windows meet at the midpoint of their overlap. The ends of the sequence are no cuts.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    Span = tuple[int, int]  # the first residue, and the one behind the last


def windows(length: int, window: int, overlap: int) -> list[Span]:
    """Return the windows that cover `length` residues, all of the full size unless the sequence is shorter."""
    if not 0 <= overlap < window:
        raise ValueError(f"windows of {window} residues cannot overlap by {overlap}")
    if length <= window:
        return [(0, length)]
    starts = [*range(0, length - window, window - overlap), length - window]
    return [(start, start + window) for start in starts]


def shares(spans: Sequence[Span]) -> list[Span]:
    """Return the residues whose rows each window gives: one after the other, nothing twice, nothing left out."""
    meets = [(end + start + 1) // 2 for (_, end), (start, _) in pairwise(spans)]
    return list(pairwise([spans[0][0], *meets, spans[-1][1]]))
