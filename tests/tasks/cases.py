"""Small tasks with items as a loader hands them out, and what tests of all tasks do with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from pipeline.protocol import ITEMS
from pipeline.readers import peptides
from pipeline.readers.peptides import residue_codes
from pipeline.tasks.contrastive_pair import ContrastivePair
from pipeline.tasks.denovo_recursive import DenovoRecursive
from pipeline.tasks.encoder_finetune import TOKENS, EncoderFinetune
from pipeline.tasks.interface import Interface
from pipeline.tasks.rna_ligand import RnaLigandContrast
from pipeline.tasks.spectra_finetune import SpectraFinetune
from pipeline.tasks.spectra_pretrain import SpectraPretrain
from pipeline.training.step.contrastive import make_step
from pipeline.training.step.optimizers import StepSettings
from tests.tasks import docking_items, items
from tests.tasks.pairs import pictures
from tests.tasks.reader_items import batch_of
from tests.tasks.rna import made as pockets

RNG = np.random.default_rng(0)
SGD = {"optimizer": "sgd", "learning_rate": 1.0, "weight_decay": 0.0, "momentum": 0.0}


def model_of(task, dtype=torch.float64):
    torch.manual_seed(0)
    return task.model().to(dtype).eval()


def stepped(task, batches, model=None, **settings):
    """Return how far a step moves each parameter: its gradient."""
    step = make_step(task, StepSettings(**SGD, **settings), model=(model or model_of(task)).train())
    before = {name: one.detach().clone() for name, one in step.model.named_parameters()}
    step.run(batches)
    return {name: before[name] - one.detach() for name, one in step.model.named_parameters()}


def apart(ones, others):
    """Return the largest difference of tensors by name."""
    assert ones.keys() == others.keys()
    return max(float((one - others[name]).abs().max()) for name, one in ones.items())


def outputs_of(task, model, batch):
    with torch.no_grad():
        return {name: [one.numpy() for one in values] for name, values in task.outputs(model, batch).items()}


# ---- interface ----

INTERFACE = Interface(embedding_dim=items.DIM, width=16, layers=2, pair_width=8, pair_layers=2)


def unlabelled(graph):
    return replace(graph, labels={})


# ---- spectra ----

SPECTRA = SpectraFinetune(
    targets=2, layers=3, heads=2, d_fourier=24, d_peak=8, finest=1e-2, fourier_width=16, max_peaks=60
)


def spectrum(seed, peaks=30, target=(1.0, -2.0)):
    rng = np.random.default_rng(seed)
    return {
        "peaks.mz": np.sort(rng.uniform(50, 900, peaks)).astype(np.float32),
        "peaks.intensity": rng.uniform(0.01, 1, peaks).astype(np.float32),
        "precursor_mz": np.array(rng.uniform(200, 900), np.float32),
        "target": np.array(target, np.float32),
    }


PRETRAIN = SpectraPretrain(
    layers=2, heads=2, d_fourier=12, d_peak=4, finest=1e-2, fourier_width=8, max_peaks=20, classes=50, dropout=0.0
)


def paired(seed, *sizes):
    """Return a spectrum with others of its run."""
    others = [spectrum(seed + 10 * number, size) for number, size in enumerate(sizes, 1)]
    return spectrum(seed) | {
        "retention_s": np.array(60.0 * seed, np.float32),
        "other.mz": np.concatenate([one["peaks.mz"] for one in others]),
        "other.intensity": np.concatenate([one["peaks.intensity"] for one in others]),
        "other.spectrum": np.repeat(np.arange(len(sizes), dtype=np.int16), sizes),
        "others.precursor_mz": np.stack([one["precursor_mz"] for one in others]),
        "others.retention_s": np.arange(len(sizes), dtype=np.float32) + 100,
    }


MIXED_SPECTRA = [spectrum(0), spectrum(1, 7, (np.nan, 0.5)), spectrum(2, 90), spectrum(3, 1, (np.nan, np.nan))]

# ---- peptides ----

DENOVO = DenovoRecursive(
    width=40, heads=2, encoder_layers=2, decoder_layers=2, latent_steps=2, supervision_steps=3,
    max_peaks=40, longest=16, spectrum_loss="drawn", bin_size=0.5, sigma=0.3,
)  # fmt: skip
SHALLOW = replace(DENOVO, encoder_layers=1, decoder_layers=1, latent_steps=1, supervision_steps=2)
PEPTIDES = ("PEPTIDE", "GASPVTCK", "WYFR", "NDQEK", "MHLAR", "AAGVLSTK")


def peptide(sequence, *without, charge=2, extra=0):
    """Return what a reader gives of a peptide's b and y ions, and of some peaks that are noise, but for some values."""
    residue = residue_codes(sequence)
    rng = np.random.default_rng(len(sequence))
    mz = np.concatenate([peptides.b_ions(residue), peptides.y_ions(residue), rng.uniform(50, 900, extra)])
    intensity = np.concatenate([np.full(2 * len(sequence) - 2, 0.8), rng.uniform(0.1, 0.3, extra)])
    order = mz.argsort()
    values = {
        "peaks.mz": mz[order].astype(np.float32),
        "peaks.intensity": intensity[order].astype(np.float32),
        "precursor_mz": np.array(peptides.mz(peptides.mass(residue), charge), np.float32),
        "charge": np.array(charge, np.int64),
        "peptide.residue": residue,
    }
    return {name: value for name, value in values.items() if name not in without}


