"""A manifest in any dress gives the same items; a broken one is an error that says what to type."""

from __future__ import annotations

import gzip
import json
import math
import os
from pathlib import Path

import pytest

from pipeline.errors import ConfigError, DataError
from pipeline.records import Item, Part, Reason, Rejection, Role
from pipeline.structures.sources.item_ids import label_values, unread_columns, value_of
from pipeline.structures.sources.source_rows import MAX_LINE_BYTES, split_chains
from tests.structures.sources.source_files import ids, only_item, only_rejection, read, touch, write


def test_manifest_row_becomes_an_item_with_partners_split_cluster_and_labels(tmp_path: Path) -> None:
    text = (
        "id,path,receptor_chains,ligand_chains,split,cluster,model,affinity,note\n"
        '1abc,s/1abc.cif,"H,L",A,train,c7,2,-9.5,"a ""good"" one"\n'
    )
    item = only_item(read("manifest", write(tmp_path / "m.csv", text)))
    path = str(tmp_path / "s" / "1abc.cif")
    assert item == Item(
        id="1abc",
        parts=(Part(Role.RECEPTOR, path, ("H", "L"), 2), Part(Role.LIGAND, path, ("A",), 2)),
        split="train",
        cluster="c7",
        labels={"affinity": "-9.5", "note": 'a "good" one'},
        origin="m.csv:2",
    )


SAME_TABLE = {
    "csv": ("m.csv", "id,path,split\na,a.pdb,train\nb,b.pdb,val\n"),
    "gzip": ("m.csv.gz", "id,path,split\na,a.pdb,train\nb,b.pdb,val\n"),
    "tsv": ("m.tsv", "id\tpath\tsplit\na\ta.pdb\ttrain\nb\tb.pdb\tval\n"),
    "jsonl": ("m.jsonl", '{"id":"a","path":"a.pdb","split":"train"}\n\n{"split":"val","id":"b","path":"b.pdb"}\n'),
    "jsonl gzip": ("m.jsonl.gz", '{"id":"a","path":"a.pdb","split":"train"}\n{"id":"b","path":"b.pdb","split":"val"}'),
    "byte order mark": ("m.csv", "\ufeffid,path,split\na,a.pdb,train\nb,b.pdb,val\n"),
    "CRLF": ("m.csv", "id,path,split\r\na,a.pdb,train\r\nb,b.pdb,val\r\n"),
    "no last line end": ("m.csv", "id,path,split\na,a.pdb,train\nb,b.pdb,val"),
    "quotes": ("m.csv", '"id","path","split"\n"a","a.pdb","train"\n"b","b.pdb","val"\n'),
    "spaces": ("m.csv", 'id, path, split\n a , "a.pdb",train\nb , b.pdb, val\n'),
    "blank lines": ("m.csv", "\n\nid,path,split\n\na,a.pdb,train\n , ,\nb,b.pdb,val\n\n"),
    "trailing commas": ("m.csv", "id,path,split,,\na,a.pdb,train,,\nb,b.pdb,val,,,,\n"),
    "unnamed index column": ("m.csv", ",id,path,split\n0,a,a.pdb,train\n1,b,b.pdb,val\n"),
    "other case": ("m.csv", "ID,Path,SPLIT\na,a.pdb,train\nb,b.pdb,val\n"),
}


def test_the_same_table_in_any_dress_gives_the_same_items(tmp_path: Path) -> None:
    a, b = (Part(Role.COMPLEX, str(tmp_path / file)) for file in ("a.pdb", "b.pdb"))
    for what, (name, text) in SAME_TABLE.items():
        entries = read("manifest", write(tmp_path / name, text))
        assert all(isinstance(entry, Item) for entry in entries), (what, entries)
        found = [(one.id, one.split, one.parts, dict(one.labels)) for one in entries]
        assert found == [("a", "train", (a,), {}), ("b", "val", (b,), {})], what


