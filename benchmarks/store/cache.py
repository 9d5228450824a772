"""Measure the steps of the cache on real bytes: `python benchmarks/store/cache.py [--out FILE] [--only PART]…`.

validation: every byte of ≥ 4 GB against a reader that hashes nothing, in turns, cold; and the memory of the command.
damage:     bits flipped, bytes zeroed, files cut: which records are named, against which were really changed.
million:    `stat`, the mark phase of `clean` and an index made from shards, with 1,000,000 records.
mend:       5% of all shards of a small project damaged; validate, repair, regenerate; then everything is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.circumstances import circumstances, write  # noqa: E402 - the project need not be installed
from benchmarks.store.store import alternate, read_through  # noqa: E402
from pipeline.store.cache_folder import CacheFolder  # noqa: E402
from pipeline.store.format.disk import Disk  # noqa: E402
from pipeline.store.format.shard import read_table, row_keys  # noqa: E402
from pipeline.store.maintenance import scrub  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pipeline.store.store import Store

    Rows = list[dict[str, Any]]

MIB, GIB, TB = 1 << 20, 1 << 30, 10**12
PIPELINE = Path(sys.executable).with_name("pipeline")
MILLION = 1_000_000


def row(what: str, value: float, unit: str, reach: str = "", **more: Any) -> dict[str, Any]:
    return {"what": what, "value": round(value, 3), "unit": unit, "reach": reach, **more}


# ---- validation ----


def validation(folder: Path, options: argparse.Namespace) -> Rows:
    """Validate records of the sizes of a training set: embeddings of half a megabyte and graphs of 50 kB."""
    cache = CacheFolder(folder / "cache")
    fill(cache.kind("embed"), options.gib * GIB * 7 // 8, MIB // 2)
    fill(cache.kind("graph"), options.gib * GIB // 8, 50_000)
    paths = sorted((folder / "cache").glob("*/shards/*"))
    size = sum(path.stat().st_size for path in paths)
    stores = [cache.kind(kind) for kind in cache.kinds()]

    def ours() -> None:
        assert not any(checked.findings for store in stores for checked in scrub.full(store))

    def bare() -> None:
        assert sum(map(read_through, paths)) == size

    seconds, bare_seconds = alternate([ours, bare], before=lambda: chill(paths), runs=options.runs)
    chill(paths)
    command = validate_command(folder)
    return [
        row("full validation, cold", size / seconds / 1e6, "MB/s", ">= 85% of the reader",
            bytes=size, reader=round(size / bare_seconds / 1e6), ratio=round(bare_seconds / seconds, 3)),
        row("`pipeline cache validate --full`: peak memory", command["peak_mb"], "MB", "<= 100", **command),
        row("a cache of 1 TB at that rate", TB / (size / seconds) / 60, "minutes"),
    ]  # fmt: skip


def fill(store: Store, size: int, about: int) -> None:
    """Write so many bytes in records of about a size."""
    rng, number = np.random.default_rng(0), 0
    noise = rng.integers(0, 256, 4 * about, np.uint8)
    with store.writer() as writer:
        while size > 0:
            length = int(rng.integers(about // 2, 3 * about // 2))
            begin = int(rng.integers(0, len(noise) - length))
            writer.put(number.to_bytes(16, "big"), {"numbers": noise[begin : begin + length]}, {"n": number})
            size, number = size - length, number + 1
    store.write_index()


def chill(paths: Iterable[Path]) -> None:
    """Let no file be in the page cache."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def validate_command(folder: Path) -> dict[str, Any]:
    """Run the command as people do; return its time and peak memory."""
    words = [str(PIPELINE), "cache", "validate", "--full", "--json", "--config", str(configured(folder))]
    return timed_command(words, expect=0)


def configured(folder: Path) -> Path:
    """Return a configuration whose cache is in a folder."""
    (folder / "data").mkdir(exist_ok=True)
    path = folder / "pipeline.yaml"
    path.write_text("data: {source: glob, path: data}\ncache: {root: cache}\n")
    return path


