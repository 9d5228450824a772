"""Can this be an inventory, or what is remembered of a file? Judged by what a scan promises.

Every function yields what is wrong as a sentence. Shapes: R residues of a partner.
"""

from __future__ import annotations

import re
from itertools import chain as chained
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.graphs.wrongs import first, listed
from pipeline.records import Inventory, Kind, Reason, Role
from pipeline.structures.sequences import NO_ROW, joined_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pipeline.records import ChainSummary, Partner
    from pipeline.store.record import Array, Record

    Plain = Mapping[str, Any]  # a recipe, as JSON

DIGEST = re.compile(r"[0-9a-f]{32}")
REASONS = frozenset(reason.value for reason in Reason)


def wrong_inventory(record: Record, recipe: Plain | None = None) -> Iterator[str]:
    """Yield what is wrong with an inventory and the maps beside it."""
    try:
        inventory = Inventory.from_json(record.meta)
    except (KeyError, TypeError, ValueError) as error:
        yield f"it is no inventory: {type(error).__name__} {error}"
        return
    if inventory.reason is not None:
        if inventory.partners or inventory.bound or record.arrays:
            yield f"it has both a reason ({inventory.reason.value}) and what was found"
        return
    for some, name in ((inventory.partners, "partners"), (inventory.bound, "bound partners")):
        roles = [partner.role for partner in some]
        if len(set(roles)) < len(roles) or Role.COMPLEX in roles or not inventory.partners:
            yield f"its {name} are {listed(roles)}"
    for partner in chained(inventory.partners, inventory.bound):
        yield from _partner(partner)
    if recipe and (total := sum(partner.residues for partner in inventory.partners)) > recipe["max_residues"]:
        yield f"it has {total:,} residues; its recipe allows {recipe['max_residues']:,}"
    yield from _maps(inventory, record.arrays, recipe)


def wrong_file(record: Record) -> Iterator[str]:
    """Yield what is wrong with what is remembered of a file."""
    meta = record.meta
    if record.arrays:
        yield f"it has arrays: {listed(record.arrays)}"
    if "reason" in meta:
        if meta["reason"] not in REASONS or not isinstance(meta.get("detail"), str):
            yield f"the reason {meta['reason']!r} is none, or is without a detail"
        return
    if not DIGEST.fullmatch(str(meta.get("content"))):
        yield f"content is {meta.get('content')!r}, no digest"
    if type(meta.get("bytes")) is not int or meta["bytes"] < 1:
        yield f"bytes is {meta.get('bytes')!r}"


def _partner(partner: Partner) -> Iterator[str]:
    """Yield what is wrong with one side."""
    role = partner.role.value
    is_text = partner.content == "" and len(partner.chains) == 1 and partner.role is Role.WHOLE
    if not is_text and not DIGEST.fullmatch(partner.content):
        yield f"{role}: content is {partner.content!r}, no digest"
    if not partner.chains:
        yield f"{role}: there are no chains"
    polymers = [chain for chain in partner.chains if chain.kind is not Kind.OTHER]
    names = [chain.name for chain in polymers]
    if len(set(names)) < len(names):
        yield f"{role}: its chains are {listed(names)}"
    for chain in partner.chains:
        yield from _text(role, chain) if is_text else _chain(role, chain)
    missing = sum(chain.residues - chain.nodes for chain in polymers)
    if not is_text and partner.notes.get("incomplete", 0) != missing:
        yield f"{role}: notes.incomplete is {partner.notes.get('incomplete', 0)}, and {missing} residues are no nodes"
    if not is_text and polymers and not partner.nodes:
        yield f"{role}: none of {partner.residues} residues is a node"
    for note, count in partner.notes.items():
        if type(count) is not int or count < 1:
            yield f"{role}: notes.{note} is {count!r}"
    if partner.notes.get("modified", 0) > partner.residues:
        yield f"{role}: {partner.notes['modified']} of {partner.residues} residues are modified"


def _text(role: str, chain: ChainSummary) -> Iterator[str]:
    """Yield what is wrong with a bare sequence."""
    if (chain.residues, chain.nodes, chain.atoms) != (len(chain.sequence), 0, 0) or not chain.sequence:
        yield f"{role}: a sequence of {len(chain.sequence)} letters, {chain.residues} residues, {chain.atoms} atoms"


