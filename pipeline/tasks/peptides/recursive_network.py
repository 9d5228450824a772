"""The network of pepTRM: a spectrum is encoded once, then a small decoder refines its answer in rounds.

    peaks, precursor ── encoder ──▶ context
    answer t: s = place + step + letters so far;  z ← z + decoder(s + z, context), some times;
              h = decoder(s + z, itself);  logits ← (1 - gate(h)) · logits + gate(h) · out(h)

Every place of the answer is always there, and sees every other one. Padded peaks are seen by nothing.

Shapes: B items, P peaks, M = P + 1 rows of the context, L places, V letters, T answers, D width, H heads, K waves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn import functional

from pipeline.encoder.published_weights import Form

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    Memory: TypeAlias = "tuple[Tensor, Tensor]"  # keys and values

MOST_CHARGE = 6
PEAK_MASS, PRECURSOR_MASS = 2000.0, 3000.0  # m/z of one wave of frequency 1
FINEST = 20_000.0  # the highest frequency
INTENSITY_WIDTH, CHARGE_WIDTH = 32, 16
NO_LOGARITHM_OF_0 = 1e-8
GATE_BIAS = -2.0  # at first little of an answer changes
START = 0.02  # standard deviation of the initial answer


@dataclass(frozen=True)
class NetworkSizes:
    """The sizes of the network, which come first among the task's options."""

    width: int = 384  # 12.5M parameters
    heads: int = 6
    encoder_layers: int = 3  # over the peaks, run once
    decoder_layers: int = 3  # over the answer, run (latent_steps + 1) times for each answer
    latent_steps: int = 6  # runs that only think, before each answer
    supervision_steps: int = 8  # answers, each with a loss of its own
    longest: int = 35  # places of an answer
    dropout: float = 0.0
    gated: bool = True  # an answer changes the one before by a gate; of models before December 2025 false
    detach: bool = False  # no gradient goes from an answer to the one before


class SpectrumInput(NamedTuple):
    """What the network reads of some items, padded."""

    mz_BP: Tensor
    intensity_BP: Tensor  # of an item's highest peak: 1
    is_peak_BP: Tensor
    precursor_mz_B: Tensor  # not its mass; 0 where it is not known
    charge_B: Tensor  # 0 where it is not known


