"""Exports the embeddings of a data set into one file: every record is verified, nothing is kept in memory.

A bare sequence has the id of its item; a chain of a structure is `ITEM:CHAIN`, or `ITEM:ROLE:CHAIN` if both partners
have a chain of that name. A partner that was embedded as one text is cut into its chains again; all of them get the row
of its one CLS mark.

Shapes: L residues of a chain, T of the text that was embedded, D numbers of a residue.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pipeline.command_line import Command, quoted
from pipeline.config.schema_data import MAIN
from pipeline.dataset import worklist
from pipeline.dataset.reader_items import is_reader
from pipeline.dataset.worklist import KnownItem
from pipeline.encoder.embed_texts import EmbeddingVerifier
from pipeline.encoder.embedding_recipe import as_floats, partner_texts
from pipeline.errors import CacheDamaged, ConfigError, DataError, RecordMissing
from pipeline.files import what_is_no_file
from pipeline.records import Kind, Rejection
from pipeline.stages.embed import refusal
from pipeline.store.cache_folder import ELSEWHERE
from pipeline.store.store import ONLY_MISSING, WholeRecords, in_chunks
from pipeline.structures.scan_items import look_again
from pipeline.structures.sources.item_ids import SeenIds
from pipeline.training.evaluating.embedding_files import EmbeddedId, ExportForm, table_beside, write_embeddings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from pipeline.encoder.embedding_recipe import EmbeddingRecipe
    from pipeline.project.project import Project
    from pipeline.records import Inventory, Item, Partner
    from pipeline.store.format.record import Record
    from pipeline.store.store import Store

    Pool = Callable[[NDArray[np.float32]], NDArray[np.float32]]

NONE, CLS = "none", "cls"
POOLS: dict[str, Pool] = {
    "mean": lambda rows_LD: rows_LD.mean(0, dtype=np.float64).astype(np.float32),
    "max": lambda rows_LD: rows_LD.max(0),
}
NAMED = 3  # in a message
SPLITS_SAID = 8


@dataclass(frozen=True, slots=True)
class WantedExport:
    """What to export, and in which format."""

    format: str
    pool: str = NONE
    encoder: str = MAIN
    split: str | None = None  # None: all
    replace: bool = False
    partial: bool = False  # whether to skip what has no embedding


@dataclass(slots=True)
class Exported:
    """The result of an export."""

    ids: int = 0
    items: int = 0
    residues: int = 0
    rejected: int = 0  # items that scanning or embedding rejected
    unscanned: int = 0  # items
    missing: int = 0  # chains without an embedding
    joined: int = 0  # chains that share the CLS row of their partner
    lacking: list[str] = field(default_factory=list)  # the first of them
    splits: Counter[str] = field(default_factory=Counter)

    def to_json(self) -> dict[str, int]:
        """Return the counts as JSON data."""
        names = ("ids", "items", "residues", "rejected", "unscanned", "missing")
        return {name: getattr(self, name) for name in names}

    def lack(self, name: str) -> None:
        """Count a missing embedding; remember the first few."""
        if len(self.lacking) < NAMED:
            self.lacking.append(name)


class _ChainRows(NamedTuple):
    """A chain, and its rows in the embedding of a text."""

    whose: EmbeddedId
    text: str
    first: int


def export_embeddings(project: Project, out: Path, wanted: WantedExport) -> Exported:
    """Write the embeddings of a data set's proteins into a file; if some are missing, raise and write nothing."""
    _refuse(project, out, wanted)
    project = _of_encoder(project, wanted)
    recipe, width = project.encoding.recipe, project.encoding.weights.dim
    is_half = wanted.pool == NONE and recipe.storage == "fp16"
    form = ExportForm(width, np.dtype("<f2" if is_half else "<f4"), wanted.pool == NONE, _facts(project, wanted))
    exported = Exported()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_embeddings(wanted.format, out, form, _embedded(project, out, wanted, form, exported))
    except OSError as error:
        what, room = f"cannot write: {error.strerror or error}", f"df -h {quoted(out.parent)}"
        raise ConfigError(what, where=str(out), remedy=room) from error
    return exported


def _of_encoder(project: Project, wanted: WantedExport) -> Project:
    """Return the project of the encoder; rows of CLS marks need the records that have them."""
    if (of_encoder := project.encoders.get(wanted.encoder)) is None:
        known, problem = ", ".join(project.encoders), f"unknown encoder {wanted.encoder!r}"
        raise ConfigError(problem, where="--encoder", remedy=f"use one of {known}")
    config = of_encoder.config
    if wanted.pool != CLS or config.embed.cls:
        return of_encoder
    embed = config.embed.model_copy(update={"cls": True})
    return replace(of_encoder, config=config.model_copy(update={"embed": embed}), made_once={})