def test_chains_are_divided_at_separators_and_never_between_letters() -> None:
    cells = {"A": "A", "A,B": "A B", "A|B": "A B", "A | B": "A B", "A B": "A B", "A;B": "A B", "AB": "AB"}
    for cell, chains in {**cells, "B,A,B": "B A", "": "", " , ": ""}.items():
        assert split_chains(cell) == tuple(chains.split()), cell


BAD_ROWS = {
    "too few fields": ("m.csv", "id,path,split\nx,a.pdb\n"),
    "too many fields": ("m.csv", "id,path,split\nx,a.pdb,train,more\n"),
    "no path": ("m.csv", "id,path\nx,\n"),
    "one partner": ("m.csv", "id,path,receptor_chains,ligand_chains\nx,a.pdb,A,\n"),
    "model zero": ("m.csv", "id,path,model\nx,a.pdb,0\n"),
    "model in words": ("m.csv", "id,path,model\nx,a.pdb,first\n"),
    "half of two files": ("m.csv", "id,receptor_path,ligand_path\nx,a.pdb,\n"),
    "one and two files": ("m.csv", "id,path,receptor_path,ligand_path\nx,c,a,b\n"),
    "text after a quote": ("m.csv", 'id,path\n"x"y,a.pdb\n'),
    "control character in a path": ("m.jsonl", '{"id":"x","path":"a\\u0000b"}'),
    "JSON cut short": ("m.jsonl", '{"id":"x","path":'),
    "JSON list": ("m.jsonl", '["x"]'),
    "JSON too deep": ("m.jsonl", "[" * 200_000),
    "column twice in JSON": ("m.jsonl", '{"id":"x","ID":"y","path":"a.pdb"}'),
    "half a surrogate pair": ("m.jsonl", '{"id":"x","path":"a.pdb","note":"\\ud800"}'),
}


def test_bad_row_is_rejected_by_its_line(tmp_path: Path) -> None:
    for what, (name, text) in BAD_ROWS.items():
        bad = only_rejection(read("manifest", write(tmp_path / name, text)))
        assert (bad.reason, bad.origin) == (Reason.BAD_ROW, f"{name}:{2 if name == 'm.csv' else 1}"), what
        assert bad.detail, what


def test_rows_after_a_bad_one_are_read(tmp_path: Path) -> None:
    entries = read("manifest", write(tmp_path / "m.csv", 'id,path\na,1\n"b"x,2\nc\nd,4\n'))
    assert ids(entries) == ["a", "d"]
    assert [entry.origin for entry in entries] == ["m.csv:2", "m.csv:3", "m.csv:4", "m.csv:5"]


def test_a_later_json_row_with_a_misspelt_column_is_rejected_not_misread(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "path": "a", "ligand_chains": "B", "receptor_chains": "A"},
        {"id": "b", "path": "b", "splits": "x"},
    ]
    entries = read("manifest", write(tmp_path / "m.jsonl", "\n".join(map(json.dumps, rows))))
    assert ids(entries) == ["a"]
    assert "'splits'" in str(entries[1])


def test_json_numbers_and_lists_read_like_cells(tmp_path: Path) -> None:
    row = {
        "id": "x",
        "path": "a.pdb",
        "receptor_chains": ["H", "L"],
        "ligand_chains": "A",
        "model": 1,
        "kd": 1e-9,
        "ok": True,
        "no": None,
    }
    item = only_item(read("manifest", write(tmp_path / "m.jsonl", json.dumps(row))))
    assert [(part.chains, part.model) for part in item.parts] == [(("H", "L"), 1), (("A",), 1)]
    assert item.labels == {"kd": "1e-09", "ok": "true", "no": ""}


