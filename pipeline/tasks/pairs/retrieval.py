"""What is asked of matching pairs: what is nearest to what, and which class, told by texts alone, an item is of.

nearest_right.csv    a line an item: its texts, classes where they are known, and the nearest right sides with cosines
nearest_left.csv     the same the other way

Two blocks of items and their cosines are held at a time. A class told by texts is the mean of what a text tower makes
of it in prompts. Shapes: N items of a split, K and M items of two blocks, D features, T nearest ones; C classes, T
templates, K shared features.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from pipeline.errors import ConfigError
from pipeline.readers.byte_pairs import BytePairs, TooLong
from pipeline.tasks.pairs.pair_towers import TextBatch
from pipeline.tasks.task_parts import WHERE, at_least_single, first_of, nearest_vectors, padded_rows, task_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    Floats = NDArray[np.float32]
    Counts = NDArray[np.int64]
    Outputs = Mapping[str, Any]
    Sides = tuple[str, str]
    Classes = Mapping[str, Sequence[str]]  # their names, by output
    Texts = Mapping[str, Mapping[str, str]]  # of both sides, by id

TOLD = 5  # of the nearest, in a table
BLOCK = 2048  # items whose embeddings are held at once, twice
ALIKE = 1e-6  # cosines no further apart are ties


def found_at(most: int, nearer_N: Counts, tied_N: Counts) -> float:
    """Return how often a true one is among the nearest so many; among ties every place is equally likely."""
    return float(np.clip((most - nearer_N) / (1 + tied_N), 0, 1).mean())


def pair_places(left: Sequence[Any], right: Sequence[Any]) -> list[tuple[Counts, Counts]]:
    """Count for each left the other rights that are nearer than its own, and the ties; likewise for each right.

    NaN counts as nearer than anything.
    """
    pairs = zip(_blocks(left), _blocks(right), strict=True)
    own_N = np.concatenate([(left_KD * right_KD).sum(1) for (_, left_KD), (_, right_KD) in pairs])
    ways = [(np.zeros(len(own_N), np.int64), np.zeros(len(own_N), np.int64)) for _ in range(2)]
    for rows, left_KD in _blocks(left):
        for columns, right_MD in _blocks(right):
            cosine_KM = left_KD @ right_MD.T
            if rows == columns:
                np.fill_diagonal(cosine_KM, -np.inf)  # an item's own other side is not counted
            _count(ways[0], rows, cosine_KM, own_N[rows])
            _count(ways[1], columns, cosine_KM.T, own_N[columns])
    return ways


def _count(way: tuple[Counts, Counts], rows: slice, cosine_KM: Floats, own_K: Floats) -> None:
    """Add a block's counts: items nearer than the own other side, and ties."""
    above_KM = cosine_KM - own_K[:, None]
    is_below_KM = above_KM < -ALIKE
    is_tied_KM = np.abs(above_KM) <= ALIKE
    is_other_KM = cosine_KM != -np.inf
    way[0][rows] += (~is_below_KM & ~is_tied_KM & is_other_KM).sum(1)
    way[1][rows] += is_tied_KM.sum(1)


def _blocks(vectors: Sequence[Any]) -> Iterator[tuple[slice, Floats]]:
    """Yield the vectors in blocks of items, each with its slice."""
    for start in range(0, len(vectors), BLOCK):
        rows = slice(start, min(start + BLOCK, len(vectors)))
        yield rows, np.stack([np.asarray(vectors[place], np.float32) for place in range(rows.start, rows.stop)])


def write_nearest(folder: Path, outputs: Outputs, sides: Sides, classes: Classes, described: Any) -> list[Path]:
    """Write a table for each side.

    `classes` are the names of those that the first side tells, by output. `described` is the reader, whose `headers()`
    give the texts of both sides by id, or anything else.
    """
    texts = first_of(described.headers(), outputs[sides[0]]) if hasattr(described, "headers") else {}
    names = tuple(next(iter(texts.values()), {}))  # of the left side's text, and of the right side's
    paths = [folder / f"nearest_{other}.csv" for other in reversed(sides)]
    _write(paths[0], outputs, sides, classes, texts, names)
    _write(paths[1], outputs, sides[::-1], {}, texts, names[::-1])
    return paths