MIXED_PEPTIDES = [
    *map(peptide, PEPTIDES[:3]),
    peptide("NDQEK", "peptide.residue"),
    peptide("MHLAR", "precursor_mz"),
]

# ---- pairs ----

PAIRS = ContrastivePair(
    right="vectors", right_dim=6, left_most=20, right_most=12, width=16, layers=2, heads=2, feedforward=2, out=8
)


def pair(seed, left=None, right=None):
    """Return an item whose sides have to do with each other."""
    rng = np.random.default_rng(seed)
    left = int(rng.integers(1, 16)) if left is None else left
    right = int(rng.integers(1, 10)) if right is None else right
    sort = rng.normal(size=6)
    return {
        "left.token": rng.integers(97, 123, left).astype(np.uint8),
        "right.vector": (sort + 0.1 * rng.normal(size=(right, 6))).astype(np.float32),
    }


MIXED_PAIRS = [pair(0), pair(1, 0, 4), pair(2, 30, 30), pair(3, 1, 0)]

# ---- sequences ----

LORA = EncoderFinetune(layers=3, width=16, heads=2, rank=2)
TOP = replace(LORA, rank=0, top_layers=1)
TEXTS = ("MKVLAWY", "AC", "GGGGAKLWWYX")


def labelled(task):
    """Return the values of three sequences: numbers, one of them unknown, or sites."""
    letters = [{"sequence.letter": np.frombuffer(text.encode(), np.uint8)} for text in TEXTS]
    if not task.by_residue:
        return [one | {"target": np.array([x], np.float32)} for one, x in zip(letters, (1, np.nan, -2), strict=True)]
    sites = [np.array([letter in "WY" for letter in text], np.int8) for text in TEXTS]
    sites[1][0] = -1
    return [one | {"sequence.site": site} for one, site in zip(letters, sites, strict=True)]


# ---- all of them ----


@dataclass(frozen=True)
class Case:
    """A task in small, how to make some items for it anew, and what is known of its memory."""

    task: Any
    make: Callable[[], Sequence[Any]]
    sizes: Sequence[Mapping[str, int]]  # of batches to plan
    costs: Sequence[Mapping[str, Any]]  # the sizes of the items, as a loader knows them
    padded: bool = True  # a batch is as large as its largest item
    near: float = 0.002  # how far a plan may be off
    layers: Sequence[str] = ()
    model: Callable[..., Any] = model_of
    contract: Mapping[str, Any] = field(default_factory=dict)
    alone: bool = True  # outputs of an item are compared with those in a batch
    targets: str | None = None  # the option that names a file of targets


def of_values(task, values, sizes, ids=(), **more):
    costs = [{name.partition(".")[0]: len(array) for name, array in one.items() if np.ndim(array)} for one in values]
    return Case(task, lambda: batch_of(values, ids).items[:], sizes, costs, **more)


def of_graphs(task, graphs, sizes, ids=("a", "b", "c"), **more):
    return Case(task, lambda: items.batch_of(graphs, ids=ids).items[:], sizes, [one.sizes() for one in graphs],
                padded=False, **more)  # fmt: skip