def test_a_quoted_field_may_hold_line_ends_and_lines_are_still_counted(tmp_path: Path) -> None:
    text = 'id,path,note\na,a.pdb,"one\r\ntwo\nthree"\nb,b.pdb,\n'
    entries = read("manifest", write(tmp_path / "m.csv", text))
    assert [entry.origin for entry in entries] == ["m.csv:2", "m.csv:5"]
    assert entries[0].labels["note"].splitlines() == ["one", "two", "three"]


def test_two_file_complex_takes_partners_from_two_files(tmp_path: Path) -> None:
    text = f"id,receptor_path,ligand_path,receptor_chains\nx,r.pdb,{tmp_path}/other/l.cif,H L\n"
    item = only_item(read("manifest", write(tmp_path / "m.csv", text)))
    assert item.parts == (
        Part(Role.RECEPTOR, str(tmp_path / "r.pdb"), ("H", "L")),
        Part(Role.LIGAND, str(tmp_path / "other" / "l.cif")),
    )


def test_structures_dir_finds_files_by_id_and_is_where_relative_paths_start(tmp_path: Path) -> None:
    folder = touch(tmp_path / "s", "a.pdb", "b.cif.gz", "C.PDB")
    manifest = write(tmp_path / "m.csv", "id,path\na,\nb,\nC,\nd,sub/d.pdb\ne,\n")
    *found, missing = read("manifest", manifest, structures_dir=folder)
    paths = [entry.parts[0].path for entry in found if isinstance(entry, Item)]
    assert paths == [str(folder / name) for name in ("a.pdb", "b.cif.gz", "C.PDB", "sub/d.pdb")]
    assert missing.reason is Reason.MISSING_FILE


def test_an_id_cannot_reach_out_of_structures_dir(tmp_path: Path) -> None:
    folder = touch(tmp_path / "s", "a.pdb")
    touch(tmp_path, "secret.pdb")
    entries = read("manifest", write(tmp_path / "m.csv", "id\n../secret\n"), structures_dir=folder)
    assert only_rejection(entries).reason is Reason.BAD_ID


def test_the_choice_between_two_formats_of_one_structure_does_not_depend_on_the_rest(tmp_path: Path) -> None:
    folder = touch(tmp_path / "s", "a.cif", "a.pdb", "b.cif")
    manifest = write(tmp_path / "m.csv", "id\nb\na\n")
    b, a = (entry for entry in read("manifest", manifest, structures_dir=folder) if isinstance(entry, Item))
    assert (b.parts[0].path, a.parts[0].path) == (str(folder / "b.cif"), str(folder / "a.pdb"))


def test_configured_chains_serve_rows_that_name_none(tmp_path: Path) -> None:
    manifest = write(tmp_path / "m.csv", "id,path,receptor_chains,ligand_chains\na,a.pdb,,\nb,b.pdb,X,Y\n")
    entries = read("manifest", manifest, receptor_chains=("H", "L"), ligand_chains=("A",))
    chains = [[part.chains for part in entry.parts] for entry in entries if isinstance(entry, Item)]
    assert chains == [[("H", "L"), ("A",)], [("X",), ("Y",)]]


def test_without_partners_named_chains_are_one_body(tmp_path: Path) -> None:
    manifest = write(tmp_path / "m.csv", "id,path,receptor_chains\na,a.pdb,A B\n")
    item = only_item(read("manifest", manifest, partners="none"))
    assert item.parts == (Part(Role.WHOLE, str(tmp_path / "a.pdb"), ("A", "B")),)


