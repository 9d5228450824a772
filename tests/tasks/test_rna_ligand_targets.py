"""The equivariant task: what targets may be, and what input is refused."""

from __future__ import annotations

import builtins
from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.errors import ConfigError, DataError
from pipeline.graphs.item_graph import GraphRecipe
from pipeline.structures.synthetic import complex_pdb
from pipeline.tasks.rna_ligand import RnaLigand
from tests.tasks.items import graph_of
from tests.tasks.rna_items import by_item, by_row, items_of, made
from tests.tasks.rna_models import (
    DIM,
    IDS,
    RNG,
    SMALL,
    collated,
    model_of,
    three,
)

pytest.importorskip("e3nn")
pytestmark = pytest.mark.usefixtures("one_thread")


# ---- targets ----


@pytest.mark.parametrize("write", [by_item, by_row])
def test_targets_are_found_by_the_items_ids(tmp_path, targets, write):
    task = replace(SMALL, targets=write(tmp_path / "t.h5", targets))
    batch = task.collate(three()[::-1], RNG)
    assert np.array_equal(batch.target_BD.numpy(), np.stack([targets[name] for name in IDS[::-1]]))
    assert task.loss(model_of(task), batch)["target"][1] == 3.0


@pytest.mark.parametrize("write", [by_item, by_row])
def test_an_item_without_a_target_is_named_with_the_file_and_how_many_it_has(tmp_path, targets, write):
    path = write(tmp_path / "t.h5", targets)
    with pytest.raises(DataError, match=r"elsewhere has no target in .*t\.h5, which has 3 ids: a, b, c") as caught:
        collated(made(0), task=replace(SMALL, targets=path), ids=["elsewhere"])
    assert "targets_missing=skip" in caught.value.remedy


def test_items_without_a_target_have_no_weight_where_they_are_skipped(learned):
    task = replace(learned, targets_missing="skip")
    items = items_of([made(0), made(1)], ["a", "elsewhere"])
    model = model_of(task)
    with torch.no_grad():
        total, weight = task.loss(model, task.collate(items, RNG))["target"]
        alone, _ = task.loss(model, task.collate(items[:1], RNG))["target"]
    assert weight == 1.0
    assert float(total) == pytest.approx(float(alone), rel=1e-4)
    found = task.outputs(model, task.collate(items, RNG))
    assert [one.numel() for one in found["embedding"]] == [DIM, DIM]
    assert [one.numel() for one in found["target"]] == [DIM, 0]


def test_targets_of_another_width_are_refused_with_what_to_set(tmp_path, targets):
    task = replace(SMALL, output_dim=DIM + 1, targets=by_item(tmp_path / "t.h5", targets))
    with pytest.raises(ConfigError, match=r"a in .* has 8 numbers, the model gives 9") as caught:
        task.collate(three(), RNG)
    assert caught.value.remedy == "--set train.options.output_dim=8"


def test_a_target_that_is_not_a_number_is_refused(tmp_path, targets):
    targets["b"][3] = np.nan
    with pytest.raises(DataError, match=r"target of b .* not finite"):
        replace(SMALL, targets=by_row(tmp_path / "t.h5", targets)).collate(three(), RNG)


@pytest.mark.parametrize("content", [None, b"", b"PDB?" * 200])
def test_a_file_that_cannot_be_read_is_named(tmp_path, content):
    path = tmp_path / "t.h5"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"t\.h5: (not a readable HDF5 file|cannot be read)"):
        replace(SMALL, targets=str(path)).collate(three(), RNG)


def test_ids_and_embeddings_that_do_not_match_are_refused(tmp_path, targets):
    import h5py

    path = by_row(tmp_path / "t.h5", targets)
    with h5py.File(path, "a") as file:
        del file["id"]
        file["id"] = ["a", "b"]
    with pytest.raises(DataError, match="2 ids and 3 embeddings"):
        replace(SMALL, targets=path).collate(three(), RNG)


@pytest.mark.parametrize("path", ["targets.h5", "$PWD/targets.h5"])
def test_a_path_of_targets_that_each_job_would_find_elsewhere_is_refused(path):
    with pytest.raises(ConfigError, match="is relative") as caught:
        RnaLigand(targets=path)
    assert caught.value.where == "train.options.targets"


def test_training_without_targets_says_what_to_set_and_predicting_does_not_need_them():
    batch, model = collated(made(0)), model_of()
    with pytest.raises(ConfigError, match="no targets are named") as caught:
        SMALL.loss(model, batch)
    assert caught.value.where == "train.options.targets"
    found = SMALL.outputs(model, batch)
    assert found["embedding"][0].shape == (DIM,)
    assert SMALL.metrics({name: [one.detach().numpy() for one in values] for name, values in found.items()}) == {}


def test_figures_are_means_over_the_items_that_have_a_target():
    one, other = np.array([3.0, 4.0], np.float32), np.array([0.0, 2.0], np.float32)
    found = {"embedding": [one, one, other], "target": [one, other, other[:0]]}
    assert SMALL.metrics(found) == pytest.approx({"cosine": (1 + 0.8) / 2, "mse": (0 + (9 + 4) / 2) / 2})


# ---- bad input ----


@pytest.mark.parametrize(
    ("irreps", "part"),
    [
        ("32x0e+16y1o", "16y1o"),
        ("", ""),
        ("32x0e+", ""),
        ("0x0e", "0x0e"),
        ("8x0e+2x1x", "2x1x"),
        ("8x0e+1x12e", "1x12e"),
    ],
)
def test_irreps_that_do_not_parse_are_refused_by_the_part_that_does_not(irreps, part):
    with pytest.raises(ConfigError, match="is no irrep") as caught:
        RnaLigand(hidden_irreps=irreps)
    assert caught.value.what.startswith(repr(part))
    assert caught.value.where == "train.options.hidden_irreps"
    assert "32x0e+16x1o+8x2e" in caught.value.remedy
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("irreps", ["16x1o", "8x0o+4x1e"])
def test_irreps_without_scalars_are_refused(irreps):
    with pytest.raises(ConfigError, match="no scalars"):
        RnaLigand(hidden_irreps=irreps)


@pytest.mark.parametrize(
    "options",
    [
        {"layers": 0},
        {"output_dim": 0},
        {"product": "half"},
        {"targets_missing": "x"},
        {"reach": 0.5},
        {"reach": float("inf")},
        {"cosine": float("nan")},
    ],
)
def test_options_that_make_no_sense_are_refused(options):
    (name,) = options
    with pytest.raises(ConfigError, match=name) as caught:
        RnaLigand(**options)
    assert caught.value.where == f"train.options.{name}"


def test_residue_graphs_are_refused():
    with pytest.raises(ConfigError, match="reads atom graphs") as caught:
        collated(graph_of(complex_pdb(0, 30, 20), recipe=GraphRecipe()))
    assert caught.value.remedy == "--set graph.nodes=atom"


@pytest.mark.parametrize("package", ["e3nn", "h5py"])
def test_a_package_that_is_absent_is_named_with_its_extra(monkeypatch, learned, package):
    real = builtins.__import__

    def absent(name, *args, **kwargs):
        if name.partition(".")[0] == package:
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ConfigError) as caught:
        learned.model() if package == "e3nn" else learned.collate(three(), RNG)
    assert caught.value.remedy == f"pip install 'pipeline[{ {'e3nn': 'e3nn', 'h5py': 'hdf5'}[package] }]'"