# In a process that is small itself: a child's peak begins with that of the process it is forked from.
TIMER = """
import json, os, subprocess, sys, time
started = time.perf_counter()
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
seconds, code = round(time.perf_counter() - started, 3), os.waitstatus_to_exitcode(status)
print(json.dumps({"seconds": seconds, "code": code, "peak_mb": round(usage.ru_maxrss / 1024)}))
"""


def timed_command(words: list[str], expect: int) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-S", "-c", TIMER, *words], capture_output=True, text=True, check=True)
    measured: dict[str, Any] = json.loads(done.stdout)
    assert measured.pop("code") == expect, done.stderr
    return measured


# ---- damage ----


class CountingDisk(Disk):
    """Counts the reads of each file."""

    def __init__(self) -> None:
        self.reads: Counter[Path] = Counter()
        self._paths: dict[int, Path] = {}

    def open_read(self, path: Path) -> int:
        fd = super().open_read(path)
        self._paths[fd] = path
        return fd

    def read_at(self, fd: int, length: int, offset: int) -> bytes:
        self.reads[self._paths[fd]] += 1
        return super().read_at(fd, length, offset)

    def read_into(self, fd: int, buffer: bytearray, offset: int) -> int:
        self.reads[self._paths[fd]] += 1
        return super().read_into(fd, buffer, offset)


def damage(folder: Path, options: argparse.Namespace) -> Rows:
    """Break a shard somewhere, in one of several ways; compare what is named with what was changed."""
    rng, root = random.Random(options.seed), folder / "small"
    with CacheFolder(root).kind("graph").writer() as writer:
        for number in range(60):
            array = np.frombuffer(rng.randbytes(rng.randrange(100, 20_000)), np.uint8)
            writer.put(rng.randbytes(16), {"numbers": array}, {"n": number})
            if number % 20 == 19:
                writer.flush()
    store = CacheFolder(root).kind("graph")
    store.write_index()
    tables = {path: read_table(Disk(), path) for path in sorted((root / "graph/shards").iterdir())}
    found = named = structural = structural_found = 0
    for _ in range(options.damages):
        path = rng.choice(sorted(tables))
        table, before = tables[path], path.read_bytes()
        after = broken(before, rng)
        path.chmod(0o644)
        path.write_bytes(after)
        wanted = changed_records(table, before, after)
        checked = {one.shard: one for one in scrub.full(CacheFolder(root).kind("graph"))}[path.name]
        named += {finding.key for finding in checked.findings if finding.key} == wanted
        found += bool(checked.findings)
        if touches_structure(table, before, after):
            structural += 1
            structural_found += any(one.findings for one in scrub.quick(CacheFolder(root).kind("graph")))
        path.write_bytes(before)
    disk = CountingDisk()
    list(scrub.quick(CacheFolder(root, disk).kind("graph")))
    most_reads = max(disk.reads[path] for path in tables)
    return [
        row("damage found by --full", 100 * found / options.damages, "%", "100", damages=options.damages),
        row("of these, exactly the changed records named", 100 * named / options.damages, "%", "100"),
        row("structural damage found by --quick", 100 * structural_found / structural, "%", "100", damages=structural),
        row("reads a shard of --quick", most_reads, "reads", "<= 2"),
    ]


def broken(content: bytes, rng: random.Random) -> bytes:
    """Return a file's content after an accident, which changed it."""
    while True:
        kind, place = rng.choice(["flip", "zero", "cut", "swap", "grow"]), rng.randrange(len(content))
        length = min(rng.choice([1, 16, 512, 4096]), len(content) - place)
        if kind == "flip":
            after = content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]
        elif kind == "zero":
            after = content[:place] + bytes(length) + content[place + length :]
        elif kind == "swap":
            other = rng.randrange(len(content) - length + 1)
            after = content[:place] + content[other : other + length] + content[place + length :]
        else:
            after = content[:place] if kind == "cut" else content + rng.randbytes(length)
        if after != content:
            return after


