"""Processes that read batches, for tasks whose Python would keep the interpreter of the training to itself.

They are forked with all that the loader knows, are told which micro-batch to make, and write its tensors to memory that
both share: nothing but names, places and what is no tensor goes through a pipe. A process is only ever a short cut:
what one cannot make, whatever the reason, the thread that asked for it makes itself, and says what is wrong with it.
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import warnings
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pipeline.memory.hardware.host_memory import slot_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Make = Callable[[Any, Callable[[int], Bytes]], Any]  # what was asked for, and memory for its tensors → the answer

log = logging.getLogger(__name__)

LEFT_ALONE = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # it ends when its pipe does
END_S = 5.0


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

    process: Any
    pipe: Connection

    def ask(self, what: Any, run: int) -> Any:
        """Return what the process made into a run; None where it could not."""
        self.pipe.send((what, run))
        return self.pipe.recv()

    def end(self) -> None:
        self.pipe.close()
        self.process.join(END_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class ReaderProcesses:
    """Some processes that make what they are asked for, each by the same function, as it was when they were forked."""

    def __init__(self, make: Make, runs: Sequence[SharedRun], count: int) -> None:
        self._idle: SimpleQueue[_Reader | None] = SimpleQueue()
        self._readers = [_forked(make, runs) for _ in range(count)]
        for reader in self._readers:
            self._idle.put(reader)

    def ask(self, what: Any, run: int) -> Any:
        """Have a process make something into a run; None where none could, or none is left."""
        reader = self._idle.get()
        try:
            return None if reader is None else reader.ask(what, run)
        except (EOFError, OSError) as error:
            assert reader is not None
            reader.process.join(END_S)
            code = reader.process.exitcode
            log.warning("a process that reads has ended (%s, exit code %s): a thread reads in its place", error, code)
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
    context = get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(make, runs, ours, theirs), name="reader", daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it only reads, on one core, and takes no thread's lock
        process.start()
    theirs.close()
    return _Reader(process, ours)


def _serve(make: Make, runs: Sequence[SharedRun], ours: Connection, pipe: Connection) -> None:
    """Make what is asked for until nobody can ask any more."""
    ours.close()
    for number in LEFT_ALONE:
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)  # those of the process before are not here
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
    os._exit(0)  # nothing of the process that forked it is to be closed here
