"""Makes and checks the splits of a project, by what its items share according to their inventories.

Clusters of chains are tables as other programs write them, a line `representative<TAB>member`. Splits are written as a
table for `data.splits`.
"""

from __future__ import annotations

import csv
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.command_line import Command
from pipeline.dataset.item_splits import (
    ChainLinks,
    SharedBySplits,
    distribute,
    find_components,
    find_leaking,
    shared_by_splits,
    text_digest,
)
from pipeline.dataset.worklist import KnownItem, known_items, list_items
from pipeline.errors import ConfigError, DataError
from pipeline.files import csv_table, replacing, what_is_no_file
from pipeline.records import Item, Kind, Rejection, Role
from pipeline.structures.sources.source_rows import text_lines
from pipeline.structures.sources.table_sources import PAIRS_SUBFOLDERS, split_suffix
from pipeline.units import printable_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import IO

    from numpy.typing import NDArray

    from pipeline.project.project import Project
    from pipeline.records import ChainSummary, Inventory, Part
    from pipeline.structures.inventory import LigandChoice
    from pipeline.structures.sources.item_ids import SourceSpec

BETWEEN = ("_", ":", ".", "-", "|")  # file or id, and chain, in the tables of common programs
MOST_SPLITS = 64  # that are compared, each with each other
LARGEST = 5  # components whose sizes are shown


class ClusterTable:
    """The clusters of one table, by the names of their members: 16 bytes a line."""

    def __init__(self, path: Path) -> None:
        members, clusters = array("Q"), array("Q")
        self.path, self.example = path, ""
        with closing(text_lines(path)) as lines:
            for number, line in enumerate(lines, 1):
                names = [name.strip() for name in line.split("\t")]
                if not any(names):
                    continue
                if len(names) != 2 or not all(names):
                    raise _no_table(path, number, line)
                self.example = self.example or names[1]
                clusters.append(text_digest(names[0]))
                members.append(text_digest(names[1]))
        own = np.unique(np.array(clusters, np.uint64))  # a representative is in its cluster, listed or not
        member_L, cluster_L = (np.append(np.array(column, np.uint64), own) for column in (members, clusters))
        order = np.argsort(member_L, kind="stable")
        self._members, self._clusters = (array("Q", column[order].tobytes()) for column in (member_L, cluster_L))

    def clusters_of(self, names: Iterable[str]) -> list[int]:
        """Return the clusters of the first of these names that is a member; more than one where it stands twice."""
        for member in map(text_digest, names):
            first, last = (bisect(self._members, member) for bisect in (bisect_left, bisect_right))
            if first < last:
                return [*dict.fromkeys(self._clusters[first:last])]
        return []


def _no_table(path: Path, number: int, line: str) -> DataError:
    what = f"not two tab-separated names: {printable_text(line.strip()[:80])!r}"
    hint = "   (mmseqs and foldseek call it …_cluster.tsv; of others, make one: representative<TAB>member)"
    return DataError(what, where=f"{path}:{number}", remedy=f"sed -n {number}p {quote(str(path))}{hint}")


def chain_names(item: str, path: str, chain: str, model: int | None, *, alone: bool) -> Iterator[str]:
    """Yield what programs may call a chain: by the item's id or the file, and alone by those where it is the only one.

    mmseqs takes a name's part between bars; foldseek keeps a file's ending or not, and names the models of several.
    """
    file = Path(path).name
    stem = split_suffix(file)[0]
    files = list(dict.fromkeys((item, stem, file, stem.lower(), stem.upper()))) if file else [item]
    for between in BETWEEN if chain else ():
        yield from (f"{name}{between}{chain}" for name in files)
    if chain:
        yield from (f"{name}_MODEL_{model or 1}_{chain}" for name in files)
    if alone:
        yield from files
        yield from item.split("|")[1:2]


