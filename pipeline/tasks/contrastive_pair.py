"""Matching left to right sides: CLIP, and towers over other kinds, with all other items of a step as negatives.

    train: {task: "pipeline.tasks.contrastive_pair:ContrastivePair", options: {left: images, right: text,
            right_most: 77}, batching: padded}

Of each side an item has `left.image`, the pixels of an image; `left.token`, byte-pair tokens of a text, or bytes of a
text or a sequence; or `left.vector`, such as features of an image's patches. Of bytes and vectors the first `left_most`
and `right_most` rows are read. A tower sees one item at a time.

The loss is of all items of a step together, so micro-batches do not add up to it: 8 of 16 give each item 15 others, one
of 128 gives it 127. So the task separates embeddings from their loss (`protocol.Contrastive`), and `loss` is that of a
single batch. With `class_weight`, a second loss tells classes from the left side's vectors. Shapes: B items, L rows of
the longest item and its class token, H × W pixels, D features, C classes, N items of a split.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from pipeline.errors import ConfigError
from pipeline.protocol import ITEMS
from pipeline.readers.images import class_names
from pipeline.tasks.pairs.clip_names import FORMS, options_of
from pipeline.tasks.pairs.pair_towers import (
    BYTES,
    ImageBatch,
    ImageTower,
    Rows,
    RowTower,
    TextBatch,
    TextTower,
    crop_drawn,
    heads_of,
)
from pipeline.tasks.pairs.retrieval import Prompts, found_at, pair_places, write_nearest
from pipeline.tasks.task_parts import WHERE, at_least, at_least_single, dropout_of, example_mask, one_of, padded_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from pipeline.protocol import PublishedForm, Sizes
    from pipeline.records import Item
    from pipeline.training.items.batch import ItemTensors

    Side = Rows | ImageBatch | TextBatch

SIDES = (LEFT, RIGHT) = ("left", "right")
TOKENS, VECTORS, IMAGES, TEXT = "tokens", "vectors", "images", "text"
FIELD = {TOKENS: "token", VECTORS: "vector", IMAGES: "image", TEXT: "token"}
PAIRS, CLASSES, CLASS, ZERO_SHOT, PLACE = "pairs", "classes", "class", "zero_shot", "place"
UNKNOWN = -1  # class of an item of which none is known
COLDEST = 0.01  # temperature, as CLIP has it: cosines are multiplied by 100 at most
AT = (1, 5, 10)
CLASS_AT = (1, 5)
COUNTS = (
    *("left_most", "right_most", "width", "layers", "heads", "feedforward", "out"),
    *("image_size", "patch", "image_width", "image_layers", "vocabulary"),
)
LEAST = {**dict.fromkeys(COUNTS, 1), "temperature": COLDEST, "image_heads": 0, "class_weight": 0.0}


class PairBatch(NamedTuple):
    """Both sides of a batch's items."""

    left: Any  # Rows, ImageBatch or TextBatch; None: not wanted
    right: Any
    class_B: Tensor | None = None  # -1 where unknown