COLUMN_ERRORS = {
    "missing": ("m.csv", "id,structure\nx,a\n", "head -n 1"),
    "near": ("m.csv", "id,pth\nx,a\n", r"sed -i '1s/\bpth\b/path/'"),
    "near an optional one": ("m.csv", "id,path,receptor_chain\nx,a,A\n", "sed -i"),
    "DiffDock's": ("m.csv", "complex_name,protein_path\nx,a\n", r"sed -i '1s/\bcomplex_name\b/id/'"),
    "DiffDock's path": ("m.csv", "id,protein_path,ligand_description\nx,a,b\n", "sed"),
    "semicolons": ("m.csv", "id;path;split\nx;a;train\n", "head -n 1"),
    "twice": ("m.csv", "id,path,path\nx,a,b\n", "head -n 1"),
    "gzipped": ("m.csv.gz", "id,pth\nx,a\n", "gzip -dc"),
    "JSON": ("m.jsonl", '{"name":"x","path":"a"}\n', "head -n 1"),
    **{
        name: ("m.csv", f"id,path,{name}\nx,a,A\n", rf"sed -i '1s/\b{name}\b/{column}/'")
        for column, names in {
            "receptor_chains": "chain chains Chain_ID rec_chain receptor receptorchain",
            "ligand_chains": "lig_chain ligand antigen_chains",
            "split": "spilt set Subset splits fold",
            "cluster": "group group_id clusters",
        }.items()
        for name in names.split()
    },
}


def test_wrong_columns_are_an_error_with_the_command_that_shows_or_mends_them(tmp_path: Path) -> None:
    for case, (name, text, remedy) in COLUMN_ERRORS.items():
        with pytest.raises(ConfigError) as caught:
            read("manifest", write(tmp_path / name, text))
        assert caught.value.where == str(tmp_path / name), case
        assert remedy in caught.value.remedy, case


def test_the_remedy_for_a_misnamed_column_repairs_the_file(tmp_path: Path) -> None:
    manifest = write(tmp_path / "my data.csv", "complex_name,path,complex_name_2\nx,a.pdb,y\n")
    with pytest.raises(ConfigError) as caught:
        read("manifest", manifest)
    assert os.system(caught.value.remedy) == 0
    assert only_item(read("manifest", manifest)).labels == {"complex_name_2": "y"}


def test_a_column_named_like_one_that_is_there_is_a_label(tmp_path: Path) -> None:
    charged = "id,path,receptor_charge\nx,a,2\n"
    assert only_item(read("manifest", write(tmp_path / "m.csv", charged))).labels == {"receptor_charge": "2"}
    text = "id,path,receptor_chains,ligand_chains,split,cluster,set,receptor,mode,n_chains\nx,a,,,,,7,b,c,2\n"
    item = only_item(read("manifest", write(tmp_path / "m.csv", text)))
    assert item.labels == {"set": "7", "receptor": "b", "mode": "c", "n_chains": "2"}
    assert unread_columns(item, ("set", "n_chains")).split(" (")[0].endswith(": receptor, mode")


BROKEN_TABLES = {
    "empty": b"",
    "only a byte order mark": b"\xef\xbb\xbf",
    "only blank lines": b"\n\n\n",
    "only a header": b"id,path\n",
    "Latin-1": b"id,path,who\nx,a,M\xfcller\n",
    "UTF-16": "id,path\nx,a\n".encode("utf-16"),
    "binary junk": bytes(range(255, -1, -1)) * 4,
    "old Macintosh line ends": b"id,path\rx,a\r",
    "unclosed quote": b'id,path\nx,"a\ny,b\nz,c\n',
    "quote that swallows lines": b'id,path,n\nx,"a,1\ny,"b",2\nz,c,3\n',
    "endless line": b"id,path\n" + b"x" * (MAX_LINE_BYTES + 1),
    "gzip without its suffix": gzip.compress(b"id,path\nx,a\n"),
}


def test_a_broken_table_is_an_error_that_says_what_to_type(tmp_path: Path) -> None:
    for name, data in BROKEN_TABLES.items():
        (tmp_path / "m.csv").write_bytes(data)
        with pytest.raises(DataError) as caught:
            read("manifest", tmp_path / "m.csv")
        assert (str(tmp_path) in caught.value.where, bool(caught.value.remedy)) == (True, True), name


