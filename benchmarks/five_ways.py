"""Keep the same records in five ways, and break each: this project's store, pickle, .pt files, LMDB, HDF5.

    python benchmarks/five_ways.py [--records 1500] [--rounds 3] [--flips 40] [--kills 12] [--folder FOLDER] [--save]

Each way is used as its documentation says, in processes of its own. Records are those of a training set: a
half-precision embedding and a small graph. Measured are writing, cold reading in random order, the memory of a reader,
files, what one flipped bit does, and how many records are lost that a killed writer had called safe.
Install the peers with `pip install h5py lmdb` (the extra `bench`).
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.measure import Row, Spread, by_turns, chill, itself, options, publish, run, say
from pipeline.store.cache_folder import CacheFolder

Arrays = dict[str, np.ndarray[Any, Any]]
Numbered = Iterable[tuple[int, Arrays]]
Safe = Callable[[Sequence[int]], None]  # told which records are safe from now on
WIDTH, TOGETHER, LMDB_BYTES = 1280, 50, 1 << 36  # TOGETHER: records that are made safe at once
ENDLESS, JUDGED = 4000, 12  # records of a writer that is killed; of a folder whose bits are flipped


class Way(Protocol):
    """A way to keep records."""

    modules: tuple[str, ...]

    def write(self, folder: Path, records: Numbered, safe: Safe) -> None:
        """Write records, naming those that are safe as soon as the way says that they are."""

    def read(self, folder: Path, numbers: Sequence[int]) -> Numbered:
        """Yield records in the order asked."""


class Ours:
    """The store of the project."""

    modules = ()

    def write(self, folder: Path, records: Numbered, safe: Safe) -> None:
        store = CacheFolder(folder).kind("embed")
        with store.writer() as writer:
            for group in groups(records):
                for number, arrays in group:
                    writer.put(number.to_bytes(16, "big"), arrays)
                safe([int.from_bytes(key, "big") for key in writer.flush()])
        store.write_index()

    def read(self, folder: Path, numbers: Sequence[int]) -> Numbered:
        for record in CacheFolder(folder).kind("embed").read([number.to_bytes(16, "big") for number in numbers]):
            yield int.from_bytes(record.key, "big"), dict(record.arrays)


class OnePickle:
    """All records in one pickle."""

    modules = ()

    def write(self, folder: Path, records: Numbered, safe: Safe) -> None:
        folder.mkdir(parents=True)
        everything = dict(records)
        with (folder / "all.pkl").open("wb") as file:
            pickle.dump(everything, file)
        safe(list(everything))

    def read(self, folder: Path, numbers: Sequence[int]) -> Numbered:
        everything = pickle.loads((folder / "all.pkl").read_bytes())
        yield from ((number, everything[number]) for number in numbers)


class TorchFiles:
    """A .pt file for each record."""

    modules = ("torch",)

    def write(self, folder: Path, records: Numbered, safe: Safe) -> None:
        import torch

        folder.mkdir(parents=True)
        for number, arrays in records:
            torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, folder / f"{number}.pt")
            safe([number])

    def read(self, folder: Path, numbers: Sequence[int]) -> Numbered:
        import torch

        for number in numbers:
            found = torch.load(folder / f"{number}.pt", weights_only=True)
            yield number, {name: tensor.numpy() for name, tensor in found.items()}


class Lmdb:
    """LMDB, a transaction for each group; arrays as raw bytes behind a small header."""

    modules = ("lmdb",)

    def write(self, folder: Path, records: Numbered, safe: Safe) -> None:
        import lmdb

        with lmdb.open(str(folder), map_size=LMDB_BYTES) as base:
            for group in groups(records):
                with base.begin(write=True) as transaction:
                    for number, arrays in group:
                        transaction.put(number.to_bytes(16, "big"), packed(arrays))
                safe([number for number, _ in group])

    def read(self, folder: Path, numbers: Sequence[int]) -> Numbered:
        import lmdb

        with lmdb.open(str(folder), readonly=True, lock=False, readahead=False) as base, base.begin(buffers=True) as of:
            for number in numbers:
                yield number, unpacked(of.get(number.to_bytes(16, "big")))


class Hdf5:
    """HDF5, a group for each record, flushed for each group of records."""

    modules = ("h5py",)

    def write(self, folder: Path, records: Numbered, safe: Safe) -> None:
        import h5py

        folder.mkdir(parents=True)
        with h5py.File(folder / "all.h5", "w") as file:
            for group in groups(records):
                for number, arrays in group:
                    for name, array in arrays.items():
                        file.create_dataset(f"{number}/{name}", data=array)
                file.flush()
                safe([number for number, _ in group])

    def read(self, folder: Path, numbers: Sequence[int]) -> Numbered:
        import h5py

        with h5py.File(folder / "all.h5", "r") as file:
            for number in numbers:
                yield number, {name: data[()] for name, data in file[str(number)].items()}


WAYS: dict[str, Way] = {
    "pipeline": Ours(), "one pickle": OnePickle(), "one .pt each": TorchFiles(), "LMDB": Lmdb(), "HDF5": Hdf5(),
}  # fmt: skip
IDS = dict(zip(WAYS, ("five_pipeline", "five_pickle", "five_pt", "five_lmdb", "five_hdf5"), strict=True))


def packed(arrays: Arrays) -> bytes:
    """Return arrays as bytes: names, dtypes and shapes, then the numbers."""
    head = repr([(name, array.dtype.str, array.shape) for name, array in arrays.items()]).encode()
    return b"".join([len(head).to_bytes(4, "little"), head, *(array.tobytes() for array in arrays.values())])


def unpacked(data: memoryview) -> Arrays:
    """Return the arrays that `packed` made bytes of."""
    begin, arrays = 4 + int.from_bytes(data[:4], "little"), {}
    for name, dtype, shape in ast.literal_eval(bytes(data[4:begin]).decode()):
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        arrays[name] = np.frombuffer(data[begin : begin + size], dtype).reshape(shape).copy()
        begin += size
    return arrays


def groups(records: Numbered) -> Iterator[list[tuple[int, Arrays]]]:
    """Yield the records that are made safe at once."""
    group = []
    for record in records:
        group.append(record)
        if len(group) == TOGETHER:
            yield group
            group = []
    if group:
        yield group


def content(number: int) -> Arrays:
    """Return the content of a record, which follows from its number."""
    rng = np.random.default_rng(number)
    rows = int(rng.integers(50, 300))
    return {
        "embedding": rng.integers(0, 30_000, (rows, WIDTH), np.uint16).view(np.float16),
        "edges": rng.integers(0, rows, (2, 20 * rows), np.int32),
        "coordinates": rng.standard_normal((rows, 3), np.float32),
    }


# ---- what a process of its own does ----


def part(what: str, name: str, place: str, count: str, seed: str) -> None:
    """Do one thing in one way, and print how it went as JSON."""
    way, folder, records = WAYS[name], Path(place), int(count)
    for module in way.modules:
        importlib.import_module(module)
    if what == "write":
        numbered = [(number, content(number)) for number in range(records)]  # before the clock starts
        begun = time.perf_counter()
        way.write(folder, numbered, lambda _: None)
        os.sync()
        report(seconds=time.perf_counter() - begun)
    elif what == "publish":  # until it is killed
        numbered = ((number, content(number)) for number in range(records))
        way.write(folder, numbered, lambda safe: report(safe=list(safe)))
        report(done=True)
    elif what == "read":
        order = random.Random(int(seed)).sample(range(records), records)
        chill(folder)
        begun = time.perf_counter()
        size = sum(sum(array.nbytes for array in arrays.values()) for _, arrays in way.read(folder, order))
        report(seconds=time.perf_counter() - begun, bytes=size)
    else:
        report(**Counter(judged(way, folder, number) for number in range(records)))


def judged(way: Way, folder: Path, number: int) -> str:
    """Say what a reader is given for one record."""
    try:
        ((found, arrays),) = list(way.read(folder, [number]))
    except Exception:  # noqa: BLE001 - whatever it raises, it did not serve wrong bytes
        return "refused"
    wanted = content(number)
    alike = arrays.keys() == wanted.keys() and all(packed({"": arrays[n]}) == packed({"": wanted[n]}) for n in wanted)
    return "right" if found == number and alike else "wrong"


def report(**said: Any) -> None:
    print(json.dumps(said), flush=True)


def command(what: str, name: str, folder: Path, count: int, seed: int = 0) -> list[str]:
    return itself(__file__, "--part", what, name, folder, str(count), str(seed))


# ---- what is measured ----


def flips(folder: Path, name: str, count: int) -> Counter[str]:
    """Flip one bit at a time somewhere in the files, and see what readers are given."""
    rng, found = random.Random(1), Counter[str]()
    run(command("write", name, folder, JUDGED))
    for _ in range(count):
        paths = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]
        path = rng.choices(paths, [max(1, path.stat().st_blocks) for path in paths])[0]
        place = rng.choice(data_places(path))
        flip(path, place)
        done = subprocess.run(command("judge", name, folder, JUDGED), stdout=subprocess.PIPE, text=True, check=False)
        flip(path, place)
        said = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"crashed": 1}
        found[next((word for word in ("crashed", "wrong", "refused") if said.get(word)), "harmless")] += 1
    return found


def data_places(path: Path) -> range:
    """Return where a file has bytes: LMDB's is mostly a hole."""
    with path.open("rb") as file:
        end, begin, stretches = file.seek(0, os.SEEK_END), 0, [range(0)]
        with suppress(OSError):
            while begin < end:
                begin = file.seek(begin, os.SEEK_DATA)
                stretches.append(range(begin, begin := file.seek(begin, os.SEEK_HOLE)))
    return max(stretches, key=len) or range(end)


