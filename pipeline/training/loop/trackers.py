"""Who gets the figures besides the files: TensorBoard and Weights & Biases, each where it is installed.

A tracker never ends a run: what goes wrong with it becomes one warning, and then it is left alone.
"""

from __future__ import annotations

import json
import logging
import netrc
import os
import secrets
import struct
import zlib
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from pipeline.files import write_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

log = logging.getLogger(__name__)

TENSORBOARD, WANDB = "tensorboard", "wandb"
FLUSH_S = 10  # so much is lost at most when a process is killed
LOGIN_S = 60  # a node without a network does not hold up training for longer
IDS = "trackers.json"
PROJECT = "pipeline"
SERVICE = "https://api.wandb.ai"


class Tracker(Protocol):
    """Shows figures over the steps."""

    def scalars(self, step: int, figures: Mapping[str, float]) -> None:
        """Take the figures of a step."""

    def close(self) -> None:
        """Hand on what is not yet written."""


def open_trackers(
    names: Sequence[str], folder: Path, *, step: int = 0, name: str = "", config: Mapping[str, Any] | None = None
) -> list[Tracker]:
    """Return trackers that go on after a step; `name` is what people call the run, `config` what it was made with."""
    made: dict[str, Callable[[], Tracker]] = {
        TENSORBOARD: lambda: TensorBoard(folder / TENSORBOARD, step),
        WANDB: lambda: Wandb(folder, name or folder.name, config or {}),
    }
    return [FailsafeTracker(tracker, made[tracker]) for tracker in names]


class FailsafeTracker:
    """A tracker that may fail."""

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        self._name = name
        self._tracker: Tracker | None = None
        self._tried(lambda: setattr(self, "_tracker", make()))

    def scalars(self, step: int, figures: Mapping[str, float]) -> None:
        if (tracker := self._tracker) is not None:
            self._tried(lambda: tracker.scalars(step, figures))

    def close(self) -> None:
        if (tracker := self._tracker) is not None:
            self._tried(tracker.close)
            self._tracker = None

    def _tried(self, call: Callable[[], None]) -> None:
        try:
            call()
        except ImportError as error:
            self._tracker = None
            log.warning("%s gets no figures: %s; pip install 'pipeline[%s]'", self._name, error, self._name)
        except Exception as error:  # noqa: BLE001 - a service that shows curves is no reason to lose a training
            self._tracker = None
            log.warning("%s gets no more figures: %s: %s", self._name, type(error).__name__, error)


class TensorBoard:
    """Event files in a folder, for `tensorboard --logdir`."""

    def __init__(self, folder: Path, step: int) -> None:
        """Hide what an earlier process wrote of later steps."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), purge_step=step + 1, flush_secs=FLUSH_S)

    def scalars(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases: the same one, however often training is resumed.

    Without an account on this machine it is kept in the folder, for `wandb sync`; WANDB_MODE has the last word.
    """

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        import wandb

        known = last_step(folder, run_id(folder, WANDB))  # before it begins another file
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            dir=str(folder),
            id=run_id(folder, WANDB),
            name=name,
            config=dict(config),
            resume="allow",
            mode=None if "WANDB_MODE" in os.environ or _has_account() else "offline",
            settings=wandb.Settings(silent=True, console="off", init_timeout=LOGIN_S),
        )
        self._known = max(known, self._run.step - 1)  # what the service has of a run that is resumed

    def scalars(self, step: int, figures: Mapping[str, float]) -> None:
        """Add a point to each curve; a step that was kept before a training was taken up is not kept twice."""
        if step > self._known:
            self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


def _has_account() -> bool:
    """Say whether this machine knows a key of W&B: without one it would ask for it, and nobody is there to answer."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", SERVICE)).hostname or ""
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def run_id(folder: Path, name: str) -> str:
    """Return the id of what is trained in a folder, made up when first asked for."""
    path = folder / IDS
    known: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    if name not in known:
        known[name] = secrets.token_hex(8)
        write_whole(path, json.dumps(known))
    return known[name]


MAGIC = b":W&B"
HEADER_BYTES, BLOCK_BYTES = 7, 1 << 15  # of a file and of a piece alike; a piece never crosses a block's end
WHOLE, LAST = 1, 4  # kinds of pieces: a record, or the end of one


def wandb_history(path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield each step that was kept, with its figures by name; nothing after a torn record is believed."""
    protocol: Any = import_module("wandb.proto.wandb_internal_pb2")
    for data in _records(path.read_bytes()):
        record = protocol.Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            named = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
            figures = {name: json.loads(value) for name, value in named.items() if not name.startswith("_")}
            yield record.history.step.num, figures


def last_step(folder: Path, run: str) -> int:
    """Return the last step that any file of a run in this folder has kept; 0: none."""
    files = sorted(folder.glob(f"wandb/*run-*/run-{run}.wandb"))
    return max((step for path in files for step, _ in wandb_history(path)), default=0)


def _records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a file, put together from their pieces."""
    if not data.startswith(MAGIC):
        return
    at, record = HEADER_BYTES, b""
    while at + HEADER_BYTES <= len(data):
        if (left := BLOCK_BYTES - at % BLOCK_BYTES) < HEADER_BYTES:
            at += left
            continue
        digest, size, kind = struct.unpack_from("<IHB", data, at)
        if zlib.crc32(data[at + HEADER_BYTES - 1 : at + HEADER_BYTES + size]) != digest:  # of the kind and what follows
            return
        record += data[at + HEADER_BYTES : at + HEADER_BYTES + size]
        at += HEADER_BYTES + size
        if kind in (WHOLE, LAST):
            yield record
            record = b""
