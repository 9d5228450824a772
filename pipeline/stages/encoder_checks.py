"""Checks of embeddings and of the records of weights, of the parity gate and of learned budgets.

Every function yields what is wrong as a sentence. Shapes: L residues, D numbers of each, S rows of any.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.encoder.embedding_recipe import BF16_PRODUCTS, ENCODER_VERSION, STORED, BadSequence, tokenize
from pipeline.encoder.weights import CheckpointFacts
from pipeline.keys import recipe_key, tagged_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from pipeline.store.format.record import Array, Record

    Plain = Mapping[str, Any]  # a recipe, as JSON

PRECISIONS = ("fp32", "fp16", "bf16")
COMPUTED_IN = (*PRECISIONS, BF16_PRODUCTS)
CONTEXTS = ("chain", "partner")
CUTS = ("windows", "truncate")
HEX = re.compile(r"[0-9a-f]{32}")
# Bits of half precision, which numpy compares ten times faster than its numbers.
NO_SIGN = np.uint16(0x7FFF)
EXPONENTS = {"fp16": np.uint16(0x7C00), "bf16": np.uint16(0x7F80)}
MADE_FROM = ("version", "weights", "layer", "precision", "device")  # a parity record's key; and cls where that passed
LIMIT_FROM = ("weights", "layer", "precision", "device", "memory", "week", "budget")


def wrong_embedding(record: Record, recipe: Plain | None = None) -> Iterator[str]:
    """Yield what is wrong with an embedding."""
    meta, rows_LD, cls_D = record.meta, record.arrays.get("rows"), record.arrays.get("cls")
    if rows_LD is None or rows_LD.ndim != 2 or not record.arrays.keys() <= {"rows", "cls"}:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in record.arrays.items()) or "none"
        yield f"its arrays are {shapes}, not rows [L, D]"
        return
    storage = STORED.get(rows_LD.dtype.name, "")
    if not storage or record.bfloat16 != (set(record.arrays) if storage == "bf16" else set()):
        yield f"rows is {rows_LD.dtype}{' as bfloat16' if record.bfloat16 else ''}, which is not a supported precision"
        return
    if cls_D is not None and (cls_D.dtype, cls_D.shape) != (rows_LD.dtype, rows_LD.shape[1:]):
        yield f"cls is {cls_D.dtype} {list(cls_D.shape)}, and rows is {rows_LD.dtype} {list(rows_LD.shape)}"
        return
    yield from _wrong_choices(meta)
    yield from _wrong_length(meta, rows_LD)
    yield from _wrong_numbers("rows", rows_LD, storage)
    if cls_D is not None:
        yield from _wrong_numbers("cls", cls_D[None], storage)
    yield from _wrong_embedding_key(record, storage, recipe)


def wrong_weights(record: Record) -> Iterator[str]:
    """Yield what is wrong with what is remembered of a checkpoint."""
    try:
        weights = CheckpointFacts(**record.meta)
    except TypeError as error:
        yield f"it does not describe a checkpoint: {error}"
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
    yield from _wrong_key("parity", record, (*MADE_FROM, *(["cls"] if "cls" in meta else [])))
    if not -1 <= meta["threshold"] <= 1 or not meta["threshold"] <= meta["lowest"] <= 1 + 1e-6:
        yield f"lowest is {meta['lowest']!r}, and {meta['threshold']!r} is needed to pass"
    if meta["sequences"] < 1 or meta["precision"] not in COMPUTED_IN:
        yield f"{meta['sequences']!r} sequences in {meta['precision']!r}"


def wrong_limit(record: Record) -> Iterator[str]:
    """Yield what is wrong with a budget that was learned."""
    yield from _wrong_key("limits", record, LIMIT_FROM)
    if type(record.meta["budget"]) is not int or record.meta["budget"] < 1:
        yield f"budget is {record.meta['budget']!r}"


def _wrong_key(kind: str, record: Record, made_from: tuple[str, ...]) -> Iterator[str]:
    """Yield why a record's key does not match the fields it is made from."""
    if record.arrays:
        yield "it has arrays"
    if recipe_key(kind, {name: record.meta[name] for name in made_from}) != record.key:
        yield f"its key is not that of its {', '.join(made_from)}"


