"""Training on a warm cache, complexes a second: against research code's kind of loop, and two ranks against one.

    python benchmarks/training/train.py [--complexes N] [--rounds N] [--out FILE]

Both sides train the same model (`pipeline.tasks.interface`) with the same optimizer on the same made complexes, real
graphs with embeddings of 1,280 numbers, on one thread. Ours is the loop that `pipeline submit --stage train` runs, with
its plan, its loader and its checkpoints. The other side is what is found in research code: batches by count in a
shuffled order, no worker process, each complex read from a pickle of torch tensors (embeddings in float32, as ESM gives
them) when its turn comes. There are two of it: `sequential` goes forward and backward complex by complex, `padded` runs
a batch at once, every partner with as many residues and edges as the largest of the batch (rows that have no part in
the loss, so that its value is the same). Before anything is timed, the losses of the same complexes under the same
parameters are compared.

Each measurement is a process of its own; the sides take turns, and ratios are of neighbours. Time is taken from the end
of the first epoch to the end of the last, checkpoints in between included. Of two ranks, each has a core of its own;
so has one. Processor time a complex is noted as well: other work on the machine changes it less.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.circumstances import write  # noqa: E402 - the project is found only now
from benchmarks.train_parts.ours import BATCH, OPTIONS, ours, plan  # noqa: E402
from benchmarks.train_parts.theirs import WAYS, compare, theirs, write_pickles  # noqa: E402
from benchmarks.training.loader import generate  # noqa: E402

REACH = {"ratio": 1.5, "wait_share": 0.02, "two_ranks": 1.6, "beside_the_model": 0.03, "items_read_again": 0}
MICRO_BATCH = 2  # of what the main thread does beside the model is told with several of them a step


def in_a_process(given: dict[str, Any], core: int | None = None) -> subprocess.Popen[str]:
    """Begin a measurement in a process of its own, on a core of its own where one is named."""
    command = [sys.executable, "-W", "ignore", __file__, "--part", json.dumps(given)]
    before = os.sched_getaffinity(0)
    if core is not None:
        os.sched_setaffinity(0, {core})
    try:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    finally:
        os.sched_setaffinity(0, before)


def ended(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return what a process measured."""
    out, errors = process.communicate()
    assert process.returncode == 0, errors[-4000:]
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def run_part(given: dict[str, Any]) -> None:
    """Do what `in_a_process` asked for."""
    import torch

    torch.set_num_threads(1)
    if given["kind"] == "theirs":
        found = theirs(Path(given["folder"]), given["way"])
    elif given["kind"] == "plan":
        found = plan(Path(given["root"]), bytes.fromhex(given["key"]), given["ranks"], given["micro_batch"])
    else:
        folder = Path(given["folder"])
        key, micro_batch = bytes.fromhex(given["key"]), given["micro_batch"]
        found = ours(Path(given["root"]), key, given["prepared"], given["part"], folder, micro_batch)
    print(json.dumps(found))


class Bench:
    """The data and the plans; measures each side."""

    def __init__(self, scratch: Path, complexes: int) -> None:
        self.root, self.pickles, self._models = scratch / "cache", scratch / "pickles", scratch / "models"
        self.key = generate(self.root, complexes, complexes)
        self.bytes_per_pickle = write_pickles(self.pickles, self.root, self.key) // complexes
        self.where = {"root": str(self.root), "key": self.key.hex()}
        kinds = ((1, None), (2, None), (1, MICRO_BATCH))
        plans = [
            in_a_process({"kind": "plan", "ranks": ranks, "micro_batch": micro_batch, **self.where})
            for ranks, micro_batch in kinds
        ]
        self.prepared = {kind: ended(one) for kind, one in zip(kinds, plans, strict=True)}
        self._count = 0

    def ours(
        self, ranks: int = 1, cores: Sequence[int] | None = None, *, micro_batch: int | None = None
    ) -> dict[str, Any]:
        """Train from the beginning, with so many ranks."""
        self._count += 1
        folder = self._models / str(self._count)
        folder.mkdir(parents=True)
        prepared = self.prepared[ranks, micro_batch]
        given = {"kind": "ours", **self.where, "prepared": prepared, "folder": str(folder), "micro_batch": micro_batch}
        parts = [{**given, "part": f"{rank}/{ranks}"} for rank in range(ranks)]
        started = [in_a_process(one, cores[rank] if cores else None) for rank, one in enumerate(parts)]
        found, *_ = [ended(one) for one in started]
        shutil.rmtree(folder)
        if ranks > 1:
            del found["cpu_ms_per_complex"]  # only the first rank's
        return found

    def theirs(self, way: str) -> dict[str, Any]:
        """Train the other way."""
        return ended(in_a_process({"kind": "theirs", "way": way, "folder": str(self.pickles)}))


