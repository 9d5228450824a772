"""DreaMS' self-supervised pre-training: the masses of masked peaks, and which of two spectra came first.

    train: {task: "pipeline.tasks.spectra_pretrain:SpectraPretrain", batching: padded}

An item is a spectrum, and of `SpectrumPairs` another one of its LC-MS run. In both, some peaks have lost their masses,
drawn in proportion to intensity by the item's own random numbers. The loss is a focal cross entropy over classes of
m/z, and that of the order of retention. An item without another spectrum has no part in the second.

Shapes: B items, T of them with a second spectrum, S = B + T spectra, L places of each, M masked ones, C classes of m/z.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from pipeline.protocol import ITEMS
from pipeline.tasks.spectra.peak_transformer import (
    EMBEDDING,
    HEAVIEST,
    PEAKS,
    Peaks,
    PeakSizes,
    PeakTransformer,
    SpectrumRows,
    own_rows,
    padded_peaks,
    related_rows,
)
from pipeline.tasks.task_parts import at_least, at_least_single, part_of, require

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor, nn

    from pipeline.protocol import Sizes
    from pipeline.training.items.batch import ItemTensors

MASKED, OTHER, ORDER, IS_FIRST = "masked", "masked_other", "order", "is_first"
ROLE = "other"  # of the second spectrum
MASS_OF_MASKED = -1.0
FEWEST = 2  # masked peaks of a spectrum
NONE = -1  # class of a place that is not masked


class MaskedBatch(NamedTuple):
    """Spectra with masked peaks: those of items, then the second spectrum of each item that has one."""

    peaks: Peaks  # [S, L]
    place_SM: Tensor  # of masked peaks; 0 where a spectrum has fewer
    class_SM: Tensor  # of their masses; -1 where a spectrum has fewer
    pair_T: Tensor  # items with a second spectrum
    is_first_T: Tensor  # 1: the item's spectrum came first
    weights: tuple[float, float, float]  # masked peaks of items, and of others; pairs


class MaskedTransformer(PeakTransformer):
    """The transformer with the outputs of pre-training."""

    def __init__(self, sizes: PeakSizes) -> None:
        super().__init__(sizes)
        assert self.pretraining is not None
        self.pretraining.requires_grad_()

    def forward(self, peaks: Peaks, place_SM: Tensor, pair_T: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return the logits of the classes of masked masses [S, M, C], and of the order of each pair [T]."""
        assert self.pretraining is not None
        token_SLD = self.last_layer(peaks)
        masked_SMD = token_SLD.gather(1, place_SM.unsqueeze(-1).expand(-1, -1, token_SLD.shape[-1]))
        precursor_SD = self.norm(token_SLD[:, 0])
        items = len(precursor_SD) - len(pair_T)
        pair_T2D = torch.cat([precursor_SD[pair_T], precursor_SD[items:]], -1)
        mass_SMC, order_T = self.pretraining.mass(self.norm(masked_SMD)), self.pretraining.order(pair_T2D).squeeze(-1)
        return at_least_single(mass_SMC), at_least_single(order_T)


