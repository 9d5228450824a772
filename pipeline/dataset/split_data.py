"""A project's items with what they share, from inventories that a scan made; their splits, made or checked."""

from __future__ import annotations

from array import array
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from pipeline.command_line import Command
from pipeline.dataset.chain_clusters import ClusterTable, chain_names, run_mmseqs
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
from pipeline.files import replacing
from pipeline.records import Kind, Rejection, Role
from pipeline.units import printable_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from pipeline.project.project import Project
    from pipeline.records import ChainSummary, Inventory, Item, Part
    from pipeline.structures.inventory import LigandChoice

    WriteChain: TypeAlias = Callable[[str, ChainSummary, int], None]  # its item, it, and its sequence's digest

By: TypeAlias = Literal["sequence", "identity", "clusters"]
MOST_SPLITS = 64  # that are compared, each with each other
LARGEST = 5  # components that are told of


@dataclass(frozen=True, slots=True)
class Alike:
    """What counts as alike: by which method, and with which limits or tables."""

    by: By = "sequence"
    min_identity: float = 0.3
    tables: tuple[Path, ...] = ()


@dataclass(slots=True)
class SharedItems:
    """The usable items of a data set in columns, and what they have that others may have, too, level by level."""

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


def read_shared(project: Project, alike: Alike, seed: int = 0, fasta: Path | None = None) -> SharedItems:
    """Read the inventories of all items, and cluster their chains as asked; into `fasta` every chain is written."""
    if project.source.source == "reader":
        what = "a reader's items have no chains: their splits are the reader's, as data.options says"
        raise ConfigError(what, where="data.source", remedy=Command.of("config show"))
    with TemporaryDirectory(prefix="pipeline-split-") as made:
        folder, tables = Path(made), {str(path): ClusterTable(path) for path in alike.tables}
        unique = folder / "unique.fasta" if alike.by == "identity" else None
        with _writing_chains(fasta, unique) as write:
            shared = _collected(project, tables, seed, write)
        if unique is not None:
            shared.levels["identity"] = _by_sequence(shared.sequences, run_mmseqs(unique, folder, alike.min_identity))
    for name, table in tables.items():
        _refuse_strangers(name, table, shared)
    if alike.by == "clusters" and not (tables or shared.whole.items):
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


def _collected(project: Project, tables: dict[str, ClusterTable], seed: int, write: WriteChain) -> SharedItems:
    shared = SharedItems(seed, levels={name: ChainLinks() for name in tables})
    for entry in usable_items(project):
        if isinstance(entry, Rejection) or entry.inventory is None:
            shared.rejected += 1
            continue
        number = shared.add(entry.item, entry.inventory)
        for chain in _chains(entry.item, entry.inventory, project.recipe.ligand):
            shared.chains += 1
            digest = text_digest(chain.summary.sequence)
            shared.sequences.add(number, chain.partner, digest)
            write(entry.item.id, chain.summary, digest)
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


def _by_sequence(sequences: ChainLinks, table: ClusterTable) -> ChainLinks:
    """Return the clusters of chains, where members of the table are called by the digests of sequences."""
    found = ChainLinks()
    for item, partner, token in zip(sequences.items, sequences.partners, sequences.tokens, strict=True):
        for cluster in table.of_member(text_digest(f"s{token:016x}")):
            found.add(item, partner, cluster)
    return found


def _refuse_strangers(name: str, table: ClusterTable, shared: SharedItems) -> None:
    if shared.chains and shared.unclustered[name] == shared.chains:
        what = f"it contains none of the {shared.chains:,} chains; its members look like {table.example!r}"
        remedy = Command.of(
            "data split --write-fasta chains.fasta", then="   (cluster that file: its chains are named ID_CHAIN)"
        )
        raise DataError(what, where=name, remedy=remedy)


@contextmanager
def _writing_chains(every: Path | None, unique: Path | None) -> Iterator[WriteChain]:
    """Yield what writes a protein chain: to one file by its name, to the other once by its sequence's digest."""
    seen: set[int] = set()
    with ExitStack() as files:
        named, digests = (
            files.enter_context(files.enter_context(replacing(path)).open("w", encoding="utf-8")) if path else None
            for path in (every, unique)
        )

        def write(item: str, chain: ChainSummary, digest: int) -> None:
            if chain.kind is not Kind.PROTEIN:
                return
            if named:
                _write_sequence(named, f"{item}_{chain.name}" if chain.name else item, chain.sequence)
            if digests and digest not in seen:
                seen.add(digest)
                _write_sequence(digests, f"s{digest:016x}", chain.sequence)

        yield write


def _write_sequence(file: IO[str], name: str, sequence: str) -> None:
    file.write(f">{name}\n{sequence}\n")


@dataclass(frozen=True, slots=True)
class Division:
    """Items divided into splits: the split and the component of each, and what is told of both."""

    names: tuple[str, ...]
    fractions: tuple[float, ...]
    split_N: NDArray[np.int64]
    component_N: NDArray[np.int64]
    size_N: NDArray[np.int64]

    def component_name(self, item: int, draws: Sequence[int]) -> str:
        """Return the name of an item's component, which does not depend on the order of the items."""
        return f"c{draws[self.component_N[item]]:016x}"

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
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
    first[component_N[order]] = order  # the last to be written stays: the lowest draw
    return first[component_N]


def shared_levels(shared: SharedItems) -> list[SharedBySplits]:
    """Return what the splits of a data set share, level by level, with one partner or with both."""
    names, split_N = list(shared.names), np.array(shared.splits, np.int64)
    levels = _levels(shared)
    return [found for level in levels for found in shared_by_splits(*level, split_N, names)]


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
