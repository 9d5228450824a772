"""Matches left and right sides: CLIP, and towers for other kinds of data, with all other items of a step as negatives.

    train: {task: "pipeline.tasks.contrastive_pair:ContrastivePair", options: {left: images, right: text,
            right_most: 77}, batching: padded}

Of each side an item has `left.image`, the pixels of an image; `left.token`, byte-pair tokens of a text, or bytes of a
text or a sequence; or `left.vector`, such as features of an image's patches. Of bytes and vectors the first `left_most`
and `right_most` rows are read. A tower sees one item at a time.

The loss is of all items of a step together, so micro-batches do not add up to it: 8 of 16 give each item 15 others, one
of 128 gives it 127. So the task separates embeddings from their loss (`protocol.Contrastive`), and `loss` is that of a
single batch. With `class_weight`, a second loss predicts classes from the left side's vectors.

Shapes: B items, L rows of the longest item and its class token, H × W pixels, D features, C classes, N items of a
split.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from pipeline.protocol import ITEMS
from pipeline.readers.captions import class_names
from pipeline.tasks.pairs.linear_probe import probe_accuracy
from pipeline.tasks.pairs.pair_towers import (
    BYTES,
    FORMS,
    ImageBatch,
    ImageTower,
    PairBatch,
    Rows,
    RowTower,
    TextBatch,
    TextTower,
    crop_drawn,
    heads_of,
    options_of,
)
from pipeline.tasks.pairs.retrieval import Prompts, found_at, pair_places, write_nearest
from pipeline.tasks.task_parts import (
    WHERE,
    at_least,
    at_least_single,
    divided,
    dropout_of,
    found_both_ways,
    one_of,
    padded_rows,
    refuse,
)

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
PAIRS, CLASSES, CLASS, ZERO_SHOT, PLACE, LABEL = "pairs", "classes", "class", "zero_shot", "place", "label"
BYTE_PAIRS = "byte-pair tokens"
UNKNOWN = -1  # class of an item of which none is known
COLDEST = 0.01  # temperature, as CLIP has it: cosines are multiplied by 100 at most
AT = (1, 5, 10)
CLASS_AT = (1, 5)
COUNTS = (
    *("left_most", "right_most", "width", "layers", "heads", "feedforward", "out"),
    *("image_size", "patch", "image_width", "image_layers", "vocabulary"),
)
LEAST = {**dict.fromkeys(COUNTS, 1), "temperature": COLDEST, "image_heads": 0, "class_weight": 0.0}


class Towers(nn.Module):
    """Both towers, the learned scale (inverse temperature) of their cosines, and a layer for classes, where wanted."""

    def __init__(self, task: ContrastivePair) -> None:
        super().__init__()
        self.left, self.right = task.tower(LEFT), task.tower(RIGHT)
        self.log_scale = nn.Parameter(torch.tensor(-math.log(task.temperature)))
        self.classes = nn.Linear(task.out, len(task.names)) if task.class_weight else None
        self._is_clip = (task.left, task.right) == (IMAGES, TEXT)

    def forward(self, batch: PairBatch) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the vectors of both sides, and the logits of classes."""
        left_BD = None if batch.left is None else self.left(batch.left)
        right_BD = None if batch.right is None else self.right(batch.right)
        logits_BC = None if self.classes is None or left_BD is None else self.classes(left_BD)
        return left_BD, right_BD, logits_BC

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
    class_weight: float = 0.0  # of a second loss that predicts classes from the left side's vectors; 0: none
    templates: Any = ()  # texts such as "a photo of a {}.": each image gets the class whose texts are nearest
    merges: str = ""  # the file of the byte pairs, as for the reader; for templates
    linear_probe: str = ""  # predictions of the training items, to which evaluation fits a linear classifier
    linear_probe_val: str = ""  # predictions of the validation items, which choose its regularisation

    def __post_init__(self) -> None:
        at_least(self, LEAST)
        dropout_of(self)
        one_of(self, dict.fromkeys(SIDES, tuple(FIELD)))
        for side in SIDES:
            if getattr(self, side) == VECTORS and getattr(self, f"{side}_dim") < 1:
                refuse(f"{side}_dim", f"{side} has vectors: set their length", f"--set {WHERE}.{side}_dim=768")
        for width, heads in (("width", "heads"), ("image_width", "image_heads")):
            count = getattr(self, heads) or heads_of(getattr(self, width))
            divided(getattr(self, width), count, heads)
        if self.image_size % self.patch:
            problem = f"images of {self.image_size} pixels cannot be cut into patches of {self.patch}"
            refuse("patch", problem, f"--set {WHERE}.image_size={self.patch * max(1, self.image_size // self.patch)}")
        if not 0 < self.crop_least <= 1:
            problem = f"crop_least is {self.crop_least}: it must be more than 0, and at most 1"
            refuse("crop_least", problem, f"--set {WHERE}.crop_least=0.9")
        if bool(self.linear_probe) != bool(self.linear_probe_val):
            problem = "linear_probe and linear_probe_val belong together: set both or none"
            refuse("linear_probe", problem, "set both to folders of predictions, of train and of val")
        self._check_classes()

    def _check_classes(self) -> None:
        """Refuse options about classes without their names, and templates that are no texts for the right side."""
        wanted = [name for name in ("class_weight", "templates", "linear_probe") if getattr(self, name)]
        if len(self.names) < 2 and wanted:
            refuse("classes", f"{wanted[0]} needs at least two class names", f"--set {WHERE}.classes='[cat, dog]'")
        if self.templates and self.right != TEXT:
            problem = f"templates are texts, but the right side is {self.right}"
            refuse("templates", problem, f"--set {WHERE}.right={TEXT}")
        if self.templates:
            self.prompts.check(self.vocabulary)

    @cached_property
    def names(self) -> tuple[str, ...]:
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
        """Return the files whose content can change the task's results."""
        files = [self.merges if self.templates else "", self.classes if isinstance(self.classes, str) else ""]
        files += [f"{folder}/predictions.json" for folder in self._probed]
        return [Path(file) for file in files if file]

    def cost(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """Return the rows of the sides that differ in them: images are all of one size."""
        sides = [side for side in SIDES if getattr(self, side) != IMAGES]
        return {side: np.minimum(item[side], getattr(self, f"{side}_most")) for side in sides} or {LEFT: item[LEFT]}

    def collate(self, items: Sequence[ItemTensors], rng: np.random.Generator) -> PairBatch:  # noqa: ARG002 - items have their own
        has_classes = bool(self.names) and any(CLASS in item.values for item in items)
        class_B = torch.stack([self._class(item) for item in items]) if has_classes else None
        return PairBatch(self._side(LEFT, items), self._side(RIGHT, items), class_B)

    def _side(self, side: str, items: Sequence[ItemTensors]) -> Side:
        """Return one side of items; a crop and a mirror are drawn by each item's own random numbers."""
        kind = getattr(self, side)
        rows = [self._rows(side, item) for item in items]
        if kind == IMAGES and self.is_varied:
            crop_B4 = torch.stack([crop_drawn(self.crop_least, item.rng) for item in items])
            is_mirrored_B = torch.tensor([self.mirror and bool(item.rng.random() < 0.5) for item in items])
            return ImageBatch(torch.stack(rows), crop_B4, is_mirrored_B)
        if kind == IMAGES:
            return ImageBatch(torch.stack(rows))
        if kind == TEXT:
            return TextBatch(padded_rows(rows)[0].long(), torch.tensor([len(tokens_L) - 1 for tokens_L in rows]))
        values, real_BL = padded_rows(rows)
        whole = None if real_BL is None else functional.pad(real_BL, (1, 0), value=True)
        return Rows(values.long() if kind == TOKENS else values.float(), whole)

    @property
    def _probed(self) -> list[str]:
        return [folder for folder in (self.linear_probe, self.linear_probe_val) if folder]

    @property
    def is_varied(self) -> bool:
        """Say whether images are changed while they are trained on."""
        return self.crop_least < 1 or self.mirror

    def _rows(self, side: str, item: ItemTensors) -> Tensor:
        """Return the rows of one side that are read; the configuration must fit them."""
        kind, name = getattr(self, side), f"{side}.{FIELD[getattr(self, side)]}"
        if name not in item.values:
            problem = f"the task reads {name}; {item.id} has {', '.join(sorted(item.values)) or 'no arrays'}"
            refuse(side, problem, f"--set {WHERE}.{side}={TOKENS} (or {VECTORS}, {IMAGES}, {TEXT})")
        rows = item.values[name]
        if kind == IMAGES:
            if rows.shape != (self.image_size, self.image_size, 3):
                wanted = f"{self.image_size} × {self.image_size} pixels of 3 colours"
                problem = f"the task reads images of {wanted}, {name} of {item.id} is {list(rows.shape)}"
                remedy = f"--set data.options.size={self.image_size}   (or --set {WHERE}.image_size={len(rows)})"
                refuse("image_size", problem, remedy)
            return rows
        if kind == VECTORS:
            dim = getattr(self, f"{side}_dim")
            if rows.shape[1:] != (dim,):
                problem = f"the task reads vectors of {dim} numbers, {name} of {item.id} is of {list(rows.shape[1:])}"
                refuse(f"{side}_dim", problem, f"--set {WHERE}.{side}_dim={rows.shape[-1]}")
        elif (rows.dtype == torch.uint8) != (kind == TOKENS):
            words, there, other = ("bytes", BYTE_PAIRS, TEXT) if kind == TOKENS else (BYTE_PAIRS, "bytes", TOKENS)
            problem = f"the task reads {name} as {words}, but {item.id} has {there}"
            refuse(side, problem, f"--set {WHERE}.{side}={other}")
        most = getattr(self, f"{side}_most")
        if kind != TEXT:
            return rows[:most]
        if len(rows) > most:
            problem = f"the text of {item.id} has {len(rows)} tokens, the model allows {most}"
            refuse(f"{side}_most", problem, f"--set data.options.context={most}")
        if int(rows.max()) >= self.vocabulary:
            problem = f"a token of {item.id} is {int(rows.max())}, the model knows {self.vocabulary:,}"
            remedy = f"use the data.options.merges of the model's training, or --set {WHERE}.vocabulary=49408"
            refuse("vocabulary", problem, remedy)
        return rows

    def _class(self, item: ItemTensors) -> Tensor:
        """Return the number of an item's class."""
        number = item.values.get(CLASS, torch.tensor(UNKNOWN)).long().reshape(())
        if not UNKNOWN <= int(number) < len(self.names):
            problem = f"{item.id} is of class {int(number)}, but there are names for {len(self.names)}"
            refuse("classes", problem, "use the same classes as data.options.classes")
        return number

    def embed(self, model: nn.Module, batch: PairBatch) -> dict[str, Tensor]:
        """Return the vectors of both sides of each item, and the logits of its class; no item sees another."""
        left_BD, right_BD, logits_BC = model(batch)
        classes = {} if logits_BC is None else {CLASSES: logits_BC}
        if classes and batch.class_B is not None:
            classes[CLASS] = batch.class_B
        elif classes and model.training:
            problem = "the task learns classes, but no item has one"
            refuse("class_weight", problem, "--set data.options.label=COLUMN, and set data.options.classes")
        return {LEFT: left_BD, RIGHT: right_BD, **classes}

    def contrast(self, model: nn.Module, embedded: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor | float]]:
        """Return the cross entropy of finding the right from the left and back, the mean of both, over all items.

        A second term is that of classes, over the items whose class is known.
        """
        left_BD, right_BD = (at_least_single(embedded[side]) for side in SIDES)
        with torch.autocast(left_BD.device.type, enabled=False):
            logits_BB = model.scale() * left_BD @ right_BD.T  # type: ignore[operator]  # it is Towers
            missed_B = found_both_ways(logits_BB)
        terms: dict[str, tuple[Tensor, Tensor | float]] = {PAIRS: (missed_B.sum(), float(len(left_BD)))}
        if CLASS in embedded:
            logits_BC, class_B = at_least_single(embedded[CLASSES]), embedded[CLASS]
            missed = functional.cross_entropy(logits_BC, class_B, ignore_index=UNKNOWN, reduction="sum")
            terms[CLASSES] = (self.class_weight * missed, (class_B != UNKNOWN).sum().to(missed.dtype))
        return terms

    def loss(self, model: nn.Module, batch: PairBatch) -> dict[str, tuple[Tensor, Tensor | float]]:
        """Return the loss of a single batch: the step's loss where it is the only one."""
        return self.contrast(model, self.embed(model, batch))

    def outputs(self, model: nn.Module, batch: PairBatch) -> dict[str, Tensor]:
        """Return the vectors of each item, their similarity, and its predicted classes.

        Of a known class, also its place among all: 0 if the prediction is right.
        """
        embedded = self.embed(model, batch)
        found = {side: embedded[side] for side in SIDES}
        found["similarity"] = torch.cosine_similarity(embedded[LEFT], embedded[RIGHT])
        if self.names:
            unknown_B = torch.full((len(found[LEFT]),), UNKNOWN)
            found[LABEL] = unknown_B if batch.class_B is None else batch.class_B
        if CLASSES in embedded:
            found |= _predicted_class(CLASS, embedded[CLASSES], batch.class_B)
        if self.templates:
            found |= _predicted_class(
                ZERO_SHOT, embedded[LEFT] @ self.prompts.vectors(model, embedded[LEFT]).T, batch.class_B
            )
        return found

    def metrics(self, outputs: Mapping[str, Sequence[Any]]) -> dict[str, float]:
        """Return how often an item's other side is the nearest, or among the nearest 5 or 10, of all in the split.

        And its mean rank, from 1. Among ties every place is equally likely, so towers whose vectors are all the same
        score as chance does. Where classes are predicted, also how often the true one is first, or among the first 5.
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
        class_N = torch.tensor([int(number) for number in outputs.get(LABEL, ())])
        if self.linear_probe and (places := (class_N != UNKNOWN).nonzero()[:, 0].tolist()):
            vector_ND = torch.from_numpy(np.stack([np.asarray(outputs[LEFT][place]) for place in places]))
            figures["linear_probe"] = probe_accuracy(self._probed, LEFT, LABEL, vector_ND, class_N[places])
        return figures

    def publish(self, folder: Path, outputs: Mapping[str, Any], items: Iterable[Item], reading: Any) -> list[Path]:  # noqa: ARG002 - the protocol has it
        """Write the nearest items to each side, and the names of predicted classes."""
        classes = [way for way in (CLASS, ZERO_SHOT) if way in outputs]
        return write_nearest(folder, outputs, SIDES, dict.fromkeys(classes, self.names), reading)

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
        real_BL = torch.ones(items, 1 + length, dtype=torch.bool) if items > 1 else None  # one item needs no padding
        if kind == TOKENS:
            return Rows(torch.randint(BYTES, (items, length)), real_BL)
        return Rows(torch.randn(items, length, getattr(self, f"{side}_dim")), real_BL)


def _predicted_class(way: str, logits_BC: Tensor, class_B: Tensor | None) -> dict[str, Tensor]:
    """Return the predicted class of each item, and the place of the true one; among ties the middle."""
    found = {way: logits_BC.argmax(-1)}
    if class_B is None:
        return found
    own_B1 = logits_BC.gather(1, class_B.clamp(min=0)[:, None])
    place_B = (logits_BC > own_B1).sum(1) + ((logits_BC == own_B1).sum(1) - 1) / 2
    return found | {f"{way}_{PLACE}": place_B.masked_fill(class_B == UNKNOWN, math.nan)}
