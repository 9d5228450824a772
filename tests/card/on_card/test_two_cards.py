"""Two ranks on two cards train what one rank does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeline.training.checkpoints.exported_model import checkpoint_weights
from tests.card.on_card.typed_on_cards import CARD, Typist, epochs
from tests.card.on_card.typed_on_cards import projects_root as projects_root
from tests.card.on_card.typed_on_cards import typist as typist
from tests.recipes.projects import as_words, ran
from tests.runs.workflow.trained import write_project

pytestmark = pytest.mark.timeout(900)  # it trains for real, on machines that are shared

CONFIG = """\
data: {source: manifest, path: data/manifest.csv}
embed: {weights: weights/esm2_tiny.pt}
graph: {neighbours: 8}
cluster: {executor: local, train: {time: 1h}}
train:
  task: "pipeline.tasks.interface:Interface"
  effective_batch: 4
  micro_batch: 1
  epochs: 2
  validation: {split: null}
  checkpoints: {every: 1, last: 100}
"""
PLAIN = ("train.optimizer=sgd", "train.learning_rate=0.01", "train.options.dropout=0.0")
SIZES = tuple(
    f"train.options.{name}={size}"
    for name, size in {"embedding_dim": 16, "width": 8, "layers": 2, "pair_width": 4}.items()
)
_made: list[Path] = []


@pytest.fixture
def there(typist: Typist) -> Typist:
    """Return who types in a project of 14 complexes, of which 12 are trained on."""
    if not _made:
        folder = typist.root / "pair"
        folder.mkdir()
        write_project(folder, CONFIG, {}, ["train"] * 12 + ["val", "test"])
        _made.append(folder)
    typist.monkeypatch.chdir(_made[0])
    return typist


def trained(there: Typist, models: str, *settings: str, gpus: int = 2) -> str:
    """Train on cards to the end; return what was said."""
    words = as_words(CARD, f"train.models={models}", f"cluster.train.gpus={gpus}", *SIZES, *settings)
    done = ran(there.pipeline, words, "train")
    assert done.code == 0, done.out[-4000:] + done.err[-4000:]
    assert "GPU memory" in done.out
    return str(done.out + done.err)


def last_checkpoint(models: str) -> Path:
    (model,) = (_made[0] / models).iterdir()
    return max((model / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("spread", ["false", "true"], ids=["plain", "sharded"])
def test_two_cards_train_what_one_does(there: Typist, spread: str) -> None:
    if not (_made[0] / "alone").exists():
        trained(there, "alone", *PLAIN, gpus=1)
    models = f"two-{spread}"
    trained(there, models, *PLAIN, f"train.sharding={spread}")
    alone, two = checkpoint_weights(last_checkpoint("alone")), checkpoint_weights(last_checkpoint(models))
    assert alone.keys() == two.keys()
    for name, weights in alone.items():
        torch.testing.assert_close(two[name], weights, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    for one, other in zip(epochs(_made[0] / "alone"), epochs(_made[0] / models), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
