"""The sequence of a peptide from its spectrum, by a small model that refines its own answer in rounds: pepTRM.

    train: {task: "pipeline.tasks.denovo_recursive:DenovoRecursive", batching: padded, ema: 0.999}

It reads arrays of spectra: `peaks.mz`, `peaks.intensity`, `precursor_mz`, `charge` and `peptide.residue`.
Three terms: the letters of every answer; the spectrum that the last answer would have against the observed one; and its
mass. Each is left out where its weight is 0. The reported terms have their weights in them. `as_published` is the
original with its oddities, which its weights need: 24 letters, no modifications, nothing that tells where a peptide
ends. A model that is trained here knows modified residues, and says an end.

Shapes: B items, P peaks, L places, V letters, T answers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from pipeline.protocol import ITEMS
from pipeline.readers.peptides import RESIDUES
from pipeline.tasks.peptides.found_peptides import (
    ALL,
    ANSWERS,
    CHARGE,
    CONFIDENCE,
    EOS,
    LABEL,
    LETTERS,
    MODIFIED,
    MZ,
    PAD,
    SOS,
    SPECIAL,
    UNK,
    PeptideChoice,
    Vocabulary,
)
from pipeline.tasks.peptides.peptide_losses import (
    ANSWER_WEIGHTS,
    DRAWN,
    PRECURSOR_LOSSES,
    SPECTRUM_LOSSES,
    Grid,
    SpectrumNoise,
    answer_weights,
    coverage_loss,
    drawn_loss,
    expected_peptide,
    fragments,
    letters_loss,
    mass_loss,
    published_peptide,
)
from pipeline.tasks.peptides.published_peptides import (
    field_metrics,
    judged,
    letter_metrics,
    letter_row,
    publish_peptides,
)
from pipeline.tasks.peptides.recursive_network import NetworkSizes, RecursiveNetwork, SpectrumInput
from pipeline.tasks.task_parts import (
    WHERE,
    above_zero,
    at_least,
    at_least_single,
    divided,
    dropout_of,
    highest,
    most_intense,
    one_of,
    padded_rows,
    refuse,
    require,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from pipeline.protocol import Sizes
    from pipeline.records import Item
    from pipeline.training.items.batch import ItemTensors

TERMS = (PEPTIDE, SPECTRUM, PRECURSOR) = ("peptide", "spectrum", "precursor")
RESIDUE = "peptide.residue"
PLAIN_C, CHANGED_C = RESIDUES.index("C"), RESIDUES.index("C[Carbamidomethyl]")
POSITIVE = (
    *("width", "heads", "encoder_layers", "decoder_layers", "latent_steps", "supervision_steps", "max_peaks"),
    *("longest", "fragment_charges"),
)
CHOICES = {"answer_weights": ANSWER_WEIGHTS, "spectrum_loss": SPECTRUM_LOSSES, "precursor_loss": PRECURSOR_LOSSES}
NARROWEST = 34  # the waves of masses need two numbers in addition to the 32 of intensities


class DenovoBatch(NamedTuple):
    """Some items' spectra and peptides, padded."""

    spectra: SpectrumInput
    mass_B: Tensor  # of the whole peptide; 0 where the precursor is not known
    letter_BL: Tensor  # an end behind the last one, where letters have ends; then nothing
    residues_B: Tensor  # how many letters, without the end; 0 where there is no peptide
    has_terminal_B: Tensor  # whether the first is a change of the N-terminus
    known: tuple[float, ...]  # letters (ends among them), spectra to compare, masses to compare

    @property
    def has_ions(self) -> Tensor:
        """Which items have a spectrum to compare with that of their peptide [B]."""
        return (self.residues_B > 1) & self.spectra.is_peak_BP.any(1)

    @property
    def has_mass(self) -> Tensor:
        """Which items have a mass to compare with that of their peptide [B]."""
        return (self.residues_B > 0) & (self.mass_B > 0)


