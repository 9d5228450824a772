"""A recursive model of peptides from spectra: one small decoder, run again and again, supervised after every few runs.

Built as the public code of the guide's model is (github.com/jasegehring/pepTRM, configs/optimized_extended.yaml):
width 384, 3 + 3 layers, 6 heads, 8 supervision × 6 latent steps, attention written out, 12.5M parameters.

Shapes: B items, P peaks (and the precursor), L residues, D features, V letters, T supervision steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.blocks import Attention, Block, feed_forward, present
from tests.zoo.member import Member, Synthetic
from tests.zoo.rendering import HEAVIEST, spectrum_loss
from tests.zoo.spread import lengths

if TYPE_CHECKING:
    import numpy as np

    from pipeline.protocol import Sizes

PROTON, WATER = 1.00728, 18.01056  # Da


class Decoder(nn.Module):
    """A layer that looks at its own positions and at the spectrum."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.own = Attention(width, heads, fused=False, dropout=dropout)
        self.cross = Attention(width, heads, fused=False, dropout=dropout)
        self.feed = feed_forward(width, dropout)

    def forward(self, x_BLD: Tensor, context: Tensor, mask: Tensor | None) -> Tensor:
        normed = self.norms[0](x_BLD)
        x_BLD = x_BLD + self.own(normed, normed, None)
        x_BLD = x_BLD + self.cross(self.norms[1](x_BLD), context, mask)
        return x_BLD + self.feed(self.norms[2](x_BLD))


