"""`pipeline data split`: tables that a scan lets pass, clusters as programs write them, what existing splits share."""

from __future__ import annotations

import csv
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.dataset.split_data import ClusterTable, chain_names
from tests.structures.pdb_text import chain
from tests.testkit.command import Command, Typed
from tests.testkit.project import RESIDUES, Project, settle, write_config

SCAN = ("submit", "--executor", "local", "--follow", "--stage", "scan")
FAMILIES, MEMBERS = 12, 3  # items of one family have the same receptor


def complex_of(family: int, member: int) -> str:
    """Return a complex whose receptor is its family's, and whose ligand is its own."""
    own = [RESIDUES[(family + 1) % 15], *(RESIDUES[number % 15] for number in (member, family, member + 3)), "TRP"]
    shared = [RESIDUES[family % 15], RESIDUES[family // 15], "GLY", "ALA"]
    return chain("A", *shared) + chain("B", *own) + "END\n"


def written(folder: Path) -> Path:
    """Write a data set of families, as a table whose columns and rows are odd."""
    (folder / "data").mkdir()
    lines = ["ID,path,note,Split", 'broken,data/none.pdb,"not, there",train']
    for family in range(FAMILIES):
        for member in range(MEMBERS):
            (folder / f"data/f{family}m{member}.pdb").write_text(complex_of(family, member))
            lines += [f'f{family}m{member},data/f{family}m{member}.pdb,"a, ""b""",', ""]
    (folder / "table.csv").write_text("\n".join([*lines, ""]))
    write_config(folder, data={"path": "table.csv", "max_rejected_fraction": 0.9})
    settle(folder / "data")
    return folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set that was not scanned."""
    monkeypatch.chdir(tmp_path)
    return written(tmp_path)


@pytest.fixture(scope="module")
def scanned_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = written(tmp_path_factory.mktemp("scanned"))
    Project(folder).finishes("scan")
    return folder


@pytest.fixture
def scanned(scanned_once: Path, pipeline: Command, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A data set that was scanned, in the current folder; what a test writes beside it goes."""
    monkeypatch.chdir(scanned_once)
    before = set(scanned_once.iterdir())
    yield scanned_once
    for path in set(scanned_once.iterdir()) - before:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def families_of(path: Path) -> dict[str, set[str]]:
    """Return the splits in which each family is."""
    found: dict[str, set[str]] = {}
    for row in rows(path):
        found.setdefault(row["id"].partition("m")[0], set()).add(row["split"])
    return found


@pytest.mark.nightly
def test_splits_keep_families_together_and_a_scan_with_them_finds_no_leak(scanned, pipeline):
    said = pipeline("split", "--fractions", ".5/.25/.25", "--out", "new.csv")
    assert said.code == 0
    assert all(len(splits) == 1 for splits in families_of(scanned / "new.csv").values())
    table = rows(scanned / "new.csv")
    assert list(table[0]) == ["id", "split", "cluster"]
    assert Counter(row["split"] for row in table) == {"train": 18, "val": 9, "test": 9}  # "broken" has no row
    assert len({row["cluster"] for row in table}) == FAMILIES
    words = said.out.split("next: pipeline ")[1].split()
    assert pipeline(*words, "--executor", "local", "--follow").code == 0  # clusters of two splits would be an error
    checked = pipeline("split", "--check", "--set", "data.splits=new.csv", "--json")
    assert (checked.code, json.loads(checked.out)["shared"]) == (0, [])


@pytest.mark.nightly
def test_the_same_seed_writes_the_same_bytes_from_a_table_in_another_order(scanned, pipeline):
    header, *lines = [line for line in (scanned / "table.csv").read_text().splitlines() if line]
    (scanned / "other.csv").write_text("\n".join([header, *lines[::-1], ""]))
    for name, table, seed in (("a", "table", "7"), ("b", "table", "7"), ("c", "other", "7"), ("d", "table", "8")):
        words = ("split", "--seed", seed, "--out", f"{name}.csv", "--set", f"data.path={table}.csv")
        assert pipeline(*words).code == 0
    a, b, c, d = ((scanned / f"{name}.csv").read_bytes() for name in "abcd")
    assert a == b
    assert sorted(a.splitlines()) == sorted(c.splitlines())
    assert a != d


@pytest.mark.nightly
def test_clusters_of_a_table_join_families_and_chains_it_lacks_are_told(scanned, pipeline):
    lines = [f"f0m0_A\tf{family}m0_A" for family in (0, 1, 2)] + ["f3m1_B\tf3m1_B", ""]
    (scanned / "clusters.tsv").write_text("\n".join(lines))
    said = pipeline("split", "--by", "clusters", "--clusters", "clusters.tsv", "--out", "new.csv", "--json")
    assert said.code == 0
    document = json.loads(said.out)
    assert (document["components"], document["largest"][0]) == (FAMILIES - 2, 3 * MEMBERS)
    assert document["without_cluster"] == {"clusters.tsv": 72 - 4}
    families = families_of(scanned / "new.csv")
    assert families["f0"] == families["f1"] == families["f2"]
    assert len(families["f0"]) == 1


NO_TABLES = ("a b\n", "a\tb\nc\td\te\n", ">Cluster 0\n0\t12aa, >f0m0_A... *\n", "", "x1\tx2\n")


@pytest.mark.nightly
def test_a_table_that_is_none_is_refused(scanned, pipeline):
    for text in NO_TABLES:
        (scanned / "clusters.tsv").write_text(text)
        said = pipeline("split", "--by", "clusters", "--clusters", "clusters.tsv", "--out", "new.csv")
        assert (said.code, "clusters.tsv" in said.err) == (3, True), text
        assert not (scanned / "new.csv").exists()


@pytest.mark.nightly
def test_chains_are_written_for_a_program_that_runs_elsewhere_and_its_table_is_read(scanned, pipeline):
    assert pipeline("split", "--write-fasta", "chains.fasta").code == 0
    lines = (scanned / "chains.fasta").read_text().split()
    names = [line[1:] for line in lines[::2]]
    assert len(names) == 72
    assert names[:2] == ["f0m0_A", "f0m0_B"]
    (scanned / "clusters.tsv").write_text("".join(f"{name}\t{name}\n" for name in names))
    said = pipeline("split", "--by", "clusters", "--clusters", "clusters.tsv", "--out", "new.csv", "--json")
    assert json.loads(said.out)["without_cluster"] == {"clusters.tsv": 0}


def leaking(scanned: Path) -> None:
    """Put one member of a family into another split, and write clusters that join ligands of two splits."""
    lines = ["id,path,split"]
    for family in range(FAMILIES):
        for member in range(MEMBERS):
            split = "test" if (family == 3 and member == 0) or family > 9 else "train"
            lines.append(f"f{family}m{member},data/f{family}m{member}.pdb,{split}")
    (scanned / "leaky.csv").write_text("\n".join([*lines, ""]))
    pairs = [("f3m0_B", "f3m1_B"), ("f0m0_A", "f11m0_B"), ("f0m0_A", "f0m0_A"), ("f3m0_B", "f3m0_B")]
    (scanned / "clusters.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in pairs))


@pytest.mark.nightly
def test_what_an_existing_split_shares_is_told_by_level_and_the_code_says_so(scanned, pipeline):
    leaking(scanned)

    def check(*words: str) -> Typed:
        return pipeline("split", "--check", "--set", "data.path=leaky.csv", *words)

    assert check().code == 3
    said = check("--by", "clusters", "--clusters", "clusters.tsv", "--json", "--out", "leaks.csv")
    document = json.loads(said.out)
    assert (said.code, document["leaks"]) == (3, True)
    found = {(each["level"], each["partners"]): each["splits"] for each in document["shared"]}
    assert found == {("sequence", "one"): {"train": 2, "test": 1}, ("clusters.tsv", "one"): {"train": 2, "test": 2}}
    assert {(row["level"], row["split"], row["id"]) for row in rows(scanned / "leaks.csv")} == {
        *(("sequence", split, item) for split, item in (("test", "f3m0"), ("train", "f3m1"), ("train", "f3m2"))),
        *(("clusters.tsv", split, item) for split, item in (("test", "f3m0"), ("train", "f3m1"))),
        *(("clusters.tsv", split, item) for split, item in (("test", "f11m0"), ("train", "f0m0"))),
    }
    (scanned / "clusters.tsv").write_text("".join(f"r\tf3m{n}_{c}\n" for n in range(2) for c in "AB"))
    document = json.loads(check("--by", "clusters", "--clusters", "clusters.tsv", "--json").out)
    assert ("clusters.tsv", "both") in {(each["level"], each["partners"]) for each in document["shared"]}


@pytest.mark.nightly
def test_folds_are_files_in_which_each_item_is_tested_once(scanned, pipeline):
    said = pipeline("split", "--folds", "4", "--out", "cv.csv", "--json")
    assert said.code == 0
    files = [Path(name) for name in json.loads(said.out)["files"]]
    assert [path.name for path in files] == [f"cv.fold{fold}.csv" for fold in range(4)]
    tested: Counter[str] = Counter()
    for fold, path in enumerate(files):
        table = rows(scanned / path)
        tested.update(row["id"] for row in table if row["split"] == "test")
        assert {row["split"] for row in table} == {"train", "val", "test"}
        assert all((row["split"] == "test") == (row["fold"] == str(fold)) for row in table)
        assert all(len(splits) == 1 for splits in families_of(scanned / path).values())
    assert set(tested.values()) == {1}
    assert len(tested) == FAMILIES * MEMBERS
    said = pipeline("split", "--folds", "4", "--out", "cv.csv", "--set", "data.splits=cv.fold2.csv")
    assert said.code == 2


MISTAKES = (
    "",
    "--out new.txt",
    "--out table.csv",
    "--out data/../table.csv",
    "--check --out table.csv",
    "--write-fasta table.csv",
    "--write-fasta nowhere/chains.fasta",
    "--out new.csv --fractions 1/2/3/4",
    "--out new.csv --fractions 0.5/0",
    "--out new.csv --fractions .8/.8/.1",
    "--out new.csv --fractions nan/1",
    "--out new.csv --folds 2",
    "--out new.csv --folds 5 --fractions 1/1",
    "--out new.csv --folds 99",
    "--out new.csv --by identity",
    "--out new.csv --clusters x.tsv",
    "--out new.csv --by clusters",
    "--out new.csv --by clusters --clusters no.tsv",
    "--by identiy",
)


@pytest.mark.nightly
def test_mistakes_are_refused_before_anything_is_written(scanned, pipeline):
    before = sorted(path.name for path in scanned.iterdir())
    assert {words: pipeline("split", *words.split()).code for words in MISTAKES} == dict.fromkeys(MISTAKES, 2)
    assert pipeline("split", "--check").code == 3  # the data set is not divided
    assert sorted(path.name for path in scanned.iterdir()) == before


@pytest.mark.nightly
@pytest.mark.parametrize("source", ["glob", "pairs", "fasta"])
def test_every_layout_gets_a_table_that_its_configuration_can_name(folder, pipeline, source):
    out, names = "new.csv", [f"f{family}m{member}" for family in range(FAMILIES) for member in range(MEMBERS)]
    if source == "pairs":
        for name in names:
            text = (folder / f"data/{name}.pdb").read_text()
            (folder / f"data/{name}.pdb").unlink()
            for side, letter in (("r", "A"), ("l", "B")):
                lines = [line for line in text.splitlines(keepends=True) if line[21:22] == letter]
                (folder / f"data/{name}_{side}_b.pdb").write_text("".join(lines) + "END\n")
        settle(folder / "data")
    if source == "fasta":
        (folder / "chains.fasta").write_text("".join(f">{name}\nMKV{'A' * (n // 3)}\n" for n, name in enumerate(names)))
    data = {"source": source, "path": "chains.fasta" if source == "fasta" else "data"}
    write_config(folder, data={**data, "max_rejected_fraction": 0.5})
    assert pipeline(*SCAN).code == 0
    said = pipeline("split", "--fractions", "50/50", "--out", out, "--json")
    assert said.code == 0
    document = json.loads(said.out)
    assert [split["items"] for split in document["splits"].values()] == [18, 18]
    words = document["next"].split()[1:]
    if source == "glob":
        assert pipeline(*words, "--executor", "local", "--follow").code == 0
    sets = [word for word in words if "=" in word]
    checked = pipeline("split", "--check", "--json", *(part for word in sets for part in ("--set", word)))
    assert (checked.code, json.loads(checked.out)["items"]) == (0, {"": 0, "train": 18, "test": 18})


def test_names_of_chains_are_those_that_common_programs_write():
    named = set(chain_names("7abc", "/lab/7abc.cif.gz", "A", None, alone=False))
    for name in ("7abc_A", "7abc.cif.gz_A", "7ABC_A", "7abc:A", "7abc_MODEL_1_A"):
        assert name in named
    assert "7abc" not in named
    assert "AF-P1-F1.pdb" in set(chain_names("x", "/lab/AF-P1-F1.pdb", "A", None, alone=True))
    assert "P12345" in set(chain_names("sp|P12345|NAME", "", "", None, alone=True))


def test_a_member_of_two_clusters_is_in_both(tmp_path):
    (tmp_path / "c.tsv").write_text("a\ta\r\na\tb\r\nc\tb\r\n\r\n")
    table = ClusterTable(tmp_path / "c.tsv")
    assert (len(table.clusters_of(["none", "b"])), len(table.clusters_of(["a"]))) == (2, 1)
    assert set(table.clusters_of(["a"])) < set(table.clusters_of(["b"]))


def test_a_representative_is_in_its_cluster_whether_the_table_lists_it_as_a_member_or_not(tmp_path):
    """A table of pairs need not pair a chain with itself."""
    (tmp_path / "c.tsv").write_text("a\tb\nb\tc\n")
    a, b, c = (set(ClusterTable(tmp_path / "c.tsv").clusters_of([name])) for name in "abc")
    assert a < b
    assert c < b
    assert len(b) == 2