@dataclass(slots=True)
class SharedItems:
    """The usable items of a data set in columns, and their links through shared things, level by level."""

    seed: int = 0
    draws: array[int] = field(default_factory=lambda: array("Q"))  # of each item, by its id
    sizes: array[int] = field(default_factory=lambda: array("I"))  # residues
    splits: array[int] = field(default_factory=lambda: array("H"))  # that it has already
    names: dict[str, int] = field(default_factory=lambda: {"": 0})  # of those splits
    sequences: ChainLinks = field(default_factory=ChainLinks)
    levels: dict[str, ChainLinks] = field(default_factory=dict)  # besides sequences
    whole: ChainLinks = field(default_factory=ChainLinks)  # the table's column cluster
    unclustered: Counter[str] = field(default_factory=Counter)  # chains, by the table that has not got them
    chains: int = 0
    rejected: int = 0

    def __len__(self) -> int:
        return len(self.sizes)

    def links(self) -> list[ChainLinks]:
        """Return everything that connects items."""
        return [self.sequences, *self.levels.values(), self.whole]

    def is_item(self, number: int, item: str) -> bool:
        """Tell whether this is the item of that number, which has been added."""
        return self.draws[number] == text_digest(item, self.seed)

    def add(self, item: Item, inventory: Inventory) -> int:
        """Add an item without its chains; return its number."""
        number = len(self)
        self.draws.append(text_digest(item.id, self.seed))
        self.sizes.append(sum(partner.residues for partner in inventory.partners))
        self.splits.append(self.names.setdefault(item.split, len(self.names)))
        if len(self.names) > MOST_SPLITS:
            what = f"more than {MOST_SPLITS} splits, such as {printable_text(item.split)!r}: is that column the split?"
            raise DataError(what, where=item.origin, remedy=Command.of("config show", then="   (see data.path)"))
        if item.cluster:
            self.whole.add(number, 0, text_digest(item.cluster))
        return number


def read_shared(
    project: Project, clusters: Sequence[Path] | None = None, seed: int = 0, fasta: Path | None = None
) -> SharedItems:
    """Read the inventories of all items, and write every protein chain into `fasta`.

    Equal sequences and the table's column cluster always connect items; so do the tables of `clusters`. If it is empty,
    there must be that column.
    """
    if project.source.source == "reader":
        what = "a reader's items have no chains: their splits are the reader's, as data.options says"
        raise ConfigError(what, where="data.source", remedy=Command.of("config show"))
    tables = {str(path): ClusterTable(path) for path in clusters or ()}
    with replacing(fasta) if fasta else nullcontext() as aside, ExitStack() as opened:
        file = opened.enter_context(aside.open("w", encoding="utf-8")) if aside else None
        shared = _collected(project, tables, seed, file)
    for name, table in tables.items():
        _refuse_strangers(name, table, shared)
    if clusters is not None and not (tables or shared.whole.items):
        what = "the data set's table has no column cluster, and no --clusters names a table of chains"
        raise ConfigError(what, where="--by clusters", remedy=Command.of("data split --by clusters --clusters FILE"))
    return shared


def usable_items(project: Project) -> Iterator[KnownItem | Rejection]:
    """Yield each entry of the data set with its inventory; raise where a scan has still to make some."""
    unknown, example = 0, ""
    for entry in known_items(project, None, list_items(project)):
        if isinstance(entry, KnownItem) and entry.inventory is None:
            unknown, example = unknown + 1, example or entry.item.id
        elif not unknown:
            yield entry
    if unknown:
        what = f"{unknown:,} items are not scanned yet, for example {example}: their sequences are unknown"
        raise DataError(what, where=str(project.source.path), remedy=Command.submit("scan"))


def _collected(project: Project, tables: Mapping[str, ClusterTable], seed: int, fasta: IO[str] | None) -> SharedItems:
    shared = SharedItems(seed, levels={name: ChainLinks() for name in tables})
    for entry in usable_items(project):
        if isinstance(entry, Rejection) or entry.inventory is None:
            shared.rejected += 1
            continue
        number = shared.add(entry.item, entry.inventory)
        for chain in _chains(entry.item, entry.inventory, project.recipe.ligand):
            shared.chains += 1
            shared.sequences.add(number, chain.partner, text_digest(chain.summary.sequence))
            if fasta and chain.summary.kind is Kind.PROTEIN:
                name = f"{entry.item.id}_{chain.summary.name}" if chain.summary.name else entry.item.id
                fasta.write(f">{name}\n{chain.summary.sequence}\n")
            for name, table in tables.items():
                found = [cluster for path in chain.paths() for cluster in table.clusters_of(path)]
                shared.unclustered[name] += not found
                for cluster in found:
                    shared.levels[name].add(number, chain.partner, cluster)
    return shared


@dataclass(frozen=True, slots=True)
class _Chain:
    """A polymer of an item: of which partner, and the parts that may have named it."""

    item: Item
    summary: ChainSummary
    partner: int
    parts: tuple[Part | None, ...]
    alone: bool

    def paths(self) -> Iterator[Iterator[str]]:
        """Yield for each file that the chain may be of what a table may call it."""
        for part in self.parts:
            path, model = (part.path, part.model) if part else ("", None)
            yield chain_names(self.item.id, path, self.summary.name, model, alone=self.alone)


