"""Spectra drawn on a grid, each peak a Gaussian, and how alike two of them are.

Drawn as it is written down, every peak at every bin is a table (batch, peaks, bins): 223 MB for 48 items of 58 peaks
and 20,000 bins, and several such tables are alive at once. There are three ways to the same numbers and gradients:

- near bins only: a Gaussian is 0 beyond some sigmas (10⁻¹⁴ of its height at 8), so that a peak has 9 bins, not 20,000;
- all bins, some at a time: each chunk is computed again in backward, and only sums over its bins are kept;
- all bins at once.

Shapes: B items, P peaks, G bins of the grid, W bins near a peak.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pipeline.readers.peptides import LETTERS

if TYPE_CHECKING:
    from torch import Tensor

    Memory: TypeAlias = "tuple[Tensor, Tensor]"  # keys and values of what is attended to

NOTHING = 1e-12  # an empty spectrum is like no other, and nothing is divided by 0


class DrawnPeaks(NamedTuple):
    """The peaks of spectra; where there is none, its height is 0."""

    mz_BP: Tensor
    height_BP: Tensor


@dataclass(frozen=True, slots=True)
class Grid:
    """The m/z bins that spectra are drawn on, and the width of the drawn peaks."""

    bin_size: float
    max_mz: float
    sigma: float  # of every peak
    reach: float = 0.0  # sigmas at which a Gaussian ends; 0: it reaches every bin
    chunk: int = 0  # bins at a time, where every peak reaches all of them; 0: all at once

    @property
    def bins(self) -> int:
        return max(1, round(self.max_mz / self.bin_size))


def similarity(predicted: DrawnPeaks, observed: DrawnPeaks, grid: Grid) -> Tensor:
    """Return the cosine between two spectra of each item [B]: 1 where they are alike, 0 where one is empty."""
    if grid.reach:
        products_3B = _products(_near(predicted, grid), _near(observed, grid))
    elif grid.chunk:
        products_3B = _chunked(predicted, observed, grid)
    else:
        products_3B = _between(predicted, observed, grid, 0, grid.bins)
    both_B, own_B, other_B = products_3B
    cosine_B: Tensor = both_B / (own_B * other_B).clamp(min=NOTHING).sqrt()
    return cosine_B


def _chunked(predicted: DrawnPeaks, observed: DrawnPeaks, grid: Grid) -> Tensor:
    """Return the products of two spectra, chunk by chunk; backward draws each chunk again."""
    products_3B = predicted.mz_BP.new_zeros(3, len(predicted.mz_BP))
    for first in range(0, grid.bins, grid.chunk):
        bounds = first, min(first + grid.chunk, grid.bins)
        part_3B = checkpoint(
            _between, predicted, observed, grid, *bounds, use_reentrant=False, preserve_rng_state=False
        )  # nothing is drawn from random numbers
        products_3B = products_3B + part_3B
    return products_3B


def _between(predicted: DrawnPeaks, observed: DrawnPeaks, grid: Grid, first: int, last: int) -> Tensor:
    """Return the products of two spectra over some bins."""
    return _products(_at(predicted, grid, first, last), _at(observed, grid, first, last))


def _products(drawn_BG: Tensor, other_BG: Tensor) -> Tensor:
    """Return the three dot products of a cosine similarity [3, B]: of the two, and of each with itself."""
    pairs = (drawn_BG, other_BG), (drawn_BG, drawn_BG), (other_BG, other_BG)
    return torch.stack([(left_BG * right_BG).sum(1) for left_BG, right_BG in pairs])


def _at(peaks: DrawnPeaks, grid: Grid, first: int, last: int) -> Tensor:
    """Return the spectra at some bins, each the sum of all peaks there."""
    bins_G = grid.bin_size * torch.arange(first, last, device=peaks.mz_BP.device, dtype=peaks.mz_BP.dtype)
    drawn_BPG = _gaussians(peaks.mz_BP.unsqueeze(-1) - bins_G, grid)
    return (peaks.height_BP.unsqueeze(1) @ drawn_BPG).squeeze(1)


def _near(peaks: DrawnPeaks, grid: Grid) -> Tensor:
    """Return the spectra at all bins, drawing each peak only at the bins near it."""
    reach = ceil(grid.reach * grid.sigma / grid.bin_size)
    steps_W = torch.arange(-reach, reach + 1, device=peaks.mz_BP.device)
    place_BPW = (peaks.mz_BP.detach() / grid.bin_size).round().long().unsqueeze(-1) + steps_W
    apart_BPW = peaks.mz_BP.unsqueeze(-1) - grid.bin_size * place_BPW.to(peaks.mz_BP.dtype)
    is_on_grid_BPW = (place_BPW >= 0) & (place_BPW < grid.bins)
    height_BPW = _gaussians(apart_BPW, grid) * (peaks.height_BP.unsqueeze(-1) * is_on_grid_BPW)
    drawn_BG = height_BPW.new_zeros(len(height_BPW), grid.bins)
    return drawn_BG.scatter_add(1, place_BPW.clamp(0, grid.bins - 1).flatten(1), height_BPW.flatten(1))


def _gaussians(apart: Tensor, grid: Grid) -> Tensor:
    """Return the height of a Gaussian peak at a distance from its middle."""
    return (-0.5 * (apart / grid.sigma).square()).exp()


END = len(LETTERS)  # the code behind the last residue
FREQUENCIES = 64
SHORTEST, LONGEST = 0.05, 10_000.0  # wavelengths in Da; single precision tells no phase of much shorter ones
MOST_CHARGE = 10
ROLES = (LATENT, ANSWER) = (0, 1)  # what a run of the layers is for


class DenovoBatch(NamedTuple):
    """Some items' spectra and peptides, padded."""

    mz_BP: Tensor
    intensity_BP: Tensor  # of an item's highest peak: 1
    is_peak_BP: Tensor
    mass_B: Tensor  # of the whole peptide; 0 where the precursor is not known
    charge_B: Tensor
    residue_BL: Tensor  # END behind the last one; NOTHING after that, and where there is no peptide
    residues_B: Tensor  # how many
    known: tuple[float, float, float]  # letters (ends among them), spectra to compare, masses to compare


