"""Spectra of MSP and mzML as of MGF: what their files say, and what is damaged in them."""

from __future__ import annotations

import base64
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.errors import ConfigError, DataError
from pipeline.readers.spectra import Spectra
from pipeline.readers.spectrum_files import mgf, msp, mzml
from pipeline.records import Entry, Reason, Rejection
from pipeline.tasks.spectra.peak_batch import own_rows, padded_peaks
from tests.readers.compared import assert_same, hdf5_file
from tests.reference import FOLDER, document, recorded
from tests.tasks.reader_items import batch_of

FILES = FOLDER / "dreams" / "files"
Peaks = Sequence[tuple[float, float]]
PEAKS = ((100.5, 3.0), (200.25, 10.0), (50.125, 1.0))


def read(path: Path, **options: Any) -> list[Entry | Rejection]:
    """Return what is in a file, each entry read a second time as well."""
    spectra = Spectra(path, **options)
    found = list(spectra.entries())
    for entry in found:
        if isinstance(entry, Entry):
            assert_same(spectra.read(entry.place), entry.arrays)
    return found


def mgf_text(number: int, peaks: Peaks = PEAKS) -> str:
    lines = "\n".join(f"{mz} {high}" for mz, high in peaks)
    return f"BEGIN IONS\nTITLE=s{number}\nPEPMASS={300 + number / 10}\nCHARGE=1+\n{lines}\nEND IONS\n\n"


def msp_text(number: int, peaks: Peaks = PEAKS) -> str:
    lines = "\n".join(f"{mz} {high}" for mz, high in peaks)
    return f"NAME: s{number}\nPRECURSORMZ: {300 + number / 10}\nCHARGE: 1\nNum Peaks: {len(peaks)}\n{lines}\n\n"


def binary(values: Sequence[float], accession: str, dtype: str = "<f8", *, packed: bool = False) -> str:
    data = np.array(values, dtype).tobytes()
    text = base64.b64encode(zlib.compress(data) if packed else data).decode()
    kind = {"<f8": "MS:1000523", "<f4": "MS:1000521"}[dtype]
    how = ("MS:1000574", "zlib compression") if packed else ("MS:1000576", "no compression")
    return (
        f'<binaryDataArray><cvParam accession="{kind}" name="float"/><cvParam accession="{how[0]}" name="{how[1]}"/>'
        f'<cvParam accession="{accession}" name="array"/><binary>{text}</binary></binaryDataArray>'
    )


def mzml_text(number: int, peaks: Peaks = PEAKS, level: int = 2, **how: Any) -> str:
    arrays = (binary([peak[place] for peak in peaks], f"MS:100051{4 + place}", **how) for place in (0, 1))
    return (
        f'<spectrum index="{number}" id="scan={number}" defaultArrayLength="{len(peaks)}">\n'
        f'<cvParam accession="MS:1000511" name="ms level" value="{level}"/>\n'
        '<precursorList><precursor><selectedIonList><selectedIon><cvParam accession="MS:1000744" name="selected ion" '
        f'value="{300 + number / 10}"/><cvParam accession="MS:1000041" name="charge state" value="1"/></selectedIon>'
        f"</selectedIonList></precursor></precursorList>\n<binaryDataArrayList>{''.join(arrays)}</binaryDataArrayList>\n"
        "</spectrum>\n"
    )


def mzml_file(text: str, before: str = "") -> str:
    spectra = f'<run><spectrumList count="1">\n{text}</spectrumList></run>'
    return f'<mzML xmlns="http://psi.hupo.org/ms/mzml">{before}{spectra}</mzML>\n'


def only(found: list[Entry | Rejection]) -> Entry:
    (entry,) = found
    assert isinstance(entry, Entry), entry
    return entry


# ---- what is in them ----


def test_the_same_spectrum_is_the_same_in_every_form(tmp_path: Path) -> None:
    (tmp_path / "x.mgf").write_text(mgf_text(7))
    (tmp_path / "x.msp").write_text(msp_text(7))
    (tmp_path / "x.mzML").write_text(mzml_file(mzml_text(7)))
    (tmp_path / "y.mzML").write_text(mzml_file(mzml_text(7, packed=True)))
    first, *others = (only(read(tmp_path / name)) for name in ("x.mgf", "x.msp", "x.mzML", "y.mzML"))
    assert [entry.id for entry in (first, *others)] == ["s7", "x.msp-0", "x.mzML-scan-7", "y.mzML-scan-7"]
    for other in others:
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
        module = "msp" if name.endswith("msp") else "mzml"
        for size in (97, 1001):
            with monkeypatch.context() as patched:
                patched.setattr(f"pipeline.readers.spectrum_files.{module}.CHUNK_BYTES", size)
                cut = list(Spectra(tmp_path / name).entries())
            assert [(entry.id, entry.place, entry.origin) for entry in cut if isinstance(entry, Entry)] == [
                (entry.id, entry.place, entry.origin) for entry in whole if isinstance(entry, Entry)
            ]
        assert len(whole) == 40


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


