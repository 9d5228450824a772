"""From a manifest to stored graphs: ligands and topologies whose files tell of their bonds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pipeline.graphs import bonds as templates
from pipeline.graphs.item_graph import GraphRecipe, ItemGraph, decode_graph
from pipeline.keys import content_digest
from pipeline.records import Item, Reason
from pipeline.stages.graph import Maker, open_writer
from pipeline.stages.scan import ScanShelves, look_up_items, scan_items
from pipeline.store.cache_folder import CacheFolder
from pipeline.structures.inventory import ScanRecipe as Structures
from pipeline.structures.inventory import item_key
from pipeline.structures.parsing.structure_files import item_paths
from pipeline.structures.policy import Policy
from pipeline.structures.sources.data_source import items
from pipeline.structures.sources.item_ids import SourceSpec
from tests.stages.test_scan import settle
from tests.structures.parsing.amber_text import write_complex
from tests.structures.parsing.molecule_text import ACETAMIDE, THEOPHYLLINE, moved
from tests.structures.pdb_text import atom as line

STRUCTURES = Structures(policy=Policy(ligands="keep"))
RECIPE = GraphRecipe(nodes="atom", contacts=6.0)
MANIFEST = """\
id,path,receptor_path,ligand_path,receptor_chains,ligand_chains
sdf,,rna.pdb,l.sdf,A,
mol2,,rna.pdb,l.mol2,A,
both,x.prmtop,,,"A,B",_:LIG
mixed,,x.prmtop,l.sdf,A,
"""


def nucleotides(*names: str) -> str:
    """Return a strand whose bonds are all shorter than 3 Å: atoms on a grid, in the order of the template."""
    lines = []
    for number, name in enumerate(names, 1):
        bonded = [pair for pair in templates.bonds_of(name) if "OP3" not in pair]
        for at, one in enumerate(dict.fromkeys(each for pair in bonded for each in pair)):
            xyz = (0.8 * (at % 3) + 2.2 * (number - 1), 0.8 * (at // 3 % 3), 0.8 * (at // 9))
            lines.append(line(one, name, "A", number, xyz=xyz))
    return "".join(lines) + "TER\nEND\n"


@pytest.fixture
def data(tmp_path: Path) -> list[Item]:
    """Return the items of a manifest with an SDF, a MOL2 and two topologies."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "rna.pdb").write_text(nucleotides("G", "U"))
    (folder / "l.sdf").write_text(moved(THEOPHYLLINE, 1.03, -3.0, 4.51))
    (folder / "l.mol2").write_text(ACETAMIDE)
    write_complex(folder)
    (folder / "m.csv").write_text(MANIFEST)
    found = list(items(SourceSpec("manifest", folder / "m.csv")))
    assert all(isinstance(item, Item) for item in found), found
    return [item for item in found if isinstance(item, Item)]


def key(item: Item) -> bytes:
    digests = {path: content_digest(Path(path).read_bytes()).hex() for path in item_paths(item)}
    return item_key(item, STRUCTURES, digests)


def graphs_of(data: list[Item], cache: CacheFolder) -> Iterator[ItemGraph]:
    """Scan the items, make graphs while they are in hand, and read those back."""
    shelves = ScanShelves(cache.kind("scan"), cache.kind("files"), 1 << 20)
    store = cache.kind("graph")
    with ExitStack() as stack:
        maker = Maker(RECIPE, store, stack.enter_context(open_writer(store, 1 << 20)))
        assert list(scan_items(data, STRUCTURES, shelves, maker)) == [None] * len(data)
    for item in data:
        record = store.get(RECIPE.key(key(item)))
        yield decode_graph(record.arrays, record.meta)


def bonds(of: ItemGraph, part: int) -> int:
    return len(of.parts[part].edges["bond"][0]) // 2


def test_every_side_has_its_bonds_from_where_they_are_told(data: list[Item], tmp_path: Path) -> None:
    sdf, mol2, both, mixed = graphs_of(data, CacheFolder(tmp_path / "cache"))
    strand = sum(len([pair for pair in templates.bonds_of(name) if "OP3" not in pair]) for name in "GU")
    assert bonds(sdf, 0) == bonds(mol2, 0) == strand + 1
    assert (bonds(sdf, 1), bonds(mol2, 1)) == (14, 3)
    assert (bonds(both, 0), bonds(both, 1)) == (5 * 7 + 3, 2)
    assert (bonds(mixed, 0), bonds(mixed, 1)) == (3 * 7 + 2, 14)
    for one in (sdf, both, mixed):
        ligand = one.parts[1]
        assert ligand.edges["angle"].size
        assert ligand.paths["angle"].shape[1] == 3
        assert len(one.labels["contact_pairs"])
    assert sdf.parts[1].edges["dihedral"].size
    assert sdf.parts[1].edges["near"].size


def test_coordinates_that_change_or_go_are_noticed_without_reading_the_topology(
    data: list[Item], tmp_path: Path
) -> None:
    cache = CacheFolder(tmp_path / "cache")
    shelves = ScanShelves(cache.kind("scan"), cache.kind("files"), 1 << 20)
    both = [item for item in data if item.id == "both"]
    for path in item_paths(both[0]):
        settle(Path(path))
    assert list(scan_items(both, STRUCTURES, shelves)) == [None]
    assert look_up_items(both, STRUCTURES, shelves)[0].inventory is not None
    beside = Path(item_paths(both[0])[1])
    beside.write_bytes(beside.read_bytes().replace(b"0.4000000", b"0.4100000"))
    (seen,) = look_up_items(both, STRUCTURES, shelves)
    assert seen.inventory is None
    beside.unlink()
    (seen,) = look_up_items(both, STRUCTURES, shelves)
    assert seen.inventory is not None
    assert seen.inventory.reason is Reason.MISSING_FILE
