"""Seed 000, RNA and ligands: each knob and promise of its guide, through the recipe."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from pipeline.memory.lint.lint_facts import RunFacts
from pipeline.memory.lint.lint_rules import lint
from pipeline.tasks.rna_ligand import RnaLigand
from tests.recipes.conftest import Scanned
from tests.recipes.projects import RNA, config_of, epochs_of, peak, planned, ran
from tests.testkit.command import Command

pytestmark = [pytest.mark.timeout(900), pytest.mark.nightly]  # they plan and train for real
TASK = RnaLigand(hidden_irreps="8x0e+4x1o+2x2e", layers=4, output_dim=1536)
SIZES = {"items": 2, "atoms": 100, "bonds": 220, "angles": 160, "dihedrals": 240, "near": 1200}


@cache
def taken(**options: object) -> int:
    return peak(replace(TASK, **options), SIZES)  # type: ignore[arg-type]


def test_memory_is_flat_over_epochs_where_nothing_is_kept(pipeline: Command, scanned: Scanned) -> None:
    folder = scanned(RNA)
    done = ran(pipeline, RNA.sets("train.epochs=6"), "train")
    assert done.code == 0, done.err
    assert "leak" not in done.err + done.out
    epochs = epochs_of(folder)
    assert len(epochs) == 6
    assert epochs[-1]["allocated_bytes"] - epochs[1]["allocated_bytes"] < 16 << 20  # the process, to malloc's pieces


def test_allocated_and_reserved_are_in_the_figures_of_every_epoch(pipeline: Command, scanned: Scanned) -> None:
    folder = scanned(RNA)
    done = ran(pipeline, RNA.sets("train.seed=5"), "train")
    assert done.code == 0, done.err
    for epoch in epochs_of(folder):
        assert 0 < epoch["allocated_bytes"] <= epoch["peak_bytes"]
        assert epoch["reserved_bytes"] >= epoch["allocated_bytes"]
    assert "allocated" in done.out
    assert "reserved" in done.out


def test_the_allocators_settings_of_the_guide_are_warned_of() -> None:
    text = "expandable_segments:True,max_split_size_mb:128"
    told = lint(RunFacts(environment={"PYTORCH_CUDA_ALLOC_CONF": text}))
    assert {found.code for found in told} == {"split-size-of-expandable-segments"}
    assert not lint(RunFacts(environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}))


def test_expandable_segments_are_a_setting() -> None:
    assert config_of(RNA).train.allocator == "auto"
    assert config_of(RNA, "train.allocator=expandable").train.allocator == "expandable"


def test_fewer_layers_save_memory() -> None:
    assert taken(layers=3) < taken()


def test_smaller_irreps_save_memory() -> None:
    assert taken(hidden_irreps="4x0e+2x1o+1x2e") < 0.8 * taken()


def test_a_smaller_output_saves_memory() -> None:
    assert taken(output_dim=1024) < taken()


@pytest.mark.parametrize("feature", ["use_gate", "use_layer_norm"])
def test_features_that_are_off_save_what_they_cost(feature: str) -> None:
    assert taken(**{feature: False}) < taken()


@pytest.mark.parametrize("feature", ["use_multi_hop", "use_nonbonded"])
def test_edges_that_are_off_cost_nothing(feature: str) -> None:
    item = {"atoms": 10, "bonds": 10, "angles": 8, "dihedrals": 6, "near": 16}
    off = replace(TASK, **{feature: False})  # type: ignore[arg-type]
    assert sum(off.cost(item).values()) < sum(TASK.cost(item).values())


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_a_batch_of_1_or_2_is_accumulated_to_8(pipeline: Command, scanned: Scanned, micro_batch: int) -> None:
    scanned(RNA)
    (made,) = planned(pipeline, *RNA.sets(f"train.micro_batch={micro_batch}"))["plans"].values()
    assert made["batch"] == 8
    assert made["items_most"] <= micro_batch


def test_the_published_irreps_and_sizes_are_the_recipes() -> None:
    task = RnaLigand(**config_of(RNA).train.options)
    assert (task.hidden_irreps, task.layers, task.output_dim) == ("32x0e+16x1o+8x2e", 6, 1536)
    assert all((task.use_multi_hop, task.use_nonbonded, task.use_gate, task.use_layer_norm))
