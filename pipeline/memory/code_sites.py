"""Where in the user's code something was made: the innermost line outside torch and what drives the training."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tracemalloc
    from types import CodeType, FrameType

_BACKWARD = "_engine_run_backward"  # in torch/autograd/graph.py: what is below it runs within backward
_PACKAGES = ("site-packages", "dist-packages")


@functools.cache
def _skipped() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the folders of what is not the user's, and of the standard library."""
    found = [find_spec(name) for name in ("torch", "numpy")]
    folders = [place for spec in found if spec for place in spec.submodule_search_locations or ()]
    own = [Path(__file__).parent, Path(__file__).parent.with_name("training")]
    standard = {Path(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib")}
    return _beginnings(*map(Path, folders), *own), _beginnings(*standard)


def _beginnings(*folders: Path) -> tuple[str, ...]:
    return tuple({f"{one}{os.sep}" for folder in folders for one in (folder, folder.resolve())})


@functools.lru_cache(maxsize=4096)
def is_users(file: str) -> bool:
    """Tell whether a file is neither torch's nor Python's, and does not drive the training."""
    skipped, standard = _skipped()
    if file.startswith(("<", *skipped)):
        return False
    return not file.startswith(standard) or any(f"{os.sep}{one}{os.sep}" in file for one in _PACKAGES)


@functools.lru_cache(maxsize=4096)
def place(file: str, line: int, function: str = "") -> str:
    """Write a line of code as people look for it."""
    here = f"{Path.cwd()}{os.sep}"
    return f"{file.removeprefix(here)}:{line}" + (f" in {function}" if function else "")


def calling_site() -> tuple[CodeType, int] | None:
    """Return the code and the line of the innermost caller that is the user's; in backward: a hook's or the like."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - `inspect` would make a list of all frames, for each tensor
    while frame is not None and not is_users(frame.f_code.co_filename):
        if frame.f_code.co_name == _BACKWARD:
            return None
        frame = frame.f_back
    return (frame.f_code, frame.f_lineno) if frame is not None else None


def site_text(site: tuple[CodeType, int] | None) -> str:
    """Write a site; empty: it is unknown."""
    return place(site[0].co_filename, site[1], site[0].co_name) if site else ""


def traced_site(traceback: tracemalloc.Traceback | None) -> tuple[str, int] | None:
    """Return file and line of the innermost frame that is the user's; none: none is, or this room allocated it."""
    for frame in reversed(traceback or ()):
        if is_memorys(frame.filename):
            return None
        if is_users(frame.filename):
            return frame.filename, frame.lineno
    return None


@functools.lru_cache(maxsize=4096)
def is_memorys(file: str) -> bool:
    """Tell whether a file is of this room: what it allocates is nobody's leak."""
    return Path(__file__).parent in Path(file).parents
