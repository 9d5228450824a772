"""Structure files as bytes: reading them, their formats and parsers, and limits that are checked before parsing."""

from __future__ import annotations

import os
import re
import stat
import zlib
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gemmi
import numpy as np

from pipeline.command_line import install_extra
from pipeline.keys import content_digest
from pipeline.records import Reason
from pipeline.structures.atoms import UnusableInput
from pipeline.structures.parsing import amber, molecules, plain_pdb
from pipeline.structures.parsing.aligned_errors import pae_beside
from pipeline.structures.parsing.amber import coordinates_beside

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping

    from pipeline.records import Item

KEPT_FILES, KEPT_BYTES = 4, 16 << 20


@dataclass(frozen=True, slots=True)
class File:
    """The bytes of a structure file and the digest by which they are known."""

    data: bytes
    digest: str


class StructureFiles:
    """Reads the files of items, and keeps the last few."""

    def __init__(self, reader: Callable[[str], File], paths: Callable[[Item], Iterable[str]]) -> None:
        np.empty(KEPT_BYTES, np.uint8)  # after one free of this size glibc keeps such blocks
        self._read, self._paths = reader, paths
        self._kept: dict[str, File] = {}

    def of(self, item: Item) -> dict[str, File]:
        """Return the files of an item by path; raise UnusableInput where one cannot be read."""
        files: dict[str, File] = {}
        for path in self._paths(item):
            if path not in self._kept:
                self._kept[path] = self._read(path)
                while len(self._kept) > KEPT_FILES or (len(self._kept) > 1 and total_bytes(self._kept) > KEPT_BYTES):
                    del self._kept[next(iter(self._kept))]
            files[path] = self._kept[path]
        return files


def plain_files(max_bytes: int, paths: Callable[[Item], Iterable[str]] | None = None) -> StructureFiles:
    """Return a reader of files that remembers nothing on disk; `paths` names an item's, else its structures."""
    return StructureFiles(lambda path: read_structure_file(path, max_bytes), paths or item_paths)


def read_structure_file(path: str, max_bytes: int) -> File:
    """Return the bytes of a file, and their digest."""
    data = read_file(Path(path), max_bytes)
    return File(data, content_digest(data).hex())


def item_paths(item: Item, *, pae: bool = False) -> list[str]:
    """Return the paths of an item's structures, each once, followed by its companion files.

    These are the coordinates of a topology and, with `pae`, the predicted aligned errors of unbound structures.
    """
    paths: dict[str, None] = {}
    for part in (*item.parts, *item.bound):
        paths[part.path] = None
        paths.update(dict.fromkeys(coordinates_beside(part.path)))
    for path in {part.path: None for part in item.parts} if pae else ():
        paths.update(dict.fromkeys(pae_beside(path)))
    return list(paths)


def total_bytes(files: Mapping[str, File]) -> int:
    """Return the bytes of some files."""
    return sum(len(file.data) for file in files.values())


MOST_CHARACTERS = 32 << 20  # of a BinaryCIF file as text: 350,000 atoms
MOST_OPERATIONS = 100_000  # of an assembly; the largest of the PDB has 1,680
WIDEST_NUMBER = 8
RANGE = re.compile(r"(?<!\d)(\d+)\s*-\s*(\d+)")


def check_columns(content: Mapping[str, Any], wanted: Container[str]) -> None:
    """Refuse an unpacked BinaryCIF file whose columns would be too large as text; a malformed one raises anything."""
    characters = 0
    for block in content["dataBlocks"]:
        for category in block["categories"]:
            for column in category["columns"] if category["name"].lstrip("_") in wanted else ():
                characters += sum(_characters(part) for part in (column["data"], column.get("mask")) if part)
    if characters > MOST_CHARACTERS:
        what = f"unfolds to {characters:,} characters, more than {MOST_CHARACTERS:,}"
        raise UnusableInput(Reason.FILE_TOO_LARGE, what)


def check_operations(expressions: Iterable[str]) -> None:
    """Refuse expressions such as 1-60 or (1-60)(61-88) that stand for too many operations."""
    for expression in expressions:
        count = _operations(expression)
        if count > MOST_OPERATIONS:
            what = f"an assembly of {count:,} operations, more than {MOST_OPERATIONS:,}"
            raise UnusableInput(Reason.PARSE_ERROR, what)


