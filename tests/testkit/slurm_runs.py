"""Projects whose runs go to the test cluster, typed as people type them, with tasks that misbehave where tests want it.

They do so by a `sitecustomize.py` that `cluster.slurm.setup` puts on their path: nothing of the product is changed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipeline.journal.run_folder import RunFolder, runs_in
from pipeline.journal.run_status import RunStatus, State
from pipeline.journal.run_view import view
from tests.testkit import project
from tests.testkit.cluster import Cluster, processes
from tests.testkit.cluster.cluster import SEARCH_PATH
from tests.testkit.project import DATA, PIPELINE, until, write_complexes, write_config

SOON_S, ENDS_S = 300.0, 600.0  # of a busy machine, too
LIVE = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING", "REQUEUED", "REQUEUE_HOLD")
RESIDUES = 20
SMALL = {
    **DATA,
    "structures__max_file_bytes": "1MiB",  # for which 576 MiB are planned
    "cluster__slurm__poll": "1s",
}

# What a task may do when it opens one of its files, and when it does it.
DIES = "dies"  # of a signal, whenever it reads the file
EATS = "eats"  # 700 MiB, more than the 576 MiB that are planned
LINGERS = "lingers"  # the first time: until it is let go, or for ever
DEAF = "deaf"  # the same, and hears no warning of its time limit

MISCHIEF = '''\
"""Makes workers misbehave when they open a structure file, and other processes when they open a file of a run."""

import ctypes
import json
import os
import resource
import signal
import sys
import time

HERE = os.path.dirname(__file__)
EATEN_BYTES, EATEN_S = 700 << 20, 3.0


def note(name):
    """Write down where this task runs, with which code and with what it was given."""
    kept = ("CUDA_VISIBLE_DEVICES", "SLURMD_NODENAME", "SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE", "OMP_NUM_THREADS")
    seen = {key: os.environ.get(key, "") for key in kept}
    seen |= {"words": sys.orig_argv[3:], "pid": os.getpid(), "code": sys.modules["pipeline"].__file__}
    told = {"image": "APPTAINER_CONTAINER", "tmp": "TMPDIR"}
    seen |= {"root": os.listdir("/"), **{key: os.environ.get(variable, "") for key, variable in told.items()}}
    with open(f"{HERE}/seen/{name}-{os.getpid()}", "w") as file:
        json.dump(seen, file)


def linger(name):
    """Stay until somebody lets all go; who comes second does not stay."""
    try:
        os.symlink(str(os.getpid()), f"{HERE}/arrived/{name}")
    except FileExistsError:
        return
    while not os.path.exists(f"{HERE}/go"):
        time.sleep(0.02)


def misbehave(event, args):
    """Do what is asked for at the opening of a file, or when a job has been submitted and its script gets its name."""
    name = os.path.basename(str(args[0])) if event == "open" else ""
    if event == "os.rename" and str(args[1]).endswith(".sbatch"):
        name = "submitted"
    if IS_WORKER and name.endswith(".pdb"):
        note(name)
    act = ACTS.get(name) if IS_WORKER == name.endswith(".pdb") else None
    if act == "dies":
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        ctypes.string_at(0)
    elif act == "eats":
        held = bytearray(os.urandom(1)) * EATEN_BYTES
        time.sleep(EATEN_S)
        del held
    elif act in ("lingers", "deaf"):
        if act == "deaf":
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        linger(name)


with open(f"{HERE}/acts.json") as file:
    ACTS = json.load(file)
IS_WORKER = any("pipeline.engine.worker" in word for word in sys.orig_argv)
sys.addaudithook(misbehave)
'''


@dataclass(frozen=True)
class Project(project.Project):
    """A project whose stages are submitted to the cluster."""

    programs: str = SEARCH_PATH

    def begins(self, *words: str) -> subprocess.Popen[bytes]:
        """Type a command that misbehaves as tasks do, and do not wait for it."""
        known = {**os.environ, "PYTHONPATH": str(self.folder / "mischief")}
        null = subprocess.DEVNULL
        return subprocess.Popen(
            [PIPELINE, *words], cwd=self.folder, env=known, stdout=null, stderr=null, start_new_session=True
        )

    def submits(self, stage: str = "scan", *words: str) -> Run:  # type: ignore[override] - it does not wait
        """Submit a stage to the cluster and return its run."""
        done = self.types("submit", "--stage", stage, "--executor", "slurm", *words)
        assert done.code == 0, done.err
        return self.newest

    @property
    def newest(self) -> Run:
        """The run that was submitted last."""
        return Run(self, runs_in(self.folder / "runs")[-1])

    def has_arrived(self, name: str) -> bool:
        """Say whether a process has come to the file at which it lingers."""
        return (self.folder / "mischief" / "arrived" / name).is_symlink()

    def lingering(self, name: str) -> int:
        """Return the process that lingers at a file."""
        return int((self.folder / "mischief" / "arrived" / name).readlink().name)

    def lets_go(self) -> None:
        """Let all tasks that linger go on."""
        (self.folder / "mischief" / "go").touch()

    def seen(self) -> list[dict[str, Any]]:
        """Return what tasks wrote down when they opened a file; the file's name is `file`."""
        found = []
        for path in (self.folder / "mischief" / "seen").iterdir():
            name = path.name.rpartition("-")[0]
            found.append({"file": name, **json.loads(path.read_text())})
        return found

    def records(self, cache: str = "cache", kinds: Iterable[str] = ("scan", "embed", "graph")) -> project.Records:
        """Return the content of every record that a data set leads to; notes about files may differ."""
        return super().records(cache, kinds)


