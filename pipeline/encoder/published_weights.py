"""Reads published weights, .pt and .safetensors files, without executing anything in them, and renames tensors.

A Lightning checkpoint pickles the classes of its settings, and a TorchScript archive those of its modules. Their
packages are not imported, and nothing in them runs: tensors and plain data are read, and inert objects stand for the
rest. A file is refused if it names a function, or a class of Python's standard library that is no container of values.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import struct
import sys
import warnings
import zipfile
import zlib
from argparse import Namespace
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import cache
from mmap import ACCESS_READ, mmap
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from pipeline.encoder.checkpoint_files import FETCH_AGAIN, USE_ESM2, unreadable_checkpoint, unusable
from pipeline.errors import WeightsUnusable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

# Types of Python and NumPy that only hold values; a name that ends with a dot is a module's.
VALUES = (
    "pathlib.", "datetime.", "decimal.", "uuid.", "collections.", "types.SimpleNamespace", "argparse.Namespace",
    "numpy.dtype", "numpy.dtypes.", "numpy.ndarray", "numpy.core.multiarray.", "numpy._core.multiarray.",
)  # fmt: skip
OF_MODULES = "__torch__."  # where a TorchScript archive has its own classes
SCRIPT = re.compile(r"[^/]+/constants\.pkl")  # a member that only such an archive has
_SCRIPT_LISTS = [f"torch.jit._pickle.build_{kind}list" for kind in ("int", "double", "bool", "tensor")]
STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
}  # fmt: skip


class Inert:
    """Stands for an object of an unknown class: it can be made and filled, and does nothing."""

    state: Any = None

    def __new__(cls, *_arguments: Any, **_named: Any) -> Inert:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _stand_ins() -> dict[str, Any]:
    """Return stand-ins for functions, new ones for each file: a pickle can change their defaults."""
    return {
        "collections.OrderedDict": lambda: OrderedDict(),
        "torch._utils._rebuild_tensor_v2": lambda flat, offset, size, stride, *_: flat.as_strided(size, stride, offset),
        "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
        "torch.jit._pickle.restore_type_tag": lambda value, _type: value,
        **dict.fromkeys(_SCRIPT_LISTS, lambda values, *_: values),
    }


def _is_of_values(name: str) -> bool:
    return any(name.startswith(known) if known.endswith(".") else name == known for known in VALUES)


def _is_foreign_class(name: str) -> bool:
    """Tell the class of a package by its capital; functions, which would be called, have none."""
    package, last = name.partition(".")[0], name.rpartition(".")[2]
    return package not in {*sys.stdlib_module_names, "torch", "numpy"} and last.lstrip("_")[:1].isupper()


class _ScriptUnpickler(pickle.Unpickler):
    """Reads the data of a TorchScript archive: tensors, containers, and inert objects in place of its modules."""

    def __init__(self, archive: zipfile.ZipFile, root: str) -> None:
        data = archive.read(f"{root}data.pkl")
        for opcode, place, _ in pickletools.genops(data):
            if opcode.name.endswith("PUT") and int(place or 0) > len(data):  # it reserves all before
                raise pickle.UnpicklingError(f"{opcode.name} {place}")
        super().__init__(io.BytesIO(data))
        self.known, self.stored = _stand_ins(), cache(lambda key: bytearray(archive.read(f"{root}data/{key}")))

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.".startswith(OF_MODULES):
            return Inert
        known = self.known.get(f"{module}.{name}") or (module == "torch" and STORAGES.get(name))
        if not known:
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")
        return known

    def persistent_load(self, place: Any) -> Any:
        _, dtype, key, _, numbers = place
        if not numbers:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.stored(key), dtype=dtype, count=numbers)


def script_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a TorchScript archive by name, as its modules have them; none of its code is loaded."""
    with zipfile.ZipFile(path) as archive:
        root = next(filter(SCRIPT.fullmatch, archive.namelist())).partition("/")[0]
        return dict(_below(_ScriptUnpickler(archive, f"{root}/").load(), ""))


