"""Training on one CPU: an epoch of the whole command against a plain torch loop and Lightning, the same model and data.

    python benchmarks/training.py [--complexes 96] [--epochs 4] [--rounds 3] [--save]

Ours is `pipeline submit train --follow` on a warm cache, with its plan, loader and checkpoints. The peers are
one process each: a plain loop and Lightning's Trainer without a callback. Both read one pickle per complex, in a
shuffled order, and run a batch at once through the same model with the same optimizer. An epoch costs what a run of
several epochs takes more than a run of one, in CPU time of the process tree. Before anything is timed, the losses of
the same complexes under the same parameters are compared.

The same runs say what share of an epoch the training thread spends beside the model, the optimizer and sums over ranks,
by the times that are logged (`step_clock`), and in which activities.
"""

from __future__ import annotations

import pickle
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.measure import Cost, Row, Spread, by_turns, cpu, itself, options, pipeline, publish, run
from pipeline.structures.synthetic import complex_pdb

REACH, BESIDE, BATCH, WIDTH = 1.03, 0.03, 8, 320
TASK = {"embedding_dim": WIDTH, "width": 32, "layers": 3, "pair_width": 8, "pair_layers": 0}
RATE, DECAY, CLIP = 1e-3, 0.01, 1.0
CONFIG = f"""\
data: {{source: glob, path: data}}
embed: {{weights: weights/esm2_wide.pt}}
train:
  task: "pipeline.tasks.interface:Interface"
  options: {{{", ".join(f"{name}: {value}" for name, value in TASK.items())}}}
  effective_batch: {BATCH}
  learning_rate: {RATE}
  weight_decay: {DECAY}
  clip: {CLIP}
  precision: fp32
  split: null
  validation: {{split: null}}
cluster: {{executor: local, slots: {{cpus: 1}}, train: {{cpus: 1}}}}
"""


# ---- the peers ----


def write_pickles(project: str, folder: str) -> None:
    """Write each complex as research code keeps it; see that both sides have the same loss."""
    import torch

    from pipeline.api import SamplerSettings, open_loader

    Path(folder).mkdir()
    loader = open_loader(Path(project) / "pipeline.yaml", SamplerSettings(batch=BATCH, padding=None))
    torch.manual_seed(0)
    task = task_of()
    model = task.model()
    for number, batch in enumerate(loader):
        items = batch.items[:]
        for item in items:
            sides = {role: plain(side) for role, side in item.sides.items()}
            data = {"id": item.id, "number": item.number, "sides": sides, "labels": copies(item.labels)}
            (Path(folder) / f"{item.number}.pkl").write_bytes(pickle.dumps(data))
        if number == 0:
            theirs = [unpickled(Path(folder) / f"{item.number}.pkl") for item in items]
            with torch.no_grad():
                ours, found = (float(loss_of(task, model, side)) for side in (items, theirs))
            assert abs(ours - found) <= 1e-5 * abs(ours), (ours, found)


def plain(side: Any) -> dict[str, Any]:
    """Return a partner as a dictionary of tensors that own their memory."""
    fields = {name: copies(getattr(side, name)) for name in ("nodes", "edges")}
    return {**fields, "centre": side.centre.clone(), "x": side.embedding.float(), "encoded": side.encoded.clone()}


def copies(tensors: Any) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def unpickled(path: Path) -> Any:
    """Return a complex from its pickle, which this script has written."""
    from pipeline.training.items.batch import ItemTensors, PartnerTensors
    from pipeline.training.sampling import BatchOrigin

    data = pickle.loads(path.read_bytes())
    sides = {
        role: PartnerTensors(role, side["centre"], side["nodes"], side["edges"], {}, {}, side["x"], side["encoded"])
        for role, side in data["sides"].items()
    }
    origin = BatchOrigin(0, 0, 0, 1, seed=data["number"])
    return ItemTensors(data["id"], data["number"], sides, {}, data["labels"], origin)


def task_of() -> Any:
    from pipeline.tasks.interface import Interface

    return Interface(**TASK)


def loss_of(task: Any, model: Any, items: Any) -> Any:
    """Return the loss of items as one batch: the sum of its terms' means."""
    batch = task.collate(items, np.random.default_rng(0))
    return sum(total / weight for total, weight in task.loss(model, batch).values())


def batches(folder: str, epoch: int) -> Iterator[list[Any]]:
    """Yield the batches of an epoch."""
    paths = sorted(Path(folder).iterdir())
    random.Random(epoch).shuffle(paths)
    for start in range(0, len(paths), BATCH):
        yield [unpickled(path) for path in paths[start : start + BATCH]]


def plain_loop(folder: str, epochs: str) -> None:
    """Train as a plain script does."""
    import torch

    torch.manual_seed(0)
    task = task_of()
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=DECAY)
    for epoch in range(int(epochs)):
        total = 0.0
        for items in batches(folder, epoch):
            optimizer.zero_grad()
            loss = loss_of(task, model, items)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            total += loss.item()
    torch.save(model.state_dict(), Path(folder).parent / "plain.pt")
    print(total)


