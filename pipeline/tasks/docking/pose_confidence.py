"""The confidence in a pose: a task to train, whose model ranks the poses that a score model draws.

Its data are poses that were drawn before: a folder of predictions of stage predict, whose rows tell how each pose lies.
In an epoch an item is shown in one of its poses, which its own random numbers choose.

Shapes: B complexes, K poses of one.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from pipeline.errors import ConfigError, DataError
from pipeline.files import cell_text
from pipeline.protocol import item_of
from pipeline.tasks.docking.docking_items import example_counts, example_partner, placed_partners
from pipeline.tasks.docking.score_network import (
    FORM,
    ConfidenceModel,
    PosedComplex,
    TrunkSizes,
    trunk_options,
)
from pipeline.tasks.task_parts import WHERE, above_zero, at_least, part_of
from pipeline.training.checkpoints.trained_weights import stored_weights
from pipeline.training.evaluating.outputs import CSV

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor, nn

    from pipeline.protocol import Sizes
    from pipeline.training.items.batch import ItemTensors

DRAW = "pipeline submit predict --model SCORE_MODEL   (samples poses)"
LEAST = {"embedding_dim": 0, "scalars": 1, "vectors": 1, "layers": 3, "multiplicity": 1}  # the third makes odd scalars


class JudgedComplex(NamedTuple):
    """A complex in some poses, and whether each is near the true one."""

    posed: PosedComplex
    near_P: Tensor


class ConfidenceBatch(NamedTuple):
    """Some complexes."""

    complexes: tuple[JudgedComplex, ...]


@dataclass(frozen=True)
class PoseConfidence(TrunkSizes):
    """The task: predict whether a pose that a score model drew is near the true one."""

    scalars: int = 16
    vectors: int = 4
    poses: str = ""  # the folder of their predictions
    multiplicity: int = 1  # poses of a complex in a step
    near: float = 5.0  # Å of ligand RMSD, below which a pose counts as near

    def __post_init__(self) -> None:
        at_least(self, LEAST)
        above_zero(self, ("near",))

    def files_read(self) -> Iterable[Path]:
        """Return the files whose content can change the task's training data."""
        return [Path(self.poses) / CSV] if self.poses else []

    @cached_property
    def _moves(self) -> dict[str, NDArray[np.float64]]:
        """Each complex's poses as moves [K, 12]; one that exploded is not among them."""
        return read_moves(Path(self.poses) / CSV)

    def model(self) -> nn.Module:
        return ConfidenceModel(part_of(self, TrunkSizes))

    def cost(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sizes that decide how much memory an item takes: mostly pairs, n_rec × n_lig."""
        return {name: item[name] for name in ("nodes", "pairs")}

    def collate(self, items: Sequence[ItemTensors], rng: np.random.Generator) -> ConfidenceBatch:  # noqa: ARG002 - items have their own
        """Show each complex in some of its poses."""
        return ConfidenceBatch(tuple(map(self._complex, items)))

    def _complex(self, item: ItemTensors) -> JudgedComplex:
        placed, moves_K12 = placed_partners(item, self.embedding_dim), self._moves.get(item_of(item.id))
        if moves_K12 is None:
            raise DataError(f"{item.id} has no poses", where=self.poses or f"{WHERE}.poses", remedy=DRAW)
        moves_P12 = torch.from_numpy(moves_K12[item.rng.integers(len(moves_K12), size=self.multiplicity)])
        turn_P33, shift_P3 = moves_P12[:, :9].view(-1, 3, 3), moves_P12[:, 9:]
        pos_PL3 = placed.file_L3 @ turn_P33.transpose(1, 2) + (shift_P3 - placed.centre_3).unsqueeze(1)
        apart_P = (pos_PL3 - placed.true_L3).square().sum(-1).mean(-1).sqrt()
        posed = PosedComplex(placed.receptor, placed.ligand, pos_PL3.float(), torch.zeros(1))
        return JudgedComplex(posed, (apart_P < self.near).float())

    def loss(self, model: nn.Module, batch: ConfidenceBatch) -> dict[str, tuple[Tensor, float]]:
        """Return the binary cross entropy of the logits."""
        logit_BP, near_BP = self._judged(model, batch)
        total = functional.binary_cross_entropy_with_logits(logit_BP.float(), near_BP, reduction="sum")
        return {"confidence": (total, float(near_BP.numel()))}

    def _judged(self, model: nn.Module, batch: ConfidenceBatch) -> tuple[Tensor, Tensor]:
        logit_BP = model([one.posed for one in batch.complexes], 1)
        return logit_BP, torch.stack([one.near_P for one in batch.complexes])

    def outputs(self, model: nn.Module, batch: ConfidenceBatch) -> dict[str, list[Tensor]]:
        """Return the logit of each complex's first pose, and whether that is near."""
        logit_BP, near_BP = self._judged(model, batch)
        return {"confidence": list(logit_BP[:, :1]), "near": list(near_BP[:, :1])}

    def metrics(self, outputs: Mapping[str, Any]) -> dict[str, float]:
        """Return the share of poses that are judged rightly, and of those that are near."""
        logit_N, near_N = (np.array([float(value[0]) for value in outputs[name]]) for name in ("confidence", "near"))
        return {"accuracy": float(((logit_N > 0) == (near_N > 0)).mean()), "near": float(near_N.mean())}

    def example(self, sizes: Sizes) -> ConfidenceBatch:
        """Return a batch of these sizes; how they are spread over its items makes little difference."""
        return ConfidenceBatch(tuple(self._example(*counts) for counts in example_counts(sizes)))

    def _example(self, receptor: int, ligand: int) -> JudgedComplex:
        partners = [example_partner(count, self.embedding_dim) for count in (receptor, ligand)]
        pos_PL3 = partners[1].pos_N3.expand(self.multiplicity, -1, -1).clone()
        posed = PosedComplex(partners[0], partners[1], pos_PL3, torch.zeros(1))
        return JudgedComplex(posed, torch.ones(self.multiplicity))


def read_moves(table: Path) -> dict[str, NDArray[np.float64]]:
    """Return each complex's moves of a table of predictions [K, 12], without those that are no numbers."""
    found: dict[str, list[list[float]]] = {}
    try:
        with table.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                move = [float(row[f"move.{place}"] or "nan") for place in range(12)]
                if np.isfinite(move).all():
                    found.setdefault(item_of(cell_text(row["id"])), []).append(move)
    except (OSError, KeyError, ValueError) as error:
        raise DataError(f"has no poses: {error}", where=str(table), remedy=DRAW) from error
    return {name: np.array(moves) for name, moves in found.items()}


@cache
def trained_confidence(place: str, device: str, dtype: torch.dtype, as_published: bool) -> ConfidenceModel:  # noqa: FBT001 - cached by it
    """Return a trained model, by a file or folder of weights: the published ones, an exported model or a checkpoint."""
    tensors = stored_weights(Path(place))
    if FORM.knows(tensors):
        tensors, as_published = FORM.read(tensors), True
    try:
        model = ConfidenceModel(TrunkSizes(**trunk_options(tensors), as_published=as_published))
        model.load_state_dict(tensors)
    except (KeyError, ValueError, IndexError, RuntimeError) as error:
        remedy = "--set train.predict.options.confidence=FILE   (of DiffDock-PP, or trained with PoseConfidence)"
        problem = "these are not weights of a pose confidence model"
        raise ConfigError(problem, where=f"{WHERE}.confidence: {place}", remedy=remedy) from error
    return model.to(device, dtype).eval()
