"""The store on real bytes: validation against reading alone, verified reads against pread, a large index.

    python benchmarks/store.py [--only read,index,validate] [--gib 4] [--rounds 5] [--folder FOLDER] [--save]

Reads are cold: the files are dropped from the page cache before each. Both sides of a read hand each record's bytes to
the same consumer. --folder names the disk to measure.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.measure import Row, Spread, by_turns, chill, options, pipeline, publish, run
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format.cache_layout import KindLayout
from pipeline.store.format.disk import Disk
from pipeline.store.format.shard import key_column, row_keys
from pipeline.store.maintenance.checking import check
from pipeline.store.shard_index import ROW, ShardIndex, write_index

MIB, GIB = 1 << 20, 1 << 30
RECORDS, INDEXED, LOOK_UPS = 600, 1_000_000, 1_000
READ, VALIDATED, MEMORY_MB, INDEX_MS = 0.80, 0.85, 100, 5.0


def read(folder: Path, typed: argparse.Namespace) -> list[Row]:
    """Read records cold in random order, one at a time and four at once."""
    rng = np.random.default_rng(0)
    noise = rng.standard_normal(MIB // 4).astype(np.float32)
    keys = [int(number).to_bytes(16, "big") for number in range(RECORDS)]
    store = CacheFolder(folder).kind("embed")
    with store.writer(shard_bytes=128 * MIB) as writer:
        for key, size in zip(keys, rng.integers(MIB // 2, MIB, RECORDS) // 4, strict=True):
            writer.put(key, {"embedding": noise[:size]}, {})
    store.write_index()
    shuffled = [keys[place] for place in rng.permutation(RECORDS)]
    places = [copies[0] for copies in store.locate(shuffled)]
    files = {place.shard: os.open(folder / "embed/shards" / place.shard, os.O_RDONLY) for place in places}

    def plain(place: Any) -> bytes:
        return os.pread(files[place.shard], place.length, place.offset)

    def four_at_once() -> Iterable[bytes]:
        with ThreadPoolExecutor(4) as pool:
            yield from pool.map(plain, places)

    ways: dict[str, Callable[[], Iterable[object]]] = {
        "ours": lambda: map(store.get, shuffled),
        "pread": lambda: map(plain, places),
        "ours, four": lambda: store.read(shuffled),
        "pread, four": four_at_once,
    }
    spent = by_turns({name: lambda way=way: seconds_cold(folder, way) for name, way in ways.items()}, typed.rounds)
    for file in files.values():
        os.close(file)
    one, four = (Spread.ratio(spent[f"pread{many}"], spent[f"ours{many}"]) for many in ("", ", four"))
    return [
        Row("store_read", "cold verified read in random order, one at a time; four at once", "pread of the same bytes",
            f"≥ {READ:.0%}", f"{one:.0%}; {four:.0%}", "store.py --only read",
            "" if min(one.median, four.median) >= READ else "Hashing takes the rest."),
    ]  # fmt: skip


def seconds_cold(folder: Path, way: Callable[[], Iterable[object]]) -> float:
    """Return how long it takes to go through records that are not in the page cache."""
    chill(folder)
    begun = time.perf_counter()
    assert sum(1 for _ in way()) == RECORDS
    return time.perf_counter() - begun


def index(folder: Path, typed: argparse.Namespace) -> list[Row]:
    """Open an index of a million records and look a thousand of them up, page cache warm."""
    layout, disk, rng = KindLayout(folder), Disk(), np.random.default_rng(1)
    rows = np.zeros(INDEXED, ROW)
    rows["key"] = np.sort(rng.integers(0, 2**64, (INDEXED, 2), np.uint64).view("S16")[:, 0])
    rows["shard"] = np.arange(INDEXED) // 1000
    names = [f"20260101T000000Z-host-{shard}-0123456789abcdef.safetensors" for shard in range(INDEXED // 1000)]
    write_index(disk, layout, names, np.full(len(names), 1), [rows])
    keys = row_keys(rows)
    asked = [[keys[place] for place in rng.integers(0, INDEXED, LOOK_UPS)] for _ in range(3 * typed.rounds + 1)]
    del keys
    gc.collect()
    took_ms = []
    for batch in asked:
        begun = time.perf_counter()
        found, _ = ShardIndex(disk, layout.index).find(key_column(batch))
        took_ms.append(1e3 * (time.perf_counter() - begun))
        assert len(found) == LOOK_UPS
    took = Spread.of(took_ms[1:])
    return [
        Row("store_index", f"index of {INDEXED:,} records: open and {LOOK_UPS:,} look-ups", "", f"≤ {INDEX_MS:g} ms",
            f"{took:.1f} ms", "store.py --only index", "" if took.median <= INDEX_MS else "The machine was busy."),
    ]  # fmt: skip


def validate(folder: Path, typed: argparse.Namespace) -> list[Row]:
    """Validate records of the sizes of a training set: embeddings of half a megabyte and graphs of 50 kB."""
    cache = CacheFolder(folder / "cache")
    fill(cache, "embed", int(typed.gib * GIB) * 7 // 8, MIB // 2)
    fill(cache, "graph", int(typed.gib * GIB) // 8, 50_000)
    paths = sorted((folder / "cache").glob("*/shards/*"))
    size, stores = sum(path.stat().st_size for path in paths), [cache.kind(kind) for kind in cache.kinds()]

    def ours() -> None:
        assert not any(checked.findings for store in stores for checked in check(store))

    def bare() -> None:
        assert sum(map(read_through, paths)) == size

    def timed(way: Callable[[], None]) -> float:
        chill(folder)
        begun = time.perf_counter()
        way()
        return time.perf_counter() - begun

    spent = by_turns({"ours": lambda: timed(ours), "bare": lambda: timed(bare)}, typed.rounds, warm=False)
    share, rate = Spread.ratio(spent["bare"], spent["ours"]), size / Spread.of(spent["bare"]).median / 1e6
    (folder / "data").mkdir()
    (folder / "pipeline.yaml").write_text("data: {source: glob, path: data}\ncache: {root: cache}\n")
    command = pipeline("cache", "validate", "--full", "--json")
    peak_mb = run([sys.executable, "-S", "-c", SMALL, *command], folder).json()
    good = share.median >= VALIDATED and peak_mb <= MEMORY_MB
    return [
        Row("store_validate", f"`validate --full` of {size / 1e9:.1f} GB, cold; memory of the command",
            "reading and hashing nothing", f"≥ {VALIDATED:.0%}; ≤ {MEMORY_MB} MB",
            f"{share:.0%} of {rate:,.0f} MB/s; {peak_mb} MB", "store.py --only validate",
            "" if good else "Hashing takes the rest."),
    ]  # fmt: skip


# Run by a process that is small itself: the peak of a child begins with that of its parent.
SMALL = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
assert status == 0, status
print(round(usage.ru_maxrss / 1024))
"""


