"""Whatever people bring becomes items and rejections: nothing is lost, nothing is guessed, no id leaves its folder."""

from __future__ import annotations

import csv
import json
import os
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import ConfigError, PipelineError
from pipeline.records import Item, Reason, Rejection
from pipeline.structures.sources.data_source import ADAPTERS, items
from pipeline.structures.sources.item_ids import MERGE_AT, SeenIds, SourceSpec, id_problem
from pipeline.structures.sources.source_folder import StructureFolder
from pipeline.units import printable_text
from tests.structures.sources.source_files import ids, read, reasons, touch, write

HOSTILE_IDS = {
    "slash": "a/b",
    "climbing": "../../etc/passwd",
    "two dots": "..",
    "hidden": ".a",
    "backslash": "a\\b",
    "absolute": "/etc/passwd",
    "space": "a b",
    "no-break space": "a\u00a0b",
    "300 characters": "a" * 300,
    "option": "-rf",
    "empty": "",
    "control character": "a\x1bb",
    "NUL": "a\0b",
    "zero-width space": "a\u200bb",
    "right-to-left override": "a\u202eb",
}


@pytest.mark.parametrize("name", HOSTILE_IDS.values(), ids=HOSTILE_IDS)
def test_hostile_id_is_rejected_with_the_reason_and_the_rest_goes_on(tmp_path: Path, name: str) -> None:
    rows = [{"id": name, "path": "x.pdb"}, {"id": "good", "path": "y.pdb"}]
    manifest = write(tmp_path / "m.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    bad, good = read("manifest", manifest)
    assert isinstance(bad, Rejection)
    assert (bad.reason, bad.origin) == (Reason.BAD_ID, "m.jsonl:1")
    assert bad.detail.startswith("the id ")
    assert bad.id.isprintable()
    assert len(bad.id) <= 100
    assert isinstance(good, Item)


@pytest.mark.parametrize("name", ["1abc", "a" * 200, "Fab_1.2-x", "1ABC_H+L", "蛋白质", "a\u2215b", "a\uff0fb"])
def test_printable_id_is_taken_even_when_it_looks_like_a_path(name: str) -> None:
    assert id_problem(name) == ""


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


def test_an_unchecked_stem_is_a_bug_of_the_caller(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not checked"):
        StructureFolder(tmp_path).find("../x")


def test_first_of_duplicate_ids_is_kept_and_the_others_name_its_line(tmp_path: Path) -> None:
    manifest = write(tmp_path / "m.csv", "id,path,split\na,1.pdb,train\nb,2.pdb,train\na,3.pdb,val\na,4.pdb,test\n")
    entries = read("manifest", manifest)
    assert ids(entries) == ["a", "b"]
    assert reasons(entries) == [Reason.DUPLICATE_ID] * 2
    assert isinstance(entries[2], Rejection)
    assert entries[2].detail == "m.csv:2 has this id already (this one is in split 'val')"
    assert entries[2].origin == "m.csv:4"


def test_duplicates_are_found_across_merges_of_the_seen_ids() -> None:
    seen = SeenIds()
    count = 2 * MERGE_AT + 10
    assert all(seen.first_line(f"id{n}", n) is None for n in range(count))
    assert [seen.first_line(f"id{n}", 0) for n in (0, MERGE_AT, count - 1)] == [0, MERGE_AT, count - 1]


def test_seen_ids_take_few_bytes_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.structures.sources.item_ids.MERGE_AT", 2048)
    count = 10 * 2048
    tracemalloc.start()
    seen = SeenIds()
    for n in range(count):
        seen.first_line(f"complex-{n:09d}", n)
    held_bytes, _peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held_bytes < 20 * count


def test_limit_counts_items_and_not_rejections(tmp_path: Path) -> None:
    manifest = write(tmp_path / "m.csv", "id,path\n..,0.pdb\na,1.pdb\na,2.pdb\nb,3.pdb\nc,4.pdb\n")
    entries = read("manifest", manifest, limit=2)
    assert ids(entries) == ["a", "b"]
    assert reasons(entries) == [Reason.BAD_ID, Reason.DUPLICATE_ID]


def test_text_from_outside_is_shown_without_control_characters() -> None:
    assert printable_text("a\x1b[31m\n\udc80") == r"a\x1b[31m\n\udc80"
    assert len(printable_text("x" * 1000)) == 80


@pytest.mark.parametrize("source", ADAPTERS)
def test_a_path_that_is_not_there_says_where_it_comes_from(tmp_path: Path, source: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(source, tmp_path / "no such.csv", pattern=("*",))
    assert "no such" in caught.value.where
    assert "pipeline config show" in caught.value.remedy


@pytest.mark.parametrize("source", ["manifest", "sabdab", "pinder", "fasta"])
@pytest.mark.parametrize("name", ["m.csv", "structures"])
def test_a_folder_in_place_of_a_file_is_an_error(tmp_path: Path, source: str, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=r"a folder, where a (file|table) is wanted"):
        read(source, tmp_path / name)


@pytest.mark.parametrize("source", ["pairs", "glob"])
def test_a_file_in_place_of_a_folder_is_an_error(tmp_path: Path, source: str) -> None:
    with pytest.raises(ConfigError, match="a file, where a folder is wanted"):
        read(source, write(tmp_path / "x", "x"), pattern=("*",))


@pytest.mark.parametrize("source", ["pairs", "glob"])
def test_a_folder_without_permission_is_an_error(unprivileged: Path, source: str) -> None:
    folder = unprivileged / "closed"
    folder.mkdir(mode=0)
    with pytest.raises(ConfigError, match="cannot be listed: Permission denied") as caught:
        read(source, folder, pattern=("*",))
    assert caught.value.remedy.startswith("ls -ld")


def test_a_file_without_permission_is_an_error(unprivileged: Path) -> None:
    manifest = write(unprivileged / "m.csv", "id,path\nx,a\n")
    manifest.chmod(0)
    with pytest.raises(ConfigError, match="cannot be opened"):
        read("manifest", manifest)


@pytest.mark.parametrize("suffix", [".xlsx", ".txt", "", ".gz"])
def test_a_table_of_another_kind_is_an_error(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(ConfigError, match=r"a table is one of \.csv"):
        read("manifest", write(tmp_path / f"m{suffix}", "x"))


def test_a_table_that_is_not_there_is_said_to_be_missing_whatever_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read("manifest", tmp_path / "nothing")


SETTINGS_NOBODY_READS: list[tuple[str, dict[str, object]]] = [
    ("manifest", {"state": "unbound"}),
    ("glob", {"splits": Path("s.csv")}),
    ("sabdab", {"receptor_chains": ("A",)}),
    ("fasta", {"structures_dir": Path()}),
]


@pytest.mark.parametrize(("source", "settings"), SETTINGS_NOBODY_READS)
def test_a_setting_that_the_source_ignores_is_an_error(
    tmp_path: Path, source: str, settings: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match="means nothing to the source"):
        read(source, tmp_path, **settings)


def test_an_unknown_source_is_an_error_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'manifest'"):
        read("manifst", tmp_path)


def test_a_missing_structures_dir_is_an_error(tmp_path: Path) -> None:
    manifest = write(tmp_path / "m.csv", "id,path\nx,a\n")
    with pytest.raises(ConfigError, match="no such folder"):
        read("manifest", manifest, structures_dir=tmp_path / "none")


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


@pytest.mark.parametrize("source", ADAPTERS)
def test_every_error_of_every_source_ends_with_a_command(tmp_path: Path, source: str) -> None:
    (tmp_path / "junk.csv").write_bytes(os.urandom(64) + b"\xff\xfe\n")
    for path in (tmp_path / "junk.csv", tmp_path / "absent.csv", tmp_path):
        with pytest.raises(PipelineError) as caught:
            read(source, path)
        assert caught.value.remedy.split()[0] in {
            "ls",
            "pipeline",
            "iconv",
            "head",
            "tr",
            "file",
            "gzip",
            "mv",
            "python",
        }


@pytest.mark.parametrize("state", ["bound", "unbound"])
def test_real_pairs_are_read_bound_and_unbound(structures: Path, state: str) -> None:
    folder = structures / "pairs"
    entries = read("pairs", folder, splits=folder / "splits.csv", state=state)
    with (folder / "splits.csv").open() as stream:
        listed = [(row["path"], row["split"]) for row in csv.DictReader(stream)]
    assert [(entry.id, entry.split) for entry in entries if isinstance(entry, Item)] == listed
    assert len(entries) == len(listed) == 5
    for entry in entries:
        assert isinstance(entry, Item)
        names = [Path(part.path).name for part in entry.parts]
        assert names == [f"{entry.id}_{side}_{state[0]}.pdb.gz" for side in "rl"]
        assert all(Path(part.path).is_file() for part in (*entry.parts, *entry.bound))
        assert len(entry.bound) == (2 if state == "unbound" else 0)
    assert sorted(ids(read("pairs", folder))) == sorted(ids(entries))
