"""What a narrow DreaMS learns of made molecules in a few minutes: a property.

    python benchmarks/training/learn_spectra.py [--epochs N] [--out FILE]

A property is the sum of what a molecule's substructures add, which are seen as two fragments each, among noise, with
3 ppm of error; every substructure has an isomer of the same mass and other fragments. Spectra of the molecules that
are validated are of none that is trained on. The control is the same training with properties shuffled over the
training spectra; it is validated on the true ones. Figures are of the model before, and after the last epoch.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np  # noqa: E402 - it reads the number of threads
import torch  # noqa: E402

from benchmarks.circumstances import write  # noqa: E402 - the project is found only now
from pipeline.readers import made  # noqa: E402
from pipeline.readers.spectra import Spectra  # noqa: E402
from pipeline.records import Entry  # noqa: E402
from pipeline.tasks.spectra_finetune import SpectraFinetune  # noqa: E402
from pipeline.training.step.optimizers import StepSettings  # noqa: E402
from pipeline.training.step.step import Step  # noqa: E402
from tests.tasks.reader_items import batch_of  # noqa: E402

SPECTRA, BATCH = 1500, 32
TASK = SpectraFinetune(layers=2, heads=4, d_fourier=56, d_peak=8, fourier_width=64, finest=0.01, max_peaks=20)
STEP = StepSettings(learning_rate=1e-3, clip=1.0)
Items = Sequence[dict[str, Any]]


def spectra() -> dict[str, Items]:
    """Return the arrays of made spectra by their split."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "made.mgf"
        made.molecules(path, SPECTRA)
        entries = [entry for entry in Spectra(path, target=("target",)).entries() if isinstance(entry, Entry)]
    return {split: [dict(one.arrays) for one in entries if one.split == split] for split in ("train", "val", "test")}


def collated(items: Items) -> Any:
    return TASK.collate(batch_of(items).items[:], np.random.default_rng(0))


def figures(step: Step, items: Items) -> dict[str, float]:
    """Return the figures of some spectra."""
    step.model.eval()
    with torch.no_grad():
        told = TASK.outputs(step.model, collated(items))
    step.model.train()
    return TASK.metrics({name: list(rows.numpy()) for name, rows in told.items()})


def of_way(train: Items, held: Items, epochs: int) -> dict[str, Any]:
    """Train on some spectra; return the figures of others before and after."""
    torch.manual_seed(0)
    step, rng, begun = Step(TASK, STEP), np.random.default_rng(0), time.monotonic()
    before = figures(step, held)
    for _ in range(epochs):
        order = rng.permutation(len(train))
        for first in range(0, len(order), BATCH):
            step.run([collated([train[place] for place in order[first : first + BATCH]])])
    return {"before": before, "after": figures(step, held), "seconds": round(time.monotonic() - begun)}


def main() -> None:
    parser = argparse.ArgumentParser(description="What a narrow DreaMS learns of made molecules.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    split = spectra()
    train, held = split["train"], [*split["val"], *split["test"]]
    target = np.random.default_rng(1).permutation([one["target"] for one in train])
    shuffled = [{**one, "target": value} for one, value in zip(train, target, strict=True)]
    result: dict[str, Any] = {"trained": len(train), "validated": len(held), "epochs": arguments.epochs}
    for way, items in (("true labels", train), ("shuffled labels", shuffled)):
        result[way] = of_way(items, held, arguments.epochs)
        print(way, result[way], flush=True)
    write(arguments.out, result)


if __name__ == "__main__":
    main()
