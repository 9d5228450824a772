"""Fine-tuning ESM-2: what is trained, that it is ESM-2, and that it leaves as an ordinary checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pipeline.config.load import read_config
from pipeline.encoder.embedding_recipe import CLS, EOS, PAD, tokenize
from pipeline.encoder.esm2 import EsmEncoder
from pipeline.encoder.esm_checkpoint import digest_weights, load_esm_checkpoint
from pipeline.encoder.synth import write_random_checkpoint
from pipeline.memory.footprint import MemoryChoice, live_peak_bytes
from pipeline.memory.hardware.gpus import GIB
from pipeline.protocol import ITEMS
from pipeline.readers.sequences import Sequences
from pipeline.setup.demo_project import write_recipe_demo
from pipeline.tasks.encoder_finetune import TOKENS, EncoderFinetune
from pipeline.training.checkpoints.trained_weights import load_pretrained, write_published
from tests.memory.tracing.traced import tracer
from tests.tasks.cases import LORA, RNG, TEXTS, TOP, labelled
from tests.tasks.reader_items import batch_of
from tests.testkit.command import Command
from tests.testkit.project import settle


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "esm2_tiny.pt"
    write_random_checkpoint(path, layers=3, dim=16, heads=2)
    return path


def tuned(task: EncoderFinetune, checkpoint: Path) -> Any:
    """Return a model around a published encoder."""
    torch.manual_seed(0)
    model = task.model()
    report = load_pretrained(model, checkpoint)
    assert report.form == "esm2"
    assert all(name.startswith("head.") or ".lora_" in name for name in report.fresh)
    return model


def rows_of(model: Any, *texts: str) -> list[Tensor]:
    """Return the features of residues, of a padded batch."""
    tokens = [torch.tensor([CLS, *tokenize(text).tolist(), EOS]) for text in texts]
    x_BLD = model.encoder(pad_sequence(tokens, batch_first=True, padding_value=PAD))
    return [x_LD[1 : 1 + len(text)].detach() for x_LD, text in zip(x_BLD, texts, strict=True)]


def embedded(path: Path, *texts: str) -> list[Tensor]:
    """Return what the stage's encoder makes of texts."""
    found = load_esm_checkpoint(path)
    encoder = EsmEncoder(found, layer=found.architecture.layers, precision="fp32", device=torch.device("cpu"))
    return list(encoder([tokenize(text) for text in texts]).split([len(text) for text in texts]))


def written(model: Any, folder: Path) -> Path:
    """Write the encoder of a model as `pipeline model export --as esm2` does."""
    return write_published(folder, "esm2", model, model.state_dict())


BY_RESIDUE = replace(LORA, told="residues")
TASKS = {"lora": LORA, "top layers": TOP, "residues": BY_RESIDUE}


@pytest.mark.parametrize("task", [LORA, TOP], ids=["lora", "top layers"])
def test_before_training_it_is_the_encoder_that_was_read(task: EncoderFinetune, checkpoint: Path) -> None:
    found = rows_of(tuned(task, checkpoint), *TEXTS)
    for ours, theirs in zip(found, embedded(checkpoint, *TEXTS), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("task", "named"),
    [
        (LORA, ("head.", *(f"encoder.layers.{layer}.self_attn." for layer in range(3)))),
        (TOP, ("head.", "encoder.layers.2.", "encoder.emb_layer_norm_after.")),
        (BY_RESIDUE, ("head.", *(f"encoder.layers.{layer}.self_attn." for layer in range(3)))),
    ],
    ids=TASKS,
)
def test_the_loss_falls_and_only_what_is_named_changes(
    task: EncoderFinetune, named: tuple[str, ...], checkpoint: Path
) -> None:
    model, batch = tuned(task, checkpoint), task.collate(batch_of(labelled(task)).items[:], RNG)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=0.01), list[float]()
    for _ in range(40):
        ((total, weight),) = task.loss(model, batch).values()
        optimizer.zero_grad()
        (total / weight).backward()
        optimizer.step()
        losses.append(float(total.detach()) / float(weight))
    assert losses[-1] < 0.2 * losses[0]
    changed = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])]
    assert all(name.startswith(named) for name in changed)
    assert {part for name in changed for part in named if name.startswith(part)} == set(named)
    if task.rank:
        assert all(".lora_" in name for name in changed if name.startswith("encoder."))


