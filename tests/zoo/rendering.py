"""Spectra drawn with Gaussians: a loss that is much larger than the model.

Shapes: B items, P peaks, G bins, D features.
"""

from __future__ import annotations

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

SIGMA = 0.05  # of a peak, in Da
HEAVIEST = 2000.0  # m/z


def rendered(masses_BP: Tensor, bins: int, intensities_BP: Tensor | None = None) -> Tensor:
    """Return the spectra that peaks make, each a Gaussian."""
    grid_G = torch.linspace(0, HEAVIEST, bins, device=masses_BP.device)
    drawn_BPG = torch.exp(-0.5 * ((masses_BP[..., None] - grid_G) / SIGMA) ** 2)
    if intensities_BP is not None:
        drawn_BPG = drawn_BPG * intensities_BP[..., None]
    return drawn_BPG.sum(1)


def spectrum_loss(predicted_BP: Tensor, masses_BP: Tensor, intensities_BP: Tensor, bins: int) -> Tensor:
    """Return the sum of one minus the cosine between the spectra predicted and observed, in full precision."""
    with torch.autocast(predicted_BP.device.type, enabled=False):
        drawn_BG = rendered(predicted_BP.float(), bins)
        with torch.no_grad():
            seen_BG = rendered(masses_BP, bins, intensities_BP)
        return (1 - functional.cosine_similarity(drawn_BG, seen_BG, dim=1)).sum()


@dataclass(frozen=True)
class Rendering(Synthetic):
    """Masses of peaks, which are drawn and compared with the spectrum observed."""

    padded: ClassVar[bool] = True
    width: int = 64
    depth: int = 3
    bins: int = 4000

    def model(self) -> nn.Module:
        return layers(2, *[self.width] * self.depth, 1)

    def example(self, sizes: Sizes) -> dict[str, Tensor]:
        shape = sizes["items"], sizes["peaks"]
        return {"masses": HEAVIEST * torch.rand(*shape), "intensities": torch.rand(*shape), "mask": present(*shape)}

    def loss(self, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, float]]:
        masses, intensities = batch["masses"], batch["intensities"] * batch["mask"]
        moved = model(torch.stack([masses / HEAVIEST, intensities], -1)).squeeze(-1)
        return {"spectrum": (spectrum_loss(masses + moved, masses, intensities, self.bins), float(len(masses)))}


def _items(count: int, rng: np.random.Generator) -> Any:
    return lengths(count, rng, median=40, name="peaks", most=100)


MEMBERS = (
    Member(
        name="rendering",
        task=Rendering,
        small={},
        sizes=({"peaks": 40, "items": 4}, {"peaks": 80, "items": 8}, {"peaks": 100, "items": 16}),
        settings={"optimizer": "adamw", "foreach": True},
        padded=True,
        items=_items,
    ),
)
