"""Can this be a table of what can be trained on, or the description of a recipe? Every function yields sentences.

Shapes: N items.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.errors import CacheDamaged, RecordMissing
from pipeline.keys import KEY_BYTES, content_digest, recipe_key
from pipeline.training.items.item_table import FORMAT, KIND, LABEL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pipeline.store.format.record import Array, Record
    from pipeline.store.store import Store

SIZE = "size."


def wrong_table(record: Record) -> Iterator[str]:
    """Yield what is wrong with a table."""
    arrays, meta = record.arrays, record.meta
    if meta["format"] != FORMAT:
        yield f"its format is {meta['format']}, not {FORMAT}"
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
    content = {name: _digest(one) for name, one in arrays.items()}
    if recipe_key(KIND, {"meta": meta, "content": content}) != record.key:
        yield "its key is that of another table"


def wrong_recipe(record: Record) -> Iterator[str]:
    """Yield what is wrong with the description of a recipe."""
    if record.meta.keys() != {"kind", "recipe"} or record.arrays:
        yield f"it holds {', '.join([*record.meta, *record.arrays]) or 'nothing'}, not kind and recipe"
    elif not (isinstance(record.meta["kind"], str) and isinstance(record.meta["recipe"], dict)):
        yield "its kind is no name, or its recipe tells of no choices"
    elif recipe_key("recipe", record.meta) != record.key:
        yield "its key is that of another recipe"


def _texts(name: str, bytes_T: Array, end_N: Array) -> Iterator[str]:
    """Yield texts that end before they begin, or are not all that is there."""
    begins_N = np.concatenate([[0], end_N[:-1]]) if len(end_N) else end_N
    if (end_N < begins_N).any():
        yield f"{name}.end[{int((end_N < begins_N).argmax())}] is before the end of the text before"
    if int(end_N[-1] if len(end_N) else 0) != len(bytes_T):
        yield f"{name}.end ends at {int(end_N[-1] if len(end_N) else 0)} of {len(bytes_T)} bytes"


def _digest(one: Array) -> str:
    """Return the digest of an array's bytes, as the key of a table is made from it."""
    return content_digest(np.ascontiguousarray(one).reshape(-1).view(np.uint8).data).hex()


def sampled_sizes(record: Record, graphs: Store, chosen: Callable[[bytes], bool]) -> Iterator[str]:
    """Yield items whose sizes in a table are not those of their graphs; where there is no graph, nothing is said."""
    key_N16, sizes = record.arrays["key"], record.meta["sizes"]
    for number, key in enumerate(map(bytes, key_N16)):
        told = {name: int(record.arrays[SIZE + name][number]) for name in sizes}
        if chosen(key) and (theirs := _sizes_of(graphs, key)) not in (None, told):
            yield f"item {number}: its sizes are {told}; those of its graph are {theirs}"


def _sizes_of(graphs: Store, key: bytes) -> Any:
    """Return the sizes that a graph says it has; None where none can be read."""
    try:
        return graphs.get(key).meta.get("sizes")
    except (CacheDamaged, RecordMissing):
        return None
