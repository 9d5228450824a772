"""Files of peptides as their fields have them, read as the original reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from pipeline.readers import peptides
from pipeline.readers.entry import UnusableEntry
from pipeline.readers.peptide_spectra import PeptideSpectra, library_headers
from pipeline.readers.peptides import residue_codes
from pipeline.records import Entry, Rejection
from tests.readers.compared import assert_same
from tests.reference import FOLDER, document

FILES = FOLDER / "peptrm" / "files"
AS_PUBLISHED = {"least_peaks": 10, "shortest": 7, "longest": 30}
SPECIES = ("H.-sapiens.mgf", "Vigna-mungo.mgf")


def letters(entry: Entry) -> str:
    return peptides.peptide_text(peptides.letters_only(entry.arrays["peptide.residue"]))


def parted(reader: PeptideSpectra) -> tuple[list[Entry], list[Rejection]]:
    found = list(reader.entries())
    return [one for one in found if isinstance(one, Entry)], [one for one in found if isinstance(one, Rejection)]


LIBRARIES = {  # file → which of what the original read, and the options
    "nine-species-main/H.-sapiens.mgf": ("nine_species", {}),
    "nine-species-main/Vigna-mungo.mgf": ("nine_species", {}),
    "proteometools/library.msp": ("proteometools", {"id": "NAME"}),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_files_are_read_as_the_original_reads_them(name: str) -> None:
    part, options = LIBRARIES[name]
    known = document("peptrm/as_read")[part]
    if part == "nine_species":
        known = [one for one in known if one["scan_id"].startswith(Path(name).stem)]
    reader = PeptideSpectra(FILES / name, **AS_PUBLISHED, **options)
    entries, rejections = parted(reader)
    assert [one.id for one in entries] == [one["scan_id"] for one in known]
    for entry, wanted in zip(entries, known, strict=True):
        charge = int(entry.arrays["charge"])
        assert (letters(entry), charge) == (wanted["sequence"], wanted["charge"])
        assert len(entry.arrays["peaks.mz"]) == wanted["peaks"]
        mass = charge * (float(entry.arrays["precursor_mz"]) - 1.00727)
        assert mass == pytest.approx(wanted["precursor_mass"], rel=2e-7)
        assert_same(reader.read(entry.place), entry.arrays)
    wanted_ids = ["Vigna-mungo:2", "Vigna-mungo:3"] if "Vigna" in name else []  # too short, and of a letter X
    assert [one.id for one in rejections] == wanted_ids


@pytest.mark.parametrize(
    ("file", "wanted"),
    [
        ("deepnovo", ["LQAVTDDHIR", "M[Oxidation]DEELAAIVGVR", "GGC[Carbamidomethyl]EAIVDTGTSLLVGPVDEVR"]),
        ("massivekb", ["LQAVTDDHIR", "M[Oxidation]DEELAAIVGVR", "[+25.979265]-QAEELNR"]),
        ("proforma", ["LQAVTDDHIR", "M[Oxidation]DEELAAIVGVR", "GGC[Carbamidomethyl]EAIVDTGTSLLVGPVDEVR"]),
    ],
)
def test_every_way_to_write_modifications_is_read_and_weighs_what_the_precursor_does(
    file: str, wanted: list[str]
) -> None:
    entries, rejections = parted(PeptideSpectra(FILES / "other" / f"{file}.mgf", **AS_PUBLISHED))
    assert not rejections
    assert [peptides.peptide_text(one.arrays["peptide.residue"]) for one in entries] == wanted
    for entry in entries:
        charge, mz = int(entry.arrays["charge"]), float(entry.arrays["precursor_mz"])
        off = peptides.mass(entry.arrays["peptide.residue"]) - charge * (mz - peptides.PROTON)
        assert abs(off) < 0.006  # as far as two decimals go


def test_modifications_in_a_comment_are_the_peptides() -> None:
    for name, comment, wanted in (
        ("AMCK/2", "Parent=300.5 Mods=0", "AMCK"),
        ("AMCK/2_1", "Mods=1/1,M,Oxidation", "AM[Oxidation]CK"),
        ("AMCK/3", "Mods=2(1,M,Oxidation)(2,C,CAM)", "AM[Oxidation]C[Carbamidomethyl]K"),
        ("AMCK/3", "Mods=1/-1,A,Acetyl", "[Acetyl]-AMCK"),
        ("AMCK/3", "Mods=1/0,A,Acetyl", "[Acetyl]-AMCK"),
    ):
        headers = library_headers({"NAME": name, "COMMENT": comment})
        assert peptides.peptide_text(residue_codes(headers["SEQ"])) == wanted
        assert headers["CHARGE"] == name[5]


def test_modifications_that_do_not_fit_are_refused() -> None:
    for comment in ("Mods=2/1,M,Oxidation", "Mods=1/9,M,Oxidation"):
        with pytest.raises(UnusableEntry):
            library_headers({"NAME": "AMCK/2", "COMMENT": comment})


def test_a_usi_gives_the_peptide_of_a_spectrum(tmp_path: Path) -> None:
    path = tmp_path / "usi.mgf"
    usi = "mzspec:PXD000561:run:scan:17555:VLHPLEGAVVIIFK/2"
    path.write_text(f"BEGIN IONS\nTITLE=a\nPEPMASS=767.96\nCHARGE=2+\nUSI={usi}\n100 1\nEND IONS\n")
    (entry,) = parted(PeptideSpectra(path, peptide="USI"))[0]
    assert letters(entry) == "VLHPLEGAVVIIFK"


def test_spectra_without_a_peptide_are_taken_where_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "unknown.mgf"
    path.write_text("BEGIN IONS\nTITLE=a\nPEPMASS=767.96\nCHARGE=2+\n100 1\nEND IONS\n")
    assert not parted(PeptideSpectra(path))[0]
    (entry,) = parted(PeptideSpectra(path, unknown=True))[0]
    assert "peptide.residue" not in entry.arrays


def test_one_species_is_left_out_for_the_test() -> None:
    reader = PeptideSpectra(FILES / "nine-species-main", test_file=SPECIES[0], val_file=SPECIES[1])
    splits = {one.id.partition(":")[0]: one.split for one in parted(reader)[0]}
    assert splits == {"H.-sapiens": "test", "Vigna-mungo": "val"}
    only = PeptideSpectra(FILES / "nine-species-main", test_file=SPECIES[0])
    assert {one.split for one in parted(only)[0]} == {"test", "train"}
    with pytest.raises(ConfigError, match=r"H.-sapiens.mgf, Vigna-mungo.mgf"):
        PeptideSpectra(FILES / "nine-species-main", test_file="human.mgf")
