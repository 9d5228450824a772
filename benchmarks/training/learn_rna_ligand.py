"""What a narrow model learns of made RNA pockets: ranks of true ligands before and after, and of shuffled labels.

    python benchmarks/training/learn_rna_ligand.py [--steps N] [--seed N] [--out FILE]

Made pockets (pipeline.tasks.rna.made_pockets) are read by the recipe's reader and split by complex. The control is the
same training with the targets of training complexes dealt out anew; it is tested on the true ones. So this says that
the task learns, not how well it would do on real pockets.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ["OMP_NUM_THREADS"] = "1"

import h5py  # noqa: E402 - the project is found only now
import numpy as np  # noqa: E402
import torch  # noqa: E402

from benchmarks.circumstances import write  # noqa: E402
from pipeline.records import Entry  # noqa: E402
from pipeline.tasks.rna.ligand_library import embeddings_of  # noqa: E402
from pipeline.tasks.rna.made_pockets import write_pockets  # noqa: E402
from pipeline.tasks.rna.pocket_reader import RnaPockets, complex_of  # noqa: E402
from pipeline.tasks.rna_ligand import RnaLigand  # noqa: E402
from pipeline.training.step.optimizers import StepSettings  # noqa: E402
from pipeline.training.step.step import Step  # noqa: E402
from tests.tasks.reader_items import batch_of  # noqa: E402

WIDTH, COMPLEXES, LIGANDS, PAIRS, BATCH = 32, 72, 6, 2, 8
TASK = RnaLigand(hidden_irreps="8x0e+4x1o+2x2e", layers=2, output_dim=WIDTH, feature_width=16)
STEP = StepSettings(learning_rate=1e-2, clip=1.0)


def shuffled(path: Path, entries: Sequence[Entry], seed: int) -> Path:
    """Write the targets of training complexes, dealt out anew."""
    names = sorted({complex_of(entry.id) for entry in entries})
    vectors = {name: embeddings_of(path).get(name, WIDTH) for name in names}
    dealt = np.random.default_rng(seed).permutation(names).tolist()
    other = path.with_name("shuffled.h5")
    with h5py.File(other, "w") as file:
        for name, source in zip(names, dealt, strict=True):
            file[name] = vectors[source]
    return other


def trained(task: RnaLigand, entries: Sequence[Entry], seed: int, steps: int) -> Step:
    """Train on some pockets."""
    torch.manual_seed(seed)
    rng, step = np.random.default_rng(seed), Step(task, STEP)
    for _ in range(steps):
        step.run([task.collate(_items([entries[at] for at in rng.choice(len(entries), BATCH, replace=False)]), rng)])
    return step


def tested(task: RnaLigand, step: Step, entries: Sequence[Entry]) -> dict[str, float]:
    """Return the figures of some pockets."""
    step.model.eval()
    with torch.no_grad():
        outputs = task.outputs(step.model, task.collate(_items(entries), np.random.default_rng(0)))
    step.model.train()
    figures = task.metrics({name: [value.numpy() for value in values] for name, values in outputs.items()})
    return {name: round(figure, 4) for name, figure in figures.items()}


def _items(entries: Sequence[Entry]) -> Any:
    return batch_of([entry.arrays for entry in entries], [entry.id for entry in entries]).items[:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_pockets(folder, COMPLEXES, ligands=LIGANDS, width=WIDTH, pairs=PAIRS, seed=options.seed)
        entries = [entry for entry in RnaPockets(folder / "pockets").entries() if isinstance(entry, Entry)]
        train = [entry for entry in entries if entry.split == "train"]
        held = [entry for entry in entries if entry.split != "train"]
        targets = folder / "ligand_embeddings.h5"
        task = replace(TASK, targets=str(targets), library=str(folder / "ligand_library.h5"))
        figures = {"before": tested(task, trained(task, train, options.seed, 0), held)}
        print("before", figures["before"], flush=True)
        figures["after"] = tested(task, trained(task, train, options.seed, options.steps), held)
        print("after", figures["after"], flush=True)
        false = replace(task, targets=str(shuffled(targets, train, options.seed)))
        figures["shuffled labels"] = tested(task, trained(false, train, options.seed, options.steps), held)
        print("shuffled labels", figures["shuffled labels"], flush=True)
    result = {
        "what": "rna_ligand, a narrow model on made pockets: how well the true ligands of held-out complexes are found",
        "complexes": len(train),
        "held_out": len(held),
        "ligands": LIGANDS,
        "steps": options.steps,
        "batch": BATCH,
        "figures": figures,
        "took_s": round(time.perf_counter() - start),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    print(json.dumps(result))
    write(options.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
