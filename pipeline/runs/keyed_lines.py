"""Texts under keys, more than memory should hold: 24 bytes of each key here, the texts in a file without a name."""

from __future__ import annotations

import tempfile
import weakref
from array import array
from typing import TYPE_CHECKING

import numpy as np

from pipeline.keys import KEY_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray


class KeyedLines:
    """Takes keys with a line of text each, then gives the text of a key."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it goes when this does
        weakref.finalize(self, self._file.close)
        self._keys, self._offsets = bytearray(), array("Q")
        self._sorted: tuple[NDArray[np.bytes_], NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        return len(self._offsets)

    def add(self, key: bytes, text: str) -> None:
        """Keep the text of a key; of a key that comes again, one of its texts."""
        self._keys += key
        self._offsets.append(self._file.seek(0, 2))
        self._file.write(text.encode() + b"\n")
        self._sorted = None

    def get(self, key: bytes) -> str | None:
        """Return the text of a key."""
        if not len(self):
            return None
        keys, order = self._in_order()
        at = int(np.searchsorted(keys, np.frombuffer(key, f"S{KEY_BYTES}")[0]))
        if at == len(keys) or keys[at].ljust(KEY_BYTES, b"\0") != key:  # numpy drops zeros at the end
            return None
        self._file.seek(self._offsets[int(order[at])])
        return self._file.readline()[:-1].decode()

    def _in_order(self) -> tuple[NDArray[np.bytes_], NDArray[np.int64]]:
        if self._sorted is None:
            keys = np.frombuffer(bytes(self._keys), f"S{KEY_BYTES}")
            order = np.argsort(keys, kind="stable")
            self._sorted = keys[order], order
        return self._sorted
