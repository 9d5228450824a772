"""`Ranks` over torch.distributed: several processes that train one model.

JSON messages go over gloo, all-reduces of GPU tensors over NCCL. A rank that waits in a collective checks once a second
whether another rank was lost, and can be interrupted by a signal.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import secrets
import socket
import threading
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist
from torch._utils import _take_tensors
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # they are documented there

from pipeline.device.accelerator import Card, collectives, computing, free_caches, is_card
from pipeline.device.kinds import CPU
from pipeline.errors import ConfigError
from pipeline.records import RankPlace
from pipeline.training.ranks import PIECE_BYTES, Ranks
from pipeline.training.ranks.rank_monitor import COME_WITHIN_S, LOOPBACK, Activity, HangLimits, RankMonitor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

    from pipeline.training.ranks import Message

MESSAGE_BYTES = 4096  # of each rank's message; if one is longer, a second round follows
LENGTH_BYTES = 8
LOOK_EVERY_S = 1.0
NEVER = timedelta(days=7)  # the rank monitor names who is lost; a timeout of torch would not
INTERFACE = "GLOO_SOCKET_IFNAME"  # gloo reads its interface from nowhere else
GLOO_THREAD = "pt_gloo_runloop"
GLOO_RESTS_WITHIN_S = 10.0
_STATE = re.compile(r"^(?:State|\w+ctxt_switches):\t(.*)$", re.MULTILINE)


def join_process_group(
    place: RankPlace,
    folder: Path,
    *,
    device: str = CPU,
    limits: HangLimits | None = None,
    within_s: float = COME_WITHIN_S,
    sharded: bool = False,
) -> MonitoredRanks:
    """Join the process group once all ranks have come, through a folder that all see.

    A GPU must be the current device already. Collectives allocate their buffers here, with `sharded` also those of
    FSDP, so that later measurements include them.
    """
    limits = limits or HangLimits()
    monitor = RankMonitor(place, limits)
    if place.world == 1:
        monitor.start()
        return MonitoredRanks(monitor, limits)
    store, door, shared = None, -1, {}
    if place.rank == 0:
        listener = socket.create_server(("" if place.nodes > 1 else LOOPBACK, 0))
        port, door = listener.getsockname()[1], listener.detach()
        store, shared = _store(LOOPBACK, port, door), {"store": port, "prefix": secrets.token_hex(16)}
    met = monitor.start(folder, shared, within_s)
    for interface, owned in psutil.net_if_addrs().items():
        if met.address in (known.address for known in owned):
            os.environ.setdefault(INTERFACE, interface)  # by the host name it would often be the loopback
    group = ProcessGroup(monitor, limits)
    try:
        store = store or _store(met.links[0].peer, met.shared["store"])
        dist.init_process_group(
            collectives(device),
            store=PrefixStore(met.shared["prefix"], store),
            rank=place.rank,
            world_size=place.world,
            timeout=NEVER,
            device_id=Card(device).numbered if is_card(device) else None,  # its communicator is made at once
        )
        if is_card(device):
            group.warm_up(device, sharded=sharded)
        elif place.rank == 0:  # with a card the store stays open: NCCL may connect again
            _shut(door)
    except (RuntimeError, OSError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        lost = monitor.blame(str(error))
        group.close(str(lost))
        raise lost from error
    return group


def _store(host: str, port: int, listener: int | None = None) -> TCPStore:
    """Connect to torch's TCPStore; as rank 0, which passes a listening socket, keep it."""
    within = timedelta(seconds=60)
    return TCPStore(host, port, None, listener is not None, within, wait_for_workers=False, master_listen_fd=listener)


def _shut(door: int) -> None:
    """Stop a store from accepting connections, since it would accept any; open ones stay."""
    with socket.socket() as unbound:
        os.dup2(unbound.fileno(), door)