def _refuse(project: Project, out: Path, wanted: WantedExport) -> None:
    """Raise if there is nothing to export or the file cannot be written."""
    if is_reader(project.config):
        remedy = Command.submit("predict", then="   (a task can write embeddings of its reader's items)")
        raise ConfigError("items of a reader have no embeddings in the cache", where="data.source", remedy=remedy)
    if other := what_is_no_file(out):
        raise ConfigError(f"{other} is not a file", where=str(out), remedy="give a file name with --out")
    places = (out, table_beside(out)) if wanted.format == "npy" else (out,)
    if len(set(places)) < len(places):
        problem = "is reserved for the table that maps rows to items"
        raise ConfigError(problem, where=str(out), remedy=f"--out {out.with_suffix('.npy')}")
    for place in places:
        if os.path.lexists(place) and not wanted.replace:
            raise ConfigError(
                "already exists", where=str(place), remedy="use another --out, or replace it with --force"
            )


def _embedded(
    project: Project, out: Path, wanted: WantedExport, form: ExportForm, exported: Exported
) -> Iterator[tuple[EmbeddedId, NDArray[Any]]]:
    """Yield every chain of the data set; after the first missing one only count, and raise at the end."""
    encoding, seen = project.encoding, SeenIds()
    recipe, store = encoding.recipe, encoding.shelves.embeddings
    verifier = EmbeddingVerifier(recipe, WholeRecords(store, 0, encoding.named))  # each is read once, below
    listed = worklist.known_items(project, None, worklist.list_items(project))
    for entries in in_chunks(listed, worklist.LOOKED_UP_AT_ONCE):
        chains = list(_chains(project, entries, wanted, exported))
        variants = verifier.look_up(chain.text for chain in chains)
        there, keys = list[_ChainRows](), list[bytes]()
        for chain in chains:
            if (variant := variants[chain.text]) is None:
                exported.missing += 1
                exported.lack(chain.whose.id)
                continue
            if seen.first_line(chain.whose.id, 1) is not None:
                problem = f"two chains of the data set would both be named {chain.whose.id}"
                raise DataError(problem, where=chain.whose.item, remedy="give the items different ids")
            there.append(chain)
            keys.append(recipe.key(chain.text, variant))
        if exported.unscanned + exported.missing and not wanted.partial:
            continue
        for chain, record in _verified(store, there, keys, form.width, wanted.pool):
            rows_LD = as_floats(record.arrays["rows"])[chain.first : chain.first + chain.whose.residues]
            yield chain.whose, _pooled(rows_LD, record, chain, wanted, form)
            exported.ids += 1
            exported.residues += len(rows_LD)
            exported.joined += wanted.pool == CLS and chain.whose.residues < len(chain.text)
    _refuse_incomplete(exported, out, wanted)


def _chains(
    project: Project, entries: Iterable[KnownItem | Rejection], wanted: WantedExport, exported: Exported
) -> Iterator[_ChainRows]:
    """Yield the protein chains of some items, in their order; count the items."""
    recipe = project.encoding.recipe
    for entry in entries:
        split = entry.split if isinstance(entry, Rejection) else entry.item.split
        if split in exported.splits or len(exported.splits) < SPLITS_SAID:
            exported.splits[split] += 1
        if wanted.split is not None and split != wanted.split:
            continue
        inventory = None if isinstance(entry, Rejection) else _inventory(project, entry)
        if isinstance(entry, Rejection) or (inventory is not None and inventory.reason is not None):
            exported.rejected += 1
        elif inventory is None:
            exported.unscanned += 1
            exported.lack(entry.item.id)
        else:
            chains = list(_chains_of(entry.item, inventory, recipe))
            refused = any(refusal(text, recipe) for text in {chain.text for chain in chains})
            exported.rejected += refused
            exported.items += not refused
            yield from () if refused else chains


def _inventory(project: Project, known: KnownItem) -> Inventory | None:
    """Return the inventory of an item; files moved or touched since the scan are recognized by their content."""
    if known.inventory is not None:
        return known.inventory
    return look_again(known.item, project.recipe, project.shelves, 0).inventory


def _chains_of(item: Item, inventory: Inventory, recipe: EmbeddingRecipe) -> Iterator[_ChainRows]:
    names = Counter(chain.name for partner in inventory.partners for chain in partner.chains)
    for partner in inventory.partners:
        texts, first = partner_texts(partner, recipe.context), 0
        for number, chain in enumerate(chain for chain in partner.chains if chain.kind is Kind.PROTEIN):
            is_joined = recipe.context == "partner"
            name = _name(item, partner, chain.name, is_ambiguous=names[chain.name] > 1)
            whose = EmbeddedId(name, item.id, chain.name, item.split, len(chain.sequence))
            yield _ChainRows(whose, texts[0 if is_joined else number], first)
            first += len(chain.sequence) if is_joined else 0


