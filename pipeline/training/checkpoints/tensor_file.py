"""A safetensors file, written as a stream and read into existing tensors, with a digest computed on the way.

Reading and writing hold one extra tensor at most, and none for contiguous tensors on the CPU.
Tied parameters are written once; their other names are in the file's metadata.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import xxhash

from pipeline.errors import ConfigError, JobFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    import torch
    from torch import Tensor

    from pipeline.store.format.disk import Disk

# The dtypes and their bytes by their names in a file. Who only asks what there is does not wait for torch.
DTYPES = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "I64": ("int64", 8), "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1),
    "U64": ("uint64", 8), "U32": ("uint32", 4), "U16": ("uint16", 2), "U8": ("uint8", 1),
    "BOOL": ("bool", 1), "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1), "C64": ("complex64", 8),
}  # fmt: skip
NAMES = {f"torch.{dtype}": name for name, (dtype, _) in DTYPES.items()}
PIECE_BYTES = 8 << 20  # digested and written at once
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000  # the limit of safetensors itself
_METADATA = "__metadata__"
_MOST_NAMED = 6
ANOTHER = "choose an intact checkpoint, or train again"
OTHER_MODEL = "use the model that wrote it, or train into a new folder (train.models)"


class CheckpointDamaged(JobFailed):
    """The bytes of a checkpoint are not there, or are not the bytes that were written."""


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """The size and digest of a file as it was written."""

    bytes: int
    digest: str  # xxh3-128, as hexadecimal digits


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor in a file: its dtype, its shape, and its byte range."""

    kind: str  # its dtype's name in the file
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def dtype(self) -> torch.dtype:
        import torch

        dtype: torch.dtype = getattr(torch, DTYPES[self.kind][0])
        return dtype


def write_tensors(disk: Disk, path: Path, tensors: Mapping[str, Tensor]) -> WrittenFile:
    """Write a new file of tensors and wait until it is on the disk."""
    return write_pieces(disk, path, _pieces(tensors))


def write_pieces(disk: Disk, path: Path, pieces: Iterable[bytes | memoryview]) -> WrittenFile:
    """Write a new file and wait until it is on the disk."""
    digest, offset = xxhash.xxh3_128(), 0
    fd = disk.open_new(path)
    try:
        for piece in pieces:
            digest.update(piece)
            disk.write_at(fd, piece, offset)
            offset += len(piece)
            del piece  # or a copy of a tensor would be held while the next one is made
        disk.make_published(fd)
        disk.fsync(fd)
    finally:
        disk.close(fd)
    return WrittenFile(offset, digest.hexdigest())


def verify_file(disk: Disk, path: Path, written: WrittenFile) -> None:
    """Read a whole file; raise unless its bytes are those that were written."""
    fd = _opened(disk, path, written)
    try:
        digest = xxhash.xxh3_128()
        _skim(disk, fd, path, 0, written.bytes, digest.update)
    finally:
        disk.close(fd)
    _compare(path, digest, written)


