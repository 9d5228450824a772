"""The configurations of the five guides at their real sizes, as values for the planner.

They are too large to be run in tests and are only planned; `tiny` has the arguments that make each small enough. What
a guide does not tell is taken from its public code, or assumed: `notes` say which.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.zoo.contrastive import TwoTowers
from tests.zoo.diffdock import ScoreMatching
from tests.zoo.equivariant import Equivariant
from tests.zoo.member import batch_sizes
from tests.zoo.peptide import RecurrentDepth
from tests.zoo.spectra import Spectra
from tests.zoo.spread import complexes, lengths, lognormal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pipeline.protocol import Sizes, Task
    from tests.zoo.member import Items


@dataclass(frozen=True)
class Batches:
    """How a guide makes its effective batch, and what it says becomes of that."""

    micro: int  # items on a GPU at once
    accumulation: int = 1
    gpus: int = 1
    says: str = ""  # the guide's words

    @property
    def effective(self) -> int:
        """Return how many items make a step."""
        return self.micro * self.accumulation * self.gpus


@dataclass(frozen=True)
class Guide:
    """A guide's model, its batches, and the card they are meant for."""

    seed: str
    name: str
    task: Callable[..., Task]
    real: Mapping[str, Any]  # arguments of the task
    tiny: Mapping[str, Any]  # those that differ where it is to run on a CPU
    tiny_item: Sizes
    item: Sizes  # at which its batches are compared
    largest: Sizes  # of the data set
    items: Callable[[int, np.random.Generator], Items]
    padded: bool
    settings: Mapping[str, Any]
    precision: str
    device: str  # as pipeline.memory.hardware.gpus names it
    batches: tuple[Batches, ...]
    variants: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict
    )  # arguments that it would change, by its words
    notes: tuple[str, ...] = ()  # what was assumed

    def build(self, **changes: Any) -> Any:
        """Return the task at its real size, but for some arguments."""
        return self.task(**{**self.real, **changes})

    def sizes(self, micro: int, item: Sizes | None = None) -> Sizes:
        """Return the sizes of so many items like the one compared at, or another."""
        return batch_sizes([item or self.item] * micro, padded=self.padded)


def _pockets(count: int, rng: np.random.Generator) -> Items:
    """Return binding pockets: per atom 2 ends of bonds, 2 angles, 3 dihedrals, 20 contacts within 6 Å."""
    nodes_N = lognormal(rng, count, 500, factor=6, least=50)
    return {"nodes": nodes_N, **{kind: per_atom * nodes_N for kind, per_atom in PER_ATOM.items()}}


def _dockings(count: int, rng: np.random.Generator) -> Items:
    """Return complexes as in DB5.5: 45 thousand pairs in the middle, 24 times as many in the largest of 253."""
    return complexes(count, rng, nodes=212, factor=14)


def _peptides(count: int, rng: np.random.Generator) -> Items:
    """Return peptides of 7 to 30 letters with begin and end, and up to 100 peaks."""
    residues_N = np.clip(rng.normal(16, 5, count).round(), 9, 35).astype(np.int64)
    return {"residues": residues_N, "peaks": lognormal(rng, count, 60, factor=4, least=10, most=100)}


def _spectra(count: int, rng: np.random.Generator) -> Items:
    return lengths(count, rng, median=45, name="peaks", most=100)


def _captions(count: int, rng: np.random.Generator) -> Items:
    """Return texts, all padded to 77 words by the guide's tokenizer."""
    return {"length": np.full(count, 77, np.int64)}


PER_ATOM = {"edges": 2, "angles": 2, "dihedrals": 3, "contacts": 20}

