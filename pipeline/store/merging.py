"""Sorted rows as streams of pieces: two of them are merged in little more memory than a piece of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pipeline.store.index import Rows

PIECE_ROWS = 16_384


def merged(first: Iterable[Rows], second: Iterable[Rows]) -> Iterator[Rows]:
    """Yield the rows of two sorted streams as one, sorted by key."""
    streams = _whole_runs(first), _whole_runs(second)
    heads = [next(stream, None) for stream in streams]
    while heads[0] is not None and heads[1] is not None:
        last = min(rows["hi"][-1] for rows in heads if rows is not None)  # nothing up to it is still to come
        cuts = [int(rows["hi"].searchsorted(last, "right")) for rows in heads if rows is not None]
        yield sort_in_place(
            np.concatenate([rows[:cut] for rows, cut in zip(heads, cuts, strict=True) if rows is not None])
        )
        heads = [
            rows[cut:] if rows is not None and cut < len(rows) else next(stream, None)
            for rows, cut, stream in zip(heads, cuts, streams, strict=True)
        ]
    for head, stream in zip(heads, streams, strict=True):
        if head is not None:
            yield head
            yield from stream


def in_pieces(rows: Rows) -> Iterator[Rows]:
    """Yield rows some at a time."""
    for start in range(0, len(rows), PIECE_ROWS):
        yield rows[start : start + PIECE_ROWS]


def sort_in_place(rows: Rows) -> Rows:
    """Sort rows by key, a column after the other, which takes a third of the memory of a sorted copy; return them."""
    order = np.lexsort((rows["lo"], rows["hi"]))
    for name in rows.dtype.names or ():
        rows[name] = rows[name][order]
    return rows


def _whole_runs(pieces: Iterable[Rows]) -> Iterator[Rows]:
    """Yield the pieces cut so that rows with the same first number are never in two of them."""
    rest: Rows | None = None
    for piece in pieces:
        if len(piece):
            rows = piece if rest is None else np.concatenate([rest, piece])
            cut = int(rows["hi"].searchsorted(rows["hi"][-1], "left"))
            rest = rows[cut:].copy()
            if cut:
                yield rows[:cut]
    if rest is not None:
        yield rest
