"""`glob`: the files of a folder that match data.pattern, each a complex.

Patterns are those of a shell (`*.pdb`, `*/*.cif.gz`, `**/*.pdb`). An id is the file's name without its suffixes, after
the subfolders if there are any: `set1/1abc.pdb` is `set1.1abc`. Hidden files are passed over, linked folders are not
entered, and a link to a file outside of the folder is rejected.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from pipeline.errors import ConfigError
from pipeline.records import Item, Reason, Rejection
from pipeline.structures.sources.build import one_file_parts
from pipeline.structures.sources.folder import in_order, split_suffix, walk
from pipeline.structures.sources.ids import shown

if TYPE_CHECKING:
    from collections.abc import Generator

    from pipeline.structures.sources.spec import SourceSpec


def glob_items(spec: SourceSpec) -> Generator[Item | Rejection, None, None]:
    """Yield the matching files in the order of their paths."""
    for pattern in spec.pattern:
        if pattern.startswith("/") or ".." in PurePosixPath(pattern).parts:
            what = f"the pattern {pattern!r} leaves the folder"
            raise ConfigError(what, where=str(spec.path), remedy="pipeline config show   (then set data.path instead)")
    root = spec.path.absolute()
    for name in in_order(walk(root, spec.pattern)):
        yield _item(spec, root, name)


def _item(spec: SourceSpec, root: Path, name: str) -> Item | Rejection:
    item_id = split_suffix(name)[0].replace("/", ".")
    path = root / name
    if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root)):
        detail = "a link that leaves the folder; list the file in a manifest instead"
        return Rejection(shown(item_id), Reason.UNREADABLE_FILE, detail, shown(name))
    parts = one_file_parts(spec, str(path), spec.receptor_chains, spec.ligand_chains)
    return Item(id=item_id, parts=parts, origin=shown(name))
