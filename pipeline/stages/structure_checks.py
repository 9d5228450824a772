"""Checks of inventories, graphs and tables of items, by what the stages that write them promise.

Every function yields what is wrong as a sentence that names the array, the place in it and the value.
Shapes: R residues of a partner, N items of a table.
"""

from __future__ import annotations

import re
from itertools import chain as chained
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.errors import CacheDamaged, RecordMissing
from pipeline.graphs.graph_checks import first_bad, listed, wrong_graph
from pipeline.graphs.item_graph import FORMAT as GRAPH_FORMAT
from pipeline.graphs.item_graph import ROLES, decode_graph
from pipeline.keys import KEY_BYTES, content_digest, recipe_key
from pipeline.records import Inventory, Kind, Reason, Role
from pipeline.structures.partners import joined_embedding_rows
from pipeline.training.items.item_table import FORMAT as TABLE_FORMAT
from pipeline.training.items.item_table import KIND, LABEL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pipeline.graphs.item_graph import PartnerGraph
    from pipeline.records import ChainSummary, Partner
    from pipeline.store.format.record import Array, Record
    from pipeline.store.store import Store

    Plain = Mapping[str, Any]  # a recipe, as JSON

DIGEST = re.compile(r"[0-9a-f]{32}")
REASONS = frozenset(reason.value for reason in Reason)


def wrong_inventory(record: Record, recipe: Plain | None = None) -> Iterator[str]:
    """Yield what is wrong with an inventory and the maps beside it."""
    try:
        inventory = Inventory.from_json(record.meta)
    except (KeyError, TypeError, ValueError) as error:
        yield f"it is not an inventory: {type(error).__name__} {error}"
        return
    if inventory.reason is not None:
        if inventory.partners or inventory.bound or record.arrays:
            yield f"it has both a reason ({inventory.reason.value}) and contents"
        return
    for partners, name in ((inventory.partners, "partners"), (inventory.bound, "bound partners")):
        roles = [partner.role for partner in partners]
        if len(set(roles)) < len(roles) or Role.COMPLEX in roles or not inventory.partners:
            yield f"its {name} are {listed(roles)}"
    for partner in chained(inventory.partners, inventory.bound):
        yield from _partner(partner)
    if recipe and (total := sum(partner.residues for partner in inventory.partners)) > recipe["max_residues"]:
        yield f"it has {total:,} residues; its recipe allows {recipe['max_residues']:,}"
    yield from _maps(inventory, record.arrays, recipe)


def wrong_file(record: Record) -> Iterator[str]:
    """Yield what is wrong with the record of a file."""
    meta = record.meta
    if record.arrays:
        yield f"it has arrays: {listed(record.arrays)}"
    if "reason" in meta:
        if meta["reason"] not in REASONS or not isinstance(meta.get("detail"), str):
            yield f"the reason {meta['reason']!r} is unknown or has no detail"
        return
    if not DIGEST.fullmatch(str(meta.get("content"))):
        yield f"content is {meta.get('content')!r}, not a digest"
    if type(meta.get("bytes")) is not int or meta["bytes"] < 1:
        yield f"bytes is {meta.get('bytes')!r}"


def _partner(partner: Partner) -> Iterator[str]:
    """Yield what is wrong with a partner; only a bare sequence is of no file and has no atoms."""
    role = partner.role.value
    is_text = partner.content == "" and len(partner.chains) == 1 and partner.role is Role.WHOLE
    if not is_text and not DIGEST.fullmatch(partner.content):
        yield f"{role}: content is {partner.content!r}, not a digest"
    polymers = [chain for chain in partner.chains if chain.kind is not Kind.OTHER]
    names = [chain.name for chain in polymers]
    if not partner.chains or len(set(names)) < len(names):
        yield f"{role}: its chains are {listed(names)}"
    for chain in partner.chains:
        yield from _chain(f"{role}: chain {chain.name}", chain, has_atoms=not is_text)
    missing = sum(chain.residues - chain.nodes for chain in polymers) * (not is_text)
    if {partner.notes.get("incomplete", 0), len(partner.left_out)} != {missing}:
        notes = f"notes.incomplete is {partner.notes.get('incomplete', 0)}, left_out lists {len(partner.left_out)}"
        yield f"{role}: {notes}, and {missing} residues are not nodes"


