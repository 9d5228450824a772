"""What a narrow recursive model learns in minutes of made spectra: before, after, and of shuffled peptides.

    python benchmarks/training/learn_denovo_recursive.py [--steps N] [--spectra N] [--out FILE]

Spectra are those of `pipeline.readers.made`: b and y ions of random peptides that end with K or R, each seen with a
chance of 80%, and noise; peptides are short, so that minutes do. Figures are of spectra that were not trained on, whose
peptides were not either. The control is the same training with the peptides of the training spectra dealt out anew
among those of equal length: what it learns is which letters are common at a place.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np  # noqa: E402 - it reads the number of threads
import torch  # noqa: E402

from benchmarks.circumstances import write  # noqa: E402 - the project is found only now
from benchmarks.memory.planner import on  # noqa: E402
from pipeline.readers import made  # noqa: E402
from pipeline.readers.peptide_text import residue_codes  # noqa: E402
from pipeline.tasks.denovo_recursive import DenovoBatch, DenovoRecursive  # noqa: E402
from pipeline.training.step.optimizers import StepSettings  # noqa: E402
from pipeline.training.step.step import Step  # noqa: E402
from tests.tasks.reader_items import batch_of  # noqa: E402

LENGTHS, PEAKS = (5, 7), 30
TASK = DenovoRecursive(
    width=96, heads=4, encoder_layers=2, decoder_layers=1, latent_steps=1, supervision_steps=2, longest=8,
    max_peaks=PEAKS, modifications=(), smoothing=0.0, fragment_charges=1,
)  # fmt: skip
STEP = StepSettings(learning_rate=2e-3, clip=1.0)
BATCH, HELD_OUT = 64, 256
SHOWN = ("token_accuracy", "residue_precision", "residue_recall", "peptide_precision", "peptide_auc")

Spectrum = dict[str, Any]


def spectrum(number: int) -> Spectrum:
    """Return what a reader gives of a made spectrum."""
    found = made.spectrum(0, number, LENGTHS, PEAKS)
    mz_P, intensity_P = found.peak_P2.T
    return {
        "peaks.mz": mz_P.astype(np.float32),
        "peaks.intensity": (intensity_P / intensity_P.max()).astype(np.float32),
        "precursor_mz": np.array(found.precursor_mz, np.float32),
        "charge": np.array(found.charge, np.int64),
        "peptide.residue": residue_codes(found.peptide),
    }


def shuffled(spectra: Sequence[Spectrum], rng: np.random.Generator) -> list[Spectrum]:
    """Return spectra with the peptides of others of equal length."""
    of_length = defaultdict(list)
    for place, one in enumerate(spectra):
        of_length[len(one["peptide.residue"])].append(place)
    dealt = [dict(one) for one in spectra]
    for places in of_length.values():
        for place, other in zip(places, rng.permutation(places), strict=True):
            dealt[place]["peptide.residue"] = spectra[other]["peptide.residue"]
    return dealt


def collated(spectra: Sequence[Spectrum]) -> DenovoBatch:
    return TASK.collate(batch_of(spectra).items[:], np.random.default_rng(0))


def trained(spectra: Sequence[Spectrum], steps: int) -> Step:
    """Train for so many steps; with none the model is a fresh one."""
    torch.manual_seed(0)
    rng, step = np.random.default_rng(0), Step(TASK, STEP)
    for number in range(steps):
        chosen = [spectra[at] for at in rng.integers(len(spectra), size=BATCH)]
        terms = step.run([collated(chosen)])
        if number % 100 == 99:
            print(number + 1, {name: round(float(value), 3) for name, value in terms.items()}, flush=True)
    return step


def figures(step: Step, spectra: Sequence[Spectrum]) -> dict[str, float]:
    """Return the figures of spectra."""
    step.model.eval()
    with torch.no_grad():
        found = TASK.outputs(step.model, collated(spectra))
    metrics = TASK.metrics({name: [one.numpy() for one in column] for name, column in found.items()})
    return {name: round(metrics[name], 4) for name in SHOWN}


def of_way(spectra: Sequence[Spectrum], held: Sequence[Spectrum], steps: int) -> Mapping[str, Any]:
    start = time.perf_counter()
    found = figures(trained(spectra, steps), held)
    return {**found, "seconds": round(time.perf_counter() - start)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--spectra", type=int, default=20_000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    every = [spectrum(number) for number in range(options.spectra + HELD_OUT)]
    spectra, held = every[HELD_OUT:], every[:HELD_OUT]
    result = {
        "what": __doc__.partition("\n")[0],
        "steps": options.steps,
        "spectra": options.spectra,
        "held_out": HELD_OUT,
        "before": of_way(spectra, held, 0),
        "after": of_way(spectra, held, options.steps),
        "shuffled": of_way(shuffled(spectra, np.random.default_rng(1)), held, options.steps),
        **on(),
    }
    write(options.out, result)
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