def test_the_three_forms_of_the_original_have_the_same_spectra() -> None:
    found = [read(FILES / f"ours.{form}", retention=True) for form in ("mgf", "msp", "mzML")]
    for one, two, three in zip(*found, strict=True):
        assert isinstance(one, Entry)
        assert isinstance(two, Entry)
        assert isinstance(three, Entry)
        for other in (two, three):
            times = [arrays.pop("retention_s") for arrays in (dict(one.arrays), dict(other.arrays))]
            assert times[0] == pytest.approx(times[1], abs=0.01)  # MSP has minutes, of four digits
            assert_same(*({k: v for k, v in entry.arrays.items() if k != "retention_s"} for entry in (one, other)))


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
    (tmp_path / "labels.csv").write_text("id,logp,qed\ns0,1.5,0.25\ns1,,0.5\ns3,NA,nan\n")
    found = read(tmp_path / "x.mgf", labels="labels.csv", target=("logp", "qed"))
    values = np.array([entry.arrays["target"] for entry in found if isinstance(entry, Entry)])
    assert np.array_equal(values, [[1.5, 0.25], [np.nan, 0.5], [np.nan] * 2, [np.nan] * 2], equal_nan=True)
    assert Spectra(tmp_path / "x.mgf", labels="labels.csv", target=("qed",)).files()[-1].name == "labels.csv"


TABLES = {
    "no id": ("name,logp\ns0,1\n", "no column 'id'; there are: name, logp"),
    "no column": ("id,qed\ns0,1\n", "no column 'logp'"),
    "no number": ("id,logp\ns0,high\n", "logp is no number: 'high'"),
    "twice": ("id,logp\ns0,1\ns0,2\n", "s0 stands twice"),
    "no text": (b"id,logp\n\xff,1\n", "no table"),
}


@pytest.mark.parametrize(("table", "said"), TABLES.values(), ids=TABLES)
def test_a_table_that_is_none_is_refused(tmp_path: Path, table: str | bytes, said: str) -> None:
    (tmp_path / "x.mgf").write_text(mgf_text(0))
    (tmp_path / "labels.csv").write_bytes(table if isinstance(table, bytes) else table.encode())
    with pytest.raises(DataError, match=said):
        Spectra(tmp_path / "x.mgf", labels="labels.csv", target=("logp",))


def test_a_table_that_is_not_there_and_one_without_targets_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.mgf").write_text(mgf_text(0))
    with pytest.raises(ConfigError, match="no such file"):
        Spectra(tmp_path / "x.mgf", labels="none.csv", target=("logp",))
    with pytest.raises(ConfigError, match=r"columns of data\.options\.labels"):
        Spectra(tmp_path / "x.mgf", labels="none.csv")
    with pytest.raises(ConfigError, match="one of A"):
        Spectra(tmp_path / "x.mgf", quality="Z")


TIMES = {
    "RTINSECONDS=90": 90.0, "RTINMINUTES=1.5": 90.0, "RT=90": 90.0, "RETENTION_TIME=1.5 min": 90.0, "RT=n/a": np.nan
}  # fmt: skip


@pytest.mark.parametrize(("text", "seconds"), TIMES.items(), ids=TIMES)
def test_a_time_of_retention_is_in_seconds_whatever_it_is_written_in(tmp_path: Path, text: str, seconds: float) -> None:
    (tmp_path / "x.mgf").write_text(mgf_text(0).replace("CHARGE", f"{text}\nCHARGE"))
    found = only(read(tmp_path / "x.mgf", retention=True)).arrays["retention_s"]
    assert found == np.float32(seconds) or (np.isnan(seconds) and np.isnan(found))


def test_spectra_of_one_skeleton_are_known_by_one_number(tmp_path: Path) -> None:
    keys = ("UJNSFDHVIBGEJZ-CMRIBGNTSA-N", "UJNSFDHVIBGEJZ-UHFFFAOYSA-N", "CQKBSRPVZZLCJE-UHFFFAOYSA-N", "", "short")
    text = "".join(mgf_text(at).replace("CHARGE", f"INCHIKEY={key}\nCHARGE") for at, key in enumerate(keys))
    (tmp_path / "x.mgf").write_text(text)
    *found, bad = read(tmp_path / "x.mgf", molecule="inchikey")
    one, same, other, none = (int(entry.arrays["molecule"]) for entry in found if isinstance(entry, Entry))
    assert one == same != other
    assert none == 0
    assert isinstance(bad, Rejection)
    assert "no InChI key: 'short'" in bad.detail


# ---- what is damaged ----

