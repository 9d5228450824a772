"""`pipeline submit embed`, as people type it: what it does, what it does not do again, and how it says no."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.config.load import read_config
from pipeline.dataset.worklist import StageSurvey
from pipeline.encoder.synth import write_random_checkpoint
from pipeline.engine.lifecycle import new_run
from pipeline.engine.worker import GO_ON
from pipeline.errors import CacheDamaged, CacheUnusable
from pipeline.journal.ledger import LedgerReader
from pipeline.project.project import Project, asked_bytes
from pipeline.project.run_code import WORKER, module_command
from pipeline.records import EventKind
from pipeline.stages import embed as embed_stage
from pipeline.stages.jobs import refuse_unfit_disk
from pipeline.store.cache_folder import CacheFolder
from pipeline.training.items.item_source import ItemArrays
from pipeline.training.items.residue_embeddings import Embeddings
from tests.encoder.sequences import natural
from tests.testkit import project as kit
from tests.testkit.project import settle, to_do, until, write_config

SUBMIT = ("submit", "--stage", "embed", "--executor", "local", "--follow")
EMBED = {"embed__weights": "esm2_tiny.pt"}
FASTA = {"data": {"source": "fasta", "path": "data.fasta", "max_rejected_fraction": 1.0}}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "esm2_tiny.pt"
    write_random_checkpoint(path, layers=2, dim=16, heads=2)
    settle(path.parent)
    return path


@pytest.fixture
def fasta(tmp_path: Path, checkpoint: Path) -> Path:
    """Return a folder with weights and a configuration that reads data.fasta."""
    shutil.copy2(checkpoint, tmp_path)
    write_config(tmp_path, **FASTA, **EMBED)
    return tmp_path


def write_fasta(folder: Path, sequences: list[str]) -> None:
    lines = (f">s{number}\n{sequence}\n" for number, sequence in enumerate(sequences))
    (folder / "data.fasta").write_text("".join(lines))


def events(folder: Path, kind: EventKind, stage: str = "embed") -> list[dict[str, Any]]:
    return [
        dict(event.data) for event in LedgerReader(kit.Project(folder).run).fresh()
        if event.kind is kind and event.data.get("stage") == stage
    ]  # fmt: skip


def metas(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what the store says of each text, and how many rows it has."""
    store = CacheFolder(folder / "cache").kind("embed")
    records = store.read(store.keys())
    return {record.meta["text"]: dict(record.meta) | {"shape": record.arrays["rows"].shape} for record in records}


@pytest.mark.nightly
def test_complexes_are_scanned_and_embedded_by_one_command(pipeline, make_project, checkpoint):
    folder = make_project(6, **EMBED)
    shutil.copy2(checkpoint, folder)
    done = pipeline(*SUBMIT)
    assert done.code == 0, done.err
    assert to_do() == {"scan": (0, 6), "embed": (0, 12)}
    assert all(meta["shape"] == (len(text), 16) for text, meta in metas(folder).items())
    assert pipeline(*SUBMIT).code == 0
    assert to_do()["embed"] == (12, 0)
    assert events(folder, EventKind.TASK_STARTED) == []


def missing(folder: Path, *sets: str) -> int:
    """Return how many sequences would be embedded with these settings."""
    project = Project.open(read_config(folder / "pipeline.yaml", sets).config)
    return embed_stage.EmbedStage().survey(project, None, at_once=1).counts["missing"]


@pytest.mark.nightly
def test_changing_what_changes_a_number_embeds_anew_and_anything_else_does_not(fasta, pipeline):
    write_fasta(fasta, natural(3))
    assert pipeline(*SUBMIT).code == 0
    for setting in ("embed.layer=1", "embed.context=partner", "embed.storage=fp16", "embed.half_fallback=none"):
        assert missing(fasta, setting, "embed.precision=fp16") == 3, setting
    for setting in ("embed.batch.cap=1", "embed.batch.policy=tokens", "embed.device=cpu", "embed.layer=2"):
        assert missing(fasta, setting) == 0, setting
    (fasta / "esm2_tiny.pt").unlink()  # other weights in the same place are other embeddings
    write_random_checkpoint(fasta / "esm2_tiny.pt", layers=2, dim=16, heads=2, seed=5)
    assert missing(fasta) == 3


def rejected(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in kit.Project(folder).run.rejected.read_text().splitlines()]


BAD = {
    "lower case": ("mkvl", "bad_sequence"),
    "J": ("MKJ", "bad_sequence"),
    "stop": ("MK*V", "bad_sequence"),
    "dot": ("MK.V", "bad_sequence"),
    "gap": ("MK-V", "bad_sequence"),
    "mask": ("MK<mask>V", "bad_sequence"),
    "empty": ("", "bad_sequence"),
    "40,000 residues": ("M" * 40_000, "too_many_residues"),
}