def changed_records(table: Any, before: bytes, after: bytes) -> set[str]:
    """Return the keys of records whose bytes are no more what they were."""
    places = zip(row_keys(table.rows), table.rows["offset"].tolist(), table.rows["length"].tolist(), strict=True)
    return {key.hex() for key, at, length in places if before[at : at + length] != after[at : at + length]}


def touches_structure(table: Any, before: bytes, after: bytes) -> bool:
    """Tell whether anything but records changed."""
    return (
        len(before) != len(after)
        or before[: table.data_start] != after[: table.data_start]
        or before[table.table_start :] != after[table.table_start :]
    )


# ---- a million records ----


def million(folder: Path, options: argparse.Namespace) -> Rows:
    """Keep a million small records; ask what is there, what of it is dead, and for a new index."""
    from pipeline.config.load import read_config
    from pipeline.project.project import Project
    from pipeline.runs.dataset import worklist
    from pipeline.store.maintenance.sweep import Live, mark

    config = configured(folder)
    store = CacheFolder(folder / "cache").kind("scan")
    keys = np.random.default_rng(0).bytes(16 * options.records)
    parts = [keys[start : start + 16] for start in range(0, len(keys), 16)]
    array = np.zeros(8, np.float32)
    with store.writer() as writer:
        for number, key in enumerate(parts):
            writer.put(key, {"numbers": array}, {"n": number})
    paths = list((folder / "cache/scan/shards").iterdir())

    def rebuild() -> None:
        CacheFolder(folder / "cache").kind("scan").rebuild_index()

    rebuilt = timed_often(rebuild, 3, lambda: chill(paths))
    worklist.remember_needed(Project.open(read_config(config, []).config), "scan", bytearray(keys))
    words = [str(PIPELINE), "cache", "stat", "--json", "--config", str(config)]
    stats = [timed_command(words, expect=0) for _ in range(7)]
    live = Live(pairs=sorted_keys(parts[::2]))
    marked = timed_often(lambda: mark(CacheFolder(folder / "cache").kind("scan"), live, time.time() + 1), 3)
    found = mark(CacheFolder(folder / "cache").kind("scan"), live, time.time() + 1)
    assert sum(dead.dead for dead in found.shards) == options.records - len(parts[::2])
    records = f"{options.records:,} records"
    return [
        row(f"{records}: `pipeline cache stat`, the whole command", median(one["seconds"] for one in stats), "s",
            "<= 0.5", shards=len(paths), peak_mb=max(one["peak_mb"] for one in stats)),
        row(f"{records}: mark phase, half of them dead", marked, "s", "<= 20"),
        row(f"{records}: index made from shards, cold", rebuilt, "s", "<= 60"),
        row("records a file", options.records / len(paths), "records", ">= 200"),
    ]  # fmt: skip


def sorted_keys(keys: list[bytes]) -> Any:
    from pipeline.store.key_lists import sorted_pairs

    return sorted_pairs(b"".join(keys))


def timed_often(way: Callable[[], object], runs: int, before: Callable[[], None] = lambda: None) -> float:
    times = []
    for _ in range(runs):
        before()
        started = time.perf_counter()
        way()
        times.append(time.perf_counter() - started)
    return median(times)


# ---- validate, repair, regenerate ----