class TensorFile:
    """A file of tensors; opening reads only its header."""

    def __init__(self, disk: Disk, path: Path, written: WrittenFile) -> None:
        self.disk, self.path, self.written = disk, path, written
        fd = _opened(disk, path, written)
        try:
            head = disk.read_at(fd, _LENGTH_BYTES, 0)
            self._start = _LENGTH_BYTES + int.from_bytes(head, "little")
            if not _LENGTH_BYTES < self._start <= min(written.bytes, _MOST_HEADER_BYTES):
                raise damaged_file(path, "its header is damaged")
            header = disk.read_at(fd, self._start - _LENGTH_BYTES, _LENGTH_BYTES)
        except OSError as error:
            raise unreadable_file(path, error) from error
        finally:
            disk.close(fd)
        self._stored, self.same = self._parsed(header)
        aliases = {alias: self._stored[name] for alias, name in self.same.items()}
        self.specs: Mapping[str, TensorSpec] = self._stored | aliases

    def load_into(self, targets: Mapping[str, Tensor]) -> None:
        """Fill tensors by name, whose dtypes and shapes must match; every byte of the file is read and digested.

        All checks come before the first write except the digest: where that is wrong, the tensors are overwritten.
        """
        refuse_misfits(self.specs, targets, self.path)
        wanted: dict[str, list[Tensor]] = {}
        for name, target in targets.items():
            wanted.setdefault(self.same.get(name, name), []).append(target.detach())
        digest = xxhash.xxh3_128()
        fd = _opened(self.disk, self.path, self.written)
        try:
            self._read(fd, wanted, digest.update)
        finally:
            self.disk.close(fd)
        _compare(self.path, digest, self.written)

    def load(self) -> dict[str, Tensor]:
        """Return every tensor, on the CPU."""
        import torch

        stored = {name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in self._stored.items()}
        self.load_into(stored)
        return stored | {alias: stored[name] for alias, name in self.same.items()}

    def _read(self, fd: int, wanted: Mapping[str, list[Tensor]], digest: Callable[[Any], None]) -> None:
        end = 0
        for name, spec in sorted(self._stored.items(), key=lambda item: (item[1].begin, item[1].end)):
            if spec.begin < end:
                raise damaged_file(self.path, "its header is damaged: tensors overlap")
            _skim(self.disk, fd, self.path, end, spec.begin, digest)
            if name in wanted:
                self._fill(fd, spec, wanted[name], digest)
            else:
                _skim(self.disk, fd, self.path, spec.begin, spec.end, digest)
            end = spec.end
        _skim(self.disk, fd, self.path, end, self.written.bytes, digest)

    def _fill(self, fd: int, spec: TensorSpec, targets: list[Tensor], digest: Callable[[Any], None]) -> None:
        """Read one tensor, directly into the first target where that is contiguous and on the CPU."""
        import torch

        first = targets[0]
        is_direct = first.device.type == "cpu" and first.is_contiguous() and not (first.is_conj() or first.is_neg())
        read = first if is_direct else torch.empty(spec.shape, dtype=spec.dtype)
        _read_exactly(self.disk, fd, self.path, tensor_bytes(read), spec.begin, digest)
        for target in targets[is_direct:]:
            if target.data_ptr() != read.data_ptr() or target.device != read.device:
                target.copy_(read)

    def _parsed(self, header: bytes) -> tuple[dict[str, TensorSpec], dict[str, str]]:
        """Return the tensors of a header, and the stored name of each alias."""
        try:
            parsed = json.loads(header)
            same = dict(json.loads(parsed.pop(_METADATA, {}).get("same", "{}")))
            specs = {str(name): self._spec(**entry) for name, entry in parsed.items()}
            if not all(name in specs for name in same.values()):
                raise ValueError
        except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError) as error:
            raise damaged_file(self.path, "its header is damaged") from error
        return specs, same

    def _spec(self, dtype: str, shape: list[int], data_offsets: list[int]) -> TensorSpec:
        begin, end = (self._start + int(offset) for offset in data_offsets)
        spec = TensorSpec(dtype, tuple(int(length) for length in shape), begin, end)
        is_right = min(spec.shape, default=0) >= 0 and end - begin == math.prod(spec.shape) * DTYPES[dtype][1]
        if not is_right or not self._start <= begin <= end <= self.written.bytes:
            raise ValueError
        return spec


def distinct(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return each tensor under its first name only, and the first name of every other name."""
    kept: dict[str, Tensor] = {}
    same: dict[str, str] = {}
    first_names: dict[Any, str] = {}
    for name, tensor in tensors.items():
        start = tensor.untyped_storage()._cdata if tensor.is_meta else tensor.data_ptr()  # noqa: SLF001 - it has no data
        place = (tensor.device, start, tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj())
        key = place if tensor.numel() and start else id(tensor)
        if (first := first_names.setdefault(key, name)) == name:
            kept[name] = tensor
        else:
            same[name] = first
    return kept, same


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes: its own where it is contiguous and on the CPU, else a copy's."""
    if tensor.numel() == 0:
        return memoryview(b"")
    import torch

    whole = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    flat = whole.as_strided((whole.numel(),), (1,))  # where there is only one value, its stride may be anything
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]  # before 3.12 the stubs lack it


def nbytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's values; its storage may have more."""
    return tensor.numel() * tensor.element_size()


def damaged_file(path: Path, problem: str) -> CheckpointDamaged:
    """Return the error for a damaged file."""
    return CheckpointDamaged(problem, where=str(path), remedy=ANOTHER)