def _chains(item: Item, inventory: Inventory, ligand: LigandChoice) -> Iterator[_Chain]:
    """Yield the polymers of an item with the parts that name their files."""
    polymers = [[chain for chain in each.chains if chain.kind is not Kind.OTHER] for each in inventory.partners]
    is_one_file = len({part.path for part in item.parts}) < 2
    for number, (partner, chains) in enumerate(zip(inventory.partners, polymers, strict=True)):
        parts = item.parts[:1] if is_one_file else _parts_of(item, partner.role, ligand)
        alone = (sum(map(len, polymers)) if is_one_file else len(chains)) == 1
        for chain in chains:
            yield _Chain(item, chain, number, parts or (None,), alone)


def _parts_of(item: Item, role: Role, ligand: LigandChoice) -> tuple[Part, ...]:
    """Return the parts that a partner may be from: any, where partners went by size."""
    others = {Role.RECEPTOR: Role.LIGAND, Role.LIGAND: Role.RECEPTOR}
    role = others.get(role, role) if ligand == "swapped" else role
    named = tuple(part for part in item.parts if part.role is role)
    return named if ligand in ("as_named", "swapped") else item.parts


def _refuse_strangers(name: str, table: ClusterTable, shared: SharedItems) -> None:
    if shared.chains and shared.unclustered[name] == shared.chains:
        what = f"it contains none of the {shared.chains:,} chains; its members look like {table.example!r}"
        remedy = Command.of(
            "data split --write-fasta chains.fasta", then="   (cluster that file: its chains are named ID_CHAIN)"
        )
        raise DataError(what, where=name, remedy=remedy)


@dataclass(frozen=True, slots=True)
class Division:
    """Items divided into splits: the split and the component of each, and a summary."""

    names: tuple[str, ...]
    fractions: tuple[float, ...]
    split_N: NDArray[np.int64]
    component_N: NDArray[np.int64]
    size_N: NDArray[np.int64]

    def to_json(self) -> dict[str, Any]:
        items = np.bincount(self.split_N, minlength=len(self.names))
        _, counts = np.unique(self.component_N, return_counts=True)
        fewest = min(self.fractions) * len(self.split_N)
        return {
            "items": len(self.split_N),
            "components": len(counts),
            "splits": {name: self._split_json(number, int(items[number])) for number, name in enumerate(self.names)},
            "largest": np.sort(counts)[::-1][:LARGEST].tolist(),
            "larger_than_a_split": int(np.count_nonzero(counts > fewest)),
        }

    def _split_json(self, split: int, items: int) -> dict[str, Any]:
        size_M = self.size_N[self.split_N == split]
        return {
            "asked": round(self.fractions[split], 6),
            "items": items,
            "share": round(items / max(1, len(self.split_N)), 6),
            "median_residues": float(np.median(size_M)) if items else None,
        }


def divide_items(shared: SharedItems, fractions: dict[str, float]) -> Division:
    """Divide items into splits that share nothing."""
    if not len(shared):
        raise DataError("no usable item to split", remedy=Command.of("status"))
    draw_N, size_N = np.array(shared.draws, np.uint64), np.array(shared.sizes, np.int64)
    component_N = _named_by_draw(find_components(len(shared), shared.links()), draw_N)
    split_N = distribute(component_N, size_N, draw_N, list(fractions.values()))
    return Division(tuple(fractions), tuple(fractions.values()), split_N, component_N, size_N)


