"""Several encoders side by side: each embeds on its own, one graph set serves all, a training reads them joined."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.cluster.verdict import Cause
from pipeline.config.load import read_config
from pipeline.encoder.checkpoints.synth import write_random_checkpoint
from pipeline.journal.attempts import Ask, Attempt, leave_out
from pipeline.journal.ledger import LedgerReader
from pipeline.journal.run_folder import RunFolder, runs_in
from pipeline.journal.run_status import StageJob, StageStatus
from pipeline.project.project import Project
from pipeline.records import EventKind, Reason, TaskContext
from pipeline.report.run_tables import story
from pipeline.report.stage_lines import so_far
from pipeline.runs.dataset.worklist import Shard, StageSurvey, deciding
from pipeline.runs.model.prepare import embeddings_used
from pipeline.runs.model.trained_model import portable_settings
from pipeline.runs.workflow.embed_stage import EmbedStage
from pipeline.runs.workflow.embedded import name_of
from pipeline.store.cache_folder import CacheFolder
from tests.runs.workflow.trained import write_project
from tests.testkit.command import Command

FOLLOW = ("--executor", "local", "--follow")
SPLITS = ("train", "train", "train", "val", "test")
EMBED = "{weights: weights/esm2_tiny.pt, also: {small: {weights: weights/esm2_small.pt, storage: fp16}}}"
CONFIG = f"""\
data: {{source: manifest, path: data/manifest.csv}}
embed: {EMBED}
graph: {{neighbours: 8}}
cluster: {{executor: local, slots: {{cpus: 2}}}}
train:
  task: "pipeline.tasks.interface:Interface"
  embeddings: [small, main]
  options: {{embedding_dim: 24, width: 8, layers: 1, pair_width: 4}}
  effective_batch: 2
  epochs: 2
  checkpoints: {{every: 1}}
"""
ALL = ("submit", "--stage", "all", *FOLLOW)
NO_TORCH = f"""
import sys
from pipeline.cli.main import main
sys.argv = ["pipeline", *{ALL}]
try:
    main()
finally:
    print("imported:", sorted({{"torch", "scipy"}} & set(sys.modules)))
"""


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a project with two encoders, of 16 and of 8 numbers a residue."""
    write_project(tmp_path, CONFIG, {}, SPLITS)
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


def test_a_plan_has_a_row_and_a_memory_for_each_encoder(two: Path, pipeline: Command) -> None:
    before = pipeline("submit", "--stage", "embed", "--dry-run").out
    assert "embed: 5 items are not scanned yet" in before
    assert pipeline("submit", "--stage", "scan", *FOLLOW).code == 0
    plan = pipeline("plan", "--stage", "embed")
    main, small = (line.split() for line in plan.out.splitlines() if line.startswith("embed ") and ":" not in line)
    assert (main[1:4], small[1:4]) == (["main", "10", "0"], ["small", "10", "0"])
    assert "embed small: where the numbers are from" in plan.out
    dry = json.loads(pipeline("submit", "--stage", "embed", "--dry-run", "--json").out)
    parts = {part["stage"]: part for part in dry["stages"][-1]["parts"]}
    assert list(parts) == ["embed main", "embed small"]
    assert parts["embed main"]["disk_bytes"] > parts["embed small"]["disk_bytes"]


def test_each_encoder_has_the_memory_that_its_own_weights_need(two: Path) -> None:
    project, stage = opened(two), EmbedStage()
    of_main, of_small = (stage.mem_bytes(stage.at(project, name)) for name in ("main", "small"))
    assert of_main > of_small
    assert stage.mem_bytes(project) == of_main
    write_random_checkpoint(two / "weights" / "esm2_large.pt", layers=4, dim=64, heads=2)
    large = opened(two, "embed.also.small.weights=weights/esm2_large.pt")
    assert stage.mem_bytes(stage.at(large, "small")) > of_main


def test_what_decides_a_training_is_which_embeddings_and_in_which_order_and_not_what_they_are_called(two: Path) -> None:
    used = embeddings_used(opened(two))
    assert [part["storage"] for part in used["joined"]] == ["fp16", "fp32"]
    assert embeddings_used(opened(two, "train.embeddings=[main, small]"))["joined"] == used["joined"][::-1]
    assert embeddings_used(opened(two, "train.embeddings=[small]")) == used["joined"][0]
    assert embeddings_used(opened(two, "train.embeddings=auto")) == used["joined"][1]
    text = (two / "pipeline.yaml").read_text()
    (two / "pipeline.yaml").write_text(text.replace("small:", "other:").replace("[small,", "[other,"))
    assert embeddings_used(opened(two)) == used


