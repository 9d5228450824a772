"""What predict leaves of peptides: from files of the field to tables that its programs read."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pipeline.readers.peptide_spectra import PeptideSpectra
from pipeline.readers.peptides import residue_codes
from pipeline.records import Entry
from pipeline.tasks.denovo_recursive import DenovoRecursive
from pipeline.tasks.peptides.published_peptides import PSM_COLUMNS, modifications_text
from tests.reference import FOLDER
from tests.tasks.cases import peptide
from tests.tasks.items import double
from tests.tasks.originals import PEPTRM, peptide_batch
from tests.tasks.reader_items import batch_of

HERE = DenovoRecursive(width=40, heads=2, encoder_layers=1, decoder_layers=1, latent_steps=1, supervision_steps=2)


class Column(list):
    """Values as predict gives them, each with its item's id."""

    def __init__(self, values, ids):
        super().__init__(values)
        self.ids = ids

    def id(self, place):
        return self.ids[place]


def outputs_of(task, said, truths, ids):
    """Return outputs of a model that says these peptides of the spectra of others, a probability each."""
    values = [
        peptide(true) if true else peptide(text, "peptide.residue")
        for (text, _), true in zip(said, truths, strict=True)
    ]
    given = task.collate(batch_of(values).items[:], np.random.default_rng(0))
    logits = torch.full((2, len(said), task.longest, len(task.vocabulary.names)), 0.0)
    for place, (text, sure) in enumerate(said):
        letter_R = [*task.vocabulary.letters(residue_codes(text))] if text else []
        row_L = torch.tensor([*letter_R, *[2] * (task.longest - len(letter_R))])
        logits[:, place, torch.arange(task.longest), row_L] = sure
    found = task.outputs(lambda _spectra: logits, given)
    return {name: Column([one.numpy() for one in column], ids) for name, column in found.items()}


