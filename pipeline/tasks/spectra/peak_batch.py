"""Spectra of items as a batch of padded peaks, with what is known of their molecules.

Shapes: B items, T triplets, S = B + 2 T spectra, P peaks of one, L places of the largest, K targets.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from pipeline.tasks.spectra.peak_transformer import HEAVIEST, Peaks
from pipeline.tasks.task_parts import WHERE, highest, most_intense, padded_rows, refuse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from pipeline.training.items.batch import ItemTensors

PEAKS, PRECURSOR, TARGET, MOLECULE = "peaks", "precursor_mz", "target", "molecule"
RELATED = ("positive", "negative")
OF_PRECURSOR = 1.1  # its intensity, which no peak has


class SpectraBatch(NamedTuple):
    """A batch of spectra, those of its items first, and then those that they are compared with."""

    peaks: Peaks  # [S, L]: of items, then a positive of each triplet, then a negative of each
    anchor_T: Tensor  # the items that have both
    target_BK: Tensor  # 0 where it is not known
    is_known_BK: Tensor
    precursor_B: Tensor
    molecule_S: Tensor  # a number for each molecule; 0: not known
    known: float
    is_labelled: tuple[bool, ...]  # of each item: whether any target is known
    has_targets: bool = True  # whether the reader gave any, known or not

    @property
    def own(self) -> Peaks:
        """The spectra of items alone."""
        items = len(self.target_BK)
        mz_BL, intensity_BL, real_BL = self.peaks
        return Peaks(mz_BL[:items], intensity_BL[:items], None if real_BL is None else real_BL[:items])


class SpectrumRows(NamedTuple):
    """The precursor and the peaks of one spectrum."""

    mz_P: Tensor
    intensity_P: Tensor
    molecule: Tensor  # 0: not known


def own_rows(item: ItemTensors, most: int) -> SpectrumRows:
    """Return the precursor and the most intense peaks of an item's spectrum."""
    mz_P, intensity_P = most_intense(item, most)
    precursor = item.values.get(PRECURSOR, mz_P.new_zeros(())).reshape(1).to(mz_P.dtype).nan_to_num(0.0)
    molecule_1 = item.values.get(MOLECULE, torch.zeros(1)).reshape(1).long()
    return _with_precursor(precursor, mz_P, intensity_P, molecule_1[0])


def related_rows(item: ItemTensors, role: str, most: int) -> SpectrumRows | None:
    """Return one of the spectra that an item's is compared with, drawn by the item; None if it has none."""
    values, axis = item.values, f"{role}s.{PRECURSOR}"
    if axis not in values or not (count := len(values[axis])):
        return None
    drawn = int(item.rng.integers(count))
    is_drawn_P = values[f"{role}.spectrum"] == drawn
    mz_P, intensity_P = (values[f"{role}.{name}"][is_drawn_P].float() for name in ("mz", "intensity"))
    molecule_C = values.get(f"{role}s.{MOLECULE}", torch.zeros(count, dtype=torch.long))
    precursor_1 = values[axis][drawn : drawn + 1].float()
    return _with_precursor(precursor_1, *highest(mz_P, intensity_P, most), molecule_C[drawn])


def _with_precursor(precursor_1: Tensor, mz_P: Tensor, intensity_P: Tensor, molecule: Tensor) -> SpectrumRows:
    intensity_P = torch.cat([intensity_P.new_tensor([OF_PRECURSOR]), intensity_P])
    return SpectrumRows(torch.cat([precursor_1, mz_P]), intensity_P, molecule)


def padded_peaks(spectra: Sequence[SpectrumRows], length: int = 0) -> Peaks:
    """Pad spectra with zeros, to `length` places where it is given: then all batches have a mask."""
    mz_BL, real_BL = padded_rows([rows.mz_P for rows in spectra])
    intensity_BL, _ = padded_rows([rows.intensity_P for rows in spectra])
    if not length:
        return Peaks(mz_BL, intensity_BL, real_BL)
    whole = torch.ones_like(mz_BL, dtype=torch.bool) if real_BL is None else real_BL
    left = (0, length - mz_BL.shape[1])
    return Peaks(*(torch.nn.functional.pad(rows, left) for rows in (mz_BL, intensity_BL, whole)))


def item_target(item: ItemTensors, targets: int) -> Tensor:
    """Return the target of an item [K], NaN where unknown; raise where its size is not as configured."""
    if TARGET not in item.values:
        return torch.full((targets,), math.nan)
    target_K = item.values[TARGET].reshape(-1)
    if len(target_K) != targets:
        sizes = f"{targets} numbers a spectrum, but {item.id} has a target of {len(target_K)}"
        refuse("targets", f"the task expects {sizes}", f"--set {WHERE}.targets={len(target_K)}")
    return target_K.float()


def example_batch(sizes: Mapping[str, int], targets: int, *, masked: bool, related: bool) -> SpectraBatch:
    """Return a batch of so many items and places; with `related`, each has a positive and a negative."""
    items, length = sizes["items"], sizes[PEAKS] + 1
    spectra = 3 * items if related else items
    real_BL = torch.ones(spectra, length, dtype=torch.bool) if masked or spectra > 1 else None
    return SpectraBatch(
        peaks=Peaks(HEAVIEST * torch.rand(spectra, length), torch.rand(spectra, length), real_BL),
        anchor_T=torch.arange(items if related else 0),
        target_BK=torch.rand(items, targets).round(),
        is_known_BK=torch.ones(items, targets, dtype=torch.bool),
        precursor_B=HEAVIEST * torch.rand(items),
        molecule_S=torch.arange(spectra),
        known=float(items),
        is_labelled=(True,) * items,
    )