@dataclass(frozen=True)
class Run:
    """A run on the cluster, as the files in its folder and the verbs tell of it."""

    project: Project
    folder: RunFolder

    @property
    def name(self) -> str:
        return self.folder.name

    def now(self) -> RunStatus:
        """Return how it stands, by its files and the queue."""
        return view(self.folder).status

    def reported(self) -> dict[str, Any]:
        """Return what `pipeline status --json` says."""
        done = self.project.types("status", "--json", self.name)
        assert done.code == 0, done.err
        told: dict[str, Any] = json.loads(done.out)
        return told

    def stage(self, name: str = "scan") -> dict[str, Any]:
        """Return what `pipeline status --json` says of a stage."""
        found: dict[str, Any] = next(one for one in self.reported()["stages"] if one["name"] == name)
        return found

    def ends(self, state: State = State.DONE, timeout_s: float = ENDS_S) -> dict[str, Any]:
        """Wait for its end and return what `pipeline status --json` says."""
        going = (State.WAITING, State.RUNNING, State.ABANDONED)
        until(f"the end of {self.name}", lambda: self.now().state not in going, timeout_s, self.story)
        assert self.now().state is state, self.story()
        return self.reported()

    def arrives_at(self, name: str, timeout_s: float = SOON_S) -> None:
        """Wait until a task lingers at a file."""
        until(f"a task at {name}", lambda: self.project.has_arrived(name), timeout_s, self.story)

    def jobs(self, cluster: Cluster, kind: str = "") -> list[dict[str, str]]:
        """Return what the queue has of its jobs, a row for each task: of a stage, or those that supervise."""
        columns = ("array", "task", "job", "name", "state", "node")
        done = cluster.run("squeue", "-h", "-r", "-o", "%F|%K|%A|%j|%T|%N")
        rows = [dict(zip(columns, line.split("|"), strict=True)) for line in done.stdout.splitlines()]
        return [row for row in rows if row["name"].startswith(f"{self.folder.unique}-{kind}") and row["state"] in LIVE]

    def node_of(self, cluster: Cluster, task: int) -> str:
        """Return the node on which a task of the stage scan runs."""
        (row,) = (row for row in self.jobs(cluster, "scan") if row["task"] == str(task) and row["state"] == "RUNNING")
        return row["node"]

    def story(self) -> str:
        """Return what its supervisors and workers printed, and how it stands."""
        logs = sorted(self.folder.logs.glob("*.[oe]*"), key=lambda path: path.stat().st_mtime)
        texts = [f"--- {path.name}\n{path.read_text(errors='replace')}" for path in logs if path.stat().st_size]
        if self.folder.supervisor_log.exists():
            texts.append(self.folder.supervisor_log.read_text())
        status = json.dumps(self.now().to_json(), indent=1, default=str)
        return "\n".join([*texts, f"--- {self.name}", status])


def make_project(folder: Path, items: int = 4, acts: Mapping[str, str] | None = None, **settings: Any) -> Project:
    """Make a project of small complexes c0.pdb, c1.pdb, ..., whose tasks do some acts at some of them."""
    write_complexes(folder / "data", items, growth=0)
    setup = [_mischief(folder, acts or {}), *settings.pop("cluster__slurm__setup", ())]
    write_config(folder, **{**SMALL, **settings, "cluster__slurm__setup": setup})
    return Project(folder)


def _mischief(folder: Path, acts: Mapping[str, str]) -> str:
    """Write what makes tasks misbehave, and return the shell line that lets it in."""
    place = folder / "mischief"
    for path in (place / "seen", place / "arrived"):
        path.mkdir(parents=True)
    (place / "sitecustomize.py").write_text(MISCHIEF)
    (place / "acts.json").write_text(json.dumps(dict(acts)))
    return f"export PYTHONPATH={place}"


def at_night(request: pytest.FixtureRequest) -> bool:
    """Say whether nightly tests of this module run, for which more is begun."""
    here = [item for item in request.session.items if item.path == request.path]
    return any(item.get_closest_marker("nightly") for item in here)


def strangers(run: Run) -> list[str]:
    """Return the processes that name a run's folder, or have a file in it open, and that Slurm did not start."""
    pids = [int(entry.name) for entry in processes.PROC.iterdir() if entry.name.isdigit()]  # Slurm may start more
    slurms = {
        int(entry.name)
        for entry in processes.PROC.iterdir()
        if entry.name.isdigit() and processes.program(int(entry.name)) in processes.DAEMONS
    }
    ours = slurms | processes.descendants(slurms) | {os.getpid()}
    found = [pid for pid in pids if pid not in ours and processes.is_below(pid, run.folder.path)]
    return [f"{pid} {processes.program(pid)}" for pid in found]


def processes_of(run: Run, module: str = "") -> list[int]:
    """Return the processes of tasks and supervisors of a run, or those that began by a module."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = entry.joinpath("cmdline").read_text(errors="replace").split("\0")
            except OSError:  # gone meanwhile
                continue
            is_it = not module or (any(f"from {module} import" in word for word in words) and "--watch" not in words)
            if is_it and str(run.folder.path) in words and Path(words[0]).name.startswith("python"):
                found.append(int(entry.name))
    return found


def kill(pid: int) -> bool:
    """End a process; say whether it had not ended by itself."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def has_begun(run: Run, stage: str) -> bool:
    """Say whether a task of a stage has begun and has not ended."""
    found = run.now().stages.get(stage)
    return found is not None and any(task.word.started and not task.word.finished for task in found.work.values())