Damage = dict[str, tuple[str, str, str]]  # what is replaced, a pattern, by what, and what is said then
OF_PEAKS: Damage = {
    "letter": ("100.5 3.0", "1o0.5 3.0", "not a peak"),
    "negative": ("100.5 ", "-100.5 ", "the m/z of peak 1 is -100.5"),
    "nan": ("100.5 3.0", "100.5 nan", "the intensity of peak 1 is nan"),
    "one number": ("100.5 3.0", "100.5", "not a peak"),
    "zeros": (r" (3|10|1)\.0\n", " 0\n", "every intensity is 0"),
}
MGF_DAMAGE: Damage = {
    **OF_PEAKS,
    "no peaks": (r"\n\d[^E]*", r"\n", "no peaks"),
    "no precursor": ("PEPMASS", "X", "the precursor's m/z is missing"),
    "precursor": ("PEPMASS=", "PEPMASS=x", "the precursor's m/z is no number"),
    "charge": (r"1\+", "one", "a charge that does not parse"),
    "no end": ("END IONS\n", "", "no END IONS"),
}
MSP_DAMAGE: Damage = {
    **OF_PEAKS,
    "no precursor": ("PRECURSORMZ", "X", "the precursor's m/z is missing"),
    "precursor": ("MZ: ", "MZ: x", "the precursor's m/z is no number"),
    "charge": ("CHARGE: 1", "CHARGE: one", "a charge that does not parse"),
    "lost line": ("100.5 3.0\n", "", "Num Peaks is '3', and there are 2"),
    "no count": (r"(?s)Num.*", "\n", "no line 'Num Peaks: n'"),
}
NUMPRESS = "MS-Numpress linear prediction compression"
MZML_DAMAGE: Damage = {
    "no end": ("</spectrum>", "", "no </spectrum>"),
    "no XML": ("</precursorList>", "", "no XML"),
    "entity": ('name="selected', 'name="&x;selected', "no XML"),
    "no precursor": ("MS:1000744", "MS:0", "the precursor's m/z is missing"),
    "charge": ('state" value="1"', 'state" value="one"', "a charge that does not parse"),
    "base64": ("<binary>", "<binary>?", "cannot be unpacked"),
    "no array": ("MS:1000514", "MS:0", "no m/z array"),
    "count": ('Length="3"', 'Length="4"', "defaultArrayLength is '4', and there are 3 peaks"),
    "numpress": ('MS:1000576" name="no compression', f'MS:1002312" name="{NUMPRESS}', "packed by MS-Numpress"),
    "profile": ("<precursorList>", '<cvParam accession="MS:1000128" name="profile"/><precursorList>', "a profile"),
}
DAMAGES = {".mgf": (mgf_text, MGF_DAMAGE), ".msp": (msp_text, MSP_DAMAGE), ".mzML": (mzml_text, MZML_DAMAGE)}


@pytest.mark.parametrize("suffix", DAMAGES)
def test_of_a_thousand_spectra_ten_are_damaged_in_ten_ways_and_all_others_are_read(tmp_path: Path, suffix: str) -> None:
    text_of, damage = DAMAGES[suffix]
    assert len(damage) == 10
    texts = [text_of(number) for number in range(1000)]
    places = {name: 50 + 100 * at for at, name in enumerate(damage)}
    for name, (pattern, other, _) in damage.items():
        changed = re.sub(pattern, other, texts[places[name]])
        assert changed != texts[places[name]]
        texts[places[name]] = changed
    path = tmp_path / f"x{suffix}"
    path.write_text("".join(texts) if suffix != ".mzML" else mzml_file("".join(texts)))
    found = read(path)
    good, bad = ([one for one in found if isinstance(one, kind)] for kind in (Entry, Rejection))
    assert (len(good), len(bad)) == (990, 10)
    assert {entry.arrays["precursor_mz"].item() for entry in good} == {
        float(np.float32(300 + number / 10)) for number in range(1000) if number not in places.values()
    }
    assert Counter(one.reason for one in bad) == {Reason.BAD_ENTRY: 10}
    for rejection, (_, _, said) in zip(bad, damage.values(), strict=True):
        assert said in rejection.detail


@pytest.mark.parametrize("suffix", [".msp", ".mzML"])
def test_a_file_without_spectra_is_a_rejection(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    path.write_text("\n")
    (bad,) = read(path)
    assert isinstance(bad, Rejection)
    assert "no spectra" in bad.detail


def test_a_spectrum_that_never_ends_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (mgf, msp, mzml):
        monkeypatch.setattr(module, "MOST_BYTES", 10_000)
        monkeypatch.setattr(module, "CHUNK_BYTES", 1000)
    endless = msp_text(0).strip() + "\n1 1" * 20_000 + "\n\n"
    (tmp_path / "x.msp").write_text(endless + msp_text(1))
    (tmp_path / "x.mzML").write_text(mzml_file("<spectrum " + "x" * 60_000 + mzml_text(1)))
    for name in ("x.msp", "x.mzML"):
        found = list(Spectra(tmp_path / name).entries())
        assert isinstance(found[0], Rejection)
        assert isinstance(found[-1], Entry)
