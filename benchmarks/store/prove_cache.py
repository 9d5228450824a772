"""Break a cache on purpose, thousands of times, and count what it gets wrong.

`python benchmarks/store/prove_cache.py` kills processes at every step of all that is done to a cache and at any
moment, plays back what power losses may leave, lets every step of the disk fail, flips bits and cuts files. After
each fault a new process must be served right bytes or an error, nothing acknowledged may be lost that was not itself
damaged, validation must find all damage and accuse nothing else, and whoever comes next must be able to finish. It
exits with 1 if a single answer was wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.circumstances import write  # noqa: E402 - the project is found only now
from pipeline.store.cache_folder import CacheFolder  # noqa: E402
from pipeline.store.format.disk import Disk  # noqa: E402
from pipeline.store.format.shard import read_table, row_keys  # noqa: E402
from pipeline.store.maintenance import scrub  # noqa: E402 - the project need not be installed
from tests.faults.failing import complaints_about, failures, steps_of  # noqa: E402
from tests.faults.judged import KIND, complaints, served  # noqa: E402
from tests.faults.power import losses  # noqa: E402
from tests.faults.recorded import RecordingDisk, put_tree  # noqa: E402
from tests.faults.works import NAME, WORKS, fill  # noqa: E402
from tests.store.content import key_of  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

Found = tuple[str, int, list[str]]  # the sort of fault, how many, complaints
RECORDS = 6


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--kills", type=int, default=1000, help="at any moment")
    arguments.add_argument("--stride", type=int, default=1, help="of the steps at which a process is killed")
    arguments.add_argument("--losses", type=int, default=64, help="states of the disk after each step, at most or so")
    arguments.add_argument("--part", type=int, default=1, help="only so-manieth failure of a step")
    arguments.add_argument("--flips", type=int, default=1000)
    arguments.add_argument("--cuts", type=int, default=500)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/prove_cache.json")
    options = arguments.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="prove-cache-"))
    try:
        result = prove(folder, options)
    finally:
        shutil.rmtree(folder)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write(options.out, result)
    print(json.dumps(result, indent=1))
    print(f"\n{'faults':38}{'how many':>10}{'wrong':>8}")
    for name, told in result["faults"].items():
        print(f"{name:38}{told['faults']:>10,}{told['complaints']:>8}")
    return 1 if result["wrong_answers"] else 0


def prove(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    begun, faults, wrong = time.time(), Counter[str](), Counter[str]()
    sorts, first = Counter[str](), list[str]()
    for sort, number, found in proofs(folder, options):
        faults[sort] += number
        wrong[sort] += len(found)
        sorts.update(one.split(": ")[1] for one in found)
        first += found[: 10 - len(first)]
    return {
        "proof": "cache",
        "seed": options.seed,
        "seconds": round(time.time() - begun),
        "faults": {sort: {"faults": faults[sort], "complaints": wrong[sort]} for sort in faults},
        "in_all": faults.total(),
        "wrong_records_served": sorts["wrong"] + sorts["foreign"],
        "acknowledged_records_lost": sorts["lost"],
        "complaints": dict(sorts),
        "first_complaints": first,
        "wrong_answers": wrong.total(),
    }


def proofs(folder: Path, options: argparse.Namespace) -> Iterator[Found]:
    """Yield what each fault, or some faults, led to; processes die beside all else."""
    dying = [
        ("kills at a step", begin_deaths(folder / "steps", "steps", options.stride)),
        ("kills at any moment", begin_deaths(folder / "moments", "moments", options.kills, options.seed)),
    ]
    yield from power_losses(folder / "losses", options.losses, options.seed)
    yield from disk_failures(folder / "failures", options.part)
    yield from damage(folder / "damage", options.flips, options.cuts, random.Random(options.seed))
    for sort, process in dying:
        output, _ = process.communicate()
        for line in map(json.loads, output.splitlines()):
            yield sort, line["killed"], line["complaints"]
        if process.returncode:
            raise SystemExit(f"the program of the {sort} failed")


def begin_deaths(folder: Path, *arguments: str | int) -> subprocess.Popen[str]:
    folder.mkdir()
    program = [sys.executable, "-m", "tests.faults.deaths", str(folder), *map(str, arguments)]
    return subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def power_losses(folder: Path, at_most: int, seed: int) -> Iterator[Found]:
    """Play back every state that a power loss may leave, of everything that is done to a cache."""
    for work in WORKS:
        real = folder / work.name
        real.mkdir(parents=True)
        work.begin(real)
        disk = RecordingDisk(real)
        work.run(real, CacheFolder(real / NAME, disk), disk.acknowledge)
        for loss in losses(disk.before, disk.steps, safe=work.live, at_most=at_most, seed=seed):
            put_tree(folder / "left", loss.tree)
            found = complaints(folder / "left" / NAME, loss.safe, work.known, work.torn)
            shutil.rmtree(folder / "left")
            yield "power losses", 1, [f"{work.name}, after step {loss.after}: {one}" for one in found]


def disk_failures(folder: Path, part: int) -> Iterator[Found]:
    """Let every step of the disk fail, every time that it is taken, in every way."""
    folder.mkdir()
    for work in WORKS:
        for failure in list(failures(steps_of(work, folder / work.name), every=True))[::part]:
            yield "disk failures", 1, complaints_about(work, failure, folder / "failing")
            shutil.rmtree(folder / "failing")


def damage(folder: Path, flips: int, cuts: int, chance: random.Random) -> Iterator[Found]:
    """Flip a bit or cut the file at random places of a shard or the index, with and without an index."""
    folder.mkdir()
    store, (shard,) = fill(folder, range(RECORDS), index=False)
    table = read_table(Disk(), shard)
    for number in range(flips + cuts):
        if number == flips // 4:
            store.write_index()
        victim = store.layout.index if number >= flips // 4 and number % 4 == 0 else shard
        whole, sort = victim.read_bytes(), "bit flips" if number < flips else "truncations"
        place = chance.randrange(len(whole))
        replace(victim, flipped(whole, place, chance) if number < flips else whole[:place])
        named = named_by(table, place) if sort == "bit flips" and victim == shard else None
        yield (
            sort,
            1,
            [
                f"{victim.name} at {place}: {one}"
                for one in judged(folder / NAME, in_shard=victim == shard, named=named)
            ],
        )
        replace(victim, whole)


def judged(root: Path, *, in_shard: bool, named: bytes | None) -> Iterator[str]:
    """Complain of what is served, and of what validation does not find."""
    store = CacheFolder(root).kind(KIND)
    keys = [key_of(number) for number in range(RECORDS)]
    for key in keys:
        right = served(store, key)
        if right is False:
            yield f"wrong: {key.hex()} is served"
        if right is None and not in_shard:
            yield f"lost: {key.hex()}"
    findings = [finding for checked in scrub.full(store) for finding in checked.findings]
    if not findings:
        yield "unseen: nothing was found"
    if named and named.hex() not in {finding.key for finding in findings}:
        yield f"unseen: {named.hex()} was not named"
    if named and {finding.key for finding in findings} - {"", named.hex()}:
        yield "accused: another record was named"


def named_by(table: Any, place: int) -> bytes | None:
    """Return the record that has a byte of a shard."""
    at = int(table.rows["offset"].searchsorted(place, "right")) - 1
    return row_keys(table.rows)[at] if at >= 0 and place < table.table_start else None


def flipped(content: bytes, place: int, chance: random.Random) -> bytes:
    return content[:place] + bytes([content[place] ^ 1 << chance.randrange(8)]) + content[place + 1 :]


def replace(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


if __name__ == "__main__":
    sys.exit(main())