def _write(path: Path, outputs: Outputs, way: Sides, classes: Classes, texts: Texts, names: tuple[str, ...]) -> None:
    queries, others = (outputs[side] for side in way)
    most = min(TOLD, len(others))
    each = ("nearest", *names[1:], "cosine")
    columns = [f"{name}_{rank}" for rank in range(1, 1 + most) for name in each]
    with task_table(path, ["id", *names, "own_cosine", *classes, *columns]) as add:
        for place, (numbers, cosines) in enumerate(nearest_vectors(queries, others, most)):
            own = [queries.id(place), *(texts.get(queries.id(place), {}).get(name) for name in names)]
            of_classes = [of[int(outputs[name][place])] for name, of in classes.items()]
            found = [
                cell
                for id_, cosine in zip(map(others.id, numbers.tolist()), cosines.tolist(), strict=True)
                for cell in (id_, *(texts.get(id_, {}).get(name) for name in names[1:]), cosine)
            ]
            add([*own, float(outputs["similarity"][place]), *of_classes, *found])


AT_ONCE = 64  # prompts
_MADE: WeakKeyDictionary[nn.Module, tuple[Any, Tensor]] = WeakKeyDictionary()  # with what it was made of


class _Sides(NamedTuple):
    """A batch of texts alone."""

    left: None
    right: TextBatch


@dataclass(frozen=True)
class Prompts:
    """The names of classes in templates, and the vectors that a model makes of them."""

    names: tuple[str, ...]
    templates: tuple[str, ...]
    merges: str
    most: int  # tokens

    def check(self, vocabulary: int) -> None:
        """Refuse templates without a place for the name, and prompts that the model cannot read."""
        for template in self.templates:
            if "{}" not in template:
                problem = f"the template {template!r} has no {{}} for the class name"
                raise ConfigError(problem, where=f"{WHERE}.templates", remedy='such as "a photo of a {}."')
        largest = max(max(tokens) for tokens in self._tokens())
        if largest >= vocabulary:
            problem = f"a token of a prompt is {largest}, the model knows {vocabulary:,}"
            raise ConfigError(problem, where=f"{WHERE}.merges", remedy="use the reader's file")

    def _tokens(self) -> list[list[int]]:
        """Return the tokens of every class in every template, class by class."""
        pairs = BytePairs.read(Path(self.merges) if self.merges else None, where=f"{WHERE}.merges")
        texts = [template.replace("{}", name) for name in self.names for template in self.templates]
        try:
            return [pairs.encoded(text, self.most) for text in texts]
        except TooLong as error:
            raise ConfigError(f"a prompt is too long: {error}", where=f"{WHERE}.templates") from error

    def vectors(self, model: nn.Module, like: Tensor) -> Tensor:
        """Return the vector of each class [C, K]; made once, until the model changes."""
        device = like.device
        stamp = (self, device, like.dtype, *((id(one), one._version) for one in model.parameters()))  # noqa: SLF001 - no other name counts changes in place
        made = _MADE.get(model)
        if made is None or made[0] != stamp:
            made = _MADE[model] = (stamp, self._vectors(model, device).to(like.dtype))
        return made[1]

    def _vectors(self, model: nn.Module, device: torch.device) -> Tensor:
        tokens = [torch.tensor(numbers) for numbers in self._tokens()]
        parts = [_read(model, tokens[start : start + AT_ONCE], device) for start in range(0, len(tokens), AT_ONCE)]
        mean_CK = torch.cat(parts).view(len(self.names), len(self.templates), -1).mean(1)
        return functional.normalize(mean_CK, dim=-1)


def _read(model: nn.Module, tokens: list[Tensor], device: torch.device) -> Tensor:
    ends_B = torch.tensor([len(numbers) - 1 for numbers in tokens], device=device)
    texts = TextBatch(padded_rows(tokens)[0].to(device), ends_B)
    vectors_BK: Tensor = model(_Sides(None, texts))[1]
    return at_least_single(vectors_BK)
