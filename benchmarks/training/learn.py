"""What the reference task learns from real complexes: validation figures over five seeds, against shuffled labels.

    python benchmarks/training/learn.py [FOLDER] [--seeds N] [--epochs N] [--out FILE]

FOLDER holds complexes/*.pdb and pairs/*_{r,l}_b.pdb. A seed decides the split (a quarter is for validation), the fresh
parameters and the order. The control is the same training with the contacts of every training item moved to residues
drawn at random; it is validated on the true ones. It may still learn which items have a larger share of contacts, small
partners mostly, so that it need not end at 0.5. Neither sees embeddings: there are no trained weights of ESM-2 where
this is measured, so that types of residues and geometry are all there is to learn from. The model after the last epoch
is what is validated; no epoch is chosen. Complexes that are related may stand on both sides of a split, so this says
that the task learns, not how well it would do on new proteins.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np  # noqa: E402 - it reads the number of threads
import torch  # noqa: E402
from scipy import stats  # noqa: E402

from benchmarks.circumstances import write  # noqa: E402 - the project is found only now
from pipeline.graphs.item_graph import ItemGraph  # noqa: E402
from pipeline.structures.sources.data_source import items  # noqa: E402
from pipeline.structures.sources.item_ids import SourceSpec  # noqa: E402
from pipeline.tasks.interface import Interface, InterfaceBatch  # noqa: E402
from pipeline.training.step.optimizers import StepSettings  # noqa: E402
from pipeline.training.step.step import Step  # noqa: E402
from tests.graphs.conftest import read_item  # noqa: E402
from tests.tasks.items import batch_of, real  # noqa: E402

SHARED = ROOT.parent / "shared" / "structures"
TASK = Interface(embedding_dim=0, width=32, layers=3, pair_width=16, pair_layers=1, dropout=0.1)
STEP = StepSettings(learning_rate=3e-3, clip=1.0)
BATCH = 4
CONFIDENCE = 0.95
WAYS = ("true labels", "shuffled labels")


def complexes(folder: Path) -> dict[str, ItemGraph]:
    """Return every complex by its name, bound, and only once."""
    from pipeline.graphs.build_graph import build_graph
    from pipeline.graphs.item_graph import GraphRecipe
    from pipeline.records import Item

    found = {path.stem: real(path) for path in sorted((folder / "complexes").glob("*.pdb"))}
    pairs = (one for one in items(SourceSpec("pairs", folder / "pairs", state="bound")) if isinstance(one, Item))
    for item in pairs:
        if item.id not in found:
            found[item.id] = build_graph(read_item(item), GraphRecipe())
    return found


def shuffled(graph: ItemGraph, rng: np.random.Generator) -> ItemGraph:
    """Return a graph whose contacts are between other residues, as many and with as many of each."""
    pairs = graph.labels["contact_pairs"]
    columns = [rng.permutation(part.size)[pairs[:, place]] for place, part in enumerate(graph.parts)]
    return replace(graph, labels={"contact_pairs": np.stack(columns, 1)})


def collated(graphs: Sequence[ItemGraph], rng: np.random.Generator) -> InterfaceBatch:
    return TASK.collate(batch_of(graphs, None).items[:], rng)


def trained(graphs: Sequence[ItemGraph], seed: int, epochs: int) -> Step:
    """Train on some complexes."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    step = Step(TASK, STEP)
    for _ in range(epochs):
        order = rng.permutation(len(graphs))
        for first in range(0, len(order), BATCH):
            step.run([collated([graphs[at] for at in order[first : first + BATCH]], rng)])
    return step


def validated(step: Step, graphs: Sequence[ItemGraph]) -> dict[str, float]:
    """Return the figures of some complexes."""
    step.model.eval()
    rng = np.random.default_rng(0)
    with torch.no_grad():
        found = [TASK.outputs(step.model, collated([graph], rng)) for graph in graphs]
    return TASK.metrics({name: [one[name][0].numpy() for one in found] for name in found[0]})


def of_seed(graphs: Mapping[str, ItemGraph], seed: int, epochs: int) -> dict[str, dict[str, float]]:
    """Train with true and with shuffled labels; return the figures of both, of training and of validation."""
    rng = np.random.default_rng(1000 + seed)
    names = rng.permutation(sorted(graphs)).tolist()
    cut = len(names) // 4
    held, rest = [graphs[name] for name in names[:cut]], [graphs[name] for name in names[cut:]]
    figures = {}
    for way, graphs_of_way in zip(WAYS, (rest, [shuffled(graph, rng) for graph in rest]), strict=True):
        step = trained(graphs_of_way, seed, epochs)
        seen = validated(step, graphs_of_way)["interface_auroc"]
        figures[way] = validated(step, held) | {"interface_auroc_in_training": seen}
        print(seed, way, {name: round(value, 3) for name, value in figures[way].items()}, flush=True)
    return figures


def interval(values: Sequence[float]) -> dict[str, Any]:
    """Return the mean, and the interval of Student's t over seeds."""
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * stats.sem(values))
    mean = float(np.mean(values))
    return {
        "mean": round(mean, 4),
        "interval": [round(mean - half, 4), round(mean + half, 4)],
        "seeds": [round(value, 4) for value in values],
    }


def told(rows: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    """Return every figure of both ways, and by how much they differ seed by seed."""
    names = list(rows[0][WAYS[0]])
    table = {name: {way: interval([row[way][name] for row in rows]) for way in WAYS} for name in names}
    for name in names:
        table[name]["difference"] = interval([row[WAYS[0]][name] - row[WAYS[1]][name] for row in rows])
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=SHARED)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error("an interval needs two seeds or more")
    if not (options.folder / "complexes").is_dir():
        print(f"no complexes in {options.folder}: nothing was measured", file=sys.stderr)
        return 1
    torch.set_num_threads(1)
    start = time.perf_counter()
    graphs = complexes(options.folder)
    table = told([of_seed(graphs, seed, options.epochs) for seed in range(options.seeds)])
    result = {
        "what": "reference task on real complexes without embeddings: validation against shuffled labels, by seeds",
        "complexes": len(graphs),
        "held_out": len(graphs) // 4,
        "epochs": options.epochs,
        "confidence": CONFIDENCE,
        "figures": table,
        "took_s": round(time.perf_counter() - start),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    print(f"{'':30}" + "".join(f"{column:>32}" for column in next(iter(table.values()))))
    for name, columns in table.items():
        cells = (
            f"{one['mean']:.3f} ({one['interval'][0]:.3f} to {one['interval'][1]:.3f})" for one in columns.values()
        )
        print(f"{name:30}" + "".join(f"{cell:>32}" for cell in cells))
    print(json.dumps(result))
    write(options.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
