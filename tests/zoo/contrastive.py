"""Two towers, images and texts, whose pairs must find each other: every other item of the batch is a negative.

With its real sizes it is CLIP ViT-B/32 (arXiv:2103.00020; sizes as in the published openai/clip-vit-base-patch32).

Shapes: B items, L positions, D features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.blocks import Block
from tests.zoo.member import Member, Synthetic
from tests.zoo.spread import lengths

if TYPE_CHECKING:
    from pipeline.protocol import Sizes


class QuickGelu(nn.Module):
    """CLIP's activation."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


def tower(width: int, heads: int, depth: int) -> nn.ModuleList:
    """Return the layers of a tower."""
    return nn.ModuleList(Block(width, heads, activation=QuickGelu) for _ in range(depth))


class Images(nn.Module):
    """A vision transformer."""

    def __init__(self, task: TwoTowers) -> None:
        super().__init__()
        width = task.image_width
        self.patches = nn.Conv2d(3, width, task.patch, task.patch, bias=False)
        self.first = nn.Parameter(torch.randn(width))
        self.places = nn.Embedding((task.pixels // task.patch) ** 2 + 1, width)
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.blocks = tower(width, task.image_heads, task.depth)
        self.out = nn.Linear(width, task.shared, bias=False)

    def forward(self, pixels_BCHW: Tensor) -> Tensor:
        x_BLD = self.patches(pixels_BCHW).flatten(2).transpose(1, 2)
        x_BLD = torch.cat([self.first.expand(len(x_BLD), 1, -1), x_BLD], 1) + self.places.weight
        x_BLD = self.before(x_BLD)
        for block in self.blocks:
            x_BLD = block(x_BLD)
        return self.out(self.after(x_BLD[:, 0]))


class Texts(nn.Module):
    """A causal transformer, whose last position tells."""

    def __init__(self, task: TwoTowers) -> None:
        super().__init__()
        width = task.text_width
        self.words, self.places = nn.Embedding(task.words, width), nn.Embedding(task.longest, width)
        self.blocks = tower(width, task.text_heads, task.depth)
        self.after, self.out = nn.LayerNorm(width), nn.Linear(width, task.shared, bias=False)

    def forward(self, words_BL: Tensor) -> Tensor:
        x_BLD = self.words(words_BL) + self.places.weight[: words_BL.shape[1]]
        for block in self.blocks:
            x_BLD = block(x_BLD, causal=True)
        return self.out(self.after(x_BLD)[:, -1])


class Towers(nn.Module):
    """Both, and how sharply they are compared; and a class of the image, if wanted."""

    def __init__(self, task: TwoTowers) -> None:
        super().__init__()
        self.images, self.texts = Images(task), Texts(task)
        self.sharpness = nn.Parameter(torch.tensor(2.6592))
        self.classes = nn.Linear(task.shared, task.classes) if task.classes else None


@dataclass(frozen=True)
class TwoTowers(Synthetic):
    """Which text belongs to which image."""

    padded: ClassVar[bool] = True
    pixels: int = 64
    patch: int = 8
    image_width: int = 128
    image_heads: int = 4
    text_width: int = 96
    text_heads: int = 4
    depth: int = 3
    words: int = 1000
    longest: int = 77
    shared: int = 64
    classes: int = 0

    def model(self) -> nn.Module:
        return Towers(self)

    def example(self, sizes: Sizes) -> dict[str, Tensor]:
        items = sizes["items"]
        return {
            "pixels": torch.randn(items, 3, self.pixels, self.pixels),
            "words": torch.randint(self.words, (items, sizes["length"])),
            "classes": torch.randint(max(self.classes, 1), (items,)),
        }

    def loss(self, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, float]]:
        images, texts = model.images(batch["pixels"]), model.texts(batch["words"])
        images, texts = functional.normalize(images, dim=-1), functional.normalize(texts, dim=-1)
        likeness_BB = model.sharpness.exp() * images @ texts.T
        own_B, weight = torch.arange(len(images), device=images.device), float(len(images))
        pairs = functional.cross_entropy(likeness_BB, own_B, reduction="sum") + functional.cross_entropy(
            likeness_BB.T, own_B, reduction="sum"
        )
        terms = {"pairs": (pairs / 2, weight)}
        if model.classes is not None:
            told = functional.cross_entropy(model.classes(images), batch["classes"], reduction="sum")
            terms["classes"] = (told, weight)
        return terms


def _items(count: int, rng: Any) -> Any:
    return lengths(count, rng, median=24, most=77)


MEMBERS = (
    Member(
        name="contrastive",
        task=TwoTowers,
        small={},
        sizes=({"length": 24, "items": 6}, {"length": 48, "items": 12}, {"length": 77, "items": 24}),
        settings={"optimizer": "adamw", "foreach": True, "clip": 1.0},
        padded=True,
        items=_items,
    ),
)