def _wrong_choices(meta: Plain) -> Iterator[str]:
    """Yield which fields of an embedding's recipe have impossible values."""
    for name, allowed in (("precision", COMPUTED_IN), ("context", CONTEXTS)):
        if meta[name] not in allowed:
            yield f"{name} is {meta[name]!r}"
    if not HEX.fullmatch(str(meta["weights"])):
        yield f"weights is {meta['weights']!r}, not a digest"
    if type(meta["layer"]) is not int or meta["layer"] < 0:
        yield f"layer is {meta['layer']!r}"
    cut = meta["cut"]
    if cut is not None and (cut["policy"] not in CUTS or cut["length"] < 1 or not 0 <= cut["overlap"] < cut["length"]):
        yield f"cut is {cut}"


def _wrong_length(meta: Plain, rows_LD: Array) -> Iterator[str]:
    """Yield why an embedding does not have a row for each residue."""
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


def _wrong_numbers(name: str, rows_SD: Array, storage: str) -> Iterator[str]:
    """Yield rows that are not finite, or all zeros."""
    if storage in EXPONENTS:
        filled_SD: NDArray[Any] = rows_SD.view(np.uint16) & NO_SIGN
        finite_SD = filled_SD < EXPONENTS[storage]
    else:
        finite_SD, filled_SD = np.isfinite(rows_SD), rows_SD
    if not finite_SD.all():
        at, number = np.argwhere(~finite_SD)[0].tolist()
        yield f"{name}[{at}, {number}] is not finite (and {int((~finite_SD).sum()) - 1} more)"
    filled_S = filled_SD.any(axis=1)
    if not filled_S.all():
        yield f"{name}[{int(filled_S.argmin())}] is all zeros (and {int((~filled_S).sum()) - 1} more)"


def _wrong_embedding_key(record: Record, storage: str, recipe: Plain | None) -> Iterator[str]:
    """Yield why an embedding does not match its key."""
    meta, cut = record.meta, record.meta["cut"]
    made_from: dict[str, Any] = {name: meta[name] for name in ("weights", "layer", "context", "precision")}
    made_from |= {"cls": True} if "cls" in record.arrays else {}
    made_from |= {"storage": storage} | ({} if cut is None else {"cut": [cut["policy"], cut["length"], cut["overlap"]]})
    if recipe is not None:
        made_from["version"] = recipe["version"]
        for name in sorted(made_from.keys() | recipe.keys()):
            if made_from.get(name) != recipe.get(name):
                yield f"{name} is {made_from.get(name)!r}; the recipe of its key says {recipe.get(name)!r}"
        keys = [tagged_key("embed", recipe, meta["text"])]
    else:
        keys = [
            tagged_key("embed", made_from | {"version": version}, meta["text"])
            for version in range(1, ENCODER_VERSION + 1)
        ]
    if record.key not in keys:
        yield "its key belongs to another sequence or recipe"


def distance(mine_LD: Array, theirs_LD: Array, *, by_row: bool) -> float:
    """Return how far two embeddings are from each other, as a share of their length: of the worst row, or of all."""
    mine, theirs = (rows_LD.astype(np.float64) for rows_LD in (mine_LD, theirs_LD))
    axis = -1 if by_row else None
    length = np.maximum(np.linalg.norm(theirs, axis=axis), np.finfo(np.float64).tiny)
    return float(np.max(np.linalg.norm(mine - theirs, axis=axis) / length))


def allowed(cosine: float) -> float:
    """Return the distance of two vectors of one length whose cosine is this."""
    return math.sqrt(2 * (1 - cosine))
