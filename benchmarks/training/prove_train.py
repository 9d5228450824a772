"""Interrupt a training on a real Slurm cluster at 20 random moments: it must end with the very same numbers.

    python benchmarks/training/prove_train.py [--kills N] [--seed N] [--out FILE]

A model with dropout, moving averages and a schedule is trained by 2 nodes of 2 ranks, once in peace. Then it is trained
again and again from nothing, each time with one interruption at a random moment: SIGKILL to one rank or to all, a
cancellation and a second `pipeline submit`, a preemption, a time limit. The run must go on to its end by itself, and
parameters, optimizer and averages of the last checkpoint must have the same bits as those of the training in peace.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from safetensors import safe_open  # noqa: E402 - the project need not be installed

from benchmarks.circumstances import write  # noqa: E402 - the project is found only now
from pipeline.encoder.checkpoints.synth import write_random_checkpoint  # noqa: E402
from pipeline.journal.run_status import ENDED  # noqa: E402
from pipeline.structures.synthetic import write_demo  # noqa: E402
from tests.testkit.cluster import Cluster, why_not  # noqa: E402
from tests.testkit.slurm_runs import Project, Run  # noqa: E402

NODES, RANKS = 2, 2
COMPLEXES, EPOCHS = 72, 4
EARLY = 0.2
LONG_S = 140.0  # of training, more than the time limit leaves
SETTINGS: dict[str, Any] = {
    "data": {"source": "manifest", "path": "data/manifest.csv", "max_rejected_fraction": 0.1},
    "embed": {"weights": "weights/esm2_demo.pt"},
    "cluster": {"slurm": {"poll": "1s", "partition": "main"}, "train": {"nodes": NODES, "ranks": RANKS}},
    "train": {
        "task": "pipeline.tasks.interface:Interface",
        "options": {"embedding_dim": 32, "width": 32, "layers": 3, "pair_width": 16, "dropout": 0.2},
        "effective_batch": 8,
        "learning_rate": 0.001,
        "schedule": {"kind": "cosine", "warmup": 10},
        "ema": 0.99,
        "checkpoints": {"every": 3},
        "log_every": 1,
    },
}
ONE, ALL, CANCEL, PREEMPT, LIMIT = "kill one rank", "kill all ranks", "cancel, submit", "preempt", "time limit"
SHARES = {ONE: 6, ALL: 4, CANCEL: 4, PREEMPT: 4, LIMIT: 2}
MORE = {PREEMPT: {"partition": "preempt"}, LIMIT: {"partition": "short", "time": "2m"}}
TOLD = ("epoch", "step", "steps", "items", "loss", "validation")
LOOK_EVERY_S, PATIENCE_S = 0.05, 600.0
QUICK_S = 0.002  # a checkpoint is written in less


@dataclass(frozen=True)
class Moment:
    """When a training is interrupted: some time after it has begun, or after a step is done."""

    step: int
    after_s: float
    rank: int
    at: str = ""  # what must be seen then: saving, validation; empty: nothing


@dataclass
class Training:
    """One training from nothing, as its files and processes tell of it."""

    project: Project
    name: str
    epochs: int
    kind: str = ""

    @property
    def folder(self) -> Path | None:
        """Return where its files are, as soon as it has some."""
        return next(iter((self.project.folder / "models" / self.name).glob("*")), None)

    def submit(self) -> Run:
        """Submit it; what is done stays done."""
        words = [f"train.models=models/{self.name}", f"train.epochs={self.epochs}"]
        words += [f"cluster.train.{name}={value}" for name, value in MORE.get(self.kind, {}).items()]
        return self.project.submits("train", *(part for word in words for part in ("--set", word)))

    @property
    def done(self) -> int:
        """Return how many steps its figures tell of."""
        lines = self._text("figures.jsonl").splitlines()
        return int(json.loads(lines[-1])["step"]) if lines and lines[-1].endswith("}") else 0

    @property
    def written(self) -> tuple[int, int]:
        """Return when its figures were written last, and how many bytes there are."""
        path = self.folder / "figures.jsonl" if self.folder else None
        found = path.stat() if path and path.exists() else None
        return (found.st_mtime_ns, found.st_size) if found else (0, 0)

    def _text(self, name: str) -> str:
        try:
            return (self.folder / name).read_text() if self.folder else ""
        except OSError:
            return ""

    @property
    def saved(self) -> int:
        """Return the step of its newest checkpoint."""
        return max((int(path.name[5:13]) for path in self._listed("checkpoints", "step-")), default=0)

    def _listed(self, name: str, prefix: str) -> list[Path]:
        folder = self.folder / name if self.folder else None
        return [path for path in folder.iterdir() if path.name.startswith(prefix)] if folder and folder.exists() else []

    @property
    def is_saving(self) -> bool:
        """Tell whether a checkpoint is being written."""
        return bool(self._listed("checkpoints", ".step-"))

    @property
    def is_validating(self) -> bool:
        """Tell whether a validation has put down what the model says."""
        return self.folder is not None and (self.folder / "outputs").exists()

    def phase(self, steps: int) -> str:
        """Say where it is."""
        if self.is_saving:
            return "saving"
        if self.is_validating:
            return "validation"
        done = self.done
        return "start-up" if not done else "end" if done >= steps else "first steps" if done < 3 else "mid-epoch"

    def weights(self, before: int = 0) -> dict[str, tuple[str, bytes]]:
        """Return the bits of all tensors of its last checkpoint, or one before: parameters, optimizer and averages."""
        found = sorted(self._listed("checkpoints", "step-"))[-1 - before]
        with safe_open(found / "state.safetensors", "np") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
        return {name: (f"{one.dtype}{one.shape}", one.tobytes()) for name, one in tensors.items()}

    def told(self) -> list[dict[str, Any]]:
        """Return what its epochs came to, without what is measured."""
        lines = map(json.loads, self._text("epochs.jsonl").splitlines())
        return [
            {name: one[name] for name in ("epoch", "step", "steps", "items", "loss", "validation")} for one in lines
        ]


def make_project(folder: Path) -> Project:
    """Write complexes and weights, and do everything that comes before training."""
    write_demo(folder / "data", COMPLEXES)
    write_random_checkpoint(folder / "weights" / "esm2_demo.pt", layers=3, dim=32, heads=4)
    (folder / "pipeline.yaml").write_text(json.dumps(SETTINGS, indent=1))
    project = Project(folder)
    project.submits("graph").ends(timeout_s=PATIENCE_S)
    return project


SHORT: Mapping[str, Callable[[Training], bool]] = {
    "saving": lambda training: training.is_saving,
    "validation": lambda training: training.is_validating,
}


def ranks_of(run: Run) -> dict[int, int]:
    """Return the processes of a run's ranks, by rank."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes()
                if b"runs.worker" not in words or str(run.folder.path).encode() not in words:
                    continue
                environment = dict(word.partition(b"=")[::2] for word in (entry / "environ").read_bytes().split(b"\0"))
                is_rank = "python" in (entry / "exe").readlink().name and b"SLURM_STEP_ID" in environment
            except OSError:  # it has ended
                continue
            if is_rank:
                found[int(environment[b"SLURM_PROCID"])] = int(entry.name)
    return found


