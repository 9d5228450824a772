"""Sealed folders: tensors and JSON data that appear whole or not at all, and are verified whenever they are read.

    NAME/    *.safetensors    tensors, also for other programs
             manifest.json    sizes and digests of those files, the identity of their owner, and all JSON data

    seal(folder / NAME, {"weights": tensors}, data, identity)     write aside, flush, rename
    sealed = unseal(folder / NAME)                                every byte is read and compared
    sealed.data["step"]; sealed.tensors("weights")["layer.bias"]  tensors are mapped, not copied

The manifest's first line holds the format's version and a digest of all that follows: any changed byte is detected, and
a later format is not mistaken for damage. If several processes fill a folder, each writes its files with
`write_tensors`, and one of them calls `write_manifest` and `publish`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import xxhash
from safetensors import SafetensorError, safe_open

from pipeline.errors import ConfigError, JobFailed
from pipeline.keys import content_digest
from pipeline.store.format.disk import Disk

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from torch import Tensor

Key = TypeVar("Key")

FORMAT = 1
MANIFEST = "manifest.json"
TENSORS = ".safetensors"
PIECE_BYTES = 8 << 20  # read or written, and digested, at once
ANOTHER = "choose an intact checkpoint, or train again"
OTHER_MODEL = "use the model that wrote it, or train into a new folder (train.models)"
_HEAD = re.compile(rb'\{"format": (\d+), "digest": "([0-9a-f]{32})", "sealed":\n')
# dtypes by their names in a file. Strings, so that reading manifests does not wait for torch.
DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "C64": "complex64", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
DTYPE_NAMES = {f"torch.{dtype}": name for name, dtype in DTYPES.items()}


class FolderDamaged(JobFailed):
    """Bytes of a sealed folder are missing, unreadable, or differ from those that were written."""


class WrittenFile(NamedTuple):
    """The size and digest of a file as it was written."""

    bytes: int
    digest: str  # xxh3-128, in hexadecimal


@dataclass(frozen=True)
class SealedFolder:
    """A folder whose manifest was verified; each file is verified before its tensors are mapped."""

    path: Path
    identity: Mapping[str, Any]
    files: Mapping[str, WrittenFile]
    data: Mapping[str, Any]
    digest: str  # of the manifest, and so of all bytes
    remedy: str = field(default=ANOTHER, compare=False)
    disk: Disk = field(default_factory=Disk, compare=False, repr=False)
    _verified: set[str] = field(default_factory=set, init=False, compare=False, repr=False)

    def verify(self) -> None:
        """Read all files; raise FolderDamaged if a byte differs."""
        for name in self.files:
            self._verify(name)

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of a file, mapped; tied ones are the same object under each of their names."""
        self._verify(file := f"{name}{TENSORS}")
        try:
            with safe_open(self.path / file, framework="pt") as opened:
                same = json.loads((opened.metadata() or {}).get("same", "{}"))
                tensors = {name: opened.get_tensor(name) for name in opened.offset_keys()}
        except SafetensorError as error:
            raise FolderDamaged(f"cannot be read: {error}", where=str(self.path / file), remedy=self.remedy) from error
        return tensors | {alias: tensors[first] for alias, first in same.items()}

    def refuse_stranger(self, identity: Mapping[str, Any]) -> None:
        """Raise unless the folder has this identity; the error lists the differences."""
        differing = [
            f"{name} is {self.identity.get(name, 'nothing')} there, {identity.get(name, 'nothing')} here"
            for name in sorted({*self.identity, *identity})
            if self.identity.get(name) != identity.get(name)
        ]
        if differing:
            problem = f"this checkpoint belongs to another training: {'; '.join(differing)}"
            raise ConfigError(problem, where=str(self.path), remedy=OTHER_MODEL)

    def _verify(self, name: str) -> None:
        """Read a whole file, once; raise FolderDamaged unless its bytes are those that were written."""
        if name in self._verified:
            return
        written, digest, size = self.files[name], xxhash.xxh3_128(), 0
        for piece in _read(self.path / name, self.disk, self.remedy):
            digest.update(piece)
            size += len(piece)
        if (size, digest.hexdigest()) != written:
            problem = f"has changed since it was written (checksum mismatch): {size:,} of {written.bytes:,} bytes"
            raise FolderDamaged(problem, where=str(self.path / name), remedy=self.remedy)
        self._verified.add(name)


