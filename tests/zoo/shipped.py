"""The package's own tasks, and the e3nn task that the documentation shows, at small sizes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from pipeline.project.run_code import load_task
from pipeline.protocol import ITEMS
from tests.zoo.member import Member, Synthetic
from tests.zoo.spread import complexes, graphs, lengths, lognormal

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from pipeline.protocol import Batch, Sizes

SETTINGS = {"optimizer": "adamw", "foreach": True, "clip": 1.0}


class Shipped(Synthetic):
    """A task as it is, but for batches, which are made of sizes."""

    def __init__(self, path: str, padded: bool, **options: Any) -> None:
        self.padded, self._task = padded, load_task(path, options)

    def __getattr__(self, name: str) -> Any:
        if name in ("model", "loss", "weights", "parameter_groups"):
            return getattr(self._task, name)
        raise AttributeError(name)

    def example(self, sizes: Mapping[str, int]) -> Any:
        return self._task.example(sizes)


class OneByOne(Shipped):
    """A task whose model takes the items of a batch one after the other."""

    def collate(self, items: Sequence[Sizes], rng: np.random.Generator) -> Batch:
        """Return the batch of these very items: if activations are offloaded, the largest of them decides the peak."""
        alone = [self.example({ITEMS: 1, **item}) for item in items]
        return type(alone[0])(tuple(chain.from_iterable(batch.complexes for batch in alone)))


def _member(
    name: str,
    path: str,
    items: Any,
    small: dict[str, Any],
    sizes: Mapping[str, tuple[int, int, int]],
    kind: type[Shipped] = Shipped,
) -> Member:
    padded = "peaks" in sizes
    smallest, middle, largest = (dict(zip(sizes, row, strict=True)) for row in zip(*sizes.values(), strict=True))
    task = partial(kind, path, padded)
    return Member(name, task, small, (smallest, middle, largest), SETTINGS, padded=padded, items=items)


def _pairs_of_nodes(count: int, rng: np.random.Generator) -> Any:
    return {name: values for name, values in complexes(count, rng).items() if name != "edges"}


def _peptides(count: int, rng: np.random.Generator) -> Any:
    residues = lengths(count, rng, median=7, name="residues", most=12)
    return residues | lengths(count, rng, median=24, name="peaks", most=64)


def _pockets(count: int, rng: np.random.Generator) -> Any:
    atoms_N = lognormal(rng, count, 60, factor=6, least=20)
    return {"atoms": atoms_N} | {name: each * atoms_N for name, each in PER_ATOM.items()}


PER_ATOM = {"bonds": 2, "angles": 1, "dihedrals": 2, "near": 12}
MEMBERS = (
    _member(
        "interface",
        "pipeline.tasks.interface:Interface",
        complexes,
        {"embedding_dim": 64, "width": 48, "layers": 3, "pair_width": 32},
        {"nodes": (100, 300, 800), "edges": (2000, 6000, 16000), "pairs": (2500, 9000, 32000), "items": (1, 3, 6)},
    ),
    _member(
        "docking",
        "pipeline.tasks.complex_docking:ComplexDocking",
        _pairs_of_nodes,
        {"embedding_dim": 64, "scalars": 8, "vectors": 2, "layers": 3},
        {"nodes": (100, 300, 800), "pairs": (2500, 9000, 32000), "items": (1, 3, 6)},
        OneByOne,
    ),
    _member(
        "spectra",
        "pipeline.tasks.spectra_finetune:SpectraFinetune",
        partial(lengths, median=40, name="peaks", most=100),
        {"targets": 2, "layers": 3, "heads": 4, "d_fourier": 232, "d_peak": 24, "fourier_width": 128, "max_peaks": 100},
        {"peaks": (40, 80, 100), "items": (4, 6, 12)},
    ),
    _member(
        "peptides",
        "pipeline.tasks.denovo_recursive:DenovoRecursive",
        _peptides,
        {
            "width": 48,
            "heads": 2,
            "encoder_layers": 1,
            "decoder_layers": 2,
            "latent_steps": 2,
            "supervision_steps": 3,
            "max_peaks": 64,
            "longest": 16,
            "spectrum_loss": "drawn",
            "bin_size": 0.5,
        },
        {"residues": (5, 8, 12), "peaks": (16, 32, 64), "items": (4, 6, 12)},
    ),
    _member(
        "rna",
        "pipeline.tasks.rna_ligand:RnaLigand",
        _pockets,
        {"hidden_irreps": "8x0e+4x1o+2x2e", "layers": 2, "output_dim": 32, "feature_width": 16},
        {
            "atoms": (30, 60, 120),
            **{name: (30 * each, 60 * each, 120 * each) for name, each in PER_ATOM.items()},
            "items": (1, 3, 5),
        },
    ),
    _member(
        "equivariant",
        "tests.users.equivariant:Placement",
        partial(graphs, nodes=20, neighbours=10),
        {"embedding": 64, "width": 32},
        {"nodes": (20, 60, 120), "edges": (200, 600, 1200), "items": (1, 3, 5)},
    ),
)