def _name(item: Item, partner: Partner, chain: str, *, is_ambiguous: bool) -> str:
    if item.sequence is not None:
        return item.id
    return f"{item.id}:{partner.role.value}:{chain}" if is_ambiguous else f"{item.id}:{chain}"


def _verified(
    store: Store, chains: Sequence[_ChainRows], keys: Sequence[bytes], width: int, pool: str
) -> Iterator[tuple[_ChainRows, Record]]:
    """Yield each chain with the verified record of its text."""
    again = Command.submit("embed", then=f"   ({ONLY_MISSING})")
    records = store.read(keys)
    for chain in chains:
        try:
            record = next(records)
        except (CacheDamaged, RecordMissing) as error:
            what = f"the embedding of {chain.whose.id}: {error.what}"
            raise type(error)(what, where=error.where, remedy=again, item=chain.whose.item) from error
        rows_TD, cls_D, what = record.arrays["rows"], record.arrays.get("cls"), ""
        if rows_TD.ndim != 2 or rows_TD.shape[1] != width or len(rows_TD) > len(chain.text):
            what = f"is {list(rows_TD.shape)}, not [{len(chain.text)}, {width}]"
        elif pool == CLS and (cls_D is None or cls_D.shape != (width,)):
            what = f"has no row of its CLS token, [{width}]"
        if what:
            what = f"the embedding of {chain.whose.id} {what}"
            raise CacheDamaged(what, where=store.kind, remedy=ELSEWHERE, item=chain.whose.item)
        yield chain, record


def _pooled(
    rows_LD: NDArray[Any], record: Record, chain: _ChainRows, wanted: WantedExport, form: ExportForm
) -> NDArray[Any]:
    """Return the rows or the vector to write for a chain."""
    if not len(rows_LD):
        problem = f"{chain.whose.id} has no rows: its partner's text was truncated before it"
        remedy = Command.submit("embed").with_settings(("embed.long.policy", "windows"))
        raise DataError(problem, where="embed.long.policy", remedy=remedy, item=chain.whose.item)
    if wanted.pool == NONE:
        return rows_LD.astype(form.dtype, copy=False)
    if wanted.pool == CLS:
        return as_floats(record.arrays["cls"]).astype(np.float32, copy=False)
    return POOLS[wanted.pool](rows_LD.astype(np.float32, copy=False))


def _refuse_incomplete(exported: Exported, out: Path, wanted: WantedExport) -> None:
    """Raise if an embedding is missing, or if there is none at all, so that no file is published."""
    if wanted.split is not None and wanted.split not in exported.splits and len(exported.splits) < SPLITS_SAID:
        there = ", ".join(sorted(filter(None, exported.splits))) or "none: the table has no column split"
        what, where = f"no item is in this split; there are: {there}", f"--split {wanted.split}"
        raise ConfigError(what, where=where, remedy="use one of them, or omit --split")
    if exported.unscanned + exported.missing and not wanted.partial:
        lacks = "embedding with a CLS row" if wanted.pool == CLS else "embedding"
        counted = [f"{exported.missing:,} chains have no {lacks}"] if exported.missing else []
        counted += [f"{exported.unscanned:,} items are not scanned"] if exported.unscanned else []
        what = f"{' and '.join(counted)}, of {exported.items + exported.unscanned:,} items: "
        what += ", ".join(exported.lacking) + (", …" if exported.missing + exported.unscanned > NAMED else "")
        remedy = Command.submit("embed", then=" --follow   (or skip them: --partial)")
        if wanted.pool == CLS:
            section = "embed" if wanted.encoder == MAIN else f"embed.also.{wanted.encoder}"
            remedy = remedy.with_settings((f"{section}.cls", "true"))
        raise RecordMissing(what, where=str(out), remedy=remedy)
    if not exported.ids:
        problem = f"nothing to export: {exported.rejected:,} items were rejected and no other item has a protein"
        raise DataError(problem, where=str(out), remedy=Command.of("status", then="   (says why)"))


def _facts(project: Project, wanted: WantedExport) -> Mapping[str, str]:
    recipe = project.encoding.recipe
    return {
        "made_by": "pipeline export embeddings",
        "encoder": project.encoding.weights.name,
        "weights": recipe.weights,
        "layer": str(recipe.layer),
        "precision": recipe.precision,
        "context": recipe.context,
        "pool": wanted.pool,
    }