@dataclass(frozen=True)
class SpectraPretrain(PeakSizes):
    """The task: name the masses of masked peaks, and say which of two spectra of a run came first."""

    dropout: float = 0.1
    classes: int = 20_000  # of m/z up to 1000: 0.05 Da each
    max_peaks: int = 60  # of a spectrum with more, the most intense ones are taken; all are padded to this number
    masked: float = 0.3  # share of peaks; the precursor and the highest peak are never masked
    gamma: float = 5.0  # how much less good predictions weigh
    order_weight: float = 0.2  # of the loss of the order of retention; that of masses has the rest
    shift_chance: float = 0.2  # with which all masses of a spectrum are shifted
    shift_most: float = 50.0  # Da

    def __post_init__(self) -> None:
        at_least(self, {"max_peaks": FEWEST, "classes": 2, "shift_most": 0.0})
        self.check_sizes()
        for name in ("masked", "order_weight", "shift_chance"):
            require(0 <= getattr(self, name) <= 1, self, name, "from 0 to 1")
        require(self.gamma == 0 or 1 <= self.gamma < np.inf, self, "gamma", "0, or 1 or more")

    def model(self) -> nn.Module:
        sizes = part_of(self, PeakSizes)
        return MaskedTransformer(replace(sizes, head=EMBEDDING, head_depth=0, targets=self.width, summed=False))

    # ---- batches ----

    def cost(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """Return how many peaks a spectrum is padded to."""
        return {PEAKS: item[PEAKS] * 0 + self.max_peaks}

    @property
    def most_masked(self) -> int:
        return max(FEWEST, round(self.masked * self.max_peaks))

    def collate(self, items: Sequence[ItemTensors], rng: np.random.Generator) -> MaskedBatch:  # noqa: ARG002 - items have their own
        spectra, others, pairs, is_first = [], [], [], []
        for number, item in enumerate(items):
            own = own_rows(item, self.max_peaks)
            spectra.append(self._masked(own, item.rng))
            other = related_rows(item, ROLE, self.max_peaks) if self.order_weight else None
            if other is not None:
                others.append(self._masked(other, item.rng))
                pairs.append(number)
                is_first.append(float(own.retention_s < other.retention_s))
        rows, places, classes = zip(*spectra, *others, strict=True)
        class_SM = torch.stack(classes)
        masked, all_masked = (float((some != NONE).sum()) for some in (class_SM[: len(items)], class_SM))
        return MaskedBatch(
            padded_peaks(rows, self.max_peaks + 1), torch.stack(places), class_SM,
            torch.tensor(pairs, dtype=torch.long), torch.tensor(is_first),
            (masked, all_masked - masked, float(len(pairs))),
        )  # fmt: skip

    def _masked(self, rows: SpectrumRows, rng: np.random.Generator) -> tuple[SpectrumRows, Tensor, Tensor]:
        """Return a spectrum without the masses of some peaks; which these are [M], and the classes of their masses."""
        shift = rng.random() * self.shift_most if rng.random() < self.shift_chance else 0.0
        mz_P, intensity_P = rows.mz_P + shift, rows.intensity_P.double().numpy()
        places = np.flatnonzero((intensity_P > 0) & (intensity_P < 1))
        count = max(FEWEST, round(self.masked * len(places)))
        if count < len(places):
            share = intensity_P[places] / intensity_P[places].sum()
            places = np.sort(rng.choice(places, count, replace=False, p=share))
        place_M = torch.zeros(self.most_masked, dtype=torch.long)
        class_M = torch.full_like(place_M, NONE)
        place_M[: len(places)] = torch.from_numpy(places)
        class_M[: len(places)] = mass_classes(mz_P[places], self.classes)
        mz_P[places] = MASS_OF_MASKED
        return rows._replace(mz_P=mz_P), place_M, class_M

    # ---- losses and outputs ----

    def loss(self, model: nn.Module, batch: MaskedBatch) -> dict[str, tuple[Tensor, float]]:
        """Return the errors of masses, half for each of two spectra, and of the order of retention."""
        mass_SMC, order_T = model(batch.peaks, batch.place_SM, batch.pair_T)
        error_SM = _mass_errors(mass_SMC, batch.class_SM)
        focal_SM = (-torch.expm1(-error_SM)) ** self.gamma * error_SM
        items = len(error_SM) - len(order_T)
        of_order = functional.binary_cross_entropy_with_logits(order_T, batch.is_first_T, reduction="sum")
        sums = focal_SM[:items].sum(), focal_SM[items:].sum(), of_order
        terms = zip(self._shares.items(), sums, batch.weights, strict=False)
        return {name: (share * total, weight) for (name, share), total, weight in terms}

    def weights(self, batch: MaskedBatch) -> dict[str, float]:
        """Return how many masked peaks and pairs there are."""
        return dict(zip(self._shares, batch.weights, strict=False))

    @property
    def _shares(self) -> dict[str, float]:
        """The share of each term in the loss."""
        if not self.order_weight:
            return {MASKED: 1.0}
        of_masses = (1 - self.order_weight) / 2
        return {MASKED: of_masses, OTHER: of_masses, ORDER: self.order_weight}

    def outputs(self, model: nn.Module, batch: MaskedBatch) -> dict[str, Tensor]:
        """Return the predictions for each item's masked peaks, and for its pair which spectrum came first."""
        mass_SMC, order_T = model(batch.peaks, batch.place_SM, batch.pair_T)
        items = len(mass_SMC) - len(order_T)
        mass_BMC, class_BM = mass_SMC[:items], batch.class_SM[:items]
        masked_B = (class_BM != NONE).sum(1)
        unknown_B = order_T.new_full((items,), torch.nan)
        return {
            "masked_peaks": masked_B,
            "masked_error": _mass_errors(mass_BMC, class_BM).sum(1) / masked_B.clamp(min=1),
            "masked_right": (mass_BMC.argmax(-1) == class_BM).sum(1) / masked_B.clamp(min=1),
            ORDER: unknown_B.index_copy(0, batch.pair_T, order_T.sigmoid()),
            IS_FIRST: unknown_B.index_copy(0, batch.pair_T, batch.is_first_T.to(order_T)),
        }

    def metrics(self, outputs: Mapping[str, Sequence[Any]]) -> dict[str, float]:
        """Return cross entropy and accuracy over masked peaks, and how often the order is right."""
        of_item = {name: np.array([float(value) for value in values]) for name, values in outputs.items()}
        count_N, is_paired_N = of_item["masked_peaks"], np.isfinite(of_item[ORDER])
        figures = {}
        if count_N.sum():
            for name, figure in (("masked_error", "masked_error"), ("masked_right", "masked_accuracy")):
                figures[figure] = float((of_item[name] * count_N).sum() / count_N.sum())
        if is_paired_N.any():
            is_right_N = (of_item[ORDER] > 0.5) == (of_item[IS_FIRST] > 0.5)
            figures["order_accuracy"] = float(is_right_N[is_paired_N].mean())
        return figures

    def example(self, sizes: Sizes) -> MaskedBatch:
        """Return a batch of these sizes, each item with a second spectrum where the order is learned."""
        items, length = sizes[ITEMS], self.max_peaks + 1
        spectra = 2 * items if self.order_weight else items
        pairs, masked = spectra - items, self.most_masked
        mz_SL, real_SL = HEAVIEST * torch.rand(spectra, length), torch.ones(spectra, length, dtype=torch.bool)
        return MaskedBatch(
            Peaks(mz_SL, torch.rand(spectra, length), real_SL),
            torch.randint(length, (spectra, masked)), torch.randint(self.classes, (spectra, masked)),
            torch.arange(pairs), torch.rand(pairs).round(),
            (float(items * masked), float(pairs * masked), float(pairs)),
        )  # fmt: skip


def mass_classes(mz: Tensor, classes: int) -> Tensor:
    """Return the class of each m/z, the last one of all heavier ones."""
    return (mz / (HEAVIEST / classes)).round().long().clamp(max=classes - 1)


def _mass_errors(mass_SMC: Tensor, class_SM: Tensor) -> Tensor:
    """Return the cross entropy of each masked mass; 0 where there is none."""
    logit, true = mass_SMC.flatten(0, 1), class_SM.flatten()
    return functional.cross_entropy(logit, true, ignore_index=NONE, reduction="none").view_as(class_SM)