RNA = Guide(
    seed="000",
    name="RNA-ligand equivariant embedding",
    task=Equivariant,
    real={
        "irreps": "32x0e+16x1o+8x2e",
        "depth": 4,
        "output": 1536,
        "norm": True,
        "kinds": ("edges", "angles", "dihedrals", "contacts"),
    },
    tiny={"irreps": "4x0e+2x1o+1x2e", "depth": 2, "output": 8},
    tiny_item={"nodes": 12, "edges": 24, "angles": 24, "dihedrals": 36, "contacts": 60},
    item={"nodes": 500, "edges": 1000, "angles": 1000, "dihedrals": 1500, "contacts": 10_000},
    largest={"nodes": 2500, "edges": 5000, "angles": 5000, "dihedrals": 7500, "contacts": 50_000},
    items=_pockets,
    padded=False,
    settings={"optimizer": "adamw", "foreach": True, "clip": 1.0},
    precision="fp32",
    device="24GiB",
    batches=(
        Batches(2, says="OOM after several epochs"),
        Batches(1, says="if batch_size=2 still causes OOM"),
        Batches(2, accumulation=4),
        Batches(1, accumulation=4),
    ),
    variants={
        "num_layers from 4 to 3": {"depth": 3},
        "output_dim from 1536 to 1024": {"output": 1024},
        "hidden_irreps 16x0e + 8x1o + 4x2e": {"irreps": "16x0e+8x1o+4x2e"},
        "without layer norm": {"norm": False},
        "without multi-hop": {"kinds": ("edges", "contacts")},
        "without non-bonded": {"kinds": ("edges", "angles", "dihedrals")},
    },
    notes=(
        "the guide names no card: 24 GiB assumed",
        "sizes of pockets are assumed: 500 atoms in the middle, 20 contacts each within 6 Å",
        "layers as in its public code (RNA-3E-FFI, e3_gnn_encoder_v2.py): 8 radial functions, MLPs of 64",
        "compared with one target embedding per pocket by squares; clipping and AdamW assumed",
    ),
)

SPECTRA = Guide(
    seed="001",
    name="mass spectra fine-tune",
    task=Spectra,
    real={
        "fourier": 980,
        "peak": 44,
        "heads": 8,
        "depth": 7,
        "finest": 1e-4,
        "fourier_width": 512,
        "fourier_depth": 5,
        "dropout": 0.1,
        "apart": True,
        "targets": 4096,
    },
    tiny={"fourier": 24, "peak": 8, "heads": 2, "depth": 2, "finest": 1e-2, "fourier_width": 16, "targets": 8},
    tiny_item={"peaks": 12},
    item={"peaks": 100},
    largest={"peaks": 100},
    items=_spectra,
    padded=True,
    settings={"optimizer": "adamw", "foreach": True},
    precision="fp32",
    device="24GiB",
    batches=(
        Batches(2, gpus=2, says="runs out of memory around epoch 60"),
        Batches(1, accumulation=2, gpus=2, says="~50% reduction in peak memory usage"),
        Batches(4, gpus=2),
        Batches(1, accumulation=2, says="use only 1 GPU instead of 2"),
    ),
    variants={
        "freeze some layers": {"frozen": 4},
        "reduce d_fourier": {"fourier": 468},
        "without mass differences in attention": {"apart": False},
    },
    notes=(
        "the guide names no card: 24 GiB assumed",
        "sizes as in its public code (pluskal-lab/DreaMS): width 980 + 44, 7 layers, 8 heads, 5,997 frequencies",
        "a head of 4,096 properties is assumed: the guide does not tell what is fine-tuned for",
        "an effective batch of 2 on each of 2 GPUs: the guide does not count GPUs",
        "--train_precision 16 and 80 to 90 peaks are further ways it names: other precisions and sizes, same arguments",
    ),
)

DOCKING = Guide(
    seed="002",
    name="protein docking fine-tune",
    task=ScoreMatching,
    real={"features": 1280, "scalars": 16, "vectors": 4, "depth": 4},
    tiny={"features": 16, "scalars": 4, "vectors": 2, "depth": 3},
    tiny_item={"nodes": 12, "edges": 60, "pairs": 36},
    item={"nodes": 424, "edges": 8480, "pairs": 44_944},
    largest={"nodes": 2100, "edges": 42_000, "pairs": 1_100_000},
    items=_dockings,
    padded=False,
    settings={"optimizer": "adam", "foreach": True},
    precision="fp32",
    device="a100-80gb",
    batches=(
        Batches(8, says="single gpu: batch_size=8"),
        Batches(8, gpus=3, says="3x gpu: batch_size=24 (8 per gpu)"),
        Batches(4, accumulation=2, gpus=3),
        Batches(1, accumulation=8, gpus=3),
    ),
    variants={"the large published model": {"scalars": 32, "vectors": 6}},
    notes=(
        "its own configuration (AADaM) is not public: layers as in DiffDock-PP's config/dips_esm.yaml",
        "sizes of complexes as measured on DB5.5: 45 thousand pairs in the middle, 1.1 million in the largest",
        "all pairs of residues are connected: the public code cuts at 40 Å + 3 × noise (130 Å at most), nearly all",
        "one process a GPU is planned; the public code uses DataParallel, whose first GPU holds more",
        "embeddings by ESM-2 650M (batches of 32, then 4) are made before and are no part of the step",
        "both partners are taken as equally large",
    ),
)

