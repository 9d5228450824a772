"""What people get wrong with files and options: each is refused, or taken as it is meant, and never passed over."""

from __future__ import annotations

import os
import re
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from pipeline.cli.main import main
from pipeline.errors import ConfigError, DataError, PipelineError
from pipeline.readers import entry, hdf5, made
from pipeline.readers.pairs import Pairs
from pipeline.readers.spectra import Spectra
from pipeline.records import Entry, Reason, Rejection
from tests.readers.compared import hdf5_file

GOOD = "BEGIN IONS\nTITLE=good\nFOLD=val\nPEPMASS=500.5\n100 1\n200 2\nEND IONS\n"
BARE = "BEGIN IONS\nPEPMASS=500.5\n100 1\nEND IONS\n"
OPTIONS = ("id", "split")


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def pairs_file(path: Path, **columns: Any) -> Path:
    """Write pairs as HDF5."""
    with h5py.File(path, "w") as file:
        for name, values in {"left": ["a", "b"], "right": ["c", "d"], **columns}.items():
            file[name] = values
    return path


@pytest.mark.parametrize("option", [*OPTIONS, "left"])
def test_a_column_that_is_named_but_not_there_is_an_error(tmp_path: Path, option: str) -> None:
    path = written(tmp_path / "x.tsv", "id\tfold\tleft\tright\na\tval\tx\ty\n")
    with pytest.raises(DataError, match="one column 'flod'; it is: id, fold, left, right") as caught:
        Pairs(path, **{option: "flod"})
    assert caught.value.remedy == f"--set data.options.{option}=COLUMN, one that is there once"
    with pytest.raises(DataError, match="no dataset 'flod'; there are: fold, left, right"):
        list(Pairs(pairs_file(tmp_path / "x.h5", fold=["val", "val"]), **{option: "flod"}).entries())


def test_usual_names_are_taken_in_any_case_and_blanks_do_not_count(tmp_path: Path) -> None:
    table = written(tmp_path / "x.tsv", "ID \tSplit\tleft\tright\n a b \t train \tx\ty\n")
    file = pairs_file(tmp_path / "x.h5", id=[" a b ", "c"], split=["train ", "val"])
    for path in (table, file):
        first = next(Pairs(path).entries())
        assert (first.id, first.split) == ("a_b", "train")
    spectra = hdf5_file(tmp_path / "y.h5", fold=["val "])
    assert [one.split for one in Spectra(spectra).entries()] == ["val"]


@pytest.mark.parametrize("option", [*OPTIONS, "peptide"])
def test_a_header_that_is_named_but_in_no_spectrum_is_an_error_at_the_end_of_the_file(
    tmp_path: Path, option: str
) -> None:
    path = written(tmp_path / "x.mgf", BARE + GOOD)
    found: list[Entry | Rejection] = []
    with pytest.raises(DataError, match="no spectrum has the header 'FLOD'; there are: PEPMASS, TITLE, FOLD") as caught:
        found.extend(Spectra(path, **{option: "flod"}).entries())
    assert len(found) == 2
    assert caught.value.where == str(path)
    assert f"data.options.{option}" in caught.value.remedy


@pytest.mark.parametrize("text", [BARE + GOOD, GOOD + BARE, BARE + GOOD.replace("100 1", "bad")])
def test_a_header_of_a_single_spectrum_is_enough_even_if_it_cannot_be_read(tmp_path: Path, text: str) -> None:
    found = list(Spectra(written(tmp_path / "x.mgf", text), split="fold").entries())
    assert sorted(one.split for one in found) == ["", "val"]


def test_no_link_is_followed_out_of_a_file_or_within_it(tmp_path: Path) -> None:
    hdf5_file(tmp_path / "other.h5")
    links = {"out.h5": h5py.ExternalLink("other.h5", "spectrum"), "within.h5": h5py.SoftLink("/real")}
    for name, link in links.items():
        path = hdf5_file(tmp_path / name, spectrum=None, real=[[[1.0], [2.0]]])
        with h5py.File(path, "a") as file:
            file["spectrum"] = link
        with pytest.raises(DataError, match="'spectrum' is a link, and links are not followed") as caught:
            list(Spectra(path).entries())
        assert caught.value.remedy


