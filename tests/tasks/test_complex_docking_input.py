"""The docking task: what input it refuses, and weights from elsewhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.errors import ConfigError
from pipeline.graphs.item_graph import GraphRecipe, ItemGraph
from pipeline.records import Role
from pipeline.runs.dataset.loading import open_loader
from pipeline.structures.synthetic import complex_pdb
from pipeline.tasks.complex_docking import ComplexDocking
from pipeline.training.checkpoints.trained_weights import load_pretrained
from pipeline.training.sampling.epoch_order import SamplerSettings as Sampling
from tests.projects import settle
from tests.tasks.docking_items import (
    RNG,
    SMALL,
    changed,
    collated,
    model_of,
)
from tests.tasks.items import batch_of, graph_of, made

# ---- bad input ----


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("width", 0, "width is 0: it must be 1 or more"),
        ("pairs_at_once", -1, "pairs_at_once is -1: it must be 0 or more"),
        ("rotation_sigma", 0.0, "rotation_sigma is 0.0: it must be more than 0"),
        ("translation_sigma", float("nan"), "translation_sigma is nan: it must be more than 0"),
        ("rotation_sigma", float("inf"), "rotation_sigma is inf: it must be more than 0"),
        ("dropout", 1.0, "dropout is 1.0: it must be from 0 to below 1"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(option, value, words):
    with pytest.raises(ConfigError, match=words) as caught:
        ComplexDocking(**{option: value})
    assert caught.value.where == f"train.options.{option}"


def test_unbound_partners_are_refused_as_they_have_no_pose():
    flags = [{"labelled": np.ones(part.size, bool)} for part in made(0).parts]
    unbound = changed(changed(made(0), 0, **flags[0]), 1, **flags[1])
    with pytest.raises(ConfigError, match="partners of b are unbound structures") as caught:
        collated(made(1), unbound, ids=["a", "b"])
    assert caught.value.remedy == "--set data.state=bound"
    both = batch_of([made(1), unbound], ids=["a", "b"]).items
    assert len(SMALL.collate([both[0]], RNG).partners.sizes) == 1  # beside which a bound item is none


def test_a_graph_without_contacts_is_refused_as_nothing_shows_one_frame():
    with pytest.raises(ConfigError, match="has no native contacts"):
        collated(replace(made(0), labels={}))


def test_what_stands_alone_is_refused_by_name():
    part = replace(made(0).parts[0], role=Role.WHOLE)
    with pytest.raises(ConfigError, match="docking is of two partners, and lonely has one"):
        collated(ItemGraph((part,)), ids=["lonely"])


def test_atom_graphs_are_refused():
    with pytest.raises(ConfigError, match="reads residue graphs"):
        collated(graph_of(complex_pdb(0, 30, 20), recipe=GraphRecipe(nodes="atom")))


def test_embeddings_of_another_width_are_refused_unless_none_are_wanted():
    with pytest.raises(ConfigError, match=r"embeddings of 16 numbers, those of the data set have 24"):
        collated(made(0), dim=24)
    bare = replace(SMALL, embedding_dim=0)
    assert len(model_of(bare, torch.float32)(collated(made(0), dim=None, task=bare))[0]) == 1


# ---- weights to begin with, and a trial ----


def test_weights_of_another_width_are_refused_with_both_shapes(tmp_path):
    torch.save(replace(SMALL, width=24).model().state_dict(), path := tmp_path / "wide.pt")
    with pytest.raises(ConfigError) as caught:
        load_pretrained(SMALL.model(), path)
    said = str(caught.value)
    assert "of_type.weight: float32[21, 24] in the file, float32[21, 16] in the model" in said
    total = len(SMALL.model().state_dict())
    fitting = total - int(said.partition("not alike (")[2].partition(")")[0])
    assert f"{fitting} of its {total} tensors fit" in said
    assert "… and " in said
    assert caught.value.remedy.endswith("train.pretrained_partial: true")


def test_a_partial_load_takes_the_layers_it_knows_and_lists_what_is_left_out(tmp_path):
    torch.save(replace(SMALL, layers=1, pair_width=12).model().state_dict(), path := tmp_path / "other.pt")
    model = SMALL.model()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    report = load_pretrained(model, path, partial=True)
    stored = torch.load(path)
    assert {name for name in report.missing if not name.startswith("layers.1.")} == set()
    assert "pull.pairs.inner.weight" in report.reshaped
    assert report.loaded == len(before) - len(report.missing) - len(report.reshaped)
    kept = {*report.missing, *report.reshaped}
    for name, one in model.state_dict().items():
        assert torch.equal(one, before[name] if name in kept else stored[name]), name
    told = "\n".join(report.lines())
    assert f"not in the file ({len(report.missing)}):\n  layers.1." in told
    assert f"not alike ({len(report.reshaped)}):" in told


def test_a_trial_takes_the_first_items_alone(tmp_path, pipeline):
    for number in range(4):
        (tmp_path / f"c{number}.pdb").write_bytes(complex_pdb(number, 12, 10))
    settle(tmp_path)
    Path("pipeline.yaml").write_text("data: {source: glob, path: .}\n")
    graph = ("submit", "--stage", "graph", "--executor", "local", "--follow", "--set", "data.limit=2")
    assert pipeline(*graph).code == 0
    task = replace(SMALL, embedding_dim=0)
    loader = open_loader("pipeline.yaml", Sampling(batch=4, padding=None), sets=["data.limit=2"], embed=False,
                         collate=task.collate)  # fmt: skip
    assert [len(batch.partners.sizes) for batch in loader] == [2]
