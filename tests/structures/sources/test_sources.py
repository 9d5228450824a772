"""Whatever people bring becomes items and rejections: nothing is lost, nothing is guessed, no id leaves its folder."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import ConfigError, PipelineError
from pipeline.records import Item, Reason
from pipeline.structures.sources.data_source import ADAPTERS, items
from pipeline.structures.sources.item_ids import MERGE_AT, SeenIds, SourceSpec, id_problem
from tests.structures.sources.source_files import ids, read, reasons, touch, write

HOSTILE_IDS = (
    *("a/b", "../../etc/passwd", "..", ".a", "a\\b", "/etc/passwd", "a b", "a\u00a0b", "a" * 300, "-rf", ""),
    *("a\x1bb", "a\0b", "a\u200bb", "a\u202eb"),  # control characters, and those that hide or turn text
)


def test_hostile_id_is_rejected_with_the_reason_and_the_rest_goes_on(tmp_path: Path) -> None:
    for name in HOSTILE_IDS:
        rows = [{"id": name, "path": "x.pdb"}, {"id": "good", "path": "y.pdb"}]
        bad, good = read("manifest", write(tmp_path / "m.jsonl", "".join(json.dumps(row) + "\n" for row in rows)))
        assert (bad.reason, bad.origin, bad.id.isprintable()) == (Reason.BAD_ID, "m.jsonl:1", True), name
        assert len(bad.id) <= 100
        assert isinstance(good, Item)
    for name in ("1abc", "a" * 200, "Fab_1.2-x", "1ABC_H+L", "蛋白质", "a\u2215b", "a\uff0fb"):
        assert id_problem(name) == "", name


@given(st.text(max_size=220) | st.text(alphabet="./\\-a~ \0", max_size=8))
def test_an_allowed_id_never_leaves_its_folder(name: str) -> None:
    if id_problem(name):
        return
    for file_name in (name, f"{name}_r_b.pdb", f"{name}-R.pdb"):
        assert os.path.normpath(f"/data/{file_name}") == f"/data/{file_name}"
        assert Path(f"/data/{file_name}").parent == Path("/data")


@given(st.text(alphabet="./\\-aRL_", max_size=12))
def test_no_pinder_id_reads_a_file_outside_of_its_folder(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    root = tmp_path_factory.mktemp("pinder")
    touch(root, "a-R.pdb", "a-L.pdb", "-R.pdb", "-L.pdb")
    folder = touch(root / "in", "a-R.pdb", "a-L.pdb")
    for entry in read("pinder", write(folder / "i.jsonl", json.dumps({"id": name}))):
        if isinstance(entry, Item):
            assert all(Path(part.path).resolve().parent == folder.resolve() for part in entry.parts)


def test_first_of_duplicate_ids_is_kept_and_the_others_name_its_line(tmp_path: Path) -> None:
    manifest = write(tmp_path / "m.csv", "id,path,split\na,1.pdb,train\nb,2.pdb,train\na,3.pdb,val\na,4.pdb,test\n")
    entries = read("manifest", manifest)
    assert ids(entries) == ["a", "b"]
    assert reasons(entries) == [Reason.DUPLICATE_ID] * 2
    assert entries[2].detail == "m.csv:2 already has this id (this one is in split 'val')"
    assert entries[2].origin == "m.csv:4"


def test_duplicates_are_found_across_merges_of_the_seen_ids() -> None:
    seen = SeenIds()
    count = 2 * MERGE_AT + 10
    assert all(seen.first_line(f"id{n}", n) is None for n in range(count))
    assert [seen.first_line(f"id{n}", 0) for n in (0, MERGE_AT, count - 1)] == [0, MERGE_AT, count - 1]


def test_limit_counts_items_and_not_rejections(tmp_path: Path) -> None:
    manifest = write(tmp_path / "m.csv", "id,path\n..,0.pdb\na,1.pdb\na,2.pdb\nb,3.pdb\nc,4.pdb\n")
    entries = read("manifest", manifest, limit=2)
    assert ids(entries) == ["a", "b"]
    assert reasons(entries) == [Reason.BAD_ID, Reason.DUPLICATE_ID]


def test_what_is_no_file_or_no_folder_is_an_error(tmp_path: Path) -> None:
    for source in ADAPTERS:
        with pytest.raises(ConfigError) as caught:
            read(source, tmp_path / "no such.csv", pattern=("*",))
        assert ("no such" in caught.value.where, bool(caught.value.remedy)) == (True, True), source
    for name in ("m.csv", "structures"):
        (tmp_path / name).mkdir()
        for source in ("manifest", "sabdab", "pinder", "fasta"):
            with pytest.raises(ConfigError, match="a directory"):
                read(source, tmp_path / name)
    for source in ("pairs", "glob"):
        with pytest.raises(ConfigError, match="a file"):
            read(source, write(tmp_path / "x", "x"), pattern=("*",))
    for suffix in (".xlsx", ".txt", "", ".gz"):
        with pytest.raises(ConfigError, match=r"\.csv"):
            read("manifest", write(tmp_path / f"n{suffix}", "x"))


def test_what_may_not_be_read_is_an_error(unprivileged: Path) -> None:
    folder, manifest = unprivileged / "closed", write(unprivileged / "m.csv", "id,path\nx,a\n")
    folder.mkdir(mode=0)
    manifest.chmod(0)
    for source, path in (("pairs", folder), ("glob", folder), ("manifest", manifest)):
        with pytest.raises(ConfigError) as caught:
            read(source, path, pattern=("*",) if path is folder else ())
        assert path.name in caught.value.where, source


def test_a_setting_that_the_source_ignores_is_an_error(tmp_path: Path) -> None:
    for source, settings in (
        ("manifest", {"state": "unbound"}),
        ("sabdab", {"receptor_chains": ("A",)}),
        ("fasta", {"structures_dir": Path()}),
    ):
        with pytest.raises(ConfigError, match=next(iter(settings))):
            read(source, tmp_path, **settings)
    with pytest.raises(ConfigError):
        read("manifest", write(tmp_path / "m.csv", "id,path\nx,a\n"), structures_dir=tmp_path / "none")


def test_a_table_of_splits_goes_with_every_source_and_before_its_column(tmp_path: Path) -> None:
    manifest = write(tmp_path / "m.csv", "id,path,split\nx,a,train\ny,b,train\nz,c,test\n")
    fasta = write(tmp_path / "s.fasta", ">y\nMKV\n>x\nMKVA\n>z\nMK\n")
    splits = write(tmp_path / "s.csv", "id,split,cluster\ny,val,c1\nx,test,c2\n")
    for source, path in (("manifest", manifest), ("fasta", fasta)):
        found = {item.id: (item.split, item.cluster) for item in read(source, path, splits=splits)}
        assert found == {"x": ("test", "c2"), "y": ("val", "c1"), "z": ("", "")}


@pytest.mark.parametrize(
    ("table", "where"),
    [("id,split\nq,val\n", "s.csv"), ("id,split\nx,val\nx,train\n", "s.csv:3"), ("id,splitt\nx,val\n", "s.csv")],
)
def test_a_table_of_splits_that_fits_nothing_or_repeats_an_id_is_refused(
    tmp_path: Path, table: str, where: str
) -> None:
    manifest, splits = write(tmp_path / "m.csv", "id,path\nx,a\n"), write(tmp_path / "s.csv", table)
    with pytest.raises(PipelineError) as caught:
        read("manifest", manifest, splits=splits)
    assert caught.value.where.endswith(where)


@pytest.mark.nightly
def test_a_long_manifest_is_read_in_flat_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.structures.sources.item_ids.MERGE_AT", 2048)
    count = 25_000
    with (tmp_path / "m.csv").open("w") as stream:
        stream.write("id,path,split,label\n")
        stream.writelines(f"complex{n},folder/{n}.pdb,train,{n % 97}\n" for n in range(count))
    tracemalloc.start()
    taken = sum(isinstance(entry, Item) for entry in items(SourceSpec("manifest", tmp_path / "m.csv")))
    _held, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken == count
    assert peak_bytes < 60 * count  # the ids alone would take more as a set, the items twenty times more


def test_reading_is_lazy_and_stops_where_the_reader_stops(tmp_path: Path) -> None:
    manifest = write(tmp_path / "m.csv", b"id,path\nx,a\n" + b"y,b\n" * 100_000 + b"\xff not read\n")
    stream = items(SourceSpec("manifest", manifest))
    assert isinstance(next(stream), Item)
    stream.close()


def test_every_error_of_every_source_ends_with_a_command(tmp_path: Path) -> None:
    (tmp_path / "junk.csv").write_bytes(os.urandom(64) + b"\xff\xfe\n")
    commands = {"ls", "pipeline", "iconv", "head", "tr", "file", "gzip", "mv", "python"}
    for source in ADAPTERS:
        for path in (tmp_path / "junk.csv", tmp_path / "absent.csv", tmp_path):
            with pytest.raises(PipelineError) as caught:
                read(source, path)
            assert caught.value.remedy.split()[0] in commands, (source, path)