def wait(what: str, condition: Callable[[], object], run: Run, every_s: float = LOOK_EVERY_S) -> None:
    """Wait until something is so."""
    until = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > until:
            sys.exit(f"waited {PATIENCE_S:.0f} s in vain for {what}\n{run.story()}")
        time.sleep(every_s)


def in_peace(training: Training) -> tuple[list[tuple[float, int]], float]:
    """Train without an interruption; return when each step was done, since all ranks were there, and when it ended."""
    run = training.submit()
    wait("all ranks", lambda: len(ranks_of(run)) == NODES * RANKS, run)
    began, seen, last = time.monotonic(), [], 0
    while ranks_of(run):
        if (done := training.done) > last:
            seen.append((time.monotonic() - began, done))
            last = done
        time.sleep(LOOK_EVERY_S)
    took_s = time.monotonic() - began
    run.ends(timeout_s=PATIENCE_S)
    return seen, took_s


def moments(seen: list[tuple[float, int]], took_s: float, count: int, chance: random.Random) -> list[Moment]:
    """Draw moments: one in each of so many parts of a training; every fifth waits for what is short to come.

    Until the first step it loads libraries and meets, which takes as long as many steps: a fifth of the moments.
    """
    drawn, first_s, (end_s, last) = [], seen[0][0], seen[-1]
    took_s = min(took_s, end_s + (end_s - first_s) / 20)  # after that only processes end
    for number in range(count):
        share = (number + chance.random()) / count
        at_s = (
            first_s * share / EARLY if share < EARLY else first_s + (took_s - first_s) * (share - EARLY) / (1 - EARLY)
        )
        before = [(0.0, 0), *(one for one in seen if one[0] <= at_s)][-1]
        at = ("", "", "saving", "", "validation")[number % 5] if 0 < before[1] < last * 0.7 else ""
        drawn.append(Moment(before[1], at_s - before[0], chance.randrange(NODES * RANKS), at))
    chance.shuffle(drawn)
    return drawn


