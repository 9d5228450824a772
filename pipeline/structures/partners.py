"""Which chains are which side of a complex."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.records import Reason, Role
from pipeline.structures.atoms import Unusable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pipeline.records import Part
    from pipeline.structures.policy import Chain, Structure

SHOWN = 12  # names in a message


def choose(structure: Structure, part: Part) -> dict[Role, tuple[Chain, ...]]:
    """Return the chains of each side that a part of an item stands for."""
    role = part.role
    if part.chains:
        absent = set(part.optional) - set(structure.all_chains)
        names = [name for name in dict.fromkeys(part.chains) if name not in absent]
        return {role: tuple(_named(structure, name) for name in names)}
    if role is not Role.COMPLEX:
        return {role: structure.chains}
    if len(structure.chains) != 2:
        have = _some(chain.name for chain in structure.chains)
        what = f"two polymer chains were expected, not {have}; name data.receptor_chains and data.ligand_chains"
        raise Unusable(Reason.AMBIGUOUS_PARTNERS, what)
    return {Role.RECEPTOR: structure.chains[:1], Role.LIGAND: structure.chains[1:]}


def _some(names: Iterable[str]) -> str:
    """Return the first few names; a virus has hundreds."""
    listed = list(names)
    return ", ".join(listed[:SHOWN]) + (f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else "")


def _named(structure: Structure, name: str) -> Chain:
    """Return the polymer chain of that name."""
    for chain in structure.chains:
        if chain.name == name:
            return chain
    if name in structure.all_chains:
        raise Unusable(Reason.CHAIN_WITHOUT_POLYMER, f"chain {name} holds no protein, RNA or DNA")
    have = _some(structure.all_chains)
    raise Unusable(Reason.MISSING_CHAIN, f"no chain {name} in the file (it has: {have})")


def check_apart(sides: dict[Role, set[tuple[str, str]]]) -> None:
    """Refuse a chain that is on both sides; a side is a set of (file, chain)."""
    shared = sides.get(Role.RECEPTOR, set()) & sides.get(Role.LIGAND, set())
    if shared:
        names = ", ".join(sorted(chain for _, chain in shared))
        raise Unusable(Reason.SHARED_CHAIN, f"chain {names} is on both sides")
