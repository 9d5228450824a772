"""Keep the same records in five ways, break each: `python benchmarks/store/cache_compare.py [--out FILE]`.

Writing, cold reading in random order, memory, files, what a flipped bit does, what is left after a SIGKILL. Each way
runs in processes of its own. Records are like those of a training set: a half-precision embedding and a small graph.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.circumstances import write  # noqa: E402 - the project need not be installed
from benchmarks.store.cache_peers import PEERS, TOGETHER, Arrays  # noqa: E402 - the project need not be installed

if TYPE_CHECKING:
    from collections.abc import Sequence

HALVES = 1280
PUBLISHED = 4000  # records by a writer that is killed on the way


def record(number: int) -> Arrays:
    """Return the content of a record, which follows from its number."""
    rng = np.random.default_rng(number)
    rows = int(rng.integers(50, 300))
    return {
        "embedding": rng.integers(0, 30_000, (rows, HALVES), np.uint16).view(np.float16),
        "edges": rng.integers(0, rows, (2, 20 * rows), np.int32),
        "coordinates": rng.standard_normal((rows, 3), np.float32),
    }


def is_right(number: int, arrays: Arrays) -> bool:
    """Tell whether these are the arrays of that record, bit for bit."""
    wanted = record(number)
    return arrays.keys() == wanted.keys() and all(
        array.dtype == wanted[name].dtype and array.shape == wanted[name].shape
        and array.tobytes() == wanted[name].tobytes()
        for name, array in arrays.items()
    )  # fmt: skip


# ---- what a child process does ----


def child(what: str, name: str, folder: Path, count: int, seed: int) -> int:
    """Do one thing in one way, and tell how it went as a line of JSON."""
    peer = PEERS[name]
    for module in peer.modules:
        importlib.import_module(module)
    if what == "write":
        records = [(number, record(number)) for number in range(count)]  # made before the clock starts
        started = time.perf_counter()
        peer.write(folder, records, lambda _: None)
        os.sync()
        tell(seconds=time.perf_counter() - started)
    elif what == "publish":  # until it is killed
        peer.write(folder, ((number, record(number)) for number in range(count)), lambda safe: tell(safe=list(safe)))
        tell(done=True)
    elif what == "read":
        order = random.Random(seed).sample(range(count), count)
        drop_all(folder)
        before = peak_bytes()
        started = time.perf_counter()
        size = sum(sum(array.nbytes for array in arrays.values()) for _, arrays in peer.read(folder, order))
        tell(seconds=time.perf_counter() - started, bytes=size, peak_bytes=peak_bytes(), before_bytes=before)
    elif what == "judge":  # every record by itself: right, refused, or wrong
        counts: Counter[str] = Counter()
        for number in range(count):
            counts[judged(peer, folder, number)] += 1
        tell(**counts)
    return 0


def judged(peer: Any, folder: Path, number: int) -> str:
    """Say what a reader is given for one record."""
    try:
        ((found, arrays),) = list(peer.read(folder, [number]))
        return "right" if found == number and is_right(number, arrays) else "wrong"
    except Exception:  # noqa: BLE001 - whatever it raises, it did not serve wrong bytes
        return "refused"


def tell(**told: Any) -> None:
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# ---- what is measured ----


def run(what: str, name: str, folder: Path, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Run a child to its end; return what it told."""
    done = subprocess.run(command(what, name, folder, count, seed), stdout=subprocess.PIPE, text=True, cwd=ROOT)
    told = [json.loads(line) for line in done.stdout.splitlines()]
    return told if done.returncode == 0 else [*told, {"died": done.returncode}]


def command(what: str, name: str, folder: Path, count: int, seed: int) -> list[str]:
    words = ["--child", what, "--way", name, "--folder", str(folder), "--records", str(count), "--seed", str(seed)]
    return [sys.executable, __file__, *words]