def unreadable_file(path: Path, error: OSError) -> CheckpointDamaged:
    """Return the error for a file that is missing or cannot be read."""
    is_missing = isinstance(error, FileNotFoundError)
    return damaged_file(path, "is missing" if is_missing else f"cannot be read: {error.strerror or error}")


def refuse_strange(tensors: Mapping[str, Tensor]) -> None:
    """Raise where a tensor's layout or dtype cannot be stored."""
    import torch

    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or str(tensor.dtype) not in NAMES:
            kind = tensor.layout if tensor.layout != torch.strided else tensor.dtype
            problem = f"{name} has a dtype that checkpoints cannot store: {kind}"
            remedy = "use a plain tensor, or keep it out of the model's state"
            raise ConfigError(problem, where="train.task", remedy=remedy)


def _pieces(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """Yield the content of a file in pieces."""
    kept, same = distinct(tensors)
    # The widest first, so that each lies at a multiple of its width, without gaps: safetensors maps them as they are.
    order = sorted(kept, key=lambda name: (-kept[name].element_size(), name))
    yield memoryview(_header(kept, order, same))
    for name in order:
        data = tensor_bytes(kept[name])
        for start in range(0, len(data), PIECE_BYTES):
            yield data[start : start + PIECE_BYTES]
        del data


def _header(kept: Mapping[str, Tensor], order: list[str], same: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {_METADATA: {"format": "pt", "same": json.dumps(same)}}
    offset = 0
    for name in order:
        tensor, begin = kept[name], offset
        offset += nbytes(tensor)
        header[name] = {"dtype": NAMES[str(tensor.dtype)], "shape": list(tensor.shape), "data_offsets": [begin, offset]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _opened(disk: Disk, path: Path, written: WrittenFile) -> int:
    """Open a file for reading; raise if its size is not as written."""
    try:
        fd = disk.open_read(path)
    except OSError as error:
        raise unreadable_file(path, error) from error
    size = os.fstat(fd).st_size
    if size == written.bytes:
        return fd
    disk.close(fd)
    problem = "is truncated" if size < written.bytes else "has extra bytes"
    raise damaged_file(path, f"{problem}: {size:,} bytes, {written.bytes:,} were written")


def _skim(disk: Disk, fd: int, path: Path, begin: int, end: int, digest: Callable[[Any], None]) -> None:
    """Read bytes for the digest only."""
    scratch = memoryview(bytearray(min(PIECE_BYTES, end - begin)))
    for start in range(begin, end, PIECE_BYTES):
        _read_exactly(disk, fd, path, scratch[: min(PIECE_BYTES, end - start)], start, digest)


def _read_exactly(
    disk: Disk, fd: int, path: Path, into: memoryview, offset: int, digest: Callable[[Any], None]
) -> None:
    for start in range(0, len(into), PIECE_BYTES):
        piece = into[start : start + PIECE_BYTES]
        try:
            filled = disk.fill(fd, [piece], offset + start)
        except OSError as error:
            raise unreadable_file(path, error) from error
        if filled < len(piece):
            raise damaged_file(path, "was truncated while being read")
        digest(piece)


def _compare(path: Path, digest: Any, written: WrittenFile) -> None:
    if digest.hexdigest() != written.digest:
        raise damaged_file(path, "has changed since it was written (checksum mismatch)")


def refuse_misfits(specs: Mapping[str, TensorSpec], targets: Mapping[str, Tensor], path: Path) -> None:
    """Raise unless there is a tensor for every target, of the same dtype and shape."""
    wrong = [f"{name} is missing" for name in targets if name not in specs]
    for name, target in targets.items():
        spec = specs.get(name)
        if spec is not None and (spec.shape, spec.dtype) != (tuple(target.shape), target.dtype):
            wrong.append(f"{name} is {tensor_words(spec)}, not {tensor_words(target)}")
    if wrong:
        more = f"; and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
        problem = f"this checkpoint belongs to another model: {'; '.join(wrong[:_MOST_NAMED])}{more}"
        raise ConfigError(problem, where=str(path), remedy=OTHER_MODEL)


def tensor_words(tensor: TensorSpec | Tensor) -> str:
    """Return type and shape of a tensor."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