def seal(
    path: Path,
    tensors: Mapping[str, Mapping[str, Tensor]],
    data: Mapping[str, Any],
    identity: Mapping[str, Any] | None = None,
    *,
    partial: Path | None = None,
    disk: Disk | None = None,
) -> None:
    """Publish a folder with a file for each group of tensors; after an error nothing is left of it.

    `partial` is where it is written first; what a killed process has left there is removed.
    """
    disk, partial = disk or Disk(), partial or path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        disk.make_folder(partial)
        groups = {f"{name}{TENSORS}": group for name, group in tensors.items()}
        files = {file: write_tensors(partial / file, group, disk) for file, group in groups.items()}
        write_manifest(partial / MANIFEST, files, data, identity or {}, disk)
        publish(partial, path, disk)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def publish(partial: Path, path: Path, disk: Disk) -> None:
    """Give a folder with all its files and its manifest its name."""
    disk.fsync_folder(partial)
    disk.rename(partial, path)
    disk.fsync_folder(path.parent)


def unseal(path: Path) -> SealedFolder:
    """Open a folder after reading and verifying every byte."""
    sealed = read_sealed(path)
    sealed.verify()
    return sealed


def read_sealed(
    path: Path, manifest: str = MANIFEST, *, remedy: str = ANOTHER, disk: Disk | None = None
) -> SealedFolder:
    """Open a folder by its manifest alone, without torch; its files are verified when they are used."""
    disk, file = disk or Disk(), path / manifest
    content = b"".join(map(bytes, _read(file, disk, remedy)))
    head, line, body = content.partition(b"\n")
    match = _HEAD.fullmatch(head + line)
    if match is None or _digest(int(match[1]), body) != match[2].decode():
        problem = f"is damaged: its {len(content):,} bytes differ from those written"
        raise FolderDamaged(problem, where=str(file), remedy=remedy)
    if int(match[1]) > FORMAT:
        problem = f"is of format {int(match[1])}; this version of pipeline reads up to {FORMAT}"
        raise ConfigError(problem, where=str(file), remedy="use the version of pipeline that wrote it, or a newer one")
    sealed = json.loads(content)["sealed"]
    files = {name: WrittenFile(*written) for name, written in sealed["files"].items()}
    return SealedFolder(path, sealed["identity"], files, sealed["data"], match[2].decode(), remedy, disk)


def write_manifest(
    path: Path, files: Mapping[str, WrittenFile], data: Mapping[str, Any], identity: Mapping[str, Any], disk: Disk
) -> None:
    """Write a manifest and wait until it is on the disk."""
    body = json.dumps({"identity": identity, "files": files, "data": data}, indent=1).encode() + b"}\n"
    head = f'{{"format": {FORMAT}, "digest": "{_digest(FORMAT, body)}", "sealed":\n'
    _write(path, [head.encode() + body], disk)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], disk: Disk) -> WrittenFile:
    """Write a new file of tensors, a tensor at a time, and wait until it is on the disk; tied ones are written once."""
    return _write(path, _pieces(tensors), disk)


def distinct(tensors: Mapping[Key, Tensor]) -> tuple[dict[Key, Tensor], dict[Key, Key]]:
    """Return each tensor under its first name only, and the first name of every other name."""
    kept: dict[Key, Tensor] = {}
    same: dict[Key, Key] = {}
    first_names: dict[Any, Key] = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()._cdata  # noqa: SLF001 - tensors on the meta device have no other address
        place = (storage, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj())
        if (first := first_names.setdefault(place, name)) == name:
            kept[name] = tensor
        else:
            same[name] = first
    return kept, same


def _read(path: Path, disk: Disk, remedy: str) -> Iterator[memoryview]:
    """Yield the content of a file in pieces, each valid until the next."""
    try:
        fd = disk.open_read(path)
        try:
            piece, offset = memoryview(bytearray(min(PIECE_BYTES, disk.size_of_open(fd)))), 0
            while count := disk.fill(fd, [piece], offset):
                yield piece[:count]
                offset += count
        finally:
            disk.close(fd)
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError)
        problem = "is missing" if is_missing else f"cannot be read: {error.strerror or error}"
        raise FolderDamaged(problem, where=str(path), remedy=remedy) from error


def _write(path: Path, pieces: Iterable[bytes | memoryview], disk: Disk) -> WrittenFile:
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


def _pieces(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """Yield the content of a safetensors file in pieces."""
    kept, same = distinct(tensors)
    # The widest first, so that each lies at a multiple of its width, without gaps: safetensors maps them as they are.
    order = sorted(kept, key=lambda name: (-kept[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "same": json.dumps(same)}}
    end = 0
    for name in order:
        begin, end = end, end + kept[name].nbytes
        dtype, shape = DTYPE_NAMES[str(kept[name].dtype)], list(kept[name].shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for name in order:
        data = _bytes_of(kept[name])
        for start in range(0, len(data), PIECE_BYTES):
            yield data[start : start + PIECE_BYTES]
        del data


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes: its own where it is contiguous and on the CPU, else a copy's."""
    import torch

    whole = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    flat = whole.as_strided((whole.numel(),), (1,))  # where there is only one value, its stride may be anything
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]  # before 3.12 the stubs lack it


def _digest(version: int, body: bytes) -> str:
    return content_digest(b"%d\n" % version + body).hex()