def test_a_project_without_further_encoders_has_the_keys_that_it_always_had(two: Path) -> None:
    text = (two / "pipeline.yaml").read_text()
    (two / "pipeline.yaml").write_text(text.replace(EMBED, "{weights: weights/esm2_tiny.pt}"))
    alone = opened(two, "train.embeddings=auto")
    assert embeddings_used(alone) == embeddings_used(opened(two, "train.embeddings=[main]"))
    assert "also" not in deciding(alone.config, "embed") | deciding(alone.config, "embed")["embed"]
    assert EmbedStage().recipe(alone) == embeddings_used(alone)
    assert set(embeddings_used(alone)) == {"version", "weights", "layer", "context", "precision", "storage"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["train.embeddings=[main, tiny]"], "tiny is no encoder of this configuration; there are main, small"),
        (["train.embeddings=[main, main]"], "wants auto, or a list of different names"),
        (["train.embeddings=main"], "wants auto, or a list of different names"),
        (["embed.also.main.layer=1"], "main is the name of the encoder that section embed is of"),
        (["embed.also={a-b: {layer: 1}}"], "'a-b' is no name: letters, digits and _ only"),
        (["embed.also.small.weight=x"], 'unknown key; did you mean "weights"?'),
        (["embed.also.small.precision=fp8"], "small.precision=fp8: wants one of auto, fp32, fp16, bf16"),
        (["embed.also.small.also.tiny.layer=1"], "small has others itself: name them all in embed.also"),
        (["embed.also=[small]"], "wants names, with keys below each"),
        (["embed.precision=fp8"], "embed.precision=fp8: wants one of"),
        (["embed.also.small.device=cuda"], "cluster.embed.gpus is 0"),
        (["data.source=reader", "data.reader=a:B"], "items of a reader have none: leave them auto"),
    ],
)
def test_a_wrong_setting_is_told_with_its_place(
    two: Path, pipeline: Command, settings: Sequence[str], said: str
) -> None:
    refused = pipeline("config", "check", *(word for setting in settings for word in ("--set", setting)))
    assert refused.code == 2
    assert said in refused.err
    assert refused.err.count("wants one of") <= 1  # what is inherited is told once


def test_an_export_of_an_encoder_that_is_not_named_here_says_which_are(two: Path, pipeline: Command) -> None:
    refused = pipeline("export", "embeddings", "--encoder", "smal", "--out", "all.h5")
    assert (refused.code, "one of these: main, small" in refused.err) == (2, True)


def test_each_encoder_keeps_marks_by_its_own_setting_and_a_training_is_the_same(two: Path, pipeline: Command) -> None:
    def kept(*sets: str) -> list[bool]:
        return ["cls" in recipe for recipe in EmbedStage().recipes(opened(two, *sets))]

    assert [kept(f"embed{of}.cls=true") for of in ("", ".also.small")] == [[True, True], [False, True]]
    assert kept("embed.cls=true", "embed.also.small.cls=false") == [True, False]
    assert embeddings_used(opened(two, "embed.cls=true")) == embeddings_used(opened(two))


@pytest.mark.nightly
def test_marks_of_a_further_encoder_are_made_by_the_command_that_an_export_without_them_names(
    two: Path, pipeline: Command
) -> None:
    typed = ("export", "embeddings", "--encoder", "small", "--pool", "cls", "--out", "small.npy")
    refused = pipeline(*typed)
    assert refused.code == 4
    assert "next: pipeline submit --stage embed --set embed.also.small.cls=true --follow" in refused.err
    done = pipeline("submit", "--stage", "embed", *FOLLOW, "--set", "embed.also.small.cls=true")
    assert done.code == 0, done.err
    assert pipeline(*typed).code == 0
    assert np.load(two / "small.npy").shape == (10, 8)
    main = pipeline("export", "embeddings", "--pool", "cls", "--out", "main.npy")
    assert main.code == 4
    assert "10 chains have no embedding with the row of its CLS token" in main.err


def test_a_layer_that_a_further_encoder_does_not_have_is_refused_before_a_run(two: Path, pipeline: Command) -> None:
    refused = pipeline("submit", "--stage", "embed", *FOLLOW, "--set", "embed.also.small.layer=3")
    assert refused.code == 2
    assert "these weights have 2 layers" in refused.err
    assert not (two / "runs").exists()


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
def test_a_model_is_exported_with_the_encoders_that_it_reads_and_no_others(
    two: Path, read: str, main: str, others: Mapping[str, str], embeddings: list[str] | None
) -> None:
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


