"""A real Slurm cluster on one machine: started, broken on purpose, mended and removed."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.testkit.cluster import accounts, cgroups, processes
from tests.testkit.cluster.config import GPUS_PER_NODE, Plan, files

DEFAULT_FOLDER = Path("/var/lib/pipeline-slurm")  # not below /tmp: munge refuses a socket where anybody may write
NODE_COUNT = 3
FIRST_PORT = 17000
SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
COMMANDS = ("slurmctld", "slurmd", "slurmdbd", "sbatch", "sacctmgr", "munged", "mariadbd", "mariadb-install-db")
START_TIMEOUT_S = 120.0
COMMAND_TIMEOUT_S = 30.0
POLL_S = 0.05


class ClusterBroken(Exception):
    """The test cluster could not be brought to where it was wanted."""


def why_not() -> str | None:
    """Return why a cluster cannot run on this machine; None if it can."""
    if not sys.platform.startswith("linux"):
        return "Slurm runs on Linux"
    if os.geteuid() != 0:
        return "the test cluster needs root (cgroups, jobs of users)"
    missing = [name for name in COMMANDS if shutil.which(name, path=SEARCH_PATH) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (`make slurm-packages` installs them on Debian)"
    return None


class Cluster:
    """One cluster in one folder; every object made for the folder sees and steers the same cluster.

    Several may live on a machine: the last word of a folder's name keeps the names of their nodes, and so their
    cgroups, apart. `/var/lib/pipeline-slurm` has n1, n2, n3; `/var/lib/pipeline-slurm-mine` has mine-n1, ...
    """

    def __init__(self, folder: Path = DEFAULT_FOLDER) -> None:
        self.folder = folder.resolve()
        prefix = "" if self.folder == DEFAULT_FOLDER else f"{self.folder.name.rpartition('-')[2]}-"
        self.nodes = tuple(f"{prefix}n{number}" for number in range(1, NODE_COUNT + 1))
        self.conf = self.folder / "etc" / "slurm.conf"

    def env(self) -> dict[str, str]:
        """Return what to add to the environment of whoever types Slurm commands."""
        return {"SLURM_CONF": str(self.conf)}

    def is_healthy(self) -> bool:
        """Say whether every daemon lives and every node serves."""
        return self._living() >= {"munged", "mariadbd", "slurmdbd", "slurmctld", "slurmd"} and self._nodes_serve()

    def is_running(self) -> bool:
        """Say whether any process of the cluster lives."""
        return bool(processes.daemons(self.folder))

    def start(self) -> None:
        """Bring the cluster up: at once if it is, with its jobs kept if that can be, else from nothing."""
        with self._lock():
            if self.is_healthy() or self._mend():
                return
            self._end_everything()
            self._empty_folder()
            with _alone_in(self.folder.parent):
                self._start_everything()

    def stop(self) -> None:
        """End every process of the cluster and remove all that it left."""
        with self._lock():
            self._end_everything()
            shutil.rmtree(self.folder)

    def kill_node(self, node: str) -> None:
        """Let a node die: its daemon, its step daemons, then its jobs, before any of them can report."""
        self._end("slurmd", node)
        steps = self._pids("slurmstepd", node)
        jobs = self._jobs(node, steps)
        self._end("slurmstepd", node)
        cgroups.thaw(node)
        while jobs:
            for pid, start in jobs.items():
                processes.end(pid, signal.SIGKILL, partial(_has_started, start))
            jobs = self._jobs(node, set())

    def revive_node(self, node: str) -> None:
        """Start a dead node's daemon and wait until the controller sends it jobs again."""
        if not self._pids("slurmd", node):
            self._spawn(f"slurmd.{node}", [_path("slurmd"), "-D", "-N", node, "-f", self.conf])
        self.until(lambda: self._serves(node), f"node {node} to serve")

    def start_controller(self) -> None:
        """Start slurmctld and wait until it answers."""
        if not self._pids("slurmctld"):
            self._spawn("slurmctld", [_path("slurmctld"), "-D", "-f", self.conf])
        living = [node for node in self.nodes if self._pids("slurmd", node)]
        self.until(lambda: all(self._serves(node) for node in living), "slurmctld to answer and to know its nodes")

    def stop_controller(self) -> None:
        """End slurmctld; jobs run on."""
        self._end("slurmctld", number=signal.SIGTERM)

    def lose_state(self) -> None:
        """Have the controller lose its state, as with a broken disk: it knows no job, and numbers again from 1."""
        self.stop_controller()
        shutil.rmtree(self.folder / "state")
        (self.folder / "state").mkdir()
        self.start_controller()

    def start_accounting(self) -> None:
        """Start slurmdbd and wait until it answers."""
        if not self._pids("slurmdbd"):
            self._spawn("slurmdbd", [_path("slurmdbd"), "-D"])
        self.until(lambda: self.run("sacctmgr", "-n", "list", "cluster").returncode == 0, "slurmdbd to answer")

    def stop_accounting(self) -> None:
        """End slurmdbd; the controller keeps what it would have told."""
        self._end("slurmdbd", number=signal.SIGTERM)

    def node_states(self) -> dict[str, str]:
        """Return what the controller says of each node, in lower case: idle, mixed, down*."""
        lines = self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%N %T").stdout.splitlines()
        return dict(line.split() for line in lines)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Type a Slurm command on this cluster; one that hangs ends with code 124."""
        environment = {**os.environ, "PATH": f"{SEARCH_PATH}:{os.environ.get('PATH', '')}", **self.env()}
        try:
            return subprocess.run(
                command, env=environment, text=True, capture_output=True, timeout=COMMAND_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 124, "", f"no answer after {COMMAND_TIMEOUT_S:.0f} s")

    def settle(self, *, alone: bool = True) -> None:
        """Mend what a test broke and remove what it left: no jobs, every node idle; jobs stay unless it was alone."""
        self.start()
        if alone:
            self._cancel_all()
        for node, state in self.node_states().items():
            if state.startswith("drain"):
                self.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
        wanted = {"idle"} if alone else {"idle", "mixed", "allocated", "completing"}
        self.until(lambda: {*self.node_states().values()} <= wanted, f"all nodes to be {' or '.join(sorted(wanted))}")

    def until(self, condition: Callable[[], bool], what: str, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait for something to become true."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise ClusterBroken(f"waited {timeout_s:.0f} s in vain for {what}; the logs are in {self.folder}/log")
            time.sleep(POLL_S)

    def _cancel_all(self) -> None:
        """Cancel until nothing is left: a job may put itself back in the queue when it is told to end."""

        def is_empty() -> bool:
            listed = self.run("squeue", "-h", "-o", "%A")
            if jobs := set(listed.stdout.split()):
                self.run("scancel", *jobs)
            return listed.returncode == 0 and not jobs

        self.until(is_empty, "all jobs to be gone")

    def _mend(self) -> bool:
        """Start what is missing as long as the ground it stands on is there; say whether that was enough."""
        if not self.conf.exists() or not self._living() >= {"munged", "mariadbd"}:
            return False
        try:
            self.start_accounting()
            self.start_controller()
            for node in self.nodes:
                self.revive_node(node)
        except ClusterBroken:
            return False
        return True

    def _start_everything(self) -> None:
        host = socket.gethostname().partition(".")[0]
        port = _free_ports(2 + len(self.nodes))
        plan = Plan(self.folder, self.folder.name, self.nodes, host, port, cgroups.detect())
        self._lay_out(plan)
        self._start_munge(plan)
        self._start_database(plan)
        self.start_accounting()
        accounts.register(self.run, plan.name)
        self.start_controller()
        for node in self.nodes:
            self._spawn(f"slurmd.{node}", [_path("slurmd"), "-D", "-N", node, "-f", self.conf])
        self.until(self._nodes_serve, "all nodes to serve")

    def _lay_out(self, plan: Plan) -> None:
        self.folder.chmod(0o755)
        for name in ("etc", "run", "log", "state", "dev", "spool", *(f"spool/{node}" for node in self.nodes)):
            folder = self.folder / name
            folder.mkdir()
            folder.chmod(0o755)  # whatever the umask: munge refuses a folder that others may write, or cannot enter
        for index in range(GPUS_PER_NODE):
            (self.folder / "dev" / f"fakegpu{index}").symlink_to("/dev/null")
        for name, text in files(plan).items():
            path = self.folder / "etc" / name
            path.write_text(text)
            path.chmod(0o600 if name == "slurmdbd.conf" else 0o644)

    def _start_munge(self, plan: Plan) -> None:
        key = self.folder / "etc" / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        run, log = self.folder / "run", self.folder / "log"
        places = {"socket": plan.munge_socket, "key-file": key, "pid-file": run / "munged.pid"}
        places |= {"seed-file": run / "munged.seed", "log-file": log / "munge.log"}
        options = [f"--{name}={place}" for name, place in places.items()]
        self._spawn("munged", [_path("munged"), "--foreground", *options])
        self.until(lambda: _listens(plan.munge_socket), "munged to answer")

    def _start_database(self, plan: Plan) -> None:
        data, run = self.folder / "database", self.folder / "run"
        options = [f"--datadir={data}", "--user=root", "--skip-test-db", "--auth-root-authentication-method=normal"]
        command = [_path("mariadb-install-db"), "--no-defaults", "--skip-name-resolve", *options]
        subprocess.run(command, check=True, capture_output=True, env={"PATH": SEARCH_PATH})
        data.chmod(0o700)  # the database knows no password: this folder and the socket's owner are its lock
        options = [f"--datadir={data}", "--user=root", f"--socket={plan.database_socket}", f"--pid-file={run}/db.pid"]
        options += ["--skip-networking", "--skip-log-bin", "--innodb-flush-log-at-trx-commit=0"]
        options += ["--innodb-lock-wait-timeout=900", "--skip-innodb-doublewrite", "--innodb-flush-method=nosync"]
        self._spawn("mariadbd", [_path("mariadbd"), "--no-defaults", *options])
        self.until(lambda: _listens(plan.database_socket), "mariadbd to answer")
        plan.database_socket.chmod(0o600)

    def _end_everything(self) -> None:
        """End the controller first, so that nothing is started behind us, and the database last."""
        self._end("slurmctld")
        for node in self.nodes:
            self.kill_node(node)
        for program in ("slurmdbd", "munged", "mariadbd", "mysqld"):
            self._end(program)
        for node in self.nodes:
            cgroups.remove(node)

    def _empty_folder(self) -> None:
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def _spawn(self, daemon: str, command: Sequence[str | Path]) -> None:
        socket_name = str(self.folder / "run" / "database.socket")
        environment = {"PATH": SEARCH_PATH, "MYSQL_UNIX_PORT": socket_name, "LANG": "C.UTF-8", **self.env()}
        processes.spawn(command, environment, self.folder / "log" / f"{daemon}.out")

    def _end(self, program: str, node: str | None = None, number: signal.Signals = signal.SIGKILL) -> None:
        """End parents before their children: slurmctld waits for ever for a child that was ended behind its back."""
        while pids := self._pids(program, node):
            for pid in pids - processes.descendants(pids):
                processes.end(pid, number, self._is_ours)

    def _jobs(self, node: str, steps: set[int]) -> dict[int, str]:
        """Return a node's job processes: process id → when it was started."""
        pids = (processes.descendants(steps) | cgroups.node_pids(node)) - steps
        return {pid: start for pid in pids if (start := processes.started(pid))}

    def _is_ours(self, pid: int) -> bool:
        return processes.program(pid) in processes.DAEMONS and processes.is_below(pid, self.folder)

    def _pids(self, program: str, node: str | None = None) -> set[int]:
        living = processes.daemons(self.folder)
        log = self.folder / "log" / f"slurmd.{node}.log"
        return {pid for pid, name in living.items() if name == program and (node is None or processes.holds(pid, log))}

    def _living(self) -> set[str]:
        return {name.replace("mysqld", "mariadbd") for name in processes.daemons(self.folder).values()}

    def _nodes_serve(self) -> bool:
        return all(self._serves(node) for node in self.nodes)

    def _serves(self, node: str) -> bool:
        states = self.node_states()
        return states.get(node, "") in ("idle", "mixed", "allocated", "completing") and bool(self._pids("slurmd", node))

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Let one at a time start or stop; the folder is its own lock, so nothing is left beside it."""
        while True:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o755)
            handle = os.open(self.folder, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)
                if _is_same(handle, self.folder):  # whoever had it may have removed the folder
                    yield
                    return
            finally:
                os.close(handle)


def _path(command: str) -> str:
    found = shutil.which(command, path=SEARCH_PATH)
    if found is None:
        raise ClusterBroken(f"{command} is not installed")
    return found


def _has_started(start: str, pid: int) -> bool:
    return processes.started(pid) == start


def _is_same(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as end:
        return end.connect_ex(str(path)) == 0


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Let one cluster at a time begin: two look for free ports, and make their databases, in each other's way."""
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _free_ports(count: int) -> int:
    """Return the first of so many ports in a row that nobody listens on."""
    for first in range(FIRST_PORT, FIRST_PORT + 3000, 20):
        if all(_is_free(first + offset) for offset in range(count)):
            return first
    raise ClusterBroken(f"no {count} free ports in a row above {FIRST_PORT}")


def _is_free(port: int) -> bool:
    with socket.socket() as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            end.bind(("", port))
        except OSError:
            return False
    return True


def exports(environment: Mapping[str, str]) -> str:
    """Return the lines a shell evaluates to use the cluster."""
    return "\n".join(f"export {name}={value}" for name, value in environment.items())
