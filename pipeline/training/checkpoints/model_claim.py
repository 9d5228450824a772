"""The claim on a model's folder: one process at a time writes there; the error of any other names it.

    writers/000002    the claim: its holder and since when, as JSON; the holder touches it every few seconds

Only one process can create the next number. It may do so if the last holder is an earlier attempt of the same run, is a
dead process of this machine, or has not touched its claim for a minute. Only changes of the file's time count, so
clocks need not agree. A holder that wakes up after a takeover finds its claim gone, and stops.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from pipeline.cluster.machine import born_at, is_alive
from pipeline.command_line import Command
from pipeline.errors import ConfigError
from pipeline.files import create_claim, json_object, last_claim, read_json
from pipeline.store.format.disk import Disk
from pipeline.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Mapping

BEAT_S = 5.0
STALE_S = 60.0  # without a heartbeat: longer than a file server may be slow
LOOK_EVERY_S = 1.0


class ModelClaim:
    """The right of this process to write a model's folder, until it is closed."""

    def __init__(self, writers: Path, run: Path) -> None:
        """Claim a model's folder by its subfolder `writers`; raise ConfigError while another run writes the model."""
        self._writers, self._run = writers, run
        claimant = {
            "run": str(run),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "born": born_at(os.getpid()),
            "job": os.environ.get("SLURM_JOB_ID", ""),
            "since": f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}",
            "token": secrets.token_hex(8),  # so that no other process has the same text
        }
        self._text = json.dumps(claimant)
        Disk().make_folder(writers)
        while not self._try_to_claim():
            pass
        self.is_lost = False  # as the last beat found; `check` says how
        self._is_over = Event()
        self._thread = Thread(target=self._keep, name="model-claim", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise where the folder was moved or removed, or another process has taken over."""
        remedy = Command.of("status")
        try:
            newest = self._writers / f"{last_claim(self._writers):06d}"
            if (text := newest.read_text()) == self._text:
                return
            problem = f"{_who(json_object(text))} now writes this model"
        except FileNotFoundError:
            problem = "the model's folder was moved or removed during training, so training stops"
            remedy = Command.submit("train", then="   (in the project's new folder)")
        except OSError:  # the disk cannot be read now: the next write will fail by itself
            return
        raise ConfigError(problem, where=str(self._writers.parent), remedy=remedy)

    def close(self) -> None:
        """Give the claim up."""
        self._is_over.set()
        self._thread.join()
        with suppress(OSError, ConfigError):
            self.check()
            self._path.unlink()

    def _try_to_claim(self) -> bool:
        """Try once to take over from the holder of the last claim; raise while it lives."""
        last = last_claim(self._writers)
        if last:
            self._refuse_living(self._writers / f"{last:06d}")
        self._path = self._writers / f"{last + 1:06d}"
        is_mine = create_claim(self._path, self._text)
        if is_mine:
            (self._writers / f"{last:06d}").unlink(missing_ok=True)
        return is_mine

    def _refuse_living(self, path: Path) -> None:
        beat = _beat(path)
        if self._may_follow(_holder(path)) or not wait_for(lambda: _beat(path) != beat, STALE_S, LOOK_EVERY_S):
            return
        holder = _holder(path)  # again: a claim is created before its text is written
        if _beat(path) and not self._may_follow(holder):
            run = holder.get("run", "RUN")
            stop = Command.of("cancel", run, then="   (or wait until it has ended; or --set train.models=FOLDER)")
            raise ConfigError(f"{_who(holder)} writes this model", where=str(path.parents[1]), remedy=stop)

    def _may_follow(self, holder: Mapping[str, Any]) -> bool:
        """Tell whether a holder is an earlier attempt of this run, or a process of this machine that is dead."""
        is_here = holder.get("host") == socket.gethostname()
        is_same = Path(holder.get("run", "")).name == self._run.name
        return is_same or (is_here and not is_alive(holder["pid"], holder["born"]))

    def _keep(self) -> None:
        while not self._is_over.wait(BEAT_S):
            with suppress(OSError):
                self.is_lost = not self._path.exists()
                os.utime(self._path)


def _holder(path: Path) -> Mapping[str, Any]:
    """Return who holds a claim; nothing where it is gone, or not yet written."""
    holder = read_json(path)
    return holder if isinstance(holder, dict) else {}


def _who(holder: Mapping[str, Any]) -> str:
    """Name the holder of a claim."""
    run, pid, host, since = (holder.get(name, "?") for name in ("run", "pid", "host", "since"))
    job = f", job {holder['job']}" if holder.get("job") else ""
    return f"run {run} (process {pid} on {host}{job}, since {since})"


def _beat(path: Path) -> int:
    """Return when a claim was touched last, as the file server says; 0 where it is gone."""
    try:
        with path.open("rb") as file:  # opening asks the server; a mere `stat` may answer from a cache
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return 0
