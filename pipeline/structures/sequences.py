"""Sequences and the maps between residues: observed to SEQRES, unbound to bound.

Shapes: R residues of a partner in the order of its chains.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import gemmi
import numpy as np

from pipeline.records import Reason
from pipeline.structures.atoms import Unusable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from pipeline.structures.policy import Chain, Structure

SAME_CHAIN = 0.5  # share of the shorter sequence that must agree for two chains to be one molecule
MIN_MAPPED = 0.5  # share of a partner's residues that must be found in the other file


def seqres_rows(structure: Structure, chain: Chain) -> NDArray[np.int32]:
    """Return the row of each observed residue in the chain's full sequence; the map is verified."""
    if chain.seqres is None or structure.label_seq_R is None:
        what = f"chain {chain.name} has no SEQRES; set structures.sequence: observed"
        raise Unusable(Reason.SEQUENCE_MISMATCH, what)
    rows_R = structure.label_seq_R[chain.first : chain.last] - 1
    if (rows_R < 0).any() or (rows_R >= len(chain.seqres)).any() or (np.diff(rows_R) <= 0).any():
        what = f"the residues of chain {chain.name} do not follow its SEQRES; set structures.sequence: observed"
        raise Unusable(Reason.SEQUENCE_MISMATCH, what)
    full = np.frombuffer(chain.seqres.encode(), dtype=np.uint8)[rows_R]
    observed = np.frombuffer(chain.sequence.encode(), dtype=np.uint8)
    wrong = int((full != observed).sum())
    if wrong:
        what = f"{wrong} residues of chain {chain.name} differ from its SEQRES; set structures.sequence: observed"
        raise Unusable(Reason.SEQUENCE_MISMATCH, what)
    return rows_R


def bound_rows(unbound: Sequence[str], bound: Sequence[str]) -> NDArray[np.int32]:
    """Return, for each residue of an unbound partner, its residue in the bound partner or -1.

    Chains are paired by sequence, best first, so that files that name or order them differently still meet.
    """
    rows_R = np.full(sum(map(len, unbound)), -1, dtype=np.int32)
    mine = np.cumsum([0, *map(len, unbound)])
    theirs = np.cumsum([0, *map(len, bound)])
    for left, right, pairs in _pair_chains(unbound, bound):
        rows_R[mine[left] + pairs[:, 0]] = theirs[right] + pairs[:, 1]
    if (rows_R >= 0).mean() < MIN_MAPPED:
        share = f"{(rows_R >= 0).mean():.0%}"
        raise Unusable(Reason.SEQUENCE_MISMATCH, f"only {share} of the unbound residues are in the bound structure")
    return rows_R


def _pair_chains(unbound: Sequence[str], bound: Sequence[str]) -> list[tuple[int, int, NDArray[np.int64]]]:
    """Pair chains greedily by agreement; ties go to the same position, then to file order."""
    options = []
    for left, query in enumerate(unbound):
        for right, target in enumerate(bound):
            pairs, agreement = _align(query, target)
            if agreement >= SAME_CHAIN:
                options.append((-agreement, abs(left - right), left, right, pairs))
    options.sort(key=lambda option: option[:4])
    chosen: list[tuple[int, int, NDArray[np.int64]]] = []
    for _, _, left, right, pairs in options:
        if all(left != one and right != other for one, other, _ in chosen):
            chosen.append((left, right, pairs))
    return chosen


def _align(query: str, target: str) -> tuple[NDArray[np.int64], float]:
    """Return aligned index pairs of two sequences and the share of the shorter one that agrees."""
    result = gemmi.align_string_sequences(list(query), list(target), [])
    top = np.frombuffer(result.add_gaps(query, 1).encode(), dtype=np.uint8)
    low = np.frombuffer(result.add_gaps(target, 2).encode(), dtype=np.uint8)
    gap = ord("-")
    both = (top != gap) & (low != gap)
    pairs = np.stack([np.cumsum(top != gap)[both] - 1, np.cumsum(low != gap)[both] - 1], axis=1)
    return pairs, result.match_count / max(1, min(len(query), len(target)))