PEPTIDE = Guide(
    seed="003",
    name="peptide de-novo recursive model",
    task=RecurrentDepth,
    real={
        "width": 384,
        "heads": 6,
        "encoder_layers": 3,
        "decoder_layers": 3,
        "steps": 8,
        "latent": 6,
        "letters": 24,
        "longest": 35,
        "dropout": 0.1,
        "detach": False,
        "bins": 20_000,
    },
    tiny={"width": 16, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "steps": 2, "latent": 2, "bins": 200},
    tiny_item={"residues": 8, "peaks": 10},
    item={"residues": 35, "peaks": 100},
    largest={"residues": 35, "peaks": 100},
    items=_peptides,
    padded=True,
    settings={"optimizer": "adamw", "foreach": True, "ema": 0.999, "clip": 1.0},
    precision="bf16",
    device="rtx-4090",
    batches=(
        Batches(96, says="~24 GB: OOM with spectrum loss"),
        Batches(48, accumulation=2, says="~17 GB: safe margin for precursor loss"),
        Batches(32, accumulation=3, says="~15 GB: maximum safety"),
        Batches(64, accumulation=2, says="~19 GB: risky, but faster training"),
        Batches(40, accumulation=2, says="if you want extra safety: effective batch 80"),
        Batches(24, accumulation=4, says="or 24, to maintain an effective batch of 96"),
    ),
    variants={
        "bin_size 0.2, max_mz 1500": {"bins": 7500},
        "without spectrum loss": {"bins": 0},
        "gradients end at each supervision step": {"detach": True},
    },
    notes=(
        "layers as in its public code (pepTRM, optimized_extended.yaml): width 384, 3 + 3 layers, 6 heads",
        "spectra are rendered in fp32 even under autocast, as in its public losses.py",
        "predicted peaks are b and y ions with one and two charges: 128 of 33 residues; observed ones, up to 100, are "
        "rendered without gradients",
        "one backward through all 8 supervision steps, as in its public trainer; clipping at 1.0 is assumed",
        "everything is padded to 35 letters and 100 peaks there; the data set here has the lengths before padding",
    ),
)

TOWERS = Guide(
    seed="004",
    name="two-tower contrastive model",
    task=TwoTowers,
    real={
        "pixels": 224,
        "patch": 32,
        "image_width": 768,
        "image_heads": 12,
        "text_width": 512,
        "text_heads": 8,
        "depth": 12,
        "words": 49_408,
        "longest": 77,
        "shared": 512,
        "classes": 94,
    },
    tiny={
        "pixels": 16,
        "patch": 8,
        "image_width": 16,
        "image_heads": 2,
        "text_width": 16,
        "text_heads": 2,
        "depth": 2,
        "words": 50,
        "shared": 8,
        "classes": 3,
    },
    tiny_item={"length": 12},
    item={"length": 77},
    largest={"length": 77},
    items=_captions,
    padded=True,
    settings={"optimizer": "adamw", "foreach": True, "clip": 1.0},
    precision="fp16",
    device="8GiB",
    batches=(
        Batches(128, says="~7.5 GB (OOM), where it says 128 for before"),
        Batches(96, says="OOM, where it says 96 for before"),
        Batches(16, accumulation=8, says="~3-4 GB"),
        Batches(8, accumulation=16, says="uses less memory"),
        Batches(12, accumulation=10, says="effective batch 120"),
        Batches(32, accumulation=4, says="for larger GPUs (12GB+)"),
    ),
    notes=(
        "its public code fine-tunes CLIP ViT-B/32 (151M parameters) with a head of 94 classes on a card of 8 GB",
        "negatives are those of a micro-batch: 16 × 8 is not 128 of them",
        "fused attention, the text's causal; padding of texts is not masked",
    ),
)

GUIDES = {guide.seed: guide for guide in (RNA, SPECTRA, DOCKING, PEPTIDE, TOWERS)}
