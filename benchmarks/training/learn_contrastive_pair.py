"""What the recipe for images and captions learns from made pictures: recall before, after, and of shuffled captions.

    python benchmarks/training/learn_contrastive_pair.py [--items N] [--epochs N] [--out FILE]

Pictures of two figures with a caption each (`pipeline.readers.made`), read by the recipe's reader; a narrow model from
fresh weights, with classes of the left figure as a second loss and zero-shot by prompts. Every tenth picture is for
validation. The control is the same training with the captions and classes of the training pictures exchanged at random;
both are validated on true ones.
"""

from __future__ import annotations

import argparse
import os
import platform
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
from pipeline.readers.captions import Captions  # noqa: E402
from pipeline.records import Entry  # noqa: E402
from pipeline.tasks.contrastive_pair import ContrastivePair  # noqa: E402
from pipeline.training.step.contrastive import make_step  # noqa: E402
from pipeline.training.step.optimizers import StepSettings  # noqa: E402
from pipeline.training.step.step import Step  # noqa: E402
from tests.tasks.reader_items import batch_of  # noqa: E402

SIZE, BATCH, AT_ONCE = 48, 64, 50
STEP = StepSettings(learning_rate=1e-3, clip=1.0)
SHOWN = (
    "left_to_right_at_1",
    "left_to_right_at_5",
    "right_to_left_at_1",
    "right_to_left_at_5",
    "class_at_1",
    "zero_shot_at_1",
)


def task_of(folder: Path) -> ContrastivePair:
    return ContrastivePair(
        left="images", right="text", image_size=SIZE, patch=8, image_width=64, image_layers=2, image_heads=4,
        vocabulary=1000, right_most=16, width=64, layers=2, heads=4, out=32,
        classes=str(folder / "classes.txt"), class_weight=0.2, templates=("a {} left of a red disc",),
        merges=str(folder / "merges.txt"),
    )  # fmt: skip


def exchanged(entries: Sequence[Entry], rng: np.random.Generator) -> list[Entry]:
    """Return items whose images have the captions and classes of others."""
    others = [entries[at] for at in rng.permutation(len(entries))]
    pairs = zip(entries, others, strict=True)
    return [one._replace(arrays={**other.arrays, "left.image": one.arrays["left.image"]}) for one, other in pairs]


def collated(task: ContrastivePair, entries: Sequence[Entry]) -> Any:
    batch = batch_of([entry.arrays for entry in entries], [entry.id for entry in entries])
    return task.collate(batch.items[:], np.random.default_rng(0))


def trained(task: ContrastivePair, entries: Sequence[Entry], epochs: int) -> Step:
    torch.manual_seed(0)
    rng, step = np.random.default_rng(0), make_step(task, STEP)
    for _ in range(epochs):
        order = rng.permutation(len(entries))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            step.run([collated(task, [entries[at] for at in order[start : start + BATCH]])])
    return step


@torch.no_grad()
def validated(task: ContrastivePair, model: torch.nn.Module, entries: Sequence[Entry]) -> dict[str, float]:
    model.eval()
    parts = [task.outputs(model, collated(task, entries[at : at + AT_ONCE])) for at in range(0, len(entries), AT_ONCE)]
    figures = task.metrics({name: [row.numpy() for part in parts for row in part[name]] for name in parts[0]})
    return {name: round(figures[name], 4) for name in SHOWN}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=1500)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made.captions(folder / "captions.csv", options.items)
        reader = Captions(
            folder / "captions.csv", label="class", classes="classes.txt", size=SIZE, merges="merges.txt", context=16
        )
        entries = [entry for entry in reader.entries() if isinstance(entry, Entry)]
        task = task_of(folder)
        held, rest = ([entry for entry in entries if (entry.split == "val") == is_held] for is_held in (True, False))
        figures, seconds = {"before": validated(task, make_step(task, STEP).model, held)}, {}
        for way, items in (("after", rest), ("after, of shuffled captions", exchanged(rest, np.random.default_rng(1)))):
            start = time.perf_counter()
            figures[way] = validated(task, trained(task, items, options.epochs).model, held)
            seconds[way] = round(time.perf_counter() - start, 1)
            print(way, figures[way], f"{seconds[way]} s", flush=True)
    result = {
        "what": "recall among validation pictures of the recipe for images and captions, narrow, from fresh weights",
        "items": {"train": len(rest), "validation": len(held)},
        "epochs": options.epochs,
        "by_chance": {"left_to_right_at_1": round(1 / len(held), 4), "class_at_1": round(1 / len(task.names), 4)},
        "figures": figures,
        "seconds": seconds,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if options.out:
        write(options.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