def come_to(training: Training, run: Run, moment: Moment, steps: int) -> None:
    """Wait for a moment."""
    wait("all ranks", lambda: len(ranks_of(run)) == NODES * RANKS, run)
    wait(f"step {moment.step}", lambda: training.done >= moment.step, run)
    time.sleep(moment.after_s)
    if moment.at:
        is_there = SHORT[moment.at]
        wait(moment.at, lambda: is_there(training) or training.saved >= steps, run, QUICK_S)


def strike(cluster: Cluster, training: Training, run: Run, moment: Moment) -> None:
    """Interrupt a training."""
    there = ranks_of(run)
    if training.kind == ONE and moment.rank in there:
        os.kill(there[moment.rank], signal.SIGKILL)
    elif training.kind == ALL:
        for pid in there.values():
            os.kill(pid, signal.SIGKILL)
    elif jobs := run.jobs(cluster, "train"):
        if training.kind == CANCEL:
            assert cluster.run("scancel", jobs[0]["array"]).returncode == 0
        elif training.kind == PREEMPT:
            first = cluster.run("scontrol", "show", "hostnames", jobs[0]["node"]).stdout.split()[0]
            urgent = ["--partition=urgent", "--exclusive", f"--nodelist={first}", "--output=/dev/null", "--wrap=true"]
            assert cluster.run("sbatch", *urgent).returncode == 0


def interrupted(cluster: Cluster, training: Training, moment: Moment, steps: int) -> dict[str, Any]:
    """Train with one interruption; return when it was and what it cost."""
    first = run = training.submit()
    if training.kind == LIMIT:
        wait("all ranks", lambda: len(ranks_of(run)) == NODES * RANKS, run)
        wait("a rank to end", lambda: len(ranks_of(run)) < NODES * RANKS, run)
    else:
        come_to(training, run, moment, steps)
    step, saved = training.done, training.saved
    told = {"kind": training.kind, "moment": asdict(moment), "phase": training.phase(steps), "step": step}
    strike(cluster, training, run, moment)
    struck = time.monotonic()
    wait("all ranks to end", lambda: not ranks_of(run), run)
    told |= {"saved": training.saved, "steps_again": max(0, step - max(saved, training.saved))}
    told["ended_s"] = round(time.monotonic() - struck, 1)
    if training.kind == CANCEL:
        wait("the end of the run", lambda: run.now().state in ENDED, run)
        struck, run = time.monotonic(), training.submit()
    if training.saved < steps and (took_s := until_next_step(training, run, struck)):
        told["restart_s"] = took_s
    run.ends(timeout_s=PATIENCE_S)
    failures = run.stage("train")["failures"]
    told["starts"] = starts_of(*{one.name: one for one in (first, run)}.values())
    return told | {"attempts": len(failures) + 1, "causes": [one["cause"] for one in failures]}


def starts_of(*runs: Run) -> int:
    """Count how often training was begun, in one run or two."""
    texts = [path.read_text() for run in runs for path in run.folder.events.glob("train-000000-0.jsonl")]
    return sum(text.count('"kind":"task_started"') for text in texts)