def test_a_task_of_an_encoder_that_is_split_in_two_leaves_two_of_that_encoder() -> None:
    stage = StageStatus("embed", tasks=2, parts={"main": {"missing": 4}, "small": {"missing": 3}})
    for number, name in enumerate(("main", "small")):
        stage.give_name(number, name)
        stage.task(number)
    stage.done = {"embed-000000": 4, "embed-000001": 1}
    stage.split(1, (2, 3), Ask(1 << 30, 600), "in halves")
    stage.done |= {"embed-000002-0": 1, "embed-000003": 1}
    main, small = stage.by_part()
    assert (main.title, main.items_done, list(main.work)) == ("embed main", 4, [0])
    assert (small.title, small.items_done, list(small.work)) == ("embed small", 2, [1, 2, 3])
    assert (main.tasks, small.tasks) == (1, 2)
    assert (stage.called(3), stage.is_swept) == ("task 3 of small", False)
    assert so_far(stage) == []
    failed = Attempt(3, 1, Ask(1 << 30, 600), Cause.HOST_OOM, "killed", "FAILED", "7", log="a.err")
    assert story(stage, [failed])[0].startswith("  task 3 of small, attempt 1: host_oom")
    shared = StageJob("all", "embed", "0-1", 1, Ask(2 << 30, 600))
    stage.own["small"] = replace(shared, tag="small")
    assert [stage.plan_of(number, shared).tag for number in (0, 1, 3)] == ["all", "small", "small"]


@pytest.mark.nightly
def test_what_kills_one_encoder_is_left_to_the_others(two: Path) -> None:
    """A sequence that the large one dies of is no reason for the small one to do without it."""
    roomy = "cluster.embed.mem=64G"  # this process has run other tests before
    project, run = opened(two, roomy), RunFolder(two / "runs" / "a-run")
    run.path.mkdir(parents=True)
    stage, told, text = EmbedStage(), list[str](), "MKVLAAGSTR"
    run.todo("embed").write_text(f"{text}\n{text}\n")
    np.array([[0, len(text)], [len(text) + 1, len(text)]], np.uint64).tofile(run.order("embed"))
    shards = tuple(Shard(at, at + 1, 1, len(text), name) for at, name in enumerate(("main", "small")))
    StageSurvey({}, shards).write_shards(run, "embed")
    leave_out(run, "embed", [name_of(text, "main")], Reason.KILLED_ITS_TASK, "it died")
    tell = TaskContext(refuse=lambda *why: pytest.fail(str(why)), on=told.extend)
    for task in (0, 1):
        assert list(stage.work(project, run, task, tell)) == ([] if task == 0 else [None])
    assert set(told) == {name_of(text, "small")}
    made = stored(two)
    assert [record["text"] for records in made.values() for record in records] == [text]


@pytest.mark.nightly
def test_two_encoders_go_through_the_whole_workflow_and_again_there_is_nothing_to_do(
    two: Path, pipeline: Command
) -> None:
    done = pipeline(*ALL)
    assert done.code == 0, done.err
    assert "embed: 20 embeddings: 0 cached, 20 to do in 2 tasks" in done.err
    assert "  small: 10 embeddings: 0 cached, 10 to do in 1 task" in done.err
    assert "20 embeddings of distinct sequences (10 by main, 10 by small)" in done.out
    assert "small: 0 cached, 10 of 10 done" in done.out
    made = stored(two)
    assert sorted({record["shape"][1] for record in records} == {8} for records in made.values()) == [False, True]
    (model,) = (two / "models").iterdir()

    _rows_are_joined_in_their_order(two)
    _each_is_exported_and_explained(two, pipeline)
    _nothing_is_done_again(two, pipeline)
    _others_are_done_and_no_graph(two, pipeline)
    _the_cache_keeps_both(two, pipeline)
    _the_model_is_used_elsewhere(two, model, pipeline)


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


def _each_is_exported_and_explained(folder: Path, pipeline: Command) -> None:
    for encoder, width in (("main", 16), ("small", 8)):
        done = pipeline("export", "embeddings", "--encoder", encoder, "--pool", "mean", "--out", f"{encoder}.npy")
        assert done.code == 0, done.err
        assert np.load(folder / f"{encoder}.npy").shape == (10, width)
    told = json.loads(pipeline("explain", read_items(folder)[0], "--json").out)
    (embed,) = [stage for stage in told["stages"] if stage["stage"] == "embed"]
    assert sorted(name.rpartition(" of ")[2] for name in embed["keys"]) == ["main", "main", "small", "small"]