def lightning(folder: str, epochs: str) -> None:
    """Train by Lightning's Trainer, which saves checkpoints and logs as it does by default."""
    import torch
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.task = task_of()
            self.model = self.task.model()

        def training_step(self, items: list[Any], _: int) -> Any:
            loss = loss_of(self.task, self.model, items)
            self.log("loss", loss, batch_size=len(items))
            return loss

        def transfer_batch_to_device(self, batch: Any, *_: Any) -> Any:
            return batch  # Lightning does not look into frozen dataclasses

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), RATE, weight_decay=DECAY)

    loader = torch.utils.data.DataLoader(sorted(Path(folder).iterdir()), BATCH, shuffle=True, collate_fn=read)  # type: ignore[arg-type]
    root = tempfile.mkdtemp(dir=Path(folder).parent)
    Trainer(
        accelerator="cpu", devices=1, max_epochs=int(epochs), gradient_clip_val=CLIP, default_root_dir=root,
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
    ).fit(Module(), loader)  # fmt: skip


def read(paths: list[Path]) -> list[Any]:
    return [unpickled(path) for path in paths]


PARTS: dict[str, Callable[..., None]] = {"pickles": write_pickles, "plain": plain_loop, "lightning": lightning}


# ---- what is timed ----


def make_project(folder: Path, complexes: int) -> None:
    """Write complexes of 60 to 180 residues a partner; do everything that comes before training."""
    (folder / "data").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number in range(complexes):
        sizes = rng.integers(60, 180, 2).tolist()
        (folder / "data" / f"c{number:04d}.pdb").write_bytes(complex_pdb(number, *sizes))
    (folder / "pipeline.yaml").write_text(CONFIG)
    sizes = ("--layers", "1", "--dim", str(WIDTH), "--heads", "20")
    run(pipeline("weights", "synth", *sizes, "--out", "weights/esm2_wide.pt"), folder)
    run(pipeline("submit", "--stage", "graph", "--follow"), folder)
    run(pipeline("submit", "--stage", "embed", "--follow"), folder)


def ours(folder: Path, epochs: int) -> Cost:
    """Train for some epochs, from fresh parameters."""
    shutil.rmtree(folder / "models", ignore_errors=True)
    return run(pipeline("submit", "--stage", "train", "--follow", "--set", f"train.epochs={epochs}"), folder)


def beside_model(project: Path) -> tuple[float, dict[str, float]]:
    """Return the share of its time that the last run's training thread spent beside the model, and of each activity."""
    from pipeline.training.loop.metrics_log import read_epochs
    from pipeline.training.loss_terms import sums_by_name
    from pipeline.training.step_clock import MODEL_WORK

    (folder,) = (path for path in (project / "models").iterdir() if (path / "checkpoints").exists())
    seconds = sums_by_name(epoch.seconds for epoch in read_epochs(folder)[1:])  # the first one starts readers
    whole_s = sum(seconds.values())
    shares = {name: spent_s / whole_s for name, spent_s in seconds.items() if name not in MODEL_WORK}
    return sum(shares.values()), shares


def main() -> int:
    """Time the sides by turns, and print the ratios."""
    typed = options(
        str(__doc__), 3,
        complexes={"type": int, "default": 96, "help": "complexes (default: 96)"},
        epochs={"type": int, "default": 4, "help": "epochs of the longer run (default: 4)"},
    )  # fmt: skip
    if typed.part:
        name, *words = typed.part
        PARTS[name](*words)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        project, pickles = Path(scratch) / "project", Path(scratch) / "pickles"
        make_project(project, typed.complexes)
        run(itself(__file__, "--part", "pickles", project, pickles))
        ways: dict[str, Callable[[], Cost]] = {}
        for epochs in (1, typed.epochs):
            ways[f"ours {epochs}"] = partial(ours, project, epochs)
            for name in ("plain", "lightning"):
                command = itself(__file__, "--part", name, pickles, str(epochs))
                ways[f"{name} {epochs}"] = partial(run, command)
        ours(project, 1)  # later submissions use the plan that this one makes
        ours(project, typed.epochs)
        beside, shares = beside_model(project)
        spent = {name: cpu(costs) for name, costs in by_turns(ways, typed.rounds, warm=False).items()}
    epoch = {
        side: [
            (long - short) / (typed.epochs - 1)
            for short, long in zip(spent[f"{side} 1"], spent[f"{side} {typed.epochs}"], strict=True)
        ]
        for side in ("ours", "plain", "lightning")
    }
    to_plain, to_lightning = (Spread.ratio(epoch["ours"], epoch[side]) for side in ("plain", "lightning"))
    parts = sorted(((share, name) for name, share in shares.items()), reverse=True)
    row = Row(
        "training",
        f"training, CPU time of an epoch of {typed.complexes} complexes: {Spread.of(epoch['ours']).median:.1f} s; the "
        "training thread's share for all but model, optimizer and sums over ranks",
        "a plain torch loop; Lightning",
        f"≤ {REACH}×; share ≤ {BESIDE:.0%}",
        f"{to_plain:.2f×}; {to_lightning:.2f×}; {beside:.1%} ("
        + ", ".join(f"{name} {share:.1%}" for share, name in parts[:4])
        + ")",
        "training.py",
        "" if to_plain.median <= REACH and beside <= BESIDE else "Readers share the core with the training thread.",
    )
    return publish([row], save=typed.save)


if __name__ == "__main__":
    sys.exit(main())