def _chain(where: str, chain: ChainSummary, *, has_atoms: bool) -> Iterator[str]:
    """Yield what is wrong with a chain, or with a molecule."""
    text = chain.sequence
    if not 0 <= chain.nodes <= chain.residues <= (chain.atoms if has_atoms else len(text)) or not chain.residues:
        yield f"{where} has {chain.residues} residues, {chain.nodes} nodes and {chain.atoms} atoms"
    if chain.kind is Kind.OTHER:
        if text or (chain.residues, chain.nodes) != (1, 0):
            yield f"{where} is a molecule but has {chain.residues} residues and the sequence {text!r}"
    elif not (text.isascii() and text.isalpha() and text.isupper()):
        yield f"{where}: its sequence is empty or contains non-letters"
    elif len(text) < chain.residues:
        yield f"{where}: {chain.residues} residues, {len(text)} letters"


def _maps(inventory: Inventory, maps: Mapping[str, Array], recipe: Plain | None) -> Iterator[str]:
    """Yield what is wrong with the maps into full sequences and into bound structures."""
    bound = {partner.role: partner for partner in inventory.bound}
    has_rows = any(name.startswith("rows.") for name in maps)
    if recipe and inventory.partners[0].content:
        has_rows = bool(recipe["reading"]["seqres"])
    wanted = {f"bound.{partner.role.value}" for partner in inventory.partners if partner.role in bound}
    wanted |= {f"rows.{partner.role.value}" for partner in inventory.partners} if has_rows else set()
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
    """Yield residues that have no place in the sequence that is encoded."""
    name = f"rows.{partner.role.value}"
    if rows_R is not None and (rows_R.dtype != np.int32 or rows_R.shape != (partner.residues,)):
        yield f"{name} is {rows_R.dtype} {list(rows_R.shape)}, not int32 {[partner.residues]}"
        return
    try:
        joined_embedding_rows(partner, rows_R)
    except ValueError as error:
        yield f"{partner.role.value}: {error}"


def _bound_rows(name: str, rows_R: Array, partner: Partner, bound: Partner) -> Iterator[str]:
    """Yield residues that are not in the bound structure, or two that are the same there."""
    if rows_R.dtype != np.int32 or rows_R.shape != (partner.residues,):
        yield f"{name} is {rows_R.dtype} {list(rows_R.shape)}, not int32 {[partner.residues]}"
        return
    yield from first_bad(name, (rows_R < -1) | (rows_R >= bound.residues), rows_R, f"of {bound.residues} residues")
    residues, counts = np.unique(rows_R[rows_R >= 0], return_counts=True)
    if not len(residues):
        yield f"{name}: no residue is in the bound structure"
    yield from first_bad(name, np.isin(rows_R, residues[counts > 1]), rows_R, "is the same residue as another")


def wrong(record: Record, recipe: Plain | None = None) -> Iterator[str]:
    """Yield what is wrong with the record of a graph, or of the reason why there is none."""
    if "reason" in record.meta:
        yield from _refusal(record)
    elif record.meta.get("format") != GRAPH_FORMAT:
        yield f"its format is {record.meta.get('format')}, not {GRAPH_FORMAT}"
    else:
        yield from wrong_graph(record, recipe)


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
    """Yield what is wrong with the record of an item that has no graph."""
    if record.meta["reason"] not in REASONS:
        yield f"the reason {record.meta['reason']!r} is unknown"
    if not isinstance(record.meta.get("detail"), str):
        yield "a rejection without a detail"
    if record.arrays:
        yield f"a rejected graph with {len(record.arrays)} arrays"


SIZE = "size."


