"""What a run of W&B has kept in a folder of its own: `.wandb` files, which are LevelDB logs of W&B's own records."""

from __future__ import annotations

import json
import struct
import zlib
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAGIC = b":W&B"
HEADER_BYTES, BLOCK_BYTES = 7, 1 << 15  # of a file and of a piece alike; a piece never crosses a block's end
WHOLE, LAST = 1, 4  # kinds of pieces: a record, or the end of one


def history(path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield each step that was kept, with its figures by name; nothing after a torn record is believed."""
    protocol: Any = import_module("wandb.proto.wandb_internal_pb2")
    for data in _records(path.read_bytes()):
        record = protocol.Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            told = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            step = record.history.step.num
            yield step, {name: value for name, value in told.items() if not name.startswith("_")}


def last_step(folder: Path, run: str) -> int:
    """Return the last step that any file of a run in this folder has kept; 0: none."""
    files = sorted(folder.glob(f"wandb/*run-*/run-{run}.wandb"))
    return max((step for path in files for step, _ in history(path)), default=0)


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