def mend(folder: Path, options: argparse.Namespace) -> Rows:
    """Damage some shards of a project, let the commands mend it, and compare every record with what it was."""
    run("demo", str(folder))
    small = ["--set", "cache.shard_bytes=256KiB"]
    shutil.rmtree(folder / "cache")
    run("submit", "--stage", "graph", "--follow", *small, cwd=folder)
    rng = random.Random(options.seed)
    before = content(folder / "cache")
    shards = sorted((folder / "cache").glob("*/shards/*"))
    counts: dict[str, int] = {"rounds": 0, "shards damaged": 0, "records lost": 0, "made anew": 0, "differ": 0}
    for _ in range(options.rounds):
        shards = sorted((folder / "cache").glob("*/shards/*"))
        for path in rng.sample(shards, max(1, round(0.05 * len(shards)))):
            after = broken(path.read_bytes(), rng)
            path.chmod(0o644)
            path.write_bytes(after)
            counts["shards damaged"] += 1
        run("cache", "validate", "--full", cwd=folder, expect=4)
        told = json.loads(run("cache", "repair", "--yes", "--json", cwd=folder))
        counts["records lost"] += told["lost"]
        held = set(content(folder / "cache"))
        if told["missing"]:
            run("cache", "regenerate", "--list", told["missing"], *small, cwd=folder)
        after_content = content(folder / "cache")
        made = set(after_content) - held
        lost = {(one.kind, bytes.fromhex(one.key)) for one in lost_of(told["missing"])}
        counts["made anew"] += len(made & lost)
        for kind, _ in made - lost:
            counts[f"made besides: {kind}"] = counts.get(f"made besides: {kind}", 0) + 1
        counts["differ"] += before != {key: after_content.get(key) for key in before}
        counts["rounds"] += 1
        run("cache", "validate", "--full", cwd=folder)
    everything = f"{len(before)} records in {len(shards)} shards"
    return [row(f"rounds after which the cache differs: 5% of shards damaged, {everything}", counts["differ"], "rounds",
                "0", **counts)]  # fmt: skip


def lost_of(report: str | None) -> list[Any]:
    """Return what a list calls lost."""
    from pipeline.store.maintenance.damage_report import read_report

    return list(read_report(Path(report)).findings()) if report else []


def content(root: Path) -> dict[tuple[str, bytes], str]:
    """Return a digest of what every record says, by kind and key."""
    import hashlib

    found = {}
    cache = CacheFolder(root)
    for kind in cache.kinds():
        store = cache.kind(kind)
        for key in list(store.keys()):
            record = store.get(key)
            digest = hashlib.sha256(json.dumps(record.meta, sort_keys=True).encode())
            for name, array in sorted(record.arrays.items()):
                digest.update(f"{name} {array.dtype.str} {array.shape}".encode() + array.tobytes())
            found[kind, key] = digest.hexdigest()
    return found


def run(*words: str, cwd: Path | None = None, expect: int = 0) -> str:
    done = subprocess.run([str(PIPELINE), *words], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == expect, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


PARTS: dict[str, Callable[[Path, argparse.Namespace], Rows]] = {
    "validation": validation,
    "damage": damage,
    "million": million,
    "mend": mend,
}


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--out", type=Path, help="write the result as JSON to this file; other parts in it stay")
    arguments.add_argument("--dir", type=Path, help="measure on the disk that holds this folder")
    arguments.add_argument("--only", action="append", choices=sorted(PARTS))
    arguments.add_argument("--gib", type=float, default=4.5)
    arguments.add_argument("--runs", type=int, default=5)
    arguments.add_argument("--records", type=int, default=MILLION)
    arguments.add_argument("--damages", type=int, default=500)
    arguments.add_argument("--rounds", type=int, default=10)
    arguments.add_argument("--seed", type=int, default=1)
    options = arguments.parse_args()
    known = json.loads(options.out.read_text())["parts"] if options.out and options.out.exists() else {}
    for name in options.only or PARTS:
        folder = Path(tempfile.mkdtemp(prefix="bench-cache-", dir=options.dir))
        try:
            known[name] = {**circumstances(), "benchmark": f"cache {name}", "rows": PARTS[name](folder, options)}
        finally:
            shutil.rmtree(folder)
        for line in known[name]["rows"]:
            sys.stderr.write(f"{line['what']:<90} {line['value']:>10,.3f} {line['unit']:<8} {line['reach']}\n")
    write(options.out, {"parts": known})
    sys.stdout.write(json.dumps(known, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