def fill(cache: CacheFolder, kind: str, size: int, about: int) -> None:
    """Write that many bytes in records of about a size."""
    rng, number, store = np.random.default_rng(0), 0, cache.kind(kind)
    noise = rng.integers(0, 256, 4 * about, np.uint8)
    with store.writer() as writer:
        while size > 0:
            length = int(rng.integers(about // 2, 3 * about // 2))
            begin = int(rng.integers(0, len(noise) - length))
            writer.put(number.to_bytes(16, "big"), {"numbers": noise[begin : begin + length]}, {"n": number})
            size, number = size - length, number + 1
    store.write_index()


def read_through(path: Path) -> int:
    buffer, total = bytearray(MIB), 0
    with path.open("rb", buffering=0) as file:
        while got := file.readinto(buffer):
            total += got
    return total


PARTS: dict[str, Callable[[Path, argparse.Namespace], list[Row]]] = {"read": read, "index": index, "validate": validate}


def main() -> int:
    """Measure the parts, each in a folder of its own."""
    typed = options(
        str(__doc__), 5,
        only={"default": ",".join(PARTS), "help": "parts, separated by commas (default: all)"},
        gib={"type": float, "default": 4.0, "help": "size of the validated cache (default: 4)"},
        folder={"type": Path, "help": "measure on the disk that holds this folder"},
    )  # fmt: skip
    rows = []
    for name in typed.only.split(","):
        folder = Path(tempfile.mkdtemp(prefix="store-", dir=typed.folder))
        try:
            rows += PARTS[name](folder, typed)
        finally:
            shutil.rmtree(folder)
    return publish(rows, save=typed.save)


if __name__ == "__main__":
    sys.exit(main())
