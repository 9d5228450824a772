"""What is asked of matching pairs: what is nearest to what, and which class, told by texts alone, an item is of.

nearest_right.csv    a line an item: its classes where they are told, and the nearest right sides, each with its cosine
nearest_left.csv     the same the other way

Two blocks of items and their cosines are held at a time. A class told by texts is the mean of what a text tower makes
of it in prompts. Shapes: N items of a split, K and M items of two blocks, D features, T nearest ones; C classes, T
templates, K shared features.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from pipeline.errors import ConfigError
from pipeline.files import replacing
from pipeline.readers.byte_pairs import BytePairs, TooLong
from pipeline.tasks.pairs.pair_towers import TextBatch
from pipeline.tasks.task_parts import WHERE, at_least_single, nearest_vectors, padded_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    Floats = NDArray[np.float32]
    Counts = NDArray[np.int64]

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


def write_nearest(
    folder: Path, outputs: Mapping[str, Any], sides: tuple[str, str], names: Mapping[str, Sequence[str]]
) -> list[Path]:
    """Write a table for each side; `names` are those of the classes that the first side tells, by output."""
    return [
        _write(folder / f"nearest_{other}.csv", outputs, (side, other), names if side == sides[0] else {})
        for side, other in (sides, sides[::-1])
    ]


def _write(path: Path, outputs: Mapping[str, Any], way: tuple[str, str], names: Mapping[str, Sequence[str]]) -> Path:
    side, other = way
    most = min(TOLD, len(outputs[other]))
    columns = [column for rank in range(1, 1 + most) for column in (f"nearest_{rank}", f"cosine_{rank}")]
    with replacing(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["id", "own_cosine", *names, *columns])
        for place, (numbers, cosines) in enumerate(nearest_vectors(outputs[side], outputs[other], most)):
            found = [
                cell
                for number, cosine in zip(numbers.tolist(), cosines.tolist(), strict=True)
                for cell in (outputs[other].id(number), f"{cosine:.4f}")
            ]
            classes = [of[int(outputs[name][place])] for name, of in names.items()]
            rows.writerow([outputs[side].id(place), f"{float(outputs['similarity'][place]):.4f}", *classes, *found])
    return path


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
                problem = f"the template {template!r} has no {{}}, where the name of a class goes"
                raise ConfigError(problem, where=f"{WHERE}.templates", remedy='such as "a photo of a {}."')
        largest = max(max(tokens) for tokens in self._tokens())
        if largest >= vocabulary:
            problem = f"a token of a prompt is {largest}, the model knows {vocabulary:,}"
            raise ConfigError(problem, where=f"{WHERE}.merges", remedy="the file that the reader has")

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
