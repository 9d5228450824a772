"""A trained encoder of antibodies from embedding to evaluation, next to the same architecture with random weights.

Which of the two predicts better is measured by benchmarks/trained_encoder.py; here is what must hold.
"""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.real.antibodies import ARMS, FOLDS, LETTERS, NAMES, domains, results, write_points, write_project
from tests.testkit.project import Project

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]
transformers = pytest.importorskip("transformers", reason="the extra transformers is not installed")


@pytest.mark.filterwarnings("default")
def test_a_trained_and_a_random_encoder_go_from_real_antibodies_to_an_evaluation(tmp_path: Path) -> None:
    write_project(tmp_path, seeds=1, epochs=2)
    project = Project(tmp_path, limit_s=900)

    def types(*words: str) -> str:
        done = project.types(*words)
        assert done.code == 0, done.err
        return done.out

    unsplit = ("--set", "data.splits=null")
    types("submit", "embed", "--follow", *unsplit)
    split = ("--by", "clusters", "--clusters", "clusters.tsv", "--folds", str(FOLDS), "--out", "cv.csv")
    types("data", "split", *split, *unsplit)
    with (tmp_path / "cv.fold0.csv").open() as table:
        fold_of = {row["id"]: row["fold"] for row in csv.DictReader(table)}
    assert fold_of.keys() == set(NAMES)
    assert fold_of["1MLC"] == fold_of["1P2C"]  # antibodies of one kind
    points = write_points(tmp_path, 0, 1)
    types("submit", "train", "--sweep-file", points, "--follow")
    figures = results(types("compare", "--json"))
    assert figures.keys() == {(arm, 0) for arm in ARMS}
    assert all(0 < figure < 1 for figure in figures.values())
    encoders = set()
    for model in (tmp_path / "models").iterdir():
        shown = json.loads(types("model", "show", model.name, "--json"))
        encoders.add((shown["encoder"]["file"], shown["encoder"]["weights"]))
        if not shown["options"]["embedding_dim"]:
            continue
        types(
            "submit", "evaluate", "--model", model.name, "--follow", "--set", f"train.embeddings={embeddings_of(shown)}"
        )
        shown = json.loads(types("model", "show", model.name, "--json"))
        assert shown["evaluations"]
        assert all(math.isfinite(value) for one in shown["evaluations"] for value in one["figures"].values())
    assert {name for name, _ in encoders} == {"antiberty", "random0"}
    assert len({digest for _, digest in encoders}) == 2

    for name, encoder in (("antiberty", "main"), ("random0", "random0")):
        types("embeddings", "export", "--out", f"{name}.safetensors", "--encoder", encoder, *unsplit)
        rows = load_file(tmp_path / f"{name}.safetensors")["1VFB:H"]
        assert_equal_to_their_library(tmp_path / "weights" / name, domains("1VFB")["H"].sequence, rows)


def embeddings_of(shown: dict) -> str:
    return "[random0]" if shown["encoder"]["file"] == "random0" else "[main]"


def assert_equal_to_their_library(folder: Path, sequence: str, rows: torch.Tensor) -> None:
    """Compare rows with those that transformers computes of the same sequence."""
    assert set(sequence) <= set(LETTERS)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        theirs = model(**tokenizer(" ".join(sequence), return_tensors="pt")).last_hidden_state[0, 1:-1]
    assert rows.shape == theirs.shape == (len(sequence), 512)
    assert (rows - theirs).abs().max() < 1e-5
