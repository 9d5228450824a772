"""Masked peaks of held-out real spectra, before and after pre-training of a narrow model with three seeds.

python benchmarks/pretraining.py BSA1.mzML.gz      in tests/data of pymzml's source archive: 1,120 MS2 spectra
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from pipeline.readers.spectrum_triplets import SpectrumPairs
from pipeline.records import Entry
from pipeline.tasks.spectra_pretrain import SpectraPretrain
from pipeline.training.step.contrastive import make_step
from pipeline.training.step.optimizers import StepSettings
from tests.recipes.test_learning import Items, collated

STEPS, BATCH, EVERY, PART = 300, 32, 5, 56  # every fifth spectrum is held out
TASK = SpectraPretrain(
    layers=2, heads=4, d_fourier=56, d_peak=8, fourier_width=64, finest=0.01, classes=2000, dropout=0.0,
    shift_chance=0.0, gamma=1.0,
)  # fmt: skip


def figures(model: torch.nn.Module, held: Items) -> dict[str, float]:
    """Return the metrics of a model on held-out spectra."""
    model.eval()
    with torch.no_grad():
        parts = [TASK.outputs(model, collated(TASK, held[at : at + PART])) for at in range(0, len(held), PART)]
    model.train()
    return TASK.metrics({name: [row.numpy() for part in parts for row in part[name]] for name in parts[0]})


def main(path: Path) -> None:
    """Print the metrics before and after training, for three seeds."""
    entries = SpectrumPairs(path, max_peaks=60).entries()
    items = [(entry.id, dict(entry.arrays)) for entry in entries if isinstance(entry, Entry)]
    held, train = items[::EVERY], [item for at, item in enumerate(items) if at % EVERY]
    for seed in range(3):
        torch.manual_seed(seed)
        rng, step = np.random.default_rng(seed), make_step(TASK, StepSettings(learning_rate=2e-3, clip=1.0))
        before = figures(step.model, held)
        for _ in range(STEPS):
            step.run([collated(TASK, [train[at] for at in rng.choice(len(train), BATCH, replace=False)])])
        after = figures(step.model, held)
        print(seed, *(f"{name} {before[name]:.3f} -> {after[name]:.3f}" for name in before))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="a file of spectra")
    main(parser.parse_args().path)
