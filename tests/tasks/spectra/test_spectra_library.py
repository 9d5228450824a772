"""Embeddings as a library: written, found again, and searched as the original searches it."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from pipeline.errors import ConfigError, DataError
from pipeline.readers.spectra import Spectra
from pipeline.tasks.spectra.spectra_library import (
    MATCHES,
    ROWS,
    VECTORS,
    publish_library,
    read_library,
)
from pipeline.tasks.spectra.spectra_measures import neighbour_figures
from pipeline.tasks.task_parts import nearest_vectors, unit_rows
from tests.reference import FOLDER, recorded

RNG = np.random.default_rng(0)


class Column(list[Any]):
    """An output by items, as tasks are given it."""

    def __init__(self, ids: list[str], values: Any) -> None:
        super().__init__(values)
        self._ids = ids

    def id(self, place: int) -> str:
        return self._ids[place]


def lines(path: Path, delimiter: str = ",") -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file, delimiter=delimiter))


def library(folder: Path, vectors: Any, prefix: str = "s", described: Any = None, **of: Any) -> list[Path]:
    folder.mkdir(exist_ok=True)
    column = Column([f"{prefix}{place}" for place in range(len(vectors))], np.asarray(vectors, np.float32))
    return publish_library(folder, {"embedding": column}, described, of.get("library", ""), of.get("most", 10))


def test_a_search_finds_what_the_originals_finds(tmp_path: Path) -> None:
    outputs = recorded("dreams/outputs")
    vectors = outputs["contrastive.prediction"].numpy()
    library(tmp_path / "library", vectors)
    written = library(tmp_path / "query", vectors[:4], "q", library=str(tmp_path / "library" / VECTORS), most=3)
    assert [path.name for path in written] == [MATCHES, VECTORS, ROWS]
    found = lines(written[0], "\t")
    assert [int(row["ref_index"]) for row in found] == outputs["search.index"].flatten().tolist()
    similarity = [float(row["DreaMS_similarity"]) for row in found]
    assert similarity == pytest.approx(outputs["search.similarity"].flatten().tolist(), abs=1e-6)
    assert [(row["index"], row["topk"], row["id"], row["ref_id"]) for row in found[:2]] == [
        ("0", "1", "q0", "s0"),
        ("0", "2", "q0", "s6"),
    ]


def test_a_library_that_dreams_wrote_is_searched_as_it_is(tmp_path: Path) -> None:
    path = FOLDER / "dreams/files" / "library.hdf5"
    theirs = read_library(path)
    assert theirs.vector_MD.shape == (5, 48)
    (first, *_) = lines(library(tmp_path, theirs.vector_MD[2:3], library=str(path), most=2)[0], "\t")
    assert (first["ref_name"], first["ref_precursor_mz"], first["topk"]) == ("1373215-15-6", "485.21947", "1")
    assert float(first["DreaMS_similarity"]) == pytest.approx(1)


def test_a_table_of_embeddings_says_what_the_file_says_of_each_spectrum(tmp_path: Path) -> None:
    spectra = Spectra(FOLDER / "dreams/files" / "ours.mgf")
    ids = [entry.id for entry in spectra.entries()]
    publish_library(tmp_path, {"embedding": Column(ids, RNG.normal(size=(3, 4)))}, spectra, "", 1)
    rows = lines(tmp_path / ROWS)
    assert [row["name"] for row in rows] == ["Caffeine", "Phenylalanine", "unknown feature"]
    assert (rows[0]["id"], rows[0]["RT"], rows[0]["charge"], rows[0]["ionmode"]) == ("Caffeine", "241.3", "1", "+")
    assert rows[2]["smiles"] == ""
    assert np.load(tmp_path / VECTORS).dtype == np.float32


def test_what_is_found_does_not_depend_on_how_much_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, queries = RNG.normal(size=(57, 6)).astype(np.float32), RNG.normal(size=(13, 6)).astype(np.float32)
    vectors[40] = 2 * vectors[3]  # equal cosines: the first goes before
    queries[0] = vectors[3]
    cosine_NM = unit_rows(queries, range(13)) @ unit_rows(vectors, range(57)).T
    expected = np.argsort(-cosine_NM.round(5), axis=1, kind="stable")[:, :5]
    for block in (4096, 7, 1):
        monkeypatch.setattr("pipeline.tasks.task_parts.BLOCK", block)
        places, cosines = map(np.stack, zip(*nearest_vectors(list(queries), vectors, 5), strict=True))
        assert places[1:].tolist() == expected[1:].tolist()
        assert sorted(places[0, :2].tolist()) == [3, 40]
        assert np.allclose(cosines, np.take_along_axis(cosine_NM, places, 1), atol=1e-6)


def test_what_is_no_library_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="library not found"):
        read_library(tmp_path / VECTORS)
    (tmp_path / VECTORS).write_bytes(b"x")
    with pytest.raises(DataError, match="not a library"):
        read_library(tmp_path / VECTORS)
    np.save(tmp_path / VECTORS, np.array([{}], object), allow_pickle=True)
    with pytest.raises(DataError, match="not a library"):
        read_library(tmp_path / VECTORS)
    library(tmp_path, np.eye(3))
    with pytest.raises(DataError, match="predict the library with the same model"):
        read_library(tmp_path / VECTORS, 7)
    (tmp_path / ROWS).write_text("id\ns0\n")
    with pytest.raises(DataError, match="3 vectors, but 1 rows"):
        read_library(tmp_path / VECTORS)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["name"] = ["a"]
    with pytest.raises(DataError, match="no dataset 'DreaMS_embedding'"):
        read_library(tmp_path / "x.h5")


def test_neighbours_are_of_the_same_molecule_as_often_as_they_are() -> None:
    vectors = np.array([[1, 0], [1, 0.1], [0, 1], [1, 0.3], [0.1, 1.0]], np.float32)
    molecules, precursors = [7, 7, 8, 9, 7], [100.0, 100.0005, 100.0, 200.0, 300.0]
    figures = neighbour_figures(list(vectors), molecules, precursors)
    assert figures["nearest_is_same_molecule"] == pytest.approx(2 / 3)  # of the three whose molecule has another
    assert figures["pairs_within_10_ppm"] == 3
    assert figures["same_molecule_auroc"] == 1
    assert neighbour_figures(list(vectors), [0] * 5, precursors) == {}
