"""Can this be a graph? All that its record says is judged; with its inventory, what both say is compared.

Every function yields what is wrong as a sentence that names the array, the place in it and the value. Where the recipe
is known the edges are found again from the coordinates; without it they are judged by what holds for any recipe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.graphs.graph_form import wrong_bound_centre, wrong_contacts, wrong_form
from pipeline.graphs.item_graph import FORMAT, ROLES, ItemGraph, decode_graph
from pipeline.graphs.judged_parts import (
    atom_edges,
    atom_nodes,
    bound,
    centred,
    cross,
    first_bad,
    in_file,
    listed,
    residue_edges,
    residue_nodes,
)
from pipeline.records import Kind, Reason
from pipeline.structures.partners import joined_embedding_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pipeline.graphs.item_graph import Array, PartnerGraph
    from pipeline.records import Inventory, Partner
    from pipeline.store.format.record import Record

    Plain = Mapping[str, Any]  # a recipe, as JSON


def wrong(record: Record, recipe: Plain | None = None) -> Iterator[str]:
    """Yield what is wrong with a record of a graph, or of the reason why there is none."""
    if "reason" in record.meta:
        yield from _refusal(record)
    elif record.meta.get("format") != FORMAT:
        yield f"its format is {record.meta.get('format')}, not {FORMAT}"
    elif of_form := list(wrong_form(record.arrays, record.meta, recipe)):
        yield from of_form  # all that follows relies on it
    else:
        yield from _wrong_parts(decode_graph(record.arrays, record.meta), record.meta, recipe)


def _wrong_parts(graph: ItemGraph, meta: Mapping[str, Any], recipe: Plain | None) -> Iterator[str]:
    """Yield what is wrong with a graph that has all its arrays."""
    yield from _sizes(graph, meta["sizes"])
    if not all(part.size for part in graph.parts):
        yield "a partner has no nodes"
        return
    by_residue = not graph.parts[0].residues
    for part in graph.parts:
        yield from centred(part)
        if not np.isfinite(in_file(part)).all():
            return
        yield from residue_nodes(part) if by_residue else atom_nodes(part)
        yield from bound(part)
        yield from residue_edges(part, recipe) if by_residue else atom_edges(part, recipe)
    yield from cross(graph, recipe)
    yield from wrong_bound_centre(graph, by_residue=by_residue)
    yield from wrong_contacts(graph, recipe, by_residue=by_residue)


def wrong_beside_inventory(
    record: Record, inventory: Inventory, maps: Mapping[str, Array], recipe: Plain
) -> Iterator[str]:
    """Yield where a graph, which is in order itself, and the inventory of its item contradict each other."""
    if "reason" in record.meta:
        return
    if inventory.reason is not None:
        yield f"there is a graph, and the inventory says {inventory.reason.value}"
        return
    graph = decode_graph(record.arrays, record.meta)
    theirs = [partner.role for partner in inventory.partners]
    if sorted(theirs, key=ROLES.index) != [part.role for part in graph.parts]:
        yield f"its partners are {listed(part.role for part in graph.parts)}; the inventory has {listed(theirs)}"
        return
    partners = {partner.role: partner for partner in inventory.partners}
    for part in graph.parts:
        partner = partners[part.role]
        mine = [(chain.name, chain.kind, chain.sequence) for chain in part.chains]
        if mine != [(chain.name, chain.kind, chain.sequence) for chain in partner.chains]:
            yield f"{part.role.value}: its chains are not those of the inventory"
        elif part.residues:
            yield from _atoms_beside(part, partner, maps.get(f"rows.{part.role.value}"), recipe)
        else:
            yield from _residues_beside(part, partner)


def _residues_beside(part: PartnerGraph, partner: Partner) -> Iterator[str]:
    """Yield the chains that have other nodes than their inventory promises."""
    count_C = np.bincount(part.nodes["chain"], minlength=len(part.chains))
    for chain, count in zip(partner.chains, count_C.tolist(), strict=True):
        odd = chain.sequence.count("X")  # a nucleotide among amino acids counts there, and has no CA
        if chain.kind is Kind.PROTEIN and not chain.nodes - odd <= count <= chain.nodes:
            yield f"{part.role.value}: {count} nodes in chain {chain.name}; the inventory has {chain.nodes}"


def _atoms_beside(part: PartnerGraph, partner: Partner, seqres_R: Array | None, recipe: Plain) -> Iterator[str]:
    """Yield where the residues and atoms of a partner are not those of its inventory."""
    role, count_C = part.role.value, np.bincount(part.residues["chain"], minlength=len(part.chains))
    for chain, count in zip(partner.chains, count_C.tolist(), strict=True):
        if count != chain.residues:
            yield f"{role}: {count} residues in chain {chain.name}; the inventory has {chain.residues}"
    if part.size > partner.atoms or (recipe["hydrogens"] and part.size < partner.atoms):
        yield f"{role}: {part.size} nodes; the inventory has {partner.atoms} atoms"
    if len(part.row_R) == partner.residues:
        unlike_R = part.row_R != joined_embedding_rows(partner, seqres_R)
        yield from first_bad(f"{role}.residue.row", unlike_R, part.row_R, "is not that of the inventory")


def _refusal(record: Record) -> Iterator[str]:
    """Yield what is wrong with a reason."""
    if record.meta["reason"] not in {reason.value for reason in Reason}:
        yield f"the reason {record.meta['reason']!r} is none"
    if not isinstance(record.meta.get("detail"), str):
        yield "a reason without a detail"
    if record.arrays:
        yield f"a reason why there is no graph, and {len(record.arrays)} arrays"


def _sizes(graph: ItemGraph, said: Mapping[str, int]) -> Iterator[str]:
    """Yield the sizes that are not those of the arrays."""
    counted = graph.sizes()
    for name in counted.keys() | said.keys():
        if counted.get(name) != said.get(name):
            yield f"sizes.{name} says {said.get(name)}, and there are {counted.get(name)}"
