"""Libraries of ligands: ranks and figures as the original's evaluation has them, ties, and files that are wrong."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.errors import ConfigError, DataError
from pipeline.tasks.rna.ligand_library import (
    LigandLibrary,
    embeddings_of,
    library_of,
    read_measure,
    retrieval_figures,
)
from tests.reference import document, recorded
from tests.tasks.originals import POCKET_FILES, POCKETS
from tests.tasks.rna.made import by_key, by_row

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_ranks_distances_and_figures_are_those_of_the_originals_evaluation(metric):
    library, expected = library_of(POCKET_FILES / "ligand_library.h5"), document("rna3effi/evaluation")[metric]
    vectors = recorded("rna3effi/outputs")["best.alone"].numpy()
    ranks = []
    for name, vector_D, theirs in zip(POCKETS, vectors, expected["detailed_results"], strict=True):
        place = library.place(name)
        assert library.names[place] == theirs["true_ligand_id"]
        assert library.distances(vector_D, metric)[place] == pytest.approx(theirs["distance"], rel=1e-5)
        ranks.append(library.rank(vector_D, place, metric))
        assert ranks[-1] == theirs["rank"]
        assert library.best(vector_D, 40, metric)[theirs["rank"] - 1][0] == place
    figures = retrieval_figures(ranks, expected["total_ligands"])
    for share in (5, 10, 20):
        assert 100 * figures[f"hit_top_{share}_percent"] == pytest.approx(
            expected["hit_rates"][f"top{share}%"]["hit_rate"]
        )
    assert figures["mean_rank"] == pytest.approx(expected["rank_statistics"]["mean_rank"])
    assert figures["median_rank"] == expected["rank_statistics"]["median_rank"]


def test_figures_are_what_they_say():
    figures = retrieval_figures([1, 2, 10, 40], 40)
    assert figures == pytest.approx(
        {
            "hit_top_5_percent": 0.5,
            "hit_top_10_percent": 0.5,
            "hit_top_20_percent": 0.5,
            "recall_at_1": 0.25,
            "recall_at_5": 0.5,
            "recall_at_10": 0.75,
            "median_rank": 6,
            "mean_rank": 13.25,
            "mean_reciprocal_rank": (1 + 1 / 2 + 1 / 10 + 1 / 40) / 4,
        }
    )
    assert retrieval_figures([1], 3)["hit_top_5_percent"] == 1.0  # the first always counts
    assert retrieval_figures([], 40) == {}


def test_a_model_that_says_the_same_of_all_ligands_ranks_as_chance_does():
    library = LigandLibrary(tuple("abcde"), np.ones((5, 4), np.float32))
    assert [library.rank(np.zeros(4, np.float32), place, "euclidean") for place in range(5)] == [3.0] * 5


def test_a_vector_that_is_no_number_finds_its_ligand_last():
    library = LigandLibrary(tuple("abc"), RNG.normal(size=(3, 4)).astype(np.float32))
    assert library.rank(np.full(4, np.nan, np.float32), 0, "euclidean") == 3


@pytest.mark.parametrize("write", [by_key, by_row])
def test_a_pocket_finds_the_vector_of_itself_of_its_complex_or_of_its_ligand(tmp_path, write):
    vectors = {name: RNG.normal(size=3).astype(np.float32) for name in ("1aaa_ARG_model1", "1aaa_ARG", "ARG")}
    file = embeddings_of(write(tmp_path / "e.h5", vectors) and tmp_path / "e.h5")
    for pocket, key in (
        ("1aaa_ARG_model1", "1aaa_ARG_model1"),
        ("1aaa_ARG_model2", "1aaa_ARG"),
        ("2bbb_ARG_model0", "ARG"),
    ):
        assert np.array_equal(file.of_pocket(pocket, 3), vectors[key])
    assert file.of_pocket("2bbb_FMN_model0", 3) is None
    assert "2bbb_FMN_model0 or 2bbb_FMN or FMN has no target" in file.missing("2bbb_FMN_model0").what


def test_vectors_of_another_width_or_no_numbers_are_refused(tmp_path):
    by_key(tmp_path / "e.h5", {"a": np.ones(3, np.float32), "b": np.array([1, np.nan, 2], np.float32)})
    file = embeddings_of(tmp_path / "e.h5")
    with pytest.raises(ConfigError, match="has 3 numbers, but the model outputs 4") as caught:
        file.get("a", 4)
    assert caught.value.remedy == "--set train.options.output_dim=3"
    with pytest.raises(DataError, match="not finite"):
        file.get("b", 3)


@pytest.mark.parametrize("content", [None, b"", b"PDB?" * 200])
def test_a_file_that_cannot_be_read_is_named(tmp_path, content):
    path = tmp_path / "t.h5"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"t\.h5: (not a readable HDF5 file|cannot be read)"):
        embeddings_of(path)


def test_ids_and_embeddings_that_do_not_match_are_refused(tmp_path):
    import h5py

    by_row(tmp_path / "t.h5", {"a": np.ones(2, np.float32), "b": np.ones(2, np.float32)})
    with h5py.File(tmp_path / "t.h5", "a") as file:
        del file["id"]
        file["id"] = ["a"]
    with pytest.raises(DataError, match="1 ids and 2 embeddings"):
        embeddings_of(tmp_path / "t.h5")


def test_an_empty_library_is_refused(tmp_path):
    by_key(tmp_path / "l.h5", {})
    with pytest.raises(DataError, match="no ligands"):
        library_of(tmp_path / "l.h5")


@pytest.mark.parametrize(
    "arrays",
    [{"mean": np.zeros(3)}, {"mean": np.zeros(3), "std": np.zeros(3)}, {"mean": np.zeros(2), "std": np.ones(2)}, None],
)
def test_statistics_that_make_no_sense_are_refused(tmp_path, arrays):
    if arrays is not None:
        np.savez(tmp_path / "n.npz", **arrays)
    with pytest.raises(DataError) as caught:
        read_measure(tmp_path / "n.npz", 3, "feature_norm")
    assert "n.npz" in caught.value.where


def test_statistics_that_would_run_code_are_refused(tmp_path):
    np.savez(tmp_path / "n.npz", mean=np.array([print], dtype=object), std=np.ones(1))
    with pytest.raises(DataError):
        read_measure(tmp_path / "n.npz", 1, "feature_norm")
