"""Shared parts of tasks: checks of options, peaks of spectra, attention, padding, published weights, nearest vectors.

The search of vectors by cosine is exact, with a block of each side in memory at a time. Shapes there: N vectors that
are asked for, M among which is looked, B and C of a block, D numbers of one, T the nearest.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from pipeline.encoder.published_weights import Form
from pipeline.errors import ConfigError
from pipeline.files import csv_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

    from pipeline.training.items.batch import ItemTensors

    Floats = NDArray[np.float32]
    Places = NDArray[np.int64]

WHERE = "train.options"
T = TypeVar("T")


def refuse(option: str, problem: str, remedy: str = "") -> NoReturn:
    """Raise ConfigError at `train.options.OPTION`."""
    raise ConfigError(problem, where=f"{WHERE}.{option}", remedy=remedy)


def require(is_good: bool, task: object, name: str, must: str) -> None:  # noqa: FBT001 - its subject
    """Refuse an option's value unless `is_good`."""
    if not is_good:
        refuse(name, f"{name} is {getattr(task, name)}: it must be {must}")


def at_least(task: object, least: Mapping[str, float]) -> None:
    """Refuse an option that is below the least it may be, or no finite number."""
    for name, lowest in least.items():
        require(_number(task, name) >= lowest, task, name, f"{lowest} or more")


def above_zero(task: object, names: Iterable[str]) -> None:
    """Refuse an option that is 0 or below, or no finite number."""
    for name in names:
        require(_number(task, name) > 0, task, name, "more than 0")


def dropout_of(task: object) -> None:
    """Refuse a dropout outside [0, 1)."""
    require(0 <= _number(task, "dropout") < 1, task, "dropout", "from 0 to below 1")


def one_of(task: object, choices: Mapping[str, Sequence[object]]) -> None:
    """Refuse an option that is none of its choices."""
    for name, known in choices.items():
        if (value := getattr(task, name)) not in known:
            problem = f"{name} is {value!r}: it must be {', '.join(map(str, known))}"
            refuse(name, problem, f"--set {WHERE}.{name}={known[0]}")


def divided(width: int, heads: int, option: str = "heads") -> None:
    """Refuse a number of heads that does not divide the features."""
    if width % heads:
        problem = f"{width} features cannot be divided among {heads} heads"
        refuse(option, problem, f"--set {WHERE}.{option}={math.gcd(width, heads)}")


def values_of(item: ItemTensors, names: Sequence[str], remedy: str) -> list[Tensor]:
    """Return arrays of an item; refuse one that lacks any."""
    if not all(name in item.values for name in names):
        arrays = ", ".join(sorted(item.values)) or "no arrays"
        problem = f"the task reads {' and '.join(names)}; {item.id} has {arrays}"
        raise ConfigError(problem, where="data.reader", remedy=remedy)
    return [item.values[name] for name in names]


def part_of(task: Any, kind: type[T]) -> T:
    """Return the fields of a task that one of its base classes has, such as its network's sizes."""
    return kind(**{field.name: getattr(task, field.name) for field in fields(kind)})  # type: ignore[arg-type]