class MonitoredRanks(Ranks):
    """`Ranks` that report their work to a monitor, which ends a rank that hangs; this class: a single one."""

    def __init__(self, monitor: RankMonitor, limits: HangLimits) -> None:
        self._monitor, self._limits = monitor, limits
        self.rank, self.world = monitor.place.rank, monitor.place.world
        self._slow = 0  # reasons to be patient
        self._calls = 0
        self._is_open = True

    def progress(self, activity: str) -> None:
        self._monitor.check()
        self._note(activity)

    @contextmanager
    def patient(self, activity: str) -> Iterator[None]:
        before = self._monitor.doing.what
        self._slow += 1
        self.progress(activity)
        try:
            yield
        finally:
            self._slow -= 1
            self._note(before)

    def close(self, why: str = "") -> None:
        if self._is_open:
            self._is_open = False
            self._monitor.leave(why)
            if dist.is_initialized() and self.world > 1:
                if self._monitor.has_lost:  # pending calls never complete, and destroying the group would wait for them
                    with suppress(RuntimeError):  # it is broken already
                        dist.group.WORLD.abort()  # type: ignore[union-attr]
                dist.destroy_process_group()
            self._monitor.close()

    def _note(self, activity: str, *, waits: bool = False) -> None:
        allowance_s = self._limits.slow_s if self._slow else self._limits.hang_s
        self._monitor.doing = Activity(activity, allowance_s, self._calls, waits)


