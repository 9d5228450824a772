"""Two ranks on two cards train what one rank does, and go on from a checkpoint as if none of them had been killed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from pipeline.training.checkpoints.trained_weights import checkpoint_weights
from tests.card.on_card.typed_on_cards import CARD, INTERFACE, Typist, epochs, losses, predicted
from tests.card.on_card.typed_on_cards import projects_root as projects_root
from tests.card.on_card.typed_on_cards import typist as typist
from tests.recipes.projects import COMPLEX, Recipe, as_words, ran
from tests.testkit.trained import write_project

pytestmark = pytest.mark.timeout(900)  # it trains for real, on machines that are shared

CONFIG = """\
data: {source: manifest, path: data/manifest.csv}
embed: {weights: weights/esm2_tiny.pt}
graph: {neighbours: 8}
cluster: {executor: local, train: {time: 1h}}
train:
  task: "mortal:Mortal"
  effective_batch: 4
  micro_batch: 1
  epochs: 2
  validation: {split: null}
  checkpoints: {every: 1, last: 100}
"""
TASK = '''\
"""The reference task, whose second rank ends by a signal in mid-epoch where a file says so."""

import os
import signal
from pathlib import Path

import torch

from pipeline.tasks.interface import Interface


class Mortal(Interface):
    def loss(self, model, batch):
        order = Path(os.environ.get("MORTAL_ORDER", "/nonexistent"))
        if model.training and order.exists() and torch.distributed.is_initialized():
            saved = list(Path(order.read_text()).glob("*/checkpoints/step-*/manifest.json"))
            if len(saved) >= 2 and torch.distributed.get_rank() == 1:
                order.with_name("died.txt").touch()
                order.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)
'''
PLAIN = ("train.optimizer=sgd", "train.learning_rate=0.01", "train.options.dropout=0.0")
DRAWN = ("train.optimizer=adamw", "train.learning_rate=0.01", "train.options.dropout=0.3", "train.ema=0.9")
SIZES = tuple(
    f"train.options.{name}={size}"
    for name, size in {"embedding_dim": 16, "width": 8, "layers": 2, "pair_width": 4}.items()
)
_made: list[Path] = []


@pytest.fixture
def there(typist: Typist) -> Typist:
    """Return who types in a project of 14 complexes, of which 12 are trained on."""
    if not _made:
        folder = typist.root / "mortal"
        folder.mkdir()
        write_project(folder, yaml.safe_load(CONFIG), {"mortal.py": TASK}, ["train"] * 12 + ["val", "test"])
        _made.append(folder)
    typist.monkeypatch.chdir(_made[0])
    return typist


def trained(there: Typist, models: str, *settings: str, gpus: int = 2) -> str:
    """Train on cards to the end; return what was said."""
    words = as_words(CARD, f"train.models={models}", f"cluster.train.gpus={gpus}", *SIZES, *settings)
    done = ran(there.pipeline, words, "train")
    assert done.code == 0, done.out[-4000:] + done.err[-4000:]
    assert there.gpu_peak_bytes() > 0
    return str(done.out + done.err)


def last_checkpoint(models: str) -> Path:
    (model,) = (_made[0] / models).iterdir()
    return max((model / "checkpoints").glob("step-*"))


def everything(models: str) -> dict[str, torch.Tensor]:
    """Return all tensors of the last checkpoint, those of each rank too."""
    found = {}
    for file in sorted(last_checkpoint(models).glob("*.safetensors")):
        found |= {f"{file.name} {name}": tensor for name, tensor in load_file(file).items()}
    return found


@pytest.mark.parametrize("spread", ["false", "true"], ids=["plain", "sharded"])
def test_two_cards_train_what_one_does(there: Typist, spread: str) -> None:
    if not (_made[0] / "alone").exists():
        trained(there, "alone", *PLAIN, gpus=1)
    models = f"two-{spread}"
    trained(there, models, *PLAIN, f"train.sharding={spread}")
    alone, two = (checkpoint_weights(last_checkpoint(folder)) for folder in ("alone", models))
    assert alone.keys() == two.keys()
    for name, weights in alone.items():
        torch.testing.assert_close(two[name], weights, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    for one, other in zip(epochs(_made[0] / "alone"), epochs(_made[0] / models), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)


@pytest.mark.parametrize("spread", ["false", "true"], ids=["plain", "sharded"])
def test_ranks_of_which_one_is_killed_in_mid_epoch_go_on_bitwise_as_if_it_had_not_been(
    there: Typist, spread: str
) -> None:
    whole, killed = f"whole-{spread}", f"killed-{spread}"
    trained(there, whole, *DRAWN, f"train.sharding={spread}")
    order = _made[0] / "order.txt"
    order.write_text(str(_made[0] / killed))
    there.monkeypatch.setenv("MORTAL_ORDER", str(order))
    trained(there, killed, *DRAWN, f"train.sharding={spread}")
    died = order.with_name("died.txt")
    assert died.exists(), "it was not killed"
    first = min(last_checkpoint(killed).parent.glob("step-*")) / "manifest.json"
    assert first.stat().st_mtime_ns < died.stat().st_mtime_ns, "it began anew"
    died.unlink()
    undisturbed, gone_on = everything(whole), everything(killed)
    assert undisturbed.keys() == gone_on.keys()
    assert [name for name, tensor in undisturbed.items() if not torch.equal(tensor, gone_on[name])] == []


# Half precision


@pytest.mark.parametrize("recipe", [COMPLEX, INTERFACE], ids=lambda recipe: recipe.name)
def test_a_recipe_in_half_precision_trains_and_predicts_near_single_precision(typist: Typist, recipe: Recipe) -> None:
    folder = typist.go(recipe)
    typist.submit("predict", recipe, "train.models=halved", "train.predict.folder=of_half", "train.precision=bf16")
    typist.submit("train", recipe, "train.models=carded")
    halved, whole = losses(folder / "halved"), losses(folder / "carded")
    assert halved == pytest.approx(whole, rel=0.1)
    assert halved != whole
    assert all(np.isfinite(one).all() for one in predicted(folder / "of_half").values() if not isinstance(one, str))
