"""What options of tasks may be: numbers, and not too low."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

WHERE = "train.options"


def at_least(task: object, least: Mapping[str, float]) -> None:
    """Refuse an option that is below the least it may be, or no finite number."""
    for name, lowest in least.items():
        _refuse_unless(_number(task, name) >= lowest, task, name, f"{lowest} or more")


def above_zero(task: object, names: Iterable[str]) -> None:
    """Refuse an option that is 0 or below, or no finite number."""
    for name in names:
        _refuse_unless(_number(task, name) > 0, task, name, "more than 0")


def dropout_of(task: object) -> None:
    """Refuse a dropout of all, or of less than nothing."""
    _refuse_unless(0 <= _number(task, "dropout") < 1, task, "dropout", "from 0 to below 1")


def _number(task: object, name: str) -> float:
    """Return an option's value; what is not finite is below everything."""
    value: float = getattr(task, name)
    return value if math.isfinite(value) else -math.inf


def _refuse_unless(is_good: bool, task: object, name: str, must: str) -> None:  # noqa: FBT001 - it is what it is about
    if not is_good:
        raise ConfigError(f"{name} is {getattr(task, name)}: it must be {must}", where=f"{WHERE}.{name}")