def wrong_table(record: Record) -> Iterator[str]:
    """Yield what is wrong with the table of a data set."""
    arrays, meta = record.arrays, record.meta
    if meta["format"] != TABLE_FORMAT:
        yield f"its format is {meta['format']}, not {TABLE_FORMAT}"
        return
    items = meta["items"]
    texts = ["id", *(["item"] if "item.end" in arrays else [])]
    wanted = {"key", "split", *(SIZE + name for name in meta["sizes"])}
    wanted |= {LABEL + name for name in meta.get("labels", ())}
    wanted |= {f"{name}.{of}" for name in texts for of in ("bytes", "end")}
    if arrays.keys() != wanted:
        yield f"its arrays are {', '.join(sorted(arrays))}, not {', '.join(sorted(wanted))}"
        return
    if arrays["key"].shape != (items, KEY_BYTES) or arrays["key"].dtype != np.uint8:
        yield f"key is {arrays['key'].dtype} {list(arrays['key'].shape)}, not uint8 {[items, KEY_BYTES]}"
    for name in wanted - {"key", *(f"{name}.bytes" for name in texts)}:
        if arrays[name].shape != (items,):
            yield f"{name} is {list(arrays[name].shape)}, not {[items]}"
        elif items and arrays[name].dtype.kind == "i" and arrays[name].min() < 0:
            yield f"{name}[{int(arrays[name].argmin())}] is {int(arrays[name].min())}"
    if items and arrays["split"].max(initial=0) >= len(meta["splits"]):
        yield f"split[{int(arrays['split'].argmax())}] is {int(arrays['split'].max())} of {len(meta['splits'])} splits"
    for name in texts:
        yield from _texts(name, arrays[f"{name}.bytes"], arrays[f"{name}.end"])
    content = {name: _array_digest(array) for name, array in arrays.items()}
    if recipe_key(KIND, {"meta": meta, "content": content}) != record.key:
        yield "its key belongs to another table"


def wrong_recipe(record: Record) -> Iterator[str]:
    """Yield what is wrong with the description of a recipe."""
    if record.meta.keys() != {"kind", "recipe"} or record.arrays:
        yield f"it holds {', '.join([*record.meta, *record.arrays]) or 'nothing'}, not kind and recipe"
    elif not (isinstance(record.meta["kind"], str) and isinstance(record.meta["recipe"], dict)):
        yield "its kind or recipe is malformed"
    elif recipe_key("recipe", record.meta) != record.key:
        yield "its key belongs to another recipe"


def _texts(name: str, bytes_T: Array, end_N: Array) -> Iterator[str]:
    """Yield texts whose ends are out of order, or do not cover all bytes."""
    begins_N = np.concatenate([[0], end_N[:-1]]) if len(end_N) else end_N
    if (end_N < begins_N).any():
        yield f"{name}.end[{int((end_N < begins_N).argmax())}] is before the end of the text before"
    if int(end_N[-1] if len(end_N) else 0) != len(bytes_T):
        yield f"{name}.end ends at {int(end_N[-1] if len(end_N) else 0)} of {len(bytes_T)} bytes"


def _array_digest(array: Array) -> str:
    """Return the digest of an array's bytes, as the key of a table is made from it."""
    return content_digest(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).hex()


def sampled_sizes(record: Record, graphs: Store, chosen: Callable[[bytes], bool]) -> Iterator[str]:
    """Yield items whose sizes in a table differ from those of their graphs; items without a graph are passed over."""
    key_N16, sizes = record.arrays["key"], record.meta["sizes"]
    for number, key in enumerate(map(bytes, key_N16)):
        mine = {name: int(record.arrays[SIZE + name][number]) for name in sizes}
        if chosen(key) and (theirs := _sizes_of(graphs, key)) not in (None, mine):
            yield f"item {number}: its sizes are {mine}; those of its graph are {theirs}"


def _sizes_of(graphs: Store, key: bytes) -> Any:
    """Return the sizes that a graph says it has; None where none can be read."""
    try:
        return graphs.get(key).meta.get("sizes")
    except (CacheDamaged, RecordMissing):
        return None