@dataclass(frozen=True)
class OriginalForm(Form):
    """Names of a system whose weights need a network that behaves as theirs, and what else its files hold."""

    system: str = ""
    as_published: bool = True  # whether the network behaves like the original
    constants: Callable[[], Mapping[str, Tensor]] = dict  # by their names

    def read(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors under our names, without those that are no weights; refuse them for another network."""
        self._refuse_mended()
        kept = (name for name in tensors if not any(fnmatchcase(name, pattern) for pattern in self.left))
        return super().read({name: tensors[name] for name in kept})

    def write(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors under their names with their constants; refuse those of another network."""
        self._refuse_mended()
        # exact names, no patterns: `head.*` may be lacking in a file, but is written where a model has it
        own = {name: tensor for name, tensor in tensors.items() if name not in self.fresh}
        return super().write(own) | {self.prefix + name: tensor for name, tensor in self.constants().items()}

    def _refuse_mended(self) -> None:
        if not self.as_published:
            problem = f"weights of {self.system} work only with the published network"
            refuse("as_published", problem, f"--set {WHERE}.as_published=true")


def _number(task: object, name: str) -> float:
    """Return an option's value; -inf where it is no finite number."""
    value: float = getattr(task, name)
    return value if isinstance(value, int | float) and math.isfinite(value) else -math.inf


MZ, INTENSITY = "peaks.mz", "peaks.intensity"


def most_intense(item: ItemTensors, most: int) -> tuple[Tensor, Tensor]:
    """Return m/z and intensity of the `most` most intense peaks, in their order; ties go to the first."""
    mz_P, intensity_P = values_of(item, (MZ, INTENSITY), "use a reader of spectra")
    return highest(mz_P.float(), intensity_P.float(), most)


def highest(mz_P: Tensor, intensity_P: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return the `most` most intense of some peaks, in their order; ties go to the first."""
    if len(mz_P) > most:
        kept = intensity_P.argsort(descending=True, stable=True)[:most].sort().values
        mz_P, intensity_P = mz_P[kept], intensity_P[kept]
    return mz_P, intensity_P


def labels_of(values_BK: Tensor, is_known_BK: Tensor, is_labelled: Iterable[bool]) -> list[Tensor]:
    """Return the labels of each item, NaN where one is not known; of no size where the item has none."""
    return where_known(torch.where(is_known_BK, values_BK, torch.nan).cpu(), is_labelled)


def where_known(values: Iterable[Tensor], is_known: Iterable[bool]) -> list[Tensor]:
    """Return the values of each item; of no size where they are not known."""
    return [value if known else value[:0] for value, known in zip(values, is_known, strict=True)]


def labelled(predicted: Iterable[Any], true: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield prediction and truth of each item that has labels."""
    return ((predicted_K, true_K) for predicted_K, true_K in zip(predicted, true, strict=True) if np.size(true_K))


def known_figures(figures: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that are defined."""
    return {name: value for name, value in figures.items() if not math.isnan(value)}


@contextmanager
def task_table(path: Path, names: Iterable[str], *, by: str = ",") -> Iterator[Callable[[Iterable[Any]], Any]]:
    """Yield a function that adds a row to a table, which appears when complete; unknown cells are empty."""
    with csv_table(path, names, by) as add:
        yield lambda row: add(map(_cell, row))


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.4f}"
    return "" if value is None else str(value)


def at_least_single(values: Tensor) -> Tensor:
    """Convert to float32, or keep a higher precision."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def means(values_ED: Tensor, index_E: Tensor, count: int) -> Tensor:
    """Return the means of rows by index; 0 where there are none."""
    sums_ND = values_ED.new_zeros(count, values_ED.shape[1]).index_add(0, index_E, values_ED)
    number_N = values_ED.new_zeros(count).index_add(0, index_E, values_ED.new_ones(len(index_E)))
    return sums_ND / number_N.clamp(min=1).unsqueeze(-1)


class AttentionLayer(nn.Module):
    """A pre-norm transformer layer over an item's rows; where it is causal, a row sees those before it."""

    def __init__(
        self,
        width: int,
        heads: int,
        inner: int,
        dropout: float,
        activation: Callable[[Tensor], Tensor],
        *,
        bias: bool = False,
        is_causal: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.activation, self.is_causal = heads, activation, is_causal
        self.drop = nn.Dropout(dropout)
        self.before_attention, self.before_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width, bias=bias)
        self.up, self.down = nn.Linear(width, inner, bias=bias), nn.Linear(inner, width, bias=bias)

    def forward(self, x_BLD: Tensor, real_BL: Tensor | None = None) -> Tensor:
        """Return the rows' new features; without `real_BL` there is no padding."""
        x_BLD = x_BLD + self.drop(self._attended(self.before_attention(x_BLD), real_BL))
        fed_BLD = self.down(self.activation(self.up(self.before_feed(x_BLD))))
        changed_BLD: Tensor = x_BLD + self.drop(fed_BLD)
        return changed_BLD

    def _attended(self, x_BLD: Tensor, real_BL: Tensor | None) -> Tensor:
        query, key, value = self.mix(x_BLD).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        # The card's flash kernel takes no mask: a batch with padding runs in the memory-efficient one or cuDNN's, which
        # keep as much for backward. One item alone, and items of one length, have no mask, and flash where it can.
        mask = None if real_BL is None else real_BL[:, None, None, :]
        dropout = self.drop.p if self.training else 0.0
        mixed_BHLD = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=self.is_causal
        )
        attended_BLD: Tensor = self.out(mixed_BHLD.transpose(1, 2).flatten(2))
        return attended_BLD


def padded_rows(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Pad the rows of items with zeros to [B, L, …]; also return the mask of real rows, None where all are."""
    lengths = [len(item_rows) for item_rows in rows]
    padded = nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    if min(lengths) == max(lengths):
        return padded, None
    return padded, torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)


def found_both_ways(logits_BB: Tensor) -> Tensor:
    """Return each item's cross entropy (InfoNCE): of finding its right side from its left and back, the mean [B]."""
    return (logits_BB.logsumexp(0) + logits_BB.logsumexp(1)) / 2 - logits_BB.diagonal()


ALIKE = 1e-6  # similarities and distances no further apart are ties


def nearer_and_ties(above: NDArray[Any]) -> tuple[Any, Any]:
    """Count along the last axis others that are nearer than the true one, and ties; NaN counts as nearer.

    `above` is how much nearer each of the others is.
    """
    return (~(above <= ALIKE)).sum(-1), (np.abs(above) <= ALIKE).sum(-1)


BLOCK = 4096  # vectors at a time, of both sides


class Vectors(Protocol):
    """Vectors of equal length by their place."""

    def __len__(self) -> int: ...
    def __getitem__(self, place: int) -> Any: ...


def first_of(described: Iterable[tuple[str, T]], outputs: Any) -> dict[str, T]:
    """Return the descriptions of the ids of outputs, the first of equal ids, as a scan takes it."""
    ids, found = {outputs.id(place) for place in range(len(outputs))}, dict[str, T]()
    for name, about in described:
        if name in ids:
            found.setdefault(name, about)
    return found


def unit_rows(vectors: Vectors, places: Sequence[int]) -> Floats:
    """Return some vectors at length 1 [N, D]; one of no length stays."""
    row_ND: Any
    if isinstance(vectors, np.ndarray):
        row_ND = vectors[places[0] : places[-1] + 1] if isinstance(places, range) else vectors[list(places)]
        row_ND = np.asarray(row_ND, np.float32)
    else:
        row_ND = np.stack([np.asarray(vectors[place], np.float32) for place in places])
    length_N1 = np.linalg.norm(row_ND, axis=1, keepdims=True)
    unit_ND: Floats = (row_ND / np.where(length_N1 > 0, length_N1, 1)).astype(np.float32, copy=False)
    return unit_ND


def nearest_vectors(
    queries: Vectors, library: Vectors, most: int, asked: Sequence[int] | None = None
) -> Iterator[tuple[Places, Floats]]:
    """Yield for each query, or each `asked` place, the places of the nearest by cosine, and the cosines [T].

    Every pair is compared, and the nearest come first. NaN cosines rank last.
    """
    most = min(most, len(library))
    asked = range(len(queries)) if asked is None else asked
    for start in range(0, len(asked), BLOCK):
        query_BD = unit_rows(queries, asked[start : start + BLOCK])
        place_BT, cosine_BT = np.zeros((len(query_BD), 0), np.int64), np.zeros((len(query_BD), 0), np.float32)
        for first in range(0, len(library), BLOCK):
            block = range(first, min(first + BLOCK, len(library)))
            cosine_BC = np.nan_to_num(query_BD @ unit_rows(library, block).T, nan=-np.inf)
            place_BC = np.tile(np.array(block, np.int64), (len(query_BD), 1))
            place_BC, cosine_BC = np.concatenate([place_BT, place_BC], 1), np.concatenate([cosine_BT, cosine_BC], 1)
            order_BT = np.argsort(-cosine_BC, axis=1, kind="stable")[:, :most]
            place_BT, cosine_BT = (np.take_along_axis(table, order_BT, 1) for table in (place_BC, cosine_BC))
        yield from zip(place_BT, cosine_BT, strict=True)
