"""Numbers predicted from a mass spectrum by a transformer over its peaks, such as a property of the molecule.

    train: {task: "pipeline.tasks.spectra_finetune:SpectraFinetune", options: {targets: 1}, batching: padded}

An item has `peaks.mz`, `peaks.intensity` (relative to the highest), `precursor_mz` (0 stands for one that is not known)
and `target`, one number or a vector, of which NaN is not known: it has no weight. The sizes by default are those of the
published DreaMS (github.com/pluskal-lab/DreaMS): width 980 + 44, 7 layers, 8 heads, 5,997 frequencies. Not as there:
two layers from frequencies to features, and no bias of attention by differences of masses.

A fine-tune of the upper layers alone: `train.frozen: [embed., layers.0., layers.1.]`. What is below the lowest trained
layer keeps nothing for backward; with `embed.` left trained, all layers would have to.

Shapes: B items, P peaks of an item, L peaks of the largest and its precursor, Q frequencies, D features, K targets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from pipeline.errors import ConfigError
from pipeline.protocol import ITEMS
from pipeline.tasks.task_parts import (
    WHERE,
    AttentionLayer,
    at_least,
    at_least_single,
    dropout_of,
    example_mask,
    most_intense,
    padded_rows,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from pipeline.protocol import Sizes
    from pipeline.training.items.batch import ItemTensors

PEAKS, PRECURSOR, TARGET = "peaks", "precursor_mz", "target"
PREDICTION = "prediction"
HEAVIEST = 1000.0  # m/z: the longest period of the waves; masses are also given as fractions of it
OF_PRECURSOR = 1.1  # its intensity, which no peak has
FINEST, COARSEST = 1e-5, 0.25  # Da: 50,000 waves, and 1
COUNTS = ("targets", "max_peaks", "layers", "heads", "d_fourier", "d_peak", "feedforward", "fourier_width")


class SpectraBatch(NamedTuple):
    """A batch of spectra, padded: of each the precursor, then its peaks."""

    mz_BL: Tensor
    intensity_BL: Tensor
    real_BL: Tensor | None  # None: all are
    target_BK: Tensor  # 0 where it is not known
    is_known_BK: Tensor
    known: float
    has_targets: bool = True  # whether the reader gave any, known or not


class MassWaves(nn.Module):
    """Encodes m/z as waves of many periods, from a fraction of a dalton to the heaviest mass, and a small network."""

    frequency_Q: Tensor
    ahead_2: Tensor

    def __init__(self, d_fourier: int, inner: int, finest: float) -> None:
        super().__init__()
        fine = finest * torch.arange(2, math.ceil(1 / finest), 2, dtype=torch.float64)
        period_Q = torch.cat([fine, torch.arange(2, HEAVIEST, dtype=torch.float64)])
        self.register_buffer("frequency_Q", (1 / period_Q).float(), persistent=False)
        self.register_buffer("ahead_2", torch.tensor([0.0, 0.25]), persistent=False)  # a cosine is a sine, a quarter on
        self.up = nn.Linear(2 * len(period_Q), inner, bias=False)
        self.down = nn.Linear(inner, d_fourier, bias=False)

    def forward(self, mz_BL: Tensor) -> Tensor:
        features_BLD: Tensor = self.down(functional.relu(self.up(self._waves(mz_BL))))
        return features_BLD

    def _waves(self, mz_BL: Tensor) -> Tensor:
        """Return sine and cosine of each frequency [B, L, 2 Q], computed in place as they take most of the memory."""
        # In double, and no matmul: of five million turns, single precision leaves no more than halves.
        turns_BLQ = (mz_BL.double().unsqueeze(-1) * self.frequency_Q.double()).frac_().to(mz_BL.dtype)
        waves_BLQ2 = turns_BLQ.unsqueeze(-1) + self.ahead_2
        return waves_BLQ2.mul_(2 * math.pi).sin_().flatten(-2)


class PeakFeatures(nn.Module):
    """Computes the features of a peak from m/z and intensity."""

    def __init__(self, task: SpectraFinetune) -> None:
        super().__init__()
        self.masses = MassWaves(task.d_fourier, task.fourier_width, task.finest)
        self.peak = nn.Linear(2, task.d_peak)

    def forward(self, mz_BL: Tensor, intensity_BL: Tensor) -> Tensor:
        peak_BLD = self.peak(torch.stack([mz_BL / HEAVIEST, intensity_BL], -1))
        return torch.cat([peak_BLD, self.masses(mz_BL)], -1)


class SpectraNetwork(nn.Module):
    """The transformer: predicts the numbers of each spectrum from the features at the precursor's place."""

    def __init__(self, task: SpectraFinetune) -> None:
        super().__init__()
        self.embed = PeakFeatures(task)
        self.layers = nn.ModuleList(
            AttentionLayer(task.width, task.heads, task.feedforward * task.width, task.dropout, functional.relu)
            for _ in range(task.layers)
        )
        self.norm, self.head = nn.LayerNorm(task.width), nn.Linear(task.width, task.targets)

    def forward(self, batch: SpectraBatch) -> Tensor:
        """Return the numbers of each spectrum [B, K]."""
        x_BLD = self.embed(batch.mz_BL, batch.intensity_BL)
        for layer in self.layers:
            x_BLD = layer(x_BLD, batch.real_BL)
        told_BK: Tensor = self.head(self.norm(x_BLD[:, 0]))
        return at_least_single(told_BK)


