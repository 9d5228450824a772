"""Names of classes, as an option has them: a list, or a file with one a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError


def class_names(given: Any, *, where: str, beside: Path | None = None) -> tuple[str, ...]:
    """Return the names in their order, which is what numbers them; each may be there only once."""
    if isinstance(given, str):
        path = (beside or Path()) / given
        try:
            lines = path.read_text(encoding="utf-8").splitlines() if given else []
        except (OSError, UnicodeDecodeError) as error:
            remedy = "name a file in UTF-8 with a class a line, or list the classes"
            raise ConfigError(f"{path} cannot be read: {error}", where=where, remedy=remedy) from error
        given = [line.strip() for line in lines if line.strip()]
    names = tuple(str(name).strip() for name in given)
    twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if twice is not None:
        raise ConfigError(f"the class {twice!r} is named twice", where=where, remedy="name each class once")
    return names
