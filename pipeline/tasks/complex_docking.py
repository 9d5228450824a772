"""Rigid docking by diffusion, as in DiffDock-PP: learn how noise moved a ligand, then sample poses from noise.

The ligand is turned about its centre and shifted, by an amount that goes with a time in [0, 1]; the network predicts
the score of both moves. Where the model is applied, each of an item's poses is a row of its own, with its own random
numbers: however rows are cut into batches, a pose is the same.

Shapes: B complexes, P poses (or noises) of each, L residues of the ligand, R of the receptor, E embedding dimensions.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from pipeline.device.kinds import CPU
from pipeline.errors import ConfigError
from pipeline.protocol import item_of
from pipeline.tasks.docking.docking_items import example_counts, example_partner, placed_partners
from pipeline.tasks.docking.pose_confidence import trained_confidence
from pipeline.tasks.docking.pose_quality import docking_metrics
from pipeline.tasks.docking.published_poses import CONFIDENCE, MOVE, TRAJECTORY, publish_poses
from pipeline.tasks.docking.rigid_diffusion import (
    LOW_TEMPERATURE,
    RMSDS,
    NoiseSchedule,
    PoseDraw,
    SamplingSteps,
    Spread,
    by_poses,
    pose_draw,
    pose_rmsds,
    rigid_draw,
    rigid_moves,
    rigid_noise,
    rigidly_moved,
    rotation_tables,
    sampled_poses,
    score_errors,
    stacked_draws,
    start_poses,
)
from pipeline.tasks.docking.score_network import PosedComplex, ScoreModel, TrunkSizes
from pipeline.tasks.task_parts import WHERE, above_zero, at_least, part_of, refuse, require

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor, nn

    from pipeline.protocol import Sizes
    from pipeline.records import Item
    from pipeline.structures.inventory import ScanRecipe
    from pipeline.training.items.batch import ItemTensors

TRANSLATION, ROTATION = "translation", "rotation"
FARTHEST = 500.0  # Å between the centres of receptor and ligand; farther off, the sampling has exploded
ROTATION_ROUNDING = 1e-5  # added to the norm of rotations' scores
COUNTS = ("scalars", "vectors", "layers", "multiplicity", "samples", "steps", "top")
LEAST = {"embedding_dim": 0, "psi": 0, **dict.fromkeys(COUNTS, 1)}


class NoisedComplex(NamedTuple):
    """A complex with noised poses of its ligand, what moved them, and the random numbers of the poses to draw."""

    noised: PosedComplex
    translation_score_P3: Tensor
    rotation_score_P3: Tensor
    true_L3: Tensor  # the ligand's CA in the receptor's frame; no residues where that is not known
    file_L3: Tensor  # the same residues in their file's frame, in float64
    receptor_centre_3: Tensor  # of CA, in its file
    draw: PoseDraw


class DockingBatch(NamedTuple):
    """Some complexes."""

    complexes: tuple[NoisedComplex, ...]

    @property
    def noises(self) -> int:
        """How many noised poses there are."""
        return sum(len(one.noised.time_T) for one in self.complexes)


@dataclass(frozen=True)
class ComplexDocking(SamplingSteps, TrunkSizes):
    """The task: predict how noise moved a complex's ligand, and dock by removing noise."""

    multiplicity: int = 1  # noises of a complex in a step, for which it is read once
    translation_least: float = 0.01  # Å, standard deviation along an axis
    translation_most: float = 30.0
    rotation_least: float = 0.01  # radians
    rotation_most: float = 1.65
    low_temperature: bool | None = None  # the paper's low temperatures; null: like as_published, if temperature is 1
    samples: int = 1  # poses of a complex where the model is evaluated or predicts: train.predict.options
    confidence: str = ""  # weights, or a folder of a model, that ranks the poses
    confidence_as_published: bool = False  # whether that was trained so, under the names of this package
    trajectory: bool = False  # also output the pose after each step
    top: int = 5  # poses of a complex that are written as structures

    def __post_init__(self) -> None:
        at_least(self, LEAST)
        above_zero(self, ("translation_least", "rotation_least", "temperature"))
        for name in (TRANSLATION, ROTATION):
            least, most = getattr(self, f"{name}_least"), getattr(self, f"{name}_most")
            if not least < most:
                problem = f"{name}_most is {most}, and {name}_least {least}: noise must grow with time"
                refuse(f"{name}_most", problem)
        require(0 <= self.actual_steps <= self.steps, self, "actual_steps", f"from 0 to the {self.steps} steps")
        is_low = self.as_published and self.temperature == 1 if self.low_temperature is None else self.low_temperature
        for name, value in LOW_TEMPERATURE.items():
            if is_low and getattr(self, name) == getattr(SamplingSteps, name):
                object.__setattr__(self, name, value)
        if self.as_published and not self.embedding_dim:
            problem = "as published, a residue's type is looked up by its embedding: embedding_dim must be 1 or more"
            refuse("embedding_dim", problem, f"--set {WHERE}.embedding_dim=1280")

    @property
    def rows_per_item(self) -> int:
        return self.samples

    @property
    def schedule(self) -> NoiseSchedule:
        translation = Spread(self.translation_least, self.translation_most)
        return NoiseSchedule(translation, Spread(self.rotation_least, self.rotation_most, variance=2.0))

    def model(self) -> nn.Module:
        return ScoreModel(part_of(self, TrunkSizes), self.schedule, torch.from_numpy(rotation_tables().norms_W))

    def files_read(self) -> Iterable[Path]:
        """Return the files whose content can change the task's results."""
        return [Path(self.confidence)] if self.confidence else []

    def cost(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sizes that decide how much memory an item takes: mostly pairs, n_rec × n_lig."""
        return {name: item[name] for name in ("nodes", "pairs")}

    def collate(self, items: Sequence[ItemTensors], rng: np.random.Generator) -> DockingBatch:  # noqa: ARG002 - items have their own
        """Join the rows of each complex: its poses, each with noise and numbers of its own."""
        rows = (list(group) for _, group in groupby(items, key=lambda item: item_of(item.id)))
        return DockingBatch(tuple(self._complex(group) for group in rows))

    def _complex(self, rows: Sequence[ItemTensors]) -> NoisedComplex:
        placed = placed_partners(rows[0], self.embedding_dim)
        true_L3 = placed.true_L3.float()
        rngs = (row.rng for row in rows for _ in range(self.multiplicity))
        noises = (
            rigid_noise(rng.random(), rigid_draw(rng), self.schedule, as_published=self.as_published) for rng in rngs
        )
        times, *parts = zip(*noises, strict=True)
        translation_P3, rotation_P3, *scores = [torch.from_numpy(np.stack(part_P)).float() for part_P in parts]
        noised_PL3 = rigidly_moved(true_L3.expand(len(times), -1, -1), rotation_P3, translation_P3)
        return NoisedComplex(
            PosedComplex(placed.receptor, placed.ligand, noised_PL3, torch.tensor(times)),
            translation_score_P3=scores[0],
            rotation_score_P3=scores[1],
            true_L3=true_L3 if placed.is_known else true_L3[:0],
            file_L3=placed.file_L3,
            receptor_centre_3=placed.centre_3,
            draw=stacked_draws([pose_draw(row.rng, self.steps) for row in rows]),
        )

    def loss(self, model: nn.Module, batch: DockingBatch) -> dict[str, tuple[Tensor, float]]:
        """Return the squared errors of both scores in units of their size, half of the loss each."""
        totals = [torch.zeros(()), torch.zeros(())]
        for one, found in zip(batch.complexes, self._scores(model, batch), strict=True):
            if not len(one.true_L3):
                problem = "a complex has no native contacts: its partners may be in different coordinate frames"
                raise ConfigError(problem, where="graph.contacts", remedy="--set graph.contacts=5")
            time_P = one.noised.time_T
            units = 1 / self.schedule.translation.sigma(time_P), model.norm(time_P) + ROTATION_ROUNDING  # type: ignore[operator]
            true = one.translation_score_P3, one.rotation_score_P3
            errors = [score_errors(*pair).sum() / 2 for pair in zip(found, true, units, strict=True)]
            totals = [total.to(error) + error for total, error in zip(totals, errors, strict=True)]
        return dict(zip((TRANSLATION, ROTATION), ((total, float(batch.noises)) for total in totals), strict=True))

    def weights(self, batch: DockingBatch) -> dict[str, float]:
        """Return how many noised poses there are."""
        return dict.fromkeys((TRANSLATION, ROTATION), float(batch.noises))

    def _scores(self, model: nn.Module, batch: DockingBatch) -> list[tuple[Tensor, Tensor]]:
        """Return the scores of each complex [P, 3]; together where they have equally many poses."""
        noised = [one.noised for one in batch.complexes]
        # As published, complexes of one batch change each other's scores: here each is alone.
        is_even = len({len(one.time_T) for one in noised}) == 1 and not self.as_published
        groups = [noised] if is_even else [[one] for one in noised]
        scores = (model(group, 1) for group in groups)
        return [(translation, rotation) for found in scores for translation, rotation in zip(*found, strict=True)]

    def outputs(self, model: nn.Module, batch: DockingBatch) -> dict[str, list[Tensor | None]]:
        """Draw a pose for each row; return its move, the confidence in it, and its distance from the truth.

        A move is a rotation, row by row, and a shift, in the files' frame: x → turn · x + shift. A pose that exploded
        is not a number.
        """
        like, judge = next(model.parameters()), None
        if self.confidence:
            judge = trained_confidence(self.confidence, str(like.device), like.dtype, self.confidence_as_published)
        with torch.autocast(like.device.type, enabled=False):  # half precision would lose tenths of an Å
            found = [self._drawn(model, judge, one) for one in batch.complexes]
        names = dict.fromkeys(name for of_complex in found for name in of_complex)
        return {name: [row for of_complex in found for row in of_complex.get(name, ())] for name in names}

    def _drawn(self, model: nn.Module, judge: nn.Module | None, one: NoisedComplex) -> dict[str, list[Tensor | None]]:
        at_once = 1 if one.noised.pos_PL3.device.type == CPU else len(one.draw.translation_3)

        def score(pos_PL3: Tensor, time_T: Tensor) -> tuple[Tensor, Tensor]:
            translation_BP3, rotation_BP3 = model([one.noised._replace(pos_PL3=pos_PL3, time_T=time_T)], at_once)
            return translation_BP3[0], rotation_BP3[0]

        def start(*draw: Tensor) -> Tensor:
            return start_poses(one.noised.ligand.pos_N3, PoseDraw(*draw), self.schedule)

        start_PL3 = by_poses(at_once, start, *one.draw)
        poses = sampled_poses(score, start_PL3, one.draw, self, self.schedule, at_once)
        kept = deque(poses, maxlen=None if self.trajectory else 1)
        is_sound_P = kept[-1].mean(1).norm(dim=-1) < FARTHEST  # NaN is not below anything
        steps = [torch.where(is_sound_P[:, None, None], pos, start_PL3) for pos in (start_PL3, *kept)]
        outputs = self._described(one, judge, steps, at_once)
        rows: dict[str, list[Tensor | None]] = {name: [None] * len(start_PL3) for name in RMSDS}
        return rows | {name: list(_sound(is_sound_P, values_P)) for name, values_P in outputs.items()}

    def _described(
        self, one: NoisedComplex, judge: nn.Module | None, steps: Sequence[Tensor], at_once: int
    ) -> dict[str, Tensor]:
        """Return the outputs of poses [P, …], which are the last of these steps."""

        def moves(pos_PL3: Tensor) -> Tensor:
            return by_poses(at_once, lambda pos: rigid_moves(one.file_L3, pos, one.receptor_centre_3), pos_PL3)

        pos_PL3, found = steps[-1], dict[str, torch.Tensor]()
        if len(one.true_L3):
            receptor_R3 = one.noised.receptor.pos_N3
            rmsds_P3 = by_poses(at_once, lambda pos: pose_rmsds(pos, one.true_L3, receptor_R3), pos_PL3)
            found = dict(zip(RMSDS, rmsds_P3.unbind(-1), strict=True))
        if judge is not None:
            final = one.noised._replace(pos_PL3=pos_PL3, time_T=pos_PL3.new_zeros(1))
            found[CONFIDENCE] = judge([final], at_once)[0]
        found[MOVE] = moves(pos_PL3)
        if self.trajectory:
            found[TRAJECTORY] = torch.stack([moves(pos) for pos in steps], 1)
        return found

    def metrics(self, outputs: Mapping[str, Any]) -> dict[str, float]:
        """Return the metrics of a split: RMSDs, and how many complexes have a pose near the truth."""
        return docking_metrics(outputs)

    def publish(
        self, folder: Path, outputs: Mapping[str, Any], items: Iterable[Item], reading: ScanRecipe
    ) -> list[Path]:
        """Write the best poses of each complex as structures, and tables of all poses and of rates of success."""
        return publish_poses(folder, outputs, items, reading, self.top)

    def example(self, sizes: Sizes) -> DockingBatch:
        """Return a batch of these sizes; how they are spread over its items makes little difference."""
        return DockingBatch(tuple(self._example(*counts) for counts in example_counts(sizes)))

    def _example(self, receptor: int, ligand: int) -> NoisedComplex:
        partners = [example_partner(count, self.embedding_dim) for count in (receptor, ligand)]
        pos_L3, poses = partners[1].pos_N3, self.multiplicity
        posed = PosedComplex(partners[0], partners[1], pos_L3.expand(poses, -1, -1).clone(), torch.rand(poses))
        scores = torch.randn(poses, 3), torch.randn(poses, 3)
        draw = stacked_draws([pose_draw(np.random.default_rng(0), self.steps)])
        return NoisedComplex(posed, *scores, pos_L3.clone(), pos_L3.double(), torch.zeros(3, dtype=torch.float64), draw)


def _sound(is_sound_P: Tensor, values_P: Tensor) -> Tensor:
    """Return values of poses, NaN for those that exploded."""
    return values_P.masked_fill(~is_sound_P.view(-1, *[1] * (values_P.dim() - 1)), torch.nan)