def flip(path: Path, place: int) -> None:
    mode = path.stat().st_mode
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1 << place % 8]))
    path.chmod(mode)


def kills(folder: Path, name: str, count: int) -> Counter[str]:
    """Kill writers at random moments; count what they had called safe, and what of it is lost."""
    rng, counts = random.Random(1), Counter[str]()
    folder.mkdir()
    for number in range(count):
        root = folder / f"{number}"
        writer = subprocess.Popen(
            command("publish", name, root, ENDLESS), stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        time.sleep(rng.uniform(1.0, 4.0))
        with suppress(ProcessLookupError):
            os.killpg(writer.pid, signal.SIGKILL)
        out, _ = writer.communicate()
        said = [json.loads(line) for line in out.splitlines() if line.endswith("}")]
        safe = sorted({one for report in said for one in report.get("safe", ())})
        verdicts = Counter(judged(WAYS[name], root, one) for one in safe)
        last = safe[-1] + 1 if safe else 0
        torn = Counter(judged(WAYS[name], root, one) for one in range(last, last + 2 * TOGETHER))
        counts += Counter(safe=len(safe), lost=len(safe) - verdicts["right"], wrong=torn["wrong"])
        shutil.rmtree(root, ignore_errors=True)
    return counts


def main() -> int:
    """Measure every way, by turns where time is measured."""
    typed = options(
        str(__doc__), 3,
        records={"type": int, "default": 1500, "help": "records (default: 1500)"},
        flips={"type": int, "default": 40, "help": "flipped bits (default: 40)"},
        kills={"type": int, "default": 12, "help": "killed writers (default: 12)"},
        folder={"type": Path, "help": "measure on the disk that holds this folder"},
    )  # fmt: skip
    if typed.part:
        part(*typed.part)
        return 0
    rows = []
    with tempfile.TemporaryDirectory(prefix="five-ways-", dir=typed.folder) as name:
        scratch = Path(name)

        def both(way: str) -> tuple[float, float, int, int]:
            shutil.rmtree(scratch / way, ignore_errors=True)
            written = run(command("write", way, scratch / way, typed.records)).json()
            cost = run(command("read", way, scratch / way, typed.records))
            return written["seconds"], (read := cost.json())["seconds"], read["bytes"], cost.peak_bytes

        found = by_turns({way: lambda way=way: both(way) for way in WAYS}, typed.rounds, warm=False)
        for way, rounds in found.items():
            writing, reading = (Spread.of([one[2] / one[at] / 1e6 for one in rounds]).median for at in (0, 1))
            files = sum(path.is_file() for path in (scratch / way).rglob("*"))
            flipped = flips(scratch / f"{way} flipped", way, typed.flips)
            killed = kills(scratch / f"{way} killed", way, typed.kills)
            safe = "nothing was safe yet"
            if killed["safe"]:
                safe = f"{killed['lost'] or 'none'} of {killed['safe']:,} lost"
            measured = (
                f"write {writing:,.0f}, cold read {reading:,.0f} MB/s; {rounds[-1][3] / 1e6:.0f} MB; {files:,} files; "
                f"flips: {', '.join(f'{number} {word}' for word, number in flipped.items())}; kills: {safe}"
            )
            rows.append(Row(IDS[way], way, "", "", measured, "five_ways.py", table="five ways"))
            say(f"{way}: {measured}")
    return publish(rows, save=typed.save)


if __name__ == "__main__":
    sys.exit(main())