@dataclass(frozen=True)
class SpectraFinetune:
    """The task: predict numbers of each spectrum, by the mean squared error of those that are known."""

    targets: int = 1  # numbers that an item's `target` has
    max_peaks: int = 100  # of an item with more, the most intense ones are taken: attention goes by their square
    layers: int = 7
    heads: int = 8
    d_fourier: int = 980  # features of a peak's mass; with d_peak the width of every layer
    d_peak: int = 44  # features of a peak's mass and intensity as they are
    feedforward: int = 4  # how much wider a layer is within
    finest: float = 1e-4  # Da: half the shortest period of the waves; m/z itself has steps of 6e-5 at 1000 (float32)
    fourier_width: int = 512  # between frequencies and features
    dropout: float = 0.0

    def __post_init__(self) -> None:
        at_least(self, dict.fromkeys(COUNTS, 1))
        dropout_of(self)
        if not FINEST <= self.finest <= COARSEST:
            problem = f"finest is {self.finest}: it must be from {FINEST} to {COARSEST} Da"
            raise ConfigError(problem, where=f"{WHERE}.finest")
        if self.width % self.heads:
            problem = f"{self.d_fourier} + {self.d_peak} features cannot be divided among {self.heads} heads"
            remedy = f"--set {WHERE}.d_fourier={self.d_fourier + -self.width % self.heads}"
            raise ConfigError(problem, where=f"{WHERE}.heads", remedy=remedy)

    @property
    def width(self) -> int:
        return self.d_fourier + self.d_peak

    def model(self) -> nn.Module:
        return SpectraNetwork(self)

    def cost(self, item: Mapping[str, Any]) -> dict[str, Any]:
        return {PEAKS: np.minimum(item[PEAKS], self.max_peaks)}

    def collate(self, items: Sequence[ItemTensors], rng: np.random.Generator) -> SpectraBatch:  # noqa: ARG002 - the protocol has it
        taken = [self._taken(item) for item in items]
        mz_BL, real_BL = padded_rows([mz for mz, _ in taken])
        target_BK = torch.stack([self._target(item) for item in items])
        is_known_BK = ~target_BK.isnan()
        return SpectraBatch(
            mz_BL=mz_BL,
            intensity_BL=padded_rows([intensity for _, intensity in taken])[0],
            real_BL=real_BL,
            target_BK=target_BK.nan_to_num(0.0),
            is_known_BK=is_known_BK,
            known=float(is_known_BK.sum()),
            has_targets=any(TARGET in item.values for item in items),
        )

    def _taken(self, item: ItemTensors) -> tuple[Tensor, Tensor]:
        """Return m/z and intensity of the precursor and the most intense peaks."""
        mz_P, intensity_P = most_intense(item, self.max_peaks)
        precursor = item.values.get(PRECURSOR, mz_P.new_zeros(())).reshape(1).to(mz_P.dtype).nan_to_num(0.0)
        return torch.cat([precursor, mz_P]), torch.cat([intensity_P.new_tensor([OF_PRECURSOR]), intensity_P])

    def _target(self, item: ItemTensors) -> Tensor:
        """Return the target of an item [K], NaN where unknown; raise where its size is not as configured."""
        if TARGET not in item.values:
            return torch.full((self.targets,), math.nan)
        target_K = item.values[TARGET].reshape(-1)
        if len(target_K) != self.targets:
            sizes = f"{self.targets} numbers of a spectrum, and {item.id} has a target of {len(target_K)}"
            raise ConfigError(
                f"the task tells {sizes}", where=f"{WHERE}.targets", remedy=f"--set {WHERE}.targets={len(target_K)}"
            )
        return target_K.float()

    def loss(self, model: nn.Module, batch: SpectraBatch) -> dict[str, tuple[Tensor, float]]:
        """Return the sum of squared errors, and how many numbers are known."""
        if not batch.has_targets:
            problem = "there is nothing to learn: no spectrum of a batch has a target"
            remedy = "name the headers or columns that are targets"
            raise ConfigError(problem, where="data.options.target", remedy=remedy)
        error_BK = torch.where(batch.is_known_BK, model(batch) - batch.target_BK, 0.0)
        return {TARGET: (error_BK.square().sum(), batch.known)}

    def weights(self, batch: SpectraBatch) -> dict[str, float]:
        """Return how many numbers are known."""
        return {TARGET: batch.known}

    def outputs(self, model: nn.Module, batch: SpectraBatch) -> dict[str, Tensor]:
        """Return the predictions and targets of each item [B, K]; unknown targets are NaN."""
        known_BK = torch.where(batch.is_known_BK, batch.target_BK, math.nan)
        return {PREDICTION: model(batch), TARGET: known_BK}

    def metrics(self, outputs: Mapping[str, Sequence[Any]]) -> dict[str, float]:
        """Return the errors over all known numbers; no figures if none is known.

        r2 is the part of the spread explained, of each target around its own mean; it needs targets that differ.
        """
        known_K, sum_K, squares_K, error_K, apart_K = (np.zeros(self.targets) for _ in range(5))
        for predicted, target in zip(outputs[PREDICTION], outputs[TARGET], strict=True):
            is_known_K = ~np.isnan(target)
            target_K = np.where(is_known_K, target, 0.0).astype(np.float64)
            off_K = np.where(is_known_K, predicted, 0.0) - target_K
            known_K += is_known_K
            sum_K += target_K
            squares_K += target_K**2
            error_K += off_K**2
            apart_K += np.abs(off_K)
        if not (known := known_K.sum()):
            return {}
        figures = {"mae": float(apart_K.sum() / known), "rmse": math.sqrt(error_K.sum() / known)}
        spread = float((squares_K - sum_K**2 / np.maximum(known_K, 1)).sum())
        is_spread = spread > 1e-12 * squares_K.sum()  # of equal numbers, rounding is left
        return figures | ({"r2": 1 - float(error_K.sum()) / spread} if is_spread else {})

    def example(self, sizes: Sizes) -> SpectraBatch:
        items, length = sizes[ITEMS], sizes[PEAKS] + 1
        return SpectraBatch(
            mz_BL=HEAVIEST * torch.rand(items, length),
            intensity_BL=torch.rand(items, length),
            real_BL=example_mask(items, length),
            target_BK=torch.randn(items, self.targets),
            is_known_BK=torch.ones(items, self.targets, dtype=torch.bool),
            known=float(items * self.targets),
        )
