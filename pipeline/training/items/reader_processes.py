"""Processes that read batches, for tasks whose Python would keep the interpreter of the training to itself.

They are forked with all that the loader knows, are told which micro-batch to make, and write its tensors to memory that
both share: nothing but names, places and what is no tensor goes through a pipe. A process is only ever a short cut:
what one cannot make, whatever the reason, the thread that asked for it makes itself, and says what is wrong with it.
"""

from __future__ import annotations

import gc
import logging
import mmap
import os
import select
import signal
import warnings
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
import torch

from pipeline.memory.hardware.host_memory import slot_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Make = Callable[[Any, Callable[[int], Bytes]], Any]  # what was asked for, and memory for its tensors → the answer

log = logging.getLogger(__name__)

LEFT_ALONE = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # it ends when its pipe does
END_S = 5.0
_open: WeakSet[Connection] = WeakSet()  # this process's ends of the pipes of all that it forked


class SharedRun:
    """Memory that a process shares with those that it forks: a file without a name, which grows."""

    def __init__(self) -> None:
        self._file = os.memfd_create("batch", os.MFD_CLOEXEC)
        self._mapped = np.empty(0, np.uint8)

    def __del__(self) -> None:
        with suppress(OSError):
            os.close(self._file)

    def room(self, used: int) -> Bytes:
        """Return so many bytes, of the file as it is or grown."""
        size = os.fstat(self._file).st_size
        if used > size:
            size = slot_bytes(used, pin=False)
            os.ftruncate(self._file, size)
        if size > len(self._mapped):
            self._mapped = np.frombuffer(mmap.mmap(self._file, size), np.uint8)
        return self._mapped[:used]


@dataclass(eq=False)
class _Reader:
    """A process, and this end of its pipe."""

    pid: int
    pipe: Connection

    def ask(self, what: Any, run: int) -> Any:
        """Return what the process made into a run; None where it could not."""
        self.pipe.send((what, run))
        return self.pipe.recv()

    def end(self) -> int:
        """Return the exit code of the process, which ends with its pipe, or is killed."""
        self.pipe.close()
        try:
            ends = os.pidfd_open(self.pid)
            if not select.select([ends], [], [], END_S)[0]:
                os.kill(self.pid, signal.SIGKILL)
            os.close(ends)
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except (ProcessLookupError, ChildProcessError):  # somebody waits for all children
            return 0


class ReaderProcesses:
    """Some processes that make what they are asked for, each by the same function, as it was when they were forked."""

    def __init__(self, make: Make, runs: Sequence[SharedRun], count: int) -> None:
        self._readers: list[_Reader] = []
        self._idle: SimpleQueue[_Reader | None] = SimpleQueue()
        for _ in range(count):
            self._readers.append(_forked(make, runs))
            self._idle.put(self._readers[-1])

    def ask(self, what: Any, run: int) -> Any:
        """Have a process make something into a run; None where none could, or none is left."""
        reader = self._idle.get()
        try:
            return None if reader is None else reader.ask(what, run)
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
        for end in (ours, *_open):  # as long as one is open here, another would wait for what is asked of it
            end.close()
        _serve(make, runs, theirs)
    finally:
        os._exit(0)  # nothing of the process that forked it is to be closed here


def _serve(make: Make, runs: Sequence[SharedRun], pipe: Connection) -> None:
    """Make what is asked for until nobody can ask any more."""
    for number in LEFT_ALONE:
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)  # those of the process before are not here
    gc.freeze()  # what that had stays as it is: untouched it is shared, and none of it is to be finalised here
    with suppress(EOFError, OSError):
        while True:
            what, run = pipe.recv()
            try:
                answer = make(what, runs[run].room)
            except Exception:  # noqa: BLE001 - whoever asked finds it out for itself
                answer = None
            try:
                pipe.send(answer)
            except (EOFError, OSError):
                raise
            except Exception:  # noqa: BLE001 - of a class that cannot be sent
                pipe.send(None)
