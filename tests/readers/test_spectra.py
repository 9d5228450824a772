"""Spectra of MGF files: every one is read or rejected where it stands, and is the same when it is read again."""

from __future__ import annotations

import pickle
import re
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import ConfigError, DataError
from pipeline.readers import made, peptides
from pipeline.readers.peptides import residue_codes
from pipeline.readers.spectra import Spectra
from pipeline.readers.spectrum_files import mgf
from pipeline.records import Entry, Reason, Rejection
from tests.readers import plainly
from tests.readers.compared import assert_same, hdf5_file

GOOD = "BEGIN IONS\nTITLE=good\nPEPMASS=500.5\n100 1\n200 2\nEND IONS\n"
NUMBERS = st.floats(min_value=0.001, max_value=1e6)
WORDS = b"""BEGIN IONS|END IONS|PEPMASS=500.5|PEPMASS=|TITLE=a b|CHARGE=2+|SEQ=PEK|100.5 3|3|nan 1|1 2 3+|-1 1|1 -1
1e300 1|inf 2|1 1e300|0 0|# x|=||1_0 2|\x00|1 2 nan|\xff 1"""
LINES = st.sampled_from(re.split(rb"[|\n]", WORDS))


def read(folder: Path, text: str | bytes, **options: Any) -> list[Entry | Rejection]:
    """Return what is in a file, each entry read a second time as well."""
    path = folder / "x.mgf"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    spectra = Spectra(path, **options)
    found = list(spectra.entries())
    for entry in found:
        if isinstance(entry, Entry):
            assert_same(spectra.read(entry.place), entry.arrays)
    return found


def only(found: list[Entry | Rejection]) -> Entry:
    """Return the arrays of the one entry."""
    (entry,) = found
    assert isinstance(entry, Entry), entry
    return entry


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
    assert isinstance(found[1], Entry)
    assert found[1].arrays["charge"] == 0
    assert "peptide.residue" not in found[1].arrays


CHARGES = {"3+": 3, "+3": 3, "3": 3, "2-": -2, "-2": -2, "2+ and 3+": 0, "2+,3+": 0, "": 0, "0": 0}


@pytest.mark.parametrize(("text", "charge"), CHARGES.items(), ids=CHARGES)
def test_a_charge_is_read_as_it_is_written(tmp_path: Path, text: str, charge: int) -> None:
    entry = only(read(tmp_path, f"BEGIN IONS\nPEPMASS=2\nCHARGE={text}\n1 1\nEND IONS"))
    assert entry.arrays["charge"] == charge


HEAD = "BEGIN IONS\nTITLE=t\nPEPMASS=500\n"
BAD = {
    "no peaks": (f"{HEAD}END IONS\n", 1, "no peaks"),
    "no peaks but blank lines": (f"{HEAD} \n\nEND IONS\n", 1, "no peaks"),
    "only zeros": (f"{HEAD}100 0\nEND IONS\n", 1, "every intensity is 0"),
    "negative m/z": (f"{HEAD}100 1\n-5 1\nEND IONS\n", 1, "the m/z of peak 2 is -5"),
    "zero m/z": (f"{HEAD}0 1\nEND IONS\n", 1, "the m/z of peak 1 is 0"),
    "negative intensity": (f"{HEAD}100 -1\nEND IONS\n", 1, "the intensity of peak 1 is -1"),
    "NaN": (f"{HEAD}100 nan\nEND IONS\n", 1, "the intensity of peak 1 is nan"),
    "infinity": (f"{HEAD}inf 1\nEND IONS\n", 1, "the m/z of peak 1 is inf"),
    "too large for float32": (f"{HEAD}1e39 1\nEND IONS\n", 1, "the m/z of peak 1 is 1e+39"),
    "no number": (f"{HEAD}100 1\n100 x\nEND IONS\n", 5, "not a peak, m/z and intensity: '100 x'"),
    "one number": (f"{HEAD}100 1\n\n100\nEND IONS\n", 6, "not a peak, m/z and intensity: '100'"),
    "four numbers, as many as two lines have": (f"{HEAD}1 2 3\n5\nEND IONS\n", 5, "not a peak"),
    "underscore": (f"{HEAD}1_0 2\nEND IONS\n", 4, "'1_0 2'"),
    "decimal comma": (f"{HEAD}100,5 1\nEND IONS\n", 4, "'100,5 1'"),
    "unprintable": (f"{HEAD}\x1b 1\nEND IONS\n", 4, r"\x1b 1"),
    "text after BEGIN IONS": (f"BEGIN IONSX\n{HEAD[11:]}1 1\nEND IONS\n", 1, "'X'"),
    "no precursor": ("BEGIN IONS\nTITLE=t\n1 1\nEND IONS\n", 1, "the precursor's m/z is missing"),
    "negative precursor": ("BEGIN IONS\nTITLE=t\nPEPMASS=-3\n1 1\nEND IONS\n", 1, "the precursor's m/z is -3"),
    "precursor of no number": ("BEGIN IONS\nTITLE=t\nPEPMASS=x\n1 1\nEND IONS\n", 1, "no number: 'x'"),
    "charge of no number": (f"{HEAD}CHARGE=two\n1 1\nEND IONS\n", 1, "a charge that does not parse: 'two'"),
    "unknown letter": (f"{HEAD}SEQ=PEPTXDE\n1 1\nEND IONS\n", 1, "peptide PEPTXDE: 'X' is no amino acid"),
    "no END IONS": (f"{HEAD}1 1\n", 1, "no END IONS"),
    "10,000 peaks": (HEAD + "1 1\n" * 10_000 + "END IONS\n", 1, "10,000 peaks, most_peaks allows 5,000"),
}


