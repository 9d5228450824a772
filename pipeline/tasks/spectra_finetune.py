"""Properties of a molecule from its mass spectrum, by DreaMS: numbers, yes or no, a fingerprint, or an embedding.

    train: {task: "pipeline.tasks.spectra_finetune:SpectraFinetune", options: {targets: 1}, batching: padded}

An item has `peaks.mz`, `peaks.intensity` (relative to the highest), `precursor_mz` (0 stands for one that is not known)
and `target`, one number or a vector, of which NaN is not known: it has no weight. Sizes by default are those of the
published DreaMS (github.com/pluskal-lab/DreaMS); with its weights, `as_published: true`. Values of `head`:

    regression     numbers, in the units of `lowest` and `highest` where these are given: squared error
    binary         yes or no, one or many: cross entropy, focal by `alpha` and `gamma`
    fingerprint    bits: 1 − cosine, 1 − intersection over union, or cross entropy (`measure: cosine | iou | bce`)
    embedding      a vector near those of the same molecule: triplets by cosines, `SpectraContrast`: InfoNCE

A fine-tune of the upper layers alone: `train.frozen: [embed., layers.0., layers.1.]`. What is below the lowest trained
layer keeps nothing for backward; with `embed.` left trained, all layers would have to.

Shapes: B items, L places of the largest, D features, K targets.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pipeline.errors import ConfigError
from pipeline.protocol import ITEMS
from pipeline.tasks.spectra.peak_transformer import (
    BINARY,
    EMBEDDING,
    FINGERPRINT,
    HEADS,
    MOLECULE,
    PEAKS,
    PRECURSOR,
    RELATED,
    TARGET,
    PeakSizes,
    PeakTransformer,
    SpectraBatch,
    example_batch,
    item_target,
    own_rows,
    padded_peaks,
    related_rows,
)
from pipeline.tasks.spectra.spectra_library import publish_library
from pipeline.tasks.spectra.spectra_measures import (
    FINGERPRINT_LOSSES,
    PREDICTION,
    answer_figures,
    bit_figures,
    error_figures,
    focal_error,
    found_error,
    neighbour_figures,
    squared_error,
    triplet_error,
)
from pipeline.tasks.task_parts import (
    WHERE,
    above_zero,
    at_least,
    at_least_single,
    labels_of,
    one_of,
    part_of,
    refuse,
    require,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor, nn

    from pipeline.protocol import Sizes
    from pipeline.records import Item
    from pipeline.training.items.batch import ItemTensors

NEGATIVE_MOLECULE = "negative_molecule"
LEAST = {"targets": 1, "max_peaks": 1, "top": 1, "classes": 0, "gamma": 0.0, "margin": 0.0}
CLASSES = 20_000  # of masses in the published outputs of pre-training


@dataclass(frozen=True)
class SpectraFinetune(PeakSizes):
    """The task: predict numbers, bits or an embedding of each spectrum."""

    classes: int = -1  # of masses in the outputs of pre-training; -1: 20,000 as published, else none
    measure: str = "cosine"  # of fingerprints: cosine, iou or bce
    max_peaks: int = 100  # of an item with more, the most intense ones are taken: attention goes by their square
    backbone_only: bool = False  # embeddings by the precursor's token as it is ("zero-shot"), without a layer after
    sigmoid: bool = False  # predict numbers from 0 to 1 of the span of `lowest` and `highest`
    lowest: tuple[float, ...] = ()  # of each target, in its unit: learned as 0
    highest: tuple[float, ...] = ()  # learned as 1
    names: tuple[str, ...] = ()  # of targets, in the names of metrics
    alpha: float | None = None  # weight of positives, that of negatives being 1 - alpha
    gamma: float = 0.0  # how much less good predictions weigh
    threshold: float = 0.5  # a probability above this is a yes, in metrics
    margin: float = 0.1  # of triplets: how much farther a negative must be than the positive
    library: str = ""  # embeddings of a library that predicted spectra are looked up in: train.predict.options
    top: int = 10  # matches of each

    def __post_init__(self) -> None:
        for name in ("lowest", "highest", "names"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.classes < 0:
            object.__setattr__(self, "classes", CLASSES if self.as_published else 0)
        at_least(self, LEAST)
        self.check_sizes()
        one_of(self, {"head": HEADS, "measure": tuple(FINGERPRINT_LOSSES)})
        require(self.alpha is None or 0 < self.alpha < 1, self, "alpha", "between 0 and 1")
        if self.summed and self.head != FINGERPRINT:
            problem = f"summed needs the fingerprint head, but head is {self.head}"
            refuse("summed", problem, f"--set {WHERE}.summed=false")
        for name in ("lowest", "highest", "names"):
            if (given := len(getattr(self, name))) not in (0, self.targets):
                problem = f"{name} has {given} entries, but there are {self.targets} targets"
                refuse(name, problem, f"give {self.targets} or none")
        spans = zip(self.lowest, self.highest, strict=False)
        if len(self.lowest) != len(self.highest) or not all(low < high for low, high in spans):
            refuse("highest", "every target needs a lowest and a highest value in this order")

    @property
    def sizes(self) -> PeakSizes:
        if self.head != EMBEDDING:
            return part_of(self, PeakSizes)
        depth = 0 if self.backbone_only else self.head_depth
        return replace(part_of(self, PeakSizes), targets=self.width, head_depth=depth)

    def model(self) -> nn.Module:
        return PeakTransformer(self.sizes)

    def files_read(self) -> Iterable[Path]:
        """Return the files whose content can change the task's results."""
        return [Path(self.library)] if self.library else []

    # ---- batches ----

    def cost(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """Return how many peaks are taken; as published, spectra are padded to the most."""
        largest = np.minimum(item[PEAKS], self.max_peaks)
        return {PEAKS: largest * 0 + self.max_peaks if self.as_published or self.head == EMBEDDING else largest}

    def collate(self, items: Sequence[ItemTensors], rng: np.random.Generator) -> SpectraBatch:  # noqa: ARG002 - the protocol has it
        spectra = [own_rows(item, self.max_peaks) for item in items]
        # a positive and a negative of each item, drawn each time; an item may lack either
        of_role = [[related_rows(item, role, self.max_peaks) for role in RELATED] for item in items]
        anchors = [at for at, pair in enumerate(of_role) if self.head == EMBEDDING and None not in pair]
        spectra += [rows for related in zip(*of_role, strict=True) for at in anchors if (rows := related[at])]
        target_BK = torch.stack([item_target(item, self.targets) for item in items])
        is_known_BK = ~target_BK.isnan()
        return SpectraBatch(
            peaks=padded_peaks(spectra, self.max_peaks + 1 if self.as_published else 0),
            anchor_T=torch.tensor(anchors, dtype=torch.long),
            target_BK=self._scaled(target_BK).nan_to_num(0.0),
            is_known_BK=is_known_BK,
            precursor_B=torch.stack([rows.mz_P[0] for rows in spectra[: len(items)]]),
            molecule_S=torch.stack([rows.molecule for rows in spectra]),
            known=self._known(is_known_BK, len(anchors)),
            is_labelled=tuple(is_known_BK.any(-1).tolist()),
            has_targets=any(TARGET in item.values for item in items),
        )

    def _known(self, is_known_BK: Tensor, triplets: int) -> float:
        """Return the weight of a batch: triplets, fingerprints, or numbers that are known."""
        if self.head == EMBEDDING:
            return float(triplets)
        return float((is_known_BK.any(-1) if self._counts_items else is_known_BK).sum())

    @property
    def _counts_items(self) -> bool:
        """Whether an item weighs 1, however many of its numbers are known."""
        return self.head == EMBEDDING or (self.head == FINGERPRINT and self.measure != "bce")

    def _scaled(self, target_BK: Tensor) -> Tensor:
        """Return targets as they are learned: 0 at the lowest, 1 at the highest."""
        lowest_K, highest_K = self._span(target_BK)
        return (target_BK - lowest_K) / (highest_K - lowest_K)

    def _in_units(self, scaled_BK: Tensor) -> Tensor:
        """Return scaled values in the units of the targets."""
        lowest_K, highest_K = self._span(scaled_BK)
        return scaled_BK * (highest_K - lowest_K) + lowest_K

    def _span(self, like: Tensor) -> tuple[Tensor, Tensor]:
        return like.new_tensor(self.lowest or 0.0), like.new_tensor(self.highest or 1.0)

    # ---- losses ----

    @property
    def term(self) -> str:
        """The name of the loss term."""
        return "triplet" if self.head == EMBEDDING else TARGET

    def loss(self, model: nn.Module, batch: SpectraBatch) -> dict[str, tuple[Tensor, float]]:
        """Return the sum of errors, and how many numbers, fingerprints or triplets are known."""
        if self.head == EMBEDDING:
            return {self.term: (triplet_error(*_triplets(model(batch.peaks), batch), self.margin), batch.known)}
        if not batch.has_targets:
            problem = "nothing to learn: no spectrum of a batch has a target"
            raise ConfigError(problem, where="data.options.target", remedy="set the target headers or columns")
        return {self.term: (self._error(model(batch.peaks), batch.target_BK, batch.is_known_BK), batch.known)}

    def _error(self, value_BK: Tensor, target_BK: Tensor, is_known_BK: Tensor) -> Tensor:
        if self.head == BINARY:
            return focal_error(value_BK, target_BK, is_known_BK, self.alpha, self.gamma)
        if self.head == FINGERPRINT:
            return FINGERPRINT_LOSSES[self.measure](value_BK, target_BK, is_known_BK)
        return squared_error(value_BK.sigmoid() if self.sigmoid else value_BK, target_BK, is_known_BK)

    def weights(self, batch: SpectraBatch) -> dict[str, float]:
        """Return how many numbers, fingerprints or triplets are known."""
        return {self.term: batch.known}

    # ---- outputs ----

    def outputs(self, model: nn.Module, batch: SpectraBatch) -> dict[str, Any]:
        """Return the prediction for each item and its target: NaN where unknown, of no size where nothing is known."""
        value_BK = model(batch.own)
        if self.head == EMBEDDING:
            return {EMBEDDING: value_BK, MOLECULE: batch.molecule_S[: len(value_BK)], PRECURSOR: batch.precursor_B}
        if self.head == BINARY or self.sigmoid or (self.head == FINGERPRINT and self.measure == "bce"):
            value_BK = value_BK.sigmoid()
        labels = labels_of(self._in_units(batch.target_BK), batch.is_known_BK, batch.is_labelled)
        return {PREDICTION: self._in_units(value_BK), TARGET: labels}

    def metrics(self, outputs: Mapping[str, Sequence[Any]]) -> dict[str, float]:
        """Return the metrics of a split: errors, answers, bits or neighbours; none if nothing is known."""
        if self.head == EMBEDDING:
            return neighbour_figures(outputs[EMBEDDING], outputs[MOLECULE], outputs[PRECURSOR])
        if self.head == FINGERPRINT:
            return bit_figures(outputs[PREDICTION], outputs[TARGET], self.threshold)
        names = self.names or tuple(str(place) for place in range(self.targets))
        if self.head == BINARY:
            return answer_figures(outputs[PREDICTION], outputs[TARGET], names, self.threshold)
        return error_figures(outputs[PREDICTION], outputs[TARGET], names)

    def publish(self, folder: Path, outputs: Mapping[str, Any], items: Iterable[Item], reading: Any) -> list[Path]:  # noqa: ARG002
        """Write the embeddings as a library, and the matches of each spectrum in the library that is named."""
        if self.head != EMBEDDING:
            return []
        return publish_library(folder, outputs, reading, self.library, self.top)

    def example(self, sizes: Sizes) -> SpectraBatch:
        known = float(sizes[ITEMS] * (1 if self._counts_items else self.targets))
        batch = example_batch(sizes, self.targets, masked=self.as_published, related=self.head == EMBEDDING)
        return batch._replace(known=known)


@dataclass(frozen=True)
class SpectraContrast(SpectraFinetune):
    """The task: each spectrum's positive must be found among all positives and negatives of a step (InfoNCE)."""

    head: str = EMBEDDING
    temperature: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        above_zero(self, ("temperature",))
        if self.head != EMBEDDING:
            problem = f"comparing embeddings needs the embedding head, but head is {self.head}"
            refuse("head", problem, f"--set {WHERE}.head={EMBEDDING}")

    @property
    def term(self) -> str:
        """The name of the loss term."""
        return "found"

    def embed(self, model: nn.Module, batch: SpectraBatch) -> dict[str, Tensor]:
        """Return the embeddings of each item, its positive and its negative; zeros where it lacks these."""
        embedded_SD = model(batch.peaks)
        items = len(batch.target_BK)
        rows = {"anchor": embedded_SD[:items]}
        for role, other_TD in zip(RELATED, _triplets(embedded_SD, batch)[1:], strict=True):
            rows[role] = embedded_SD.new_zeros(items, embedded_SD.shape[1]).index_copy(0, batch.anchor_T, other_TD)
        molecule_B, negative_T = batch.molecule_S[:items], batch.molecule_S[items + len(batch.anchor_T) :]
        negative_B = torch.zeros_like(molecule_B).index_copy(0, batch.anchor_T, negative_T)
        is_whole_B = torch.zeros_like(molecule_B).index_fill(0, batch.anchor_T, 1)
        return rows | {"is_whole": is_whole_B, MOLECULE: molecule_B, NEGATIVE_MOLECULE: negative_B}

    def contrast(self, model: nn.Module, embedded: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, float]]:  # noqa: ARG002
        """Return the cross entropies of finding the positives, over all items of a step that have one."""
        is_whole_B = embedded["is_whole"].bool()
        anchor_BD, near_BD, far_BD = (at_least_single(embedded[role])[is_whole_B] for role in ("anchor", *RELATED))
        own_B, other_B = (embedded[name][is_whole_B] for name in (MOLECULE, NEGATIVE_MOLECULE))
        error = found_error(anchor_BD, near_BD, far_BD, own_B, other_B, self.temperature)
        return {self.term: (error, float(is_whole_B.sum()))}

    def loss(self, model: nn.Module, batch: SpectraBatch) -> dict[str, tuple[Tensor, float]]:
        """Return the loss of a single batch: the step's loss where it is the only one."""
        return self.contrast(model, self.embed(model, batch))


def _triplets(embedded_SD: Tensor, batch: SpectraBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Return the embeddings of anchors, positives and negatives [T, D]."""
    items, triplets = len(batch.target_BK), len(batch.anchor_T)
    positive_TD, negative_TD = embedded_SD[items : items + triplets], embedded_SD[items + triplets :]
    return embedded_SD[batch.anchor_T], positive_TD, negative_TD
