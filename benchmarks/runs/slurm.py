"""Submit 10,000 made complexes to a real Slurm cluster on this machine: what a person waits for, what visits take.

    python benchmarks/runs/slurm.py [--complexes N] [--out FILE]

`submit` must return soon, the supervisor's visits must be short and small, and nothing may be left on the login side.
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
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.circumstances import write
from benchmarks.structures.scan_memory import write_complex
from tests.testkit.cluster import Cluster, why_not

PIPELINE = Path(sys.executable).with_name("pipeline")
CONFIG = """
data: {source: glob, path: data}
cluster: {executor: slurm, scan: {cpus: 1, mem: 1GiB}, graph: {mem: 1GiB}}
"""
SUBMIT_S, VISIT_S, VISIT_BYTES = 5.0, 60.0, 300 << 20
PATIENCE_S = 900.0
ACCOUNTED_WITHIN_S = 120.0
ROUNDS = 3


def pipeline(folder: Path, *words: str) -> str:
    """Type a command."""
    done = subprocess.run([str(PIPELINE), *words], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def submit(folder: Path, number: int) -> float:
    """Submit everything into an empty cache; return how long the command took."""
    start = time.perf_counter()
    pipeline(folder, "submit", "--stage", "graph", "--set", f"cache.root=cache{number}")
    return time.perf_counter() - start


def left_on_the_login_side(folder: Path) -> list[str]:
    """Return the processes that belong to the run and are no job's."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if str(folder) in words and b"SLURM_JOB_ID=" not in environment and "slurmstepd" not in words:
                found.append(words)
    return found


def visits(since: float) -> list[tuple[float, int]]:
    """Return the seconds and the bytes of every visit that a supervisor's job has paid, once accounting has any."""
    until = time.monotonic() + ACCOUNTED_WITHIN_S  # a run is done while its last supervisor's job still ends
    while not (paid := _accounted(since)) and time.monotonic() < until:
        time.sleep(1.0)
    return paid


def _accounted(since: float) -> list[tuple[float, int]]:
    """Ask accounting once."""
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since))
    fields = "JobID,JobName,State,ElapsedRaw,MaxRSS"
    command = ["sacct", "--noheader", "--parsable2", "--noconvert", "-S", start, "-o", fields]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [line.split("|") for line in said.splitlines()]
    supervisors = {row[0] for row in rows if "supervise" in row[1] and row[2] == "COMPLETED"}
    return [
        (float(row[3]), int(row[4] or 0))
        for row in rows
        if row[0].endswith(".batch") and row[0].removesuffix(".batch") in supervisors
    ]


def await_end(folder: Path) -> dict[str, Any]:
    """Wait until the newest run has ended; return how."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        state: dict[str, Any] = json.loads(pipeline(folder, "status", "--json"))
        if state["state"] not in ("running", "waiting"):
            return state
        assert time.monotonic() < deadline, state["state"]
        time.sleep(1.0)


def main() -> int:
    """Make the files, submit them, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--complexes", type=int, default=10_000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if reason := why_not():
        sys.exit(f"no Slurm here: {reason}")
    cluster = Cluster(Path("/var/lib/pipeline-slurm-bench"))
    cluster.start()
    os.environ.update(cluster.env())
    folder = Path(tempfile.mkdtemp())
    try:
        (folder / "data").mkdir()
        with ProcessPoolExecutor() as pool:
            list(pool.map(partial(write_complex, folder / "data"), range(options.complexes), chunksize=100))
        (folder / "pipeline.yaml").write_text(CONFIG)
        since, seconds = time.time(), []
        for number in range(ROUNDS):
            if number:
                pipeline(folder, "cancel", "--yes")
            seconds.append(submit(folder, number))
        left = left_on_the_login_side(folder)
        state = await_end(folder)
        paid = visits(since)
    finally:
        cluster.stop()
        shutil.rmtree(folder)
    accepted = state["stages"][-1]["census"]["accepted"]
    assert state["state"] == "done", state["error"]
    assert accepted == options.complexes, accepted
    assert not left, left
    result = {
        "complexes": options.complexes,
        "submit_s": [round(one, 2) for one in seconds],
        "submit_median_s": round(statistics.median(seconds), 2),
        "tasks": {stage["name"]: stage["tasks"] for stage in state["stages"]},
        "visits": len(paid),
        "longest_visit_s": max(one for one, _ in paid),
        "largest_visit_bytes": max(size for _, size in paid),
        "left_on_the_login_side": len(left),
        "reach": {"submit_s": SUBMIT_S, "visit_s": VISIT_S, "visit_bytes": VISIT_BYTES},
    }
    text = json.dumps(result, indent=2)
    write(options.out, result)
    print(text)
    print(f"submit {result['submit_median_s']} s (reach {SUBMIT_S:.0f}); the longest of {len(paid)} visits")
    print(f"{result['longest_visit_s']} s (reach {VISIT_S:.0f}), {result['largest_visit_bytes'] >> 20} MiB (reach 300)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
