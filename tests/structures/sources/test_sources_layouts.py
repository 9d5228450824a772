"""The folders that data sets come in: pairs, SAbDab, PINDER, and files that match a pattern."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.errors import ConfigError, DataError
from pipeline.records import Item, Part, Reason, Rejection, Role
from pipeline.structures.sources.table_sources import split_suffix
from tests.structures.sources.source_files import ids, only_item, only_rejection, read, reasons, touch, write

# pairs

PAIR_FILES = [f"{name}_{side}_{state}.pdb" for name in ("1ABC", "2DEF") for side in "rl" for state in "bu"]


def test_pairs_without_a_table_are_all_ids_of_the_folder_in_order(tmp_path: Path) -> None:
    touch(tmp_path, *PAIR_FILES, "0XYZ_r_b.cif.gz", "0XYZ_l_b.ent", "README.txt", "notes_r_b.txt", "other.pdb")
    entries = read("pairs", tmp_path)
    assert ids(entries) == ["0XYZ", "1ABC", "2DEF"]
    assert [part.path for part in entries[0].parts] == [
        str(tmp_path / "0XYZ_r_b.cif.gz"),
        str(tmp_path / "0XYZ_l_b.ent"),
    ]


def test_unbound_pairs_carry_the_bound_ones_for_labels(tmp_path: Path) -> None:
    touch(tmp_path, *PAIR_FILES[:4])
    item = only_item(read("pairs", tmp_path, state="unbound"))
    assert [(part.role, Path(part.path).name) for part in (*item.parts, *item.bound)] == [
        (Role.RECEPTOR, "1ABC_r_u.pdb"),
        (Role.LIGAND, "1ABC_l_u.pdb"),
        (Role.RECEPTOR, "1ABC_r_b.pdb"),
        (Role.LIGAND, "1ABC_l_b.pdb"),
    ]


def test_listed_pairs_come_in_the_order_of_the_table_and_missing_files_are_named(tmp_path: Path) -> None:
    folder = touch(tmp_path / "pairs", *PAIR_FILES)
    (folder / "1ABC_l_b.pdb").unlink()
    splits = write(tmp_path / "splits.csv", "path,split\n2DEF,train\n1ABC,val\n../2DEF,test\n2DEF,test\n")
    kept, missing, climbing, twice = read("pairs", folder, splits=splits)
    assert isinstance(kept, Item)
    assert (kept.id, kept.split, kept.origin) == ("2DEF", "train", "splits.csv:2")
    assert (missing.reason, missing.origin) == (Reason.MISSING_FILE, "splits.csv:3")
    assert "1ABC_l_b" in missing.detail
    assert reasons([climbing, twice]) == [Reason.BAD_ID, Reason.DUPLICATE_ID]
    assert "splits.csv:2" in str(twice)


PUBLISHED = {"as published": "structures", "all in one folder": ""}


@pytest.mark.parametrize("below", PUBLISHED.values(), ids=PUBLISHED)
@pytest.mark.parametrize("listed", [True, False])
def test_pairs_may_be_in_a_folder_called_structures_beside_their_list(tmp_path: Path, below: str, listed: bool) -> None:
    touch(tmp_path / below, *PAIR_FILES)
    splits = write(tmp_path / "splits.csv", "path,split\n1ABC,train\n2DEF,test\n")
    entries = read("pairs", tmp_path, splits=splits if listed else None, state="unbound")
    assert ids(entries) == ["1ABC", "2DEF"]
    assert entries[1].split == ("test" if listed else "")
    assert Path(entries[1].parts[0].path) == tmp_path / below / "2DEF_r_u.pdb"
    assert Path(entries[1].bound[1].path) == tmp_path / below / "2DEF_l_b.pdb"


@pytest.mark.parametrize("below", PUBLISHED.values(), ids=PUBLISHED)
def test_a_list_may_name_folders_and_pickles_as_that_of_dips_does(tmp_path: Path, below: str) -> None:
    touch(tmp_path / below / "ab", "1abc.pdb1_0_r_b.pdb", "1abc.pdb1_0_l_b.pdb")
    rows = ("ab/1abc.pdb1_0.dill", "ab/1abc.pdb1_1.dill", "zz/1zzz.pdb1_0.dill", "ab/../1abc", "/ab/1abc", "ab//1abc")
    splits = write(tmp_path / "splits.csv", "\n".join(["path,split", *(f"{row},train" for row in rows)]) + "\n")
    kept, *bad = read("pairs", tmp_path, splits=splits)
    assert (kept.id, kept.split) == ("ab.1abc.pdb1_0", "train")
    assert [Path(part.path).name for part in kept.parts] == ["1abc.pdb1_0_r_b.pdb", "1abc.pdb1_0_l_b.pdb"]
    assert reasons(bad) == [Reason.MISSING_FILE] * 2 + [Reason.BAD_ID] * 3
    assert "no folder zz" in str(bad[1])


def test_a_folder_without_pairs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the source 'pairs' finds no items here"):
        read("pairs", touch(tmp_path, "1abc.pdb"))


# sabdab

SUMMARY = (
    *("pdb", "Hchain", "Lchain", "model", "antigen_chain", "antigen_type"),
    *("compound", "resolution", "scfv", "affinity"),
)


def sabdab(tmp_path: Path, *rows: tuple[str, ...], folder: str = "structures") -> list[Item | Rejection]:
    lines = ["\t".join(row + ("",) * (len(SUMMARY) - len(row))) for row in (SUMMARY, *rows)]
    summary = write(tmp_path / "summary.tsv", "\n".join(lines) + "\n")
    touch(tmp_path / folder, "1abc.pdb", "2DEF.cif.gz", "pdb3ghi.ent", "chothia/4jkl.pdb")
    return read("sabdab", summary, structures_dir=tmp_path / folder)


SABDAB_ROWS = {
    "Fab": (("1abc", "H", "L", "0", "A"), "1abc_H+L_A", ("H", "L"), ("A",)),
    "several antigens": (("1abc", "H", "L", "0", "A | B | A"), "1abc_H+L_A+B", ("H", "L"), ("A", "B")),
    "nanobody": (("1abc", "H", "NA", "0", "A"), "1abc_H_A", ("H",), ("A",)),
    "light chain only": (("1abc", "None", "L", "0", "A"), "1abc_+L_A", ("L",), ("A",)),
    "scFv, one letter": (("1abc", "B", "B", "0", "A"), "1abc_B_A", ("B",), ("A",)),
    "scFv, lower-case light half": (("1abc", "B", "b", "0", "A"), "1abc_B+b_A", ("B", "b"), ("A",)),
    "scFv in a renumbered file": (("4jkl", "B", "B", "0", "A"), "4jkl_B_A", ("B", "b"), ("A",)),
    "upper-case file": (("2def", "H", "L", "0", "A"), "2def_H+L_A", ("H", "L"), ("A",)),
    "mirror's file name": (("3ghi", "H", "L", "0", "A"), "3ghi_H+L_A", ("H", "L"), ("A",)),
    "long chain names": (("1abc", "AA", "BB", "0", "CC | D"), "1abc_AA+BB_CC+D", ("AA", "BB"), ("CC", "D")),
}


def test_antibody_is_the_receptor_and_antigen_the_ligand(tmp_path: Path) -> None:
    for what, (row, name, receptor, ligand) in SABDAB_ROWS.items():
        item = only_item(sabdab(tmp_path, row))
        assert item.id == name, what
        found = [(part.role, part.chains, part.model) for part in item.parts]
        assert found == [(Role.RECEPTOR, receptor, 1), (Role.LIGAND, ligand, 1)], what
        assert all(Path(part.path).is_file() for part in item.parts), what


BAD_SABDAB_ROWS = {
    **{
        f"antigen {antigen}": (("1abc", "H", "L", "0", antigen), Reason.BAD_ROW)
        for antigen in ("", "NA", "None", "nan")
    },
    "no antibody": (("1abc", "NA", "", "0", "A"), Reason.BAD_ROW),
    "odd model": (("1abc", "H", "L", "x", "A"), Reason.BAD_ROW),
    "no file": (("9zzz", "H", "L", "0", "A"), Reason.MISSING_FILE),
    "climbing": (("../1abc", "H", "L", "0", "A"), Reason.BAD_ID),
    "climbing chain": (("1abc", "../H", "L", "0", "A"), Reason.BAD_ID),
    "no pdb": (("", "H", "L", "0", "A"), Reason.BAD_ID),
}


def test_bad_summary_row_is_rejected(tmp_path: Path) -> None:
    for what, (row, reason) in BAD_SABDAB_ROWS.items():
        bad = only_rejection(sabdab(tmp_path, row))
        assert (bad.reason, bad.origin) == (reason, "summary.tsv:2"), what


def test_models_count_from_zero_in_the_summary_and_from_one_in_a_part(tmp_path: Path) -> None:
    first, second, again = sabdab(tmp_path, *(("1abc", "H", "L", model, "A") for model in "011"))
    assert isinstance(first, Item)
    assert (first.id, second.id, second.parts[0].model) == ("1abc_H+L_A", "1abc_H+L_A_m1", 2)
    assert again.reason is Reason.DUPLICATE_ID


def test_other_summary_columns_are_labels_and_quotes_in_names_do_no_harm(tmp_path: Path) -> None:
    row = ("1abc", "H", "L", "0", "A", "protein", '"Fab" of 5\'', "2.1", "False", "1e-9")
    other = ("2def", "H", "L", "0", "A", "protein", '"unclosed', "2.1")
    entries = sabdab(tmp_path, row, other)
    assert len(ids(entries)) == 2
    assert entries[0].labels == {
        "antigen_type": "protein",
        "compound": '"Fab" of 5\'',
        "resolution": "2.1",
        "scfv": "False",
        "affinity": "1e-9",
    }


# pinder

R, L = "1abc__A1_P00001", "1abc__B1_P00002"


def pinder(tmp_path: Path, text: str, **settings: object) -> list[Item | Rejection]:
    touch(tmp_path / "pdbs", f"{R}-R.pdb", f"{L}-L.pdb", "2def__A1_P00001.pdb", "3ghi__A1_P00002.pdb")
    return read("pinder", write(tmp_path / "index.csv", text), **settings)


def test_pinder_pair_is_made_from_its_id(tmp_path: Path) -> None:
    text = f"split,id,cluster_id,uniprot_R\ntrain,{R}--{L},c1,P00001\n"
    item = only_item(pinder(tmp_path, text))
    assert item.parts == (
        Part(Role.RECEPTOR, str(tmp_path / "pdbs" / f"{R}-R.pdb")),
        Part(Role.LIGAND, str(tmp_path / "pdbs" / f"{L}-L.pdb")),
    )
    assert (item.split, item.cluster, item.labels) == ("train", "c1", {"uniprot_R": "P00001"})


def test_unbound_pinder_takes_apo_structures(tmp_path: Path) -> None:
    text = (
        "id,split,apo_R_pdb,apo_L_pdb\n"
        f"{R}--{L},test,2def__A1_P00001.pdb,3ghi__A1_P00002.pdb\n"
        f"{R}--{L},test,2def__A1_P00001.pdb,\n"
        f"{R}--{L},test,../secret.pdb,3ghi__A1_P00002.pdb\n"
    )
    touch(tmp_path, "secret.pdb")
    item, half, climbing = pinder(tmp_path, text, state="unbound")
    assert [Path(part.path).name for part in item.parts] == ["2def__A1_P00001.pdb", "3ghi__A1_P00002.pdb"]
    assert [Path(part.path).name for part in item.bound] == [f"{R}-R.pdb", f"{L}-L.pdb"]
    assert reasons([half, climbing]) == [Reason.MISSING_FILE, Reason.BAD_ROW]


def test_unbound_pinder_needs_the_apo_columns(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no column 'apo_R_pdb'"):
        pinder(tmp_path, f"id,split\n{R}--{L},test\n", state="unbound")


def test_a_pinder_id_of_another_form_is_rejected_and_a_missing_file_named(tmp_path: Path) -> None:
    for name in ("1abc", "--", "a--", "--b", "a--../b"):
        assert only_rejection(pinder(tmp_path, f"id\n{name}\n")).reason is Reason.BAD_ID, name
    bad = only_rejection(pinder(tmp_path, f"id\n{R}--9zzz__B1_X\n"))
    assert bad.reason is Reason.MISSING_FILE
    assert "9zzz__B1_X-L.pdb" in bad.detail


def test_parquet_index_is_an_error_with_the_command_that_exports_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read("pinder", write(tmp_path / "index.parquet", b"PAR1"))
    assert "read_parquet" in caught.value.remedy
    assert "to_csv" in caught.value.remedy


# glob


def test_glob_takes_matching_files_in_order_with_ids_from_their_names(tmp_path: Path) -> None:
    touch(tmp_path, "b.pdb", "a.v2.cif.gz", "c.txt", ".hidden.pdb", "sub/a.pdb", "sub/deep/z.pdb")
    assert ids(read("glob", tmp_path, pattern=("*.pdb", "*.cif.gz"))) == ["a.v2", "b"]
    assert ids(read("glob", tmp_path, pattern=("**/*.pdb",))) == ["b", "sub.a", "sub.deep.z"]
    assert ids(read("glob", tmp_path, pattern=("*/*.pdb",))) == ["sub.a"]
    assert ids(read("glob", tmp_path, pattern=("sub/**",))) == ["sub.a", "sub.deep.z"]


def test_two_files_of_one_name_are_duplicates(tmp_path: Path) -> None:
    entries = read("glob", touch(tmp_path, "a.pdb", "a.cif", "b.pdb"), pattern=("*",))
    assert ids(entries) == ["a", "b"]
    assert reasons(entries) == [Reason.DUPLICATE_ID]
    (twice,) = [entry for entry in entries if isinstance(entry, Rejection)]
    assert (twice.origin, "a.cif" in twice.detail, "data.pattern" in twice.detail) == ("a.pdb", True, True)


def test_glob_with_configured_chains_divides_each_file_into_partners(tmp_path: Path) -> None:
    touch(tmp_path, "a.pdb")
    whole = only_item(read("glob", tmp_path, pattern=("*.pdb",)))
    divided = only_item(read("glob", tmp_path, pattern=("*.pdb",), receptor_chains=("H", "L"), ligand_chains=("A",)))
    path = str(tmp_path / "a.pdb")
    assert whole.parts == (Part(Role.COMPLEX, path),)
    assert divided.parts == (Part(Role.RECEPTOR, path, ("H", "L")), Part(Role.LIGAND, path, ("A",)))


def test_links_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    touch(tmp_path / "outside", "x.pdb")
    folder = touch(tmp_path / "data", "a.pdb")
    (folder / "b.pdb").symlink_to(folder / "a.pdb")
    (folder / "c.pdb").symlink_to("../outside/x.pdb")
    (folder / "d.pdb").symlink_to("d.pdb")  # a loop, for the reader to refuse
    (folder / "linked").symlink_to(tmp_path / "outside")
    entries = read("glob", folder, pattern=("**/*.pdb",))
    assert ids(entries) == ["a", "b", "d"]
    assert reasons(entries) == [Reason.UNREADABLE_FILE]


def test_a_pattern_that_leaves_the_folder_is_an_error(tmp_path: Path) -> None:
    for pattern in ("/etc/*", "../*.pdb", "a/../../*.pdb"):
        with pytest.raises(ConfigError):
            read("glob", touch(tmp_path, "a.pdb"), pattern=(pattern,))


def test_file_names_that_cannot_be_ids_are_rejected(tmp_path: Path) -> None:
    touch(tmp_path, "my complex.pdb", "-x.pdb")
    (tmp_path / os.fsdecode(b"\xff.pdb")).write_text("ATOM\n")
    entries = read("glob", tmp_path, pattern=("*.pdb",))
    assert reasons(entries) == [Reason.BAD_ID] * 3
    assert all(entry.id.isprintable() and entry.origin.isprintable() for entry in entries)


def test_only_structure_suffixes_are_taken_off() -> None:
    for stem, suffix in (("1abc", ".pdb"), ("1abc", ".CIF.gz"), ("1abc.v1", ".bcif"), ("1abc.txt", ""), (".pdb", "")):
        assert split_suffix(stem + suffix) == (stem, suffix)


def test_a_source_without_a_table_has_no_labels(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.labels does not apply to the source 'glob'"):
        read("glob", touch(tmp_path, "a.pdb"), pattern=("*.pdb",), labels=("affinity",))
