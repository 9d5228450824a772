"""What a scan lists by id: the items that can be used, and every item of a leak, as files and by a command."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

from pipeline.journal.run_folder import runs_in
from pipeline.readers import made
from pipeline.store.cache_folder import CacheFolder
from pipeline.structures.synthetic import complex_pdb
from tests.testkit.command import Command
from tests.testkit.project import MakeProject, settle

SUBMIT = ("submit", "--executor", "local", "--follow")
TWINS = 7  # more than a message names


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def leaking(folder: Path) -> list[str]:
    """Make the same complexes stand in two splits; return the ids of all that do."""
    lines = ["id,path,receptor_chains,ligand_chains,split"]
    for number in range(TWINS):
        shutil.copy(folder / "data" / f"c{number}.pdb", folder / "data" / f"t{number}.pdb")
        lines += [f"c{number},data/c{number}.pdb,A,B,train", f"t{number},data/t{number}.pdb,A,B,test"]
    lines.append(f"alone,data/c{TWINS}.pdb,A,B,train")
    settle(folder / "data")
    (folder / "m.csv").write_text("\n".join([*lines, ""]))
    (folder / "pipeline.yaml").write_text("data: {path: m.csv}\n")
    return [f"{letter}{number}" for number in range(TWINS) for letter in "ct"]


def test_every_item_of_a_leak_is_listed_by_id_and_the_error_names_the_list(
    pipeline: Command, make_project: MakeProject
) -> None:
    folder = make_project(TWINS + 1)
    ids = leaking(folder)
    said = pipeline(*SUBMIT, "--stage", "scan")
    assert said.code == 3
    path = runs_in(folder / "runs")[-1].leaks
    assert str(path.relative_to(folder)) in said.err.replace("\n", "")
    listed = [row for row in rows(path) if row["leak"] == "sequence"]
    assert {row["id"] for row in listed} == set(ids)
    groups = {row["group"] for row in listed}
    assert all({row["split"] for row in listed if row["group"] == group} == {"train", "test"} for group in groups)
    warned = pipeline(*SUBMIT, "--stage", "scan", "--set", "data.on_leak=warn")
    assert warned.code == 0
    assert "leaks.csv" in warned.err


def test_items_that_can_be_used_are_listed_with_chains_sizes_and_keys(
    pipeline: Command, make_project: MakeProject
) -> None:
    folder = make_project(0)
    for number in range(3):
        (folder / "data" / f"c{number}.pdb").write_bytes(complex_pdb(number, 30, 30 + number))
    (folder / "data" / "bad.pdb").write_text("nothing\n")
    settle(folder / "data")
    assert pipeline(*SUBMIT, "--stage", "graph", "--set", "data.max_rejected_fraction=0.5").code == 0
    listed = rows(runs_in(folder / "runs")[-1].inventory)
    assert [row["id"] for row in listed] == ["c0", "c1", "c2"]
    assert [listed[1][name] for name in ("receptor", "ligand", "n_rec", "n_lig")] == ["A", "B", "30", "31"]
    for kind in ("scan", "graph"):
        keys = set(CacheFolder(folder / "cache").kind(kind).keys())
        assert all(bytes.fromhex(row[f"{kind}_key"]) in keys for row in listed)


def test_a_command_lists_the_items_of_a_run_and_finds_the_item_of_a_key(
    pipeline: Command, make_project: MakeProject
) -> None:
    folder = make_project(3)
    assert pipeline(*SUBMIT, "--stage", "scan").code == 0
    said = pipeline("items")
    assert said.code == 0
    assert [line.split()[0] for line in said.out.splitlines() if line.startswith("c")] == ["c0", "c1", "c2"]
    listed = json.loads(pipeline("items", "--json").out)
    assert listed == rows(runs_in(folder / "runs")[-1].inventory)
    key = listed[1]["graph_key"]
    assert [row["id"] for row in json.loads(pipeline("items", "--key", key[:12], "--json").out)] == ["c1"]
    assert json.loads(pipeline("items", "--key", "ff" * 16, "--json").out) == []
    nothing = pipeline("items", "--key", "ff" * 16)
    assert (nothing.code, nothing.out) == (0, "")
    assert f"no item has a record with key prefix {'ff' * 16}" in nothing.err
    wrong = pipeline("items", "--key", "c1.pdb")
    assert (wrong.code, "'c1.pdb' is not a hexadecimal key prefix" in wrong.err) == (2, True)


def test_items_of_a_reader_are_listed_too(pipeline: Command, tmp_path: Path) -> None:
    made.spectra(tmp_path / "s.mgf", 4)
    settle(tmp_path)
    settings = "data: {source: reader, reader: 'pipeline.readers.spectra:Spectra', path: s.mgf}\n"
    (tmp_path / "pipeline.yaml").write_text(settings)
    for _ in range(2):  # read, and taken over
        assert pipeline(*SUBMIT, "--stage", "scan").code == 0
        listed = json.loads(pipeline("items", "--json").out)
        assert [row["id"] for row in listed] == [f"made-{number:07d}" for number in range(4)]
        assert all(int(row["peaks"]) > 0 and len(row["key"]) == 32 for row in listed)
