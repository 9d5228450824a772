"""Break the store on purpose, more than a thousand times, and count what it gets wrong.

`python benchmarks/prove_store.py` kills writers at every step of publishing, flips bits, cuts files and fills the disk.
After each fault a new reader must be served right bytes or an error, and nothing acknowledged may be lost that was not
itself damaged. It exits with 1 if a single answer was wrong.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pipeline.errors import (  # noqa: E402 - the project need not be installed
    CacheDamaged,
    CacheFull,
    JobFailed,
    RecordMissing,
)
from pipeline.store.cache import Cache  # noqa: E402
from pipeline.store.disk import Disk  # noqa: E402
from pipeline.store.shard import verify_shard  # noqa: E402
from tests.store.content import is_right, put  # noqa: E402
from tests.store.faulty_disks import FailingDisk  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterable

NUMBERS = range(12)
STEPS = ("open_new", "write_at", "truncate", "fsync", "link", "rename", "fsync_folder")


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--kills", type=int, default=300)
    arguments.add_argument("--flips", type=int, default=500)
    arguments.add_argument("--cuts", type=int, default=300)
    arguments.add_argument("--failures", type=int, default=200)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/prove_store.json")
    options = arguments.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="prove-store-"))
    try:
        result = prove(folder, options, random.Random(options.seed))
    finally:
        shutil.rmtree(folder)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 1 if result["wrong_answers"] else 0


def prove(folder: Path, options: argparse.Namespace, chance: random.Random) -> dict[str, Any]:
    counts = Counter[str]()
    prove_kills(folder / "kills", options.kills, counts)
    prove_damage(folder / "damage", options.flips, options.cuts, counts, chance)
    prove_failures(folder / "failures", options.failures, counts, chance)
    faults = {name: counts[name] for name in ("kills", "bit flips", "truncations", "disk failures")}
    wrong = {name: counts[name] for name in ("torn or wrong served", "acknowledged lost", "damage not seen")}
    return {
        "proof": "store",
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, "
        f"Python {platform.python_version()}",
        "seed": options.seed,
        "faults": {**faults, "in all": sum(faults.values())},
        "answers": {"right": counts["right"], "absent or refused": counts["refused"], **wrong},
        "wrong_answers": sum(wrong.values()),
    }


def prove_kills(folder: Path, kills: int, counts: Counter[str]) -> None:
    """Kill a process at each step of publishing in turn, before, halfway through and after it."""
    folder.mkdir()
    program = [sys.executable, "-m", "tests.store.publisher", str(folder), str(kills)]
    lines = subprocess.run(program, check=True, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    for death in map(json.loads, lines):
        counts["kills"] += death["killed"]
        root = folder / death["root"]
        store = Cache(root).kind("scan")
        counts["acknowledged lost"] += len(store.missing([bytes.fromhex(key) for key in death["safe"]]))
        judge(root, store.keys(), counts)
        counts["torn or wrong served"] += sum(not verdict.whole for verdict in store.verify())


def prove_damage(folder: Path, flips: int, cuts: int, counts: Counter[str], chance: random.Random) -> None:
    """Flip a bit or cut the file at random places of a shard or the index, with and without an index."""
    store = Cache(folder).kind("scan")
    with store.writer() as writer:
        keys = put(writer, *NUMBERS)
    (shard,) = (folder / "scan/shards").iterdir()
    for number in range(flips + cuts):
        if number == (flips + cuts) // 4:
            store.write_index()
        index = folder / "scan/index.bin"
        victim = index if index.exists() and number % 4 == 0 else shard
        whole = victim.read_bytes()
        kind = "bit flips" if number < flips else "truncations"
        counts[kind] += 1
        replace(victim, flipped(whole, chance) if kind == "bit flips" else whole[: chance.randrange(len(whole))])
        right = judge(folder, keys, counts)
        if victim is shard:
            counts["damage not seen"] += verify_shard(Disk(), shard).whole
        counts["acknowledged lost"] += victim is index and right < len(keys)
        replace(victim, whole)


def prove_failures(folder: Path, failures: int, counts: Counter[str], chance: random.Random) -> None:
    """Let one step of the disk fail, the n-th time it is taken, and keep the same cache all along."""
    safe: set[bytes] = set()
    for number in range(failures):
        step, after = STEPS[number % len(STEPS)], chance.randrange(4)
        disk = FailingDisk(step, chance.choice([errno.ENOSPC, errno.EDQUOT, errno.EIO]), after)
        try:
            for key in write_and_index(Cache(folder, disk), number):
                safe.add(key)
        except (CacheFull, JobFailed):
            counts["disk failures"] += 1
        store = Cache(folder).kind("scan")
        counts["acknowledged lost"] += len(store.missing(sorted(safe)))
        if number % 20 == 19:
            store.write_index()
            judge(folder, store.keys(), counts)


def write_and_index(cache: Cache, number: int) -> Iterable[bytes]:
    store = cache.kind("scan")
    with store.writer() as writer:
        for part in range(3):
            put(writer, 10 * number + part, 10 * number + part + 5)
            yield from writer.flush()
        store.write_index()


def judge(root: Path, keys: Iterable[bytes], counts: Counter[str]) -> int:
    """Ask a new reader for the keys; count its answers and return how many were right."""
    store = Cache(root).kind("scan")
    right = 0
    for key in keys:
        try:
            good = is_right(store.get(key), key)
        except (CacheDamaged, RecordMissing):
            counts["refused"] += 1
            continue
        counts["right" if good else "torn or wrong served"] += 1
        right += good
    return right


def flipped(content: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(content))
    return content[:place] + bytes([content[place] ^ 1 << chance.randrange(8)]) + content[place + 1 :]


def replace(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


if __name__ == "__main__":
    sys.exit(main())