def measure(scratch: Path, complexes: int, rounds: int) -> dict[str, Any]:
    """Generate and measure everything."""
    load = [os.getloadavg()[0]]
    bench = Bench(scratch, complexes)
    apart = compare(bench.root, bench.key, bench.pickles)
    bench.ours()  # it warms the cache
    cut = [bench.ours(micro_batch=MICRO_BATCH) for _ in range(rounds)]
    sides = [{"ours": bench.ours(), **{way: bench.theirs(way) for way in WAYS}} for _ in range(rounds)]
    load.append(os.getloadavg()[0])
    cores = sorted(os.sched_getaffinity(0))
    several = rounds if len(cores) > 1 else 0
    crews = [{"one_rank": bench.ours(1, cores[:1]), "two_ranks": bench.ours(2, cores[:2])} for _ in range(several)]
    load.append(os.getloadavg()[0])
    return {
        "what": "training the interface model on made complexes with 1,280-wide embeddings, one thread a process",
        "complexes": complexes,
        "batch": BATCH,
        "options": OPTIONS,
        "rounds": rounds,
        "bytes_per_pickle": bench.bytes_per_pickle,
        "losses_apart": apart,
        "beside_the_model": {
            "micro_batches_per_step": cut[0]["micro_batches_per_step"],
            "share": round(statistics.median(one["beside_the_model"] for one in cut), 4),
            "largest": round(max(one["beside_the_model"] for one in cut), 4),
            "seconds": {name: round(spent, 3) for name, spent in cut[-1]["seconds"].items()},
            "items_read_again": max(one["items_read_again"] for one in cut),
        },
        **medians(sides),
        **medians(crews),
        "ratio": {way: ratios(sides, "ours", way) for way in WAYS},
        "ratio_in_processor_time": {way: cpu_ratio(sides, way) for way in WAYS},
        "two_ranks_to_one": ratios(crews, "two_ranks", "one_rank") if crews else None,
        "reach": REACH,
        "load": [round(one, 1) for one in load],
        "cores": os.cpu_count(),
    }


Round: TypeAlias = "dict[str, dict[str, Any]]"


def medians(rounds: Sequence[Round]) -> dict[str, dict[str, float]]:
    """Return the medians of what is a number, of each side."""
    found: dict[str, dict[str, float]] = {}
    for side, figures in rounds[0].items() if rounds else ():
        names = [name for name, value in figures.items() if isinstance(value, int | float)]
        found[side] = {name: round(statistics.median(one[side][name] for one in rounds), 4) for name in names}
    return found


def ratios(rounds: Sequence[Round], side: str, other: str) -> dict[str, float]:
    """Return how many times as fast one side is as its neighbour: the median and the lowest."""
    found = [one[side]["complexes_per_s"] / one[other]["complexes_per_s"] for one in rounds]
    return {"median": round(statistics.median(found), 2), "lowest": round(min(found), 2)}


def cpu_ratio(rounds: Sequence[Round], way: str) -> float:
    """Return how many times the processor time the other side takes."""
    found = [one[way]["cpu_ms_per_complex"] / one["ours"]["cpu_ms_per_complex"] for one in rounds]
    return round(float(statistics.median(found)), 2)


def table(result: dict[str, Any]) -> str:
    """Return the figures for people."""
    lines = []
    for side in ("ours", *WAYS, "one_rank", "two_ranks"):
        if side in result:
            one = result[side]
            wait = f"   wait {one['wait_share']:.2%}" if "wait_share" in one else ""
            pace = f"{one['complexes_per_s']:7.1f} complexes/s   step {1e3 * one['step_s']:6.1f} ms"
            cpu = f"   {one['cpu_ms_per_complex']:6.2f} ms of a core each" if "cpu_ms_per_complex" in one else ""
            lines.append(f"{side:12} {pace}{cpu}{wait}")
    for way in WAYS:
        one = result["ratio"][way]
        cpu = result["ratio_in_processor_time"][way]
        lines.append(f"against {way}: {one['median']}x, lowest {one['lowest']}x; in processor time {cpu}x (reach 1.5)")
    if result["two_ranks_to_one"]:
        one = result["two_ranks_to_one"]
        lines.append(f"two ranks, a core each, against one: {one['median']}x, lowest {one['lowest']}x (reach 1.6)")
    lines.append(f"load of the machine {result['load']}, {result['cores']} cores")
    return "\n".join(lines)


def main() -> int:
    """Measure, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--complexes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--part", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        run_part(options.part)
        return 0
    scratch = Path(tempfile.mkdtemp(prefix="train-"))
    try:
        result = measure(scratch, options.complexes, options.rounds)
    finally:
        shutil.rmtree(scratch)
    text = json.dumps(result, indent=2)
    print(text)
    print(table(result))
    write(options.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
