"""Files: atomic replacement, owners, states, digests, CSV tables, and the shipped folders."""

from __future__ import annotations

import csv
import grp
import io
import json
import os
import pwd
import re
import secrets
import stat
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TypeAlias

import xxhash

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any, TextIO


PIECE_BYTES = 8 << 20
# Text seldom shrinks more than 30 times; a file far beyond that is a decompression bomb.
MAX_EXPANSION, EXPANSION_FLOOR_BYTES = 200, 64 << 20

PACKAGED = Path(__file__).parent / "data"
CHECKOUT = Path(__file__).parents[1]


def shipped(name: str) -> Path:
    """Return a folder that is shipped, such as configs/recipes."""
    return (PACKAGED if PACKAGED.is_dir() else CHECKOUT) / name


SHARED = stat.S_ISGID | stat.S_IWGRP  # set-group-ID folder with group write access: its files belong to the group
FOR_GROUP = stat.S_IRGRP | stat.S_IWGRP


def shared_bits(folder: Path) -> int:
    """Return the mode bits that a group's folder adds to its files regardless of the umask, else 0."""
    return FOR_GROUP if folder.stat().st_mode & SHARED == SHARED else 0


def whose(path: Path) -> str:
    """Describe the owner and the mode of a path or of its nearest existing parent."""
    for there in (path, *path.parents):
        try:
            status = there.stat()
        except OSError:  # missing, or in a folder that we may not enter
            continue
        owner, group = user_name(status.st_uid), _group_name(status.st_gid)
        return f"{there} belongs to {owner}, group {group}, mode {stat.filemode(status.st_mode)}"
    return ""


def is_mine(path: Path) -> bool:
    """Tell whether a path belongs to this user, also on file systems that map user ids."""
    owner = path.stat().st_uid
    if owner == os.geteuid():
        return True
    try:
        return owner == user_on(path.parent)
    except OSError:  # not possible in a read-only folder
        return False


def user_on(folder: Path) -> int:
    """Return this user's id on a file system: servers may map root to `nobody`, mounts all users to one."""
    with TemporaryDirectory(prefix=".who-", dir=folder) as made:
        return os.stat(made).st_uid  # noqa: PTH116 - a name


def user_name(uid: int) -> str:
    """Return the name of a user, or the number of an unknown one."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


FileState: TypeAlias = "tuple[str, int, int, int, int]"  # path, inode, size, mtime, ctime: any write changes one
_MOUNTS = Path("/proc/self/mountinfo")
_FLEETING = ("fuse", "cifs", "smb")  # prefixes of file systems with unstable inode numbers


def inode_of(state: os.stat_result) -> int:
    """Return a file's inode number; 0 on file systems with unstable ones.

    It detects that a file was replaced by another of the same size and times, by a changed link or a renamed folder.
    """
    return 0 if file_system(state.st_dev).startswith(_FLEETING) else state.st_ino


def state_of(path: Path | str, status: os.stat_result) -> FileState:
    """Return the state of a file from its `stat`."""
    return str(path), inode_of(status), status.st_size, status.st_mtime_ns, status.st_ctime_ns


@lru_cache(maxsize=64)
def file_system(device: int) -> str:
    """Return the type of the file system with that device number, such as ext4; empty if unknown."""
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = _MOUNTS.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    fields = (line.split() for line in mounts)  # … device … - type …
    types = (words[words.index("-") + 1] for words in fields if "-" in words[3:-1] and words[2] == number)
    return next(types, "")


def file_digest(path: Path) -> str:
    """Return the digest of a file's content, read piece by piece."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def what_is_no_file(path: Path) -> str:
    """Return "a folder" or "a device" if that is at a path where a file is wanted; else an empty text."""
    return "" if path.is_file() or not path.exists() else "a folder" if path.is_dir() else "a device"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; it replaces `path` at the end, and is removed if writing fails.

    Its mode follows the umask and, in a group's folder, the group.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        yield aside
        if bits := shared_bits(path.parent):
            aside.chmod(stat.S_IMODE(aside.stat().st_mode) | bits)
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically: readers see the old content or the new."""
    data = content.encode() if isinstance(content, str) else content
    with replacing(path) as aside:
        aside.write_bytes(data)


def create_claim(path: Path, claimant: str) -> bool:
    """Create a claim file; return False if another process was first."""
    try:
        with path.open("x") as file:
            file.write(claimant)
    except FileExistsError:
        return False
    return True


def last_claim(folder: Path) -> int:
    """Return the highest number of the claims in a folder; 0 without claims.

    List the folder, as NFS may cache that a name is missing; a removed file may stay in it as `.nfs…` for a while.
    """
    return max((int(path.name) for path in folder.iterdir() if path.name.isdecimal()), default=0)


_FORMULA = re.compile(r"'*[=+@\t\r-].", re.DOTALL)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)


def csv_cell(value: Any) -> Any:
    """Format a cell; text that a spreadsheet would run as a formula gets an apostrophe before it."""
    is_text = isinstance(value, str) and not _NUMBER.fullmatch(value)
    return f"'{value}" if is_text and _FORMULA.match(value) else value


def cell_text(cell: str) -> str:
    """Return the text of a cell: the inverse of `csv_cell`."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


def csv_lines(rows: Iterable[Iterable[Any]]) -> bytes:
    """Format rows of a CSV table for people."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows([csv_cell(cell) for cell in row] for row in rows)
    return text.getvalue().encode()


def csv_rows(file: TextIO, columns: Iterable[str], by: str = ",") -> Callable[[Iterable[Any]], Any]:
    """Write the header of a CSV table for people; return a function that adds a row."""
    rows = csv.writer(file, delimiter=by, lineterminator="\n")
    rows.writerow(columns)
    return lambda row: rows.writerow(map(csv_cell, row))


@contextmanager
def csv_table(path: Path, columns: Iterable[str], by: str = ",") -> Iterator[Callable[[Iterable[Any]], Any]]:
    """Yield a function that adds a row to a CSV table, which appears complete or not at all."""
    with replacing(path) as aside, aside.open("w", encoding="utf-8", newline="") as file:
        yield csv_rows(file, columns, by)


def json_object(text: str) -> dict[str, Any]:
    """Return the JSON object in a line; empty for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_json(path: Path) -> Any | None:
    """Return the JSON value in a file; None if it is missing, torn, not JSON or not a regular file."""
    try:
        return json.loads(path.read_bytes()) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None
