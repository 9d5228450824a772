"""Can this be an inventory, or what is remembered of a file? Judged by what a scan promises.

Every function yields what is wrong as a sentence. Shapes: R residues of a partner.
"""

from __future__ import annotations

import math
import re
from itertools import chain as chained
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.encoder.checkpoints.weights import CheckpointFacts
from pipeline.encoder.embedding_recipe import ENCODER_VERSION, STORED, BadSequence, tokenize
from pipeline.graphs.judged_parts import first_bad, listed
from pipeline.keys import recipe_key, tagged_key
from pipeline.records import Inventory, Kind, Reason, Role
from pipeline.structures.partners import NO_ROW, joined_embedding_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pipeline.records import ChainSummary, Partner
    from pipeline.store.format.record import Array, Record

    Plain = Mapping[str, Any]  # a recipe, as JSON
    from collections.abc import Mapping

    from numpy.typing import NDArray

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
        joined_embedding_rows(partner, rows_R)
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
            yield from first_bad(name, here_R != NO_ROW, here_R, f"in the sequence of {chain.name}, which has none")
        elif chain.kind is not Kind.PROTEIN:
            bad_R = (here_R < 0) | (here_R >= len(chain.sequence))
            bad_R[1:] |= np.diff(here_R) <= 0
            yield from first_bad(name, bad_R, here_R, f"does not rise within chain {chain.name}")


def _bound_rows(name: str, rows_R: Array, partner: Partner, bound: Partner) -> Iterator[str]:
    """Yield residues that are nowhere in the bound structure, or two that are the same there."""
    if rows_R.dtype != np.int32 or rows_R.shape != (partner.residues,):
        yield f"{name} is {rows_R.dtype} {list(rows_R.shape)}, not int32 {[partner.residues]}"
        return
    yield from first_bad(name, (rows_R < -1) | (rows_R >= bound.residues), rows_R, f"of {bound.residues} residues")
    found, count = np.unique(rows_R[rows_R >= 0], return_counts=True)
    if not len(found):
        yield f"{name}: no residue is in the bound structure"
    yield from first_bad(name, np.isin(rows_R, found[count > 1]), rows_R, "is the same residue as another")


PRECISIONS = ("fp32", "fp16", "bf16")
CONTEXTS, CUTS = ("chain", "partner"), ("windows", "truncate")
HEX = re.compile(r"[0-9a-f]{32}")
# Bits of half precision, which numpy compares ten times faster than its numbers.
NO_SIGN, EXPONENTS = np.uint16(0x7FFF), {"fp16": np.uint16(0x7C00), "bf16": np.uint16(0x7F80)}
MADE_FROM = ("version", "weights", "layer", "precision", "device")  # the key of a parity record
LIMIT_FROM = ("weights", "layer", "precision", "device", "memory", "week", "budget")


def wrong_embedding(record: Record, recipe: Plain | None = None, width: int | None = None) -> Iterator[str]:
    """Yield what is wrong with an embedding; `width` is that of its weights, where they are known."""
    meta, rows_LD = record.meta, record.arrays.get("rows")
    if record.arrays.keys() != {"rows"} or rows_LD is None or rows_LD.ndim != 2:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in record.arrays.items()) or "none"
        yield f"its arrays are {shapes}, not rows [L, D]"
        return
    storage = STORED.get(rows_LD.dtype.name, "")
    if not storage or (storage == "bf16") != ("rows" in record.bfloat16):
        yield f"rows is {rows_LD.dtype}{' as bfloat16' if record.bfloat16 else ''}, which is no precision"
        return
    yield from _made_of(meta)
    yield from _length(meta, rows_LD)
    if width is not None and rows_LD.shape[1] != width:
        yield f"rows has {rows_LD.shape[1]} numbers a residue; its weights give {width}"
    yield from _numbers(rows_LD, storage)
    yield from _key(record, storage, recipe)


def wrong_weights(record: Record) -> Iterator[str]:
    """Yield what is wrong with what is remembered of a checkpoint."""
    try:
        weights = CheckpointFacts.from_json(record.meta)
    except TypeError as error:
        yield f"it tells of no checkpoint: {error}"
        return
    if record.arrays:
        yield "it has arrays"
    if not HEX.fullmatch(str(weights.digest)):
        yield f"digest is {weights.digest!r}"
    if weights.precision not in PRECISIONS:
        yield f"precision is {weights.precision!r}"
    sizes = (weights.layers, weights.dim, weights.heads, weights.bytes)
    if not all(type(size) is int and size > 0 for size in sizes) or weights.dim % weights.heads:
        yield f"{weights.layers} layers, {weights.dim} numbers, {weights.heads} heads, {weights.bytes} bytes"


