"""Paths as people write them: relative to where they are written, with ~ and $VARIABLES."""

from __future__ import annotations

import os
import re
from pathlib import Path

_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


def anchored(text: str, base: Path) -> str:
    """Return the absolute path that `text`, written in the folder `base`, means."""
    if not text or "\0" in text:
        raise ValueError("a path cannot be empty" if not text else "a path cannot hold a NUL character")
    try:
        path = Path(_VARIABLE.sub(_variable, text)).expanduser()
    except RuntimeError as error:
        raise ValueError(f"no home folder is known for {text.partition('/')[0]}") from error
    return os.path.normpath(base / path)  # not resolve(): people want to see the path they wrote


def _variable(match: re.Match[str]) -> str:
    """Return a variable's value; an empty one would turn $SCRATCH/cache into /cache."""
    name = match[1] or match[2]
    value = os.environ.get(name, "")
    if not value:
        raise ValueError(f"the environment variable {name} is not set")
    return value