def test_datasets_made_of_other_files_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    hdf5_file(tmp_path / "other.h5")
    layout = h5py.VirtualLayout((1, 2, 3), "i8")
    layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "spectrum", (1, 2, 3))
    for side in ("outside", "virtual"):
        with h5py.File(tmp_path / f"{side}.h5", "w") as file:
            file["left"] = ["a"]
            if side == "virtual":
                file.create_virtual_dataset("right", layout)
            else:
                file.create_dataset("right", (1, 2, 3), "u1", external=[(str(tmp_path / "secret"), 0, 6)])
        with pytest.raises(DataError, match=r"'right' (is virtual|has its bytes in other files), which are not read"):
            list(Pairs(tmp_path / f"{side}.h5").entries())


def test_links_that_nobody_asked_for_do_no_harm(tmp_path: Path) -> None:
    path = hdf5_file(tmp_path / "x.h5", name=["a"])
    with h5py.File(path, "a") as file:
        file["nowhere"], file["round"] = h5py.SoftLink("/none"), h5py.SoftLink("/round")
        file["elsewhere"] = h5py.ExternalLink("none.h5", "x")
    assert [one.id for one in Spectra(path).entries()] == ["a"]


def test_suffixes_may_be_capitals_and_equal_stems_give_other_ids(tmp_path: Path) -> None:
    written(tmp_path / "a.MGF", BARE)
    written(tmp_path / "a.mgf", BARE)
    hdf5_file(tmp_path / "a.HDF5")
    entries = list(Spectra(tmp_path).entries())
    assert [one.id for one in entries] == ["a.HDF5-0", "a.MGF-0", "a.mgf-0"]
    for suffix in (".TSV", ".Csv", ".H5"):
        made.pairs(tmp_path / f"p{suffix}", 3)
        assert sum(isinstance(one, Entry) for one in Pairs(tmp_path / f"p{suffix}").entries()) == 3
    written(tmp_path / "b.MGF.GZ", "")
    with pytest.raises(ConfigError, match="gunzip"):
        Spectra(tmp_path)


def test_a_row_of_more_than_64_mib_is_refused_by_its_shape(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("spectrum", (3, 2, 1 << 26), "f4", chunks=(1, 2, 1 << 16))
        file["precursor_mz"] = np.ones(3)
    with pytest.raises(DataError, match=r"a row of 'spectrum' \(3, 2, 67108864\) is 512 MiB, more than 64"):
        list(Spectra(tmp_path / "x.h5").entries())


def test_sides_that_are_too_long_are_rejected_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("left", (4, 5000, 100), "f4", chunks=(1, 5000, 100))
        file.create_dataset("right", (4, 5000, 100), "f4", chunks=(1, 5000, 100))
    whole: list[Any] = []
    monkeypatch.setattr(h5py.Dataset, "__getitem__", lambda *what: whole.append(what))
    found = list(Pairs(tmp_path / "x.h5").entries())
    assert [one.detail for one in found if isinstance(one, Rejection)] == [
        "the left side is longer than most: 5,000 > 4,096"
    ] * 4
    assert not whole


def test_long_texts_are_read_a_few_at_a_time(tmp_path: Path) -> None:
    text, number = "A" * 40_000, hdf5.TEXT_ROWS * 8
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for side in ("left", "right"):
            file.create_dataset(side, (number,), h5py.string_dtype(), data=[text if side == "left" else "b"] * number)
    tracemalloc.start()
    assert sum(1 for _ in Pairs(tmp_path / "x.h5").entries()) == number
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * hdf5.TEXT_ROWS * len(text)  # of eight times as many


def test_too_little_memory_is_an_error_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: object) -> None:
        raise MemoryError

    path = pairs_file(tmp_path / "x.h5")
    monkeypatch.setattr(h5py.Dataset, "__getitem__", exhausted)
    with pytest.raises(DataError, match="rows 0 to 2 cannot be read: not enough memory") as caught:
        list(Pairs(path).entries())
    assert caught.value.where == str(path)


