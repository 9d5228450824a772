"""Which chains are which side of a complex."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.records import Kind, Reason, Role
from pipeline.structures.atoms import Unusable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pipeline.records import Part
    from pipeline.structures.policy import Chain, Structure

SHOWN = 12  # names in a message


def choose(structure: Structure, part: Part, elsewhere: Iterable[str] = ()) -> dict[Role, tuple[Chain, ...]]:
    """Return the chains of each side that a part of an item stands for.

    A chain brings the molecules that are kept of it, but for those that `elsewhere`, what other parts take of the same
    file, names one by one. Where two polymers are divided, molecules of no polymer's chain are nobody's.
    """
    taken = {chain for name in elsewhere if name not in structure.all_chains for chain in _group(structure, name)}
    if part.chains:
        absent = set(part.optional) - set(structure.all_chains)
        names = [name for name in dict.fromkeys(part.chains) if name not in absent]
        named = dict.fromkeys(chain for name in names for chain in _named(structure, name, taken))
        return {part.role: _molecules_last(tuple(named))}
    free = tuple(chain for chain in structure.chains if chain not in taken)
    if not free:
        raise Unusable(Reason.CHAIN_WITHOUT_POLYMER, "the file holds only what the other side names")
    if part.role is not Role.COMPLEX:
        return {part.role: free}
    polymers = [chain for chain in free if chain.kind is not Kind.OTHER]
    if len(polymers) != 2:
        have = _some(chain.name for chain in polymers) or "none"
        what = f"two polymer chains were expected, not {have}; name data.receptor_chains and data.ligand_chains"
        raise Unusable(Reason.AMBIGUOUS_PARTNERS, what)
    sides = zip((Role.RECEPTOR, Role.LIGAND), polymers, strict=True)
    return {role: tuple(chain for chain in free if _host(chain) == polymer.name) for role, polymer in sides}


def _molecules_last(chains: tuple[Chain, ...]) -> tuple[Chain, ...]:
    """Return polymers in the order in which they were asked for, then molecules in the order of the file."""
    polymers = tuple(chain for chain in chains if chain.kind is not Kind.OTHER)
    return polymers + tuple(sorted(set(chains) - set(polymers), key=lambda chain: chain.first))


def _some(names: Iterable[str]) -> str:
    """Return the first few names; a virus has hundreds."""
    listed = list(names)
    return ", ".join(listed[:SHOWN]) + (f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else "")


def _host(chain: Chain) -> str:
    """Return the name of a chain, or of the one that a molecule is of."""
    return chain.name.rsplit(":", 2)[0] if chain.kind is Kind.OTHER else chain.name


def _group(structure: Structure, name: str) -> list[Chain]:
    """Return the molecules that are called CHAIN:RESIDUE or CHAIN:RESIDUE:NUMBER."""
    molecules = (chain for chain in structure.chains if chain.kind is Kind.OTHER)
    return [chain for chain in molecules if name in (chain.name, chain.name.rpartition(":")[0])]


def _named(structure: Structure, name: str, taken: set[Chain]) -> Sequence[Chain]:
    """Return the polymer chain of that name and its molecules, or the molecules of that name."""
    if name in structure.all_chains:
        found = [chain for chain in structure.chains if _host(chain) == name and chain not in taken]
        if not found:
            raise Unusable(Reason.CHAIN_WITHOUT_POLYMER, _why_empty(structure, name))
        return found
    if found := _group(structure, name):
        return found
    host = name.partition(":")[0]
    if host != name and host in structure.all_chains:
        raise Unusable(Reason.MISSING_CHAIN, f"no molecule {name} in the file ({_molecules_of(structure, host)})")
    have = _some(structure.all_chains)
    raise Unusable(Reason.MISSING_CHAIN, f"no chain {name} in the file (it has: {have})")


def _why_empty(structure: Structure, name: str) -> str:
    """Say what a chain is without."""
    if any(_host(chain) == name for chain in structure.chains):
        return f"chain {name} holds only what the other side names"
    return f"chain {name} holds no protein, RNA or DNA"


def _molecules_of(structure: Structure, host: str) -> str:
    """Say which molecules a chain has, or what hides them."""
    kept = [chain for chain in structure.chains if chain.kind is Kind.OTHER]
    if not kept and structure.notes.get("ligands"):
        return "set structures.ligands: keep, without which small molecules are dropped"
    return f"chain {host} has: {_some(chain.name for chain in kept if _host(chain) == host) or 'no small molecules'}"


def check_apart(sides: dict[Role, set[tuple[str, str]]]) -> None:
    """Refuse a chain that is on both sides; a side is a set of (file, chain)."""
    shared = sides.get(Role.RECEPTOR, set()) & sides.get(Role.LIGAND, set())
    if shared:
        names = ", ".join(sorted(chain for _, chain in shared))
        raise Unusable(Reason.SHARED_CHAIN, f"chain {names} is on both sides")
