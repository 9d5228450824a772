"""From rows to items: what the adapters that read tables have in common."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from pipeline.records import Item, Part, Reason, Rejection, Role
from pipeline.structures.atoms import Unusable
from pipeline.structures.sources.ids import checked_id, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from pipeline.structures.sources.spec import SourceSpec
    from pipeline.structures.sources.table import Columns, Row

BETWEEN_CHAINS = re.compile(r"[,;|\s]+")
CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class Files(NamedTuple):
    """What an item is made of, and where its labels come from when that is unbound."""

    parts: tuple[Part, ...]
    bound: tuple[Part, ...] = ()


def build_items(
    rows: Iterator[Row | Rejection],
    columns: Columns,
    id_of: Callable[[Row], str],
    files_of: Callable[[str, Row], Files],
) -> Generator[Item | Rejection, None, None]:
    """Turn rows into items; `files_of` sees checked ids only, and what it refuses is a rejection of that row."""
    for row in rows:
        if isinstance(row, Rejection):
            yield row
            continue
        name = id_of(row)
        try:
            files = files_of(checked_id(name), row)
        except Unusable as error:
            yield Rejection(shown(name), error.reason, error.detail, row.origin)
        else:
            yield Item(
                id=name,
                parts=files.parts,
                bound=files.bound,
                split=row["split"],
                cluster=row["cluster"],
                labels=row.others(columns.spoken_for),
                origin=row.origin,
            )


def split_chains(names: str) -> tuple[str, ...]:
    """Divide chain names at commas, semicolons, bars and spaces only: `AB` is one chain, as mmCIF may name it."""
    return tuple(dict.fromkeys(name for name in BETWEEN_CHAINS.split(names) if name))


def model_number(text: str, first: int = 1) -> int | None:
    """Return the ordinal of a model, from 1, as given in a cell that counts from `first`; None for an empty cell."""
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and int(text[:9]) >= first):
        raise Unusable(Reason.BAD_ROW, f"the model {shown(text)!r} is not a number from {first}")
    return int(text[:9]) - first + 1


def clean_path(text: str) -> str:
    """Return a path from a cell, or refuse one that no file can have."""
    if CONTROL.search(text):
        raise Unusable(Reason.BAD_ROW, f"the path {shown(text)!r} contains a control character")
    return text


def one_file_parts(
    spec: SourceSpec, path: str, receptor: tuple[str, ...], ligand: tuple[str, ...], model: int | None = None
) -> tuple[Part, ...]:
    """Return the partners in one file: as their chains say, or a file that is divided when it is read, or never."""
    if receptor and ligand:
        return (Part(Role.RECEPTOR, path, receptor, model), Part(Role.LIGAND, path, ligand, model))
    if (receptor or ligand) and spec.partners == "auto":
        given, absent = ("receptor", "ligand") if receptor else ("ligand", "receptor")
        raise Unusable(Reason.BAD_ROW, f"chains of the {given} are named, but none of the {absent}")
    role = Role.COMPLEX if spec.partners == "auto" else Role.WHOLE
    return (Part(role, path, receptor or ligand, model),)
