"""Processes that read batches, for tasks whose Python would keep the interpreter of the training busy.

They are forked with all that the loader knows, and write a batch's tensors to memory that both share; only an outline
of the batch goes through a pipe. A process is a short cut: where it fails, for any reason, the thread that asked makes
the batch itself, and raises what is wrong with it.
"""

from __future__ import annotations

import gc
import logging
import mmap
import os
import signal
import warnings
import weakref
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from queue import Empty, LifoQueue, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from pipeline.memory.hardware.host_memory import slot_bytes
from pipeline.training.items.batch_maker import filled, outline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from pipeline.training.items.batch import TaskBatch
    from pipeline.training.items.batch_maker import Room
    from pipeline.training.sampling.sampler import MicroBatch

    Make: TypeAlias = Callable[[MicroBatch, Room], TaskBatch]

log = logging.getLogger(__name__)

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # a process ends when its pipe does
_open: weakref.WeakSet[Connection] = weakref.WeakSet()  # this process's ends of the pipes of all that it forked


class SharedRun:
    """Memory that a process shares with those that it forks: a file without a name, which grows."""

    def __init__(self) -> None:
        self._file = os.memfd_create("batch", os.MFD_CLOEXEC)
        self._mapped = np.empty(0, np.uint8)

    def __del__(self) -> None:
        with suppress(OSError):
            os.close(self._file)

    def room(self, used: int) -> torch.Tensor:
        """Return memory of this size, of the file as it is or grown."""
        size = os.fstat(self._file).st_size
        if used > size:
            size = slot_bytes(used, pin=False)
            os.ftruncate(self._file, size)
        if size > len(self._mapped):
            self._mapped = np.frombuffer(mmap.mmap(self._file, size), np.uint8)
        return torch.from_numpy(self._mapped[:used])


class _Reader(NamedTuple):
    pid: int
    pipe: Connection

    def end(self) -> int:
        """Kill the process, which has nothing to lose: processes forked later may keep its pipe open."""
        self.pipe.close()
        try:
            os.kill(self.pid, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except (ProcessLookupError, ChildProcessError):  # other code waits for all children
            return 0


class ReaderProcesses:
    """Processes that call `make` as it was when they were forked, each for one micro-batch at a time."""

    def __init__(self, make: Make, count: int, *, batches: int) -> None:
        """Fork; `batches` may be in use at once."""
        self.runs = [SharedRun() for _ in range(batches)]
        self._free: LifoQueue[int] = LifoQueue()  # the last first: no more runs have memory than were ever in use
        for run in range(batches):
            self._free.put(run)
        self._readers = [_forked(make, self.runs) for _ in range(count)]
        self._idle: SimpleQueue[_Reader | None] = SimpleQueue()
        for reader in self._readers:
            self._idle.put(reader)

    def make(self, micro: MicroBatch, copied: Callable[[torch.Tensor], torch.Tensor] | None) -> TaskBatch | None:
        """Have a process make a batch, over shared memory or what `copied` made of it; None where no process can."""
        try:
            run = self._free.get_nowait()
        except Empty:  # the loop keeps many batches
            return None
        answer = self._ask(micro, run)
        if answer is None:
            self._free.put(run)
            return None
        sketch, used = answer
        memory = self.runs[run].room(used)
        if copied is None:
            owner = memory.numpy()  # which the tensors of the batch keep
            weakref.finalize(owner, self._free.put, run)
            memory = torch.from_numpy(owner)
        else:
            memory = copied(memory)
            self._free.put(run)
        batch: TaskBatch = filled(sketch, memory)
        return batch

    def _ask(self, micro: MicroBatch, run: int) -> tuple[Any, int] | None:
        reader = self._idle.get()
        try:
            if reader is None:
                return None
            reader.pipe.send((micro, run))
            answer: tuple[Any, int] | None = reader.pipe.recv()
            return answer
        except (EOFError, OSError):
            assert reader is not None
            self._readers.remove(reader)
            log.warning("a reader process ended with exit code %s: a thread replaces it", reader.end())
            reader = None
            return None
        finally:
            self._idle.put(reader)

    def end(self) -> None:
        """End all processes; none may be at work."""
        readers, self._readers = self._readers, []
        for reader in readers:
            reader.end()

    __del__ = end


def _forked(make: Make, runs: Sequence[SharedRun]) -> _Reader:
    ours, theirs = Pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it only reads, on one core, and takes no thread's lock
        pid = os.fork()
    if pid:
        theirs.close()
        _open.add(ours)
        return _Reader(pid, ours)
    try:
        for end in (ours, *_open):  # open here, they would keep the other processes from ending
            end.close()
        _serve(make, runs, theirs)
    finally:
        os._exit(0)  # without closing anything of the process that forked this one


def _serve(make: Make, runs: Sequence[SharedRun], pipe: Connection) -> None:
    """Answer until the other end of the pipe is closed."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)  # torch's threads were not forked
    gc.freeze()  # untouched, the memory of that process stays shared, and nothing of it is finalised here
    with suppress(EOFError, OSError):
        while True:
            micro, run = pipe.recv()
            try:
                pipe.send(_answer(make, micro, runs[run]))
            except (EOFError, OSError):
                raise
            except Exception:  # noqa: BLE001 - the thread that asked makes the batch, and meets the error
                pipe.send(None)


def _answer(make: Make, micro: MicroBatch, run: SharedRun) -> tuple[Any, int]:
    memory = torch.empty(0, dtype=torch.uint8)

    def room(used: int) -> torch.Tensor:
        nonlocal memory
        memory = run.room(used)
        return memory

    batch = make(micro, room)
    return outline(batch, memory), len(memory)
