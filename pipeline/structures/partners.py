"""Assigns chains to the sides of a complex; maps residues to full sequences and to bound structures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gemmi
import numpy as np

from pipeline.records import Kind, Reason, Role
from pipeline.structures.atoms import UnusableInput, name_text
from pipeline.structures.policy import CAPS, letter
from pipeline.units import first_few

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from pipeline.records import ChainSummary, Part, Partner
    from pipeline.structures.policy import Chain, Policy, Structure


def choose_chains(structure: Structure, part: Part, elsewhere: Iterable[str] = ()) -> dict[Role, tuple[Chain, ...]]:
    """Return the chains of each side that a part of an item names or implies.

    A chain includes its kept molecules, except those that `elsewhere` (the names that other parts take from the same
    file) lists singly. Where a file is divided into its two polymers, molecules of other chains belong to neither side.
    """
    taken = {chain for name in elsewhere if name not in structure.all_chains for chain in _group(structure, name)}
    if part.chains:
        absent = set(part.optional) - set(structure.all_chains)
        names = [name for name in dict.fromkeys(part.chains) if name not in absent]
        named = dict.fromkeys(chain for name in names for chain in _named(structure, name, taken))
        return {part.role: _molecules_last(tuple(named))}
    free = tuple(chain for chain in structure.chains if chain not in taken)
    if not free:
        raise UnusableInput(Reason.CHAIN_WITHOUT_POLYMER, "the file has no chains besides those of the other side")
    if part.role is not Role.COMPLEX:
        return {part.role: free}
    polymers = [chain for chain in free if chain.kind is not Kind.OTHER]
    if len(polymers) != 2:
        have = first_few(chain.name for chain in polymers) or "none"
        ways = "data.receptor_chains and data.ligand_chains" if polymers[1:] else "data.partners to none"
        what = f"a complex has two polymer chains, this file {have}; remove it, or set {ways}"
        raise UnusableInput(Reason.AMBIGUOUS_PARTNERS, what)
    sides = zip((Role.RECEPTOR, Role.LIGAND), polymers, strict=True)
    return {role: tuple(chain for chain in free if _host(chain) == polymer.name) for role, polymer in sides}


def _molecules_last(chains: tuple[Chain, ...]) -> tuple[Chain, ...]:
    """Return polymers in the order in which they were asked for, then molecules in the order of the file."""
    polymers = tuple(chain for chain in chains if chain.kind is not Kind.OTHER)
    return polymers + tuple(sorted(set(chains) - set(polymers), key=lambda chain: chain.first))


def _host(chain: Chain) -> str:
    """Return the name of a chain, or for a molecule that of its chain."""
    return chain.name.rsplit(":", 2)[0] if chain.kind is Kind.OTHER else chain.name


def _group(structure: Structure, name: str) -> list[Chain]:
    """Return the molecules that are called CHAIN:RESIDUE or CHAIN:RESIDUE:NUMBER."""
    molecules = (chain for chain in structure.chains if chain.kind is Kind.OTHER)
    return [chain for chain in molecules if name in (chain.name, chain.name.rpartition(":")[0])]


def _named(structure: Structure, name: str, taken: set[Chain]) -> Sequence[Chain]:
    """Return the polymer chain of that name and its molecules, or the molecules of that name."""
    if name in structure.all_chains:
        own = [chain for chain in structure.chains if _host(chain) == name]
        if chains := [chain for chain in own if chain not in taken]:
            return chains
        why = "belongs to the other side" if own else "has no protein, RNA or DNA"
        raise UnusableInput(Reason.CHAIN_WITHOUT_POLYMER, f"chain {name} {why}")
    if chains := _group(structure, name):
        return chains
    host = name.partition(":")[0]
    what = f"no chain {name} in the file (it has: {first_few(structure.all_chains)})"
    if host != name and host in structure.all_chains:
        kept = [chain for chain in structure.chains if chain.kind is Kind.OTHER]
        names = first_few(chain.name for chain in kept if _host(chain) == host) or "no small molecules"
        what = f"no molecule {name} in the file (chain {host} has: {names})"
        if not kept and structure.notes.get("ligands"):
            what = f"no molecule {name} in the file (set structures.ligands: keep to keep small molecules)"
    raise UnusableInput(Reason.MISSING_CHAIN, what)


def check_apart(sides: dict[Role, set[tuple[str, str]]]) -> None:
    """Refuse a chain that is on both sides; a side is a set of (file, chain)."""
    shared = sides.get(Role.RECEPTOR, set()) & sides.get(Role.LIGAND, set())
    if shared:
        names = ", ".join(sorted(chain for _, chain in shared))
        raise UnusableInput(Reason.SHARED_CHAIN, f"chain {names} is on both sides")


SAME_CHAIN = 0.5  # share of the shorter sequence that must agree for two chains to be one molecule
NO_ROW = -1  # of a residue of DNA or RNA or of a small molecule, which are not encoded
MIN_MAPPED = 0.5  # share of a partner's residues that must be found in the other file


def full_sequence(structure: Structure, chain: Chain, policy: Policy) -> tuple[str, NDArray[np.int32]]:
    """Return the SEQRES of a chain without caps, and the position in it of each observed residue; refuse a mismatch.

    An observed residue keeps its letter, so that the same policy applies to both. A small molecule has no sequence.
    """
    if chain.kind is Kind.OTHER:
        return "", np.full(chain.last - chain.first, NO_ROW, np.int32)
    if chain.seqres is None or structure.label_seq_R is None:
        what = f"chain {chain.name} has no SEQRES; set structures.sequence: observed"
        raise UnusableInput(Reason.SEQUENCE_MISMATCH, what)
    options = [monomers.split(",") for monomers in chain.seqres]
    kept = np.array([CAPS.isdisjoint(names) for names in options])
    position_R = structure.label_seq_R[chain.first : chain.last] - 1
    observed = [name_text(name) for name in structure.name_R[chain.first : chain.last]]
    in_order = (position_R >= 0).all() and (position_R < len(options)).all() and (np.diff(position_R) > 0).all()
    if not in_order or any(name not in options[at] for name, at in zip(observed, position_R.tolist(), strict=True)):
        what = f"the residues of chain {chain.name} do not follow its SEQRES; set structures.sequence: observed"
        raise UnusableInput(Reason.SEQUENCE_MISMATCH, what)
    rows_R = (np.cumsum(kept) - 1)[position_R].astype(np.int32)
    letters = [
        letter(names[0], structure, chain.kind, policy) for names, keep in zip(options, kept, strict=True) if keep
    ]
    for row, code in zip(rows_R.tolist(), chain.sequence, strict=True):
        letters[row] = code
    return "".join(letters), rows_R


def joined_embedding_rows(partner: Partner, seqres_R: NDArray[np.int32] | None) -> NDArray[np.int32]:
    """Return each residue's row in the concatenated embeddings of a partner's protein chains, or NO_ROW.

    The rows are the same whether the chains are encoded one by one or joined. `seqres_R` is the verified map into full
    sequences, where the data set uses those.
    """
    row_R = np.full(partner.residues, NO_ROW, np.int32)
    first, offset = 0, 0
    for chain in partner.chains:
        here = slice(first, first + chain.residues)
        first = here.stop
        if chain.kind is Kind.PROTEIN:
            row_R[here] = offset + _chain_rows(chain, None if seqres_R is None else seqres_R[here])
            offset += len(chain.sequence)
    return row_R


def _chain_rows(chain: ChainSummary, seqres_R: NDArray[np.int32] | None) -> NDArray[np.int32]:
    """Return the position of each residue of a chain in its sequence; refuse a map that does not rise."""
    if seqres_R is None:
        if chain.residues != len(chain.sequence):
            raise ValueError(f"chain {chain.name}: {chain.residues} residues, {len(chain.sequence)} letters")
        return np.arange(chain.residues, dtype=np.int32)
    rises = bool((np.diff(seqres_R) > 0).all())
    inside = len(seqres_R) == 0 or (seqres_R[0] >= 0 and seqres_R[-1] < len(chain.sequence))
    if len(seqres_R) != chain.residues or not rises or not inside:
        raise ValueError(f"chain {chain.name}: its map into the full sequence is inconsistent")
    return seqres_R


def bound_rows(unbound: Sequence[str], bound: Sequence[str]) -> NDArray[np.int32]:
    """Return, for each residue of an unbound partner, its residue in the bound partner or -1.

    Chains are paired by sequence, best first, so that files may name or order them differently.
    """
    rows_R = np.full(sum(map(len, unbound)), -1, dtype=np.int32)
    mine = np.cumsum([0, *map(len, unbound)])
    theirs = np.cumsum([0, *map(len, bound)])
    for left, right, pairs in _pair_chains(unbound, bound):
        rows_R[mine[left] + pairs[:, 0]] = theirs[right] + pairs[:, 1]
    if (rows_R >= 0).mean() < MIN_MAPPED:
        share = f"{(rows_R >= 0).mean():.0%}"
        what = f"only {share} of the unbound residues are in the bound structure"
        raise UnusableInput(Reason.SEQUENCE_MISMATCH, what)
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
        if all(left != mine and right != other for mine, other, _ in chosen):
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