@pytest.mark.parametrize(("text", "line", "detail"), BAD.values(), ids=BAD)
def test_a_bad_spectrum_is_rejected_by_line_and_the_others_are_read(
    tmp_path: Path, text: str, line: int, detail: str
) -> None:
    before, bad, after = read(tmp_path, GOOD + text + GOOD)
    assert isinstance(before, Entry)
    assert isinstance(after, Entry)
    assert isinstance(bad, Rejection)
    assert (bad.id, bad.reason, bad.origin) == ("t", Reason.BAD_ENTRY, f"x.mgf:{6 + line}")
    assert detail in bad.detail


@pytest.mark.parametrize("text", ["TARGET=x\n", "TARGET=inf\n", "TARGET=1e60\n"])
def test_a_spectrum_whose_target_is_no_number_is_rejected(tmp_path: Path, text: str) -> None:
    (bad,) = read(tmp_path, f"BEGIN IONS\nPEPMASS=2\n{text}1 1\nEND IONS", target=("target",))
    assert isinstance(bad, Rejection)
    assert bad.detail.startswith("target is ")


@pytest.mark.parametrize("text", ["", "TARGET=\n", "TARGET=nan\n", "TARGET=N/A\n"])
def test_a_target_that_is_not_told_is_not_known(tmp_path: Path, text: str) -> None:
    known = "BEGIN IONS\nPEPMASS=2\nTARGET=3\n1 1\nEND IONS\n"
    found = read(tmp_path, f"{known}BEGIN IONS\nPEPMASS=2\n{text}1 1\nEND IONS", target=("target",))
    assert only(found[:1]).arrays["target"].tolist() == [3.0]
    assert np.isnan(only(found[1:]).arrays["target"]).all()


def test_a_target_that_no_spectrum_has_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no spectrum has the header 'LOGP'") as caught:
        read(tmp_path, GOOD, target=("logp",))
    assert "data.options.target" in str(caught.value)


def test_lines_that_belong_to_no_spectrum_are_counted_once_for_each_gap(tmp_path: Path) -> None:
    lost, first, gap, second = read(tmp_path, f"TITLE=lost\n1 1\n2 2\nEND IONS\n{GOOD}\n3 3\n4 4\n{GOOD}")
    assert isinstance(first, Entry)
    assert isinstance(second, Entry)
    assert isinstance(lost, Rejection)
    assert isinstance(gap, Rejection)
    assert (lost.origin, gap.origin) == ("x.mgf:2", "x.mgf:12")
    assert "outside of BEGIN IONS … END IONS: '3 3'" in gap.detail


@pytest.mark.parametrize("text", ["", "\n", "hello\n", "BEGIN ION\n"])
def test_a_file_without_spectra_is_a_rejection(tmp_path: Path, text: str) -> None:
    assert "no spectra" in [bad.detail for bad in read(tmp_path, text) if isinstance(bad, Rejection)][-1]


