"""Stage graph: what it stores, what it remembers not to have, and what it does when something is wrong."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from pipeline.graphs import make_graphs as build_module
from pipeline.graphs.item_graph import GraphRecipe, decode_graph
from pipeline.graphs.make_graphs import graph
from pipeline.keys import content_digest
from pipeline.records import Item, Part, Reason, Role
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.store import Store, WholeRecords
from pipeline.structures.inventory import ScanRecipe as Structures
from pipeline.structures.inventory import item_key
from pipeline.structures.synthetic import complex_pdb

RECIPE, STRUCTURES = GraphRecipe(neighbours=5), Structures()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return CacheFolder(tmp_path / "cache").kind("graph")


def make_item(folder: Path, seed: int) -> Item:
    path = folder / f"{seed}.pdb"
    path.write_bytes(complex_pdb(seed, 20, 20))
    return Item(str(seed), parts=(Part(Role.COMPLEX, str(path)),))


def key_of(item: Item) -> bytes:
    path = item.parts[0].path
    return RECIPE.key(item_key(item, STRUCTURES, {path: content_digest(Path(path).read_bytes()).hex()}))


def build_all(items: list[Item], store: Store) -> list[Reason | None]:
    return list(graph(items, STRUCTURES, RECIPE, store, 1 << 20))


def test_what_is_there_is_not_built_again(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    items = [make_item(tmp_path, seed) for seed in range(2)]
    build_all(items[:1], store)
    record = store.get(key_of(items[0]))
    assert decode_graph(record.arrays, record.meta).sizes()["nodes"] == 40
    built = []
    build = build_module.build_graph
    monkeypatch.setattr(build_module, "build_graph", lambda *given: built.append(1) or build(*given))
    assert build_all([*items, items[1]], store) == [None] * 3
    assert built == [1]


def test_why_there_is_no_graph_is_remembered_in_its_place(tmp_path: Path, store: Store) -> None:
    item = make_item(tmp_path, 0)
    path = Path(item.parts[0].path)
    path.write_text(
        "".join(
            line for line in path.read_text().splitlines(keepends=True) if line[21:22] != "B" or line[22:26] == "   1"
        )
    )
    assert build_all([item], store) == [Reason.NO_EDGES]
    (said,) = WholeRecords(store).metas([key_of(item)]).values()
    assert said["reason"] == "no_edges"


def test_a_bug_costs_one_item(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    items = [make_item(tmp_path, seed) for seed in range(2)]
    build = build_module.build_graph

    def choke(read: object, recipe: GraphRecipe) -> object:
        if not list(store.keys()) and not choked:
            choked.append(1)
            raise ZeroDivisionError("deep inside")
        return build(read, recipe)

    choked: list[int] = []
    monkeypatch.setattr(build_module, "build_graph", choke)
    assert build_all(items, store) == [Reason.GRAPH_FAILED, None]


@pytest.mark.parametrize("error", [ImportError("libopenblas.so.0: cannot open"), OSError(errno.EIO, "no such disk")])
def test_what_only_this_machine_cannot_build_is_raised_and_not_remembered(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    item = make_item(tmp_path, 0)

    def choke(*_: object) -> object:
        raise error

    with monkeypatch.context() as here:
        here.setattr(build_module, "build_graph", choke)
        with pytest.raises(type(error)):
            build_all([item], store)
    assert not list(store.keys())
    assert build_all([item], store) == [None]


def test_a_file_that_went_away_is_a_reason_and_leaves_nothing(tmp_path: Path, store: Store) -> None:
    item = make_item(tmp_path, 0)
    Path(item.parts[0].path).unlink()
    assert build_all([item], store) == [Reason.MISSING_FILE]
    assert not list(store.keys())