def measure(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every way, in turns where time is measured."""
    rows = {name: {"way": name} for name in PEERS}
    times: dict[str, dict[str, list[float]]] = {name: {"write": [], "read": []} for name in PEERS}
    for turn in range(options.runs):
        for name in PEERS:
            shutil.rmtree(folder / name, ignore_errors=True)
            (written,) = run("write", name, folder / name, options.records)
            times[name]["write"].append(written["seconds"])
            (read,) = run("read", name, folder / name, options.records, seed=turn)
            times[name]["read"].append(read["seconds"])
            rows[name]["bytes"] = read["bytes"]
            rows[name]["read_memory_mb"] = round((read["peak_bytes"] - read["before_bytes"]) / 1e6)
            rows[name]["read_peak_mb"] = round(read["peak_bytes"] / 1e6)
            rows[name]["files"] = sum(path.is_file() for path in (folder / name).rglob("*"))
    for name, row in rows.items():
        for what in ("write", "read"):
            row[f"{what}_mb_s"] = round(row["bytes"] / median(times[name][what]) / 1e6)
        shutil.rmtree(folder / name)
        row["flips"] = flips(folder / f"{name} flipped", name, options)
        row["kills"] = kills(folder / f"{name} killed", name, options)
        say(f"{name}: {row}")
    return list(rows.values())


def flips(folder: Path, name: str, options: argparse.Namespace) -> dict[str, int]:
    """Flip one bit at a time somewhere in the files, and see what readers are given."""
    count, rng, found = 12, random.Random(options.seed), Counter[str]()
    run("write", name, folder, count)
    for _ in range(options.flips):
        paths = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]
        path = rng.choices(paths, [used_bytes(one) for one in paths])[0]
        place = rng.choice(data_places(path))
        flip(path, place)
        told = run("judge", name, folder, count)
        flip(path, place)
        found[outcome(told)] += 1
    return dict(found)


def outcome(told: list[dict[str, Any]]) -> str:
    """Say in a word what readers were given of all records of a folder."""
    if "died" in told[-1]:
        return "reader crashed"
    if told[0].get("wrong"):
        return "wrong served"
    return "refused" if told[0].get("refused") else "harmless"


def used_bytes(path: Path) -> int:
    return max(1, path.stat().st_blocks * 512)


def data_places(path: Path) -> Sequence[int]:
    """Return where a file has bytes: LMDB's is mostly a hole."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        begin = 0
        stretches = []
        with suppress(OSError):
            while begin < end:
                begin = file.seek(begin, os.SEEK_DATA)
                stop = file.seek(begin, os.SEEK_HOLE)
                stretches.append(range(begin, stop))
                begin = stop
    return max(stretches, key=len) if stretches else range(end)


def flip(path: Path, place: int) -> None:
    mode = path.stat().st_mode
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1 << place % 8]))
    path.chmod(mode)


def kills(folder: Path, name: str, options: argparse.Namespace) -> dict[str, int]:
    """Kill writers at random moments; count what they had called safe and what of it is there."""
    rng, counts = random.Random(options.seed), Counter[str]()
    for number in range(options.kills):
        root = folder / f"{number}"
        root.parent.mkdir(parents=True, exist_ok=True)
        writer = subprocess.Popen(
            command("publish", name, root, PUBLISHED, 0),
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            start_new_session=True,
        )
        assert writer.stdout is not None
        time.sleep(rng.uniform(1.0, 4.0))
        with suppress(ProcessLookupError):
            os.killpg(writer.pid, signal.SIGKILL)
        lines = [line for line in writer.stdout.read().splitlines() if line.endswith("}")]
        writer.wait()
        told = [json.loads(line) for line in lines]
        if any("done" in one for one in told):
            counts["came too late"] += 1
            continue
        counts["kills"] += 1
        safe = sorted({one for line in told for one in line["safe"]})
        verdicts = Counter(judged(PEERS[name], root, one) for one in safe)
        counts["called safe"] += len(safe)
        counts["of these lost"] += len(safe) - verdicts["right"]
        last = (safe[-1] + 1) if safe else 0
        torn = Counter(judged(PEERS[name], root, one) for one in range(last, last + 2 * TOGETHER))
        counts["wrong served"] += verdicts["wrong"] + torn["wrong"]
        counts["files torn"] += torn_files(name, root)
        shutil.rmtree(root, ignore_errors=True)
    return dict(counts)


def torn_files(name: str, root: Path) -> int:
    """Count files of records under their final names that cannot be read."""
    if name != "one .pt each":
        return 0
    numbers = [int(path.stem) for path in root.glob("*.pt")]
    return sum(judged(PEERS[name], root, number) != "right" for number in numbers)


def drop_all(folder: Path) -> None:
    """Let no file of a folder be in the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def say(text: str) -> None:
    sys.stderr.write(text + "\n")


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=Path, help="write the result as JSON to this file")
    arguments.add_argument("--dir", type=Path, help="measure on the disk that holds this folder")
    arguments.add_argument("--records", type=int, default=1500)
    arguments.add_argument("--runs", type=int, default=3)
    arguments.add_argument("--flips", type=int, default=40)
    arguments.add_argument("--kills", type=int, default=12)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--child", help=argparse.SUPPRESS)
    arguments.add_argument("--way", help=argparse.SUPPRESS)
    arguments.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.child:
        return child(options.child, options.way, options.folder, options.records, options.seed)
    folder = Path(tempfile.mkdtemp(prefix="bench-cache-", dir=options.dir))
    try:
        rows = measure(folder, options)
    finally:
        shutil.rmtree(folder)
    asked = {name: getattr(options, name) for name in ("records", "runs", "flips", "kills", "seed")}
    result = {"benchmark": "cache_compare", "asked": asked, "rows": rows}
    write(options.out, result)
    sys.stdout.write(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