@dataclass(frozen=True)
class DenovoSizes:
    """The sizes of the network, which come first among the task's options."""

    width: int = 384  # 12.5M parameters
    heads: int = 6
    encoder_layers: int = 3  # over the peaks, run once
    decoder_layers: int = 3  # over the answer, run (latent_steps + 1) times for each answer
    latent_steps: int = 6  # runs that only think, before each answer
    supervision_steps: int = 8  # answers, each with a loss of its own
    detach: bool = True  # no gradient goes from an answer to the one before; memory is the same
    longest: int = 35  # residues that a peptide may have


class DenovoMasses(nn.Module):
    """Encodes masses as sines and cosines of many wavelengths."""

    frequency_K: Tensor

    def __init__(self) -> None:
        super().__init__()
        ends = math.log(2 * math.pi / LONGEST), math.log(2 * math.pi / SHORTEST)
        self.register_buffer("frequency_K", torch.linspace(*ends, FREQUENCIES).exp(), persistent=False)

    def forward(self, mass: Tensor) -> Tensor:
        """Return sines and cosines, which must be computed in single precision at least to tell masses apart."""
        phase = mass.unsqueeze(-1) * self.frequency_K
        return torch.cat([phase.sin(), phase.cos()], -1)


class DenovoAttention(nn.Module):
    """Multi-head attention to keys and values that are computed once."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.key, self.value = nn.Linear(width, width), nn.Linear(width, width)

    def remembered(self, x_BMD: Tensor) -> Memory:
        """Return keys and values."""
        return self._split(self.key(x_BMD)), self._split(self.value(x_BMD))

    def forward(self, x_BLD: Tensor, memory: Memory, mask: Tensor | None = None, *, causal: bool = False) -> Tensor:
        query = self._split(self.query(x_BLD))
        attended = functional.scaled_dot_product_attention(query, *memory, attn_mask=mask, is_causal=causal)
        mixed_BLD: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return mixed_BLD

    def _split(self, x_BLD: Tensor) -> Tensor:
        return x_BLD.view(*x_BLD.shape[:-1], self.heads, -1).transpose(1, 2)


class DenovoEncoderLayer(nn.Module):
    """A transformer layer over the peaks of a spectrum."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.own, self.feed = DenovoAttention(width, heads), _feed(width)

    def forward(self, x_BMD: Tensor, mask: Tensor) -> Tensor:
        normed_BMD = self.norms[0](x_BMD)
        x_BMD = x_BMD + self.own(normed_BMD, self.own.remembered(normed_BMD), mask)
        changed_BMD: Tensor = x_BMD + self.feed(self.norms[1](x_BMD))
        return changed_BMD


