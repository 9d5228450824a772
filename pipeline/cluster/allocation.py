"""Runs jobs on the nodes of an allocation that exists: Slurm's, PBS's, LSF's, or those of a host file.

On each node runs an agent, which is a local executor (`node_agent.py`). This executor places tasks on nodes with free
cores, GPUs and memory, and hears from the agents how they end. A task of several nodes is one piece on each. When the
allocation is about to end, `step` raises AllocationEnded; when this process dies, the agents end their tasks.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import re
import secrets
import selectors
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.cluster.hosts import HOST, SSH, find_allocation
from pipeline.cluster.job_spec import LEAST, Limits, TaskState, TaskStatus
from pipeline.cluster.local import ORPHANED, make_log_dir
from pipeline.cluster.machine import Machine, Slots, reachable_addresses
from pipeline.cluster.node_agent import MEETING, Link
from pipeline.cluster.refusals import CPUS_ON_NODE, GPUS_ON_NODE, MEM_ON_NODE, refuse_beyond
from pipeline.cluster.verdict import GO_ON, PEER_LOST
from pipeline.codec import plain
from pipeline.command_line import Command
from pipeline.device.kinds import VISIBLE_TO
from pipeline.errors import AllocationEnded, ConfigError, SubmissionRefused
from pipeline.files import replacing
from pipeline.records import NODE
from pipeline.waiting import signals_held

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from pipeline.cluster.hosts import Host
    from pipeline.cluster.job_spec import Job, JobId, Request
    from pipeline.config.schema_cluster import AllocationSection, SlotsSection

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5  # after starters that have ended, and at the clock
START_S = 120.0  # until all agents have come
TRIES = 2  # starts of the agent of a node
ALONE_S = 30.0  # for the other pieces of a task once one has failed: they notice by themselves
END_S = 10.0  # for agents without a task
SHARE_OF_GRACE = 0.75  # that tasks get; then they are killed, while there is time to record it
OF_NODE = re.compile(r"(SLURMD?|SRUN|PBS|LSB|PMIX?|OMPI|FLUX|SSH|XDG|KUBERNETES)_|(HOSTNAME|TMPDIR|PWD)$")


class Node:
    """A node of the allocation and its agent."""

    def __init__(self, number: int, host: Host) -> None:
        self.number, self.host, self.name = number, host, host.name
        self.starts, self.process, self.log = 0, None, Path()
        self.link: Link | None = None
        self.machine: Machine | None = None  # once its agent has come
        self.slots = Slots(Machine(0, (), 0))
        self.process: subprocess.Popen[bytes] | None

    @property
    def is_coming(self) -> bool:
        return self.machine is None and self.process is not None

    def last_words(self) -> str:
        """Return the last line that its starter wrote."""
        lines = self.log.read_text(errors="replace").split("\n") if self.log.is_file() else []
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


@dataclass(eq=False, slots=True)
class AllocatedTask:
    """A task, its state, and what became of its pieces."""

    job_id: JobId
    job: Job
    status: TaskStatus
    pieces: set[int] = field(default_factory=set)  # that have not ended
    ended: list[TaskStatus] = field(default_factory=list)
    alone_until: float | None = None


@dataclass(eq=False, slots=True)
class _WaitingJob:
    """A submitted job."""

    job: Job
    tasks: list[AllocatedTask]
    pending: deque[AllocatedTask]

    @property
    def has_room(self) -> bool:
        """Whether another of its tasks may run at once."""
        most = self.job.max_parallel
        return most is None or sum(bool(task.pieces) for task in self.tasks) < most


class AllocationExecutor:
    """Runs jobs on the nodes of an allocation while it is open."""

    outlives: bool = False
    cluster: str = ""

    def __init__(self, section: AllocationSection, slots: SlotsSection, folder: Path) -> None:
        """Keep what the nodes need to start in a folder that they share with this one."""
        self._section, self._grace_s = section, float(section.grace)
        self._asked = {"cpus": slots.cpus, "gpus": slots.gpus, "mem_bytes": slots.mem}
        self._prefix = f"{secrets.token_hex(4)}."
        self._folder = folder.absolute() / self._prefix[:-1]
        self._nodes: list[Node] = []
        self._ends_at: float | None = None
        self._words = {"token": secrets.token_hex(16), "answer": secrets.token_hex(16)}
        self._jobs: dict[JobId, _WaitingJob] = {}
        self._pieces: dict[int, tuple[AllocatedTask, Node, tuple[str, ...]]] = {}
        self._count = 0  # of pieces so far
        self._changed: dict[AllocatedTask, None] = {}

    @property
    def ends_at(self) -> float | None:
        with suppress(ConfigError):
            return self._ends_at if self._nodes else find_allocation(self._section).ends_at
        return None

    def limits_of(self, request: Request = LEAST) -> Limits:
        try:
            self._open()
        except ConfigError:  # on a login node, where runs are only planned
            return Limits()
        machines = [node.machine for node in self._nodes if node.machine]
        at_once = sum(_tasks_at_once(machine, request) for machine in machines) // request.nodes
        return Limits(max(m.mem_bytes for m in machines), nodes=len(machines), running_tasks=max(1, at_once))

    def room(self) -> int | None:
        return None

    def check(self, job: Job) -> None:
        self._open()
        machines = [node.machine for node in self._nodes if node.machine]
        if job.request.nodes > len(machines):
            what = f"asks for {job.request.nodes} nodes; this allocation has {len(machines)}"
            raise job.refused(what, ("{}.nodes", str(len(machines))))
        most = {
            CPUS_ON_NODE: max(machine.cpus for machine in machines),
            GPUS_ON_NODE: max(len(machine.gpus) for machine in machines),
            MEM_ON_NODE: max(machine.mem_bytes for machine in machines),
        }
        refuse_beyond(job, ((kind, there, "no node of this allocation has more than {}") for kind, there in most.items()))

    def starts(self, job: Job) -> float | None:
        self.check(job)
        return time.time() if self._free_nodes(job) else None

    def submit(self, job: Job) -> JobId:
        self.check(job)
        if tagged := [job_id for job_id, known in self._jobs.items() if job.tag and known.job.tag == job.tag]:
            return tagged[0]
        make_log_dir(job)
        job_id = f"{self._prefix}{len(self._jobs) + 1}"
        known = self._known(job_id, job)
        known.pending += known.tasks
        return job_id

    def adopt(self, job_id: JobId, job: Job) -> None:
        if job_id not in self._jobs:
            for task in self._known(job_id, job).tasks:
                self._end(task, TaskState.NODE_FAIL, ORPHANED)

    def _known(self, job_id: JobId, job: Job) -> _WaitingJob:
        statuses = (TaskStatus(job_id, number, TaskState.PENDING, *job.log_paths(job_id, number)) for number in job.tasks)
        known = self._jobs[job_id] = _WaitingJob(job, [AllocatedTask(job_id, job, status) for status in statuses], deque())
        return known

    def reschedule(self, job_id: JobId, job: Job) -> None:
        """Do nothing: no job here waits for others."""

    def recognize(self, names: Mapping[JobId, str]) -> None:
        """Do nothing: no other program gives numbers to these jobs."""

    def queued(self, jobs: Iterable[JobId]) -> set[JobId]:
        return {task.job for task in self.status(jobs) if not task.state.ended}

    def status(self, jobs: Iterable[JobId]) -> list[TaskStatus]:
        return [task.status for job in jobs if job in self._jobs for task in self._jobs[job].tasks]

    def step(self, timeout_s: float) -> list[TaskStatus]:
        until = time.monotonic() + timeout_s
        self._advance(0)
        while not self._changed and self._pieces and (left_s := until - time.monotonic()) > 0:
            self._advance(left_s)
        if self._ends_at is not None and time.time() > self._ends_at - self._grace_s:
            what = "the allocation is about to end; trainings save their state, and finished work is kept"
            remedy = Command.of("resume", then="   (in the next allocation: submit the same script again)")
            raise AllocationEnded(what, remedy=remedy)
        changed, self._changed = self._changed, {}
        return [task.status for task in changed]

    def cancel(self, jobs: Iterable[JobId], tasks: Collection[int] | None = None) -> None:
        for known in [self._jobs[job] for job in jobs if job in self._jobs]:
            for task in [task for task in known.tasks if tasks is None or task.status.task in tasks]:
                self._stop(task)
                if task in known.pending:
                    known.pending.remove(task)
                    self._end(task, TaskState.CANCELLED, "cancelled")
        self._advance(0)

    def close(self) -> None:
        """End every task, after its grace; an exception on the way (a second Ctrl-C) takes the grace away."""
        if not self._nodes:
            return
        until = time.monotonic() + self._grace_s
        try:
            self.cancel(self._jobs)
            while self._pieces and time.monotonic() < until:
                self._advance(until - time.monotonic())
        finally:
            for node in self._nodes:
                self._hang_up(node)
            for node in self._nodes:
                self._let_go(node)
            self._nodes = []
            self._listener.close()
            self._events.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> AllocationExecutor:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Nodes

    def _open(self) -> None:
        """Start the agents, and wait until those that can come have come."""
        if self._nodes:
            return
        allocation = find_allocation(self._section)
        self._folder.mkdir(parents=True, mode=0o700)
        self._events = selectors.DefaultSelector()
        self._start_words, self._ends_at = allocation.start, allocation.ends_at
        self._listener = socket.create_server(("", 0), backlog=len(allocation.hosts))
        self._events.register(self._listener, selectors.EVENT_READ, self._admit)
        with replacing(self._folder / MEETING) as partial:
            port = self._listener.getsockname()[1]
            partial.write_text(json.dumps({**self._words, "addresses": reachable_addresses(), "port": port}))
        self._nodes = [Node(number, host) for number, host in enumerate(allocation.hosts)]
        for node in self._nodes:
            self._start_agent(node)
        until = time.monotonic() + START_S
        while any(node.is_coming for node in self._nodes) and (left_s := until - time.monotonic()) > 0:
            self._advance(left_s)
        if not any(node.machine for node in self._nodes):
            first = self._nodes[0]
            what = f"no node of this allocation could start a program; {first.name}: {first.last_words() or 'no answer'}"
            typed = shlex.join(word.replace(HOST, first.name) for word in (*self._start_words, "hostname"))
            self._nodes = []
            raise SubmissionRefused(what, where="cluster.allocation", remedy=typed)

    def _start_agent(self, node: Node) -> None:
        """Start the agent of a node; its words are plain, whatever a shell on the way makes of them."""
        code = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); from pathlib import Path; "
        code += "from pipeline.cluster.node_agent import main; main(Path(sys.argv[1]), int(sys.argv[2]))"
        libraries = shlex.quote(os.environ.get("LD_LIBRARY_PATH", ""))
        program = shlex.join([sys.executable, "-c", code, str(self._folder)])
        script = self._folder / "agent.sh"
        script.write_text(f"export LD_LIBRARY_PATH={libraries}\nexec {program} $1\n")
        place = shlex.quote(str(script)) if self._start_words == SSH else str(script)
        words = [word.replace(HOST, node.name) for word in self._start_words]
        node.starts, node.log = node.starts + 1, self._folder / f"node-{node.number}.log"
        with node.log.open("ab") as output:
            try:
                node.process = subprocess.Popen(
                    [*words, "/bin/sh", place, str(node.number)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            except OSError as error:
                output.write(f"{words[0]}: {error.strerror}\n".encode())

    def _admit(self) -> None:
        """Let a connection speak: an agent shows its word and its number."""
        connection, _address = self._listener.accept()
        link = Link(connection)
        self._events.register(link, selectors.EVENT_READ, lambda: self._greet(link))

    def _greet(self, link: Link) -> None:
        """Make a connection that of a node, or close it."""
        try:
            greeting = link.next(0)
            node = self._nodes[greeting["node"]]
            is_ours = hmac.compare_digest(str(greeting["token"]).encode(), self._words["token"].encode())
        except (OSError, ValueError, KeyError, IndexError, TypeError):
            is_ours = False
        self._events.unregister(link)
        if not is_ours:
            link.close()
            return
        node.link = link
        self._events.register(link, selectors.EVENT_READ, lambda: self._hear(node))
        own = {"cpus": node.host.cpus, "gpus": node.host.gpus, "mem_bytes": None}
        machine = {name: own[name] if value == "auto" else value for name, value in self._asked.items()}
        kept = {name: value for name, value in os.environ.items() if not OF_NODE.match(name) and name not in VISIBLE_TO}
        grace_s = SHARE_OF_GRACE * self._grace_s
        self._send(node, answer=self._words["answer"], machine=machine, env=kept, cwd=str(Path.cwd()), grace_s=grace_s)

    def _hear(self, node: Node) -> None:
        """Take in what an agent says."""
        try:
            messages = node.link.receive() if node.link else []
        except (OSError, ValueError) as error:
            self._lose(node, str(error))
            return
        for message in messages:
            if "cpus" in message:
                gpus = tuple(map(str, range(message["gpus"])))
                node.machine = Machine(message["cpus"], gpus, message["mem_bytes"])
                node.slots = Slots(node.machine)
            elif message["piece"] in self._pieces:
                self._note(message["piece"], TaskStatus(**{**message["status"], "state": TaskState(message["status"]["state"])}))

    def _send(self, node: Node, **message: Any) -> None:
        try:
            if node.link is not None:
                node.link.send(**message)
        except OSError as error:
            self._lose(node, str(error))

    def _lose(self, node: Node, why: str) -> None:
        """End the pieces of a node whose agent is gone, and start the agent once more."""
        why = node.last_words() or why
        log.warning("node %s is lost: %s", node.name, why)
        self._let_go(node)
        for number in [number for number, (_, at, _) in self._pieces.items() if at is node]:
            task = self._pieces[number][0]
            self._note(number, replace(task.status, state=TaskState.NODE_FAIL, ended=time.time(), reason=why))
        if node.starts < TRIES:
            self._start_agent(node)

    def _let_go(self, node: Node) -> None:
        """Close the connection to an agent, which then ends, and its starter with it."""
        self._hang_up(node)
        if node.process is not None:
            try:
                node.process.wait(END_S)
            except subprocess.TimeoutExpired:
                node.process.kill()
                node.process.wait()
        node.machine = node.process = None

    def _hang_up(self, node: Node) -> None:
        if node.link is not None:
            self._events.unregister(node.link)
            node.link.close()
            node.link = None

    # Tasks

    def _advance(self, timeout_s: float) -> None:
        """Wait for news of the nodes, and start what can start."""
        if not self._nodes:
            return
        with signals_held():
            self._start_waiting()
        events = self._events.select(0 if self._changed else min(timeout_s, LOOK_EVERY_S))
        with signals_held():
            for key, _ in events:
                key.data()
            for node in self._nodes:
                if node.process is not None and node.process.poll() is not None:
                    self._lose(node, f"its starter ended with exit code {node.process.returncode}")
            for task in {task for task, _, _ in self._pieces.values()}:
                if task.alone_until is not None and time.monotonic() > task.alone_until:
                    self._stop(task)
            self._start_waiting()

    def _start_waiting(self) -> None:
        """Start the tasks for which there is room; fail those for which no node is left."""
        for known in self._jobs.values():
            job = known.job
            while known.pending and known.has_room and (nodes := self._free_nodes(job)):
                self._start(known.pending.popleft(), nodes)
            if known.pending and not self._pieces and not any(node.is_coming for node in self._nodes):
                for task in known.pending:
                    self._end(task, TaskState.NODE_FAIL, "too few nodes of the allocation are left")
                known.pending.clear()

    def _free_nodes(self, job: Job) -> list[Node]:
        """Return the nodes that a task would start on now, the least busy; none where there is no room."""
        busy = [node.number for _, node, _ in self._pieces.values()]
        free = [node for node in self._nodes if node.machine and node.slots.fit(job.request)]
        wanted = [node for node in free if node.name not in job.exclude]
        wanted.sort(key=lambda node: busy.count(node.number))
        return wanted[: job.request.nodes] if len(wanted) >= job.request.nodes else []

    def _start(self, task: AllocatedTask, nodes: list[Node]) -> None:
        """Send a task to nodes, a piece to each."""
        job, request, number = task.job, task.job.request, task.status.task
        stem = task.status.stdout.removesuffix(".out")
        pieces = range(self._count + 1, self._count + 1 + len(nodes))
        self._count += len(nodes)
        for piece, node in zip(pieces, nodes, strict=True):
            self._pieces[piece] = task, node, node.slots.take(request)
        task.pieces.update(pieces)
        for index, (piece, node) in enumerate(zip(pieces, nodes, strict=True)):
            place = {NODE: f"{index}/{len(nodes)} {task.job_id}_{number}"} if len(nodes) > 1 else {}
            own = replace(
                job,
                tasks=(number,),
                request=replace(request, nodes=1),
                env={**job.env, **place},
                log_stem=f"{stem}-{index}" if index else stem,
                tag="",
                max_parallel=None,
            )
            self._send(node, piece=piece, job=plain(own))

    def _stop(self, task: AllocatedTask) -> None:
        """Ask the agents to end the pieces of a task that have not ended."""
        for number in [*task.pieces]:
            if number in self._pieces:  # it may be on a node that is lost by now
                self._send(self._pieces[number][1], cancel=[number])

    def _note(self, number: int, status: TaskStatus) -> None:
        """Take in the state of a piece; the task has ended when all of its pieces have."""
        task, node, gpus = self._pieces[number]
        status = replace(status, job=task.job_id, task=task.status.task, node=node.name)
        if not status.state.ended:
            if task.status.state is TaskState.PENDING:
                task.status = replace(status, stdout=task.status.stdout, stderr=task.status.stderr)
                self._changed[task] = None
            return
        del self._pieces[number]
        task.pieces.remove(number)
        if node.machine is not None:
            node.slots.give_back(task.job.request, gpus)
        task.ended.append(status)
        if not task.pieces:
            task.status = _whole(task.ended, task.status)
            self._changed[task] = None
        elif not status.state.ok and status.exit_code != GO_ON:
            task.alone_until = task.alone_until or time.monotonic() + ALONE_S

    def _end(self, task: AllocatedTask, state: TaskState, reason: str) -> None:
        """Record the end of a task that does not run."""
        task.status = replace(task.status, state=state, reason=reason, ended=time.time())
        self._changed[task] = None


def _whole(ended: list[TaskStatus], task: TaskStatus) -> TaskStatus:
    """Return the state of a task by its pieces: of the first that failed by its own fault, or that all did well."""
    failed = sorted((piece for piece in ended if not piece.state.ok), key=lambda piece: piece.exit_code == PEER_LOST)
    first = next((piece for piece in ended if piece.stdout == task.stdout), ended[0])
    return replace(
        failed[0] if failed else first,
        started=task.started,
        peak_rss_bytes=max((piece.peak_rss_bytes or 0 for piece in ended), default=0) or None,
        cpu_s=sum(piece.cpu_s or 0.0 for piece in ended),
    )


def _tasks_at_once(machine: Machine, request: Request) -> int:
    """Return how many tasks, or pieces of tasks, a node can run at once."""
    shares = [machine.cpus // request.cpus_on_node]
    shares += [len(machine.gpus) // request.gpus] if request.gpus else []
    shares += [machine.mem_bytes // request.mem_bytes] if request.mem_bytes else []
    return min(shares)
