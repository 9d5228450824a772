"""What must hold before somebody goes through all of a cache: nothing in it leads out of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.errors import CacheUnusable
from pipeline.store.layout import MARKER, REPORTS, USERS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pipeline.store.cache import Cache

SHOWN = 20


def refuse_unusable(cache: Cache) -> None:
    """Raise where no cache is, or one that is not all in one folder."""
    if not cache.is_there:
        remedy = "pipeline submit --stage all   (makes one), or --set cache.root=FOLDER"
        raise CacheUnusable("no cache is there", where=str(cache.root), remedy=remedy)
    refuse_links_out(cache)


def refuse_links_out(cache: Cache) -> None:
    """Raise where a symbolic link in the cache leads out of it; the cache's own folder may be one."""
    try:
        root = cache.root.resolve()
        out = [(link, target) for link in _links(cache) if _leads_out(target := _target(link), root)]
    except OSError as error:
        what, remedy = f"the cache cannot be read: {error.strerror or error}", f"ls -ld {error.filename or cache.root}"
        raise CacheUnusable(what, where=str(error.filename or cache.root), remedy=remedy) from error
    if out:
        shown = [f"{link}: {_said_of(target)}" for link, target in out[:SHOWN]]
        more = [f"… and {len(out) - SHOWN:,} more"] * (len(out) > SHOWN)
        what = "\n  ".join((f"{len(out):,} symbolic links lead out of the cache", *shown, *more))
        where, what = (cache.root, what) if out[1:] else (out[0][0], _said_of(out[0][1]))
        raise CacheUnusable(what, where=str(where), remedy=_remedy(*out[0]))


def _leads_out(target: Path, root: Path) -> bool:
    return target.is_symlink() or not target.is_relative_to(root)


def _said_of(target: Path) -> str:
    leads = "round in a circle" if target.is_symlink() else f"out of the cache, to {target}"
    return f"a symbolic link leads {leads}"


def _remedy(link: Path, target: Path) -> str:
    """Return what to do about a link."""
    if target.is_dir():
        return f"ls -l {link}   (replace the link by the folder itself, or set cache.root to {target.parent})"
    return f"ls -l {link}   (put the file itself there, or remove the link)"


def _target(link: Path) -> Path:
    """Return where a link leads; to a link, if that is round in a circle."""
    try:
        return link.resolve()
    except RuntimeError:  # of Python up to 3.12
        return link


def _links(cache: Cache) -> Iterator[Path]:
    """Yield the symbolic links among what belongs to a cache; a folder that is one is not looked into."""
    links = set(cache.disk.links_in(cache.root))
    kinds = cache.kinds()
    yield from (cache.root / name for name in sorted(links & {MARKER, REPORTS, USERS, *kinds}))
    for kind in kinds:
        folder = cache.kind(kind).layout.folder
        if kind not in links:
            inner = sorted(cache.disk.links_in(folder))
            yield from (folder / name for name in inner)
            parts = ("shards", "tmp", "quarantine")
            for part in (folder / name for name in parts if name not in inner):
                yield from (part / name for name in sorted(cache.disk.links_in(part)))
