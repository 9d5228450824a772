"""Spectra of MSP and mzML as of MGF: what their files say, labels beside them, and what the original reads."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.errors import ConfigError, DataError
from pipeline.readers import mzml, spectrum_files
from pipeline.readers.spectra import Spectra
from pipeline.records import Entry, Reason, Rejection
from pipeline.tasks.spectra.peak_transformer import own_rows, padded_peaks
from tests.readers.compared import assert_same, hdf5_file, mgf_text, msp_text, mzml_file, mzml_text, only, read_twice
from tests.reference import FOLDER, document, recorded
from tests.tasks.reader_items import batch_of

FILES = FOLDER / "dreams" / "files"


def read(path: Path, **options: Any) -> list[Entry | Rejection]:
    return read_twice(Spectra(path, **options))


# ---- what is in them ----


def test_the_same_spectrum_is_the_same_in_every_form(tmp_path: Path) -> None:
    (tmp_path / "x.mgf").write_text(mgf_text(7))
    (tmp_path / "x.msp").write_text(msp_text(7))
    (tmp_path / "x.mzML").write_text(mzml_file(mzml_text(7)))
    (tmp_path / "y.mzML").write_text(mzml_file(mzml_text(7, packed=True)))
    for path in list(tmp_path.iterdir()):
        path.with_name(f"{path.name}.GZ").write_bytes(gzip.compress(path.read_bytes()))
    first, *others = (only(read(tmp_path / name)) for name in ("x.mgf", "x.msp", "x.mzML", "y.mzML"))
    assert [entry.id for entry in (first, *others)] == ["e7", "x.msp-0", "x.mzML-scan-7", "y.mzML-scan-7"]
    for other in (*others, *(only(read(path)) for path in tmp_path.glob("*.GZ"))):
        assert_same(other.arrays, first.arrays)


def test_spectra_of_the_first_level_are_no_items(tmp_path: Path) -> None:
    (tmp_path / "x.mzML").write_text(mzml_file(mzml_text(1, level=1) + mzml_text(2) + mzml_text(3, level=1)))
    assert only(read(tmp_path / "x.mzML")).id == "x.mzML-scan-2"


def test_parameters_that_stand_in_a_group_are_found(tmp_path: Path) -> None:
    group = (
        '<referenceableParamGroup id="numbers"><cvParam accession="MS:1000523" name="64-bit float"/>'
        '<cvParam accession="MS:1000576" name="no compression"/></referenceableParamGroup>'
    )
    text = mzml_text(3).replace(
        '<cvParam accession="MS:1000523" name="float"/><cvParam accession="MS:1000576" name="no compression"/>',
        '<referenceableParamGroupRef ref="numbers"/>',
    )
    (tmp_path / "x.mzML").write_text(mzml_file(text, group))
    (tmp_path / "y.mzML").write_text(mzml_file(mzml_text(3)))
    assert_same(only(read(tmp_path / "x.mzML")).arrays, only(read(tmp_path / "y.mzML")).arrays)


def test_peaks_of_msp_stand_in_a_line_or_many_with_what_they_are(tmp_path: Path) -> None:
    text = 'Name: a b\r\nPrecursorMZ: 300.5\r\nNum peaks: 3\r\n100.5 3 "y1 100.4"; 200.25\t10;\r\n50.125, 1 b1\r\n\r\n'
    (tmp_path / "x.msp").write_text(text)
    found = only(read(tmp_path / "x.msp")).arrays
    assert found["peaks.mz"].tolist() == [50.125, 100.5, 200.25]
    assert found["precursor_mz"] == np.float32(300.5)


def test_spectra_at_the_edges_of_what_is_read_at_once_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {"x.msp": "".join(map(msp_text, range(40))), "x.mzML": mzml_file("".join(map(mzml_text, range(40))))}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        whole = read(tmp_path / name)
        for size in (97, 1001):
            with monkeypatch.context() as patched:
                patched.setattr(spectrum_files, "CHUNK_BYTES", size)
                cut = list(Spectra(tmp_path / name).entries())
            assert [(entry.id, entry.place, entry.origin) for entry in cut if isinstance(entry, Entry)] == [
                (entry.id, entry.place, entry.origin) for entry in whole if isinstance(entry, Entry)
            ]
        assert len(whole) == 40


@pytest.mark.parametrize("end", [None, "MS:1000511", "<precursorList", "</spectrum>"])
@pytest.mark.parametrize("level", [1, 2])
def test_a_truncated_mzml_loses_no_spectrum_without_a_reason(tmp_path: Path, level: int, end: str | None) -> None:
    spectra = [mzml_text(0), mzml_text(1, level=level), mzml_text(2), mzml_text(3)]
    whole = mzml_file("".join(spectra)).replace('count="1"', 'count="4"')
    text = whole if end is None else whole[: whole.index(end, whole.index(spectra[1])) + len(end)]
    (tmp_path / "x.mzML").write_text(text)
    found = read(tmp_path / "x.mzML")
    assert {entry.id for entry in found if isinstance(entry, Entry)} >= {"x.mzML-scan-0"}
    last = found[-1]
    assert isinstance(last, Rejection) == (end is not None)
    if isinstance(last, Rejection):
        assert (last.reason, last.detail.partition(" ")[0]) == (Reason.BAD_ENTRY, "2")


@pytest.mark.parametrize("name", ["example_5_spectra.mgf", "ours.mgf", "ours.msp"])
def test_files_are_read_as_the_original_reads_them(name: str) -> None:
    expected = document("dreams/files/as_read")[name]
    spectra = Spectra(FILES / name)
    entries = [entry for entry in spectra.entries() if isinstance(entry, Entry)]
    headers = [told for _, told in spectra.headers()]
    assert len(entries) == len(headers) == len(expected)
    for entry, told, theirs in zip(entries, headers, expected, strict=True):
        mz, _, count = theirs["spectrum"]
        assert len(entry.arrays["peaks.mz"]) == count
        assert set(np.float32(mz)) <= set(entry.arrays["peaks.mz"])
        assert entry.arrays["precursor_mz"] == np.float32(theirs["precursor_mz"])
        assert entry.arrays["charge"] == theirs["charge"]
        for key in ("name", "smiles", "adduct", "ionmode", "file_name", "scan_number", "feature_id", "FORMULA", "USI"):
            if isinstance(theirs.get(key), (str, int)):
                assert told[key] == str(theirs[key])
        time = theirs["RT"] if "RT" in theirs else 60 * theirs["RETENTIONTIME"]  # theirs leaves minutes as they are
        assert float(told["RT"]) == pytest.approx(time)


@pytest.mark.parametrize("peaks", [100, 60])
def test_what_the_network_is_given_is_the_originals_to_the_bit(tmp_path: Path, peaks: int) -> None:
    inputs = recorded("dreams/inputs")
    path = hdf5_file(tmp_path / "x.h5", inputs["raw.peaks"].numpy(), precursor_mz=inputs["raw.precursor_mz"].numpy())
    entries = [entry for entry in Spectra(path, max_peaks=peaks).entries() if isinstance(entry, Entry)]
    rows = [own_rows(item, peaks) for item in batch_of([entry.arrays for entry in entries]).items[:]]
    found = padded_peaks(rows, peaks + 1)
    assert torch.equal(torch.stack([found.mz_BL, found.intensity_BL], -1), inputs[f"spec_{peaks}"])


def test_the_checks_of_quality_are_the_originals(tmp_path: Path) -> None:
    inputs = recorded("dreams/inputs")
    path = hdf5_file(tmp_path / "x.h5", inputs["raw.peaks"].numpy(), precursor_mz=inputs["raw.precursor_mz"].numpy())
    expected = document("dreams/hparams")["quality"]["A"]
    words = {
        "Number of high": "above 0.1 of the highest",
        "Number of peaks": "peaks, not 3 to 128",
        "Precursor": "above 1000",
    }
    for entry, said in zip(Spectra(path, quality="A").entries(), expected, strict=True):
        assert isinstance(entry, Entry) == (said == "All checks passed")
        if isinstance(entry, Rejection):
            assert next(ours for theirs, ours in words.items() if said.startswith(theirs)) in entry.detail


# ---- labels ----


def test_targets_stand_in_a_table_beside_the_file_and_what_is_not_there_is_not_known(tmp_path: Path) -> None:
    (tmp_path / "x.mgf").write_text("".join(map(mgf_text, range(4))))
    (tmp_path / "labels.csv").write_text("id,logp,qed\ne0,1.5,0.25\ne1,,0.5\ne3,NA,nan\n\n")
    found = read(tmp_path / "x.mgf", labels="labels.csv", target=("logp", "qed"))
    values = np.array([entry.arrays["target"] for entry in found if isinstance(entry, Entry)])
    assert np.array_equal(values, [[1.5, 0.25], [np.nan, 0.5], [np.nan] * 2, [np.nan] * 2], equal_nan=True)
    assert Spectra(tmp_path / "x.mgf", labels="labels.csv", target=("qed",)).files()[-1].name == "labels.csv"


def test_a_table_of_labels_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.mgf").write_text(mgf_text(0))
    for table in (
        b"name,logp\ne0,1\n",
        b"id,qed\ne0,1\n",
        b"id,logp\ne0,high\n",
        b"id,logp\ne0,1\ne0,2\n",
        b"id,logp\n\xff,1\n",
    ):
        (tmp_path / "labels.csv").write_bytes(table)
        with pytest.raises(DataError, match=r"labels\.csv"):
            Spectra(tmp_path / "x.mgf", labels="labels.csv", target=("logp",))
    for options in ({"labels": "none.csv", "target": ("logp",)}, {"labels": "labels.csv"}):
        with pytest.raises(ConfigError):
            Spectra(tmp_path / "x.mgf", **options)


TIMES = {
    "RTINSECONDS=90": 90.0, "RTINMINUTES=1.5": 90.0, "RT=90": 90.0, "RETENTION_TIME=1.5 min": 90.0, "RT=n/a": np.nan
}  # fmt: skip


def test_a_time_of_retention_is_in_seconds_whatever_it_is_written_in(tmp_path: Path) -> None:
    for text, seconds in TIMES.items():
        (tmp_path / "x.mgf").write_text(mgf_text(0).replace("CHARGE", f"{text}\nCHARGE"))
        found = only(read(tmp_path / "x.mgf", retention=True)).arrays["retention_s"]
        np.testing.assert_array_equal(found, np.float32(seconds), err_msg=text)


def test_spectra_of_one_skeleton_are_known_by_one_number(tmp_path: Path) -> None:
    keys = ("UJNSFDHVIBGEJZ-CMRIBGNTSA-N", "UJNSFDHVIBGEJZ-UHFFFAOYSA-N", "CQKBSRPVZZLCJE-UHFFFAOYSA-N", "", "short")
    text = "".join(mgf_text(at).replace("CHARGE", f"INCHIKEY={key}\nCHARGE") for at, key in enumerate(keys))
    (tmp_path / "x.mgf").write_text(text)
    *found, bad = read(tmp_path / "x.mgf", molecule="inchikey")
    one, same, other, none = (int(entry.arrays["molecule"]) for entry in found if isinstance(entry, Entry))
    assert one == same != other
    assert none == 0
    assert isinstance(bad, Rejection)


def test_a_spectrum_that_never_ends_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (spectrum_files, mzml):
        monkeypatch.setattr(module, "MOST_BYTES", 10_000)
        monkeypatch.setattr(module, "CHUNK_BYTES", 1000)
    endless = msp_text(0).strip() + "\n1 1" * 20_000 + "\n\n"
    (tmp_path / "x.msp").write_text(endless + msp_text(1))
    (tmp_path / "x.mzML").write_text(mzml_file("<spectrum " + "x" * 60_000 + mzml_text(1)))
    for name in ("x.msp", "x.mzML"):
        found = list(Spectra(tmp_path / name).entries())
        assert isinstance(found[0], Rejection)
        assert isinstance(found[-1], Entry)