def _named_by_draw(component_N: NDArray[np.int64], draw_N: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return of each item the one of its component that was drawn first."""
    order = np.argsort(draw_N, kind="stable")[::-1]
    first = np.empty(len(draw_N), np.int64)
    first[component_N[order]] = order  # the last write wins: the lowest draw
    return first[component_N]


def shared_levels(shared: SharedItems) -> list[SharedBySplits]:
    """Return what the splits of a data set share, level by level, with one partner or with both."""
    names, split_N = list(shared.names), np.array(shared.splits, np.int64)
    return [found for level in _levels(shared) for found in shared_by_splits(*level, split_N, names)]


def leaking_items(shared: SharedItems) -> dict[int, list[tuple[str, str, int]]]:
    """Return of every item that shares something with another split: at which level, with one partner or both, what."""
    rows: dict[int, list[tuple[str, str, int]]] = {}
    splits = np.array(shared.splits, np.int64)
    for level, partners, links in _levels(shared):
        split_L = splits[links.item_L]
        has_split_L = split_L != shared.names[""]
        leaking = find_leaking(links.token_L[has_split_L], split_L[has_split_L], links.item_L[has_split_L])
        for item, group in sorted({*zip(leaking.ordinal_M.tolist(), leaking.group_M.tolist(), strict=True)}):
            rows.setdefault(item, []).append((level, partners, group + 1))
    return rows


def _levels(shared: SharedItems) -> Iterator[tuple[str, str, ChainLinks]]:
    for level, links in {"sequence": shared.sequences, **shared.levels}.items():
        yield level, "one", links
        yield level, "both", links.of_both()
    yield "cluster", "item", shared.whole


def check_place(spec: SourceSpec, out: Path) -> None:
    """Refuse a file that is the data set itself, or cannot be written."""
    if any(own is not None and out.resolve() == own.resolve() for own in (spec.path, spec.splits)):
        what = "this is the data set's own file, which is never overwritten"
        raise ConfigError(what, where=str(out), remedy=f"choose another name, for example {out.stem}.split{out.suffix}")
    if not out.absolute().parent.is_dir():
        raise ConfigError("its folder does not exist", where=str(out), remedy=f"mkdir -p {quote(str(out.parent))}")
    if other := what_is_no_file(out):
        raise ConfigError(f"{other} is not a file", where=str(out), remedy="name a file")


def check_out(spec: SourceSpec, out: Path, folds: int) -> None:
    """Refuse a file that could not be used as `data.splits`, or whose folds could not."""
    if out.suffix.lower() != ".csv":
        what = "the splits are a .csv file"
        raise ConfigError(what, where=str(out), remedy=f"--out {out.name.partition('.')[0]}.csv")
    for path in (out, *fold_files(out, folds)):
        check_place(spec, path)


def fold_files(out: Path, folds: int) -> list[Path]:
    """Return the file of each fold."""
    return [out.with_name(f"{out.stem}.fold{fold}{out.suffix}") for fold in range(folds)]


def write_splits(project: Project, shared: SharedItems, division: Division, files: Sequence[Path], folds: int) -> None:
    """Write the table of splits, or one for each fold; each appears whole or not at all."""
    of_pairs = project.source.path.absolute() if project.source.source == "pairs" else None
    with ExitStack() as stack:
        asides = [stack.enter_context(replacing(path)) for path in files]
        opened = [stack.enter_context(aside.open("w", encoding="utf-8", newline="")) for aside in asides]
        writers = [csv.writer(file, lineterminator="\n") for file in opened]
        for writer in writers:
            writer.writerow(("path" if of_pairs else "id", "split", "cluster", *(("fold",) if folds else ())))
        for number, item in _usable(project, shared):
            name = _pair(item, of_pairs) if of_pairs else item.id
            split = int(division.split_N[number])
            component = f"c{shared.draws[division.component_N[number]]:016x}"  # whatever the order of the items
            # In the file of fold K, fold K is the test, the next one validates, and all others train.
            roles = [{0: "test", 1: "val"}.get((split - fold) % folds, "train") for fold in range(folds)]
            for writer, role in zip(writers, roles or [division.names[split]], strict=True):
                writer.writerow((name, role, component, *((split,) if folds else ())))


def _pair(item: Item, root: Path) -> str:
    """Return a pair as lists of pairs name it: with the folder that it is in."""
    folder = Path(item.parts[0].path).parent.relative_to(root)
    parts = folder.parts[1:] if folder.parts[:1] == PAIRS_SUBFOLDERS else folder.parts
    return "/".join((*parts, item.id.removeprefix("".join(f"{part}." for part in parts))))


def _usable(project: Project, shared: SharedItems) -> Iterator[tuple[int, Item]]:
    """Yield each usable item of the data set again with its number."""
    number = 0
    for entry in list_items(project):
        if isinstance(entry, Item) and number < len(shared) and shared.is_item(number, entry.id):
            yield number, entry
            number += 1
    if number < len(shared):
        what = "it changed while being read"
        raise DataError(what, where=str(project.source.path), remedy=Command.of("data split --out FILE"))


def write_leaking(project: Project, shared: SharedItems, out: Path) -> None:
    """Write every item that shares something with another split: the level, what of it, its split and its id."""
    rows = leaking_items(shared)
    with csv_table(out, ("level", "partners", "group", "split", "id")) as add:
        for number, entry in _usable(project, shared):
            for shares in rows.get(number, ()):
                add((*shares, entry.split, entry.id))
