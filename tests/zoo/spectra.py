"""A transformer over the peaks of mass spectra, with Fourier features and differences of masses in its attention.

Built as the public code of the guide's model is (github.com/pluskal-lab/DreaMS): width 980 + 44, 7 layers, 8 heads,
attention written out, no biases, 5,997 frequencies.

Shapes: B items, P peaks, Q frequencies, D features, H heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.blocks import layers, present
from tests.zoo.member import Member, Synthetic
from tests.zoo.spread import lengths

if TYPE_CHECKING:
    import numpy as np

    from pipeline.protocol import Sizes

HEAVIEST = 1000.0  # m/z


class Layer(nn.Module):
    """A pre-norm layer whose attention knows how far masses are apart."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before_attention, self.before_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x_BPD: Tensor, absent_BP: Tensor, apart: Tensor | None) -> Tensor:
        x_BPD = x_BPD + self._drop(self._attended(self.before_attention(x_BPD), absent_BP, apart))
        inner = self._drop(functional.relu(self.up(self.before_feed(x_BPD))))
        return x_BPD + self._drop(self.down(inner))

    def _attended(self, x_BPD: Tensor, absent_BP: Tensor, apart: Tensor | None) -> Tensor:
        query, key, value = self.mix(x_BPD).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores_BHPP = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
        if apart is not None:
            scores_BHPP = scores_BHPP + apart.sum(-1)[:, None]
        scores_BHPP = scores_BHPP.masked_fill(absent_BP[:, None, None, :], -1e9)
        return self.out((self._drop(scores_BHPP.softmax(-1)) @ value).transpose(1, 2).flatten(2))

    def _drop(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, self.training)


class Spectrum(nn.Module):
    """Peaks to a vector of each spectrum."""

    def __init__(self, task: Spectra) -> None:
        super().__init__()
        width = task.fourier + task.peak
        whole = torch.arange(2.0, HEAVIEST)
        fine = task.finest * torch.arange(2.0, math.ceil(1 / task.finest), 2.0)
        self.frequency = nn.Parameter(1 / torch.cat([fine, whole])[None], requires_grad=False)
        inner = [task.fourier_width] * (task.fourier_depth - 1)
        self.of_mass = layers(2 * self.frequency.shape[1], *inner, task.fourier, activation=nn.ReLU)
        self.of_peak = nn.Linear(2, task.peak)
        self.layers = nn.ModuleList(Layer(width, task.heads, task.dropout) for _ in range(task.depth))
        self.norm, self.out, self.apart = nn.LayerNorm(width), nn.Linear(width, task.targets), task.apart

    def forward(self, peaks_BP2: Tensor, absent_BP: Tensor) -> Tensor:
        phase_BPQ = 2 * math.pi * peaks_BP2[..., :1] @ self.frequency
        mass_BPD = self.of_mass(torch.cat([phase_BPQ.cos(), phase_BPQ.sin()], -1))
        apart = mass_BPD.unsqueeze(2) - mass_BPD.unsqueeze(1) if self.apart else None
        scale = torch.tensor([1 / HEAVIEST, 1.0], device=peaks_BP2.device)
        x_BPD = torch.cat([self.of_peak(peaks_BP2 * scale), mass_BPD], -1)
        for layer in self.layers:
            x_BPD = layer(x_BPD, absent_BP, apart)
        return self.out(self.norm(x_BPD)[:, 0])


@dataclass(frozen=True)
class Spectra(Synthetic):
    """Properties of the molecule of each spectrum."""

    padded: ClassVar[bool] = True
    fourier: int = 96
    peak: int = 32
    heads: int = 4
    depth: int = 4
    finest: float = 1e-2  # Da
    fourier_width: int = 64
    fourier_depth: int = 3
    dropout: float = 0.1
    apart: bool = True  # differences of the masses' features in attention
    targets: int = 128
    frozen: int = 0  # so many of the lower layers, and the features below, are not trained

    def model(self) -> nn.Module:
        model = Spectrum(self)
        if self.frozen:
            for module in (model.of_mass, model.of_peak, *model.layers[: self.frozen]):
                module.requires_grad_(False)
        return model

    def example(self, sizes: Sizes) -> dict[str, Tensor]:
        shape = sizes["items"], sizes["peaks"]
        peaks = torch.rand(*shape, 2)
        return {"peaks": peaks, "absent": ~present(*shape), "targets": torch.rand(shape[0], self.targets)}

    def loss(self, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, float]]:
        told = model(batch["peaks"], batch["absent"])
        each = functional.binary_cross_entropy_with_logits(told, batch["targets"], reduction="none")
        return {"properties": (each.mean(-1).sum(), float(len(told)))}


def _items(count: int, rng: np.random.Generator) -> Any:
    return lengths(count, rng, median=40, name="peaks", most=100)


MEMBERS = (
    Member(
        name="spectra",
        task=Spectra,
        small={},
        sizes=({"peaks": 40, "items": 4}, {"peaks": 80, "items": 6}, {"peaks": 100, "items": 12}),
        settings={"optimizer": "adamw", "foreach": True, "clip": 1.0},
        padded=True,
        items=_items,
    ),
)
