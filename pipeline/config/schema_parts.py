"""The types of settings, such as sizes and times as people write them: 512MiB, 24G, 01:30:00, 90m."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    PlainValidator,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError, core_schema

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

WANTS = "wants"  # the type of the errors raised here; their message completes "wants ..., got ..."
SMALLEST_MEMORY_BYTES = 16 << 20

_PLAIN = ("string", "number", "boolean", "null")  # as JSON calls them
_UNITS = "KMGTP"
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGTP])(?:i?B)?", re.IGNORECASE | re.ASCII)
_CLOCK = re.compile(r"(?:(\d{1,5})-)?(\d{1,5}):([0-5]\d):([0-5]\d)", re.ASCII)
_SPAN = re.compile(r"(\d{1,9}) ?([smhd])", re.IGNORECASE | re.ASCII)
_BUDGET = re.compile(r"(\d{1,9}(?:\.\d{1,6})?) ?(gpu|core)-?hours?", re.IGNORECASE | re.ASCII)
_STEPS = re.compile(r"([1-9]\d{0,8}) steps?", re.ASCII)
_SPAN_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_size(value: object, *, at_least: int = 1) -> int:
    """Return bytes; as in Slurm every unit is a power of 1024, and a bare number is bytes."""
    size = _bytes(value)
    if size is None:
        raise _wants("a size such as 512MiB, 24G or a number of bytes")
    if size < at_least:
        raise _wants(f"at least {format_size(at_least)} (a number without a unit is bytes)")
    return size


def format_size(size: int) -> str | int:
    """Write bytes in the largest unit that is exact; `parse_size` reads it back."""
    for power in range(len(_UNITS), 0, -1):
        if size and size % (1 << 10 * power) == 0:
            return f"{size >> 10 * power}{_UNITS[power - 1]}iB"
    return size


def parse_duration(value: object) -> int:
    """Return seconds; a bare number is refused, because Slurm would read minutes."""
    seconds = _seconds(value) if isinstance(value, str) else 0
    if seconds < 1:
        raise _wants("a time such as 01:30:00, 2-12:00:00, 90m or 2h")
    return seconds


def format_duration(seconds: int) -> str:
    """Write seconds as Slurm does: D-HH:MM:SS."""
    days, remainder = divmod(seconds, 86400)
    clock = f"{remainder // 3600:02}:{remainder // 60 % 60:02}:{remainder % 60:02}"
    return f"{days}-{clock}" if days else clock


def parse_option(value: object) -> object:
    """Return an argument for a class of the user: text, a number, true, false, null, or a list of these."""
    if isinstance(value, list | tuple):
        if all(map(_is_plain, value)):
            return tuple(value)
    elif _is_plain(value):
        return value
    raise _wants("text, a number, true, false, null, or a list of these")


def parse_budget(value: object) -> str:
    """Return a budget as `500 gpu-hours` or `200 core-hours`."""
    match = _BUDGET.fullmatch(value) if isinstance(value, str) else None
    if match is None or float(match[1]) <= 0:
        raise _wants("hours of GPUs or cores, such as '500 gpu-hours' or '2000 core-hours'")
    return f"{match[1]} {match[2].lower()}-hours"


def parse_line(value: str) -> str:
    """Return a text that a script can hold in one line."""
    if not value.isprintable():
        raise _wants("one line of printable characters")
    return value


def _bytes(value: object) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return None
    return int(float(match[1]) * (1 << 10 * (_UNITS.index(match[2].upper()) + 1)))


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float)


def _seconds(text: str) -> int:
    if clock := _CLOCK.fullmatch(text):
        days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if span := _SPAN.fullmatch(text):
        return int(span[1]) * _SPAN_S[span[2].lower()]
    return 0


def _wants(what: str) -> PydanticCustomError:
    return PydanticCustomError(WANTS, "{what}", {"what": what})


@dataclass(frozen=True, eq=False)  # aliases are hashed, and schemas cannot be
class Written:
    """How the values of a type are written: what reads one, their JSON schemas, and what else may stand there."""

    read: Callable[[Any], Any]  # None: it is no such value
    schemas: tuple[Mapping[str, Any], ...]
    wants: str = ""  # completes the error where `read` raises none
    show: Callable[[Any], Any] = lambda value: value
    auto: bool = False
    null: bool = False

    def __get_pydantic_core_schema__(self, _source: object, _handler: object) -> core_schema.CoreSchema:
        shown = core_schema.plain_serializer_function_ser_schema(self._shown, when_used="json")
        return core_schema.no_info_plain_validator_function(self._read, serialization=shown)

    def __get_pydantic_json_schema__(self, _schema: object, _handler: object) -> dict[str, Any]:
        schemas = [*self.schemas, *([{"const": "auto"}] * self.auto), *([{"type": "null"}] * self.null)]
        return {"anyOf": schemas} if len(schemas) > 1 else dict(schemas[0])

    def _is_other(self, value: object) -> bool:
        return (self.auto and value == "auto") or (self.null and value is None)

    def _read(self, value: object) -> Any:
        if self._is_other(value):
            return value
        if (found := self.read(value)) is None:
            raise _wants(self.wants)
        return found

    def _shown(self, value: Any) -> Any:
        return value if self._is_other(value) else self.show(value)


def _whole(value: object, *, at_least: int = 1) -> int | None:
    return value if type(value) is int and value >= at_least else None


def _whole_or_part(value: object) -> int | float | None:
    return value if isinstance(value, float) and 0 < value < 1 else _whole(value)


def _interval(value: object) -> int | float | str | None:
    steps = _STEPS.fullmatch(value) if isinstance(value, str) else None
    return f"{steps[1]} steps" if steps else _whole_or_part(value)


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _names(value: object) -> tuple[str, ...] | None:
    names = tuple(value) if isinstance(value, list | tuple) else ()
    are_good = all(isinstance(name, str) and name for name in names) and len({*map(str, names)}) == len(names)
    return names if names and are_good else None


def _node_folder(value: object) -> str | None:
    is_good = isinstance(value, str) and value.startswith(("/", "$", "~")) and "\0" not in value
    return value if is_good else None  # type: ignore[return-value]


_COUNT, _COUNT_OR_NONE = ({"type": "integer", "minimum": least} for least in (1, 0))
_PART = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}
_SIZE_TEXT = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)? ?[KMGTPkmgtp]([iI]?[bB])?$"}
_TIME_TEXT = {"type": "string", "pattern": r"^(([0-9]+-)?[0-9]+:[0-5][0-9]:[0-5][0-9]|[0-9]+ ?[smhdSMHD])$"}
_BUDGET_TEXT = {"type": "string", "pattern": "^[0-9]+([.][0-9]+)? ?(gpu|core)-?hours?$"}
_NAMES = {"type": "array", "items": {"type": "string"}, "minItems": 1, "uniqueItems": True}
_MEMORY, _IN_BYTES = partial(parse_size, at_least=SMALLEST_MEMORY_BYTES), (_COUNT, _SIZE_TEXT)

Size: TypeAlias = Annotated[int, Written(parse_size, _IN_BYTES, show=format_size)]
SizeOrNone: TypeAlias = Annotated[
    int, Written(partial(parse_size, at_least=0), (_COUNT_OR_NONE, _SIZE_TEXT), show=format_size)
]
Memory: TypeAlias = Annotated[int, Written(_MEMORY, _IN_BYTES, show=format_size)]
AutoMemory: TypeAlias = Annotated[int | Literal["auto"], Written(_MEMORY, _IN_BYTES, show=format_size, auto=True)]
AutoCount: TypeAlias = Annotated[
    int | Literal["auto"], Written(_whole, (_COUNT,), "a whole number from 1, or auto", auto=True)
]
AutoCountOrNone: TypeAlias = Annotated[
    int | Literal["auto"],
    Written(partial(_whole, at_least=0), (_COUNT_OR_NONE,), "a whole number from 0, or auto", auto=True),
]
AutoFlag: TypeAlias = Annotated[
    bool | Literal["auto"], Written(_flag, ({"type": "boolean"},), "true, false or auto", auto=True)
]
AutoNames: TypeAlias = Annotated[
    tuple[str, ...] | Literal["auto"],
    Written(_names, (_NAMES,), "auto, or a list of different names, such as [main, NAME]", list, auto=True),
]
Duration: TypeAlias = Annotated[int, Written(parse_duration, (_TIME_TEXT,), show=format_duration)]
Budget: TypeAlias = Annotated[str, Written(parse_budget, (_BUDGET_TEXT,))]
NodeFolder: TypeAlias = Annotated[
    str | None,
    Written(
        _node_folder,
        ({"type": "string", "pattern": "^[/$~]"},),
        "a folder as a node knows it, such as $TMPDIR or /scratch, or null",
        null=True,
    ),
]
ItemLimit: TypeAlias = Annotated[
    int | float | None,
    Written(_whole_or_part, (_COUNT, _PART), "items such as 1000, a part of all such as 0.25, or null", null=True),
]
Interval: TypeAlias = Annotated[
    int | float | str,
    Written(
        _interval,
        (_COUNT, _PART, {"type": "string", "pattern": "^[1-9][0-9]* steps?$"}),
        "epochs such as 2, a part of one such as 0.25, or '500 steps'",
    ),
]
Option: TypeAlias = Annotated[
    Any,
    PlainValidator(parse_option),
    WithJsonSchema({"anyOf": [{"type": list(_PLAIN)}, {"type": "array", "items": {"type": list(_PLAIN)}}]}),
]


Name: TypeAlias = Annotated[str, StringConstraints(min_length=1)]
Line: TypeAlias = Annotated[Name, AfterValidator(parse_line)]

Conflict: TypeAlias = tuple[str, str]
CONFLICT = "conflict"  # the type of the errors about keys that do not go together


class Section(BaseModel):
    """A frozen part of the configuration; unknown keys are errors, and nothing is converted silently."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @model_validator(mode="after")
    def _keys_go_together(self) -> Self:
        for key, what in self.conflicts():
            raise PydanticCustomError(CONFLICT, "{what}", {"what": what, "key": key})
        return self

    def conflicts(self) -> Iterator[Conflict]:
        """Yield each key that does not go with another, and why."""
        return iter(())
