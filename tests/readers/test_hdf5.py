"""HDF5 files: spectra in the layout of DreaMS, and columns of pairs."""

from __future__ import annotations

import sys
import tracemalloc
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pipeline.errors import ConfigError, DataError
from pipeline.readers import hdf5
from pipeline.readers.pairs import Pairs
from pipeline.readers.spectra import Spectra
from pipeline.records import Entry, Rejection
from tests.readers.compared import assert_same, columns_file, hdf5_file, read_twice


def read(path: Path, **options: Any) -> list[Entry | Rejection]:
    return read_twice(Spectra(path, **options))


def test_columns_are_found_by_their_names_in_any_case(tmp_path: Path) -> None:
    path = hdf5_file(
        tmp_path / "x.hdf5",
        [[[200, 100, 300, 0], [10, 20, 0, 0]]],
        charge=[-2],
        NAME=["L-Mellein (x)"],
        FOLD=["val"],
        sequence=["PEK"],
        logP=[1.5],
        QED=["0.25"],
        adduct=["[M+H]+"],
    )
    (entry,) = read(path, target=("logP", "qed"))
    assert (entry.id, entry.place, entry.split, entry.origin) == ("L-Mellein_(x)", [0, 0], "val", "x.hdf5:0")
    expected = {
        "peaks.mz": np.array([100, 200], np.float32),
        "peaks.intensity": np.array([1, 0.5], np.float32),
        "precursor_mz": np.array(500.5, np.float32),
        "charge": np.array(-2),
        "target": np.array([1.5, 0.25], np.float32),
        "peptide.residue": np.array([3, 13, 12], np.int8),
    }
    assert_same(entry.arrays, expected)


def test_an_id_goes_before_a_name_and_a_named_column_before_both(tmp_path: Path) -> None:
    path = hdf5_file(tmp_path / "x.h5", id=[7], name=["a"], scan=["s"], set=["test"], fold=["train"])
    assert [entry.id for entry in read(path)] == ["7"]
    assert [(entry.id, entry.split) for entry in read(path, id="scan", split="set")] == [("s", "test")]
    with pytest.raises(DataError, match="'none'"):
        read(path, id="none")


def test_a_row_is_rejected_for_its_target_and_for_too_many_peaks(tmp_path: Path) -> None:
    for value in (np.inf, "high"):
        (bad,) = read(hdf5_file(tmp_path / "x.h5", logp=[value]), target=("logp",))
        assert isinstance(bad, Rejection)
    (bad,) = read(hdf5_file(tmp_path / "x.h5", np.ones((1, 2, 10_000))))
    assert isinstance(bad, Rejection)


def test_whole_numbers_are_ids_without_a_point_and_blanks_do_not_count(tmp_path: Path) -> None:
    for name, said in ((12.0, "12"), (12.5, "12.5"), (np.float32(3), "3")):
        (one,) = Spectra(hdf5_file(tmp_path / "x.h5", name=[name], fold=[1.0])).entries()
        assert (one.id, one.split) == (said, "1")
    sides = {"left": ["a", "b"], "right": ["c", "d"]}
    first = next(Pairs(columns_file(tmp_path / "y.h5", **sides, id=[" a b ", "c"], split=["train ", "val"])).entries())
    assert (first.id, first.split) == ("a_b", "train")


@given(hnp.arrays(np.float32, (3, 2, 5), elements=st.floats(-10, 1000, width=32)))
@settings(max_examples=40, deadline=None)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, peak_N2P: Any) -> None:
    found = read(hdf5_file(tmp_path_factory.mktemp("x") / "x.h5", peak_N2P))
    for entry, (mz, intensity) in zip(found, peak_N2P, strict=True):
        there = (mz != 0) | (intensity != 0)
        fits = (mz[there] >= np.finfo(np.float32).tiny).all() and (intensity >= 0).all() and intensity.any()
        assert isinstance(entry, Entry) == fits
        if isinstance(entry, Entry):
            relative = (intensity.astype(float) / intensity.max()).astype(np.float32)
            order = np.argsort(mz, kind="stable")
            kept = order[relative[order] > 0]
            assert entry.arrays["peaks.mz"].tolist() == mz[kept].tolist()
            assert entry.arrays["peaks.intensity"].tolist() == relative[kept].tolist()


def test_more_rows_than_the_file_has_bytes_are_a_damaged_header(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("spectrum", (1 << 40, 2, 10), "f4", chunks=(8, 2, 10))
        file.create_dataset("precursor_mz", (1 << 40,), "f4", chunks=(8,))
    with pytest.raises(DataError, match="damaged"):
        read(path)


def test_memory_is_that_of_a_piece(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("spectrum", (4000, 2, 1000), "f4", fillvalue=1.0, chunks=(8, 2, 1000), compression="gzip")
        file["precursor_mz"] = np.ones(4000)
    tracemalloc.start()
    assert sum(1 for _ in Spectra(path).entries()) == 4000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 << 20  # of 31 MiB


def test_without_h5py_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = hdf5_file(tmp_path / "x.h5")
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ConfigError, match=r"pip install 'protein-training-pipeline\[hdf5\]'"):
        read(path)


def test_a_row_of_more_than_64_mib_is_refused_by_its_shape(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("spectrum", (3, 2, 1 << 26), "f4", chunks=(1, 2, 1 << 16))
        file["precursor_mz"] = np.ones(3)
    with pytest.raises(DataError, match="512 MiB"):
        list(Spectra(tmp_path / "x.h5").entries())


def test_sides_that_are_too_long_are_rejected_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for side in ("left", "right"):
            file.create_dataset(side, (4, 5000, 100), "f4", chunks=(1, 5000, 100))
    whole: list[Any] = []
    monkeypatch.setattr(h5py.Dataset, "__getitem__", lambda *what: whole.append(what))
    assert [isinstance(one, Rejection) for one in Pairs(tmp_path / "x.h5").entries()] == [True] * 4
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


def test_rows_of_numbers_are_vectors(tmp_path: Path) -> None:
    patches = np.arange(24, dtype=np.float64).reshape(2, 3, 4)
    path = columns_file(tmp_path / "x.h5", image=patches, text=["a", "bc"], id=["p", "q"], split=["train", "val"])
    first, second = read_twice(Pairs(path, left="image", right="text"))
    assert_same(first.arrays, {"left.vector": patches[0].astype(np.float32), "right.token": np.array([97], np.uint8)})
    assert (second.id, second.split, second.origin, second.place) == ("q", "val", "x.h5:1", [1])


def test_sides_without_rows_or_with_too_many_are_rejected(tmp_path: Path) -> None:
    for rows in (0, 11):
        path = columns_file(tmp_path / "x.h5", left=np.ones((1, rows, 3)), right=["x"])
        assert isinstance(read_twice(Pairs(path, most=10))[0], Rejection), rows
