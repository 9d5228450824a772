"""The two containers that weights come in, read without executing anything that is in them."""

from __future__ import annotations

import errno
import pickle
import re
import warnings
import zipfile
from argparse import Namespace
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from pipeline.encoder.files import FETCH_AGAIN, USE_ESM2, unreadable
from pipeline.errors import WeightsUnusable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

ZIP = b"PK\x03\x04"
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)|(?:class|function) ([\w.]+) (?:was|is) not")
_CUT_SHORT = ("central directory", "unexpected EOF", "not fully covered", "invalid header or archive")


def read_pt(path: Path) -> Any:
    """Return what torch.save wrote to a file: tensors, plain data and argparse.Namespace, and nothing else."""
    head = _head(path)
    _refuse_packed(path)
    try:
        return _load(path, mapped=head.startswith(ZIP))
    except OSError as error:
        if error.errno == errno.EINVAL:  # torch looks for the archive's end before the file's beginning
            raise _not_a_checkpoint(path, EOFError(), is_zip=head.startswith(ZIP)) from error
        raise unreadable(path, error) from error
    except MemoryError:
        raise
    except pickle.UnpicklingError as error:
        raise _refused(path, str(error)) from error
    except Exception as error:  # a parser on foreign bytes raises anything, and none of it is a bug of ours
        raise _not_a_checkpoint(path, error, is_zip=head.startswith(ZIP)) from error


def read_safetensors(paths: Iterable[Path]) -> dict[str, torch.Tensor]:
    """Return every tensor of some .safetensors files, mapped."""
    tensors: dict[str, torch.Tensor] = {}
    for path in paths:
        _head(path)
        try:
            with safe_open(path, framework="pt") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        except OSError as error:
            raise unreadable(path, error) from error
        except (SafetensorError, ValueError, KeyError, AttributeError, RuntimeError) as error:
            raise _not_a_checkpoint(path, error, is_zip=False) from error
    return tensors


def _load(path: Path, *, mapped: bool) -> Any:
    """Unpickle a file with torch's restricted unpickler; the old format cannot be mapped, and some disks neither."""
    with _namespaces_allowed(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected pickle protocol")
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        except RuntimeError as error:
            if not mapped or "mmap" not in str(error):
                raise
        return torch.load(path, map_location="cpu", weights_only=True, mmap=False)


@contextmanager
def _namespaces_allowed() -> Iterator[None]:
    """Let argparse.Namespace pass, in which fair-esm keeps the architecture; it holds values and does nothing."""
    if hasattr(torch.serialization, "safe_globals"):
        with torch.serialization.safe_globals([Namespace]):
            yield
        return
    before = torch.serialization.get_safe_globals()  # torch 2.4
    torch.serialization.add_safe_globals([Namespace])
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def _head(path: Path) -> bytes:
    """Return a file's first bytes, unless they tell that it is something else altogether."""
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except OSError as error:
        raise unreadable(path, error) from error
    if not head:
        raise WeightsUnusable("the file is empty", where=str(path), remedy=FETCH_AGAIN)
    if head.lstrip()[:1] == b"<" and b"\0" not in head:
        raise WeightsUnusable("is a web page, not a checkpoint", where=str(path), remedy=FETCH_AGAIN)
    if head.startswith(b"version https://git-lfs"):
        what = "is the pointer that git-lfs leaves in place of a file, not the file"
        raise WeightsUnusable(what, where=str(path), remedy=f"git -C {path.parent} lfs pull")
    return head


def _refuse_packed(path: Path) -> None:
    """Refuse an archive whose parts are compressed: torch never does that, and mapped, it would read noise.

    So nothing unfolds to more than the file has. What is no archive is for torch to judge.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError):
        return
    size_bytes, unfolded_bytes = path.stat().st_size, sum(member.file_size for member in members)
    if unfolded_bytes > size_bytes or any(member.compress_type != zipfile.ZIP_STORED for member in members):
        what = f"is a compressed archive ({size_bytes:,} bytes stand for {unfolded_bytes:,}), which no checkpoint is"
        raise WeightsUnusable(what, where=str(path), remedy=USE_ESM2)


def _refused(path: Path, message: str) -> WeightsUnusable:
    """Say what torch's unpickler would not do."""
    match = _GLOBAL.search(message)
    if match is None:
        return WeightsUnusable("is not a checkpoint that torch can read", where=str(path), remedy=USE_ESM2)
    what = f"wants to run code when it is read: its pickle asks for {match[1] or match[2]}. Nothing of it was run"
    return WeightsUnusable(what, where=str(path), remedy=f"do not trust this file; {USE_ESM2}")


def _not_a_checkpoint(path: Path, error: Exception, *, is_zip: bool) -> WeightsUnusable:
    """Say that a file is cut short, or is something else."""
    message = str(error)
    if any(sign in message for sign in _CUT_SHORT) or (isinstance(error, EOFError) and is_zip):
        return WeightsUnusable("is truncated: its end is missing", where=str(path), remedy=FETCH_AGAIN)
    reason = f"{type(error).__name__}: {message.splitlines()[0][:120]}" if message else type(error).__name__
    return WeightsUnusable(f"is not a checkpoint that torch can read ({reason})", where=str(path), remedy=USE_ESM2)
