"""`pipeline embed` and `pipeline embeddings export`: a FASTA file or complexes in, one file by their ids out."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow.parquet
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from pipeline.config.load import read_config
from pipeline.encoder.synth import write_random_checkpoint
from pipeline.project.project import Project
from pipeline.stages.embedding_export import WantedExport, export_embeddings
from pipeline.training.evaluating.embedding_files import FORMATS, SUFFIXES, hdf5_name
from tests.testkit import project
from tests.testkit.command import Command
from tests.testkit.project import settle, write_complex

pytestmark = pytest.mark.timeout(300)
DIM = 8
SEQUENCES = {
    "Q9/1-5": "MKVLA",
    "Q9": "MKVLAWY",
    "100%": "AC",
    "a//b": "GGGG",
    "a/b": "GGGGA",
    "twin": "MKVLA",
    "é": "W",
}
SPLITS = ("train", "train", "val", "test")


def fill(folder: Path, config: str) -> Path:
    """Embed the data of a folder."""
    write_random_checkpoint(folder / "esm2_tiny.pt", layers=1, dim=DIM, heads=2)
    (folder / "pipeline.yaml").write_text(f"{config}\nembed: {{weights: esm2_tiny.pt}}\n")
    settle(folder)
    project.Project(folder).finishes("embed")
    return folder


@pytest.fixture(scope="module")
def sequences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project of a FASTA file whose ids are hard to be names of anything."""
    folder = tmp_path_factory.mktemp("sequences")
    (folder / "my.fasta").write_text("".join(f">{name} more\n{text}\n" for name, text in SEQUENCES.items()))
    return fill(folder, "data: {source: fasta, path: my.fasta}")


