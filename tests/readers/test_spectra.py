"""Spectra of MGF files: every one is read or rejected where it stands, and is the same when it is read again."""

from __future__ import annotations

import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import DataError
from pipeline.readers import made, spectrum_files
from pipeline.readers.peptides import residue_codes
from pipeline.readers.spectra import Spectra
from pipeline.records import Entry, Reason, Rejection
from tests.readers.compared import assert_same, hdf5_file, only, read_twice

GOOD = "BEGIN IONS\nTITLE=good\nPEPMASS=500.5\n100 1\n200 2\nEND IONS\n"
NUMBERS = st.floats(min_value=0.001, max_value=1e6)
WORDS = b"""BEGIN IONS|END IONS|PEPMASS=500.5|PEPMASS=|TITLE=a b|CHARGE=2+|SEQ=PEK|100.5 3|3|nan 1|1 2 3+|-1 1|1 -1
1e300 1|inf 2|1 1e300|0 0|# x|=||1_0 2|\x00|1 2 nan|\xff 1"""
LINES = st.sampled_from(re.split(rb"[|\n]", WORDS))


def read(folder: Path, text: str | bytes, **options: Any) -> list[Entry | Rejection]:
    path = folder / "x.mgf"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_twice(Spectra(path, **options))


def test_a_spectrum_is_sorted_relative_and_typed(tmp_path: Path) -> None:
    text = (
        "COM=for all\n# a comment\n\nBEGIN IONS\r\nTITLE=run 1, scan 2\r\nPEPMASS=500.25 1e4\r\nCHARGE=2+\r\n"
        "RTINSECONDS=7.5\r\nSEQ=PEK\r\nSPLIT=val\r\n200.5 10\r\n100.25\t20 1+\r\n300 0\r\nEND IONS\r\n"
    )
    entry = only(read(tmp_path, text, target=["rtinseconds"]))
    assert (entry.id, entry.split, entry.origin) == ("run_1,_scan_2", "val", "x.mgf:4")
    expected = {
        "peaks.mz": np.array([100.25, 200.5], np.float32),
        "peaks.intensity": np.array([1, 0.5], np.float32),
        "precursor_mz": np.array(500.25, np.float32),
        "charge": np.array(2),
        "target": np.array([7.5], np.float32),
        "peptide.residue": np.array([3, 13, 12], np.int8),
    }
    assert_same(entry.arrays, expected)


def test_keys_of_other_names_are_used_where_they_are_named(tmp_path: Path) -> None:
    text = "BEGIN IONS\nSCANS=12\nFOLD=test\nPeptide=MK\nPRECURSOR_MZ=9\n1 1\nEND IONS"
    entry = only(read(tmp_path, text, id="scans", split="fold", peptide="PEPTIDE"))
    assert (entry.id, entry.split) == ("12", "test")
    assert entry.arrays["peptide.residue"].tolist() == residue_codes("MK").tolist()


def test_a_spectrum_without_title_charge_and_peptide_is_told_by_its_number(tmp_path: Path) -> None:
    found = read(tmp_path, GOOD + "BEGIN IONS\nPEPMASS=2\n1 1\nEND IONS")
    assert [entry.id for entry in found] == ["good", "x.mgf-1"]
    assert found[1].arrays["charge"] == 0
    assert "peptide.residue" not in found[1].arrays


CHARGES = {"3+": 3, "+3": 3, "3": 3, "2-": -2, "-2": -2, "2+ and 3+": 0, "2+,3+": 0, "": 0, "0": 0}


def test_a_charge_is_read_as_it_is_written(tmp_path: Path) -> None:
    for text, charge in CHARGES.items():
        entry = only(read(tmp_path, f"BEGIN IONS\nPEPMASS=2\nCHARGE={text}\n1 1\nEND IONS"))
        assert entry.arrays["charge"] == charge, text


def test_a_rejection_names_the_line(tmp_path: Path) -> None:
    head = "BEGIN IONS\nTITLE=t\nPEPMASS=500\n"
    for text, line in (("100 1\n100 x\n", 5), ("100 1\n\n100\n", 6), ("1 2 3\n5\n", 5), ("100 0\n", 1)):
        _, bad, after = read(tmp_path, f"{GOOD}{head}{text}END IONS\n{GOOD}")
        assert (bad.id, bad.reason, bad.origin) == ("t", Reason.BAD_ENTRY, f"x.mgf:{6 + line}"), text
        assert isinstance(after, Entry)


def test_a_target_is_a_number_or_not_known_or_the_spectrum_is_rejected(tmp_path: Path) -> None:
    text = "BEGIN IONS\nPEPMASS=2\n{}1 1\nEND IONS\n"
    for said in ("TARGET=x\n", "TARGET=inf\n", "TARGET=1e60\n"):
        assert isinstance(read(tmp_path, text.format(said), target=("target",))[0], Rejection), said
    for said in ("", "TARGET=\n", "TARGET=nan\n", "TARGET=N/A\n"):
        known, other = read(tmp_path, text.format("TARGET=3\n") + text.format(said), target=("target",))
        assert only([known]).arrays["target"].tolist() == [3.0]
        assert np.isnan(only([other]).arrays["target"]).all(), said
    with pytest.raises(DataError, match="'LOGP'") as caught:
        read(tmp_path, GOOD, target=("logp",))
    assert "data.options.target" in caught.value.remedy


def test_a_header_of_a_single_spectrum_is_enough_even_if_it_cannot_be_read(tmp_path: Path) -> None:
    bare, good = "BEGIN IONS\nPEPMASS=500.5\n100 1\nEND IONS\n", GOOD.replace("TITLE", "FOLD=val\nTITLE")
    for text in (bare + good, good + bare, bare + good.replace("100 1", "bad")):
        (tmp_path / "x.mgf").write_text(text)
        assert sorted(one.split for one in Spectra(tmp_path / "x.mgf", split="fold").entries()) == ["", "val"]


