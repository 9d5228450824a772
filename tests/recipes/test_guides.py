"""Each knob and promise of the five guides, through the recipes."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.errors import ConfigError
from pipeline.memory.footprint import MemoryChoice
from pipeline.memory.outlook import RunFacts, lint
from pipeline.memory.runtime.meters import MaintenanceSettings
from pipeline.planning.prepare import taken_of
from pipeline.project.run_code import load_task
from pipeline.protocol import Contrastive
from pipeline.tasks.complex_docking import ComplexDocking
from pipeline.tasks.contrastive_pair import ContrastivePair
from pipeline.tasks.denovo_recursive import DenovoRecursive
from pipeline.tasks.rna_ligand import RnaLigand
from pipeline.tasks.spectra_finetune import SpectraFinetune
from tests.recipes.conftest import Scanned
from tests.recipes.projects import (
    COMPLEX,
    DENOVO,
    PAIR,
    RNA,
    SPECTRA,
    Recipe,
    config_of,
    epochs_of,
    peak,
    planned,
    ran,
    settings_of,
)
from tests.testkit.command import Command

nightly = pytest.mark.nightly  # they plan and train for real
pytestmark = pytest.mark.timeout(900)

# ---- what can be set ----

SETTINGS: list[tuple[Recipe, tuple[str, ...], dict[str, Any]]] = [
    (RNA, (), {"train.allocator": "auto"}),
    (RNA, ("train.allocator=expandable",), {"train.allocator": "expandable"}),
    *((SPECTRA, (f"cluster.train.gpus={gpus}",), {"train.effective_batch": 2}) for gpus in (1, 2)),
    (SPECTRA, (), {"train.checkpoints.every": 2000, "train.checkpoints.last": 2, "train.checkpoints.best": 1}),
    (SPECTRA, ("train.checkpoints.best=3",), {"train.checkpoints.best": 3}),
    (SPECTRA, ("train.trackers=[wandb, tensorboard]",), {"train.trackers": ("wandb", "tensorboard")}),
    (SPECTRA, ("train.threads=1", "train.pin=false"), {"train.threads": 1, "train.pin": False}),
    *((SPECTRA, (f"train.preset={name}",), {"train.effective_batch": 2}) for name in ("standard", "careful")),
    (
        SPECTRA, ("train.preset=extreme", "train.micro_batch=1"),
        {"train.effective_batch": 2, "train.checkpointing": True, "train.offload": True, "train.pin": False},
    ),
    *((SPECTRA, (f"train.validation.limit={limit}",), {"train.validation.limit": limit}) for limit in (0.1, 5)),
    *((COMPLEX, (f"embed.batch.cap={cap}",), {"embed.batch.policy": "divisor", "embed.batch.cap": cap})
      for cap in (4, 2, 1)),
    (COMPLEX, (), {
        "embed.batch.cap": 4, "graph.cache": True, "cluster.train.mem": "auto", "train.effective_batch": 16,
        "cluster.train.gpus": 2, "embed.context": "partner", "embed.storage": "fp16",
    }),
    (COMPLEX, ("cluster.train.gpus=1",), {"train.effective_batch": 16}),
    *((DENOVO, (f"train.micro_batch={items}", f"train.effective_batch={batch}"),
       {"train.micro_batch": items, "train.effective_batch": batch})
      for items, batch in ((96, 96), (48, 96), (64, 128))),
    *((DENOVO, ("train.compile=true", f"train.compile_mode={mode}"),
       {"train.compile": True, "train.compile_mode": mode})
      for mode in ("default", "reduce-overhead", "max-autotune")),
    (DENOVO, (), {"train.precision": "bf16"}),
    (PAIR, (), {"train.clip": 1.0, "train.slots": 2}),
    (PAIR, ("train.micro_batch=16",), {"train.effective_batch": 128, "train.micro_batch": 16}),
    (PAIR, ("train.empty_cache_every=10",), {"train.empty_cache_every": 10}),
    (PAIR, ("train.memory_fraction=0.95",), {"train.memory_fraction": 0.95}),
]  # fmt: skip


def test_every_setting_of_the_guides_is_there() -> None:
    for recipe, given, wanted in SETTINGS:
        config = config_of(recipe, *given)
        assert {name: attrgetter(name)(config) for name in wanted} == wanted, (recipe.name, given)


def test_recipes_have_the_published_sizes() -> None:
    rna = RnaLigand(**config_of(RNA).train.options)
    assert (rna.hidden_irreps, rna.layers, rna.output_dim) == ("32x0e+16x1o+8x2e", 6, 1536)
    assert all((rna.use_multi_hop, rna.use_nonbonded, rna.use_gate, rna.use_layer_norm))
    denovo = DenovoRecursive(**config_of(DENOVO).train.options)
    assert (denovo.supervision_steps, denovo.latent_steps) == (8, 6)
    assert round(denovo.max_mz / denovo.bin_size) == 20_000
    train = config_of(PAIR).train
    assert isinstance(load_task(train.task or "", train.options), Contrastive)  # which is embedded in two passes


def test_a_part_of_the_items_is_a_limit_too_and_what_is_none_is_refused() -> None:
    for limit, items in ((0.1, 3), (0.999, 24), (5, 5), (100, 100), (None, None)):
        assert taken_of(limit, 24) == items
    for limit in ("0", "0.0", "1.5", "-3", "true", "many"):
        with pytest.raises(ConfigError, match="validation"):
            config_of(SPECTRA, f"train.validation.limit={limit}")
    with pytest.raises(ConfigError, match="compile_mode"):
        config_of(DENOVO, "train.compile_mode=fast")


@nightly
def test_settings_that_do_harm_are_warned_of() -> None:
    for recipe, setting, token in (
        (SPECTRA, "train.memory_fraction=0.95", "95"),
        (COMPLEX, "train.empty_cache_every=1", "empty"),
        (PAIR, "train.empty_cache_every=10", "10"),
        (PAIR, "train.memory_fraction=0.95", "95"),
    ):
        assert not settings_of(recipe)
        (found,) = settings_of(recipe, setting)
        assert token in found.lower(), setting
    split = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:128"}
    assert [found.code for found in lint(RunFacts(environment=split))] == ["split-size-of-expandable-segments"]
    assert [found.code for found in lint(RunFacts(accumulation=8, in_batch_contrastive=True))] == [
        "accumulated-contrast"
    ]
    assert not lint(RunFacts(environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}))


@nightly
def test_lightning_has_a_callback_that_collects_garbage_in_order() -> None:
    from pipeline.training.own_loops.lightning_callback import GovernorCallback

    callback: Any = GovernorCallback(habits=MaintenanceSettings(collect_every=25))
    module = SimpleNamespace(device="cpu", automatic_optimization=True)
    callback.on_train_start(None, module)
    was_collecting = gc.isenabled()
    callback.teardown(None, module, "fit")
    assert not was_collecting
    assert gc.isenabled()


# ---- what saves memory ----

SMALL_RNA = RnaLigand(hidden_irreps="8x0e+4x1o+2x2e", layers=4, output_dim=1536)
SMALL_SPECTRA = SpectraFinetune(layers=3, heads=2, d_fourier=60, d_peak=4, fourier_width=16, finest=0.01)
SMALL_DOCKING = ComplexDocking(embedding_dim=16, scalars=8, vectors=2, layers=4)
SMALL_DENOVO = DenovoRecursive(
    width=36, heads=2, encoder_layers=1, decoder_layers=1, latent_steps=1, supervision_steps=2,
    spectrum_loss="drawn", render_reach=0,
)  # fmt: skip
SMALL_PAIR = ContrastivePair(left="tokens", right="tokens", width=32, layers=2, heads=2, out=16)
SIZES: dict[Any, Mapping[str, int]] = {
    SMALL_RNA: {"items": 2, "atoms": 100, "bonds": 220, "angles": 160, "dihedrals": 240, "near": 1200},
    SMALL_SPECTRA: {"items": 2, "peaks": 100},
    SMALL_DOCKING: {"items": 2, "nodes": 200, "pairs": 4000},
    SMALL_DENOVO: {"items": 2, "peaks": 50, "residues": 10},
    SMALL_PAIR: {"items": 16, "left": 64, "right": 64},
}
AGAIN, HALF = MemoryChoice(checkpointing=True), MemoryChoice(precision="bf16")
SAVINGS: list[tuple[Any, dict[str, Any], float]] = [  # a task, what is changed, and the share that it takes at most
    (SMALL_RNA, {"layers": 3}, 1),
    (SMALL_RNA, {"hidden_irreps": "4x0e+2x1o+1x2e"}, 0.8),
    (SMALL_RNA, {"output_dim": 1024}, 1),
    (SMALL_RNA, {"use_gate": False}, 1),
    (SMALL_RNA, {"use_layer_norm": False}, 1),
    (SMALL_SPECTRA, {"frozen": ("embed.", "layers.0.", "layers.1.")}, 0.7),
    (SMALL_SPECTRA, {"choice": AGAIN}, 0.9),
    (SMALL_SPECTRA, {"sizes": {"items": 2, "peaks": 80}}, 1),
    (SMALL_SPECTRA, {"d_fourier": 28}, 1),
    (SMALL_SPECTRA, {"layers": 2}, 1),
    (SMALL_DOCKING, {"choice": AGAIN}, 0.7),
    (SMALL_DENOVO, {"bin_size": 0.2, "max_mz": 1500.0}, 0.5),
    (SMALL_DENOVO, {"render_reach": 8.0}, 0.2),
    (SMALL_DENOVO, {"sizes": {"items": 1, "peaks": 50, "residues": 10}}, 0.8),
    (SMALL_PAIR, {"choice": HALF}, 1),
]


@cache
def whole(task: Any) -> int:
    return peak(task, SIZES[task])


@nightly
@pytest.mark.parametrize(
    ("task", "change", "share"),
    SAVINGS,
    ids=[f"{type(task).__name__}-{next(iter(change))}" for task, change, _ in SAVINGS],
)
def test_what_a_guide_says_saves_memory_does(task: Any, change: dict[str, Any], share: float) -> None:
    given = dict(change)
    sizes, choice = given.pop("sizes", SIZES[task]), given.pop("choice", MemoryChoice())
    settings = {name: given.pop(name) for name in ("frozen",) if name in given}
    assert peak(replace(task, **given), sizes, choice, **settings) < share * whole(task)


@nightly
def test_a_loss_that_is_added_has_its_headroom_planned() -> None:
    without, with_it = (
        peak(replace(SMALL_DENOVO, precursor_weight=weight), SIZES[SMALL_DENOVO]) for weight in (0.0, 0.1)
    )
    assert 0 <= with_it - without < 0.01 * without


# ---- what is planned ----


@nightly
def test_8_on_each_of_3_gpus_are_24_effective_and_memory_of_the_host_is_planned(
    pipeline: Command, scanned: Scanned
) -> None:
    scanned(COMPLEX)
    words = COMPLEX.sets("train.effective_batch=24", "train.micro_batch=8", gpus=3)
    found = planned(pipeline, "--gpu", COMPLEX.card, *words)
    (made,) = found["plans"].values()
    assert (made["request"]["ranks"], made["request"]["batch"], made["cuts"]["items_most"] <= 8) == (3, 24, True)
    host = planned(pipeline, *COMPLEX.sets())["host"]
    assert 0 < host["mem_bytes"] < 2 * sum(part["bytes"] for part in host["parts"]) + (1 << 30)


@nightly
def test_an_ema_costs_a_copy_of_the_parameters_and_each_stage_has_its_own_plan(
    pipeline: Command, scanned: Scanned
) -> None:
    scanned(DENOVO)
    plans = [planned(pipeline, *DENOVO.sets(f"train.ema={decay}")) for decay in ("0.999", "null")]
    (kept, none) = (sum(part["bytes"] for part in plan["standing"]) for plan in plans)
    parameters = sum(one["bytes"] for one in plans[0]["standing"] if one["category"] == "parameters")
    assert kept - none == pytest.approx(parameters, rel=0.05)
    stages = planned(pipeline, *DENOVO.sets("train.precision=bf16", "train.effective_batch=16"))["plans"]
    assert list(stages) == ["stage 1", "all items"]
    assert stages["stage 1"]["live"]["value"] <= stages["all items"]["live"]["value"]  # all places are always there
    assert stages["stage 1"]["micros"] < stages["all items"]["micros"]  # it has fewer items
    assert {plan["choice"]["precision"] for plan in stages.values()} == {"bf16"}


# ---- what is run ----


@nightly
def test_validation_is_limited_and_thinned(pipeline: Command, scanned: Scanned) -> None:
    folder = scanned(SPECTRA)
    words = SPECTRA.sets("train.validation.limit=1", "train.validation.every=2", "train.seed=7")
    assert ran(pipeline, words, "train").code == 0
    assert [bool(one["validation"]) for one in epochs_of(folder)] == [False, True]


@nightly
def test_graphs_that_are_not_kept_on_disk_are_built_when_they_are_read(pipeline: Command, scanned: Scanned) -> None:
    folder = scanned(COMPLEX)
    done = ran(pipeline, COMPLEX.sets("graph.cache=false", "train.epochs=1"), "train")
    assert done.code == 0, done.err
    assert epochs_of(folder)[-1]["items"] == 4
    assert epochs_of(folder)[-1]["items_per_s"] > 0


@nightly
def test_predictions_are_the_nearest_captions_of_each_image_and_back(pipeline: Command, scanned: Scanned) -> None:
    folder = scanned(PAIR)
    words = PAIR.sets("train.seed=3", "train.epochs=1", "train.micro_batch=2", "train.effective_batch=4")
    for stage in ("train", "predict"):
        done = ran(pipeline, words, stage)
        assert done.code == 0, done.err
    (epoch,) = epochs_of(folder)
    assert epoch["batch"]["most"] == 4
    assert epoch["validation"]["loss"] > 0
    for way, own, other in (("right", "image,caption", "caption"), ("left", "caption,image", "image")):
        (file,) = folder.glob(f"predictions/*/nearest_{way}.csv")
        header, *rows = file.read_text().splitlines()
        assert header.startswith(f"id,{own},own_cosine,nearest_1,{other}_1,cosine_1")
        assert len(rows) > 1
        assert all(row.startswith("made-") for row in rows)
