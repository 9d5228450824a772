"""The network of the de-novo task: one small decoder that goes over its own answer again and again.

A spectrum is read once. Then, as in a tiny recursive model, a latent state is thought over a few times, the answer is
made anew from it, and that is one supervision step of several. The same layers do all of it, so that the model stays
small however deep it runs; the keys and values of the spectrum are the same in each run, and computed once.

A place of the answer looks at itself and at those before it: the answer is the same however many places follow, so
that neither padding nor the length of the true peptide tells the model where to end.

Shapes: B items, P peaks, M = P + 1 with the precursor before them, L places of the answer, D features, H heads, T
supervision steps, V letters and the end, K frequencies.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias, cast

import torch
from torch import nn
from torch.nn import functional

from pipeline.readers.peptides import LETTERS

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.tasks.denovo_recursive import Batch

    Memory: TypeAlias = "tuple[Tensor, Tensor]"  # keys and values of what is attended to

END = len(LETTERS)  # the code behind the last residue
FREQUENCIES = 64
SHORTEST, LONGEST = 0.05, 10_000.0  # wavelengths in Da; single precision tells no phase of much shorter ones
MOST_CHARGE = 10
ROLES = (LATENT, ANSWER) = (0, 1)  # what a run of the layers is for


class Masses(nn.Module):
    """Masses to numbers by which near ones can be told apart, and far ones too."""

    frequency_K: Tensor

    def __init__(self) -> None:
        super().__init__()
        ends = math.log(2 * math.pi / LONGEST), math.log(2 * math.pi / SHORTEST)
        self.register_buffer("frequency_K", torch.linspace(*ends, FREQUENCIES).exp(), persistent=False)

    def forward(self, mass: Tensor) -> Tensor:
        """Return sines and cosines; half precision would not tell one mass from the next."""
        phase = mass.unsqueeze(-1) * self.frequency_K
        return torch.cat([phase.sin(), phase.cos()], -1)


class Attention(nn.Module):
    """Attention of several heads to what is remembered."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.key, self.value = nn.Linear(width, width), nn.Linear(width, width)

    def remembered(self, x_BMD: Tensor) -> Memory:
        """Return keys and values."""
        return self._split(self.key(x_BMD)), self._split(self.value(x_BMD))

    def forward(self, x_BLD: Tensor, memory: Memory, mask: Tensor | None = None, *, causal: bool = False) -> Tensor:
        """Return what each place finds there."""
        query = self._split(self.query(x_BLD))
        found = functional.scaled_dot_product_attention(query, *memory, attn_mask=mask, is_causal=causal)
        mixed_BLD: Tensor = self.out(found.transpose(1, 2).flatten(2))
        return mixed_BLD

    def _split(self, x_BLD: Tensor) -> Tensor:
        return x_BLD.view(*x_BLD.shape[:-1], self.heads, -1).transpose(1, 2)


class Encoder(nn.Module):
    """A layer over the peaks of a spectrum."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.own, self.feed = Attention(width, heads), _feed(width)

    def forward(self, x_BMD: Tensor, mask: Tensor) -> Tensor:
        """Return the peaks' features with what they saw of each other."""
        normed_BMD = self.norms[0](x_BMD)
        x_BMD = x_BMD + self.own(normed_BMD, self.own.remembered(normed_BMD), mask)
        changed_BMD: Tensor = x_BMD + self.feed(self.norms[1](x_BMD))
        return changed_BMD


class Decoder(nn.Module):
    """A layer over the places of the answer: they look at each other and at the spectrum."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(3)])
        self.own, self.cross, self.feed = Attention(width, heads), Attention(width, heads), _feed(width)

    def forward(self, x_BLD: Tensor, spectrum: Memory, mask: Tensor) -> Tensor:
        """Return the places' features, changed."""
        normed_BLD = self.norms[0](x_BLD)
        x_BLD = x_BLD + self.own(normed_BLD, self.own.remembered(normed_BLD), causal=True)
        x_BLD = x_BLD + self.cross(self.norms[1](x_BLD), spectrum, mask)
        changed_BLD: Tensor = x_BLD + self.feed(self.norms[2](x_BLD))
        return changed_BLD


class Network(nn.Module):
    """Spectra to the logits of each place's letter, after every supervision step."""

    def __init__(
        self,
        *,
        width: int,
        heads: int,
        encoder_layers: int,
        decoder_layers: int,
        latent_steps: int,
        supervision_steps: int,
        places: int,
        detach: bool,
    ) -> None:
        super().__init__()
        self.latent_steps, self.supervision_steps, self.detach = latent_steps, supervision_steps, detach
        self.masses = Masses()
        self.peak, self.precursor = nn.Linear(2 * FREQUENCIES + 1, width), nn.Linear(2 * FREQUENCIES, width)
        self.charge, self.place = nn.Embedding(MOST_CHARGE + 1, width), nn.Embedding(places, width)
        self.role = nn.Embedding(len(ROLES), width)
        self.first_latent, self.first_answer = (nn.Parameter(0.02 * torch.randn(width)) for _ in ROLES)
        self.encoder = nn.ModuleList(Encoder(width, heads) for _ in range(encoder_layers))
        self.context_norm = nn.LayerNorm(width)
        self.decoder = nn.ModuleList(Decoder(width, heads) for _ in range(decoder_layers))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, END + 1)

    def forward(self, batch: Batch, places: int) -> Tensor:
        """Return logits [T, B, L, V] of so many places."""
        mask = functional.pad(batch.is_peak_BP, (1, 0), value=True)[:, None, None, :]
        spectrum = self._read(batch, mask)
        place_LD = self.place.weight[:places]
        shape = len(mask), places, -1
        latent_BLD, answer_BLD = self.first_latent.expand(shape), self.first_answer.expand(shape)
        told = []
        for _ in range(self.supervision_steps):
            for _ in range(self.latent_steps):
                latent_BLD = self._thought(latent_BLD + answer_BLD + place_LD, LATENT, spectrum, mask)
            answer_BLD = self._thought(latent_BLD + answer_BLD + place_LD, ANSWER, spectrum, mask)
            told.append(self.out(answer_BLD))
            if self.detach:
                latent_BLD, answer_BLD = latent_BLD.detach(), answer_BLD.detach()
        return torch.stack(told)

    def _read(self, batch: Batch, mask: Tensor) -> list[Memory]:
        """Return what each layer of the decoder remembers of the spectrum."""
        peak_BPD = self.peak(torch.cat([self.masses(batch.mz_BP), batch.intensity_BP.unsqueeze(-1)], -1))
        precursor_BD = self.precursor(self.masses(batch.mass_B)) + self.charge(batch.charge_B)
        x_BMD = torch.cat([precursor_BD.unsqueeze(1), peak_BPD], 1)
        for layer in self.encoder:
            x_BMD = layer(x_BMD, mask)
        x_BMD = self.context_norm(x_BMD)
        return [cast("Decoder", layer).cross.remembered(x_BMD) for layer in self.decoder]

    def _thought(self, x_BLD: Tensor, role: int, spectrum: list[Memory], mask: Tensor) -> Tensor:
        """Run all layers once."""
        x_BLD = x_BLD + self.role.weight[role]
        for layer, memory in zip(self.decoder, spectrum, strict=True):
            x_BLD = layer(x_BLD, memory, mask)
        normed_BLD: Tensor = self.norm(x_BLD)
        return normed_BLD


def _feed(width: int) -> nn.Sequential:
    """Return two layers with a wide middle."""
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