def published(task, folder, said, truths, ids=("a", "b", "c"), reading=None):
    ids = list(ids)[: len(said)]
    outputs = outputs_of(task, said, truths, ids)
    paths = task.publish(folder, outputs, iter(()), reading)
    with (folder / "peptides.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return rows, paths


SAID = [("[Acetyl]-M[Oxidation]PEK", 9.0), ("PETPIDE", 6.0), ("", 5.0)]
TRUE = ["[Acetyl]-M[Oxidation]PEK", "PEPTIDE", "WYFR"]


def test_each_spectrum_has_its_peptide_its_score_and_the_error_of_its_mass(tmp_path):
    rows, paths = published(HERE, tmp_path, SAID, TRUE)
    assert [row["id"] for row in rows] == ["a", "b", "c"]
    assert [row["peptide"] for row in rows] == ["[Acetyl]-M[Oxidation]PEK", "PETPIDE", ""]
    assert [row["true_peptide"] for row in rows] == TRUE
    assert [row["right"] for row in rows] == ["yes", "no", "no"]
    assert float(rows[0]["score"]) > float(rows[1]["score"]) > 0.9
    assert len(rows[0]["residue_scores"].split()) == 5
    assert abs(float(rows[0]["error_ppm"])) < 0.5
    assert rows[0]["precursor_mz"][:-1] == rows[0]["computed_mz"][:-1]
    assert [path.name for path in paths] == ["peptides.csv", "peptides.mzTab", "pictures.json"]
    (picture,) = json.loads((tmp_path / "pictures.json").read_text())
    assert picture["lines"][0]["points"][0] == [pytest.approx(100 / 3), 100.0]


def test_the_mztab_has_a_line_for_each_peptide_and_says_what_its_columns_and_modifications_are(tmp_path):
    runs = [(Path("/data/one.mgf"), [("a", {}), ("c", {})]), (Path("/data/2 two.mgf"), [("b", {})])]
    published(HERE, tmp_path, SAID, TRUE, reading=SimpleNamespace(runs=lambda: runs))
    lines = [line.split("\t") for line in (tmp_path / "peptides.mzTab").read_text().splitlines()]
    head = {line[1]: line[2] for line in lines if line[0] == "MTD"}
    assert (head["mzTab-version"], head["mzTab-type"]) == ("1.0.0", "Identification")
    assert head["variable_mod[1]"] == "[UNIMOD, UNIMOD:35, Oxidation, ]"
    (columns,) = [line[1:] for line in lines if line[0] == "PSH"]
    assert columns == list(PSM_COLUMNS)
    rows = [dict(zip(columns, line[1:], strict=True)) for line in lines if line[0] == "PSM"]
    assert [row["sequence"] for row in rows] == ["MPEK", "PETPIDE"]
    assert rows[0]["modifications"] == "0-UNIMOD:1,1-UNIMOD:35"
    assert rows[1]["modifications"] == "null"
    assert rows[0]["opt_ms_run[1]_proforma"] == "[Acetyl]-M[Oxidation]PEK"
    assert len(rows[0]["opt_ms_run[1]_aa_scores"].split(",")) == 5
    assert [row["spectra_ref"] for row in rows] == ["ms_run[1]:title=a", "ms_run[2]:title=b"]
    locations = ["file:///data/one.mgf", "file:///data/2%20two.mgf"]
    assert [head[f"ms_run[{run}]-location"] for run in (1, 2)] == locations
    assert not any(re.search(r"^(MTD|PSH|PSM|$)", line[0]) is None for line in lines)


def test_spectra_without_known_peptides_have_tables_and_no_picture(tmp_path):
    rows, paths = published(HERE, tmp_path, SAID[:2], [None, None])
    assert [row["right"] for row in rows] == ["", ""]
    assert [path.name for path in paths] == ["peptides.csv", "peptides.mzTab"]


def test_a_peptide_of_the_right_mass_is_searched_where_the_likeliest_has_another(tmp_path):
    task = replace(HERE, tolerance_ppm=20.0)
    (row,), _ = published(task, tmp_path, [("PEPTIDW", 3.0)], ["PEPTIDE"])
    assert abs(float(row["error_ppm"])) <= 20
    assert row["searched_by_mass"] == "yes"
    (plain,), _ = published(HERE, tmp_path, [("PEPTIDW", 3.0)], ["PEPTIDE"])
    assert plain["peptide"] == "PEPTIDW"
    assert float(row["rank_score"]) > float(plain["score"]) / 2


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("PEK", ""),
        ("AM[Oxidation]C[Carbamidomethyl]", "2-UNIMOD:35,3-UNIMOD:4"),
        ("[+25.979265]-QN[Deamidated]Q[Deamidated]", "0-CHEMMOD:+25.979265,2-UNIMOD:7,3-UNIMOD:7"),
    ],
)
def test_places_of_modifications_are_counted_from_one_and_the_terminus_is_zero(text, told):
    assert modifications_text(residue_codes(text)) == told


def test_what_is_made_of_the_files_is_what_the_original_makes_of_them():
    folder = FOLDER / "peptrm/files" / "nine-species-main"
    arrays = [
        entry.arrays
        for name in ("Vigna-mungo.mgf", "H.-sapiens.mgf")
        for entry in PeptideSpectra(folder / name, least_peaks=10, shortest=7, longest=30).entries()
        if isinstance(entry, Entry)
    ]
    found, wanted = double(PEPTRM.collate(batch_of(arrays).items[:], np.random.default_rng(0))), double(peptide_batch())
    most = found.spectra.mz_BP.shape[1]
    for name in ("mz_BP", "intensity_BP", "is_peak_BP"):
        there, rest = getattr(wanted.spectra, name)[:, :most], getattr(wanted.spectra, name)[:, most:]
        assert torch.allclose(getattr(found.spectra, name).double(), there.double(), rtol=1e-6, atol=0)
        assert not rest.any()
    assert torch.equal(found.letter_BL, wanted.letter_BL)
    assert torch.equal(found.spectra.charge_B, wanted.spectra.charge_B)
    assert torch.allclose(found.spectra.precursor_mz_B, wanted.spectra.precursor_mz_B, rtol=1e-6, atol=0)
    assert torch.allclose(found.mass_B, wanted.mass_B, rtol=1e-6, atol=0)
    assert found.known == wanted.known
