"""The sequence of a peptide from its spectrum, by a small model that goes over its own answer again and again.

    train: {task: "pipeline.tasks.denovo_recursive:DenovoRecursive", batching: padded, ema: 0.999}

It reads what a spectra reader gives: `peaks.mz`, `peaks.intensity`, `precursor_mz`, `charge` and `peptide.residue`.
Items are padded to the one with most peaks and the longest peptide of their batch; nothing that is padded has any
weight. Three terms: the letters of every supervision step; the spectrum that the last answer would have, drawn and
compared with the one observed; and its mass. Each is left out where its weight is 0. The reported terms have their
weights in them.

Shapes: B items, P peaks, R residues of the longest peptide, L places (R and the end), F fragments, T supervision steps,
V letters and the end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from pipeline.errors import ConfigError
from pipeline.protocol import ITEMS
from pipeline.readers import peptides
from pipeline.tasks.denovo_model import (
    END,
    MOST_CHARGE,
    DenovoBatch,
    DenovoNetwork,
    DenovoSizes,
    DrawnPeaks,
    Grid,
    similarity,
)
from pipeline.tasks.task_parts import WHERE, above_zero, at_least, at_least_single, most_intense, padded_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor, nn

    from pipeline.protocol import Sizes
    from pipeline.training.items.batch import ItemTensors

TERMS = (PEPTIDE, SPECTRUM, PRECURSOR) = ("peptide", "spectrum", "precursor")
RESIDUE = "peptide.residue"
NOTHING = -1  # the code of no residue: behind the end of a peptide
SAME_MASS, SAME_PREFIX = 0.1, 0.5  # Da: of a residue, and of all before it, to count as found
POSITIVE = (
    "width", "heads", "encoder_layers", "decoder_layers", "latent_steps", "supervision_steps", "max_peaks", "longest",
)  # fmt: skip


@dataclass(frozen=True)
class DenovoRecursive(DenovoSizes):
    """Peptides from spectra, by a recursive model with deep supervision."""

    max_peaks: int = 100  # the highest of a spectrum are read
    carbamidomethyl: bool = False  # whether every C is modified so
    spectrum_weight: float = 1.0  # of the drawn spectrum's loss; 0: it is not drawn
    precursor_weight: float = 0.1  # of the mass's loss; 0: there is none
    bin_size: float = 0.1  # of the grid that spectra are drawn on, in m/z
    max_mz: float = 2000.0  # where the grid ends
    sigma: float = 0.05  # of a drawn peak, in m/z
    render_reach: float = 8.0  # sigmas at which a drawn peak ends; 0: each is drawn at every bin
    render_chunk: int = 0  # with render_reach 0: bins at a time, drawn again in backward; 0: all at once

    def __post_init__(self) -> None:
        at_least(self, {option.name: 0 for option in fields(self)} | dict.fromkeys(POSITIVE, 1))
        above_zero(self, ("bin_size", "max_mz", "sigma"))
        if self.render_chunk and self.render_reach:
            reach = self.render_reach
            problem = f"render_chunk is {self.render_chunk}: it does nothing where peaks end at {reach} sigmas"
            raise ConfigError(problem, where=f"{WHERE}.render_chunk", remedy=f"--set {WHERE}.render_reach=0")
        if self.width % self.heads:
            problem = f"a width of {self.width} cannot be divided among {self.heads} heads"
            remedy = f"--set {WHERE}.width={self.heads * max(1, self.width // self.heads)}"
            raise ConfigError(problem, where=f"{WHERE}.width", remedy=remedy)

    def model(self) -> nn.Module:
        return DenovoNetwork(self)

    def cost(self, item: Mapping[str, Any]) -> dict[str, Any]:
        peaks = np.minimum(item["peaks"], self.max_peaks)
        return {"peaks": peaks, "residues": item.get("peptide", 0 * peaks)}  # without peptides: spectra to predict

    def collate(self, items: Sequence[ItemTensors], rng: np.random.Generator) -> DenovoBatch:  # noqa: ARG002 - the protocol has it
        spectra = [self._highest(item) for item in items]
        codes = [self._codes(item) for item in items]
        peaks_B, residues_B = [len(mz_P) for mz_P, _ in spectra], list(map(len, codes))
        masses = [_precursor(item) for item in items]
        residue_BL = torch.full((len(items), max(residues_B) + 1), NOTHING)
        for row_L, code_R in zip(residue_BL, codes, strict=True):
            row_L[: len(code_R)] = code_R
            row_L[len(code_R)] = END if len(code_R) else NOTHING
        return DenovoBatch(
            mz_BP=padded_rows([mz_P for mz_P, _ in spectra])[0],
            intensity_BP=padded_rows([intensity_P for _, intensity_P in spectra])[0],
            is_peak_BP=torch.arange(max(peaks_B)) < torch.tensor(peaks_B).unsqueeze(1),
            mass_B=torch.tensor([mass for mass, _ in masses]),
            charge_B=torch.tensor([charge for _, charge in masses]),
            residue_BL=residue_BL,
            residues_B=torch.tensor(residues_B),
            known=(
                float(sum(count + 1 for count in residues_B if count)),
                float(sum(count > 1 and peaks > 0 for count, peaks in zip(residues_B, peaks_B, strict=True))),
                float(sum(count > 0 and mass > 0 for count, (mass, _) in zip(residues_B, masses, strict=True))),
            ),
        )

    def _highest(self, item: ItemTensors) -> tuple[Tensor, Tensor]:
        """Return the most intense peaks of a spectrum in their order, scaled so that the highest has intensity 1."""
        mz_P, intensity_P = most_intense(item, self.max_peaks)
        return mz_P, intensity_P / intensity_P.max() if len(mz_P) else intensity_P

    def _codes(self, item: ItemTensors) -> Tensor:
        """Return the residue codes of an item's peptide; none if it is unknown."""
        residue_R = item.values.get(RESIDUE, torch.zeros(0)).long()
        if len(residue_R) > self.longest:
            problem = f"the peptide of {item.id} has {len(residue_R)} residues, and longest is {self.longest}"
            raise ConfigError(problem, where=f"{WHERE}.longest", remedy=f"--set {WHERE}.longest={len(residue_R)}")
        return residue_R

    def loss(self, model: nn.Module, batch: DenovoBatch) -> dict[str, tuple[Tensor, float]]:
        """Return the loss of each term that has a weight, and how much is known for it."""
        logits_TBLV = model(batch, batch.residue_BL.shape[1])
        with torch.autocast(logits_TBLV.device.type, enabled=False):
            logits_TBLV = at_least_single(logits_TBLV)
            losses = {PEPTIDE: _letters(logits_TBLV, batch.residue_BL)}
            mass_BR = self._masses(logits_TBLV[-1], batch.residues_B)
            if self.spectrum_weight:
                losses[SPECTRUM] = self.spectrum_weight * self._spectra(mass_BR, batch)
            if self.precursor_weight:
                losses[PRECURSOR] = self.precursor_weight * _off(mass_BR, batch)
        return {name: (total, self.weights(batch)[name]) for name, total in losses.items()}

    def weights(self, batch: DenovoBatch) -> dict[str, float]:
        """Return how many letters, spectra and masses are known."""
        term_weights = (1.0, self.spectrum_weight, self.precursor_weight)
        terms = zip(TERMS, batch.known, term_weights, strict=True)
        return {name: known for name, known, term_weight in terms if term_weight}

    def _masses(self, logits_BLV: Tensor, residues_B: Tensor) -> Tensor:
        """Return the expected mass of each residue [B, R] under the predicted probabilities; 0 behind the last."""
        each_V = torch.from_numpy(peptides.masses(carbamidomethyl=self.carbamidomethyl)).to(logits_BLV)
        mass_BR = logits_BLV[:, :-1, :END].softmax(-1) @ each_V
        return mass_BR * (torch.arange(mass_BR.shape[1], device=mass_BR.device) < residues_B.unsqueeze(1))

    def _spectra(self, mass_BR: Tensor, batch: DenovoBatch) -> Tensor:
        """Return the sum of 1 - cosine between expected and observed spectra."""
        grid = Grid(self.bin_size, self.max_mz, self.sigma, self.render_reach, self.render_chunk)
        observed = DrawnPeaks(batch.mz_BP, batch.intensity_BP)
        alike_B = similarity(fragments(mass_BR, batch.residues_B), observed, grid)
        is_known_B = (batch.residues_B > 1) & batch.is_peak_BP.any(1)
        return ((1 - alike_B) * is_known_B).sum()

    def outputs(self, model: nn.Module, batch: DenovoBatch) -> dict[str, list[Tensor]]:
        """Return each item's predicted peptide, each residue's probability, and the true peptide, filled up with -1.

        The model finds the end by itself: it answers at as many places as a peptide may have. Numbers to sort by are
        the peptide's length and the mean probability of its residues.
        """
        logits_BLV = at_least_single(model(batch, self.longest + 1)[-1])
        sure_BL, letter_BL = logits_BLV.softmax(-1).max(-1)
        is_there_BL = (letter_BL == END).cumsum(1) == 0
        residue_BL = torch.where(is_there_BL, letter_BL, NOTHING).to(torch.int8)
        true_BL = batch.residue_BL.where(batch.residue_BL != END, NOTHING).to(torch.int8)
        length_B = is_there_BL[:, : self.longest].sum(1)
        score_B = (sure_BL * is_there_BL)[:, : self.longest].sum(1) / length_B.clamp(min=1)
        return {
            "length": list(length_B),
            "score": list(score_B),
            "residue": list(residue_BL[:, : self.longest]),
            "confidence": list((sure_BL * is_there_BL)[:, : self.longest]),
            "residue_label": list(true_BL),
        }

    def metrics(self, outputs: Mapping[str, Sequence[Any]]) -> dict[str, float]:
        """Return the metrics of a split, over the items whose peptides are known.

        A residue is found where one of its mass (to 0.1 Da, so that I is L) comes after a prefix of its prefix's mass
        (to 0.5 Da). Precision and recall are shares of all residues; a peptide is right if all of it is found.
        """
        mass_V = peptides.masses(carbamidomethyl=self.carbamidomethyl)
        found = predicted = true = right = items = 0
        for residue, label in zip(outputs["residue"], outputs["residue_label"], strict=True):
            predicted_R, true_R = (np.asarray(codes)[np.asarray(codes) != NOTHING] for codes in (residue, label))
            if len(true_R):
                here = _found(mass_V[predicted_R], mass_V[true_R])
                found, predicted, true = found + here, predicted + len(predicted_R), true + len(true_R)
                right, items = right + (here == len(true_R) == len(predicted_R)), items + 1
        if not items:
            return {}
        return {
            "residue_precision": found / max(predicted, 1),
            "residue_recall": found / true,
            "peptide_accuracy": right / items,
        }

    def example(self, sizes: Sizes) -> DenovoBatch:
        """Return a batch of these sizes, every item as large as the largest."""
        items, peaks, residues = (sizes[name] for name in (ITEMS, "peaks", "residues"))
        residue_BL = torch.randint(END, (items, residues + 1))
        residue_BL[:, residues] = END if residues else NOTHING
        return DenovoBatch(
            mz_BP=self.max_mz * torch.rand(items, peaks),
            intensity_BP=torch.rand(items, peaks),
            is_peak_BP=torch.ones(items, peaks, dtype=torch.bool),
            mass_B=110.0 * residues + torch.rand(items),
            charge_B=torch.full((items,), 2),
            residue_BL=residue_BL,
            residues_B=torch.full((items,), residues),
            known=(float(items * (residues + 1)), float(items), float(items)),
        )


