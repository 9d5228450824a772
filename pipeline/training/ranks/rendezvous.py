"""How ranks that were started apart find each other, on a node that others use too.

Rank 0 lets the kernel pick a port, and writes where it is, with two random words, into a file of the run that is named
after this very start of the ranks. The others look for the file, connect, say the first word and expect the second: a
file that was left behind, and whoever has its port now, is never joined.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import selectors
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.errors import ConfigError, JobFailed
from pipeline.training.ranks.json_connection import JsonConnection

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

COME_WITHIN_S = 300.0  # all ranks; a node may boot a container first
LOOK_EVERY_S = (0.02, 1.0)  # at first, and at last
CONNECT_WITHIN_S = 5.0
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class RankPlace:
    """Which rank this process is, and of which start."""

    rank: int
    world: int
    local_rank: int = 0  # among those of its node
    nodes: int = 1
    meeting: str = ""  # the name of this start: no other of the same run has it
    host: str = field(default_factory=socket.gethostname)

    @classmethod
    def told(cls, part: str, meeting: str) -> RankPlace:
        """Return what our launcher says: `1/3`, all on this node, and a name for the start."""
        rank, _, world = part.partition("/")
        if not (rank.isdigit() and world.isdigit() and int(rank) < int(world)):
            raise ConfigError(f"`{part}` is not a rank and how many there are", remedy="say it as in 0/2")
        return cls(int(rank), int(world), int(rank), 1, meeting)

    @classmethod
    def by_slurm(cls, environment: Mapping[str, str], attempt: int = 1) -> RankPlace | None:
        """Return what srun says, if this is a task of a step of several.

        The words of a step are read, not those of the job: these reach processes that no srun has started.
        """
        world = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
        if world == 1 or "SLURM_PROCID" not in environment:
            return None
        start = [environment.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")]
        return cls(
            rank=int(environment["SLURM_PROCID"]),
            world=world,
            local_rank=int(environment.get("SLURM_LOCALID", "0")),
            nodes=int(environment.get("SLURM_STEP_NUM_NODES", "1")),
            meeting="-".join([*start, str(attempt)]),
            host=environment.get("SLURMD_NODENAME") or socket.gethostname(),
        )

    @classmethod
    def of(cls, part: str | None, meeting: str, environment: Mapping[str, str], attempt: int = 1) -> RankPlace:
        """Return what is known, the launcher's words first: srun's are inherited by all that its tasks start."""
        if part is not None:
            return cls.told(part, meeting)
        return cls.by_slurm(environment, attempt) or cls(0, 1)


@dataclass(frozen=True)
class Meeting:
    """All ranks have come."""

    wires: dict[int, JsonConnection]  # rank 0: to every other; the others: to rank 0
    hosts: tuple[str, ...]  # by rank
    said: Mapping[str, Any]  # what rank 0 lets everybody know
    keeper: str  # the address of rank 0, as this rank reaches it
    address: str  # the address of this rank, as others reach it


def meet(place: RankPlace, folder: Path, said: Mapping[str, Any], within_s: float = COME_WITHIN_S) -> Meeting:
    """Find the other ranks; what rank 0 says reaches all."""
    file = folder / f"ranks-{place.meeting}.json"
    return _keep(place, file, said, within_s) if place.rank == 0 else _join(place, file, within_s)


def _keep(place: RankPlace, file: Path, said: Mapping[str, Any], within_s: float) -> Meeting:
    """Be the one whom the others look for."""
    with socket.create_server(("" if place.nodes > 1 else LOOPBACK, 0), backlog=place.world) as listener:
        token, answer = secrets.token_hex(16), secrets.token_hex(16)
        addresses = list(_addresses(place))
        _publish(file, {"token": token, "answer": answer, "addresses": addresses, "port": listener.getsockname()[1]})
        try:
            came = _Reception(listener, place.world, token, answer).wait(within_s)
        finally:
            file.unlink(missing_ok=True)
    missing = sorted(set(range(1, place.world)) - came.keys())
    if missing:
        for wire, _ in came.values():
            wire.send({"missing": missing})
            wire.close()
        raise _did_not_come(missing, place.world, within_s)
    hosts = (place.host, *(came[rank][1] for rank in range(1, place.world)))
    outward = [wire.address for wire, _ in came.values() if not _is_loopback(wire.address)]
    address = outward[0] if outward else LOOPBACK
    for wire, _ in came.values():
        wire.send({"hosts": hosts, "said": said, "address": address})
    return Meeting({rank: wire for rank, (wire, _) in came.items()}, hosts, said, LOOPBACK, address)


def _publish(file: Path, content: Mapping[str, Any]) -> None:
    """Write a file that is seen whole or not at all, and by nobody else."""
    partial = file.with_name(f"{file.name}.{secrets.token_hex(4)}.partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as opened:
        json.dump(content, opened)
        opened.flush()
        os.fsync(opened.fileno())
    partial.replace(file)


def _addresses(place: RankPlace) -> Iterable[str]:
    """Return by what names this node may be reached, the likeliest first."""
    if place.nodes == 1:
        return (LOOPBACK,)
    names = [place.host, socket.gethostname(), socket.getfqdn()]
    with suppress(OSError):
        names += socket.gethostbyname_ex(socket.gethostname())[2]
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing: the kernel only chooses the way out
        names.append(probe.getsockname()[0])
    return [name for name in dict.fromkeys(names) if not _is_loopback(name)]


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("localhost", "localhost.localdomain", "::1")


class _Reception:
    """Admits ranks that know the word; whoever else connects is sent away."""

    def __init__(self, listener: socket.socket, world: int, token: str, answer: str) -> None:
        self._listener, self._world, self._token, self._answer = listener, world, token, answer
        self._came: dict[int, tuple[JsonConnection, str]] = {}
        self._ready = selectors.DefaultSelector()

    def wait(self, within_s: float) -> dict[int, tuple[JsonConnection, str]]:
        """Return who came, with their hosts."""
        until = time.monotonic() + within_s
        self._listener.settimeout(0)
        self._ready.register(self._listener, selectors.EVENT_READ)
        while len(self._came) < self._world - 1 and (left_s := until - time.monotonic()) > 0:
            for key, _ in self._ready.select(left_s):
                self._hear(key.data) if key.data else self._accept()
        self._dismiss()
        return self._came

    def _accept(self) -> None:
        with suppress(OSError):  # it may have gone again
            wire = JsonConnection(self._listener.accept()[0])
            self._ready.register(wire, selectors.EVENT_READ, wire)

    def _hear(self, wire: JsonConnection) -> None:
        messages, is_open = wire.hear()
        if messages or not is_open:
            self._ready.unregister(wire)
            if not (messages and is_open and self._admit(wire, messages[0])):
                wire.close()

    def _admit(self, wire: JsonConnection, said: Mapping[str, Any]) -> bool:
        """Let a rank in, once more if it lost its connection."""
        rank, word = said.get("rank"), str(said.get("token"))
        if (
            not isinstance(rank, int)
            or not hmac.compare_digest(word.encode(), self._token.encode())
            or rank not in range(1, self._world)
        ):
            return False
        wire.send({"answer": self._answer})
        before = self._came.pop(rank, None)
        if before:
            before[0].close()
        self._came[rank] = wire, str(said.get("host"))
        return True

    def _dismiss(self) -> None:
        """Send away who is still undecided."""
        for key in list(self._ready.get_map().values()):
            if key.data:
                key.data.close()
        self._ready.close()


def _join(place: RankPlace, file: Path, within_s: float) -> Meeting:
    """Look for rank 0 until it is found."""
    until = time.monotonic() + within_s
    pause_s, trouble = LOOK_EVERY_S[0], f"it has not written {file}"
    while time.monotonic() < until:
        try:
            return _attempt(place, _read(file), until)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError) as error:
            trouble = f"what {file} says leads nowhere: {error}"
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LOOK_EVERY_S[1])
    raise JobFailed(
        f"rank {place.rank} of {place.world} ({place.host}) did not find rank 0 within {within_s:.0f} s: {trouble}",
        remedy="pipeline logs   (rank 0 says why it did not start; all ranks must see the same run folder)",
    )


def _read(file: Path) -> dict[str, Any]:
    os.listdir(file.parent)  # noqa: PTH208 - NFS remembers for a minute that a name is not there, but asks for a list
    content = json.loads(file.read_text())
    return dict(content)


def _attempt(place: RankPlace, content: Mapping[str, Any], until: float) -> Meeting:
    """Join whom a file tells of; an OSError if it is nobody, or somebody else."""
    address, wire = _connect(content["addresses"], int(content["port"]))
    try:
        wire.send({"token": content["token"], "rank": place.rank, "host": place.host})
        first = wire.next(CONNECT_WITHIN_S)
        if not hmac.compare_digest(str(first.get("answer")).encode(), str(content["answer"]).encode()):
            raise ConnectionError("somebody else answers there")
        said = wire.next(max(0.0, until - time.monotonic()) + CONNECT_WITHIN_S)
        if "missing" in said:
            raise _did_not_come(said["missing"], place.world)
        own = said["address"] if _is_loopback(wire.address) else wire.address
        return Meeting({0: wire}, tuple(said["hosts"]), said["said"], address, own)
    except BaseException:
        wire.close()
        raise


def _connect(addresses: Iterable[str], port: int) -> tuple[str, JsonConnection]:
    """Connect to the first address that answers."""
    error: OSError = ConnectionError("no address is given")
    for address in addresses:
        try:
            return address, JsonConnection(socket.create_connection((address, port), timeout=CONNECT_WITHIN_S))
        except OSError as refused:
            error = OSError(f"{address}:{port}: {refused}")
    raise error


def _did_not_come(missing: Iterable[int], world: int, within_s: float | None = None) -> JobFailed:
    names = ", ".join(map(str, missing))
    late = "" if within_s is None else f" within {within_s:.0f} s"
    return JobFailed(
        f"of {world} ranks these did not come{late}: {names}",
        remedy="pipeline logs   (what they say; the others are well)",
    )