class MzWaves(nn.Module):
    """Encodes masses as sines and cosines of many frequencies, each with a learned scale."""

    frequency_K: Tensor

    def __init__(self, width: int, of: float) -> None:
        super().__init__()
        self.of = of
        self.register_buffer("frequency_K", torch.linspace(0.0, math.log(FINEST), width // 2).exp())
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, mass: Tensor) -> Tensor:
        """Return the waves, computed in single precision at least, in the order in which that rounds as published."""
        with torch.autocast(mass.device.type, enabled=False):
            angle = (mass.unsqueeze(-1) / self.of) * self.frequency_K * 2 * math.pi
            waves: Tensor = torch.cat([angle.sin(), angle.cos()], -1) * self.scale
        return waves


class SpectrumAttention(nn.Module):
    """Multi-head attention to keys and values that may be computed once."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def remembered(self, x_BMD: Tensor) -> Memory:
        """Return keys and values."""
        return self._split(self.key(x_BMD)), self._split(self.value(x_BMD))

    def forward(self, x_BLD: Tensor, memory: Memory, mask: Tensor | None = None) -> Tensor:
        attended = functional.scaled_dot_product_attention(self._split(self.query(x_BLD)), *memory, attn_mask=mask)
        mixed_BLD: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return mixed_BLD

    def _split(self, x_BLD: Tensor) -> Tensor:
        return x_BLD.view(*x_BLD.shape[:-1], self.heads, -1).transpose(1, 2)


class SpectrumLayer(nn.Module):
    """A transformer layer; where it crosses, its rows attend to one another, then to a memory, or to what came in."""

    def __init__(self, sizes: NetworkSizes, *, crosses: bool = False) -> None:
        super().__init__()
        width, heads = sizes.width, sizes.heads
        self.own_norm = nn.LayerNorm(width)
        self.cross_norm = nn.LayerNorm(width) if crosses else None
        self.feed_norm = nn.LayerNorm(width)
        self.own = SpectrumAttention(width, heads)
        self.cross = SpectrumAttention(width, heads) if crosses else None
        drop = nn.Dropout(sizes.dropout)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), drop, nn.Linear(4 * width, width))
        self.drop = nn.Dropout(sizes.dropout)

    def forward(
        self, x_BLD: Tensor, mask: Tensor | None = None, memory: Memory | None = None, memory_mask: Tensor | None = None
    ) -> Tensor:
        entered_BLD, normed_BLD = x_BLD, self.own_norm(x_BLD)
        x_BLD = x_BLD + self.drop(self.own(normed_BLD, self.own.remembered(normed_BLD), mask))
        if self.cross is not None and self.cross_norm is not None:
            memory = self.cross.remembered(entered_BLD) if memory is None else memory
            x_BLD = x_BLD + self.drop(self.cross(self.cross_norm(x_BLD), memory, memory_mask))
        changed_BLD: Tensor = x_BLD + self.drop(self.feed(self.feed_norm(x_BLD)))
        return changed_BLD


class SpectrumEncoder(nn.Module):
    """Encodes the precursor and the peaks of spectra, one row each."""

    def __init__(self, sizes: NetworkSizes) -> None:
        super().__init__()
        width = sizes.width
        self.peak_waves = MzWaves(width - INTENSITY_WIDTH, PEAK_MASS)
        self.intensity_in = nn.Linear(1, INTENSITY_WIDTH)
        self.intensity_out = nn.Linear(INTENSITY_WIDTH, INTENSITY_WIDTH)
        self.precursor_waves = MzWaves(width - CHARGE_WIDTH, PRECURSOR_MASS)
        self.charge = nn.Embedding(MOST_CHARGE + 1, CHARGE_WIDTH)
        self.precursor = nn.Parameter(START * torch.randn(1, 1, width))
        self.layers = nn.ModuleList(SpectrumLayer(sizes) for _ in range(sizes.encoder_layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, spectra: SpectrumInput, mask: Tensor) -> Tensor:
        """Return the context [B, M, D]: the precursor, then the peaks."""
        x_BMD = torch.cat([self.precursor_row(spectra), self.peak_rows(spectra)], 1)
        for layer in self.layers:
            x_BMD = layer(x_BMD, mask)
        context_BMD: Tensor = self.norm(x_BMD)
        return context_BMD

    def peak_rows(self, spectra: SpectrumInput) -> Tensor:
        high_BP1 = (spectra.intensity_BP + NO_LOGARITHM_OF_0).log().unsqueeze(-1)
        waves_BPK = self.peak_waves(spectra.mz_BP)
        high_BPC = self.intensity_out(self.intensity_in(high_BP1).relu())
        return torch.cat([waves_BPK, high_BPC.to(waves_BPK.dtype)], -1)

    def precursor_row(self, spectra: SpectrumInput) -> Tensor:
        charge_BC = self.charge(spectra.charge_B.clamp(0, MOST_CHARGE))
        row_BD = torch.cat([self.precursor_waves(spectra.precursor_mz_B), charge_BC], -1)
        return row_BD.unsqueeze(1) + self.precursor


class RecursiveNetwork(nn.Module):
    """Predicts the logits of each place's letter from spectra, once for every answer."""

    def __init__(self, sizes: NetworkSizes, letters: int, *, as_published: bool = False) -> None:
        super().__init__()
        self.sizes, width = sizes, sizes.width
        self.spectrum = SpectrumEncoder(sizes)
        self.first_answer = nn.Parameter(START * torch.randn(1, sizes.longest, letters))
        self.first_latent = nn.Parameter(START * torch.randn(1, sizes.longest, width))
        self.place, self.letter = nn.Embedding(sizes.longest, width), nn.Linear(letters, width)
        self.decoder = nn.ModuleList(SpectrumLayer(sizes, crosses=True) for _ in range(sizes.decoder_layers))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, letters)
        if sizes.gated:
            self.step, self.gate = nn.Embedding(sizes.supervision_steps, width), nn.Linear(width, letters)
            nn.init.zeros_(self.gate.weight)
            nn.init.constant_(self.gate.bias, GATE_BIAS)
        if as_published:  # in pepTRM's files, and unused
            self.register_buffer("unused_letter", START * torch.randn(letters, width))

    def forward(self, spectra: SpectrumInput, answers: int | None = None) -> Tensor:
        """Return the logits [T, B, L, V] of all answers, or of the first ones."""
        return self.answered(spectra, answers)[0]

    def answered(self, spectra: SpectrumInput, answers: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the logits [T, B, L, V], and the latent state [B, L, D] behind the last."""
        mask = functional.pad(spectra.is_peak_BP, (1, 0), value=True)[:, None, None, :]
        context_BMD = self.spectrum(spectra, mask)
        memories: list[Memory] = [layer.cross.remembered(context_BMD) for layer in self.decoder]  # type: ignore[operator, union-attr]
        logits_BLV = self.first_answer.expand(len(mask), -1, -1)
        latent_BLD = self.first_latent.expand(len(mask), -1, -1)
        logits_T = []
        for answer in range(self.sizes.supervision_steps if answers is None else answers):
            said_BLD = self._said(logits_BLV, answer)
            for _ in range(self.sizes.latent_steps):
                latent_BLD = latent_BLD + self._run(said_BLD + latent_BLD, memories, mask)
            logits_BLV = self._answer(logits_BLV, self._run(said_BLD + latent_BLD, None, None))
            logits_T.append(logits_BLV)
            if self.sizes.detach:
                logits_BLV, latent_BLD = logits_BLV.detach(), latent_BLD.detach()
        return torch.stack(logits_T), latent_BLD

    def _said(self, logits_BLV: Tensor, answer: int) -> Tensor:
        """Return the last answer as features of its places."""
        place_LD: Tensor = self.place.weight
        if self.sizes.gated:
            place_LD = place_LD + self.step.weight[answer]
        said_BLD: Tensor = self.letter(logits_BLV.softmax(-1)) + place_LD
        return said_BLD

    def _answer(self, logits_BLV: Tensor, thought_BLD: Tensor) -> Tensor:
        fresh_BLV: Tensor = self.out(thought_BLD)
        if not self.sizes.gated:
            return fresh_BLV
        gate_BLV: Tensor = self.gate(thought_BLD).sigmoid()
        return (1 - gate_BLV) * logits_BLV + gate_BLV * fresh_BLV

    def _run(self, x_BLD: Tensor, memories: list[Memory] | None, mask: Tensor | None) -> Tensor:
        """Run all layers of the decoder once."""
        for at, layer in enumerate(self.decoder):
            x_BLD = layer(x_BLD, memory=memories[at] if memories else None, memory_mask=mask)
        normed_BLD: Tensor = self.norm(x_BLD)
        return normed_BLD

    def published_forms(self) -> dict[str, Form]:
        """Return the names that pepTRM's trainer writes, and those of a compiled model."""
        signs = NAMES["first_answer"], NAMES["spectrum.precursor"]
        left = () if hasattr(self, "unused_letter") else (UNUSED, COMPILED + UNUSED)
        form = Form(NAMES, signs, left)
        return {FORM: form, COMPILED_FORM: replace(form, prefix=COMPILED)}


# ---- names under which pepTRM's trainer writes a model: as it is, and compiled ----

FORM, COMPILED_FORM = "peptrm", "peptrm_compiled"
COMPILED = "_orig_mod."
DECODER = "recursive_core.decoder"
UNUSED = f"{DECODER}.token_embedding.weight"
ATTENTION = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "out_proj"}
NORMS = ("own_norm", "cross_norm", "feed_norm")