@pytest.mark.nightly
def test_sequences_that_cannot_be_read_are_rejected_and_the_others_embedded(fasta, pipeline):
    good = natural(2)
    write_fasta(fasta, [*good, *(sequence for sequence, _ in BAD.values())])
    done = pipeline(*SUBMIT)
    assert done.code == 0, done.err
    found = rejected(fasta)
    assert [one["reason"] for one in found] == [reason for _, reason in BAD.values()]
    assert all(one["detail"] for one in found)
    assert set(metas(fasta)) == set(good)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("policy", "rows", "cut"),
    [
        ("full", 300, None),
        ("windows", 300, {"policy": "windows", "length": 100, "overlap": 20}),
        ("truncate", 100, {"policy": "truncate", "length": 100, "overlap": 0}),
    ],
)
def test_a_long_sequence_is_treated_as_configured_and_its_record_says_so(fasta, pipeline, policy, rows, cut):
    (text,) = natural(1, shortest=300)
    write_fasta(fasta, [text, text[:50]])
    long = ("embed.long.length=100", "embed.long.overlap=20", f"embed.long.policy={policy}")
    done = pipeline(*SUBMIT, *(word for setting in long for word in ("--set", setting)))
    assert done.code == 0, done.err
    found = metas(fasta)
    assert (found[text]["shape"], found[text]["residues"], found[text]["cut"]) == ((rows, 16), 300, cut)
    assert found[text[:50]]["cut"] is None


@pytest.mark.nightly
def test_a_task_with_two_gpus_is_two_processes_that_share_it_by_cost(fasta, pipeline):
    write_fasta(fasta, natural(40, longest=200))
    gpus = ("cluster.slots.gpus=2", "cluster.embed.gpus=2", "embed.device=cpu", "cluster.embed.mem=2GiB")
    done = pipeline(*SUBMIT, *(word for setting in gpus for word in ("--set", setting)))
    assert done.code == 0, done.err
    told = {
        event.writer: event.data for event in LedgerReader(kit.Project(fasta).run).fresh()
        if event.kind is EventKind.PROGRESS and event.data["stage"] == "embed" and event.data["done"]
    }  # fmt: skip
    assert sorted(told) == ["embed-000000-0", "embed-000000-1"]
    assert sum(one["done"] for one in told.values()) == 40
    costs = [one["figures"]["cost_done"] for one in told.values()]
    assert max(costs) / min(costs) < 1.3


@pytest.mark.nightly
def test_a_prime_number_of_sequences_is_cut_into_tasks_of_whole_batches(fasta):
    write_fasta(fasta, natural(101))
    config = read_config(fasta / "pipeline.yaml", ["cluster.embed.items_per_task=10"]).config
    kit.Project(fasta).finishes("scan")
    run = new_run(config, ["embed"])
    found = embed_stage.EmbedStage().survey(Project.open(config), run, at_once=2)
    sizes = [shard.items for shard in found.shards]
    assert sum(sizes) == 101
    assert len(sizes) == 11
    assert sum(size % 4 != 0 for size in sizes) == 1
    rows_N2 = np.fromfile(run.order("embed"), np.uint64).reshape(-1, 2)
    lengths = [rows_N2[shard.start : shard.end, 1].astype(int) for shard in found.shards]
    assert all((np.diff(one) <= 0).all() for one in lengths)  # every task begins with its longest
    assert max(one.sum() for one in lengths) / min(one.sum() for one in lengths) < 1.5


@pytest.mark.nightly
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGUSR2, GO_ON)])
def test_a_task_that_is_told_to_end_keeps_what_is_finished(fasta, number, code):
    write_fasta(fasta, natural(600, shortest=300, longest=400))
    config = read_config(fasta / "pipeline.yaml").config
    kit.Project(fasta).finishes("scan")
    run = new_run(config, ["embed"])
    project = Project.open(config)
    embed_stage.EmbedStage().survey(project, run, at_once=1).write_shards(run, "embed")
    task = [*module_command(WORKER), str(run.path), "embed", "0"]
    worker = subprocess.Popen(task)
    progress = run.events / "embed-000000.jsonl"
    until("the first sequences", lambda: progress.exists() and '"progress"' in progress.read_text())
    worker.send_signal(number)
    assert worker.wait(timeout=300) == code
    store = project.encoding.shelves.embeddings
    store.refresh()
    kept = store.stat().records
    assert 0 < kept < 600
    assert list((fasta / "cache/embed/tmp").iterdir()) == []
    assert subprocess.run(task, check=False).returncode == 0
    store.refresh()
    assert store.stat().records == 600
    assert embedding_rows(fasta) == 600  # none twice