def wrong_parity(record: Record) -> Iterator[str]:
    """Yield what is wrong with what is remembered of an encoder that passed the gate."""
    meta = record.meta
    yield from _keyed("parity", record, MADE_FROM)
    if not -1 <= meta["threshold"] <= 1 or not meta["threshold"] <= meta["lowest"] <= 1 + 1e-6:
        yield f"lowest is {meta['lowest']!r}, and {meta['threshold']!r} is needed to pass"
    if meta["sequences"] < 1 or meta["precision"] not in PRECISIONS:
        yield f"{meta['sequences']!r} sequences in {meta['precision']!r}"


def wrong_limit(record: Record) -> Iterator[str]:
    """Yield what is wrong with a budget that was learned."""
    yield from _keyed("limits", record, LIMIT_FROM)
    if type(record.meta["budget"]) is not int or record.meta["budget"] < 1:
        yield f"budget is {record.meta['budget']!r}"


def _keyed(kind: str, record: Record, made_from: tuple[str, ...]) -> Iterator[str]:
    """Yield why a record cannot be the one of its key, which is made from some of what it says."""
    if record.arrays:
        yield "it has arrays"
    if recipe_key(kind, {name: record.meta[name] for name in made_from}) != record.key:
        yield f"its key is not that of its {', '.join(made_from)}"


def _made_of(meta: Plain) -> Iterator[str]:
    """Yield what cannot be of what an embedding is said to be made of."""
    for name, allowed in (("precision", PRECISIONS), ("context", CONTEXTS)):
        if meta[name] not in allowed:
            yield f"{name} is {meta[name]!r}"
    if not HEX.fullmatch(str(meta["weights"])):
        yield f"weights is {meta['weights']!r}, no digest"
    if type(meta["layer"]) is not int or meta["layer"] < 0:
        yield f"layer is {meta['layer']!r}"
    cut = meta["cut"]
    if cut is not None and (cut["policy"] not in CUTS or cut["length"] < 1 or not 0 <= cut["overlap"] < cut["length"]):
        yield f"cut is {cut}"


def _length(meta: Plain, rows_LD: Array) -> Iterator[str]:
    """Yield why there is not a row for each residue."""
    text, cut = meta["text"], meta["cut"]
    try:
        tokenize(text)
    except BadSequence as error:
        yield f"text: {error}"
    if meta["residues"] != len(text):
        yield f"residues is {meta['residues']}; its text has {len(text)}"
    if meta["rows"] != len(rows_LD):
        yield f"rows is said to be {meta['rows']} long, and is {len(rows_LD)}"
    wanted = min(cut["length"], len(text)) if cut and cut["policy"] == "truncate" else len(text)
    if len(rows_LD) != wanted:
        yield f"rows is {len(rows_LD)} long, and its text has {wanted} residues to encode"


def _numbers(rows_LD: Array, storage: str) -> Iterator[str]:
    """Yield rows that are not finite, or that nobody wrote."""
    if storage in EXPONENTS:
        filled_LD: NDArray[Any] = rows_LD.view(np.uint16) & NO_SIGN
        finite_LD = filled_LD < EXPONENTS[storage]
    else:
        finite_LD, filled_LD = np.isfinite(rows_LD), rows_LD
    if not finite_LD.all():
        at, number = (int(one) for one in np.argwhere(~finite_LD)[0])
        yield f"rows[{at}, {number}] is not finite (and {int((~finite_LD).sum()) - 1} more)"
    filled_L = filled_LD.any(axis=1)
    if not filled_L.all():
        yield f"rows[{int(filled_L.argmin())}] is all zeros (and {int((~filled_L).sum()) - 1} more)"


def _key(record: Record, storage: str, recipe: Plain | None) -> Iterator[str]:
    """Yield why an embedding cannot be the one of its key."""
    meta, cut = record.meta, record.meta["cut"]
    told: dict[str, Any] = {name: meta[name] for name in ("weights", "layer", "context", "precision")}
    told |= {"storage": storage} | ({} if cut is None else {"cut": [cut["policy"], cut["length"], cut["overlap"]]})
    if recipe is not None:
        told["version"] = recipe["version"]
        for name in sorted(told.keys() | recipe.keys()):
            if told.get(name) != recipe.get(name):
                yield f"{name} is {told.get(name)!r}; the recipe of its key says {recipe.get(name)!r}"
        keys = [tagged_key("embed", recipe, meta["text"])]
    else:
        keys = [tagged_key("embed", told | {"version": one}, meta["text"]) for one in range(1, ENCODER_VERSION + 1)]
    if record.key not in keys:
        yield "its key is that of another text, or of another recipe"


def distance(mine_LD: Array, theirs_LD: Array, *, by_row: bool) -> float:
    """Return how far two embeddings are from each other, as a share of their length: of the worst row, or of all."""
    mine, theirs = (one.astype(np.float64) for one in (mine_LD, theirs_LD))
    axis = 1 if by_row else None
    length = np.maximum(np.linalg.norm(theirs, axis=axis), np.finfo(np.float64).tiny)
    return float(np.max(np.linalg.norm(mine - theirs, axis=axis) / length))


def allowed(cosine: float) -> float:
    """Return the distance of two vectors of one length whose cosine is this."""
    return math.sqrt(2 * (1 - cosine))