def _characters(part: Mapping[str, Any]) -> int:
    """Return how many characters a column takes as text; numpy reserves for each text the length of the longest."""
    from biotite.structure.io.pdbx.encoding import decode_stepwise, deserialize_encoding

    encodings = part["encoding"]
    texts = next((encoding for encoding in encodings if encoding["kind"] == "StringArray"), None)
    if texts is None:
        return _count(encodings, part["data"]) * WIDEST_NUMBER
    if (count := _count(texts["offsetEncoding"], texts["offsets"])) > MOST_CHARACTERS:
        return count
    decoders = [deserialize_encoding(encoding) for encoding in texts["offsetEncoding"]]
    offsets = np.asarray(decode_stepwise(texts["offsets"], decoders), np.int64)
    return _count(texts["dataEncoding"], part["data"]) * (1 + int(np.abs(np.diff(offsets)).max(initial=0)))


def _count(encodings: Iterable[Mapping[str, Any]], data: bytes) -> int:
    """Return the largest number of values at any step of decoding."""
    return max(
        len(data),
        *(int(encoding["srcSize"]) for encoding in encodings if encoding["kind"] in ("RunLength", "IntegerPacking")),
        0,
    )


def _operations(expression: str) -> int:
    """Return how many operations an expression stands for: the product of its groups."""
    product = 1
    for group in re.split(r"[()]+", expression):
        if group.strip(" '\","):
            spans = [int(last) - int(first) for first, last in RANGE.findall(group)]
            product *= max(1, group.count(",") + 1 + sum(span for span in spans if span > 0))
    return product


BIOTITE = (1, 5)  # the first version that reads masked columns


def has_biotite() -> bool:
    """Say whether there is a biotite that reads BinaryCIF, without importing it."""
    try:
        return tuple(int(part) for part in version("biotite").split(".")[:2]) >= BIOTITE
    except (PackageNotFoundError, ValueError):
        return False


HAS_BIOTITE = has_biotite()
PARSER = f"gemmi-{gemmi.__version__}"  # type: ignore[attr-defined]  # its stubs leave the version out
FORMATS = {
    ".pdb": "pdb",
    ".ent": "pdb",
    ".pdb1": "pdb",
    ".cif": "mmcif",
    ".mmcif": "mmcif",
    ".mcif": "mmcif",
    ".bcif": "bcif",
    **dict.fromkeys(amber.TOPOLOGIES, "amber"),
    ".sdf": "sdf",
    ".mol": "sdf",
    ".mol2": "mol2",
}


MOLECULES = ("sdf", "mol2")
GZIP_WINDOW, GZIP_MAGIC = 31, b"\x1f\x8b"
PADDING = re.compile(rb"\0*")
TAR_MAGIC, TAR_MAGIC_AT = b"ustar", 257
PACKED_BYTES, PIECE_BYTES = 16 << 10, 4 << 20


def stat_file(path: Path | str, max_bytes: int) -> os.stat_result:
    """Return a file's state; refuse one whose name, type or size already rules it out."""
    if not HAS_BIOTITE and ".bcif" in Path(path).suffixes[-2:]:
        raise UnusableInput(Reason.NEEDS_EXTRA, f"BinaryCIF needs an extra: {install_extra('bcif')}")
    if FORMATS.get(_suffix(path)) in MOLECULES and find_spec("rdkit") is None:
        what = f"{_suffix(path)} needs rdkit, an extra: {install_extra('molecules')}"
        raise UnusableInput(Reason.NEEDS_EXTRA, what)
    try:
        state = os.stat(path)  # noqa: PTH116 - it is asked of every file of a data set
    except FileNotFoundError:
        is_first = Path(path).suffix == amber.COORDINATES[0]
        others = ", nor one ending in " + " ".join(amber.COORDINATES[1:]) if is_first else ""
        raise UnusableInput(Reason.MISSING_FILE, f"no such file: {path}{others}") from None
    except (OSError, ValueError) as error:
        raise UnusableInput(Reason.UNREADABLE_FILE, f"{error}") from error
    if not stat.S_ISREG(state.st_mode):
        raise UnusableInput(Reason.UNREADABLE_FILE, f"not a file: {path}")
    if state.st_size > max_bytes:
        what = f"{_whose(Path(path))}{state.st_size:,} bytes; structures.max_file_bytes is {max_bytes:,}"
        raise UnusableInput(Reason.FILE_TOO_LARGE, what)
    return state