class Recursive(nn.Module):
    """Guesses that become better by going through the same layers."""

    def __init__(self, task: RecurrentDepth) -> None:
        super().__init__()
        width, heads, dropout = task.width, task.heads, task.dropout
        self.task = task
        self.peak, self.precursor = nn.Linear(2, width), nn.Linear(2, width)
        self.encoder = nn.ModuleList(
            Block(width, heads, fused=False, dropout=dropout) for _ in range(task.encoder_layers)
        )
        self.decoder = nn.ModuleList(Decoder(width, heads, dropout) for _ in range(task.decoder_layers))
        self.guess, self.place = nn.Linear(task.letters, width), nn.Embedding(task.longest, width)
        self.step = nn.Embedding(task.steps, width)
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, task.letters)
        self.gate = nn.Linear(width, task.letters)
        self.first_latent = nn.Parameter(0.02 * torch.randn(1, task.longest, width))
        self.first_logits = nn.Parameter(torch.zeros(1, task.longest, task.letters))

    def forward(self, peaks_BPx: Tensor, precursor_Bx: Tensor, mask_BP: Tensor, length: int) -> Tensor:
        context, mask = self._encoded(peaks_BPx, precursor_Bx, mask_BP)
        latent = self.first_latent[:, :length].expand(len(peaks_BPx), -1, -1)
        logits = self.first_logits[:, :length].expand(len(peaks_BPx), -1, -1)
        told = []
        for step in range(self.task.steps):
            latent, logits = self._supervised(latent, logits, step, context, mask)
            told.append(logits)
            if self.task.detach:
                latent, logits = latent.detach(), logits.detach()
        return torch.stack(told)

    def _encoded(self, peaks_BPx: Tensor, precursor_Bx: Tensor, mask_BP: Tensor) -> tuple[Tensor, Tensor]:
        x_BPD = torch.cat([self.precursor(precursor_Bx)[:, None], self.peak(peaks_BPx)], 1)
        mask_BP = functional.pad(mask_BP, (1, 0), value=True)
        for block in self.encoder:
            x_BPD = block(x_BPD, mask_BP)
        return x_BPD, mask_BP

    def _supervised(
        self, latent: Tensor, logits: Tensor, step: int, context: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Think a few times, then answer."""
        guess = logits.softmax(-1)
        for _ in range(self.task.latent):
            latent = latent + self.norm(self._decoded(guess, latent, step, context, mask))
        x_BLD = self.norm(self._decoded(guess, latent, step, None, None))
        gate = torch.sigmoid(self.gate(x_BLD))
        return latent, (1 - gate) * logits + gate * self.out(x_BLD)

    def _decoded(self, guess: Tensor, latent: Tensor, step: int, context: Tensor | None, mask: Tensor | None) -> Tensor:
        places_L = torch.arange(latent.shape[1], device=latent.device)
        x_BLD = self.guess(guess) + latent + self.place(places_L) + self.step.weight[step]
        for layer in self.decoder:
            x_BLD = layer(x_BLD, x_BLD if context is None else context, mask)
        return x_BLD


@dataclass(frozen=True)
class RecurrentDepth(Synthetic):
    """Letters of a peptide after every supervision step; its mass; and the spectrum that it would have."""

    padded: ClassVar[bool] = True
    width: int = 384
    heads: int = 6
    encoder_layers: int = 3
    decoder_layers: int = 3
    steps: int = 8
    latent: int = 6
    letters: int = 24
    longest: int = 35
    dropout: float = 0.1
    detach: bool = True  # no gradient from one supervision step to the one before
    bins: int = 0  # of the spectrum's loss; 0: there is none

    def model(self) -> nn.Module:
        return Recursive(self)

    def example(self, sizes: Sizes) -> dict[str, Tensor]:
        items, peaks, length = sizes["items"], sizes["peaks"], sizes["residues"]
        return {
            "peaks": torch.rand(items, peaks, 2),
            "precursor": torch.rand(items, 2),
            "mask": present(items, peaks),
            "letters": torch.randint(self.letters, (items, length)),
            "there": present(items, length),
        }

    def loss(self, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, Tensor | float]]:
        letters, there = batch["letters"], batch["there"]
        told_TBLV = model(batch["peaks"], batch["precursor"], batch["mask"], letters.shape[1])
        terms = {"letters": (self._letters(told_TBLV, letters, there), there.sum())}
        with torch.autocast(told_TBLV.device.type, enabled=False):
            masses_BL = self._masses(told_TBLV[-1].float())
            precursor_B = HEAVIEST * batch["precursor"][:, 0]
            error_B = ((masses_BL * there).sum(1) + WATER - precursor_B).abs()
            terms["precursor"] = (torch.log1p(error_B).sum(), float(len(letters)))
        if self.bins:
            seen_BP = HEAVIEST * batch["peaks"][..., 0], batch["peaks"][..., 1] * batch["mask"]
            terms["spectrum"] = (spectrum_loss(_fragments(masses_BL), *seen_BP, self.bins), float(len(letters)))
        return terms

    def _letters(self, told_TBLV: Tensor, letters_BL: Tensor, there_BL: Tensor) -> Tensor:
        """Return the cross entropies of all steps, the later the weightier."""
        total = told_TBLV.new_zeros(())
        for step, logits_BLV in enumerate(told_TBLV):
            each_BL = functional.cross_entropy(
                logits_BLV.flatten(0, 1), letters_BL.flatten(), reduction="none", label_smoothing=0.1
            ).view_as(there_BL)
            total = total + (each_BL * there_BL).sum() * (2 * (step + 1) / (self.steps * (self.steps + 1)))
        return total

    def _masses(self, logits_BLV: Tensor) -> Tensor:
        masses_V = torch.linspace(57.0, 186.0, self.letters, device=logits_BLV.device)  # from Gly to Trp, about
        return torch.einsum("blv,v->bl", logits_BLV.softmax(-1), masses_V)


def _fragments(masses_BL: Tensor) -> Tensor:
    """Return m/z of the b and y ions, with one charge and with two, between the first and the last letter."""
    inner = masses_BL[:, 1:-1]
    b = inner.cumsum(1)[:, :-1]
    y = inner.flip(1).cumsum(1).flip(1)[:, 1:] + WATER
    return torch.cat([b + PROTON, y + PROTON, b / 2 + PROTON, y / 2 + PROTON], 1)


def _items(count: int, rng: np.random.Generator) -> Any:
    residues = lengths(count, rng, median=7, name="residues", most=12)
    return residues | lengths(count, rng, median=24, name="peaks", most=64)


MEMBERS = (
    Member(
        name="recurrent_depth",
        task=RecurrentDepth,
        small={},
        sizes=(
            {"residues": 5, "peaks": 16, "items": 1},
            {"residues": 8, "peaks": 32, "items": 1},
            {"residues": 9, "peaks": 40, "items": 2},
        ),
        settings={"optimizer": "adamw", "foreach": True, "ema": 0.999, "clip": 1.0},
        padded=True,
        items=_items,
    ),
)
