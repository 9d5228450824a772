"""What a narrow recursive model learns in minutes of made spectra: before, after, and of shuffled peptides.

    python benchmarks/training/learn_denovo_recursive.py [--steps N] [--spectra N] [--out FILE]

Spectra are made: all b and y ions of random peptides of 4 or 5 residues, the last K or R, the others of ten letters,
with random heights and masses that are off by some ppm. So short ones are learned in minutes. Figures are of peptides
that no spectrum of the training has. The control is the same training with the peptides of the training spectra dealt
out anew among those of equal length: what it learns is where a peptide ends, and which letters are common at a place.
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
from pipeline.readers import peptides  # noqa: E402
from pipeline.readers.peptides import residue_codes  # noqa: E402
from pipeline.tasks.denovo_recursive import DenovoBatch, DenovoRecursive  # noqa: E402
from pipeline.training.step.optimizers import StepSettings  # noqa: E402
from pipeline.training.step.step import Step  # noqa: E402
from tests.tasks.reader_items import batch_of  # noqa: E402

LETTERS, ENDS, LENGTHS = "GASPVTLFWE", "KR", (4, 5)
OFF = 3e-6  # by how much of itself m/z is off
TASK = DenovoRecursive(
    width=64, heads=4, encoder_layers=1, decoder_layers=1, latent_steps=1, supervision_steps=2, longest=6,
    modifications=(), smoothing=0.0, fragment_charges=1, spectrum_weight=0.05,
)  # fmt: skip
STEP = StepSettings(learning_rate=1e-3, clip=1.0)
BATCH, HELD_OUT = 64, 256
SHOWN = ("token_accuracy", "residue_precision", "residue_recall", "peptide_precision", "peptide_auc")

Spectrum = dict[str, Any]


def spectrum(number: int) -> Spectrum:
    """Return what a reader gives of a made spectrum."""
    rng = np.random.default_rng((0, number))
    inner = rng.choice(list(LETTERS), rng.integers(*LENGTHS, endpoint=True) - 1)
    residue_L = residue_codes("".join(inner) + str(rng.choice(list(ENDS))))
    mz_P = np.concatenate([peptides.b_ions(residue_L), peptides.y_ions(residue_L)])
    mz_P *= rng.normal(1, OFF, len(mz_P))
    high_P = np.repeat([0.4, 1.0], len(mz_P) // 2) * rng.lognormal(0, 0.5, len(mz_P))
    order = mz_P.argsort()
    return {
        "peaks.mz": mz_P[order].astype(np.float32),
        "peaks.intensity": (high_P / high_P.max())[order].astype(np.float32),
        "precursor_mz": np.array(peptides.mz(peptides.mass(residue_L), 2), np.float32),
        "charge": np.array(2, np.int64),
        "peptide.residue": residue_L,
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
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--spectra", type=int, default=6000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    every = [spectrum(number) for number in range(options.spectra + HELD_OUT)]
    held = every[:HELD_OUT]
    known = {one["peptide.residue"].tobytes() for one in held}
    spectra = [one for one in every[HELD_OUT:] if one["peptide.residue"].tobytes() not in known]
    result = {
        "what": __doc__.partition("\n")[0],
        "steps": options.steps,
        "spectra": len(spectra),
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