def embedding_rows(folder: Path) -> int:
    """Count the embeddings in all shards, copies included."""
    from safetensors import safe_open

    names = [name for shard in (folder / "cache/embed/shards").iterdir() for name in safe_open(shard, "np").keys()]  # noqa: SIM118
    return sum(name.endswith("/rows") for name in names)


def test_absent_weights_name_where_they_were_looked_for_and_the_command_that_brings_them(fasta, pipeline, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(fasta / "torch"))
    monkeypatch.setenv("HF_HOME", str(fasta / "hf"))
    write_fasta(fasta, natural(1))
    done = pipeline(*SUBMIT, "--set", "embed.weights=weights/esm2_t33_650M_UR50D.pt")
    assert done.code == 2
    assert "pipeline weights fetch esm2_t33_650M_UR50D" in done.err
    assert not (fasta / "runs").exists()


def test_wrong_weights_are_refused_before_a_run_begins(fasta, pipeline):
    write_fasta(fasta, natural(1))
    data = (fasta / "esm2_tiny.pt").read_bytes()
    (fasta / "esm2_tiny.pt").write_bytes(data[: len(data) // 2])
    done = pipeline(*SUBMIT)
    assert done.code == 3
    assert "esm2_tiny.pt" in done.err
    assert not (fasta / "runs").exists()


def test_a_layer_that_the_weights_do_not_have_is_refused(fasta, pipeline):
    write_fasta(fasta, natural(1))
    done = pipeline(*SUBMIT, "--set", "embed.layer=3")
    assert done.code == 2
    assert "embed.layer" in done.err


def test_a_disk_without_room_for_the_results_ends_the_run_before_it_computes(fasta, pipeline, monkeypatch):
    write_fasta(fasta, natural(50))
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(10**9, 10**9, 100_000))
    done = pipeline(*SUBMIT)
    assert done.code == 5
    assert events(fasta, EventKind.TASK_STARTED) == []


@pytest.mark.nightly
def test_half_precision_that_is_not_good_enough_is_done_in_full_and_said_so(fasta, pipeline):
    write_random_checkpoint(fasta / "esm2_stress.pt", layers=6, dim=64, heads=4, stress=6.0)
    write_fasta(fasta, natural(4))
    half = ("--set", "embed.weights=esm2_stress.pt", "--set", "embed.precision=bf16")
    done = pipeline(*SUBMIT, *half)
    assert done.code == 0, done.err
    assert {meta["precision"] for meta in metas(fasta).values()} == {"fp32"}
    refused = pipeline(*SUBMIT, *half, "--set", "embed.half_fallback=none")
    assert refused.code == 7


@pytest.mark.nightly
def test_the_run_keeps_speed_memory_and_closeness(fasta, pipeline):
    write_fasta(fasta, natural(30) * 2)  # what items share is embedded once
    pipeline(*SUBMIT)
    assert to_do()["embed"] == (0, 30)
    stage = json.loads(pipeline("status", "--json").out)["stages"][1]
    measured = stage["measured"]
    assert measured["residues_per_s"] > 0
    assert measured["pad_factor"] >= 1
    assert measured["peak_rss_bytes"] > 50 << 20
    assert 0.99999 <= measured["lowest cosine to fair-esm"] <= 1.000001
    assert "lowest cosine to fair-esm" in pipeline("status", "-v").out  # of ESM-2 and its relatives
    assert measured["left_s"] == 0
    assert stage["residues"] == sum(map(len, natural(30)))


def test_a_dry_run_says_what_would_be_done_and_leaves_nothing(fasta, pipeline):
    write_fasta(fasta, natural(30))
    before = sorted(fasta.iterdir())
    done = pipeline("submit", "--stage", "embed", "--dry-run")
    assert done.code == 0, done.err
    assert sorted(fasta.iterdir()) == before
    pipeline("submit", "--stage", "scan", "--follow")
    assert "30" in pipeline("submit", "--stage", "embed", "--dry-run").out.splitlines()[4].split()


def flip_a_bit(folder: Path) -> None:
    """Damage one embedding in the middle of its rows."""
    (shard,) = (folder / "cache/embed/shards").iterdir()
    data = bytearray(shard.read_bytes())
    store = CacheFolder(folder / "cache").kind("embed")
    place = store.locate([next(store.keys())])[0][0]
    data[place.offset + place.length // 3] ^= 4
    shard.chmod(0o600)
    shard.write_bytes(data)


def join_all(embeddings: Embeddings, texts: list[str]) -> None:
    """Read the rows of texts as a training does."""
    chains = [["A", "protein", text] for text in texts]
    item = ItemArrays(0, "it", {}, {"partners": [{"role": "whole", "chains": chains}]})
    (partner,) = embeddings.partners([item])
    for text, copy in partner.copies:
        length = len(text.sequence)
        row_R, out_RD = np.arange(length, dtype=np.int32), np.zeros((length, 16), np.float32)
        encoded_R = np.zeros(length, bool)
        embeddings.join([(text, copy)], row_R, out_RD, encoded_R, "it")


@pytest.mark.nightly
def test_damage_that_a_training_met_is_made_anew_however_little_is_verified(fasta, pipeline):
    write_fasta(fasta, natural(5))
    assert pipeline(*SUBMIT).code == 0
    flip_a_bit(fasta)
    assert missing(fasta, "cache.verify_bytes=0") == 0  # not looked at
    assert missing(fasta) == 1
    read_nothing = "cache.verify_bytes=0"
    encoding = Project.open(read_config(fasta / "pipeline.yaml", ()).config).encoding
    with pytest.raises(CacheDamaged):
        join_all(Embeddings(encoding.shelves.embeddings, (encoding.recipe, encoding.weights.dim)), natural(5))
    assert missing(fasta, read_nothing) == 1
    again = pipeline(*SUBMIT, "--set", read_nothing)
    assert again.code == 0, again.err
    assert to_do()["embed"] == (4, 1)
    assert missing(fasta, read_nothing) == 0


@pytest.mark.nightly
def test_many_items_may_share_a_sequence_that_cannot_be_embedded(fasta, pipeline):
    write_fasta(fasta, ["M" * 80] * 39 + ["M" * 101])
    long = ("--set", "embed.long={policy: error, length: 100, overlap: 20}")
    done = pipeline(*SUBMIT, *long, "--set", "data.max_rejected_fraction=0.05")
    assert done.code == 0, done.err
    assert to_do()["embed"] == (0, 1)
    assert [one["reason"] for one in rejected(fasta)] == ["sequence_too_long"]


def test_weights_with_numbers_that_are_none_are_refused(fasta, pipeline):
    write_fasta(fasta, natural(1))
    with torch.serialization.safe_globals([Namespace]):
        data = torch.load(fasta / "esm2_tiny.pt", weights_only=True)
    data["model"]["encoder.sentence_encoder.layers.1.fc1.weight"][0, :3] = float("nan")
    torch.save(data, fasta / "esm2_nan.pt")
    for words in (("weights", "check", "esm2_nan.pt"), (*SUBMIT, "--set", "embed.weights=esm2_nan.pt")):
        done = pipeline(*words)
        assert done.code == 3
        assert "layers.1.fc1.weight" in done.err


def test_a_cache_that_cannot_be_written_is_found_before_anything_is_computed(fasta):
    project = Project.open(read_config(fasta / "pipeline.yaml", [f"cache.root={fasta}/cache/here"]).config)
    refuse_unfit_disk(project, StageSurvey({}, (), bytes=1), ["embed"])
    (fasta / "cache").write_text("not a folder")
    with pytest.raises(CacheUnusable):
        refuse_unfit_disk(project, StageSurvey({}, (), bytes=1), ["embed"])


def test_the_memory_of_a_task_is_that_of_all_its_processes(fasta):
    write_fasta(fasta, natural(1))

    def asked(*sets: str) -> int:
        project = Project.open(read_config(fasta / "pipeline.yaml", sets).config)
        return asked_bytes(project.config.cluster.embed, embed_stage.EmbedStage().mem_bytes(project))

    assert asked("cluster.embed.gpus=4") == 4 * asked() == 4 * asked("cluster.embed.gpus=1")
    assert asked("cluster.embed.gpus=4", "cluster.embed.mem_per_gpu=3GiB") == 12 << 30
    assert asked("cluster.embed.mem=3GiB") == 3 << 30


@pytest.mark.nightly
def test_a_process_that_was_killed_is_reported_as_a_shell_would(fasta, tmp_path):
    write_fasta(fasta, natural(8))
    settings = ["cluster.embed.gpus=2", "embed.device=cpu", "cluster.embed.mem=4GiB"]
    config = read_config(fasta / "pipeline.yaml", settings).config
    kit.Project(fasta).finishes("scan")
    run = new_run(config, ["embed"])
    embed_stage.EmbedStage().survey(Project.open(config), run, at_once=1).write_shards(run, "embed")
    limit = "import resource; resource.setrlimit(resource.RLIMIT_CPU, (0, 0))"  # the kernel kills what computes
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nif '1/2' in sys.argv:\n    {limit}\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    task = [sys.executable, "-m", "pipeline.engine.worker", str(run.path), "embed", "0"]
    done = subprocess.run(task, env=environment, check=False)
    assert done.returncode in (128 + signal.SIGKILL, 128 + signal.SIGXCPU)
    store = CacheFolder(fasta / "cache").kind("embed")
    assert store.stat().records == 4  # the other process did its part
