"""What of an item is encoded, and which row of an embedding belongs to which residue.

Shapes: R observed residues of a partner, in the order of its chains; only those of protein chains have a row.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from pipeline.records import Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pipeline.records import ChainSummary, Inventory, Partner

NO_ROW = -1  # a residue of DNA or RNA


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


def rows(
    partner: Partner, seqres_R: NDArray[np.int32] | None, context: str
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return, for each residue of a partner, which of `partner_texts` it is in and its row there, or NO_ROW.

    `seqres_R` is the inventory's map into full sequences, where those were asked for; the result is verified.
    """
    text_R = np.full(partner.residues, NO_ROW, np.int32)
    row_R = np.full(partner.residues, NO_ROW, np.int32)
    number, offset = 0, 0
    for chain, (first, last) in zip(partner.chains, _spans(partner), strict=True):
        if chain.kind is not Kind.PROTEIN:
            continue
        text_R[first:last] = number
        row_R[first:last] = offset + _chain_rows(chain, None if seqres_R is None else seqres_R[first:last])
        if context == "partner":
            offset += len(chain.sequence)
        else:
            number += 1
    return text_R, row_R


def _chain_rows(chain: ChainSummary, seqres_R: NDArray[np.int32] | None) -> NDArray[np.int32]:
    """Return the rows of a chain's residues in its sequence; both lists are in order, so the rows must rise."""
    if seqres_R is None:
        if chain.residues != len(chain.sequence):
            raise ValueError(f"chain {chain.name}: {chain.residues} residues, {len(chain.sequence)} letters")
        return np.arange(chain.residues, dtype=np.int32)
    rises = bool((np.diff(seqres_R) > 0).all())
    inside = len(seqres_R) == 0 or (seqres_R[0] >= 0 and seqres_R[-1] < len(chain.sequence))
    if len(seqres_R) != chain.residues or not rises or not inside:
        raise ValueError(f"chain {chain.name}: its map into the full sequence does not fit")
    return seqres_R


def _spans(partner: Partner) -> list[tuple[int, int]]:
    """Return the range of each chain among a partner's residues."""
    ends = list(accumulate(chain.residues for chain in partner.chains))
    return list(zip([0, *ends], ends, strict=False))