@pytest.fixture(scope="module")
def complexes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project of complexes in splits; the partners of the last are two files, each with a chain A."""
    folder = tmp_path_factory.mktemp("complexes")
    rows = ["id,path,receptor_path,ligand_path,split"]
    for number, split in enumerate(SPLITS):
        write_complex(folder / f"c{number}.pdb", number)
        rows.append(f"c{number},{f'c{number}.pdb,,' if number < 3 else ',r.pdb,l.pdb'},{split}")
    for name, chain in (("r", "A"), ("l", "B")):
        lines = [line for line in (folder / "c3.pdb").read_text().splitlines() if line[21:22] == chain]
        (folder / f"{name}.pdb").write_text("\n".join([*(f"{line[:21]}A{line[22:]}" for line in lines), "END", ""]))
    (folder / "data.csv").write_text("\n".join([*rows, ""]))
    return fill(folder, "data: {source: manifest, path: data.csv}")


def expected(folder: Path, *sets: str, array: str = "rows") -> dict[str, NDArray[Any]]:
    """Return what the store holds of each text, read by itself."""
    store = Project.open(read_config(folder / "pipeline.yaml", sets).config).encoding.shelves.embeddings
    records = store.read(list(store.keys()))
    return {record.meta["text"]: record.arrays[array] for record in records if array in record.arrays}


def export(folder: Path, name: str, wanted: WantedExport, *sets: str) -> Path:
    out = folder / "out" / name
    out.unlink(missing_ok=True)
    out.with_suffix(".csv").unlink(missing_ok=True)
    export_embeddings(Project.open(read_config(folder / "pipeline.yaml", sets).config), out, wanted)
    return out


def read(path: Path, pool: str = "none") -> dict[str, NDArray[Any]]:
    """Read an export as somebody would who knows the format and not us."""
    if path.suffix == ".h5":
        with h5py.File(path) as file:
            assert all(name == hdf5_name(file[name].attrs["original_id"]) for name in file)
            return {dataset.attrs["original_id"]: dataset[()] for dataset in file.values()}
    if path.suffix == ".safetensors":
        return dict(load_file(path))
    if path.suffix == ".parquet":
        rows = pyarrow.parquet.read_table(path).to_pylist()
        return {row["id"]: np.array(row["embedding"], np.float32) for row in rows}
    with path.with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        array, table = np.load(path), list(csv.DictReader(file))
    if pool != "none":
        return dict(zip([row["id"] for row in table], array, strict=True))
    bounds = [(row["id"], int(row["first"]), int(row["residues"])) for row in table]
    assert len(array) == sum(residues for *_, residues in bounds)
    return {name: array[first : first + residues] for name, first, residues in bounds}


@pytest.mark.nightly
@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("pool", ["none", "mean", "max"])
def test_every_id_finds_its_own_rows_in_every_format(sequences: Path, format_: str, pool: str) -> None:
    stored = expected(sequences)
    found = read(export(sequences, f"x{SUFFIXES[format_][0]}", WantedExport(format_, pool)), pool)
    assert list(found) == list(SEQUENCES) if format_ != "h5" else set(found) == set(SEQUENCES)
    for name, text in SEQUENCES.items():
        rows = stored[text]
        wanted = {"none": rows, "mean": rows.mean(0), "max": rows.max(0)}[pool]
        np.testing.assert_allclose(found[name], wanted, rtol=1e-6, atol=1e-7)
        assert found[name].dtype == np.float32


@pytest.mark.nightly
@pytest.mark.parametrize("format_", FORMATS)
def test_chains_of_partners_are_told_apart_and_of_one_split(complexes: Path, format_: str) -> None:
    whole = read(export(complexes, f"x{SUFFIXES[format_][0]}", WantedExport(format_)))
    names = [f"c{number}:{chain}" for number in range(3) for chain in "AB"]
    assert set(whole) == {*names, "c3:receptor:A", "c3:ligand:A"}
    part = read(export(complexes, f"y{SUFFIXES[format_][0]}", WantedExport(format_, split="train")))
    assert set(part) == {"c0:A", "c0:B", "c1:A", "c1:B"}
    assert all(np.array_equal(part[name], whole[name]) for name in part)


@pytest.mark.nightly
def test_a_partner_that_was_embedded_as_one_text_is_cut_into_its_chains(tmp_path: Path, complexes: Path) -> None:
    shutil.copytree(complexes, tmp_path / "joined")
    folder = tmp_path / "joined"
    (folder / "pipeline.yaml").write_text(
        "data: {source: glob, path: one, partners: none}\nembed: {weights: esm2_tiny.pt, context: partner}\n"
    )
    (folder / "one").mkdir()
    shutil.copy(folder / "c0.pdb", folder / "one")
    settle(folder / "one")
    project.Project(folder).finishes("embed")
    (text,) = expected(folder).keys() - expected(complexes).keys()
    whole = expected(folder)[text]
    found = read(export(folder, "x.h5", WantedExport("h5")))
    assert list(found) == ["c0:A", "c0:B"]
    assert np.array_equal(np.concatenate([found["c0:A"], found["c0:B"]]), whole)


@pytest.mark.nightly
def test_what_is_missing_is_named_with_the_next_command_and_no_file_is_left(
    tmp_path: Path, sequences: Path, pipeline: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "more"
    shutil.copytree(sequences, folder)
    monkeypatch.chdir(folder)
    typed = ("export", "embeddings", "--out", "all.h5")
    with (folder / "my.fasta").open("a") as file:
        file.write(">new\nMMMMMM\n>bad\nMKJ\n")
    settle(folder)
    refused = pipeline(*typed)
    assert refused.code == 4
    assert "new, bad" in refused.err
    assert "next: pipeline submit embed --follow" in refused.err
    assert not list(folder.glob("*all.h5*"))
    left_out = pipeline(*typed, "--partial")
    assert left_out.code == 0, left_out.err
    assert set(read(folder / "all.h5")) == set(SEQUENCES)


@pytest.mark.nightly
def test_a_file_that_is_there_is_kept_unless_it_is_to_be_replaced(
    tmp_path: Path, sequences: Path, pipeline: Command
) -> None:
    config = ("--config", f"{sequences}/pipeline.yaml")
    (tmp_path / "x.csv").write_text("mine")
    refused = pipeline("export", "embeddings", "--out", str(tmp_path / "x.npy"), *config)
    assert (refused.code, "--force" in refused.err) == (2, True)
    itself = pipeline("export", "embeddings", "--out", str(tmp_path / "x.csv"), "--format", "npy", *config, "--force")
    assert itself.code == 2
    assert (tmp_path / "x.csv").read_text() == "mine"
    done = pipeline("export", "embeddings", "--out", str(tmp_path / "x.npy"), *config, "--force", "--json")
    assert json.loads(done.out)["ids"] == len(SEQUENCES)
    assert set(read(tmp_path / "x.npy")) == set(SEQUENCES)


KILLED = """
import os, signal, sys
from pathlib import Path
from pipeline.config.load import read_config
from pipeline.project.project import Project
from pipeline.stages import embedding_export as export

def pooled(*given, made=export._pooled, left=[4]):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    return made(*given)