@pytest.mark.parametrize("written", ["utf-16", "latin1"])
def test_a_table_in_another_encoding_is_told_the_one_to_convert_from(tmp_path: Path, written: str) -> None:
    (tmp_path / "m.csv").write_bytes("id,path\nx,Müller.pdb\n".encode(written))
    with pytest.raises(DataError) as caught:
        read("manifest", tmp_path / "m.csv")
    assert caught.value.remedy.startswith(f"iconv -f {written} -t utf-8 ")


def test_a_gzip_file_that_is_cut_off_or_none_is_an_error_not_a_short_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "".join(f"id{n},{n * 7919 % 10007}.pdb\n" for n in range(5000))
    data = gzip.compress(f"id,path\n{lines}".encode())
    for content in (b"", data[:5], data[: len(data) // 2], data[:-9], data[:-1], b"id,path\nx,a\n"):
        (tmp_path / "m.csv.gz").write_bytes(content)
        with pytest.raises(DataError):
            read("manifest", tmp_path / "m.csv.gz")
    monkeypatch.setattr("pipeline.structures.sources.source_rows.EXPANSION_FLOOR_BYTES", 0)
    with pytest.raises(DataError, match="unfolds"):
        read("manifest", write(tmp_path / "bomb.csv.gz", b"id,path\n" + b"\n" * (1 << 20)))


LABELLED = (
    "id,path,split,Affinity,cluster\na,a.pdb,train,-9.5,3\nb,b.pdb,val,NA,\nc,c.pdb,val,high,4\nd,d.pdb,val,inf,5\n"
)


def test_labels_that_are_asked_for_are_numbers_or_unknown_and_anything_else_is_a_rejection(tmp_path: Path) -> None:
    entries = read("manifest", write(tmp_path / "m.csv", LABELLED), labels=("affinity", "cluster"))
    items = [entry for entry in entries if isinstance(entry, Item)]
    values = [label_values(item, ("affinity", "cluster")) for item in items]
    assert values[0] == {"affinity": -9.5, "cluster": 3.0}
    assert all(math.isnan(value) for value in values[1].values())
    assert [(entry.id, entry.reason, entry.origin) for entry in entries if isinstance(entry, Rejection)] == [
        ("c", Reason.BAD_ROW, "m.csv:4"),
        ("d", Reason.BAD_ROW, "m.csv:5"),
    ]


def test_a_label_that_no_column_has_is_an_error_with_what_was_meant(tmp_path: Path) -> None:
    for name, text in (
        ("m.csv", "id,path,afinity\na,a.pdb,1\n"),
        ("m.tsv", "id\tpath\tafinity\na\ta.pdb\t1\n"),
        ("m.jsonl", '{"id":"a","path":"a.pdb","afinity":1}\n'),
    ):
        with pytest.raises(ConfigError, match="'afinity'") as caught:
            read("manifest", write(tmp_path / name, text), labels=("affinity",))
        assert caught.value.where == str(tmp_path / name)


def test_plain_numbers_and_yes_or_no_are_labels() -> None:
    for text, value in (("-9.5", -9.5), (" 1E-9 ", 1e-9), ("true", 1.0), ("False", 0.0), ("7", 7.0)):
        assert value_of(text) == value
    for text in ("1_0", "1e39", "0x10", "١", "high", "1,5"):
        with pytest.raises(ValueError, match=text.lower()):
            value_of(text)


@pytest.mark.parametrize("source", ["manifest", "glob"])
def test_labels_that_new_data_lack_are_unknown_where_a_model_predicts_them(tmp_path: Path, source: str) -> None:
    touch(tmp_path, "a.pdb")
    path = write(tmp_path / "m.csv", "id,path\na,a.pdb\n") if source == "manifest" else tmp_path
    with pytest.raises((ConfigError, DataError), match="labels"):
        read(source, path, labels=("affinity",))
    item = only_item(read(source, path, labels=("affinity",), unlabelled=True, pattern=("*.pdb",)))
    assert math.isnan(label_values(item, ("affinity",))["affinity"])