def cases() -> dict[str, Case]:
    """Return the tasks of the package by name."""
    three = items.made(0), items.made(1, 50, 70), unlabelled(items.made(2, 30, 30))
    pocket = [pockets.pocket(0), pockets.pocket(1, 2), pockets.pocket(2)]
    rna = {"sizes": pockets.SIZES, "ids": pockets.IDS, "padded": False, "layers": ("layers.0", "layers.1"),
           "model": pockets.model_of, "contract": {"item_sizes": ()}, "targets": "targets"}  # fmt: skip
    docked = docking_items
    sequence = {"sizes": [{TOKENS: 9, ITEMS: 2}], "contract": {"item_sizes": (TOKENS,), "padded": True}}
    towers = tuple(f"{side}.layers.{place}" for side in ("left", "right") for place in (0, 1))
    return {
        "interface": of_graphs(
            INTERFACE, three,
            [{"nodes": 100, "edges": 2000, "pairs": 2400, ITEMS: 1},
             {"nodes": 520, "edges": 10400, "pairs": 31000, ITEMS: 3},
             {"nodes": 1500, "edges": 30000, "pairs": 180000, ITEMS: 5}],
            layers=("layers.0", "layers.1", "pair_layers.0", "pair_layers.1"),
        ),
        "docking": of_graphs(
            docked.SMALL, docked.THREE, docked.SIZES, near=0.01, model=docked.model_of, alone=False,
            layers=tuple(f"trunk.layers.{layer}" for layer in range(3)),
        ),
        "several noises": of_graphs(
            replace(docked.SMALL, multiplicity=3), docked.THREE, docked.SIZES[:1], near=0.01, model=docked.model_of,
            alone=False, layers=tuple(f"trunk.layers.{layer}" for layer in range(3)),
        ),
        "spectra": of_values(
            SPECTRA, MIXED_SPECTRA, [{"peaks": 12, ITEMS: 1}, {"peaks": 40, ITEMS: 6}, {"peaks": 60, ITEMS: 24}],
            layers=("layers.0", "layers.1", "layers.2"),
        ),
        "spectra, as published": of_values(
            replace(SPECTRA, as_published=True, classes=50, head="fingerprint", targets=2, summed=True), MIXED_SPECTRA,
            [{"peaks": 60, ITEMS: 1}, {"peaks": 60, ITEMS: 24}], layers=("layers.0", "layers.1", "layers.2"),
        ),
        "pre-training": of_values(
            PRETRAIN, [paired(1, 30), paired(2, 5, 9), paired(3, 40)],
            [{"peaks": 20, ITEMS: 1}, {"peaks": 20, ITEMS: 24}],
            layers=("layers.0", "layers.1"),
        ),
        "de novo": of_values(
            replace(DENOVO, sigma=5.0, latent_steps=1, supervision_steps=2), MIXED_PEPTIDES,
            [{"peaks": 10, "residues": 5, ITEMS: 2}, {"peaks": 30, "residues": 12, ITEMS: 6},
             {"peaks": 40, "residues": 16, ITEMS: 16}],
            near=0.01, layers=("spectrum.layers.0", "spectrum.layers.1", "decoder.0", "decoder.1"),
        ),
        "RNA": of_values(pockets.SMALL, pocket, **rna),
        "RNA by InfoNCE": of_values(RnaLigandContrast(**vars(pockets.SMALL)), pocket, **rna),
        "pairs": of_values(
            PAIRS, MIXED_PAIRS,
            [{"left": 5, "right": 3, ITEMS: 1}, {"left": 12, "right": 12, ITEMS: 6},
             {"left": 20, "right": 9, ITEMS: 40}],
            layers=towers,
        ),
        "images": of_values(
            replace(pictures.CLASSED, crop_least=0.5, mirror=True), pictures.items(3),
            [{"right": 9, ITEMS: 1}, {"right": 14, ITEMS: 6}, {"right": 24, ITEMS: 30}], near=0.01, layers=towers,
        ),
        "LoRA": of_values(LORA, labelled(LORA), **sequence),
        "top layers": of_values(TOP, labelled(TOP), **sequence),
        "residues": of_values(by_residue := replace(LORA, told="residues"), labelled(by_residue), **sequence),
    }  # fmt: skip
