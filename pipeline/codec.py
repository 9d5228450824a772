"""Converts values to JSON data and back, and remembers results in files.

`plain` and `rebuilt` use pydantic, so dataclasses, enumerations, paths, sets and tuples need no code of their own.
Reading is strict: a wrong type, a missing or an unknown field raises ValueError.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ConfigDict, TypeAdapter
from pydantic_core import to_jsonable_python

from pipeline.files import write_whole
from pipeline.keys import recipe_key

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

NAMES = {"Any": Any, "Mapping": Mapping, "Sequence": Sequence, "Path": Path}  # mostly imported only for type checks
STRICT = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True, defer_build=True)


def plain(value: Any) -> Any:
    """Return a value as JSON data; it may hold dataclasses, enumerations, paths and NumPy numbers."""
    return to_jsonable_python(value, fallback=lambda entry: entry.item())


def rebuilt(of: type[T], data: Any) -> T:
    """Return the value that `plain` turned into these data; raise ValueError if they do not fit the type."""
    text = data if isinstance(data, bytes) else json.dumps(data).encode()
    values: list[T] = _adapter(of).validate_json(b"[%b]" % text)  # type: ignore[arg-type]  # a type is hashable
    (value,) = values
    return value


def read_plain(path: Path, of: type[T]) -> T:
    """Read a value that `write_plain` wrote; raise OSError or ValueError without one of this type."""
    return rebuilt(of, path.read_bytes())


def read_if_whole(path: Path, of: type[T]) -> T | None:
    """Read a value that `write_plain` wrote; None without an intact one of this type."""
    with suppress(OSError, ValueError):
        return read_plain(path, of)
    return None


def write_plain(path: Path, value: Any) -> None:
    """Write a value as JSON, atomically."""
    write_whole(path, json.dumps(plain(value)))


def memo(folder: Path, name: str, asked: Mapping[str, Any], make: Callable[[], T], of: type[T]) -> T:
    """Return the remembered answer to a question, or make and remember it."""
    known = recall(folder, name, asked, of)
    return remember(folder, name, asked, make()) if known is None else known


def recall(folder: Path, name: str, asked: Mapping[str, Any], of: type[T]) -> T | None:
    """Return the remembered answer to a question; None without an intact one of this type."""
    return read_if_whole(_file(folder, name, asked), of)


def remember(folder: Path, name: str, asked: Mapping[str, Any], value: T) -> T:
    """Remember a value, if the folder or its parent exists; return it."""
    with suppress(OSError):
        folder.mkdir(exist_ok=True)
        write_plain(_file(folder, name, asked), value)
    return value


def _file(folder: Path, name: str, asked: Mapping[str, Any]) -> Path:
    return folder / f"{recipe_key(name, asked).hex()}.json"


@cache
def _adapter(of: Any) -> TypeAdapter[Any]:
    """Return an adapter for lists of a type, as pydantic takes no strict configuration for a dataclass itself."""
    adapter = TypeAdapter(list[of], config=STRICT)
    adapter.rebuild(_types_namespace=NAMES)
    return adapter
