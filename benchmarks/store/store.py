"""Measure the store against the plainest way to do the same: `python benchmarks/store/store.py [--out FILE]`."""

from __future__ import annotations

import argparse
import gc
import json
import os
import pickle
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.circumstances import write
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format.cache_layout import KindLayout
from pipeline.store.format.disk import Disk
from pipeline.store.format.shard import key_pairs, row_keys
from pipeline.store.shard_index import ROW, ShardIndex, sort_in_place, write_index

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeline.store.store import RecordPlace, Store

RUNS = 7
RECORDS = 600
INDEX_RECORDS = 1_000_000
LOOK_UPS = 1_000
MIB = 1024 * 1024


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=Path, help="write the result as JSON to this file")
    arguments.add_argument("--dir", type=Path, help="measure on the disk that holds this folder")
    options = arguments.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-store-", dir=options.dir))
    try:
        result = {"benchmark": "store", "rows": measure(folder)}
    finally:
        shutil.rmtree(folder)
    text = json.dumps(result, indent=1)
    write(options.out, result)
    print(text)
    print_table(result["rows"])
    return 0


def measure(folder: Path) -> list[dict[str, Any]]:
    rows = [measure_index(folder / "index")]
    rng = np.random.default_rng(0)
    sizes = rng.integers(MIB // 2, MIB, RECORDS) // 4
    noise = rng.standard_normal(MIB // 4).astype(np.float32)
    keys = [int(number).to_bytes(16, "big") for number in range(RECORDS)]
    records = [{"embedding": noise[:size]} for size in sizes]
    rows.append(measure_write(folder, keys, records))
    store = CacheFolder(folder / "cache").kind("embed")
    store.write_index()
    return rows + measure_random_read(store, folder / "cache/embed/shards", rng.permutation(keys_array(keys)))


def measure_index(folder: Path) -> dict[str, Any]:
    """Open an index of a million records and look a thousand of them up, page cache warm."""
    layout, disk, rng = KindLayout(folder), Disk(), np.random.default_rng(1)
    rows = np.zeros(INDEX_RECORDS, ROW)
    for half in ("hi", "lo"):
        rows[half] = rng.integers(0, 2**64, INDEX_RECORDS, np.uint64)
    rows["shard"] = np.arange(INDEX_RECORDS) // 1000
    names = [f"20260101T000000Z-host-{shard}-0123456789abcdef.safetensors" for shard in range(INDEX_RECORDS // 1000)]
    write_index(disk, layout, names, np.full(len(names), 1), [sort_in_place(rows)], len(rows))
    keys = row_keys(rows)
    asked = [[keys[place] for place in rng.integers(0, INDEX_RECORDS, LOOK_UPS)] for _ in range(15)]
    del keys
    gc.collect()
    times = [timed(lambda asked=batch: look_up(disk, layout.index, asked)) for batch in asked]
    return row("index of 1M records: open + 1,000 look-ups", "ms", median(times) * 1e3, target="<= 5 ms")


def look_up(disk: Disk, path: Path, asked: list[bytes]) -> None:
    found, _ = ShardIndex(disk, path).find(key_pairs(asked))
    assert len(found) == LOOK_UPS


def measure_write(folder: Path, keys: list[bytes], records: list[dict[str, Any]]) -> dict[str, Any]:
    size = sum(array.nbytes for arrays in records for array in arrays.values())

    def ours() -> None:
        shutil.rmtree(folder / "cache", ignore_errors=True)
        with CacheFolder(folder / "cache").kind("embed").writer(shard_bytes=128 * MIB) as writer:
            for key, arrays in zip(keys, records, strict=True):
                writer.put(key, arrays, {})

    def theirs() -> None:
        with (folder / "all.pickle").open("wb") as file:
            pickle.dump([{name: array.copy() for name, array in arrays.items()} for arrays in records], file)
            os.fsync(file.fileno())

    times = alternate([ours, theirs], runs=5)
    (folder / "all.pickle").unlink()
    return compared("write, durable", "one pickle dump, durable", size, times, target="")


def measure_random_read(store: Store, shards: Path, order: Any) -> list[dict[str, Any]]:
    keys = [bytes(key) for key in order]
    places = [copies[0] for copies in store.locate(keys)]
    files = {place.shard: os.open(shards / place.shard, os.O_RDONLY) for place in places}
    size = sum(place.length for place in places)

    def plain(place: RecordPlace) -> bytes:  # both sides hand the bytes to the same consumer, which holds one at a time
        return os.pread(files[place.shard], place.length, place.offset)

    def four_at_once() -> None:
        with ThreadPoolExecutor(4) as pool:
            assert sum(map(len, pool.map(plain, places))) == size

    def chill() -> None:
        drop_from_page_cache(shards)

    one = alternate([lambda: count(map(store.get, keys)), lambda: count(map(plain, places))], before=chill)
    four = alternate([lambda: count(store.read(keys)), four_at_once], before=chill)
    for file in files.values():
        os.close(file)
    return [
        compared("cold random read, one at a time", "pread of the same bytes", size, one, target=">= 80%"),
        compared("cold random read, four at once", "pread of the same bytes, 4 threads", size, four, target=">= 80%"),
    ]


def read_through(path: Path) -> int:
    buffer, total = bytearray(MIB), 0
    with path.open("rb", buffering=0) as file:
        while got := file.readinto(buffer):
            total += got
    return total


def drop_from_page_cache(folder: Path) -> None:
    for path in folder.iterdir():
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def alternate(
    ways: list[Callable[[], object]], *, before: Callable[[], None] = lambda: None, runs: int = RUNS
) -> list[float]:
    """Time the ways in turn, so that a slow moment of the machine hits all; return the median of each."""
    times: list[list[float]] = [[] for _ in ways]
    for run in range(runs + 1):
        for way, taken in zip(ways, times, strict=True):
            before()
            taken.append(timed(way))
        if run == 0:  # the first round warms up
            times = [[] for _ in ways]
    return [median(taken) for taken in times]


def timed(way: Callable[[], object]) -> float:
    started = time.perf_counter()
    way()
    return time.perf_counter() - started


def count(things: Any) -> None:
    assert sum(1 for _ in things) == RECORDS


def keys_array(keys: list[bytes]) -> Any:
    return np.frombuffer(b"".join(keys), "V16")


def row(what: str, unit: str, value: float, **more: Any) -> dict[str, Any]:
    return {"what": what, "unit": unit, "value": round(value, 2), **more}


def compared(what: str, against: str, size: int, times: list[float], target: str) -> dict[str, Any]:
    ours, theirs = (size / taken / 1e6 for taken in times)
    return row(
        what, "MB/s", ours, against=against, theirs=round(theirs, 2), ratio=round(ours / theirs, 3), target=target
    )


def print_table(rows: list[dict[str, Any]]) -> None:
    for line in rows:
        ratio = f"{line['ratio']:.0%} of {line['theirs']:,.0f}, {line['against']}" if "ratio" in line else ""
        text = f"{line['what']:<44} {line['value']:>9,.1f} {line['unit']:<5} {ratio:<52} {line['target']}"
        print(text, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