def test_the_most_intense_peaks_are_kept_in_order_and_the_first_of_equal_ones(tmp_path: Path) -> None:
    text = "BEGIN IONS\nPEPMASS=2\n5 9\n4 1\n3 5\n2 5\n1 5\nEND IONS"
    assert only(read(tmp_path, text, max_peaks=3)).arrays["peaks.mz"].tolist() == [1, 2, 5]
    assert only(read(tmp_path, text, least_intensity=0.2)).arrays["peaks.mz"].tolist() == [1, 2, 3, 5]


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
    assert isinstance(entry, Entry)
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
        monkeypatch.setattr(mgf, "CHUNK_BYTES", size)
        parts = read(tmp_path, text)
        assert [(one.id, one.origin) for one in parts] == [(one.id, one.origin) for one in whole]


def test_a_spectrum_without_end_is_given_up_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mgf, "CHUNK_BYTES", 1 << 12)
    monkeypatch.setattr(mgf, "MOST_BYTES", 1 << 14)
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


def test_made_spectra_are_read_as_a_plain_loop_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "x.mgf"
    made.spectra(path, 60, seed=3)
    for entry, plain in zip(Spectra(path, target=("TARGET",)).entries(), plainly.spectra(path), strict=True):
        assert isinstance(entry, Entry)
        assert (entry.id, entry.split) == (plain["TITLE"], plain["SPLIT"])
        assert entry.arrays["peaks.mz"].tolist() == plain["mz"].tolist()
        assert entry.arrays["peaks.intensity"].tolist() == plain["intensity"].tolist()
        assert peptides.peptide_text(entry.arrays["peptide.residue"]) == plain["SEQ"]
        assert entry.arrays["target"].tolist() == [np.float32(plain["TARGET"])]


def test_a_folder_is_its_files_by_name(tmp_path: Path) -> None:
    made.spectra(tmp_path / "b.mgf", 1)
    hdf5_file(tmp_path / "a.h5", id=["x-0"])
    (tmp_path / "notes.txt").write_text("no spectra")
    spectra = Spectra(tmp_path)
    assert [path.name for path in spectra.files()] == ["a.h5", "b.mgf"]
    assert [(entry.id, entry.origin) for entry in spectra.entries()] == [
        ("x-0", "a.h5:0"),
        ("made-0000000", "b.mgf:1"),
    ]
    for entry in spectra.entries():
        assert isinstance(entry, Entry)
        assert_same(spectra.read(entry.place), entry.arrays)


def test_several_threads_and_another_process_read_the_same(tmp_path: Path) -> None:
    made.spectra(tmp_path / "a.mgf", 30)
    made.spectra(tmp_path / "b.h5", 30)
    spectra = pickle.loads(pickle.dumps(Spectra(tmp_path)))
    entries = [entry for entry in spectra.entries() if isinstance(entry, Entry)]
    wrong: list[str] = []

    def read_all(step: int) -> None:
        for number in range(len(entries)):
            entry = entries[number * step % len(entries)]
            again = spectra.read(entry.place)
            wrong.extend(name for name, array in entry.arrays.items() if array.tobytes() != again[name].tobytes())

    threads = [threading.Thread(target=read_all, args=(step,)) for step in (1, 7, 11, 13)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(entries) == 60
    assert not wrong


def test_a_file_that_became_shorter_or_other_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.mgf"
    path.write_text(GOOD + GOOD)
    spectra = Spectra(path)
    last = list(spectra.entries())[-1]
    assert isinstance(last, Entry)
    path.write_text(GOOD + "x")
    with pytest.raises(DataError, match="the file ends before"):
        spectra.read(last.place)
    path.write_text("x" * 1000)
    with pytest.raises(DataError, match="not a peak"):
        spectra.read(last.place)


OPTIONS = {"max_peaks": 0, "most_peaks": 0, "least_intensity": 1.0}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_out_of_range_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "x.mgf").write_text(GOOD)
    with pytest.raises(ConfigError, match=f"data.options.{name}"):
        Spectra(tmp_path / "x.mgf", **{name: OPTIONS[name]})


def test_packed_missing_and_other_files_are_refused(tmp_path: Path) -> None:
    for name, what in (("x.mgf.gz", "gunzip"), ("x.txt", "no file ends with"), ("none.mgf", "no such file")):
        if name != "none.mgf":
            (tmp_path / name).write_text(GOOD)
        with pytest.raises(ConfigError, match=what):
            Spectra(tmp_path / name)
