"""Small trainings side by side in one job against one after the other: wall time, CPU time, and the same weights.

    python benchmarks/sharing.py [--points 8] [--per-gpu 4] [--epochs 60] [--wait-ms 50] [--rounds 3]

A stand-in for a GPU: points of a sweep train on CPUs of this machine, one CPU each, `--per-gpu` of them in a job. The
other way gives the same sweep one CPU, so that its points train one after the other. Rounds alternate between the two.
Each step waits `--wait-ms`, in which it uses nothing, as small trainings do that leave most of a GPU idle. With 0, the
CPUs are all there is to share: a job of several then gains only from idle CPUs, and pays for more imports of torch.
It prints the median of the wall times and their ratio, and compares the weights of each point bit for bit. Wall times
mean little while other programs compute: the load of the machine is printed with them.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.testkit.project import DATA, EMBED, LOCAL, PIPELINE, TRAIN, make_project, write_weights
from tests.testkit.trained import weights

TASK = """\
import time

from torch._subclasses import FakeTensor

from pipeline.tasks.interface import Interface


class Waiting(Interface):
    def __init__(self, wait_ms: int = 0, **options):
        super().__init__(**options)
        self.wait_ms = wait_ms

    def loss(self, model, batch):
        if not isinstance(next(model.parameters()), FakeTensor):
            time.sleep(self.wait_ms / 1000)
        return super().loss(model, batch)
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("points", 8), ("per-gpu", 4), ("epochs", 60), ("wait-ms", 50), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        compare(Path(folder), given.points, given.per_gpu, given.epochs, given.wait_ms, given.rounds)


def compare(folder: Path, points: int, per_gpu: int, epochs: int, wait_ms: int, rounds: int) -> None:
    """Train the points in both ways, so many times."""
    own = {"train__task": "waiting:Waiting", "train__options": {**TRAIN["train__options"], "wait_ms": wait_ms}}
    settings = {**DATA, **EMBED, **LOCAL, **TRAIN, **own, "cluster__train__cpus": 1}
    project = make_project(folder / "project", 12, **settings)
    (project.folder / "waiting.py").write_text(TASK)
    write_weights(project.folder)
    project.finishes("graph")
    words = ["submit", "train", "--sweep", f"train.seed=0:{points}", "--set", f"train.epochs={epochs}", "--follow"]
    took: dict[int, list[tuple[float, float]]] = {1: [], per_gpu: []}
    for number in range(rounds):
        made = []
        for sharing in took:
            models = project.folder / f"models-{sharing}"
            shutil.rmtree(models, ignore_errors=True)
            settings = {"train.sweep.per_gpu": sharing, "cluster.slots.cpus": sharing, "train.models": models}
            sets = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
            took[sharing].append(timed([str(PIPELINE), *words, *sets], project.folder))
            made.append({model.name: weights(model) for model in models.iterdir()})
        assert made[0] == made[1], "other weights"
        assert len(made[0]) == points
        load = " ".join(f"{value:.1f}" for value in os.getloadavg())
        shown = ", ".join(f"{sharing} a job {wall:.1f} s ({cpu:.1f} CPU-s)" for sharing, (wall, cpu) in last(took))
        print(f"round {number + 1}: {shown}; load {load} on {os.cpu_count()} CPUs", flush=True)
    alone, shared = (statistics.median(wall for wall, _ in took[sharing]) for sharing in (1, per_gpu))
    print(f"{points} trainings: {alone:.1f} s one after the other, {shared:.1f} s with {per_gpu} a job; same weights")
    print(f"median of {rounds} rounds: {shared / alone:.2f} of the time")


def last(took: dict[int, list[tuple[float, float]]]) -> list[tuple[int, tuple[float, float]]]:
    """Return the last measurement of each way."""
    return [(sharing, measured[-1]) for sharing, measured in took.items()]


def timed(command: list[str], folder: Path) -> tuple[float, float]:
    """Run a command; return its wall time and the CPU time of all its processes."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    wall, after = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
