"""Retrieval over matching pairs: ranks, tables of the nearest, and zero-shot classification by texts.

nearest_right.csv    a line an item: its texts, classes where they are known, and the nearest right sides with cosines
nearest_left.csv     the same the other way

Two blocks of items and their cosines are held at a time. The vector of a class is the mean of its prompts'
vectors. Shapes: N items of a split, K and M items of two blocks, D features, T nearest ones; C classes, T
templates, K shared features.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from pipeline.errors import ConfigError
from pipeline.readers.byte_pairs import BytePairs, TooLong
from pipeline.store.store import in_chunks
from pipeline.tasks.pairs.pair_towers import PairBatch, TextBatch
from pipeline.tasks.task_parts import (
    WHERE,
    at_least_single,
    first_of,
    nearer_and_ties,
    nearest_vectors,
    padded_rows,
    refuse,
    task_table,
)

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

NEAREST = 5  # of the nearest, in a table
BLOCK = 2048  # items whose embeddings are held at once, twice


def found_at(most: int, nearer_N: Counts, tied_N: Counts) -> float:
    """Return how often a true one is among the `most` nearest; among ties every place is equally likely."""
    return float(np.clip((most - nearer_N) / (1 + tied_N), 0, 1).mean())


def pair_places(left: Sequence[Any], right: Sequence[Any]) -> Counts:
    """Count for each left the other rights that are nearer than its own, and the ties; likewise for each right.

    NaN counts as nearer than anything. The counts are [2 ways, nearer or tied, N].
    """
    pairs = zip(_blocks(left), _blocks(right), strict=True)
    own_N = np.concatenate([(left_KD * right_KD).sum(1) for (_, left_KD), (_, right_KD) in pairs])
    counts = np.zeros((2, 2, len(own_N)), np.int64)
    for rows, left_KD in _blocks(left):
        for columns, right_MD in _blocks(right):
            cosine_KM = left_KD @ right_MD.T
            if rows == columns:
                np.fill_diagonal(cosine_KM, -np.inf)  # an item's own other side is not counted
            for way, own, table in ((0, rows, cosine_KM), (1, columns, cosine_KM.T)):
                # its own side stays out even if its cosine is NaN
                above = np.where(table == -np.inf, -np.inf, table - own_N[own, None])
                counts[way, :, own] += np.stack(nearer_and_ties(above))
    return counts


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
    first = _write(folder, outputs, sides, classes, texts, names)
    return [first, _write(folder, outputs, sides[::-1], {}, texts, names[::-1])]


def _write(folder: Path, outputs: Outputs, way: Sides, classes: Classes, texts: Texts, names: tuple[str, ...]) -> Path:
    queries, others = (outputs[side] for side in way)
    path = folder / f"nearest_{way[1]}.csv"
    each = ("nearest", *names[1:], "cosine")
    columns = [f"{name}_{rank}" for rank in range(1, 1 + min(NEAREST, len(others))) for name in each]

    def about(id_: str, some: Sequence[str]) -> list[str | None]:
        return [id_, *(texts.get(id_, {}).get(name) for name in some)]

    with task_table(path, ["id", *names, "own_cosine", *classes, *columns]) as add:
        for place, (numbers, cosines) in enumerate(nearest_vectors(queries, others, NEAREST)):
            row = [*about(queries.id(place), names), float(outputs["similarity"][place])]
            row += [of[int(outputs[name][place])] for name, of in classes.items()]
            for number, cosine in zip(numbers.tolist(), cosines.tolist(), strict=True):
                row += [*about(others.id(number), names[1:]), cosine]
            add(row)
    return path


AT_ONCE = 64  # prompts
_MADE: WeakKeyDictionary[nn.Module, tuple[Any, Tensor]] = WeakKeyDictionary()  # with the stamp of the weights


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
                refuse("templates", problem, 'such as "a photo of a {}."')
        if (largest := max(map(max, self._tokens()))) >= vocabulary:
            refuse(
                "merges", f"a token of a prompt is {largest}, the model knows {vocabulary:,}", "use the reader's file"
            )

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
        parameters = [(id(weight), weight._version) for weight in model.parameters()]  # noqa: SLF001 - no other name counts changes in place
        stamp = self, like.device, like.dtype, parameters
        if _MADE.get(model, ("",))[0] != stamp:
            vectors = [_text_vectors(model, part, like.device) for part in in_chunks(self._tokens(), AT_ONCE)]
            mean_CK = torch.cat(vectors).view(len(self.names), len(self.templates), -1).mean(1)
            _MADE[model] = stamp, functional.normalize(mean_CK, dim=-1).to(like.dtype)
        return _MADE[model][1]


def _text_vectors(model: nn.Module, tokens: Sequence[list[int]], device: torch.device) -> Tensor:
    ends_B = torch.tensor([len(numbers) - 1 for numbers in tokens], device=device)
    texts = TextBatch(padded_rows(list(map(torch.tensor, tokens)))[0].to(device), ends_B)
    vectors_BK: Tensor = model(PairBatch(None, texts))[1]
    return at_least_single(vectors_BK)
