"""A record: named arrays and a JSON mapping under one key, as one self-describing block of bytes.

    arrays, widest items first | descriptor JSON, spaces, u64 length of the descriptor

Wide items first keeps every array naturally aligned without holes, which safetensors forbids; the spaces bring the
whole to a multiple of 64 bytes, so that the next record is aligned as well.
"""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pipeline.keys import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import numpy.typing as npt

    Array = npt.NDArray[Any]

ALIGNMENT = 64
DESCRIPTOR = "record"
BFLOAT16 = "BF16"
_DTYPES = {
    "BOOL": "|b1", "U8": "|u1", "I8": "|i1", "U16": "<u2", "I16": "<i2", "F16": "<f2", "U32": "<u4", "I32": "<i4",
    "F32": "<f4", "U64": "<u8", "I64": "<i8", "F64": "<f8",
}  # fmt: skip
_TAGS = {np.dtype(text): tag for tag, text in _DTYPES.items()}
_DTYPE_OF_TAG = {tag: np.dtype(text) for tag, text in {**_DTYPES, BFLOAT16: "<u2"}.items()}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_LENGTH = struct.Struct("<Q")
_LONGEST = 1 << 48  # no side of an array is
_ENCODE = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_SCAN = json.JSONDecoder().scan_once  # type: ignore[attr-defined]  # typeshed does not have it


@dataclass(frozen=True)
class Record:
    """What was stored under a key; the arrays are read-only views over the bytes that were verified."""

    key: bytes
    arrays: Mapping[str, Array]
    meta: Mapping[str, Any]
    bfloat16: frozenset[str] = field(default=frozenset())  # names of uint16 arrays whose bits are bfloat16


class Tensor(NamedTuple):
    """A named stretch of a record's bytes, as a safetensors header lists it."""

    name: str
    tag: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class EncodedRecord:
    """A record's bytes, and the tensors in them."""

    key: bytes
    blob: bytes
    tensors: tuple[Tensor, ...]


class BadRecord(ValueError):
    """The bytes are no record."""


def encode_record(
    key: bytes, arrays: Mapping[str, Array], meta: Mapping[str, Any], bfloat16: Collection[str] = ()
) -> EncodedRecord:
    """Lay a record out as bytes."""
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:  # a bug of the caller
        raise ValueError(f"a key is {KEY_BYTES} bytes, not {key!r}")
    tagged = [(name, *_tagged(name, array, name in bfloat16)) for name, array in arrays.items()]
    tagged.sort(key=lambda entry: -entry[2].dtype.itemsize)
    tensors, end = [], 0
    for name, tag, array in tagged:
        tensors.append(Tensor(name, tag, array.shape, end, end := end + array.nbytes))
    descriptor = _descriptor(key, tensors, meta, end)
    tensors.append(Tensor(DESCRIPTOR, "U8", (len(descriptor),), end, end + len(descriptor)))
    return EncodedRecord(key, b"".join([*(array.data for _, _, array in tagged), descriptor]), tuple(tensors))


def decode_record(blob: bytes | memoryview, rest: bytes | memoryview = b"") -> Record:
    """Read a record back; every number in it is checked against the bytes that are there before it is used.

    Its bytes may be in two buffers; an array that spans both is copied.
    """
    key, entries, meta, end = _read_descriptor(blob, rest)
    arrays: dict[str, Array] = {}
    bfloat16: set[str] = set()
    first, position = len(blob), 0
    for entry in entries:  # some dozens in each of millions of records: what follows is half the time of reading one
        name, tag, dtype, shape = _checked_entry(entry)
        start, position = position, position + prod(shape) * dtype.itemsize
        if name in arrays or position > end:
            raise BadRecord(f"array {name} does not fit")
        if start < position <= first:
            arrays[name] = np.ndarray(shape, dtype, blob, start)
        elif position == start:
            arrays[name] = _empty(tuple(shape), dtype)
        else:
            arrays[name] = np.ndarray(shape, dtype, _stretch(blob, rest, start, position))
        if tag == BFLOAT16:
            bfloat16.add(name)
    if position != end:
        raise BadRecord("extra bytes after the arrays")
    return Record(key, arrays, meta, frozenset(bfloat16))


def descriptor_bytes(tail: bytes | memoryview) -> int:
    """Return the length of a record's descriptor, which its last 8 bytes hold."""
    return int.from_bytes(tail[-_LENGTH.size :], "little")


