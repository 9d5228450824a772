"""What of an item is encoded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.records import Kind

if TYPE_CHECKING:
    from pipeline.records import Inventory, Partner


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
