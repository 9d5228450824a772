"""Runs jobs on the nodes of an existing allocation (Slurm, PBS or LSF) or of a host file.

Each node runs an agent (`node_agent.py`), which starts the tasks that this executor sends and reports their ends. When
the allocation is about to end, `step` raises AllocationEnded; when this process dies, the agents end their tasks.
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
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.cluster.hosts import HOST, SSH, find_allocation
from pipeline.cluster.job_spec import LEAST, Limits, TaskState, TaskStatus
from pipeline.cluster.machine import Machine, reachable_addresses
from pipeline.cluster.node_agent import MEETING, Link
from pipeline.cluster.placing import Node, PlacingExecutor
from pipeline.codec import plain
from pipeline.command_line import Command
from pipeline.device.kinds import VISIBLE_TO
from pipeline.errors import AllocationEnded, ConfigError, SubmissionRefused
from pipeline.files import replacing
from pipeline.records import SEVERAL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.cluster.hosts import Host
    from pipeline.cluster.job_spec import Job, Request
    from pipeline.config.schema_cluster import AllocationSection, SlotsSection

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5  # how often to look for ended starters
START_S = 120.0  # longest wait for all agents
TRIES = 2  # attempts to start the agent of a node
END_S = 10.0  # grace of agents without a task
SHARE_OF_GRACE = 0.75  # grace of tasks before they are killed, with time left to record it
OF_NODE = re.compile(r"(SLURMD?|SRUN|PBS|LSB|PMIX?|OMPI|FLUX|SSH|XDG|KUBERNETES)_|(HOSTNAME|TMPDIR|PWD)$")


class AgentNode(Node):
    """A node of the allocation, the process that has started its agent, and the connection to the agent."""

    process: subprocess.Popen[bytes] | None = None
    link: Link | None = None
    starts = 0

    def __init__(self, number: int, host: Host, log: Path) -> None:
        super().__init__(host.name)
        self.number, self.host, self.log = number, host, log

    @property
    def is_coming(self) -> bool:
        return self.process is not None and self.machine is None

    def start(self, piece: int, job: Job, gpus: tuple[str, ...]) -> None:
        self.send(piece=piece, job=plain(job), gpus=gpus)

    def stop(self, piece: int) -> None:
        self.send(stop=piece)

    def send(self, **message: Any) -> None:
        """Send a message; a connection that is gone is also noticed when it is read."""
        if self.link is not None:
            with suppress(OSError):
                self.link.send(**message)

    def start_agent(self, command: Sequence[str]) -> None:
        """Run the command that starts its agent; log its output."""
        self.starts += 1
        with self.log.open("ab") as output:
            try:
                null = subprocess.DEVNULL
                self.process = subprocess.Popen(
                    command, stdin=null, stdout=output, stderr=output, start_new_session=True
                )
            except OSError as error:
                output.write(f"{command[0]}: {error.strerror}\n".encode())

    def hang_up(self) -> None:
        """Close the connection to the agent, which then ends, and its starter with it."""
        if self.link is not None:
            self.link.close()
        self.link = None
        self.lend(None)

    def wait(self) -> None:
        """Wait until the starter has ended."""
        if self.process is not None:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(END_S)
            self.process.kill()
            self.process.wait()
        self.process = None

    def last_words(self) -> str:
        """Return the last line that its starter wrote."""
        lines = self.log.read_text(errors="replace").split("\n") if self.log.is_file() else []
        return next((line.strip() for line in reversed(lines) if line.strip()), "no answer")


class AllocationExecutor(PlacingExecutor):
    """Runs jobs on the nodes of an allocation."""

    holder = "no node of this allocation has more than {}"

    def __init__(self, section: AllocationSection, slots: SlotsSection, folder: Path) -> None:
        """Prepare the folder from which the nodes' agents read how to connect."""
        super().__init__()
        self._section, self._slots, self._grace_s = section, slots, float(section.grace)
        self._folder = folder.absolute() / self._prefix[:-1]
        self._agents: list[AgentNode] = []
        self._words = {"token": secrets.token_hex(16), "answer": secrets.token_hex(16)}

    @property
    def ends_at(self) -> float | None:
        with suppress(ConfigError):
            return self._allocation.ends_at if self._agents else find_allocation(self._section).ends_at
        return None

    def limits_of(self, request: Request = LEAST) -> Limits:
        try:
            self._open()
        except ConfigError:  # on a login node runs are only planned
            return Limits()
        return super().limits_of(request)

    def check(self, job: Job) -> None:
        self._open()
        super().check(job)

    def step(self, timeout_s: float) -> list[TaskStatus]:
        changed = super().step(timeout_s)
        if self._agents and (ends_at := self.ends_at) is not None and time.time() > ends_at - self._grace_s:
            what = "the allocation is about to end; trainings save their state, and finished work is kept"
            remedy = Command.of("resume", then="   (in the next allocation: submit the same script again)")
            raise AllocationEnded(what, remedy=remedy)
        return changed

    def close(self) -> None:
        until = time.monotonic() + self._grace_s
        try:
            self.cancel(self._jobs)
            while self._pieces and (left_s := until - time.monotonic()) > 0:
                self._advance(left_s)
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """End the agents."""
        for node in self._agents:
            node.hang_up()
        for node in self._agents:
            node.wait()
        if self._agents:
            self._listener.close()
            self._events.close()
            shutil.rmtree(self._folder, ignore_errors=True)
        self._agents, self._nodes = [], []

    def _open(self) -> None:
        """Start the agents and wait for them; give up those that are late."""
        if not self._agents:
            self._start_agents()
        until = time.monotonic() + START_S
        while (coming := [node for node in self._agents if node.is_coming]) and time.monotonic() < until:
            self._await(LOOK_EVERY_S)
            self._watch()
        for node in coming:
            node.wait()
        if not self.machines:
            first = self._agents[0]
            what = f"no node of this allocation could start a program; {first.name}: {first.last_words()}"
            typed = shlex.join(word.replace(HOST, first.name) for word in (*self._allocation.start, "hostname"))
            self._let_go()
            raise SubmissionRefused(what, where="cluster.allocation", remedy=typed)

    def _start_agents(self) -> None:
        self._allocation = find_allocation(self._section)
        self._folder.mkdir(parents=True, mode=0o700)
        self._events = selectors.DefaultSelector()
        self._listener = socket.create_server(("", 0), backlog=len(self._allocation.hosts))
        self._events.register(self._listener, selectors.EVENT_READ, self._admit)
        with replacing(self._folder / MEETING) as partial:
            port = self._listener.getsockname()[1]
            partial.write_text(json.dumps({**self._words, "addresses": reachable_addresses(), "port": port}))
        hosts = enumerate(self._allocation.hosts)
        self._agents = [AgentNode(number, host, self._folder / f"node-{number}.log") for number, host in hosts]
        self._nodes = [*self._agents]
        for node in self._agents:
            node.start_agent(self._command(node))

    def _command(self, node: AgentNode) -> list[str]:
        """Return the command that starts an agent; its words need no quotes, as ssh may pass them to a shell."""
        code = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); from pathlib import Path; "
        code += "from pipeline.cluster.node_agent import main; main(Path(sys.argv[1]), int(sys.argv[2]))"
        libraries = shlex.quote(os.environ.get("LD_LIBRARY_PATH", ""))
        script = self._folder / "agent.sh"
        program = shlex.join([sys.executable, "-c", code, str(self._folder)])
        script.write_text(f"export LD_LIBRARY_PATH={libraries}\nexec {program} $1\n")
        start = self._allocation.start
        place = shlex.quote(str(script)) if start == SSH else str(script)
        return [*(word.replace(HOST, node.name) for word in start), "/bin/sh", place, str(node.number)]

    def _await(self, timeout_s: float) -> None:
        if self._agents:
            self._events.select(min(timeout_s, LOOK_EVERY_S))

    def _watch(self) -> None:
        """Read the agents' messages; end the tasks of a lost node, and restart its agent once."""
        for key, _ in self._events.select(0) if self._agents else ():
            key.data()
        for node in self._agents:
            if node.link is None and node.process is not None and node.process.poll() is not None:
                self._lose(node)  # else only its starter has ended, such as an idle ssh connection
        waits = bool(self._waiting) and not self._pieces
        if waits and self._agents and not any(node.is_coming for node in self._agents):
            self._fail_hopeless()

    def _admit(self) -> None:
        """Accept a connection."""
        link = Link(self._listener.accept()[0])
        self._events.register(link, selectors.EVENT_READ, lambda: self._greet(link))

    def _greet(self, link: Link) -> None:
        """Assign a connection to a node if it shows the right word, else close it."""
        self._events.unregister(link)
        try:
            greeting = link.next(0)
            node = self._agents[greeting["node"]]
            is_ours = hmac.compare_digest(greeting["token"].encode(), self._words["token"].encode()) and not node.link
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            is_ours = False
        if not is_ours:
            link.close()
            return
        node.link = link
        self._events.register(link, selectors.EVENT_READ, lambda: self._hear(node))
        own = {"cpus": node.host.cpus, "gpus": node.host.gpus, "mem_bytes": None}
        asked = {"cpus": self._slots.cpus, "gpus": self._slots.gpus, "mem_bytes": self._slots.mem}
        machine = {name: own[name] if value == "auto" else value for name, value in asked.items()}
        env = {name: value for name, value in os.environ.items() if not OF_NODE.match(name) and name not in VISIBLE_TO}
        if len(self._agents) > 1:
            env[SEVERAL] = str(len(self._agents))
        first = {"answer": self._words["answer"], "machine": machine, "env": env, "cwd": str(Path.cwd())}
        node.send(**first, grace_s=SHARE_OF_GRACE * self._grace_s)

    def _hear(self, node: AgentNode) -> None:
        """Process messages of an agent: first the resources of its node, then the states of pieces."""
        try:
            messages = node.link.receive() if node.link else []
        except (OSError, ValueError):
            self._lose(node)
            return
        for message in messages:
            if "piece" in message:
                status = message["status"]
                self._note(message["piece"], TaskStatus(**{**status, "state": TaskState(status["state"])}))
            else:
                node.lend(Machine(message["cpus"], tuple(message["gpus"]), message["mem_bytes"]))

    def _lose(self, node: AgentNode) -> None:
        """End the pieces of a node whose agent is gone, and restart the agent once."""
        if node.link is not None:
            self._events.unregister(node.link)
        for piece, (task, at, _) in list(self._pieces.items()):
            if at is node:
                gone = replace(task.status, state=TaskState.NODE_FAIL, ended=time.time(), reason=node.last_words())
                self._note(piece, gone)
        node.hang_up()
        node.wait()
        log.warning("node %s is lost: %s", node.name, node.last_words())
        if node.starts < TRIES:
            node.start_agent(self._command(node))

    def _fail_hopeless(self) -> None:
        """End the pending tasks for which too few nodes are left."""
        for waiting in self._waiting:
            if not self._free_nodes(waiting.job):
                for task in waiting.pending:
                    self._end(task, TaskState.NODE_FAIL, "too few nodes of the allocation are left")
                waiting.pending.clear()