def is_record_of(key: bytes, blob: bytes | memoryview) -> bool:
    """Return whether a record names this key, by how its descriptor begins: 1 µs, where `decode_record` takes 20 µs."""
    begin, start = b'{"key":"%s","arrays":[' % key.hex().encode(), len(blob) - descriptor_bytes(blob)
    return start >= 0 and bytes(blob[start : start + len(begin)]) == begin


def _tagged(name: str, value: Array, bfloat16: bool) -> tuple[str, Array]:  # noqa: FBT001 - a fact about the array
    _check_name(name)
    array = np.asarray(value, order="C")
    tag = _TAGS.get(array.dtype)
    if tag is None:
        array = array.astype(array.dtype.newbyteorder("<"))
        tag = _TAGS.get(array.dtype)
    if tag is None or (bfloat16 and tag != "U16"):
        raise ValueError(f"array {name} of {array.dtype} cannot be stored{' as bfloat16 bits' if bfloat16 else ''}")
    return (BFLOAT16 if bfloat16 else tag), array


@lru_cache(maxsize=4096)
def _check_name(name: str) -> None:
    """Refuse an invalid array name; some dozens of names come with every record, so the answers are cached."""
    if not _NAME.fullmatch(name) or name == DESCRIPTOR:
        raise ValueError(f"{name!r} is not a valid array name")


def _descriptor(key: bytes, tensors: list[Tensor], meta: Mapping[str, Any], data_bytes: int) -> bytes:
    arrays = [(tensor.name, tensor.tag, tensor.shape) for tensor in tensors]
    text = _ENCODE({"key": key.hex(), "arrays": arrays, "meta": dict(meta)}).encode()
    padding = -(data_bytes + len(text) + _LENGTH.size) % ALIGNMENT
    return text + b" " * padding + _LENGTH.pack(len(text) + padding + _LENGTH.size)


def _read_descriptor(
    blob: bytes | memoryview, rest: bytes | memoryview
) -> tuple[bytes, list[Any], dict[str, Any], int]:
    """Return the key, the entries of arrays, the metadata, and the offset at which the arrays end."""
    total = len(blob) + len(rest)
    if total < _LENGTH.size:
        raise BadRecord("too short")
    (length,) = _LENGTH.unpack(_stretch(blob, rest, total - _LENGTH.size, total))
    if not _LENGTH.size < length <= total:
        raise BadRecord("the descriptor's length is invalid")
    end = total - length
    try:
        text = str(_stretch(blob, rest, end, total - _LENGTH.size), "utf-8").rstrip(" ")
        content, stop = _SCAN(text, 0)  # what `json.loads` calls, and half of its time for so short a text
        key = bytes.fromhex(content["key"])
        arrays, meta = content["arrays"], content["meta"]
    except (ValueError, TypeError, KeyError, RecursionError, StopIteration) as error:
        raise BadRecord("the descriptor cannot be read") from error
    if len(key) != KEY_BYTES or not isinstance(arrays, list) or not isinstance(meta, dict) or stop != len(text):
        raise BadRecord("the descriptor is malformed")
    return key, arrays, meta, end


def _stretch(blob: bytes | memoryview, rest: bytes | memoryview, start: int, stop: int) -> bytes | memoryview:
    """Return the bytes from `start` to `stop` of two buffers that continue each other."""
    if stop <= len(blob):
        return blob[start:stop]
    if start >= len(blob):
        return rest[start - len(blob) : stop - len(blob)]
    return b"".join((blob[start:], rest[: stop - len(blob)]))


def _checked_entry(entry: Any) -> tuple[str, str, np.dtype[Any], list[int]]:
    if type(entry) is list and len(entry) == 3:  # a `match` statement takes four times as long
        name, tag, shape = entry
        if type(name) is str and type(tag) is str and type(shape) is list and tag in _DTYPE_OF_TAG and len(shape) <= 32:
            for side in shape:
                if type(side) is not int or not 0 <= side < _LONGEST:
                    break
            else:
                return name, tag, _DTYPE_OF_TAG[tag], shape
    raise BadRecord("an array's entry is malformed")


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    try:
        array = np.empty(shape, dtype)
    except ValueError as error:  # sides too long to address, even in an empty array
        raise BadRecord("an empty array's shape is invalid") from error
    array.flags.writeable = False
    return array
