"""Spectra of HDF5 files in the layout of DreaMS."""

from __future__ import annotations

import sys
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pipeline.errors import ConfigError, DataError
from pipeline.readers import made
from pipeline.readers.pairs import Pairs
from pipeline.readers.spectra import Spectra
from pipeline.records import Entry, Reason, Rejection
from tests.readers.compared import assert_same, hdf5_file


def read(path: Path, **options: Any) -> list[Entry | Rejection]:
    """Return what is in a file, each entry read a second time as well."""
    spectra = Spectra(path, **options)
    found = list(spectra.entries())
    for entry in found:
        if isinstance(entry, Entry):
            assert_same(spectra.read(entry.place), entry.arrays)
    return found


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
    assert isinstance(entry, Entry)
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
    with pytest.raises(
        DataError, match="no dataset 'none'; there are: fold, id, name, precursor_mz, scan, set, spectrum"
    ):
        read(path, id="none")


BAD = {
    "padding alone": ([[0, 0], [0, 0]], {}, "no peaks"),
    "m/z of zero": ([[0, 5], [3, 1]], {}, "the m/z of peak 1 is 0"),
    "negative m/z": ([[5, -5], [3, 1]], {}, "the m/z of peak 2 is -5"),
    "negative intensity": ([[5, 6], [3, -1]], {}, "the intensity of peak 2 is -1"),
    "NaN": ([[5, np.nan], [3, 1]], {}, "the m/z of peak 2 is nan"),
    "infinite": ([[5, 6], [3, np.inf]], {}, "the intensity of peak 2 is inf"),
    "precursor": ([[5, 6], [3, 1]], {"precursor_mz": [np.nan]}, "the precursor's m/z is nan"),
    "charge": ([[5, 6], [3, 1]], {"charge": [np.nan]}, "the charge is nan"),
    "target": ([[5, 6], [3, 1]], {"logp": [np.inf]}, "logp is inf"),
    "target of no number": ([[5, 6], [3, 1]], {"logp": ["high"]}, "logp is no number: 'high'"),
    "peptide": ([[5, 6], [3, 1]], {"sequence": ["PEpK"]}, "peptide PEpK: 'p' is no amino acid"),
}


@pytest.mark.parametrize(("peaks", "columns", "detail"), BAD.values(), ids=BAD)
def test_a_bad_row_is_rejected(tmp_path: Path, peaks: Any, columns: dict[str, Any], detail: str) -> None:
    path = hdf5_file(tmp_path / "x.h5", np.array([peaks], float), **{"logp": [0.0], "name": ["t"], **columns})
    (bad,) = read(path, target=("logp",))
    assert isinstance(bad, Rejection)
    assert (bad.id, bad.reason, bad.origin) == ("t", Reason.BAD_ENTRY, "x.h5:0")
    assert detail in bad.detail


def test_a_row_of_ten_thousand_peaks_is_rejected(tmp_path: Path) -> None:
    (bad,) = read(hdf5_file(tmp_path / "x.h5", np.ones((1, 2, 10_000))))
    assert isinstance(bad, Rejection)
    assert "10,000 peaks, most_peaks allows 5,000" in bad.detail


FILES = {
    "no spectrum": ({"spectrum": None, "mz": [1]}, "no dataset 'spectrum'; there are: mz, precursor_mz"),
    "no precursor": ({"precursor_mz": None}, "no dataset 'precursor_mz'; there are: spectrum"),
    "no target": ({}, "no dataset 'logp'"),
    "other shape": ({"spectrum": np.ones((1, 3, 4)), "logp": [1]}, r"'spectrum' is float64 \(1, 3, 4\)"),
    "texts": ({"spectrum": [[["a"], ["b"]]], "logp": [1]}, "wanted are numbers"),
    "other length": ({"logp": [1, 2]}, "different lengths"),
    "a number alone": ({"logp": 1.0}, "different lengths"),
}


@pytest.mark.parametrize(("columns", "what"), FILES.values(), ids=FILES)
def test_a_file_that_is_no_table_of_spectra_says_what_it_has(
    tmp_path: Path, columns: dict[str, Any], what: str
) -> None:
    with pytest.raises(DataError, match=what):
        read(hdf5_file(tmp_path / "x.h5", **columns), target=("logp",))


@given(st.binary(max_size=200), st.integers(0, 4000))
@settings(max_examples=40, deadline=None)
def test_broken_bytes_are_an_error_or_entries(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, at: int
) -> None:
    path = hdf5_file(tmp_path_factory.mktemp("x") / "x.h5", name=["a"])
    whole = path.read_bytes()
    for broken in (content, whole[:at], whole[:-at] + content):
        path.write_bytes(broken)
        with suppress(DataError):
            assert len(read(path)) == 1


FLIPS = st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(1, 255)), min_size=1, max_size=8)


@given(FLIPS, st.sampled_from(["spectra", "pairs"]))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_flipped_bytes_are_an_error_or_entries(
    tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int]], kind: str
) -> None:
    path = tmp_path_factory.mktemp("x") / "x.h5"
    if kind == "spectra":
        hdf5_file(path, charge=[2], name=["a"], fold=["val"])
    else:
        hdf5_file(path, spectrum=None, precursor_mz=None, left=["ab", "c"], right=np.ones((2, 3, 4)))
    whole = bytearray(path.read_bytes())
    for at, mask in flips:
        whole[at % len(whole)] ^= mask
    path.write_bytes(whole)
    reader = Spectra(path) if kind == "spectra" else Pairs(path)
    with suppress(DataError):
        for entry in reader.entries():
            assert isinstance(entry, (Entry, Rejection))
            if isinstance(entry, Entry):
                assert_same(reader.read(entry.place), entry.arrays)


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


def test_both_formats_of_made_spectra_give_the_same(tmp_path: Path) -> None:
    made.spectra(tmp_path / "x.mgf", 40, seed=5)
    made.spectra(tmp_path / "x.h5", 40, seed=5)
    both = zip(read(tmp_path / "x.mgf", target="target"), read(tmp_path / "x.h5", target="target"), strict=True)
    for one, other in both:
        assert isinstance(one, Entry)
        assert isinstance(other, Entry)
        assert (one.id, one.split) == (other.id, other.split)
        assert_same(one.arrays, other.arrays)


def test_more_rows_than_the_file_has_bytes_are_a_damaged_header(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("spectrum", (1 << 40, 2, 10), "f4", chunks=(8, 2, 10))
        file.create_dataset("precursor_mz", (1 << 40,), "f4", chunks=(8,))
    with pytest.raises(DataError, match=r"damaged: 1,099,511,627,776 rows in a file of"):
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
