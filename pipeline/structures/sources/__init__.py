"""Data sources: what people bring becomes a stream of items and rejections, before any structure file is read.

`items` is the door; each adapter is one file. To add one, write its generator and name it in `ADAPTERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from difflib import get_close_matches
from shlex import quote

from pipeline.errors import ConfigError, DataError
from pipeline.records import Item, Reason, Rejection
from pipeline.structures.sources.item_ids import SeenIds, SourceSpec, id_problem, label_problem, printable
from pipeline.structures.sources.source_folder import fasta_items, glob_items, listing
from pipeline.structures.sources.table_sources import manifest_items, pair_items, pinder_items, sabdab_items

__all__ = ["ADAPTERS", "SourceSpec", "items"]

Adapter = Callable[[SourceSpec], Generator[Item | Rejection, None, None]]
ADAPTERS: dict[str, Adapter] = {
    "manifest": manifest_items,
    "pairs": pair_items,
    "sabdab": sabdab_items,
    "pinder": pinder_items,
    "glob": glob_items,
    "fasta": fasta_items,
}
# A setting that its source does not look at would be obeyed in nobody's mind but the user's.
HEEDED_BY = {
    "state: unbound": ("pairs", "pinder"),
    "splits": ("pairs",),
    "structures_dir": ("manifest", "sabdab", "pinder"),
    "receptor_chains and ligand_chains": ("manifest", "glob"),
    "labels": ("manifest", "sabdab", "pinder"),
}


def items(spec: SourceSpec) -> Generator[Item | Rejection, None, None]:
    """Yield every item of a source once, and a rejection for all else; `limit` counts items."""
    adapter = _adapter(spec)
    _refuse_unheeded(spec)
    if spec.structures_dir is not None:
        next(listing(spec.structures_dir), None)  # to say now, and not a thousand times, that it is not there
    seen = SeenIds()
    taken = entries = 0
    with closing(adapter(spec)) as source:
        while taken != spec.limit and (entry := next(source, None)) is not None:
            entries += 1
            checked = _checked(entry, seen, spec)
            taken += isinstance(checked, Item)
            yield checked
    if not entries and spec.limit != 0:
        where = str(spec.splits or spec.path)
        raise DataError(f"the source {spec.source!r} finds nothing here", where=where, remedy=f"ls -l {quote(where)}")


def _checked(entry: Item | Rejection, seen: SeenIds, spec: SourceSpec) -> Item | Rejection:
    """Pass on an item whose id is allowed and new."""
    if isinstance(entry, Rejection):
        return entry
    if problem := id_problem(entry.id, names_files=spec.source != "fasta"):
        return Rejection(printable(entry.id), Reason.BAD_ID, f"the id {problem}", entry.origin)
    first = seen.first_line(entry.id, _line(entry.origin))
    if first is None:
        problem = label_problem(entry, spec.labels)
        return Rejection(printable(entry.id), Reason.BAD_ROW, problem, entry.origin, entry.split) if problem else entry
    where = f"{spec.path.name if spec.splits is None else spec.splits.name}:{first}" if first else "an earlier file"
    split = f" (this one is in split {printable(entry.split)!r})" if entry.split else ""
    detail = f"{where} has this id already{split}"
    return Rejection(printable(entry.id), Reason.DUPLICATE_ID, detail, entry.origin, entry.split)


def _line(origin: str) -> int:
    """Return the line of an origin like `manifest.csv:12`, or 0 for a file of a folder."""
    line = origin.rpartition(":")[2]
    return int(line) if line.isascii() and line.isdecimal() else 0


def _adapter(spec: SourceSpec) -> Adapter:
    if spec.source in ADAPTERS:
        return ADAPTERS[spec.source]
    near = get_close_matches(spec.source, ADAPTERS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(ADAPTERS)}"
    what = f"no data source is called {spec.source!r}; {hint}"
    raise ConfigError(what, where="data.source", remedy="pipeline config show")


def _refuse_unheeded(spec: SourceSpec) -> None:
    """Refuse settings that this source does not look at."""
    given = {
        "state: unbound": spec.state == "unbound",
        "splits": spec.splits is not None,
        "structures_dir": spec.structures_dir is not None,
        "receptor_chains and ligand_chains": bool(spec.receptor_chains or spec.ligand_chains),
        "labels": bool(spec.labels),
    }
    for setting, sources in HEEDED_BY.items():
        if given[setting] and spec.source not in sources:
            what = f"data.{setting} means nothing to the source {spec.source!r}, only to {' and '.join(sources)}"
            raise ConfigError(what, where="data", remedy="pipeline config show   (then take it out)")
