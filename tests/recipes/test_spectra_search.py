"""Spectra from files to a search: embeddings are learned, a library is embedded, and a query is looked up in it."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from pipeline.readers import made
from tests.recipes.projects import SPECTRA, ran
from tests.recipes.projects import write as write_project
from tests.testkit.command import Command

pytestmark = [pytest.mark.timeout(900), pytest.mark.nightly]  # they train for real

SETS = SPECTRA.sets(
    "data.reader=pipeline.readers.spectrum_triplets:SpectrumTriplets",
    "data.options={molecule: INCHIKEY}",
    "train.task=pipeline.tasks.spectra_finetune:SpectraContrast",
    "train.options.head=embedding",
    "train.frozen=[]",
    "train.effective_batch=4",
)


def test_a_library_is_embedded_and_a_query_finds_itself_in_it(
    pipeline: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_project(SPECTRA, tmp_path)
    monkeypatch.chdir(folder)
    made.molecules(folder / "data" / "spectra.mgf", 90)
    done = ran(pipeline, SETS)
    assert done.code == 0, done.err
    (figures,) = (json.loads(path.read_text()) for path in folder.glob("models/*/evaluations/*.json"))
    assert 0 <= figures["evaluation"]["figures"]["nearest_is_same_molecule"] <= 1

    done = ran(pipeline, [*SETS, "--set", "train.predict.split=null"], stage="predict")
    assert done.code == 0, done.err
    (library,) = folder.glob("predictions/*/embeddings.npy")
    with library.with_suffix(".csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 90
    assert rows[7]["id"] == "made-0000007"
    assert rows[7]["inchikey"].endswith("-UHFFFAOYSA-N")

    made.molecules(folder / "data" / "query.mgf", 4)
    options = f"train.predict.options={{library: {library}, top: 2}}"
    words = [*SETS, "--set", "data.path=data/query.mgf", "--set", options]
    (model,) = folder.glob("models/*/prepared.json")
    done = ran(pipeline, [*words, "--set", f"train.predict.checkpoint={model.parent}"], stage="predict")
    assert done.code == 0, done.err
    (matches,) = folder.glob("predictions/*query*/matches.tsv")
    with matches.open(newline="") as file:
        found = list(csv.DictReader(file, delimiter="\t"))
    assert [(row["index"], row["topk"]) for row in found] == [(str(at), rank) for at in range(4) for rank in "12"]
    for row in found[::2]:
        assert float(row["DreaMS_similarity"]) == pytest.approx(1, abs=1e-5)
        assert row["ref_id"] == row["id"]
        assert row["ref_inchikey"] == row["inchikey"]