class ProcessGroup(MonitoredRanks):
    """`Ranks` over torch.distributed."""

    def __init__(self, monitor: RankMonitor, limits: HangLimits) -> None:
        super().__init__(monitor, limits)
        end_after_gloo()
        self._slow = 1  # the first step is a reason to be patient
        self._has_stepped = False

    def exchange(self, message: Message) -> list[Message]:
        def gather(all_B: list[Tensor], own_B: Tensor) -> None:
            self.collective(lambda: dist.all_gather(all_B, own_B, async_op=True))

        return exchange_json(message, self.world, gather)

    def add_up(self, tensors: Sequence[Tensor], buffer: Tensor | None = None) -> None:
        reduce_in_pieces(tensors, self._sum, buffer)

    def _sum(self, flat: Tensor) -> None:
        # on a card the all-reduce is only enqueued; kernels that read the result wait in the stream
        self.collective(partial(dist.all_reduce, flat, async_op=True), in_stream=is_card(flat.device))
        if not self._has_stepped:
            self._has_stepped = True
            self._slow -= 1
            self.progress(self._monitor.doing.what)

    def warm_up(self, device: str, *, sharded: bool) -> None:
        """Make each kind of collective call once, small and large, so that the library allocates its buffers now."""
        for values in (self.world, PIECE_BYTES // 4 // self.world * self.world):
            whole = torch.zeros(values, device=device)
            own = whole[: values // self.world].clone()
            calls = [partial(dist.all_reduce, whole)]
            if sharded:
                calls += [
                    partial(dist.all_gather_single, whole, own),
                    partial(dist.reduce_scatter_single, own, whole),
                ]
            for call in calls:
                with self.patient("the first collectives"):
                    self.collective(partial(call, async_op=True), in_stream=True)
            computing(device).synchronize()
            del whole, own
        free_caches(device)

    def collective(self, begin: Callable[[], dist.Work], *, in_stream: bool = False) -> None:
        """Begin a collective call and wait for it, or only enqueue it; raise if a rank is lost.

        Meanwhile this rank waits for the others, and does not count as hung.
        """
        self._monitor.check()
        self._calls += 1
        activity, done = self._monitor.doing.what, threading.Event()
        self._note(activity, waits=True)
        try:
            work = begin()
            if not in_stream:
                work.get_future().add_done_callback(lambda _: done.set())
                while not done.wait(LOOK_EVERY_S):
                    self._monitor.check()
            work.wait()
        except RuntimeError as error:  # torch has no type for it; a peer's death breaks a connection
            raise self._monitor.blame(str(error).partition("\n")[0]) from error
        finally:
            self._note(activity)


def exchange_json(message: Message, world: int, gather: Callable[[list[Tensor], Tensor], object]) -> list[Message]:
    """Return every rank's message; `gather` fills a tensor for each rank from each rank's own.

    torch's collectives of objects would unpickle what the other ranks send.
    """
    text, size = json.dumps(message).encode(), MESSAGE_BYTES
    content = len(text).to_bytes(LENGTH_BYTES, "little") + text
    while True:
        own_B = torch.frombuffer(bytearray(content[:size].ljust(size, b"\0")), dtype=torch.uint8)
        all_B = [torch.empty_like(own_B) for _ in range(world)]
        gather(all_B, own_B)
        letters = [letter_B.numpy().tobytes() for letter_B in all_B]
        lengths = [int.from_bytes(letter[:LENGTH_BYTES], "little") for letter in letters]
        if (longest := LENGTH_BYTES + max(lengths)) <= size:
            return [json.loads(letter[LENGTH_BYTES:][:length]) for letter, length in zip(letters, lengths, strict=True)]
        size = longest


def place_in_group() -> tuple[int, int]:
    """Return the rank and the ranks of torch's process group; (0, 1) where no ranks were started."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if (started := int(os.environ.get("WORLD_SIZE") or 1)) > 1:
        what = f"{started} ranks were started without a process group: each would read every item"
        remedy = "start the loop after init_process_group, or use open_loader(…, rank=…, ranks=…)"
        raise ConfigError(what, where="WORLD_SIZE", remedy=remedy)
    return 0, 1


@cache
def end_after_gloo() -> None:
    """Delay this process's exit until torch's gloo threads are idle.

    Such a thread releases a call's tensors after the caller has continued. If the interpreter shuts down first, the
    thread cannot take the GIL, and the process aborts: a finished training would count as failed.
    """
    atexit.register(_await_gloo)


def _await_gloo() -> None:
    """Wait until gloo's threads sleep and have not run between two looks."""
    until, before = time.monotonic() + GLOO_RESTS_WITHIN_S, list[list[str]]()
    while (now := _gloo_threads()) and time.monotonic() < until:
        if now == before and all(state.startswith("S") for state, *_ in now):
            return
        before = now
        time.sleep(0.001)  # releases the GIL for them


def _gloo_threads() -> list[list[str]]:
    """Return the state and context switches of each of torch's gloo threads; [] off Linux."""
    texts = []
    for file in Path("/proc/self/task").glob("*/status"):
        with suppress(OSError):  # it has ended
            texts.append(file.read_text())
    return [_STATE.findall(text) for text in texts if GLOO_THREAD in text]


def reduce_in_pieces(tensors: Iterable[Tensor], reduce: Callable[[Tensor], Any], buffer: Tensor | None = None) -> None:
    """All-reduce tensors in place; small ones are packed into flat tensors of one type, in `buffer` if given."""
    plain = (tensor.detach() for tensor in tensors if tensor.numel())
    reals = (torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in plain)
    # Groups of one device and type, up to a number of bytes; a larger tensor is alone. The function is private, but it
    # is torch.distributed's own grouping
    for parts in _take_tensors(reals, PIECE_BYTES if buffer is None else len(buffer)):  # type: ignore[no-untyped-call]
        if len(parts) == 1 and parts[0].is_contiguous():
            reduce(parts[0].view(-1))
            continue
        sizes, size_bytes = [part.numel() for part in parts], sum(part.nbytes for part in parts)
        if buffer is None or size_bytes > len(buffer):
            flat = parts[0].new_empty(sum(sizes))
        else:
            flat = buffer[:size_bytes].view(parts[0].dtype)
        places = [place.view(part.shape) for place, part in zip(torch.split(flat, sizes), parts, strict=True)]
        torch._foreach_copy_(places, parts)  # one call for all, as in torch's own FSDP
        reduce(flat)
        torch._foreach_copy_(parts, places)
        del flat, places  # one piece at a time
