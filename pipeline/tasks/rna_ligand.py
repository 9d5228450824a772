"""RNA pockets and their ligands: predicts a ligand's embedding from its pocket's atoms, to rank a library.

    data: {source: reader, reader: "pipeline.tasks.rna.pocket_reader:RnaPockets", path: pockets/}
    train: {task: "pipeline.tasks.rna_ligand:RnaLigand",
            options: {targets: /data/ligand_embeddings.h5, library: /data/ligand_library.h5}}

A pocket is RNA alone: the task looks for its ligand. All models of a complex, `1abc_GTP_modelN`, have the one target
`1abc_GTP`. With a library, evaluation tells how well true ligands are found, and prediction is a table of the nearest
ones for each pocket. `RnaLigandContrast` learns by InfoNCE over all pockets of a step instead of by distance.

The network is that of RNA-3E-FFI, mended: `as_published: true` is the original, which published weights need. With
`sequences`, it also reads the vector of the pocket's sequence from any encoder of RNA.

Shapes: N atoms of all items, E entries of one kind, P atoms of an entry, B items, D numbers of an embedding,
S of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from pipeline.errors import ConfigError
from pipeline.protocol import ITEMS
from pipeline.tasks.rna.ligand_library import (
    COSINE,
    EUCLIDEAN,
    embeddings_of,
    library_of,
    read_measure,
    retrieval_figures,
    sequence_vector,
)
from pipeline.tasks.rna.pocket_network import (
    FEATURES,
    KINDS,
    POOL_WIDTH,
    Entries,
    PocketBatch,
    PocketNetwork,
    PocketSizes,
)
from pipeline.tasks.rna.pocket_reader import PHASE
from pipeline.tasks.task_parts import (
    WHERE,
    above_zero,
    at_least,
    at_least_single,
    divided,
    dropout_of,
    found_both_ways,
    one_of,
    refuse,
    task_table,
    where_known,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor, nn

    from pipeline.protocol import Sizes
    from pipeline.records import Item
    from pipeline.tasks.rna.ligand_library import LigandLibrary
    from pipeline.training.items.batch import ItemTensors

TARGET, EMBEDDING, RANK = "target", "embedding", "rank"
NODES = "atoms"
BOTH_WAYS = ("bonds", "near")
TABLE = "ranked_ligands.csv"
COLUMNS = ("query", "rank", "ligand_id", "distance", "metric", "is_true")
READER = "pipeline.tasks.rna.pocket_reader:RnaPockets"
MSE, COSINE_LOSS, COSINE_MSE = "mse", "cosine", "cosine_mse"
LEAST = {
    **dict.fromkeys(("layers", "output_dim", "feature_width", "radial_functions", "top"), 1),
    **dict.fromkeys(("num_attention_heads", "sequence_dim"), 0),
}
SHARES = ("bonded_weight", "angle_weight", "dihedral_weight", "nonbonded_weight", "cosine_weight", "mse_weight")
KNOWN: dict[str, tuple[object, ...]] = {
    "loss_by": (MSE, COSINE_LOSS, COSINE_MSE),
    "targets_missing": ("error", "skip"),
    "distance": (EUCLIDEAN, COSINE),
    "norm_type": ("layer", "rms"),
    "version": (2, 3),
}
PATHS = ("targets", "target_norm", "feature_norm", "library", "sequences")
DEGREES = 360.0
ONE_TARGET = 1 - 1e-6  # cosine of targets above which two pockets have the same ligand


@dataclass(frozen=True)
class RnaLigand(PocketSizes):
    """The task: predict for each pocket the given embedding of its ligand."""

    targets: str | None = None  # HDF5, an absolute path: a dataset for each key, or `id` and `embedding`
    targets_missing: str = "error"  # skip: pockets without a target have no weight
    target_norm: str | None = None  # .npz of mean and std: targets and the library are measured by it first
    feature_norm: str | None = None  # .npz of mean and std of charge, atomic number and mass; none: those of RNA.OL3
    library: str | None = None  # HDF5: ligands that pockets are ranked in
    sequences: str | None = None  # HDF5: sequence_dim numbers for each pocket or complex, as `pipeline export` writes
    distance: str = EUCLIDEAN  # by which they are; or cosine
    top: int = 10  # ligands of a pocket that prediction lists
    loss_by: str = MSE  # cosine, cosine_mse
    cosine_weight: float = 0.7  # of cosine_mse
    mse_weight: float = 0.3

    def __post_init__(self) -> None:
        at_least(self, {**LEAST, **dict.fromkeys(SHARES, 0)})
        dropout_of(self)
        one_of(self, KNOWN)
        self.fields  # noqa: B018 - it refuses a text that is no irreps
        if self.num_attention_heads:
            divided(POOL_WIDTH, self.num_attention_heads, "num_attention_heads")
        if self.norm_type == "rms" and not self.as_published:
            problem = "norm_type rms scales the components of a vector apart: the result would depend on orientation"
            remedy = f"--set {WHERE}.norm_type=layer   (or as_published=true for published weights)"
            refuse("norm_type", problem, remedy)
        if (self.sequences is None) != (self.sequence_dim == 0):
            problem = "sequences (a file) and sequence_dim (its vector length) must be set together"
            refuse("sequence_dim", problem, "set both or neither")
        for name in PATHS:
            if (path := getattr(self, name)) is not None:
                object.__setattr__(self, name, _absolute(name, path))

    def model(self) -> nn.Module:
        network = PocketNetwork(self)
        if self.feature_norm is not None:
            measure = read_measure(Path(self.feature_norm), FEATURES, "feature_norm")
            network.atoms.mean_3.copy_(torch.from_numpy(measure.mean_D))
            network.atoms.deviation_3.copy_(torch.from_numpy(measure.deviation_D))
        return network

    def files_read(self) -> list[Path]:
        """Return the files whose content can change the task's results."""
        return [Path(path) for name in PATHS if (path := getattr(self, name)) is not None]

    def cost(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sizes that decide how much memory a pocket takes: atoms, and entries of each kind."""
        _check_sizes(item)
        entries = {kind: item[kind] * (2 if kind in BOTH_WAYS else 1) for kind in self.kinds}
        return {NODES: item[NODES], **entries}

    def collate(self, items: Sequence[ItemTensors], rng: np.random.Generator) -> PocketBatch:  # noqa: ARG002 - the protocol has it
        for item in items:
            _check_sizes(item.values, item.id)
        sizes = [len(item.values["atoms.pos"]) for item in items]
        targets = [self._target(item.id) for item in items]
        nothing_D = np.zeros(self.output_dim, np.float32)
        return PocketBatch(
            feature_N3=torch.cat([item.values["atoms.feature"] for item in items]),
            # about their mean: single precision keeps differences
            pos_N3=torch.cat([(pos := item.values["atoms.pos"]) - pos.mean(0) for item in items]),
            item_N=torch.repeat_interleave(torch.arange(len(items)), torch.tensor(sizes)),
            **{kind: self._entries(kind, items, sizes) for kind in KINDS},
            target_BD=torch.from_numpy(np.stack([nothing_D if target is None else target for target in targets])),
            has_target_B=torch.tensor([target is not None for target in targets]),
            known=tuple(target is not None for target in targets),
            ids=tuple(item.id for item in items),
            sequence_BS=None if self.sequences is None else self._sequences(Path(self.sequences), items),
        )

    def _sequences(self, path: Path, items: Sequence[ItemTensors]) -> Tensor:
        """Return the vectors of the pockets' sequences."""
        return torch.from_numpy(np.stack([sequence_vector(path, item.id, self.sequence_dim) for item in items]))

    def _entries(self, kind: str, items: Sequence[ItemTensors], sizes: Sequence[int]) -> Entries:
        """Return the entries of one kind, numbered by the batch's atoms; none of a kind that is not used."""
        if kind not in self.kinds:
            return _any_entries(kind, 0, len(items))
        firsts = np.cumsum([0, *sizes[:-1]]).tolist()
        atoms = [item.values[f"{kind}.atom"].long().T + first for item, first in zip(items, firsts, strict=True)]
        constants = [item.values[f"{kind}.constant"].float() for item in items]
        if kind == "dihedrals" and not self.as_published:  # phases in turns: the original takes degrees for radians
            constants = [constant_E3 * torch.tensor([1, 1, PHASE / DEGREES]) for constant_E3 in constants]
        if kind in BOTH_WAYS:
            atoms = [torch.cat([atom_2E, atom_2E.flip(0)], 1) for atom_2E in atoms]
            constants = [torch.cat([constant_EK, constant_EK]) for constant_EK in constants]
        return Entries(torch.cat(atoms, 1).contiguous(), torch.cat(constants))

    def _target(self, name: str) -> Any:
        """Return a pocket's target vector; None if it has none and is allowed to have none."""
        if self.targets is None:
            return None
        targets = embeddings_of(Path(self.targets))
        target_D = targets.of_pocket(name, self.output_dim)
        if target_D is None and self.targets_missing == "error":
            raise targets.missing(name)
        return target_D if target_D is None else self._measured(target_D)

    def _measured(self, vectors: Any) -> Any:
        """Return vectors standardised by the data set's mean and deviation, where a file gives them."""
        if self.target_norm is None:
            return vectors
        measure = read_measure(Path(self.target_norm), self.output_dim, "target_norm")
        return (vectors - measure.mean_D) / measure.deviation_D

    def _library(self) -> LigandLibrary | None:
        if self.library is None:
            return None
        library = library_of(Path(self.library))
        if library.vector_LD.shape[1] != self.output_dim:
            width = library.vector_LD.shape[1]
            problem = f"the ligands of {self.library} have {width} numbers, but the model outputs {self.output_dim}"
            refuse("library", problem, f"--set {WHERE}.output_dim={width}")
        return replace(library, vector_LD=self._measured(library.vector_LD))

    def loss(self, model: nn.Module, batch: PocketBatch) -> dict[str, tuple[Tensor, float]]:
        """Return the summed distance of the pockets' vectors from their targets, and how many have one."""
        self._check_targets(batch)
        vector_BD = at_least_single(model(batch))
        far_B = self._distances(vector_BD, batch.target_BD.to(vector_BD.dtype))
        return {TARGET: ((far_B * batch.has_target_B).sum(), float(sum(batch.known)))}

    def _check_targets(self, batch: PocketBatch) -> None:
        if self.targets is None and not any(batch.known):
            refuse("targets", "nothing to learn: no targets are set", "use an absolute path such as /data/targets.h5")

    def _distances(self, vector_BD: Tensor, target_BD: Tensor) -> Tensor:
        """Return how far each vector is from its target."""
        squares_B = (vector_BD - target_BD).square().mean(-1)
        if self.loss_by == MSE:
            return squares_B
        turned_B = 1 - functional.cosine_similarity(vector_BD, target_BD, -1)
        return turned_B if self.loss_by == COSINE_LOSS else self.cosine_weight * turned_B + self.mse_weight * squares_B

    def outputs(self, model: nn.Module, batch: PocketBatch) -> dict[str, list[Tensor]]:
        """Return each pocket's vector [D], its target, its cosine to it, and the rank of its ligand in the library.

        All but the vector are empty where they are not known.
        """
        predicted_BD = at_least_single(model(batch))
        cosine_B = torch.cosine_similarity(predicted_BD, batch.target_BD.to(predicted_BD.dtype))
        found = {
            EMBEDDING: list(predicted_BD.unbind()),
            TARGET: where_known(batch.target_BD, batch.known),
            "cosine": where_known(cosine_B.unsqueeze(1), batch.known),
        }
        if (library := self._library()) is not None:
            vectors = predicted_BD.detach().float().cpu().numpy()
            ranks = zip(vectors, [library.place(name) for name in batch.ids] or [-1] * len(vectors), strict=True)
            found[RANK] = [
                torch.tensor([] if place < 0 else [library.rank(vector_D, place, self.distance)], dtype=torch.float64)
                for vector_D, place in ranks
            ]
        return found

    def metrics(self, outputs: Mapping[str, Sequence[Any]]) -> dict[str, float]:
        """Return the metrics of a split: means over pockets that have a target, and how well ligands are found."""
        pairs = zip(outputs[EMBEDDING], outputs[TARGET], strict=True)
        figures = [_figures(np.float64(vector), np.float64(target)) for vector, target in pairs if target.size]
        found = dict(zip(("cosine", "mse"), np.mean(figures, axis=0).tolist(), strict=True)) if figures else {}
        library = self._library()
        if library is None or RANK not in outputs:
            return found
        ranks = [float(rank.item()) for rank in outputs[RANK] if rank.size]
        return found | retrieval_figures(ranks, len(library.names))

    def publish(self, folder: Path, outputs: Mapping[str, Any], items: Iterable[Item], reading: Any) -> list[Path]:  # noqa: ARG002 - the protocol has them
        """Write the nearest ligands of each pocket as a table, where there is a library."""
        library = self._library()
        if library is None:
            return []
        vectors = outputs[EMBEDDING]
        with task_table(folder / TABLE, COLUMNS) as add:
            for place in range(len(vectors)):
                best = library.best(np.asarray(vectors[place], np.float32), self.top, self.distance)
                true = library.place(vectors.id(place))
                for rank, (ligand, far) in enumerate(best, 1):
                    is_true = "" if true < 0 else "yes" if ligand == true else "no"
                    add([vectors.id(place), rank, library.names[ligand], f"{far:.6g}", self.distance, is_true])
        return [folder / TABLE]

    def example(self, sizes: Sizes) -> PocketBatch:
        """Return a batch of these sizes; how they are spread over its items makes no difference."""
        atoms, items = (sizes[name] for name in (NODES, ITEMS))
        return PocketBatch(
            feature_N3=torch.randn(atoms, FEATURES),
            pos_N3=torch.randn(atoms, 3),
            item_N=torch.arange(atoms) * items // max(atoms, 1),
            **{kind: _any_entries(kind, sizes.get(kind, 0) * (kind in self.kinds), atoms) for kind in KINDS},
            target_BD=torch.randn(items, self.output_dim),
            has_target_B=torch.ones(items, dtype=torch.bool),
            known=(True,) * items,
            ids=(),
            sequence_BS=torch.randn(items, self.sequence_dim) if self.sequence_dim else None,
        )


@dataclass(frozen=True)
class RnaLigandContrast(RnaLigand):
    """The task by InfoNCE: each pocket must find its own ligand among those of all pockets of a step, and back."""

    temperature: float = 0.07

    def __post_init__(self) -> None:
        super().__post_init__()
        above_zero(self, ("temperature",))
        if self.targets_missing != "error":
            problem = "every pocket of a step is compared with every ligand: each must have a target"
            refuse("targets_missing", problem, f"--set {WHERE}.targets_missing=error")

    def embed(self, model: nn.Module, batch: PocketBatch) -> dict[str, Tensor]:
        """Return the vectors of the pockets and their targets."""
        self._check_targets(batch)
        return {EMBEDDING: at_least_single(model(batch)), TARGET: batch.target_BD}

    def contrast(self, model: nn.Module, embedded: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, float]]:  # noqa: ARG002 - the protocol has it
        """Return the cross entropy of finding ligands from pockets and back, the mean of both, over all pockets.

        Two pockets of one ligand are no negatives of each other; to the original they were.
        """
        with torch.autocast(embedded[EMBEDDING].device.type, enabled=False):
            vector_BD, target_BD = (
                functional.normalize(at_least_single(embedded[side]), dim=-1) for side in (EMBEDDING, TARGET)
            )
            target_BD = target_BD.to(vector_BD.dtype)
            logits_BB = vector_BD @ target_BD.T / self.temperature
            if not self.as_published:
                is_same_BB = target_BD @ target_BD.T > ONE_TARGET
                is_same_BB = is_same_BB & ~torch.eye(len(is_same_BB), dtype=torch.bool, device=is_same_BB.device)
                logits_BB = logits_BB.masked_fill(is_same_BB, -torch.inf)
            missed_B = found_both_ways(logits_BB)
        return {TARGET: (missed_B.sum(), float(len(missed_B)))}

    def loss(self, model: nn.Module, batch: PocketBatch) -> dict[str, tuple[Tensor, float]]:
        """Return the loss of a single batch: the step's loss where it is the only one."""
        return self.contrast(model, self.embed(model, batch))


