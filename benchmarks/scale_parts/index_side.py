"""An index of very many records: made from shards, added to, opened, looked up in; how large it is."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.scale_parts.apart import apart
from pipeline.store.cache_folder import CacheFolder

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.store.store import Store

KIND = "scan"
KEY_BYTES = 16
LOOK_UPS, ROUNDS = 1_000, 15
MORE_SHARE = 0.01  # of the records come later, to a store that has an index


def index_side(folder: Path, records: int) -> dict[str, Any]:
    """Keep so many small records, and measure their index."""
    later = max(1, int(records * MORE_SHARE))
    apart(put, folder, 0, records - later)
    _, made = apart(make_index, folder)
    apart(put, folder, 1, later)
    _, behind = apart(look_up, folder, records - later)
    _, added = apart(make_index, folder)
    times_ms, looked_up = apart(look_up, folder, records - later)
    layout = store_of(folder).layout
    return {
        "records": records,
        "shards": sum(1 for _ in layout.shards.iterdir()),
        "index_bytes_per_record": round(layout.index.stat().st_size / records, 2),
        "made_from_tables": made,
        "later": later,
        "added_to": added,
        "look_up_1000_while_behind": behind,
        "open_and_look_up_1000_ms": round(median(times_ms), 2),
        "look_up_1000": looked_up,
    }


def store_of(folder: Path) -> Store:
    """Return the store."""
    return CacheFolder(folder / "cache").kind(KIND)


def put(folder: Path, seed: int, records: int) -> None:
    """Store small records under keys that a seed gives."""
    keys, numbers = keys_of(seed, records), np.zeros(8, np.float32)
    with store_of(folder).writer() as writer:
        for key in keys:
            writer.put(key, {"numbers": numbers}, {})


def keys_of(seed: int, records: int) -> list[bytes]:
    """Return keys."""
    drawn = np.random.default_rng(seed).bytes(KEY_BYTES * records)
    return [drawn[start : start + KEY_BYTES] for start in range(0, len(drawn), KEY_BYTES)]


def make_index(folder: Path) -> None:
    """Bring the index up to date."""
    store_of(folder).write_index()


def look_up(folder: Path, records: int) -> list[float]:
    """Open the store and look a thousand keys up, several times; return the milliseconds."""
    drawn = np.random.default_rng(0).bytes(KEY_BYTES * records)  # as `put` did, without making a list of all
    at, times_ms = np.random.default_rng(2).integers(0, records, (ROUNDS, min(LOOK_UPS, records))), []
    for places in at.tolist():
        asked = [drawn[KEY_BYTES * place : KEY_BYTES * (place + 1)] for place in places]
        start = time.perf_counter()
        found = store_of(folder).present(asked)
        times_ms.append(1e3 * (time.perf_counter() - start))
        assert found.all()
    return times_ms