def fragments(mass_BR: Tensor, residues_B: Tensor) -> DrawnPeaks:
    """Return the b ions, then the y ions of peptides whose residues have these masses, each with one charge."""
    prefix_BF = mass_BR.cumsum(1)[:, :-1]
    suffix_BF = mass_BR.sum(1, keepdim=True) - prefix_BF
    places_F = torch.arange(prefix_BF.shape[1], device=mass_BR.device)
    is_there_BF = (places_F < residues_B.unsqueeze(1) - 1).to(mass_BR.dtype)
    mz_BF = torch.cat([prefix_BF, suffix_BF + peptides.WATER], 1) + peptides.PROTON
    return DrawnPeaks(mz_BF, torch.cat([is_there_BF, is_there_BF], 1))


def _precursor(item: ItemTensors) -> tuple[float, int]:
    """Return the mass of an item's peptide, 0 where it is not known, and its charge."""
    mz = float(item.values.get("precursor_mz", math.nan))
    charge = int(item.values.get("charge", 0))
    known = math.isfinite(mz) and charge > 0
    return charge * (mz - peptides.PROTON) if known else 0.0, min(max(charge, 0), MOST_CHARGE)


def _letters(logits_TBLV: Tensor, residue_BL: Tensor) -> Tensor:
    """Return the cross entropy of letters and ends, the mean over supervision steps."""
    target_TBL = residue_BL.expand(logits_TBLV.shape[:-1])
    total = functional.cross_entropy(
        logits_TBLV.flatten(0, 2), target_TBL.flatten(), ignore_index=NOTHING, reduction="sum"
    )
    return total / len(logits_TBLV)


def _off(mass_BR: Tensor, batch: DenovoBatch) -> Tensor:
    """Return the sum of log(1 + difference in Da) between expected masses and the precursors'."""
    off_B = (mass_BR.sum(1) + peptides.WATER - batch.mass_B).abs()
    return (off_B.log1p() * ((batch.mass_B > 0) & (batch.residues_B > 0))).sum()


def _found(predicted_R: NDArray[np.float64], true_R: NDArray[np.float64]) -> int:
    """Count the true residues that were predicted, by their masses and those of all before them."""
    before_predicted_R, before_true_R = (mass_R.cumsum() - mass_R for mass_R in (predicted_R, true_R))
    is_same = np.abs(predicted_R[:, None] - true_R) < SAME_MASS
    is_found = is_same & (np.abs(before_predicted_R[:, None] - before_true_R) < SAME_PREFIX)
    return int(is_found.any(0).sum())
