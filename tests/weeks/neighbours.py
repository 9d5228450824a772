"""Neighbours of the events: three projects of two users over one cache and one data set, at work for the whole soak.

By chance they submit, edit settings and data, cancel, damage the cache and look after it, and upgrade the package, one
step at a time. What was done is looked up in what commands say; each model must equal its undisturbed twin.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from pipeline.structures.synthetic import complex_pdb
from tests.conftest import ROOT
from tests.security.test_two_users import BOB
from tests.testkit.cluster import Cluster, processes
from tests.testkit.project import settle
from tests.testkit.slurm_runs import RESIDUES, SMALL, Project, Run, until
from tests.weeks.one_project import BAD, DAMAGE, Neighbour, Submitted
from tests.weeks.scene import ENDS_S, SETTINGS, TASK, WAITS_S, must
from tests.weeks.shared_cache import SharedCache
from tests.weeks.twins import OWN_CODE, Files, Twins, write_settings

FEWEST, MOST = 8, 14
PAUSE_S = (1.0, 2.0)
STAGES = ("scan", "embed", "graph", "train", "train", "train", "all")
SHORT = {"train__epochs": 4, "train__checkpoints": {"every": 3}, "data__max_rejected_fraction": 0.2}
VARIANTS = (
    {},
    {"graph__neighbours": 5},
    {"structures__altlocs": "first"},
    {"train__seed": 7},
    {"train__seed": 7, "graph__neighbours": 5},
)
COPIED = ("pipeline", "sbatch", "configs")
UPGRADED = 5  # files of the package
WEIGHTS = {
    "submits": 8,
    "edits_settings": 3,
    "edits_data": 1,
    "cancels": 2,
    "damages": 2,
    "looks_after": 2,
    "upgrades": 1,
}


class Neighbours:
    """Their projects, what they did, and what of it did not hold."""

    def __init__(self, cluster: Cluster, place: Path, seed: int) -> None:
        self.cluster, self.place, self.rng = cluster, place, random.Random(f"neighbours {seed}")
        self.steps: Counter[str] = Counter()
        self.failures: list[str] = []
        self.is_over = threading.Event()
        self.files: Files = {}
        self.cache = SharedCache(place / "cache", place, self.rng)
        self.data = place / "data"
        self.data.mkdir()
        self._replace({f"c{number}.pdb": _complex(number) for number in range(FEWEST + 2)})
        own = _own_code(place / "own")
        self.twins = Twins(place / "twins", own)
        self.all = [self._settles_in(name, uid, own) for name, uid in (("one", 0), ("two", 0), ("three", BOB))]

    def lives(self) -> None:
        """Do one thing after the other, until it is over; then let all end that goes on."""
        while not self.is_over.wait(self.rng.uniform(*PAUSE_S)):
            names = [*WEIGHTS]
            chosen = self.rng.choices(names, [*WEIGHTS.values()])[0]
            self.holds(chosen, getattr(self, chosen))
            self.attends()
        self.holds("the end", self.ends)

    def holds(self, what: str, step: Callable[[], str]) -> None:
        """Take a step; count it by what it came to, and keep what did not hold."""
        try:
            if came := step():
                self.steps[came] += 1
                print(f"  neighbours: {came}", flush=True)  # noqa: T201
        except Exception:  # noqa: BLE001 - whatever it is, it is told, and life goes on
            heard = "\n".join(line for neighbour in self.all for line in neighbour.heard[-4:])
            self.failures.append(f"{what}: {traceback.format_exc()}\n{heard}")
            print(f"neighbours: {self.failures[-1]}", flush=True)  # noqa: T201

    def attends(self) -> None:
        """Look after the runs that go on."""
        for neighbour in self.all:
            self.holds(f"a run of {neighbour.folder.name}", partial(neighbour.attends, self.twins))

    def submits(self) -> str:
        """Submit a stage of somebody who has no run."""
        idle = [neighbour for neighbour in self.all if neighbour.now is None]
        stage = self.rng.choice(STAGES)
        if not idle:
            return ""
        return self.rng.choice(idle).submits(stage, self.files, is_doubtful=self.cache.is_doubtful)

    def edits_settings(self) -> str:
        """Change settings of somebody; a run that goes on keeps its own."""
        self.rng.choice(self.all).writes(dict(self.rng.choice(VARIANTS)))
        return "edit settings"

    def edits_data(self) -> str:
        """Add, replace or remove a file, or add one that is no structure; once in the life of a run."""
        if any(len(going.seen) > 1 for going in self._going()):
            return ""
        changed, kept = dict(self.files), sorted(self.files)
        free = [name for name in (f"c{number}.pdb" for number in range(MOST)) if name not in changed]
        kind = self.rng.choice(("add", "replace", "remove", "spoil"))
        if kind == "add" and free:
            changed[self.rng.choice(free)] = _complex(self.rng.randrange(100))
        elif kind == "replace":
            changed[self.rng.choice(kept)] = _complex(self.rng.randrange(100))
        elif kind == "remove" and len(kept) > FEWEST:
            del changed[self.rng.choice(kept)]
        elif kind == "spoil" and BAD not in changed.values():
            changed["bad.pdb"] = BAD
        if changed == self.files:
            return ""
        self._replace(changed)
        for going in self._going():
            going.seen.append(changed)
            going.deeds.append(f"{kind} a file")
        return f"{kind} a file"

    def cancels(self) -> str:
        """Cancel somebody's run."""
        busy = [neighbour for neighbour in self.all if neighbour.now and not neighbour.now.cancelled]
        return self.rng.choice(busy).cancels() if busy else ""

    def damages(self) -> str:
        """Damage the cache; validation, typed by anybody, must find it, or somebody must have mended it."""
        for going in self._going():
            going.deeds.append(DAMAGE)
        return self.cache.damages(self.rng.choice(self.all), beside_runs=bool(self._going()))

    def looks_after(self) -> str:
        """Type a verb of the cache as anybody."""
        return self.cache.looked_after(self.rng.choice(self.all))

    def upgrades(self) -> str:
        """Replace files of the package under somebody's feet: another version, other comments."""
        site = self.rng.choice([neighbour.site for neighbour in self.all if neighbour.site])
        number = self.rng.randrange(1000)
        for path in self.rng.sample(sorted((site / "pipeline").rglob("*.py")), UPGRADED):
            _rewrite(path, path.read_text() + f"# upgrade {number}\n")
        root = site / "pipeline" / "__init__.py"
        lines = [
            f'__version__ = "0.1.{number}"' if "__version__" in line else line for line in root.read_text().split("\n")
        ]
        _rewrite(root, "\n".join(lines))
        return "upgrade"

    def ends(self) -> str:
        """Let all runs end, and have everybody train once more; nothing may be left then, and nothing be damaged."""
        self._wait()
        code, said = self.all[0].types("cache", "repair", "--yes")
        must(code == 0, "the last repair failed", lambda: said)
        for neighbour in self.all:
            deadline = time.monotonic() + WAITS_S
            while neighbour.submits("train", self.files, is_doubtful=True, was_mended=True) == "refused":
                must(time.monotonic() < deadline, "the last training is refused for ever")
                time.sleep(PAUSE_S[1])
        self._wait()
        self.cache.ends(self.all)
        self._nothing_left()
        return "end"

    def _wait(self) -> None:
        deadline = time.monotonic() + ENDS_S
        while self._going():
            must(time.monotonic() < deadline, "runs do not end")
            self.attends()
            time.sleep(PAUSE_S[0])

    def _nothing_left(self) -> None:
        runs = [Run(Project(neighbour.folder), run) for neighbour in self.all for run in neighbour.runs()]
        for run in runs:
            until(f"no job of {run.name}", lambda run=run: not run.jobs(self.cluster), WAITS_S, run.story)
        until("no process of neighbours", lambda: not self._processes(), 60.0, lambda: str(self._processes()))
        halves = [path for path in self.place.rglob("*") if ".partial" in path.name]
        must(not halves, f"half files are left: {halves}")

    def _processes(self) -> list[str]:
        pids = [int(entry.name) for entry in processes.PROC.iterdir() if entry.name.isdigit()]
        found = [pid for pid in pids if pid != os.getpid() and processes.is_below(pid, self.place)]
        return [f"{pid} {processes.program(pid)}" for pid in found if processes.program(pid) not in processes.DAEMONS]

    def _going(self) -> list[Submitted]:
        return [neighbour.now for neighbour in self.all if neighbour.now]

    def _replace(self, files: Files) -> None:
        """Bring the data to another state, each file at once."""
        for name in self.files.keys() - files.keys():
            (self.data / name).unlink()
        for name, content in files.items():
            if self.files.get(name) != content:
                path = self.place / name
                path.write_bytes(content)
                path.chmod(0o644)
                path.replace(self.data / name)
        settle(self.data)
        self.files = files

    def _settles_in(self, name: str, uid: int, own: Path) -> Neighbour:
        """Make a project of a user."""
        folder = self.place / name
        folder.mkdir()
        for file in OWN_CODE:
            shutil.copy(own / file, folder)
        settings = {**SMALL, **SETTINGS, **SHORT, "data__path": "../data", "cache__root": "../cache"}
        neighbour = Neighbour(folder, uid, settings, site=None if uid else _site(self.place / f"site-{name}"))
        neighbour.writes({})
        for path in (folder, *folder.rglob("*")):
            os.chown(path, uid, uid)
        return neighbour


