"""Seed 002, docking of complexes: each knob and promise of its guide, through the recipe."""

from __future__ import annotations

import pytest

from pipeline.memory.footprint import MemoryChoice
from pipeline.memory.lint.lint_facts import RunFacts
from pipeline.memory.lint.lint_rules import lint
from pipeline.tasks.complex_docking import ComplexDocking
from tests.recipes.conftest import Scanned
from tests.recipes.projects import COMPLEX, config_of, done_again, epochs_of, peak, planned, ran, settings_of
from tests.testkit.command import Command

pytestmark = [pytest.mark.timeout(900), pytest.mark.nightly]  # they plan and train for real
TASK = ComplexDocking(embedding_dim=16, scalars=8, vectors=2, layers=4)
SIZES = {"items": 2, "nodes": 200, "pairs": 4000}


@pytest.mark.parametrize("cap", [4, 2, 1])
def test_a_small_divisor_batch_of_the_encoder_holds_4_then_2_then_1(cap: int) -> None:
    batch = config_of(COMPLEX, f"embed.batch.cap={cap}").embed.batch
    assert (batch.policy, batch.cap) == ("divisor", cap)
    assert config_of(COMPLEX).embed.batch.cap == 4


def test_graphs_that_are_not_kept_on_disk_are_built_when_they_are_read(pipeline: Command, scanned: Scanned) -> None:
    assert config_of(COMPLEX).graph.cache
    folder = scanned(COMPLEX)
    words = COMPLEX.sets("graph.cache=false", "train.epochs=1")
    done = ran(pipeline, words, "train")
    assert done.code == 0, done.err
    assert epochs_of(folder)[0]["items"] == 4


def test_embeddings_and_graphs_are_cached_on_disk_and_later_runs_make_none(pipeline: Command, scanned: Scanned) -> None:
    scanned(COMPLEX)
    again = ran(pipeline, COMPLEX.sets(), "graph")
    assert again.code == 0, again.err
    assert not any(done_again(again.err).values())


def test_caches_that_are_corrupted_are_found_and_made_anew(pipeline: Command, scanned: Scanned) -> None:
    folder = scanned(COMPLEX)
    shards = [path for path in (folder / "cache").rglob("*") if path.is_file() and "graph" in str(path)]
    largest = max(shards, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    for place in range(len(content) // 4, 3 * len(content) // 4, 97):
        content[place] ^= 0xFF
    largest.chmod(0o644)
    largest.write_bytes(content)
    again = ran(pipeline, COMPLEX.sets(), "graph")
    assert again.code == 0, again.err
    assert sum(done_again(again.err).values()) > 0
    assert not any(done_again(ran(pipeline, COMPLEX.sets(), "graph").err).values())


def test_memory_of_the_host_is_planned_and_not_raised_by_hand(pipeline: Command, scanned: Scanned) -> None:
    scanned(COMPLEX)
    assert config_of(COMPLEX).cluster.train.mem == "auto"
    found = planned(pipeline, *COMPLEX.sets())
    parts = sum(part["bytes"] for part in found["host"]["parts"])
    assert 0 < found["host"]["mem_bytes"] < 2 * parts + (1 << 30)


def test_8_on_each_of_3_gpus_are_24_effective(pipeline: Command, scanned: Scanned) -> None:
    scanned(COMPLEX)
    config = config_of(COMPLEX)
    assert (config.train.effective_batch, config.cluster.train.gpus) == (16, 2)  # as published, 8 on each, too
    words = COMPLEX.sets("train.effective_batch=24", "train.micro_batch=8", gpus=3)
    (made,) = planned(pipeline, "--gpu", COMPLEX.card, *words)["plans"].values()
    assert (made["ranks"], made["batch"], made["items_most"] <= 8) == (3, 24, True)


def test_fewer_gpus_keep_the_effective_batch_or_are_warned_of() -> None:
    assert config_of(COMPLEX, "cluster.train.gpus=1").train.effective_batch == 16
    told = lint(RunFacts(gpus=1, batch=8, micro_batch=8, before_gpus=3, before_batch=24, before_micro_batch=8))
    assert "changed-batch" in {found.code for found in told}


def test_layers_one_after_another_take_less() -> None:
    assert peak(TASK, SIZES, MemoryChoice(checkpointing=True)) < 0.7 * peak(TASK, SIZES)


def test_fewer_structures_make_a_trial(pipeline: Command, scanned: Scanned) -> None:
    scanned(COMPLEX)
    done = ran(pipeline, COMPLEX.sets("data.limit=2"), "scan")
    assert done.code == 0, done.err
    assert "2 items: 2 accepted" in done.out


def test_emptying_the_cache_every_batch_is_a_setting_with_a_warning() -> None:
    assert not settings_of(COMPLEX)
    (found,) = settings_of(COMPLEX, "train.empty_cache_every=1")
    assert "empty" in found.lower()


def test_partners_are_embedded_joined_in_half_precision() -> None:
    embed = config_of(COMPLEX).embed
    assert (embed.context, embed.storage) == ("partner", "fp16")


def test_throughput_is_reported(pipeline: Command, scanned: Scanned) -> None:
    folder = scanned(COMPLEX)
    done = ran(pipeline, COMPLEX.sets("train.epochs=1", "train.seed=3"), "train")
    assert done.code == 0, done.err
    assert epochs_of(folder)[-1]["items_per_s"] > 0
    assert "items/s" in done.out
