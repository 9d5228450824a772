"""Several encoders side by side: each embeds on its own, one graph set serves all, a training reads them joined."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.config.load import read_config
from pipeline.dataset.worklist import Shard, StageSurvey, deciding
from pipeline.encoder.synth import write_random_checkpoint
from pipeline.errors import ConfigError
from pipeline.journal.attempts import leave_out
from pipeline.journal.ledger import LedgerReader
from pipeline.journal.run_folder import RunFolder, runs_in
from pipeline.planning.prepare import embeddings_used
from pipeline.planning.trained_model import portable_settings
from pipeline.project.project import Encoding, Project
from pipeline.records import EventKind, Reason, TaskContext
from pipeline.stages.embed import EmbedStage, name_of
from pipeline.store.cache_folder import CacheFolder
from pipeline.training.checkpoints.trained_weights import write_export
from tests.testkit.command import Command
from tests.testkit.project import LOCAL, WEIGHTS, to_do, write_config
from tests.testkit.trained import write_project

FOLLOW = ("--executor", "local", "--follow")
SPLITS = ("train", "train", "train", "val", "test")
ALSO = {"small": {"weights": "weights/esm2_small.pt", "storage": "fp16"}}
EMBEDS = {"weights": WEIGHTS, "also": ALSO}
SETTINGS = {
    "data": {"source": "manifest", "path": "data/manifest.csv"},
    "embed": EMBEDS,
    "graph": {"neighbours": 8},
    **LOCAL,
    "train": {
        "task": "pipeline.tasks.interface:Interface",
        "embeddings": ["small", "main"],
        "options": {"embedding_dim": 24, "width": 8, "layers": 1, "pair_width": 4},
        "effective_batch": 2,
        "epochs": 2,
        "checkpoints": {"every": 1},
    },
}
ALL = ("submit", "--stage", "all", *FOLLOW)


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a project with two encoders, of 16 and of 8 numbers a residue."""
    write_project(tmp_path, SETTINGS, {}, SPLITS)
    write_random_checkpoint(tmp_path / "weights" / "esm2_small.pt", layers=2, dim=8, heads=2, seed=3)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def opened(folder: Path, *sets: str) -> Project:
    return Project.open(read_config(folder / "pipeline.yaml", sets).config)


def events(folder: Path, kind: EventKind, stage: str) -> list[dict[str, Any]]:
    found = LedgerReader(runs_in(folder / "runs")[-1]).fresh()
    return [dict(event.data) for event in found if event.kind is kind and event.data.get("stage") == stage]


def stored(folder: Path) -> dict[str, list[Mapping[str, Any]]]:
    """Return what the store says of each embedding, by the weights that it was made with."""
    store, made = CacheFolder(folder / "cache").kind("embed"), dict[str, list[Mapping[str, Any]]]()
    for record in store.read(store.keys()):
        made.setdefault(record.meta["weights"], []).append({"shape": record.arrays["rows"].shape, **record.meta})
    return made