def read_file(path: Path, max_bytes: int) -> bytes:
    """Return a file's decompressed bytes, never more than `max_bytes` of them."""
    stat_file(path, max_bytes)
    try:
        with path.open("rb", buffering=0) as file:
            data = file.readall()
    except OSError as error:
        raise UnusableInput(Reason.UNREADABLE_FILE, f"{error}") from error
    if path.suffix.lower() == ".gz" and not _is_tar(data):
        try:
            data = gunzip(data, max_bytes)
        except UnusableInput as problem:
            raise UnusableInput(problem.reason, f"{_whose(path)}{problem.detail}") from problem
    if _is_tar(data):
        raise UnusableInput(Reason.UNKNOWN_FORMAT, f"a tar archive, which holds files of its own: tar -xf {path.name}")
    if not data or data.isspace():
        raise UnusableInput(Reason.EMPTY_FILE, f"{path} is empty")
    return data


def _whose(path: Path) -> str:
    """Name a JSON file in messages; all other messages are about the structure itself."""
    return f"{path.name}: " if ".json" in path.suffixes[-2:] else ""


def _is_tar(data: bytes) -> bool:
    return data.startswith(TAR_MAGIC, TAR_MAGIC_AT)


def gunzip(data: bytes, max_bytes: int) -> bytes:
    """Decompress every member of a gzip file, refusing one that is cut short or unfolds beyond `max_bytes`."""
    if data and not data.startswith(GZIP_MAGIC):
        raise UnusableInput(Reason.UNKNOWN_FORMAT, "not gzip data despite its suffix: rename or compress it")
    unfolded, at = bytearray(), 0
    while at < len(data):
        member = zlib.decompressobj(GZIP_WINDOW)
        while not member.eof:
            packed = data[at : at + PACKED_BYTES]
            if not packed:
                raise UnusableInput(Reason.TRUNCATED_FILE, "the gzip stream ends early")
            try:
                unfolded += member.decompress(packed, PIECE_BYTES)
            except zlib.error as error:
                raise UnusableInput(Reason.TRUNCATED_FILE, f"damaged gzip file: {error}") from error
            if len(unfolded) > max_bytes:
                raise UnusableInput(Reason.FILE_TOO_LARGE, f"unfolds beyond structures.max_file_bytes ({max_bytes:,})")
            at += len(packed) - len(member.unused_data if member.eof else member.unconsumed_tail)
        at = next(PADDING.finditer(data, at)).end()
    return bytes(unfolded)


def format_of(path: Path) -> str:
    """Return the format of a file by its suffix."""
    try:
        return FORMATS[_suffix(path)]
    except KeyError:
        known = " ".join(FORMATS)
        what = f"{path.name}: the suffix is none of {known} (or these with .gz)"
        raise UnusableInput(Reason.UNKNOWN_FORMAT, what) from None


def _suffix(path: Path | str) -> str:
    stem, suffix = os.path.splitext(path)  # noqa: PTH122 - it is asked of every file of a data set
    return (os.path.splitext(stem)[1] if suffix.lower() == ".gz" else suffix).lower()  # noqa: PTH122


@cache
def parser_of(form: str) -> str:
    """Name the parser of a format, with its version."""
    if form in MOLECULES:
        return f"rdkit-{_version('rdkit')}+{form}-{molecules.REVISION}"
    if form == "amber":
        return f"amber-{amber.REVISION}+{PARSER}"  # gemmi knows what its residues are by their names
    if form == "pdb" and plain_pdb.REVISION:
        return f"{PARSER}+plain-{plain_pdb.REVISION}"
    return f"{PARSER}+biotite-{version('biotite')}" if form == "bcif" and HAS_BIOTITE else PARSER


def parsers() -> dict[str, str]:
    """Return the parser of each format that can be read here."""
    forms = (form for form in dict.fromkeys(FORMATS.values()) if form not in MOLECULES or find_spec("rdkit"))
    return {form: parser_of(form) for form in forms}


def _version(package: str) -> str:
    """Return the version of a package; conda may have installed it without metadata."""
    try:
        return version(package)
    except PackageNotFoundError:
        return str(import_module(package).__version__)