@contextmanager
def beside(cluster: Cluster, seed: int) -> Iterator[Neighbours]:
    """Have neighbours live for the time of a block, and a while longer until all that they began has ended."""
    place = Path(tempfile.mkdtemp(prefix="neighbours-"))
    place.chmod(0o755)
    try:
        neighbours = Neighbours(cluster, place, seed)
        life = threading.Thread(target=neighbours.lives, name="neighbours")
        life.start()
        try:
            yield neighbours
        finally:
            neighbours.is_over.set()
            life.join()
    finally:
        shutil.rmtree(place)


def _complex(number: int) -> bytes:
    return complex_pdb(number, RESIDUES, RESIDUES)


def _own_code(folder: Path) -> Path:
    """Make what each project has besides its configuration."""
    folder.mkdir()
    (folder / "held.py").write_text(TASK)
    write_settings(folder, {**SMALL, "data__path": "."})
    done = Project(folder).types(
        "weights", "synth", "--layers", "2", "--dim", "32", "--heads", "2", "--out", "esm2_small.pt"
    )
    must(done.code == 0, "no weights", lambda: done.said)
    return folder


def _site(folder: Path) -> Path:
    """Copy the package to where it can be upgraded."""
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def _rewrite(path: Path, text: str) -> None:
    """Replace a file at once, as installers do."""
    aside = path.with_name(f".{path.name}")
    aside.write_text(text)
    aside.replace(path)
