"""Narrow models learn what holds for items they have not seen; from shuffled labels they learn nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from pipeline.readers import made, peptides
from pipeline.readers.captions import Captions
from pipeline.readers.spectra import Spectra
from pipeline.records import Entry
from pipeline.tasks.contrastive_pair import ContrastivePair
from pipeline.tasks.denovo_recursive import DenovoRecursive
from pipeline.tasks.rna.ligand_library import embeddings_of
from pipeline.tasks.rna.made_pockets import write_pockets
from pipeline.tasks.rna.pocket_reader import RnaPockets, complex_of
from pipeline.tasks.rna_ligand import RnaLigand
from pipeline.tasks.spectra_finetune import SpectraFinetune
from pipeline.training.step.contrastive import make_step
from pipeline.training.step.optimizers import StepSettings
from tests.tasks.reader_items import batch_of

Items = Sequence[tuple[str, dict[str, Any]]]  # ids and arrays
LETTERS, ENDS, LENGTHS, OFF = "GASPVTLFWE", "KR", (4, 5), 3e-6
TARGET_WIDTH = 32


@dataclass(frozen=True)
class Lesson:
    """What is learned from which items; `shuffled` has the same items with labels of others."""

    true: tuple[Any, Items]  # a task, and its items
    shuffled: tuple[Any, Items]
    held: Items
    figure: str
    steps: int
    batch: int
    rate: float = 1e-3

    def figure_after(self, steps: int, task: Any, items: Items) -> float:
        """Train a fresh model, and judge it by true labels of other items."""
        torch.manual_seed(0)
        rng, step = np.random.default_rng(0), make_step(task, StepSettings(learning_rate=self.rate, clip=1.0))
        for _ in range(steps):
            chosen = [items[at] for at in rng.choice(len(items), self.batch, replace=False)]
            step.run([collated(task, chosen)])
        judge, step_size = self.true[0], 50
        parts = [self.held[at : at + step_size] for at in range(0, len(self.held), step_size)]
        step.model.eval()
        with torch.no_grad():
            outputs = [judge.outputs(step.model, collated(judge, part)) for part in parts]
        rows = {name: [row.numpy() for part in outputs for row in part[name]] for name in outputs[0]}
        return float(judge.metrics(rows)[self.figure])


def collated(task: Any, items: Items) -> Any:
    ids, arrays = zip(*items, strict=True)
    return task.collate(batch_of(arrays, ids).items[:], np.random.default_rng(0))


def split(entries: Any, held: tuple[str, ...]) -> tuple[Items, Items]:
    """Return the items to train on and the others."""
    known = [entry for entry in entries if isinstance(entry, Entry)]
    sides = ([entry for entry in known if (entry.split in held) is is_held] for is_held in (False, True))
    train, rest = ([(entry.id, dict(entry.arrays)) for entry in side] for side in sides)
    return train, rest


def dealt(items: Items, *names: str) -> Items:
    """Return items with these arrays of others."""
    others = np.random.default_rng(1).permutation(len(items))
    return [
        (own, arrays | {name: items[other][1][name] for name in names})
        for (own, arrays), other in zip(items, others, strict=True)
    ]


def spectra(folder: Path) -> Lesson:
    made.molecules(folder / "made.mgf", 1500)
    train, held = split(Spectra(folder / "made.mgf", target=("target",)).entries(), ("val", "test"))
    task = SpectraFinetune(layers=2, heads=4, d_fourier=56, d_peak=8, fourier_width=64, finest=0.01, max_peaks=20)
    return Lesson((task, train), (task, dealt(train, "target")), held, "r2", steps=700, batch=32)


def captions(folder: Path) -> Lesson:
    made.captions(folder / "captions.csv", 1500)
    reader = Captions(
        folder / "captions.csv", label="class", classes="classes.txt", size=48, merges="merges.txt", context=16
    )
    train, held = split(reader.entries(), ("val",))
    task = ContrastivePair(
        left="images", right="text", image_size=48, patch=8, image_width=64, image_layers=2, image_heads=4,
        vocabulary=1000, right_most=16, width=64, layers=2, heads=4, out=32,
        classes=str(folder / "classes.txt"), class_weight=0.2, templates=("a {} left of a red disc",),
        merges=str(folder / "merges.txt"),
    )  # fmt: skip
    labels = [name for name in train[0][1] if name != "left.image"]
    return Lesson((task, train), (task, dealt(train, *labels)), held, "left_to_right_at_1", steps=300, batch=64)


def pockets(folder: Path) -> Lesson:
    write_pockets(folder, 72, ligands=6, width=TARGET_WIDTH, pairs=2, seed=0)
    train, held = split(RnaPockets(folder / "pockets").entries(), ("val", "test"))
    targets, library = folder / "ligand_embeddings.h5", folder / "ligand_library.h5"
    task = RnaLigand(
        hidden_irreps="8x0e+4x1o+2x2e", layers=2, output_dim=TARGET_WIDTH, feature_width=16,
        targets=str(targets), library=str(library),
    )  # fmt: skip
    names = sorted({complex_of(own) for own, _ in train})
    with h5py.File(folder / "shuffled.h5", "w") as file:
        for name, source in zip(names, np.random.default_rng(0).permutation(names).tolist(), strict=True):
            file[name] = embeddings_of(targets).get(source, TARGET_WIDTH)
    other = replace(task, targets=str(folder / "shuffled.h5"))
    return Lesson((task, train), (other, train), held, "cosine", steps=150, batch=8, rate=1e-2)


def denovo(_: Path) -> Lesson:
    every = [(f"s{number}", spectrum(number)) for number in range(6256)]
    held, rest = every[:256], every[256:]
    known = {arrays["peptide.residue"].tobytes() for _, arrays in held}
    train = [item for item in rest if item[1]["peptide.residue"].tobytes() not in known]
    of_length = defaultdict(list)
    for own, arrays in train:
        of_length[len(arrays["peptide.residue"])].append((own, arrays))
    shuffled = [item for items in of_length.values() for item in dealt(items, "peptide.residue")]
    task = DenovoRecursive(
        width=64, heads=4, encoder_layers=1, decoder_layers=1, latent_steps=1, supervision_steps=2, longest=6,
        modifications=(), smoothing=0.0, fragment_charges=1, spectrum_weight=0.05,
    )  # fmt: skip
    return Lesson((task, train), (task, shuffled), held, "token_accuracy", steps=400, batch=64)


def spectrum(number: int) -> dict[str, Any]:
    """Return all b and y ions of a short random peptide, with random heights and masses that are off by some ppm."""
    rng = np.random.default_rng((0, number))
    inner = rng.choice(list(LETTERS), rng.integers(*LENGTHS, endpoint=True) - 1)
    residue_L = peptides.residue_codes("".join(inner) + str(rng.choice(list(ENDS))))
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


LEARNED = {spectra: (0.5, 0.2), captions: (0.4, 0.05), pockets: (0.45, 0.4), denovo: (0.6, 0.35)}  # at least, at most


@pytest.mark.nightly
@pytest.mark.timeout(7200)  # of shared machines
@pytest.mark.parametrize("make", LEARNED, ids=lambda make: make.__name__)
def test_a_recipe_learns_what_holds_for_items_it_has_not_seen(make: Callable[[Path], Lesson], tmp_path: Path) -> None:
    lesson, (least, most) = make(tmp_path), LEARNED[make]
    after, control = (lesson.figure_after(lesson.steps, *side) for side in (lesson.true, lesson.shuffled))
    before = lesson.figure_after(0, *lesson.true)
    assert (after >= least, control <= most, before < least) == (True, True, True), (before, after, control)
