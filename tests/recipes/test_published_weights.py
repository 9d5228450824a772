"""Published files of four systems as `train.pretrained`: taken whole, written again, or refused at submission."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from torch import nn

from pipeline.config.load import read_config
from pipeline.config.schema_train import TrainSection
from pipeline.errors import ConfigError
from pipeline.project.run_code import load_task
from pipeline.setup.demo_project import DEMOS, write_recipe_demo
from pipeline.tasks.contrastive_pair import ContrastivePair
from pipeline.tasks.pairs.pair_towers import options_of
from pipeline.tasks.rna_ligand import RnaLigand
from pipeline.tasks.spectra_finetune import SpectraFinetune
from pipeline.training.checkpoints.trained_weights import load_pretrained, published_forms, stored_weights
from tests.reference import FOLDER, checkpoint, recorded, transformers_folder
from tests.tasks.originals import PEPTRM, off, peaks_of, pocket_sizes
from tests.testkit.command import Command
from tests.testkit.evil import Evil
from tests.testkit.project import settle

DREAMS = {
    "layers": 3, "heads": 4, "d_fourier": 40, "d_peak": 8, "fourier_width": 16, "as_published": True, "classes": 2000,
}  # fmt: skip


def file_of(name: str) -> Path:
    return transformers_folder() if name == "clip/transformers" else checkpoint(name)


def clip() -> nn.Module:
    return ContrastivePair(**options_of(recorded("clip/state"))).model()


FILES: dict[str, tuple[str, str, Callable[[], nn.Module]]] = {
    "DreaMS, pre-trained": ("dreams/ssl_model.ckpt", "dreams", lambda: SpectraFinetune(**DREAMS).model()),
    "DreaMS, embedding": (
        "dreams/embedding_model.ckpt", "dreams", lambda: SpectraFinetune(head="embedding", **DREAMS).model(),
    ),
    "RNA-3E-FFI": ("rna3effi/best_model.pt", "rna3effi", lambda: RnaLigand(**pocket_sizes("best")).model()),
    "pepTRM": ("peptrm/checkpoint_step_3.pt", "peptrm", PEPTRM.model),
    "pepTRM, compiled": ("peptrm/of_a_compiled_model.pt", "peptrm", PEPTRM.model),
    "CLIP, openai's": ("clip/openai_half.pt", "clip", clip),
    "CLIP, of transformers": ("clip/transformers", "clip_transformers", clip),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_published_file_is_taken_whole_and_goes_out_to_the_bit(name: str) -> None:
    file, form, made = FILES[name]
    report = load_pretrained(model := made(), file_of(file))
    assert report.form == form
    assert report.is_whole
    assert all(one.startswith(("head.", "atoms.")) for one in report.fresh)
    back, theirs = published_forms(model)[form].write(model.state_dict()), stored_weights(file_of(file))
    bare = {one.removeprefix("backbone."): tensor for one, tensor in back.items()}
    for one, tensor in theirs.items():
        if one not in report.left:
            assert torch.equal(
                bare[one.removeprefix("backbone.")], tensor.to(bare[one.removeprefix("backbone.")].dtype)
            )


@pytest.mark.parametrize("file", ["ssl_model", "embedding_model"])
def test_backbone_only_is_the_original_backbones_embedding_whatever_head_the_file_has(file: str) -> None:
    model = SpectraFinetune(head="embedding", backbone_only=True, **DREAMS | {"classes": 7}).model().eval()
    report = load_pretrained(model, checkpoint(f"dreams/{file}.ckpt"))
    assert report.fresh == ("pretraining.mass.weight", "pretraining.mass.bias")  # of another size: no head reads them
    with torch.no_grad():
        found = model(peaks_of(recorded("dreams/inputs")["spec_100"]))
    assert off(found, recorded("dreams/outputs")["ssl.embedding_100"]) < 1e-4


SIZED: dict[str, tuple[str, Callable[..., nn.Module]]] = {
    "DreaMS": ("dreams/embedding_model.ckpt", lambda **sizes: SpectraFinetune(**EMBEDDING | sizes).model()),
    "CLIP": ("clip/openai_half.pt", lambda **sizes: ContrastivePair(**SIDES | sizes).model()),
    "CLIP, of transformers": ("clip/transformers", lambda **sizes: ContrastivePair(**SIDES | sizes).model()),
}
EMBEDDING = {"head": "embedding", "as_published": True}
SIDES = {"left": "images", "right": "text"}


@pytest.mark.parametrize("name", SIZED)
def test_a_model_of_other_sizes_refuses_a_published_file_with_the_options_that_fit(name: str) -> None:
    file, made = SIZED[name]
    with pytest.raises(ConfigError) as caught, torch.device("meta"):
        load_pretrained(made(layers=1), file_of(file))
    remedy = caught.value.remedy.removeprefix("--set ").partition(", or load")[0]
    typed = [words.split("=") for words in remedy.split(" --set ")]
    options = {key.removeprefix("train.options."): json.loads(value) for key, value in typed}
    assert load_pretrained(made(**options), file_of(file)).is_whole


def test_moving_averages_are_another_entry_of_the_same_file() -> None:
    path = checkpoint("peptrm/checkpoint_step_3.pt")
    load_pretrained(plain := PEPTRM.model(), path)
    load_pretrained(averaged := PEPTRM.model(), path, train=TrainSection(pretrained_entry="ema_state_dict"))
    assert any(not torch.equal(one, averaged.state_dict()[name]) for name, one in plain.state_dict().items())


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("other", ["DreaMS, pre-trained", "RNA-3E-FFI", "pepTRM", "CLIP, openai's"])
def test_a_file_of_another_system_is_refused_by_what_does_not_fit(name: str, other: str) -> None:
    if FILES[other][1].partition("_")[0] == FILES[name][1].partition("_")[0]:
        return
    with pytest.raises(ConfigError, match="do not belong to this model: 0 of its"):
        load_pretrained(FILES[name][2](), file_of(FILES[other][0]), partial=True)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in DEMOS if name != "complex_docking"])
def test_code_wrong_shapes_and_another_system_are_refused_at_submission(
    name: str, pipeline: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_recipe_demo(tmp_path / "here", name)
    monkeypatch.chdir(tmp_path / "here")
    train = read_config(config).config.train
    state = load_task(train.task, train.options).model().state_dict()
    first = next(iter(state))
    shaped = {**state, first: torch.zeros(3, 2, 1, 7)}
    bad = {
        "code": (
            {"state_dict": state, "x": Evil(tmp_path / "made")},
            "its pickle imports posix.system. Nothing was executed",
        ),
        "shape": (shaped, f"{first}: float32[3, 2, 1, 7] in the file"),
        "other": ({"elsewhere.weight": torch.zeros(2)}, "do not belong to this model: 0 of its"),
    }
    for what, (content, says) in bad.items():
        torch.save(content, path := tmp_path / f"{what}.pt")
        sets = ("--set", f"train.pretrained={path}", "--set", "train.pretrained_partial=false")
        refused = pipeline("submit", "--stage", "train", "--follow", *sets)
        assert refused.code == 2, refused.err
        assert says in refused.err
        assert str(path) in refused.err
    assert not (tmp_path / "made").exists()
    assert not list((tmp_path / "here").glob("models/*"))


EMBEDDED = """\
data: {source: reader, path: data.mgf, reader: "pipeline.readers.spectra:Spectra", options: {max_peaks: 100}}
train:
  task: "pipeline.tasks.spectra_finetune:SpectraFinetune"
  options: {head: embedding, %s}
  batching: padded
cluster: {executor: local, slots: {cpus: 2}, train: {gpus: 0, cpus: 1}}
"""


@pytest.mark.nightly
def test_a_published_model_says_of_a_file_what_the_original_says(
    pipeline: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copyfile(FOLDER / "dreams/files/example_5_spectra.mgf", "data.mgf")
    Path("pipeline.yaml").write_text(EMBEDDED % json.dumps(DREAMS).strip("{}"))
    settle(tmp_path)
    done = pipeline(
        "submit", "--stage", "predict", "--model", str(checkpoint("dreams/embedding_model.ckpt")), "--follow"
    )
    assert done.code == 0, done.err
    (made,) = tmp_path.glob("predictions/*/embeddings.npy")
    with h5py.File(FOLDER / "dreams/files/library.hdf5") as theirs:
        assert np.abs(np.load(made) - theirs["DreaMS_embedding"][:]).max() < 1e-4