def rows_of(record_of: Project, text: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    recipe = record_of.encoding.recipe
    record = record_of.encoding.shelves.embeddings.get(recipe.key(text, recipe.wanted(len(text))))
    return record.arrays["rows"].astype(np.float32)


def test_a_plan_has_a_row_and_a_memory_for_each_encoder(two, pipeline):
    assert pipeline("submit", "--stage", "scan", *FOLLOW).code == 0
    dry = json.loads(pipeline("submit", "--stage", "embed", "--dry-run", "--json").out)
    parts = {part["stage"]: part for part in dry["stages"][-1]["parts"]}
    assert list(parts) == ["embed main", "embed small"]
    assert parts["embed main"]["disk_bytes"] > parts["embed small"]["disk_bytes"]


def test_what_decides_a_training_is_which_embeddings_and_in_which_order_and_not_what_they_are_called(two):
    used = embeddings_used(opened(two))
    assert [part["storage"] for part in used["joined"]] == ["fp16", "fp32"]
    assert embeddings_used(opened(two, "train.embeddings=[main, small]"))["joined"] == used["joined"][::-1]
    assert embeddings_used(opened(two, "train.embeddings=[small]")) == used["joined"][0]
    assert embeddings_used(opened(two, "train.embeddings=auto")) == used["joined"][1]
    also = {"also": {"other": ALSO["small"]}, "weights": WEIGHTS}
    write_config(two, **{**SETTINGS, "embed": also, "train": {**SETTINGS["train"], "embeddings": ["other", "main"]}})
    assert embeddings_used(opened(two)) == used


def test_a_project_without_further_encoders_has_the_keys_that_it_always_had(two):
    write_config(two, **{**SETTINGS, "embed": {"weights": WEIGHTS}})
    alone = opened(two, "train.embeddings=auto")
    assert embeddings_used(alone) == embeddings_used(opened(two, "train.embeddings=[main]"))
    assert "also" not in deciding(alone.config, "embed") | deciding(alone.config, "embed")["embed"]
    assert EmbedStage().recipe(alone) == embeddings_used(alone)
    assert set(embeddings_used(alone)) == {"version", "weights", "layer", "context", "precision", "storage"}


def test_a_wrong_setting_is_refused_with_its_place(two):
    for setting, place in (
        ("train.embeddings=[main, tiny]", "tiny"),
        ("train.embeddings=[main, main]", "train.embeddings"),
        ("train.embeddings=main", "train.embeddings"),
        ("embed.also.main.layer=1", "main"),
        ("embed.also={a-b: {layer: 1}}", "'a-b'"),
        ("embed.also.small.weight=x", '"weights"'),
        ("embed.also.small.precision=fp8", "small.precision"),
        ("embed.also.small.also.tiny.layer=1", "small"),
        ("embed.also=[small]", "embed.also"),
        ("embed.precision=fp8", "embed.precision"),
    ):
        with pytest.raises(ConfigError) as refused:
            read_config(two / "pipeline.yaml", [setting])
        assert place in str(refused.value), setting


def test_each_encoder_keeps_marks_by_its_own_setting_and_a_training_is_the_same(two, pipeline):
    def kept(*sets: str) -> list[bool]:
        return ["cls" in recipe for recipe in EmbedStage().recipes(opened(two, *sets))]

    assert [kept(f"embed{of}.cls=true") for of in ("", ".also.small")] == [[True, True], [False, True]]
    assert kept("embed.cls=true", "embed.also.small.cls=false") == [True, False]
    assert embeddings_used(opened(two, "embed.cls=true")) == embeddings_used(opened(two))


@pytest.mark.parametrize(
    ("read", "main", "others", "embeddings"),
    [
        ("auto", "esm2_tiny", {}, None),
        ("[small]", "esm2_small", {}, None),  # it alone is needed, and is what section embed is of
        ("[main, small]", "esm2_tiny", {"small": "esm2_small"}, ["main", "small"]),
        ("[small, main]", "esm2_tiny", {"small": "esm2_small"}, ["small", "main"]),
        ("[small, third]", "esm2_small", {"third": "third/esm2_small"}, ["main", "third"]),
    ],
)
def test_a_model_is_exported_with_the_encoders_that_it_reads_and_no_others(two, read, main, others, embeddings):
    third = "embed.also.third={weights: other/esm2_small.pt, context: partner}"
    config = read_config(two / "pipeline.yaml", [third, f"train.embeddings={read}"]).config
    settings = portable_settings(config)
    embed = settings["embed"]
    assert embed["weights"] == f"weights/{main}.pt"
    assert {name: other["weights"] for name, other in embed.get("also", {}).items()} == {
        name: f"weights/{file}.pt" for name, file in others.items()
    }
    assert settings["train"].get("embeddings") == embeddings
    (two / "exported.yaml").write_text(json.dumps(settings | {"data": {"path": "x"}}))
    assert len(read_config(two / "exported.yaml").config.encoders_read) == len(config.encoders_read)


def test_an_exported_model_without_its_encoder_names_that_by_digest_and_width(tmp_path):
    card = {"encoder": {"file": "esm2_small.pt", "weights": "1a2b", "layer": 1}, "options": {"embedding_dim": 32}}
    write_export(tmp_path, {"x": torch.zeros(1)}, card)
    config = read_config(None, ["data.path=.", f"embed.weights={tmp_path}/weights/esm2_small.pt"]).config
    with pytest.raises(ConfigError, match=r"takes file esm2_small\.pt, weights 1a2b, layer 1, of 32 numbers") as caught:
        Encoding.open(config, CacheFolder(tmp_path / "cache"), remember=False, beside=tmp_path)
    assert caught.value.remedy.startswith(f"pipeline weights import FILE --out {tmp_path}/weights/esm2_small.pt")


@pytest.mark.nightly
def test_what_kills_one_encoder_is_left_to_the_others(two):
    roomy = "cluster.embed.mem=64G"  # this process has run other tests before
    project, run = opened(two, roomy), RunFolder(two / "runs" / "a-run")
    run.path.mkdir(parents=True)
    stage, told, text = EmbedStage(), list[str](), "MKVLAAGSTR"
    run.todo("embed").write_text(f"{text}\n{text}\n")
    np.array([[0, len(text)], [len(text) + 1, len(text)]], np.uint64).tofile(run.order("embed"))
    shards = tuple(Shard(at, at + 1, 1, len(text), name) for at, name in enumerate(("main", "small")))
    StageSurvey({}, shards).write_shards(run, "embed")
    leave_out(run, "embed", [name_of(text, "main")], Reason.KILLED_ITS_TASK, "it died")
    context = TaskContext(refuse=lambda *why: pytest.fail(str(why)), on=told.extend)
    for task in (0, 1):
        assert list(stage.work(project, run, task, context)) == ([] if task == 0 else [None])
    assert set(told) == {name_of(text, "small")}
    made = stored(two)
    assert [record["text"] for records in made.values() for record in records] == [text]


@pytest.mark.nightly
def test_two_encoders_go_through_the_whole_workflow_and_again_there_is_nothing_to_do(two, pipeline):
    done = pipeline(*ALL)
    assert done.code == 0, done.err
    assert to_do()["embed"] == (0, 20)
    made = stored(two)
    assert sorted({record["shape"][1] for record in records} == {8} for records in made.values()) == [False, True]
    _rows_are_joined_in_their_order(two)
    _nothing_is_done_again(two, pipeline)
    _others_are_done_and_no_graph(two, pipeline)


def _rows_are_joined_in_their_order(folder: Path) -> None:
    from pipeline.api import SamplerSettings, open_loader  # which import torch

    encoders = opened(folder).encoders
    texts = [record["text"] for record in next(iter(stored(folder).values()))]
    for names in (["small", "main"], ["main", "small"], ["small"]):
        wanted = {np.concatenate([rows_of(encoders[name], text) for name in names], axis=1).tobytes() for text in texts}
        sets = [f"train.embeddings=[{', '.join(names)}]"]
        settings = SamplerSettings(batch=2)
        with closing(
            open_loader(folder / "pipeline.yaml", settings, sets=sets, collate=lambda items, _: items)
        ) as loader:
            read = [side.embedding.float() for items in loader for item in items for side in item.sides.values()]
        assert {rows_RD.numpy().tobytes() for rows_RD in read} == wanted
        assert len(read) == len(texts) == 10


def _nothing_is_done_again(folder: Path, pipeline: Command) -> None:
    reordered = {"also": {"small": dict(reversed(ALSO["small"].items()))}, "weights": WEIGHTS}
    write_config(folder, **{**SETTINGS, "embed": reordered})
    assert pipeline(*ALL).code == 0
    assert to_do(folder)["embed"] == (20, 0)
    assert len(list((folder / "models").iterdir())) == 1
    for stage in ("embed", "graph", "train"):
        assert events(folder, EventKind.TASK_STARTED, stage) == []


def _others_are_done_and_no_graph(folder: Path, pipeline: Command) -> None:
    """A third encoder is computed alone, and another order is another model."""
    third = ("--set", "embed.also.third.layer=1", "--set", "embed.also.third.weights=weights/esm2_small.pt")
    third = (*third, "--set", "embed.also.third.context=partner")
    done = pipeline(*ALL, *third, "--set", "train.embeddings=[main, small]")
    assert done.code == 0, done.err
    assert (to_do(folder)["embed"], to_do(folder)["graph"]) == ((20, 10), (5, 0))
    assert len(list((folder / "models").iterdir())) == 2
    assert pipeline("cache", "clean", "--yes", "--older-than", "0").code == 0
    assert sum(map(len, stored(folder).values())) == 20  # what was of the third went
    (started,) = events(folder, EventKind.JOB_SUBMITTED, "embed")
    assert started["recipe"] != ""