def _below(held: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of an inert module and of those within it."""
    if isinstance(held, torch.Tensor):
        yield name, held
    elif isinstance(held, Inert) and isinstance(held.state, dict):
        for key, value in held.state.items():
            yield from _below(value, f"{name}.{key}" if name else key)


ZIP = b"PK\x03\x04"
_ZIP64_END_BYTES = 98  # of the three records at the end of an archive that may be large
CODE = re.compile(r"[^/]+/code/")  # where a TorchScript archive has its own
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)|(?:class|function) ([\w.]+) (?:was|is) not")
_CUT_SHORT = ("unexpected EOF", "not fully covered")


def read_pt(path: Path, *, foreign: bool = False) -> Any:
    """Return the content of a torch.save file; anything but tensors, plain data and argparse.Namespace is refused.

    With `foreign`, inert objects stand for instances of unknown classes, and TorchScript archives are read, too.
    """
    head = _head(path)
    members = _members(path) if head.startswith(ZIP) else []
    try:
        if foreign and any(map(SCRIPT.fullmatch, members)):
            return script_tensors(path)
        with torch.serialization.safe_globals(_inert(path) if foreign and members else []):
            return _load(path, mapped=head.startswith(ZIP))
    except OSError as error:
        raise unreadable_checkpoint(path, error) from error
    except MemoryError:
        raise
    except pickle.UnpicklingError as error:
        raise _refused(path, str(error)) from error
    except Exception as error:  # a parser may raise anything on unknown bytes
        raise _not_a_checkpoint(path, error) from error


def read_safetensors(paths: Iterable[Path]) -> dict[str, torch.Tensor]:
    """Return every tensor of some .safetensors files, mapped."""
    tensors: dict[str, torch.Tensor] = {}
    for path in paths:
        _head(path)
        try:
            with safe_open(path, framework="pt") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        except OSError as error:
            raise unreadable_checkpoint(path, error) from error
        except (SafetensorError, ValueError, KeyError, AttributeError, RuntimeError) as error:
            raise _not_a_checkpoint(path, error) from error
    return tensors


def _load(path: Path, *, mapped: bool) -> Any:
    """Load a file with torch's restricted unpickler, mapped where the format and the file system allow it."""
    # fair-esm keeps the architecture in an argparse.Namespace, which only holds values.
    with torch.serialization.safe_globals([Namespace]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected pickle protocol")
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        except RuntimeError as error:
            if not mapped or "mmap" not in str(error):
                raise
        return torch.load(path, map_location="cpu", weights_only=True, mmap=False)


def _head(path: Path) -> bytes:
    """Return a file's first bytes; refuse an empty file, a web page and a git-lfs pointer."""
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except OSError as error:
        raise unreadable_checkpoint(path, error) from error
    if not head:
        raise unusable("the file is empty", path, FETCH_AGAIN)
    if head.lstrip()[:1] == b"<" and b"\0" not in head:
        raise unusable("is a web page, not a checkpoint", path, FETCH_AGAIN)
    if head.startswith(b"version https://git-lfs"):
        raise unusable("is a git-lfs pointer, not the file itself", path, f"git -C {path.parent} lfs pull")
    return head


def _inert(path: Path) -> list[Any]:
    """Return stand-ins for the foreign classes in an archive; leave out names that must be refused."""
    names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    return [(Inert, name) for name in names if _is_of_values(name) or _is_foreign_class(name)]


def _members(path: Path) -> list[str]:
    """Return the names in an archive; refuse one with compressed members, or whose directory another reader may miss.

    Torch never writes compressed ones, and mapped, they would be read as noise. So nothing unpacks to more than the
    file's size. The code of a TorchScript archive is compressed; nothing reads it.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = [member for member in archive.infolist() if not CODE.match(member.filename)]
        size_bytes = path.stat().st_size
        if not _ends_with_its_directory(path, size_bytes):
            raise zipfile.BadZipFile
    except OSError as error:
        raise unreadable_checkpoint(path, error) from error
    except (ValueError, zipfile.BadZipFile, NotImplementedError) as error:
        raise unusable("is truncated: its end is missing", path, FETCH_AGAIN) from error
    unfolded_bytes = sum(member.file_size for member in members)
    if unfolded_bytes > size_bytes or any(member.compress_type != zipfile.ZIP_STORED for member in members):
        what = f"is a compressed archive ({size_bytes:,} bytes stand for {unfolded_bytes:,}), which is not a checkpoint"
        raise unusable(what, path)
    return [member.filename for member in members]


def _ends_with_its_directory(path: Path, size_bytes: int) -> bool:
    """Say whether an archive ends with its directory, where its end says, as torch writes it.

    In any other archive, torch could find another directory than the one that was checked.
    """
    with path.open("rb") as file:
        start = file.seek(max(0, size_bytes - _ZIP64_END_BYTES))
        tail = file.read()
    if tail[-42:-38] != b"PK\6\7":
        return tail[-22:-18] == b"PK\5\6" and sum(struct.unpack("<2L", tail[-10:-2])) == size_bytes - 22
    (place,), sizes = struct.unpack("<Q", tail[-34:-26]), struct.unpack("<2Q", tail[-58:-42])
    return (tail[:4], tail[-22:-18]) == (b"PK\6\6", b"PK\5\6") and place == sum(sizes) == start


def refuse_flipped_bits(path: Path) -> None:
    """Refuse an archive whose bytes are not those of its checksums, which torch does not compare; others have none.

    A checksum of 0 is one that was not computed.
    """
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive, path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        for member in archive.infolist():
            if not member.CRC or member.compress_type != zipfile.ZIP_STORED:
                continue
            start = member.header_offset + 30 + sum(struct.unpack_from("<HH", data, member.header_offset + 26))
            with memoryview(data) as view, view[start : start + member.file_size] as content:
                is_whole = zlib.crc32(content) == member.CRC
            if not is_whole:
                raise unusable(f"is damaged: {member.filename} has changed (checksum mismatch)", path, FETCH_AGAIN)


def _refused(path: Path, message: str) -> WeightsUnusable:
    """Return the error for a file that torch's restricted unpickler refuses."""
    match = _GLOBAL.search(message)
    if match is None:
        return unusable("is not a checkpoint that torch can read", path)
    what = f"tries to run code when loaded: its pickle imports {match[1] or match[2]}. Nothing was executed"
    return unusable(what, path, f"do not trust this file; {USE_ESM2}")


def _not_a_checkpoint(path: Path, error: Exception) -> WeightsUnusable:
    """Return the error for a file that is truncated, or no checkpoint."""
    message = str(error)
    if any(sign in message for sign in _CUT_SHORT):
        return unusable("is truncated: its end is missing", path, FETCH_AGAIN)
    reason = f"{type(error).__name__}: {message.splitlines()[0][:120]}" if message else type(error).__name__
    return unusable(f"is not a checkpoint that torch can read ({reason})", path)


@dataclass(frozen=True)
class Form:
    """The names and layouts under which a system publishes weights.

    Names are ours → theirs, of parameters or of modules with all that is in them; "*" is a number, the same in both.
    The longest name that fits decides. What the table does not know stays as it is.
    """

    names: Mapping[str, str]
    signs: tuple[str, ...]  # names of theirs that only a file of this system has
    left: tuple[str, ...] = ()  # theirs that no model here needs: patterns, as of file names
    fresh: tuple[str, ...] = ()  # ours that their files lack: patterns of what may stay as it begins
    prefix: str = ""  # of their names; a file may lack it
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # one tensor of ours → the names of their parts
    parted: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # one of theirs → names for our parts of it
    turned: frozenset[str] = frozenset()  # ours that they store transposed

    def knows(self, names: Collection[str]) -> bool:
        """Say whether tensors of these names are of this system."""
        return {name.removeprefix(self.prefix) for name in names}.issuperset(self.signs)

    def read(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return tensors under our names."""
        found = {name.removeprefix(self.prefix): tensor for name, tensor in tensors.items()}
        back = {theirs: ours for ours, theirs in self.names.items()}
        ours = {renamed(name, back): tensor for name, tensor in _join(_part(found, self.parted), self.joined).items()}
        return {name: tensor.T.contiguous() if name in self.turned else tensor for name, tensor in ours.items()}

    def write(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return tensors under their names, to the bit what `read` was given."""
        theirs = {
            renamed(name, self.names): tensor.T.contiguous() if name in self.turned else tensor
            for name, tensor in tensors.items()
        }
        return {self.prefix + name: tensor for name, tensor in _join(_part(theirs, self.joined), self.parted).items()}


def _part(tensors: Mapping[str, Any], groups: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """Cut each tensor of a group into its parts, which share its memory."""
    found = dict(tensors)
    for whole, parts in groups.items():
        for name, tensor in tensors.items():
            if f".{whole}." in name and isinstance(tensor, torch.Tensor) and tensor.ndim:
                names = [name.replace(f".{whole}.", f".{part}.") for part in parts]
                found |= zip(names, found.pop(name).tensor_split(len(parts)), strict=True)
    return found


def _join(tensors: Mapping[str, Any], groups: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """Concatenate the parts of each group of which all are there."""
    found = dict(tensors)
    for whole, (first, *others) in groups.items():
        for name in [name for name in tensors if f".{first}." in name]:
            names = [name, *(name.replace(f".{first}.", f".{other}.") for other in others)]
            if all(part in found for part in names):
                found[name.replace(f".{first}.", f".{whole}.")] = torch.cat([found.pop(part) for part in names])
    return found


def renamed(name: str, names: Mapping[str, str]) -> str:
    """Return a parameter's other name by a table of names and modules, or the one that it has.

    Of several that fit the longest decides, and among those that with the fewest "*".
    """
    parts = name.split(".")
    fitting = [(-len(signs), signs.count("*"), signs) for known in names if _fits(signs := known.split("."), parts)]
    if not fitting:
        return name
    _, _, signs = min(fitting)
    other = names[".".join(signs)]
    for sign, part in zip(signs, parts, strict=False):
        other = other.replace("*", part, 1) if sign == "*" else other
    return ".".join([other, *parts[len(signs) :]])


def _fits(signs: Sequence[str], parts: Sequence[str]) -> bool:
    """Tell whether a name begins with these parts; "*" stands for a number."""
    pairs = zip(signs, parts, strict=False)
    return len(signs) <= len(parts) and all(sign == part or (sign == "*" and part.isdigit()) for sign, part in pairs)
