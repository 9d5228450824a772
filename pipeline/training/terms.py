"""What a loss returns: a sum and a weight for each term; what is no such thing is refused with what to change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from pipeline.errors import ConfigError
from pipeline.memory.governed import quotient

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    Terms = Mapping[str, tuple[Tensor, Tensor | float]]

SEE = "what a task must have: pipeline/protocol.py"


def checked(terms: Terms) -> Terms:
    """Return the terms of a loss; others than sums and weights are refused."""
    for name, term in _items_of(terms):
        _check_term(name, term)
    return terms


def _items_of(terms: Any) -> list[tuple[Any, Any]]:
    if not isinstance(terms, Mapping) or not terms:
        got = "a tensor" if isinstance(terms, torch.Tensor) else type(terms).__name__ if terms else "nothing"
        what = f"loss() must return {{term: (sum, weight)}} with at least one term, got {got}"
        raise ConfigError(what, where="train.task", remedy=SEE)
    return list(terms.items())


def _check_term(name: Any, term: Any) -> None:
    """Refuse what is no sum and weight: said at once, it spares a riddle later."""
    if not isinstance(term, tuple | list) or len(term) != 2:
        wrong = f"{type(term).__name__}" + (f" of {len(term)}" if isinstance(term, tuple | list) else "")
        raise ConfigError(f"loss(): {name!r} must be (sum, weight), got {wrong}", where="train.task", remedy=SEE)
    total, weight = term
    if not isinstance(total, torch.Tensor) or total.numel() != 1:
        got = f"shape {list(total.shape)}" if isinstance(total, torch.Tensor) else type(total).__name__
        what = f"loss(): the sum of {name!r} must be a tensor with one number, got {got}"
        raise ConfigError(what, where="train.task", remedy=SEE)
    if torch.is_grad_enabled() and not total.requires_grad:
        what = f"loss(): the sum of {name!r} does not depend on any parameter: nothing would be learned from it"
        raise ConfigError(what, where="train.task", remedy="leave the term out, or do not detach it")
    if not isinstance(weight, torch.Tensor | float | int) or (isinstance(weight, torch.Tensor) and weight.numel() != 1):
        what = f"loss(): the weight of {name!r} must be one number, got {type(weight).__name__}"
        raise ConfigError(what, where="train.task", remedy=SEE)


def summed(many: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums by name."""
    sums: dict[str, Any] = {}
    for one in many:
        for name, value in one.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums


def sum_of(values: Iterable[Tensor]) -> Tensor:
    """Return the sum of at least one tensor."""
    first, *others = values
    for one in others:
        first = first + one
    return first


def whole_loss(terms: Terms) -> Tensor:
    """Return what to go back from where terms are of all items of a step."""
    return sum_of(quotient(total, weight) for total, weight in terms.values())