def _layer_names(ours: str, theirs: str, attentions: Mapping[str, str], norms: tuple[str, ...]) -> dict[str, str]:
    """Return the names within a layer."""
    names = {f"{ours}.*.{norm}": f"{theirs}.*.norm{at}" for at, norm in enumerate(norms, 1)}
    for own, other in attentions.items():
        names |= {f"{ours}.*.{own}.{part}": f"{theirs}.*.{other}.{proj}" for part, proj in ATTENTION.items()}
    return names | {f"{ours}.*.feed": f"{theirs}.*.ff.net"}


NAMES = {
    "spectrum.precursor": "encoder.precursor_token",
    "spectrum.peak_waves.scale": "encoder.peak_encoder.mass_embedding.scale",
    "spectrum.peak_waves.frequency_K": "encoder.peak_encoder.mass_embedding.freqs",
    "spectrum.intensity_in": "encoder.peak_encoder.intensity_encoder.0",
    "spectrum.intensity_out": "encoder.peak_encoder.intensity_encoder.2",
    "spectrum.precursor_waves.scale": "encoder.precursor_encoder.mass_embedding.scale",
    "spectrum.precursor_waves.frequency_K": "encoder.precursor_encoder.mass_embedding.freqs",
    "spectrum.charge": "encoder.precursor_encoder.charge_embedding",
    "spectrum.norm": "encoder.norm",
    "first_answer": f"{DECODER}.initial_logits",
    "first_latent": f"{DECODER}.initial_z",
    "place": f"{DECODER}.position_embedding",
    "letter": f"{DECODER}.soft_embed_proj",
    "step": f"{DECODER}.step_embedding",
    "norm": f"{DECODER}.norm",
    "out": f"{DECODER}.output_head",
    "gate": f"{DECODER}.gate_head",
    "unused_letter": UNUSED,
    **_layer_names("spectrum.layers", "encoder.layers", {"own": "self_attn"}, NORMS[::2]),
    **_layer_names("decoder", f"{DECODER}.layers", {"own": "self_attn", "cross": "cross_attn"}, NORMS),
}