class Towers(nn.Module):
    """Both towers, the learned scale (inverse temperature) of their cosines, and what tells classes, where wanted."""

    def __init__(self, task: ContrastivePair) -> None:
        super().__init__()
        self.left, self.right = task.tower(LEFT), task.tower(RIGHT)
        self.log_scale = nn.Parameter(torch.tensor(-math.log(task.temperature)))
        self.classes = nn.Linear(task.out, len(task.names)) if task.class_weight else None
        self._is_clip = (task.left, task.right) == (IMAGES, TEXT)

    def forward(self, batch: PairBatch) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the vectors of both sides, and what they tell of classes."""
        left_BD = None if batch.left is None else self.left(batch.left)
        right_BD = None if batch.right is None else self.right(batch.right)
        told_BC = None if self.classes is None or left_BD is None else self.classes(left_BD)
        return left_BD, right_BD, told_BC

    def scale(self) -> Tensor:
        """Return the factor on cosines; it is capped, but keeps its gradient beyond the cap and can come back."""
        above = (self.log_scale + math.log(COLDEST)).clamp(min=0).detach()
        return (self.log_scale - above).exp()

    def published_forms(self) -> Mapping[str, PublishedForm]:
        """Return CLIP's forms, where these are its towers."""
        return FORMS if self._is_clip else {}

    def fitting_options(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the options that fit CLIP's weights."""
        return options_of(tensors)


@dataclass(frozen=True)
class ContrastivePair:
    """The task: each item's two sides must find each other among all items of a step."""

    left: str = TOKENS  # tokens: bytes, vectors, images, or text: byte-pair tokens
    right: str = TOKENS
    left_dim: int = 0  # numbers of a vector of the left side, where it has vectors
    right_dim: int = 0
    left_most: int = 256  # tokens or vectors of an item that are read: the first ones; of a text: all there may be
    right_most: int = 256
    width: int = 512  # of every tower but that of images
    layers: int = 12  # of each tower
    heads: int = 8
    feedforward: int = 4  # how much wider a layer is within
    image_size: int = 224  # pixels of a side
    patch: int = 32
    image_width: int = 768
    image_layers: int = 12
    image_heads: int = 0  # 0: one for every 64 of the width, as published
    vocabulary: int = 49408  # of byte-pair tokens
    exact_gelu: bool = False  # of images and texts, as most models of open_clip have it
    out: int = 512  # numbers of the vectors that are compared
    temperature: float = 0.07  # to begin with: it is learned, and stays above 0.01
    dropout: float = 0.0  # of bytes and vectors
    crop_least: float = 1.0  # of an image's area, while it is trained on: each item draws its crop
    mirror: bool = False  # half of the images, while they are trained on
    classes: Any = ()  # names of classes, or a file with one a line, in the order of the reader's
    class_weight: float = 0.0  # of telling classes by the left side's vectors, beside pairs; 0: they are not told
    templates: Any = ()  # texts such as "a photo of a {}.": images are told which class's texts are nearest
    merges: str = ""  # the file of the byte pairs, as for the reader; for templates

    def __post_init__(self) -> None:
        at_least(self, LEAST)
        dropout_of(self)
        one_of(self, dict.fromkeys(SIDES, tuple(FIELD)))
        for side in SIDES:
            self._check_side(side)
        self._check_heads()
        self._check_images()
        self._check_classes()

    def _check_side(self, side: str) -> None:
        """Refuse a side of vectors without a size."""
        if getattr(self, side) == VECTORS and getattr(self, f"{side}_dim") < 1:
            problem = f"{side} has vectors: set their length"
            raise ConfigError(problem, where=f"{WHERE}.{side}_dim", remedy=f"--set {WHERE}.{side}_dim=768")

    def _check_heads(self) -> None:
        for width, heads in (("width", "heads"), ("image_width", "image_heads")):
            size, count = getattr(self, width), getattr(self, heads) or heads_of(getattr(self, width))
            if size % count:
                problem = f"{size} features cannot be divided among {count} heads"
                raise ConfigError(problem, where=f"{WHERE}.{heads}", remedy=f"--set {WHERE}.{width}={64 * count}")

    def _check_images(self) -> None:
        if self.image_size % self.patch:
            problem = f"images of {self.image_size} pixels cannot be cut into patches of {self.patch}"
            remedy = f"--set {WHERE}.image_size={self.patch * max(1, self.image_size // self.patch)}"
            raise ConfigError(problem, where=f"{WHERE}.patch", remedy=remedy)
        if not 0 < self.crop_least <= 1:
            problem = f"crop_least is {self.crop_least}: it must be more than 0, and at most 1"
            raise ConfigError(problem, where=f"{WHERE}.crop_least", remedy=f"--set {WHERE}.crop_least=0.9")

    def _check_classes(self) -> None:
        """Refuse what is told of classes without their names, and templates that cannot be told."""
        names = self.names
        wanted = [name for name in ("class_weight", "templates") if getattr(self, name)]
        if wanted and len(names) < 2:
            problem = f"{wanted[0]} needs at least two class names"
            raise ConfigError(problem, where=f"{WHERE}.classes", remedy=f"--set {WHERE}.classes='[cat, dog]'")
        if self.templates and self.right != TEXT:
            problem = f"templates are texts, but the right side is {self.right}"
            raise ConfigError(problem, where=f"{WHERE}.templates", remedy=f"--set {WHERE}.right={TEXT}")
        if self.templates:
            self.prompts.check(self.vocabulary)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Return the names of classes."""
        return class_names(self.classes, where=f"{WHERE}.classes")

    @cached_property
    def prompts(self) -> Prompts:
        """Return the texts of all classes."""
        return Prompts(self.names, tuple(self.templates), self.merges, self.right_most)

    def model(self) -> nn.Module:
        return Towers(self)

    def tower(self, side: str) -> nn.Module:
        """Return a fresh tower of a side."""
        kind, most = getattr(self, side), getattr(self, f"{side}_most")
        if kind == IMAGES:
            heads = self.image_heads or heads_of(self.image_width)
            sizes = self.image_size, self.patch, self.image_width, self.image_layers, heads, self.out
            return ImageTower(*sizes, exact_gelu=self.exact_gelu)
        if kind == TEXT:
            shape = self.width, self.layers, self.heads, self.out
            return TextTower(self.vocabulary, most, *shape, exact_gelu=self.exact_gelu)
        dim = getattr(self, f"{side}_dim") if kind == VECTORS else 0
        inner = self.feedforward * self.width
        return RowTower(dim, most, self.width, self.layers, self.heads, inner, self.out, dropout=self.dropout)

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Return all trained parameters; the temperature has no weight decay, as in CLIP."""
        scale = model.log_scale
        others = [weight for weight in model.parameters() if weight.requires_grad and weight is not scale]
        groups: list[dict[str, Any]] = [{"params": others}] if others else []
        return [*groups, {"params": [scale], "weight_decay": 0.0}] if scale.requires_grad else groups

    def files_read(self) -> Iterable[Path]:
        """Return the files whose content decides what the task says."""
        files = [self.merges if self.templates else "", self.classes if isinstance(self.classes, str) else ""]
        return [Path(file) for file in files if file]

    def cost(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """Return the rows of the sides that differ in them: images are all of one size."""
        rows = {side: np.minimum(item[side], self._most(side)) for side in SIDES if getattr(self, side) != IMAGES}
        return rows or {LEFT: item[LEFT]}

    def _most(self, side: str) -> int:
        most: int = getattr(self, f"{side}_most")
        return most

    def collate(self, items: Sequence[ItemTensors], rng: np.random.Generator) -> PairBatch:  # noqa: ARG002 - items have their own
        is_told = bool(self.names) and any(CLASS in item.values for item in items)
        class_B = torch.stack([self._class(item) for item in items]) if is_told else None
        return PairBatch(self._side(LEFT, items), self._side(RIGHT, items), class_B)

    def _side(self, side: str, items: Sequence[ItemTensors]) -> Side:
        """Return one side of items."""
        kind = getattr(self, side)
        taken = [self._taken(side, item) for item in items]
        if kind == IMAGES:
            return ImageBatch(torch.stack(taken), *self._drawn(items))
        if kind == TEXT:
            return TextBatch(padded_rows(taken)[0].long(), torch.tensor([len(tokens_L) - 1 for tokens_L in taken]))
        values, real_BL = padded_rows(taken)
        whole = None if real_BL is None else functional.pad(real_BL, (1, 0), value=True)
        return Rows(values.long() if kind == TOKENS else values.float(), whole)

    def _drawn(self, items: Sequence[ItemTensors]) -> tuple[Tensor | None, Tensor | None]:
        """Draw how each image is cropped and whether it is mirrored, by its item's own numbers."""
        if not self.is_varied:
            return None, None
        crops = [crop_drawn(self.crop_least, item.rng) for item in items]
        return torch.stack(crops), torch.tensor([self.mirror and bool(item.rng.random() < 0.5) for item in items])

    @property
    def is_varied(self) -> bool:
        """Say whether images are changed while they are trained on."""
        return self.crop_least < 1 or self.mirror

    def _taken(self, side: str, item: ItemTensors) -> Tensor:
        """Return the rows of one side that are read; the configuration must fit them."""
        kind = getattr(self, side)
        name = f"{side}.{FIELD[kind]}"
        if name not in item.values:
            problem = f"the task reads {name}; {item.id} has {', '.join(sorted(item.values)) or 'no arrays'}"
            remedy = f"--set {WHERE}.{side}={TOKENS} (or {VECTORS}, {IMAGES}, {TEXT})"
            raise ConfigError(problem, where=f"{WHERE}.{side}", remedy=remedy)
        rows = item.values[name]
        if kind == IMAGES:
            return self._image(name, item.id, rows)
        if (kind == TEXT and rows.dtype == torch.uint8) or (kind == TOKENS and rows.dtype != torch.uint8):
            other = TOKENS if kind == TEXT else TEXT
            what = {TOKENS: "bytes", TEXT: "byte-pair tokens"}
            problem = f"the task reads {name} as {what[kind]}, but {item.id} has {what[other]}"
            raise ConfigError(problem, where=f"{WHERE}.{side}", remedy=f"--set {WHERE}.{side}={other}")
        return self._text(side, item.id, rows) if kind == TEXT else self._rows(side, name, item.id, rows)

    def _rows(self, side: str, name: str, id_: str, rows: Tensor) -> Tensor:
        dim = getattr(self, f"{side}_dim")
        if getattr(self, side) == VECTORS and rows.shape[1:] != (dim,):
            problem = f"the task reads vectors of {dim} numbers, {name} of {id_} is of {list(rows.shape[1:])}"
            raise ConfigError(problem, where=f"{WHERE}.{side}_dim", remedy=f"--set {WHERE}.{side}_dim={rows.shape[-1]}")
        return rows[: self._most(side)]

    def _image(self, name: str, id_: str, pixel_HWC: Tensor) -> Tensor:
        if pixel_HWC.shape != (self.image_size, self.image_size, 3):
            wanted = f"{self.image_size} × {self.image_size} pixels of 3 colours"
            problem = f"the task reads images of {wanted}, {name} of {id_} is {list(pixel_HWC.shape)}"
            remedy = f"--set data.options.size={self.image_size}   (or --set {WHERE}.image_size={len(pixel_HWC)})"
            raise ConfigError(problem, where=f"{WHERE}.image_size", remedy=remedy)
        return pixel_HWC

    def _text(self, side: str, id_: str, token_L: Tensor) -> Tensor:
        if len(token_L) > self._most(side):
            problem = f"the text of {id_} has {len(token_L)} tokens, the model allows {self._most(side)}"
            remedy = f"--set data.options.context={self._most(side)}"
            raise ConfigError(problem, where=f"{WHERE}.{side}_most", remedy=remedy)
        if int(token_L.max()) >= self.vocabulary:
            problem = f"a token of {id_} is {int(token_L.max())}, the model knows {self.vocabulary:,}"
            remedy = f"use the data.options.merges of the model's training, or --set {WHERE}.vocabulary=49408"
            raise ConfigError(problem, where=f"{WHERE}.vocabulary", remedy=remedy)
        return token_L

    def _class(self, item: ItemTensors) -> Tensor:
        """Return the number of an item's class."""
        number = item.values.get(CLASS, torch.tensor(UNKNOWN)).long().reshape(())
        if not UNKNOWN <= int(number) < len(self.names):
            problem = f"{item.id} is of class {int(number)}, but there are names for {len(self.names)}"
            raise ConfigError(problem, where=f"{WHERE}.classes", remedy="use the same classes as data.options.classes")
        return number

    def embed(self, model: nn.Module, batch: PairBatch) -> dict[str, Tensor]:
        """Return the vectors of both sides of each item, and what tells its class; no item sees another."""
        left_BD, right_BD, told_BC = model(batch)
        told = {} if told_BC is None else {CLASSES: told_BC}
        if told and batch.class_B is not None:
            told[CLASS] = batch.class_B
        elif told and model.training:
            problem = "the task learns classes, but no item has one"
            remedy = "--set data.options.label=COLUMN, and set data.options.classes"
            raise ConfigError(problem, where=f"{WHERE}.class_weight", remedy=remedy)
        return {LEFT: left_BD, RIGHT: right_BD, **told}

    def contrast(self, model: nn.Module, embedded: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor | float]]:
        """Return the cross entropy of finding the right from the left and back, the mean of both, over all items.

        Beside it that of classes, over the items whose class is known.
        """
        left_BD, right_BD = (at_least_single(embedded[side]) for side in SIDES)
        with torch.autocast(left_BD.device.type, enabled=False):
            logits_BB = model.scale() * left_BD @ right_BD.T  # type: ignore[operator]  # it is Towers
            missed_B = (logits_BB.logsumexp(0) + logits_BB.logsumexp(1)) / 2 - logits_BB.diagonal()
        terms: dict[str, tuple[Tensor, Tensor | float]] = {PAIRS: (missed_B.sum(), float(len(left_BD)))}
        if CLASS in embedded:
            told_BC, class_B = at_least_single(embedded[CLASSES]), embedded[CLASS]
            missed = functional.cross_entropy(told_BC, class_B, ignore_index=UNKNOWN, reduction="sum")
            terms[CLASSES] = (self.class_weight * missed, (class_B != UNKNOWN).sum().to(missed.dtype))
        return terms

    def loss(self, model: nn.Module, batch: PairBatch) -> dict[str, tuple[Tensor, Tensor | float]]:
        """Return the loss of a single batch: the step's loss where it is the only one."""
        return self.contrast(model, self.embed(model, batch))

    def outputs(self, model: nn.Module, batch: PairBatch) -> dict[str, Tensor]:
        """Return the vectors of each item, how similar they are, and its classes as they are told.

        Of a class that is known, also its place among all: 0 where it is what was told.
        """
        embedded = self.embed(model, batch)
        found = {side: embedded[side] for side in SIDES}
        found["similarity"] = torch.cosine_similarity(embedded[LEFT], embedded[RIGHT])
        if CLASSES in embedded:
            found |= _told(CLASS, embedded[CLASSES], batch.class_B)
        if self.templates:
            found |= _told(ZERO_SHOT, embedded[LEFT] @ self.prompts.vectors(model, embedded[LEFT]).T, batch.class_B)
        return found

    def metrics(self, outputs: Mapping[str, Sequence[Any]]) -> dict[str, float]:
        """Return how often an item's other side is the nearest, or among the nearest 5 or 10, of all in the split.

        And its mean rank, from 1. Among ties every place is equally likely, so towers whose vectors are all the same
        score as chance does. Where classes are told, also how often the true one is first, or among the first 5.
        """
        figures = {}
        ways = (f"{LEFT}_to_{RIGHT}", f"{RIGHT}_to_{LEFT}")
        for way, (nearer_N, tied_N) in zip(ways, pair_places(outputs[LEFT], outputs[RIGHT]), strict=True):
            for most in AT:
                figures[f"{way}_at_{most}"] = found_at(most, nearer_N, tied_N)
            figures[f"{way}_mean_rank"] = float((1 + nearer_N + tied_N / 2).mean())
        for way in (CLASS, ZERO_SHOT):
            place_N = np.array([float(place) for place in outputs.get(f"{way}_{PLACE}", ())])
            known_N = place_N[~np.isnan(place_N)]
            if len(known_N):
                figures |= {f"{way}_at_{most}": float((known_N < most).mean()) for most in CLASS_AT}
        return figures

    def publish(self, folder: Path, outputs: Mapping[str, Any], items: Iterable[Item], reading: Any) -> list[Path]:  # noqa: ARG002 - the protocol has it
        """Write what is nearest to each item's sides, and its classes by their names."""
        told = [way for way in (CLASS, ZERO_SHOT) if way in outputs]
        return write_nearest(folder, outputs, SIDES, dict.fromkeys(told, self.names), reading)

    def example(self, sizes: Sizes) -> PairBatch:
        items = sizes[ITEMS]
        class_B = torch.randint(len(self.names), (items,)) if self.names else None
        return PairBatch(self._example(LEFT, items, sizes), self._example(RIGHT, items, sizes), class_B)

    def _example(self, side: str, items: int, sizes: Sizes) -> Side:
        kind = getattr(self, side)
        if kind == IMAGES:
            pixel_BHWC = torch.randint(BYTES, (items, self.image_size, self.image_size, 3), dtype=torch.uint8)
            drawn = (torch.ones(items, 4), torch.zeros(items, dtype=torch.bool)) if self.is_varied else (None, None)
            return ImageBatch(pixel_BHWC, *drawn)
        length = sizes[side]
        if kind == TEXT:
            return TextBatch(torch.randint(self.vocabulary, (items, length)), torch.full((items,), length - 1))
        real_BL = example_mask(items, 1 + length)
        if kind == TOKENS:
            return Rows(torch.randint(BYTES, (items, length)), real_BL)
        return Rows(torch.randn(items, length, getattr(self, f"{side}_dim")), real_BL)


def _told(way: str, told_BC: Tensor, class_B: Tensor | None) -> dict[str, Tensor]:
    """Return which class is told of each item, and the place of the true one; among ties the middle."""
    found = {way: told_BC.argmax(-1)}
    if class_B is None:
        return found
    own_B1 = told_BC.gather(1, class_B.clamp(min=0)[:, None])
    place_B = (told_BC > own_B1).sum(1) + ((told_BC == own_B1).sum(1) - 1) / 2
    return found | {f"{way}_{PLACE}": place_B.masked_fill(class_B == UNKNOWN, math.nan)}