def test_lines_that_belong_to_no_spectrum_are_counted_once_for_each_gap(tmp_path: Path) -> None:
    lost, first, gap, second = read(tmp_path, f"TITLE=lost\n1 1\n2 2\nEND IONS\n{GOOD}\n3 3\n4 4\n{GOOD}")
    assert isinstance(first, Entry)
    assert isinstance(second, Entry)
    assert isinstance(lost, Rejection)
    assert isinstance(gap, Rejection)
    assert (lost.origin, gap.origin) == ("x.mgf:2", "x.mgf:12")


def test_the_most_intense_peaks_are_kept_in_order_and_the_first_of_equal_ones(tmp_path: Path) -> None:
    text = "BEGIN IONS\nPEPMASS=2\n5 9\n4 1\n3 5\n2 5\n1 5\nEND IONS"
    assert only(read(tmp_path, text, max_peaks=3)).arrays["peaks.mz"].tolist() == [1, 2, 5]
    assert only(read(tmp_path, text, least_intensity=0.2)).arrays["peaks.mz"].tolist() == [1, 2, 3, 5]
    half = "BEGIN IONS\nPEPMASS=2\n1 4\n2 8\n3 3\nEND IONS"
    assert only(read(tmp_path, half, least_intensity=0.5)).arrays["peaks.mz"].tolist() == [1, 2], "the least one, too"


@given(
    st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=150), st.sampled_from(["{!r} {!r}", "{:.4f}\t{:e} 2+"])
)
@settings(max_examples=50, deadline=None)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, peaks: list[tuple[float, float]], form: str
) -> None:
    lines = [form.format(*peak) for peak in peaks]
    text = "BEGIN IONS\nPEPMASS=2\n" + "\n".join(lines) + "\nEND IONS\n"
    (entry,) = read(tmp_path_factory.mktemp("x"), text, max_peaks=1000)
    written = np.array([[float(word) for word in line.split()[:2]] for line in lines])
    if written[:, 0].min() <= 0:
        assert isinstance(entry, Rejection)
        return
    mz, relative = written[:, 0].astype(np.float32), (written[:, 1] / written[:, 1].max()).astype(np.float32)
    order = np.argsort(mz, kind="stable")
    order = order[relative[order] > 0]
    assert entry.arrays["peaks.mz"].tolist() == mz[order].tolist()
    assert entry.arrays["peaks.intensity"].tolist() == relative[order].tolist()


@given(st.binary(max_size=300) | st.lists(LINES, max_size=25).map(b"\n".join))
@settings(max_examples=200, deadline=None)
def test_whatever_the_bytes_are_each_spectrum_is_read_or_rejected(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    found = read(tmp_path_factory.mktemp("x"), content)
    assert found
    begun = ("\n" + content.decode("latin1")).count("\nBEGIN IONS")
    whole = [one for one in found if isinstance(one, Entry) or "outside of" not in one.detail]
    assert len(whole) == max(begun, 1)
    for entry in found:
        if isinstance(entry, Entry):
            assert 0 < len(entry.arrays["peaks.mz"]) <= 100
            assert all(np.isfinite(array).all() for array in entry.arrays.values())


def test_pieces_of_any_size_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(
        f"BEGIN IONS\nTITLE=s{number}\nPEPMASS=2\n{'7 1' * (number % 3)}\nEND IONS\n\n" for number in range(20)
    )
    whole = read(tmp_path, text)
    for size in (1, 2, 7, 30, 64):
        monkeypatch.setattr(spectrum_files, "CHUNK_BYTES", size)
        parts = read(tmp_path, text)
        assert [(one.id, one.origin) for one in parts] == [(one.id, one.origin) for one in whole]


def test_a_spectrum_without_end_is_given_up_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spectrum_files, "CHUNK_BYTES", 1 << 12)
    monkeypatch.setattr(spectrum_files, "MOST_BYTES", 1 << 14)
    text = GOOD + "BEGIN IONS\nTITLE=endless\n" + "1 1\n" * 50_000 + "BEGIN IONS" + GOOD[10:]
    first, endless, *pieces, last = read(tmp_path, text)
    assert isinstance(first, Entry)
    assert isinstance(last, Entry)
    assert isinstance(endless, Rejection)
    assert "no END IONS" in endless.detail
    assert len(pieces) < 50_000 * 4 / (1 << 14)
    assert last.origin == f"x.mgf:{6 + 2 + 50_000 + 1}"
    path = tmp_path / "x.mgf"
    path.write_text("1 1\n" * 500_000)
    tracemalloc.start()
    list(Spectra(path).entries())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 600_000  # of 2 MB


def test_a_folder_is_its_files_by_name_whatever_the_case_of_their_suffixes(tmp_path: Path) -> None:
    for name in ("a.MGF", "a.mgf"):
        (tmp_path / name).write_text(GOOD.replace("TITLE=good\n", ""))
    hdf5_file(tmp_path / "a.HDF5")
    made.spectra(tmp_path / "b.mgf", 1)
    (tmp_path / "notes.txt").write_text("no spectra")
    assert [path.name for path in Spectra(tmp_path).files()] == ["a.HDF5", "a.MGF", "a.mgf", "b.mgf"]
    assert {one.origin: one.id for one in Spectra(tmp_path).entries()} == {
        "a.HDF5:0": "a.HDF5-0",
        "a.MGF:1": "a.MGF-0",
        "a.mgf:1": "a.mgf-0",
        "b.mgf:1": "made-0000000",
    }
