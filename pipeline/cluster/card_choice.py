"""Which cards a job asks for: of those that its plan fits, the ones on which it ends first.

A request admits cards: those of its partition, of its type (`gpu:a100:1`) and with one of the features of its
constraint. It is made only where the plan fits every card it admits, however the scheduler then picks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.errors import PlanInfeasible

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pipeline.config.schema_cluster import CardSection

_TIE_S = 60.0  # estimates of ends that lie closer than this are no reason to take a larger card
_REMEDY = (
    "pipeline config show   (cluster.slurm.cards: the cards of this cluster; mem, gres and feature tell them apart)"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """One way to ask for cards; what is empty is not named in the request."""

    card: str
    partition: str
    constraint: str
    gpus: int
    seconds: float = 0.0  # how long the job is expected to run on them
    mem_bytes: int = 0  # of the smallest card that it admits; 0: nobody knows

    @property
    def words(self) -> str:
        """Name it for people."""
        name = self.card or self.constraint or ("any GPU" if self.gpus else "no GPU")
        return f"{name} in {self.partition}" if self.partition else name


@dataclass(frozen=True, slots=True)
class Choice:
    """The shape to submit, and why in words."""

    shape: Shape
    start: float | None  # None: the scheduler named none
    why: str


def eligible(cards: Sequence[CardSection], need_bytes: int, gpus: int) -> list[Shape]:
    """Return the requests that admit only cards with so much memory; without any, raise PlanInfeasible."""
    if not cards or not gpus:
        return [Shape("", "", "", gpus)]
    requests = dict.fromkeys((card.partition, card.gres) for card in cards)
    shapes = [_shape(list(_admitted(cards, *request)), *request, need_bytes, gpus) for request in requests]
    fitting = [shape for shape in shapes if shape is not None]
    if not fitting:
        raise PlanInfeasible(_shortage(cards, need_bytes), where="cluster.slurm.cards", remedy=_REMEDY)
    return fitting


def choose_shape(shapes: Sequence[Shape], start_of: Callable[[Shape], float | None], now: float) -> Choice:
    """Return the shape that ends first; of several that end together, the one of the smallest card."""
    starts = {shape: start_of(shape) for shape in shapes}
    ends = {shape: max(start, now) + shape.seconds for shape, start in starts.items() if start is not None}
    first = min(ends.values(), default=0.0)
    together = [shape for shape, end in ends.items() if end <= first + _TIE_S]
    best = min(together or shapes, key=lambda shape: (shape.mem_bytes, ends.get(shape, shape.seconds), shape.words))
    return Choice(best, starts[best], _why(best, ends, together, now))


def _admitted(cards: Iterable[CardSection], partition: str | None, gres: str | None) -> Iterator[CardSection]:
    """Yield the cards that a request gets: one that names no type gets those of every type."""
    return (card for card in cards if card.partition == partition and gres in (None, card.gres))


def _shape(
    admitted: Sequence[CardSection], partition: str | None, gres: str | None, need: int, gpus: int
) -> Shape | None:
    """Return the request, with a constraint where it would admit cards that are too small."""
    constraint = ""
    if any(card.mem < need for card in admitted):
        small = {card.feature for card in admitted if card.mem < need}
        admitted = [card for card in admitted if card.feature is not None and card.feature not in small]
        constraint = "|".join(sorted({str(card.feature) for card in admitted}))
    if not admitted:
        return None
    return Shape(gres or "", partition or "", constraint, gpus, mem_bytes=min(card.mem for card in admitted))


def _shortage(cards: Sequence[CardSection], need_bytes: int) -> str:
    largest = max(cards, key=lambda card: card.mem)
    name = largest.gres or largest.feature or "GPU"
    if largest.mem < need_bytes:
        return f"a GPU needs {_gib(need_bytes)}, and the largest card here, {name}, has {_gib(largest.mem)}"
    return f"a GPU needs {_gib(need_bytes)}: {name} has {_gib(largest.mem)}, but no request tells it from smaller cards"


def _why(best: Shape, ends: dict[Shape, float], together: Sequence[Shape], now: float) -> str:
    if best not in ends:
        return f"{best.words}: the scheduler names no start for any card; the smallest that fits"
    text = f"{best.words}: ends in {_minutes(ends[best] - now)}"
    if len(together) > 1:
        return f"{text}, as {_listed(together, best)}; the smallest of them"
    others = [shape for shape in ends if shape != best]
    if not others:
        return text
    second = min(others, key=lambda shape: (ends[shape], shape.words))
    return f"{text}, before {second.words} in {_minutes(ends[second] - now)}"


def _listed(shapes: Iterable[Shape], best: Shape) -> str:
    return " and ".join(sorted(shape.words for shape in shapes if shape != best))


def _minutes(seconds: float) -> str:
    return f"{max(1, round(seconds / 60))} min"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.1f} GiB"