def _chain(role: str, chain: ChainSummary) -> Iterator[str]:
    """Yield what is wrong with a chain, or with a molecule."""
    where, text = f"{role}: chain {chain.name}", chain.sequence
    if min(chain.residues, chain.atoms) < 1 or not 0 <= chain.nodes <= chain.residues <= chain.atoms:
        yield f"{where} has {chain.residues} residues, {chain.nodes} nodes and {chain.atoms} atoms"
    if chain.kind is Kind.OTHER:
        if text or (chain.residues, chain.nodes) != (1, 0):
            yield f"{where} is a molecule, and has {chain.residues} residues and the sequence {text!r}"
    elif not (text.isascii() and text.isalpha() and text.isupper()):
        yield f"{where}: its sequence has other signs than letters, or none"
    elif len(text) < chain.residues:
        yield f"{where}: {chain.residues} residues, {len(text)} letters"


def _maps(inventory: Inventory, maps: Mapping[str, Array], recipe: Plain | None) -> Iterator[str]:
    """Yield what is wrong with the maps into full sequences and into bound structures."""
    bound = {partner.role: partner for partner in inventory.bound}
    has_rows = any(name.startswith("rows.") for name in maps)
    if recipe and inventory.partners[0].content:
        has_rows = bool(recipe["reading"]["seqres"])
    wanted = {f"bound.{one.role.value}" for one in inventory.partners if one.role in bound}
    wanted |= {f"rows.{one.role.value}" for one in inventory.partners} if has_rows else set()
    if maps.keys() != wanted:
        yield f"its maps are {listed(sorted(maps))}, not {listed(sorted(wanted))}"
        return
    for partner in inventory.partners:
        role = partner.role.value
        yield from _rows(partner, maps.get(f"rows.{role}"))
        if partner.role in bound:
            yield from _bound_rows(f"bound.{role}", maps[f"bound.{role}"], partner, bound[partner.role])
    for partner in inventory.bound:
        yield from _rows(partner, None)


def _rows(partner: Partner, rows_R: Array | None) -> Iterator[str]:
    """Yield residues that are not in the sequence that is encoded."""
    name = f"rows.{partner.role.value}"
    if rows_R is not None and (rows_R.dtype != np.int32 or rows_R.shape != (partner.residues,)):
        yield f"{name} is {rows_R.dtype} {list(rows_R.shape)}, not int32 {[partner.residues]}"
        return
    try:
        joined_rows(partner, rows_R)
    except ValueError as error:
        yield f"{partner.role.value}: {error}"
        return
    if rows_R is not None:
        yield from _others(name, partner.chains, rows_R)
    elif any(chain.kind is not Kind.OTHER and len(chain.sequence) != chain.residues for chain in partner.chains):
        yield f"{partner.role.value}: a chain has more letters than residues, and there is no map"


def _others(name: str, chains: Sequence[ChainSummary], rows_R: Array) -> Iterator[str]:
    """Yield what is wrong with the rows of what is no protein."""
    start = 0
    for chain in chains:
        here_R, start = rows_R[start : start + chain.residues], start + chain.residues
        if chain.kind is Kind.OTHER:
            yield from first(name, here_R != NO_ROW, here_R, f"in the sequence of {chain.name}, which has none")
        elif chain.kind is not Kind.PROTEIN:
            bad_R = (here_R < 0) | (here_R >= len(chain.sequence))
            bad_R[1:] |= np.diff(here_R) <= 0
            yield from first(name, bad_R, here_R, f"does not rise within chain {chain.name}")


def _bound_rows(name: str, rows_R: Array, partner: Partner, bound: Partner) -> Iterator[str]:
    """Yield residues that are nowhere in the bound structure, or two that are the same there."""
    if rows_R.dtype != np.int32 or rows_R.shape != (partner.residues,):
        yield f"{name} is {rows_R.dtype} {list(rows_R.shape)}, not int32 {[partner.residues]}"
        return
    yield from first(name, (rows_R < -1) | (rows_R >= bound.residues), rows_R, f"of {bound.residues} residues")
    found, count = np.unique(rows_R[rows_R >= 0], return_counts=True)
    if not len(found):
        yield f"{name}: no residue is in the bound structure"
    yield from first(name, np.isin(rows_R, found[count > 1]), rows_R, "is the same residue as another")