@pytest.mark.parametrize("task", [LORA, TOP], ids=["lora", "top layers"])
def test_what_is_written_is_an_ordinary_checkpoint_that_encodes_as_the_tuned_one(
    task: EncoderFinetune, checkpoint: Path, tmp_path: Path
) -> None:
    model = tuned(task, checkpoint)
    for parameter in model.encoder.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    place = written(model, tmp_path)
    found = load_esm_checkpoint(place)
    assert found.architecture == load_esm_checkpoint(checkpoint).architecture
    for ours, theirs in zip(rows_of(model, *TEXTS), embedded(place, *TEXTS), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
        assert torch.nn.functional.cosine_similarity(ours, theirs).min() > 0.99999
    was = embedded(checkpoint, *TEXTS)
    assert max(float((now - then).abs().max()) for now, then in zip(embedded(place, *TEXTS), was, strict=True)) > 0.1


def test_an_encoder_that_was_not_trained_leaves_as_it_came_by_its_digest(checkpoint: Path, tmp_path: Path) -> None:
    place = written(tuned(LORA, checkpoint), tmp_path)
    assert digest_weights(load_esm_checkpoint(place)) == digest_weights(load_esm_checkpoint(checkpoint))
    again = tuned(LORA, place / "model.safetensors")
    assert torch.equal(rows_of(again, TEXTS[0])[0], rows_of(tuned(LORA, checkpoint), TEXTS[0])[0])


def test_bad_rows_of_a_table_are_rejections_with_their_reason(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    rows = ("a,MKV,010,1.5", "b,mkv,010,1", "c,MKV,01,1", "d,,,", "e,MKV,0?1,", "f,MKV,010,x", "g,MJV,000,1")
    path.write_text("\n".join(["id,sequence,sites,target", *rows, ""]))
    found = list(Sequences(path, target=("target",), sites="sites").entries())
    details = {entry.id: getattr(entry, "detail", "") for entry in found}
    assert details["a"] == details["e"] == ""
    assert "'m' at position 1 is not a residue letter" in details["b"]
    assert "2 sites of 3 residues" in details["c"]
    assert "no sequence" in details["d"]
    assert "target is not a number" in details["f"]
    assert "'J' at position 2" in details["g"]
    site = next(entry.arrays["sequence.site"] for entry in found if entry.id == "e")  # type: ignore[union-attr]
    assert site.tolist() == [0, -1, 1]


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_650m_model_fits_24_gb_by_lora_and_all_of_it_trained_would_not() -> None:
    sizes = {TOKENS: 1024, ITEMS: 4}
    choice = MemoryChoice(precision="bf16")

    def peak(task: EncoderFinetune) -> int:
        traced = tracer(task, least=sizes)
        return live_peak_bytes(traced.standing(choice), traced.micro(choice, sizes), accumulate=False)

    by_lora, by_top = peak(EncoderFinetune()), peak(EncoderFinetune(rank=0, top_layers=2))
    assert by_top < by_lora < 20 * GIB
    assert peak(EncoderFinetune(rank=0, top_layers=33)) > by_lora + 6 * GIB


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_tuned_encoder_is_exported_and_embeds_by_the_same_stage(
    tmp_path: Path, pipeline: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_recipe_demo(tmp_path / "here", "encoder_finetune").parent
    settle(folder / "data")
    monkeypatch.chdir(folder)
    typed = [str(Path(sys.executable).with_name("pipeline")), "submit", "--stage", "train", "--follow"]
    typed += ["--set", "train.learning_rate=0.05"]
    subprocess.run(typed, check=True, capture_output=True, timeout=600)
    (model,) = (folder / "models").iterdir()
    done = pipeline("model", "export", model.name, "tuned", "--as", "esm2")
    assert done.code == 0, done.err
    assert "tuned/esm2" in done.out
    (folder / "my.fasta").write_text("".join(f">s{place}\n{text}\n" for place, text in enumerate(TEXTS)))
    settle(folder)
    embed = pipeline("embed", "my.fasta", "--weights", "tuned/esm2")
    assert embed.code == 0, embed.err
    out = pipeline("export", "embeddings", "--out", "my.safetensors", "--config", "embedded/my/pipeline.yaml")
    assert out.code == 0, out.err
    from safetensors.torch import load_file

    rows, config = load_file("my.safetensors"), read_config(folder / "pipeline.yaml").config
    network = EncoderFinetune(**config.train.options).model()
    network.load_state_dict(load_file("tuned/model.safetensors"))
    for place, ours in enumerate(rows_of(network, *TEXTS)):
        torch.testing.assert_close(ours, rows[f"s{place}"], rtol=1e-3, atol=1e-3)
    (untuned,) = embedded(folder / "weights/esm2_tiny.pt", TEXTS[0])
    assert float((untuned - rows["s0"]).abs().max()) > 0.01
    assert json.loads((folder / "tuned/esm2/config.json").read_text())["model_type"] == "esm"