export._pooled = pooled
out = Path(sys.argv[1])
project = Project.open(read_config(Path(sys.argv[2])).config)
export.export_embeddings(project, out, export.WantedExport(out.suffix[1:]))
"""


@pytest.mark.nightly
@pytest.mark.parametrize("format_", FORMATS)
def test_an_export_that_is_killed_leaves_nothing_under_its_name_and_is_done_again_whole(
    tmp_path: Path, sequences: Path, format_: str
) -> None:
    out = tmp_path / f"x.{format_}"
    typed = [sys.executable, "-c", KILLED, str(out), str(sequences / "pipeline.yaml")]
    assert subprocess.run(typed, check=False, timeout=120).returncode == -9
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == []
    project = Project.open(read_config(sequences / "pipeline.yaml").config)
    assert export_embeddings(project, out, WantedExport(format_)).ids == len(SEQUENCES)
    assert set(read(out)) == set(SEQUENCES)


@pytest.fixture(scope="module")
def marked(sequences: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the project with the rows of marks, too, made by the command that the export without them names."""
    folder = tmp_path_factory.mktemp("marked") / "project"
    shutil.copytree(sequences, folder)
    typed = (sys.executable, "-m", "pipeline", "export", "embeddings", "--out", "cls.npy", "--pool", "cls")
    refused = subprocess.run(typed, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    assert refused.returncode == 4
    (told,) = re.findall(r"next: pipeline (submit .*--follow) ", refused.stderr)
    assert told == "submit embed --set embed.cls=true --follow"
    run = (sys.executable, "-m", "pipeline", *told.split(), "--executor", "local")
    subprocess.run(run, cwd=folder, capture_output=True, check=True, timeout=240)
    subprocess.run(typed, cwd=folder, capture_output=True, check=True, timeout=120)
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize("format_", FORMATS)
def test_every_id_finds_the_row_of_its_mark_in_every_format(marked: Path, format_: str) -> None:
    stored = expected(marked, array="cls")
    assert set(stored) == set(SEQUENCES.values())
    found = read(export(marked, f"x{SUFFIXES[format_][0]}", WantedExport(format_, "cls")), "cls")
    assert set(found) == set(SEQUENCES)
    for name, text in SEQUENCES.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], stored[text])
    assert set(read(marked / "cls.npy", "cls")) == set(SEQUENCES)  # by the commands that were typed


@pytest.mark.nightly
@pytest.mark.parametrize("pool", ["none", "cls"])
def test_a_damaged_embedding_is_never_exported(marked: Path, tmp_path: Path, pipeline: Command, pool: str) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(marked, folder)
    encoding = Project.open(read_config(folder / "pipeline.yaml", ["embed.cls=true"]).config).encoding
    if pool == "cls":  # the record is whole, and has no mark
        key = encoding.recipe.key("MKVLAWY", encoding.recipe.wanted(7))
        record = encoding.shelves.embeddings.get(key)
        shutil.rmtree(folder / "cache" / "embed")
        with encoding.shelves.embeddings.writer() as writer:
            writer.put(key, {"rows": record.arrays["rows"]}, record.meta)
    else:
        for shard in filter(Path.is_file, (folder / "cache" / "embed").rglob("*")):
            content = bytearray(shard.read_bytes())
            for place in range(0, len(content) * 3 // 4, 40):
                content[place] ^= 1
            shard.write_bytes(content)
    typed = ("--config", f"{folder}/pipeline.yaml", "--pool", pool, "--partial")
    refused = pipeline("export", "embeddings", "--out", str(tmp_path / "x.npy"), *typed)
    assert (refused.code, "Q9" in refused.err) == (4, True)
    assert not list(tmp_path.glob("*x.*"))


@pytest.mark.nightly
def test_words_and_places_that_are_none_are_refused(
    sequences: Path, complexes: Path, tmp_path: Path, pipeline: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")  # as root, a file would take the place of /dev/null
    Path("pipeline.yaml").write_text("data: {path: mine}\n")
    config = ("--config", f"{sequences}/pipeline.yaml")
    for words, named in (
        (("export", "embeddings", "--out", "x.hdf", *config), "--format"),
        (("export", "embeddings", "--out", "x.h5", "--split", "tset", "--config", f"{complexes}/pipeline.yaml"), "val"),
        (("export", "embeddings", "--out", "pipe", "--format", "npy", "--force", *config), "pipe"),
        (("export", "embeddings", "--out", ".", "--format", "npy", "--force", *config), "."),
        (("embed", f"{sequences}/my.fasta", "--weights", f"{sequences}/esm2_tiny.pt", "--out", "."), "--out"),
    ):
        refused = pipeline(*words)
        assert (refused.code, named in refused.err) == (2, True), words
    for module, format_ in (("h5py", "h5"), ("pyarrow", "parquet")):
        with monkeypatch.context() as without:
            without.setitem(sys.modules, module, None)
            refused = pipeline("export", "embeddings", "--out", f"z.{format_}", *config)
        assert (refused.code, "pip install" in refused.err) == (2, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pipe", "pipeline.yaml"]
    assert Path("pipe").is_fifo()
    assert Path("pipeline.yaml").read_text() == "data: {path: mine}\n"


@pytest.mark.nightly
def test_fasta_in_hdf5_out_in_two_commands_without_a_project(
    tmp_path: Path, sequences: Path, pipeline: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(sequences / "my.fasta", tmp_path)
    shutil.copy2(sequences / "esm2_tiny.pt", tmp_path)
    settle(tmp_path)
    done = pipeline("embed", "my.fasta", "--weights", "esm2_tiny.pt")
    assert done.code == 0, done.err
    (typed,) = [line.removeprefix("next: pipeline ") for line in done.out.splitlines() if line.startswith("next: ")]
    assert typed == "embeddings export --out my.h5 --config embedded/my/pipeline.yaml"
    exported = pipeline(*typed.split())
    assert exported.code == 0, exported.err
    ours = read(tmp_path / "my.h5")
    theirs = expected(sequences)
    assert all(np.array_equal(ours[name], theirs[text]) for name, text in SEQUENCES.items())