def test_the_command_that_reads_a_changed_file_again_is_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, *words = str(replace(entry.SCAN_AGAIN, then="")).split()
    assert program == "pipeline"
    monkeypatch.setattr("sys.argv", [program, *words, "--help"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 0, capsys.readouterr().err


WRONG: list[tuple[str, Any, str]] = [
    ("max_peaks", 10.5, "a whole number from 1"),
    ("max_peaks", None, "a whole number from 1"),
    ("most_peaks", "5", "a whole number from 1"),
    ("most_peaks", True, "a whole number from 1"),
    ("least_intensity", "0.1", "a number from 0 and less than 1"),
    ("least_intensity", float("nan"), "a number from 0 and less than 1"),
    ("target", [1], "a list of names"),
    ("target", None, "a list of names"),
    ("target", [""], "a list of names"),
    ("split", None, "a name, as text"),
]


@pytest.mark.parametrize(("name", "value", "wanted"), WRONG)
def test_an_option_of_another_type_is_refused_by_its_name(tmp_path: Path, name: str, value: Any, wanted: str) -> None:
    path = written(tmp_path / "x.mgf", GOOD)
    with pytest.raises(ConfigError, match=re.escape(f"{value!r} is not {wanted}")) as caught:
        Spectra(path, **{name: value})
    assert caught.value.where == f"data.options.{name}"


@pytest.mark.parametrize(
    ("name", "value"), [("most", "5"), ("most", True), ("left", 1), ("id", None), ("split", ["x"])]
)
def test_an_option_of_pairs_of_another_type_is_refused_by_its_name(tmp_path: Path, name: str, value: Any) -> None:
    path = written(tmp_path / "x.tsv", "left\tright\n")
    with pytest.raises(ConfigError, match=f"data.options.{name}"):
        Pairs(path, **{name: value})


def test_a_pipe_and_a_folder_with_the_name_of_a_file_say_what_they_are(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.mgf")
    (tmp_path / "deep" / "y.mgf").mkdir(parents=True)
    (tmp_path / "y.tsv").mkdir()
    with pytest.raises(ConfigError, match="a pipe, no file"):
        Spectra(tmp_path / "x.mgf")
    for reader, path in ((Spectra, tmp_path / "deep"), (Pairs, tmp_path / "y.tsv")):
        with pytest.raises(ConfigError, match=r"y\.(mgf|tsv): a folder, no file"):
            reader(path)


def faulty(folder: Path) -> dict[str, Any]:
    """Return what goes wrong, one for each place in the readers that says so."""
    empty, table = folder / "empty.h5", written(folder / "bad.tsv", "left\n")
    h5py.File(empty, "w").close()
    (folder / "none").mkdir()
    options = {"target": ("logp",)}
    return {
        "no HDF5": lambda: list(Spectra(written(folder / "text.h5", "x")).entries()),
        "no dataset": lambda: list(Spectra(empty).entries()),
        "no target": lambda: list(Spectra(hdf5_file(folder / "a.h5"), **options).entries()),
        "no spectra": lambda: list(Spectra(hdf5_file(folder / "b.h5", np.ones((1, 3, 4)))).entries()),
        "lengths": lambda: list(Spectra(hdf5_file(folder / "c.h5", name=["a", "b"])).entries()),
        "no sides": lambda: list(Pairs(pairs_file(folder / "d.h5", left=[1, 2])).entries()),
        "no column": lambda: Pairs(table),
        "no text": lambda: Pairs(written(folder / "latin.csv", "left,right\n").rename(folder / "x.json")),
        "no files": lambda: Spectra(folder / "none"),
        "no such file": lambda: Spectra(folder / "nowhere"),
        "other suffix": lambda: made.pairs(folder / "x.mgf", 1),
        "few peaks": lambda: made.spectra(folder / "x.mgf", 1, peaks=3),
    }


def test_every_error_says_what_to_do_next(tmp_path: Path) -> None:
    for name, wrong in faulty(tmp_path).items():
        with pytest.raises(PipelineError) as caught:
            wrong()
        assert caught.value.remedy, name
        assert caught.value.where, name


def test_a_charge_that_is_no_whole_number_is_rejected(tmp_path: Path) -> None:
    (bad,) = Spectra(hdf5_file(tmp_path / "x.h5", charge=[2.7])).entries()
    assert isinstance(bad, Rejection)
    assert (bad.reason, bad.detail) == (Reason.BAD_ENTRY, "the charge is 2.7, no whole number or a large one")


def test_whole_numbers_are_ids_without_a_point(tmp_path: Path) -> None:
    for name, said in ((12.0, "12"), (12.5, "12.5"), (np.float32(3), "3")):
        (one,) = Spectra(hdf5_file(tmp_path / "x.h5", name=[name], fold=[1.0])).entries()
        assert (one.id, one.split) == (said, "1")