class DenovoDecoderLayer(nn.Module):
    """A transformer layer over the places of the answer: self-attention, then attention to the spectrum."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(3)])
        self.own, self.cross, self.feed = DenovoAttention(width, heads), DenovoAttention(width, heads), _feed(width)

    def forward(self, x_BLD: Tensor, spectrum: Memory, mask: Tensor) -> Tensor:
        normed_BLD = self.norms[0](x_BLD)
        x_BLD = x_BLD + self.own(normed_BLD, self.own.remembered(normed_BLD), causal=True)
        x_BLD = x_BLD + self.cross(self.norms[1](x_BLD), spectrum, mask)
        changed_BLD: Tensor = x_BLD + self.feed(self.norms[2](x_BLD))
        return changed_BLD


class DenovoNetwork(nn.Module):
    """Predicts the logits of each place's residue from spectra, once in every supervision step."""

    def __init__(self, sizes: DenovoSizes) -> None:
        super().__init__()
        self.sizes, width, heads = sizes, sizes.width, sizes.heads
        self.masses = DenovoMasses()
        self.peak, self.precursor = nn.Linear(2 * FREQUENCIES + 1, width), nn.Linear(2 * FREQUENCIES, width)
        self.charge, self.place = nn.Embedding(MOST_CHARGE + 1, width), nn.Embedding(sizes.longest + 1, width)
        self.role = nn.Embedding(len(ROLES), width)
        self.first_latent, self.first_answer = (nn.Parameter(0.02 * torch.randn(width)) for _ in ROLES)
        self.encoder = nn.ModuleList(DenovoEncoderLayer(width, heads) for _ in range(sizes.encoder_layers))
        self.context_norm = nn.LayerNorm(width)
        self.decoder = nn.ModuleList(DenovoDecoderLayer(width, heads) for _ in range(sizes.decoder_layers))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, END + 1)

    def forward(self, batch: DenovoBatch, places: int) -> Tensor:
        """Return the logits [T, B, L, V] of the first `places` places."""
        mask = functional.pad(batch.is_peak_BP, (1, 0), value=True)[:, None, None, :]
        spectrum = self._read(batch, mask)
        place_LD = self.place.weight[:places]
        shape = len(mask), places, -1
        latent_BLD, answer_BLD = self.first_latent.expand(shape), self.first_answer.expand(shape)
        logits = []
        for _ in range(self.sizes.supervision_steps):
            for _ in range(self.sizes.latent_steps):
                latent_BLD = self._thought(latent_BLD + answer_BLD + place_LD, LATENT, spectrum, mask)
            answer_BLD = self._thought(latent_BLD + answer_BLD + place_LD, ANSWER, spectrum, mask)
            logits.append(self.out(answer_BLD))
            if self.sizes.detach:
                latent_BLD, answer_BLD = latent_BLD.detach(), answer_BLD.detach()
        return torch.stack(logits)

    def _read(self, batch: DenovoBatch, mask: Tensor) -> list[Memory]:
        """Return the keys and values of the spectrum for each layer of the decoder."""
        peak_BPD = self.peak(torch.cat([self.masses(batch.mz_BP), batch.intensity_BP.unsqueeze(-1)], -1))
        precursor_BD = self.precursor(self.masses(batch.mass_B)) + self.charge(batch.charge_B)
        x_BMD = torch.cat([precursor_BD.unsqueeze(1), peak_BPD], 1)
        for layer in self.encoder:
            x_BMD = layer(x_BMD, mask)
        x_BMD = self.context_norm(x_BMD)
        return [cast("DenovoDecoderLayer", layer).cross.remembered(x_BMD) for layer in self.decoder]

    def _thought(self, x_BLD: Tensor, role: int, spectrum: list[Memory], mask: Tensor) -> Tensor:
        """Run all layers of the decoder once."""
        x_BLD = x_BLD + self.role.weight[role]
        for layer, memory in zip(self.decoder, spectrum, strict=True):
            x_BLD = layer(x_BLD, memory, mask)
        normed_BLD: Tensor = self.norm(x_BLD)
        return normed_BLD


def _feed(width: int) -> nn.Sequential:
    """Return the feed-forward part of a layer."""
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