def until_next_step(training: Training, run: Run, struck: float) -> float | None:
    """Return how long it took until the first step of a new start."""
    written, size = training.written
    wait("a new start", lambda: training.written[0] != written or run.now().state in ENDED, run)
    size = training.written[1]
    wait("its first step", lambda: training.written[1] > size or run.now().state in ENDED, run)
    return None if run.now().state in ENDED else round(time.monotonic() - struck, 1)


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return what is not the same in two."""
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))


def prove(cluster: Cluster, folder: Path, kills: int, chance: random.Random) -> Iterator[dict[str, Any]]:
    """Yield what came of the training in peace, and then of each interruption."""
    project = make_project(folder)
    kinds = [kind for kind, share in SHARES.items() for _ in range(share)]
    kinds = [kinds[number * len(kinds) // kills] for number in range(kills)]
    peaceful, drawn, epochs = dict[str, Training](), list[Moment](), EPOCHS
    for number, kind in enumerate(kinds):
        name = "long" if kind == LIMIT else "short"
        if name not in peaceful:
            peaceful[name] = Training(project, name, epochs)
            seen, took_s = in_peace(peaceful[name])
            drawn = drawn or moments(seen, took_s, kills, chance)
            epochs = math.ceil(EPOCHS * LONG_S / (took_s - seen[0][0]))
            told = {"kind": "none", "name": name, "steps": seen[-1][1], "first_s": seen[0][0], "took_s": took_s}
            changed = differing(peaceful[name].weights(), peaceful[name].weights(before=1))
            yield told | {"changed_since_the_checkpoint_before": len(changed)}  # the comparison can tell
        peace = peaceful[name]
        training = Training(project, f"k{number:02}", peace.epochs, kind)
        told = interrupted(cluster, training, drawn[number], peace.done)
        wrong = differing(peace.weights(), training.weights())
        yield told | {
            "tensors": len(peace.weights()),
            "unlike": len(wrong),
            "told_alike": peace.told() == training.told(),
        }
        if not wrong:
            shutil.rmtree(project.folder / "models" / training.name)


def table(rows: list[dict[str, Any]]) -> str:
    """Return what people read."""
    lines = [f"{'':>3} {'interrupted by':<16}{'phase':<13}{'step':>5}{'saved':>6}{'again':>6}{'restart':>9}  outcome"]
    for number, one in enumerate(rows, 1):
        same = "same bits" if not one["unlike"] else f"{one['unlike']} of {one['tensors']} tensors DIFFER"
        same += "" if one["told_alike"] else ", figures differ"
        restart = f"{one['restart_s']:.1f} s" if "restart_s" in one else "-"
        causes = f" ({', '.join(one['causes'])})" if one["causes"] else ""
        lines.append(
            f"{number:>3} {one['kind']:<16}{one['phase']:<13}{one['step']:>5}{one['saved']:>6}"
            f"{one['steps_again']:>6}{restart:>9}  {same}{causes}"
        )
    return "\n".join(lines)


def main() -> int:
    """Interrupt, compare, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=sum(SHARES.values()))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cluster", type=Path, default=Path("/var/lib/pipeline-slurm-prove"))
    parser.add_argument("--keep", type=Path, help="a new folder for the project, which stays")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/prove_train.json")
    options = parser.parse_args()
    if reason := why_not():
        sys.exit(f"no Slurm here: {reason}")
    cluster = Cluster(options.cluster)
    ran_before = cluster.is_running()
    cluster.start()
    os.environ.update(cluster.env())
    folder = options.keep or Path(tempfile.mkdtemp(prefix="prove-train-"))
    peace, rows = list[dict[str, Any]](), list[dict[str, Any]]()
    try:
        for one in prove(cluster, folder, options.kills, random.Random(options.seed)):
            (peace if one["kind"] == "none" else rows).append(one)
            print(json.dumps(one), file=sys.stderr, flush=True)
    finally:
        if not ran_before:
            cluster.stop()
        if not options.keep:
            shutil.rmtree(folder)
    unlike = sum(one["unlike"] > 0 or not one["told_alike"] for one in rows)
    idle = sum(
        max(one["starts"], one["attempts"]) < 2 and (one["kind"] == LIMIT or one["saved"] < peace[0]["steps"])
        for one in rows
    )
    restarts = sorted(one["restart_s"] for one in rows if "restart_s" in one)
    result = {
        "proof": "training",
        "ranks": f"{NODES} nodes of {RANKS}",
        "seed": options.seed,
        "in_peace": peace,
        "interruptions": rows,
        "unlike": unlike,
        "not_interrupted": idle,
        "restart_s": {"least": restarts[0], "median": restarts[len(restarts) // 2], "most": restarts[-1]},
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write(options.out, result)
    print(json.dumps(result, indent=1))
    print(table(rows))
    return 0 if len(rows) == options.kills and not (unlike or idle) else 1


if __name__ == "__main__":
    sys.exit(main())