def read_items(folder: Path) -> list[str]:
    return [line.split(",")[0] for line in (folder / "data" / "manifest.csv").read_text().splitlines()[1:]]


def _nothing_is_done_again(folder: Path, pipeline: Command) -> None:
    text = (folder / "pipeline.yaml").read_text()
    reordered = "{also: {small: {storage: fp16, weights: weights/esm2_small.pt}}, weights: weights/esm2_tiny.pt}"
    (folder / "pipeline.yaml").write_text(text.replace(EMBED, reordered))
    again = subprocess.run([sys.executable, "-c", NO_TORCH], cwd=folder, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    assert "embed: 20 embeddings: 20 cached, 0 to do" in again.stderr
    assert "  small: 10 embeddings: 10 cached, 0 to do" in again.stderr
    assert "imported: []" in again.stdout
    assert len(list((folder / "models").iterdir())) == 1
    for stage in ("embed", "graph", "train"):
        assert events(folder, EventKind.TASK_STARTED, stage) == []
    (folder / "pipeline.yaml").write_text(text)


def _others_are_done_and_no_graph(folder: Path, pipeline: Command) -> None:
    """A third encoder is computed alone, and another order is another model."""
    third = ("--set", "embed.also.third.layer=1", "--set", "embed.also.third.weights=weights/esm2_small.pt")
    told = json.loads(pipeline("explain", read_items(folder)[0], "--json", *third).out)
    (embed,) = [stage for stage in told["stages"] if stage["stage"] == "embed"]
    assert (embed["state"], embed["why"], embed["changes"]) == ("to do", "2 of 6 embeddings: it was never done", [])
    third = (*third, "--set", "embed.also.third.context=partner")
    done = pipeline(*ALL, *third, "--set", "train.embeddings=[main, small]")
    assert done.code == 0, done.err
    assert "embed: 30 embeddings: 20 cached, 10 to do in 1 task" in done.err
    assert "  third: 10 embeddings: 0 cached, 10 to do in 1 task" in done.err
    assert "graph: 5 graphs: 5 cached, 0 to do" in done.err
    assert len(list((folder / "models").iterdir())) == 2
    (started,) = events(folder, EventKind.JOB_SUBMITTED, "embed")
    assert started["recipe"] != ""


def _the_cache_keeps_both(folder: Path, pipeline: Command) -> None:
    """What is of the encoders that are named stays; what was of another one goes."""
    stat = pipeline("cache", "stat").out
    assert "embed: all 20 are there" in stat
    assert stat.count("context chain") == 2
    before = stored(folder)
    cleaned = pipeline("cache", "clean", "--yes", "--older-than", "0")
    assert cleaned.code == 0, cleaned.err
    after = stored(folder)
    assert sum(map(len, before.values())) == 30
    assert sum(map(len, after.values())) == 20
    assert set(after) == set(before)
    whole = pipeline(
        "submit", "--stage", "validate", *FOLLOW, "--set", "cache.check=semantic", "--set", "cache.sample=1"
    )
    assert whole.code == 0, whole.err
    assert "nothing is wrong" in whole.out
    assert "whose weights are not here" not in whole.out


def _the_model_is_used_elsewhere(folder: Path, model: Path, pipeline: Command) -> None:
    exported = pipeline("model", "export", str(model), "exported")
    assert exported.code == 0, exported.err
    assert "encoder 2: " in (folder / "exported" / "README.md").read_text()
    shutil.copytree(folder / "weights", folder / "exported" / "weights")
    (folder / "exported" / "data").symlink_to(folder / "data")
    words = ("--config", "exported/pipeline.yaml", "--model", "exported")
    data = ("--set", "data.source=manifest", "--set", f"data.path={folder}/data/manifest.csv")
    predicted = pipeline("submit", "--stage", "predict", *words, *data, *FOLLOW)
    assert predicted.code == 0, predicted.err
    turned = pipeline("submit", "--stage", "predict", *words, *data, *FOLLOW, "--set", "train.embeddings=[main, small]")
    assert turned.code == 2
    assert "encoder 1, storage: 'fp16' (here 'fp32')" in turned.err
    assert "in the same order in train.embeddings" in turned.err