@dataclass(frozen=True)
class DenovoRecursive(SpectrumNoise, NetworkSizes):
    """Peptides from spectra, by a recursive model with deep supervision."""

    as_published: bool = False  # like pepTRM, with its mistakes: published weights need this
    modifications: tuple[str, ...] = MODIFIED  # letters for modified residues, in a model that is trained here
    carbamidomethyl: bool = False  # whether each C of the data has this modification, unmarked
    max_peaks: int = 100  # the highest of a spectrum are read
    answer_weights: str = "linear"  # of the letters of each answer; or uniform, exponential
    smoothing: float = 0.1  # of letters
    spectrum_loss: str = "coverage"  # of peaks by ions; or drawn, the cosine of spectra drawn on a grid
    spectrum_weight: float = 0.25  # 0: there is none
    precursor_loss: str = "smooth"  # in residues; or absolute
    precursor_weight: float = 0.08  # 0: there is none
    fragment_charges: int = 2  # b and y ions of charges up to this
    bin_size: float = 0.1  # of the grid that spectra are drawn on, in m/z
    max_mz: float = 2000.0  # where the grid ends
    sigma: float = 0.05  # of a drawn peak, in m/z
    render_reach: float = 8.0  # sigmas at which a drawn peak ends; 0: each is drawn at every bin
    tolerance_ppm: float = 0.0  # peptides of the precursor's mass are searched; 0: the likeliest letters are taken
    mass_weight: float = 0.5  # of agreement in mass where one of both is chosen

    def __post_init__(self) -> None:
        object.__setattr__(self, "modifications", tuple(self.modifications))
        numbers = {option.name: 0 for option in fields(self) if type(getattr(self, option.name)) in (int, float)}
        at_least(self, numbers | dict.fromkeys(POSITIVE, 1) | {"width": NARROWEST})
        above_zero(self, ("bin_size", "max_mz", "sigma"))
        dropout_of(self)
        one_of(self, CHOICES)
        for name in ("smoothing", "peak_dropout", "clean_share", "mass_weight"):
            require(getattr(self, name) <= 1, self, name, "from 0 to 1")
        divided(self.width, self.heads)
        if unknown := [name for name in self.modifications if name not in MODIFIED]:
            problem = f"{unknown[0]!r} is not a known modification; known: {', '.join(MODIFIED)}"
            refuse("modifications", problem, "choose from these")
        if self.carbamidomethyl and (self.as_published or RESIDUES[CHANGED_C] not in self.modifications):
            problem = f"carbamidomethyl is set, but {RESIDUES[CHANGED_C]} is not in the model's alphabet"
            refuse("carbamidomethyl", problem, f"--set {WHERE}.carbamidomethyl=false")

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.modifications, self.as_published)

    @property
    def choice(self) -> PeptideChoice:
        return PeptideChoice(self.vocabulary, self.tolerance_ppm, self.mass_weight)

    @property
    def grid(self) -> Grid:
        """The bins that spectra are drawn on; as published the last one lies at the end."""
        count = max(2, round(self.max_mz / self.bin_size))
        bin_size = self.max_mz / (count - 1) if self.as_published else self.bin_size
        return Grid(bin_size, bin_size * count, self.sigma, self.render_reach)

    def model(self) -> nn.Module:
        return RecursiveNetwork(self, len(self.vocabulary.names), as_published=self.as_published)

    def cost(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sizes of an item; every answer has all its places, so that peaks alone take memory."""
        peaks = np.minimum(item["peaks"] + self.noise_peaks, self.max_peaks)
        return {"peaks": peaks, "residues": item.get("peptide", 0 * peaks)}  # without peptides: spectra to predict

    def collate(self, items: Sequence[ItemTensors], rng: np.random.Generator) -> DenovoBatch:  # noqa: ARG002 - items have their own
        peaks = [self._peaks(item) for item in items]
        letters = [self._letters(item) for item in items]
        letter_BL = torch.full((len(items), self.longest), PAD)
        for row_L, letter_R in zip(letter_BL, letters, strict=True):
            row_L[: len(letter_R)] = torch.from_numpy(letter_R)
            if len(letter_R) and not self.as_published:
                row_L[len(letter_R) : len(letter_R) + 1] = EOS  # none where there is no place left
        precursors = [self._precursor(item) for item in items]
        mz_B = torch.tensor([mz for mz, _ in precursors], dtype=torch.float64)
        charge_B = torch.tensor([charge for _, charge in precursors])
        mass_B = charge_B * (mz_B - self.vocabulary.proton) * (mz_B > 0)
        peaks_B = torch.tensor([len(mz_P) for mz_P, _ in peaks])
        mz_BP, intensity_BP = (padded_rows(rows)[0] for rows in zip(*peaks, strict=True))
        is_peak_BP = torch.arange(mz_BP.shape[1]) < peaks_B.unsqueeze(1)
        spectra = SpectrumInput(mz_BP, intensity_BP, is_peak_BP, mz_B.float(), charge_B)
        residues_B = torch.tensor([len(letter_R) for letter_R in letters])
        has_terminal_B = torch.from_numpy(self.vocabulary.is_terminal_V)[letter_BL[:, 0]]
        batch = DenovoBatch(spectra, mass_B.float(), letter_BL, residues_B, has_terminal_B, known=())
        known = (letter_BL != PAD, batch.has_ions, batch.has_mass)
        return batch._replace(known=tuple(float(is_known.sum()) for is_known in known))

    def _peaks(self, item: ItemTensors) -> tuple[Tensor, Tensor]:
        """Return the most intense peaks of a spectrum in their order, scaled so that the highest has intensity 1."""
        noised = self.with_noise(*most_intense(item, self.max_peaks), item.rng)
        mz_P, intensity_P = highest(*noised, self.max_peaks)
        return mz_P, intensity_P / intensity_P.max() if len(mz_P) else intensity_P

    def _letters(self, item: ItemTensors) -> Any:
        """Return the letters of an item's peptide; none if it is unknown."""
        code_R = item.values.get(RESIDUE, torch.zeros(0)).long().numpy()
        if self.carbamidomethyl:
            code_R = np.where(code_R == PLAIN_C, CHANGED_C, code_R)
        try:
            letter_R = self.vocabulary.letters(code_R)
        except ValueError as error:
            problem = f"the peptide of {item.id} has {error}, which is not in the model's alphabet"
            refuse("modifications", problem, "add it to train.options.modifications")
        if len(letter_R) > self.longest:
            problem = f"the peptide of {item.id} has {len(letter_R)} residues, but longest is {self.longest}"
            refuse("longest", problem, f"--set {WHERE}.longest={len(letter_R)}")
        return letter_R

    def _precursor(self, item: ItemTensors) -> tuple[float, int]:
        """Return m/z and charge of an item's precursor, 0 where they are not known."""
        mz = float(item.values.get("precursor_mz", math.nan))
        return mz if math.isfinite(mz) else 0.0, max(int(item.values.get("charge", 0)), 0)

    def loss(self, model: nn.Module, batch: DenovoBatch) -> dict[str, tuple[Tensor, float]]:
        """Return the loss of each term that has a weight, and how much is known for it."""
        logits_TBLV = model(batch.spectra)
        with torch.autocast(logits_TBLV.device.type, enabled=False):
            logits_TBLV = at_least_single(logits_TBLV)
            weights = answer_weights(self.answer_weights, len(logits_TBLV))
            losses = {PEPTIDE: letters_loss(logits_TBLV, batch.letter_BL, weights, self.smoothing)}
            if self.spectrum_weight:
                losses[SPECTRUM] = self.spectrum_weight * self._spectra(logits_TBLV[-1], batch)
            if self.precursor_weight:
                losses[PRECURSOR] = self.precursor_weight * self._masses(logits_TBLV[-1], batch)
        return {name: (total, self.weights(batch)[name]) for name, total in losses.items()}

    def weights(self, batch: DenovoBatch) -> dict[str, float]:
        """Return how many letters, spectra and masses are known."""
        terms = zip(TERMS, batch.known, (1.0, self.spectrum_weight, self.precursor_weight), strict=True)
        return {name: known for name, known, term_weight in terms if term_weight}

    def _masses_V(self, like: Tensor) -> Tensor:
        return torch.from_numpy(self.vocabulary.masses_V).to(like)

    def _spectra(self, logits_BLV: Tensor, batch: DenovoBatch) -> Tensor:
        """Return the sum of how unlike expected and observed spectra are."""
        residues_B = batch.residues_B
        if self.as_published and self.spectrum_loss == DRAWN:  # places behind the end weigh something, too
            residues_B = torch.full_like(residues_B, self.longest)
        expected = expected_peptide(logits_BLV, self._masses_V(logits_BLV), residues_B, batch.has_terminal_B)
        expected = published_peptide(expected) if self.as_published else expected
        ions = fragments(expected, self.fragment_charges, self.vocabulary)
        is_drawn = self.spectrum_loss == DRAWN
        unlike_B = drawn_loss(ions, batch.spectra, self.grid) if is_drawn else coverage_loss(ions, batch.spectra)
        return (unlike_B * batch.has_ions).sum()

    def _masses(self, logits_BLV: Tensor, batch: DenovoBatch) -> Tensor:
        """Return the sum of how far expected masses are from the precursors'."""
        expected = expected_peptide(logits_BLV, self._masses_V(logits_BLV), batch.residues_B, batch.has_terminal_B)
        return (mass_loss(expected, batch.mass_B, self.precursor_loss, self.vocabulary) * batch.has_mass).sum()

    def outputs(self, model: nn.Module, batch: DenovoBatch) -> dict[str, list[Tensor]]:
        """Return the letters of every answer, each letter's probability in the last one, and the true letters.

        Numbers to sort by are the peptide's length, the mean probability of its residues and the error of its mass.
        """
        logits_TBLV = self._sayable(at_least_single(model(batch.spectra)))
        answer_TBL, log_BLV = logits_TBLV.argmax(-1), logits_TBLV[-1].log_softmax(-1)
        letter_BL, sure_BL = answer_TBL[-1], log_BLV.exp().amax(-1)
        is_there_BL = ((letter_BL == EOS).cumsum(1) == 0) & (letter_BL >= len(SPECIAL))
        length_B, charge_B = is_there_BL.sum(1), batch.spectra.charge_B
        own_B = (self._masses_V(log_BLV)[letter_BL] * is_there_BL).sum(1) + self.vocabulary.water
        found = {
            "length": length_B,
            "score": (sure_BL * is_there_BL).sum(1) / length_B.clamp(min=1),
            "error_ppm": torch.where(batch.mass_B > 0, (own_B / batch.mass_B - 1) * 1e6, math.nan),
            MZ: torch.where(batch.mass_B > 0, batch.spectra.precursor_mz_B, math.nan),
            CHARGE: charge_B,
            LETTERS: letter_BL.to(torch.int8),
            CONFIDENCE: sure_BL,
            LABEL: batch.letter_BL.to(torch.int8),
            ANSWERS: answer_TBL.transpose(0, 1).to(torch.int8),
        }
        if self.tolerance_ppm:
            found[ALL] = log_BLV.to(torch.float16)
        return {name: list(values) for name, values in found.items()}

    def _sayable(self, logits_TBLV: Tensor) -> Tensor:
        """Return logits of the letters that are allowed at a place; as published all are."""
        if self.as_published:
            return logits_TBLV
        never_LV = np.zeros((self.longest, len(self.vocabulary.names)), np.bool_)
        never_LV[:, [PAD, SOS, UNK]] = True
        never_LV[1:, self.vocabulary.is_terminal_V] = True
        return logits_TBLV.masked_fill(torch.from_numpy(never_LV).to(logits_TBLV.device), -math.inf)

    def metrics(self, outputs: Mapping[str, Sequence[Any]]) -> dict[str, float]:
        """Return the metrics of a split, over the items whose peptides are known: the field's, and pepTRM's own."""
        judgements, rows = [], []
        for place, answer in enumerate(self.choice.answers(outputs)):
            if len(answer.true_R):
                judgements.append(judged(answer, self.vocabulary))
                mass = answer.charge * (answer.mz - self.vocabulary.proton)
                labels = np.asarray(outputs[LABEL][place])
                rows.append(letter_row(np.asarray(outputs[ANSWERS][place]), labels, mass))
        if not rows:
            return {}
        return field_metrics(judgements) | letter_metrics(rows, self.vocabulary)

    def publish(self, folder: Path, outputs: Mapping[str, Any], items: Iterable[Item], reading: Any) -> list[Path]:  # noqa: ARG002 - the protocol has it
        """Write the peptides as a table and as mzTab, and how many are right as a picture."""
        return publish_peptides(folder, outputs, self.choice, reading)

    def example(self, sizes: Sizes) -> DenovoBatch:
        """Return a batch of these sizes, every item as large as the largest."""
        items, peaks, residues = sizes[ITEMS], sizes["peaks"], min(sizes["residues"], self.longest)
        letter_BL = torch.full((items, self.longest), PAD)
        letter_BL[:, :residues] = len(SPECIAL)
        letter_BL[:, residues : residues + 1] = EOS if residues and not self.as_published else PAD
        spectra = SpectrumInput(
            mz_BP=self.max_mz * torch.rand(items, peaks),
            intensity_BP=torch.rand(items, peaks),
            is_peak_BP=torch.ones(items, peaks, dtype=torch.bool),
            precursor_mz_B=55.0 * residues + torch.rand(items),
            charge_B=torch.full((items,), 2),
        )
        mass_B = 110.0 * residues + torch.rand(items)
        known = (float(items * (residues + 1)), float(items), float(items))
        no_terminal_B = torch.zeros(items, dtype=torch.bool)
        return DenovoBatch(spectra, mass_B, letter_BL, torch.full((items,), residues), no_terminal_B, known)