def _figures(one_D: Any, target_D: Any) -> tuple[float, float]:
    """Return the cosine of two vectors and their mean squared difference."""
    lengths = float(np.linalg.norm(one_D) * np.linalg.norm(target_D))
    return float(one_D @ target_D) / lengths if lengths else 0.0, float(np.square(one_D - target_D).mean())


def _any_entries(kind: str, count: int, atoms: int) -> Entries:
    """Return `count` entries between random atoms."""
    width, constants = KINDS[kind]
    return Entries(torch.randint(max(atoms, 1), (width, count)), torch.randn(count, constants))


def _check_sizes(sizes: Mapping[str, Any], name: str = "the items") -> None:
    """Refuse items that are no pockets."""
    if not any(key in sizes for key in (NODES, "atoms.pos")):
        has = ", ".join(sorted(sizes)[:4]) or "no arrays"
        problem = f"the task reads RNA pockets from {READER}; {name} has {has}"
        remedy = f"--set data.source=reader --set data.reader={READER}"
        raise ConfigError(problem, where="data.reader", remedy=remedy)


def _absolute(name: str, path: str) -> str:
    """Expand ~ in a path; raise if it is relative, which would be another file in each job."""
    expanded = Path(path).expanduser()
    if not expanded.is_absolute():
        problem = f"{path!r} is relative, but jobs read options from another folder"
        refuse(name, problem, f"--set {WHERE}.{name}=$PWD/{expanded.name}")
    return str(expanded)
