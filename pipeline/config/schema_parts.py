"""Types of settings, such as sizes and times as people write them: 512MiB, 24G, 01:30:00, 90m."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetPydanticSchema,
    PlainValidator,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError, core_schema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

WANTS = "wants"  # type of errors raised here; their message completes "wants ..., got ..."
SMALLEST_MEMORY_BYTES = 16 << 20

_PLAIN = ("string", "number", "boolean", "null")  # as JSON calls them
_UNITS = "KMGTP"
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGTP])(?:i?B)?", re.IGNORECASE | re.ASCII)
_CLOCK = re.compile(r"(?:(\d{1,5})-)?(\d{1,5}):([0-5]\d):([0-5]\d)", re.ASCII)
_SPAN = re.compile(r"(\d{1,9}) ?([smhd])", re.IGNORECASE | re.ASCII)
_BUDGET = re.compile(r"(\d{1,9}(?:\.\d{1,6})?) ?(gpu|core)-?hours?", re.IGNORECASE | re.ASCII)
_STEPS = re.compile(r"([1-9]\d{0,8}) steps?", re.ASCII)
_SPAN_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}

Read: TypeAlias = "Callable[[Any], Any]"  # None: not a value of this type


def format_size(size: int) -> str | int:
    """Write bytes in the largest unit that is exact; `parse_size` reads it back."""
    for power in range(len(_UNITS), 0, -1):
        if size and size % (1 << 10 * power) == 0:
            return f"{size >> 10 * power}{_UNITS[power - 1]}iB"
    return size


def format_duration(seconds: int) -> str:
    """Write seconds as Slurm does: D-HH:MM:SS."""
    days, remainder = divmod(seconds, 86400)
    clock = f"{remainder // 3600:02}:{remainder // 60 % 60:02}:{remainder % 60:02}"
    return f"{days}-{clock}" if days else clock


def parse_option(value: object) -> object:
    """Parse an argument for a user's class: text, a number, true, false, null, or a list of these."""
    parts = value if isinstance(value, list | tuple) else [value]
    if not all(part is None or isinstance(part, str | int | float) for part in parts):
        raise _wants("text, a number, true, false, null, or a list of these")
    return tuple(value) if isinstance(value, list | tuple) else value


def parse_range(value: object) -> object:
    """Parse the values that a search may choose: a list of choices, or the ends of a range."""
    if isinstance(value, list | tuple) and len(value) > 1:
        return tuple(map(parse_option, value))
    match value:
        case {"low": low, "high": high, **more} if type(low) in (int, float) and type(high) in (int, float):
            is_log = more.get("log", False)
            if more.keys() <= {"log"} and isinstance(is_log, bool) and low < high and (low > 0 or not is_log):
                return value
    raise _wants("a list of choices, or {low: 1e-5, high: 1e-2} with log: true or without")


def parse_line(value: str) -> str:
    """Return a text without line ends."""
    if not value.isprintable():
        raise _wants("one line of printable characters")
    return value


def parse_duration(value: object) -> int:
    """Return seconds; a bare number is refused, because Slurm would read minutes."""
    seconds: int | None = _seconds(value)
    if seconds is None:
        raise _wants(_TIME)
    return seconds


def _wants(what: str) -> PydanticCustomError:
    return PydanticCustomError(WANTS, "{what}", {"what": what})


def _written(
    read: Read,
    wants: str,
    *schemas: Mapping[str, Any],
    auto: bool = False,
    null: bool = False,
    show: Callable[[Any], Any] = lambda value: value,
) -> GetPydanticSchema:
    """Return how values of a type are written: a parser, the end of its error, and JSON schemas.

    `auto` and `null` say what else may stand there, and `show` writes a value as people do.
    """

    def is_other(value: object) -> bool:
        return (auto and value == "auto") or (null and value is None)

    def validated(value: object) -> Any:
        if is_other(value):
            return value
        if (found := read(value)) is None:
            raise _wants(wants)
        return found

    serializer = core_schema.plain_serializer_function_ser_schema(
        lambda value: value if is_other(value) else show(value), when_used="json"
    )
    core = core_schema.no_info_plain_validator_function(validated, serialization=serializer)
    options = [*schemas, *([{"const": "auto"}] * auto), *([{"type": "null"}] * null)]
    schema = {"anyOf": options} if len(options) > 1 else dict(options[0])
    return GetPydanticSchema(lambda _source, _handler: core, lambda _core, _handler: schema)


def _text(pattern: re.Pattern[str], form: Callable[[re.Match[str]], Any]) -> Read:
    def read(value: object) -> Any:
        match = pattern.fullmatch(value) if isinstance(value, str) else None
        return form(match) if match else None

    return read


def _either(*reads: Read) -> Read:
    return lambda value: next((found for read in reads if (found := read(value)) is not None), None)


def _whole(at_least: int) -> Read:
    return lambda value: value if type(value) is int and value >= at_least else None


def _size(at_least: int) -> Read:
    """Return what reads bytes; as in Slurm every unit is a power of 1024."""

    def read(value: object) -> int | None:
        size: int | None = value if type(value) is int else _sized(value)
        if size is not None and size < at_least:
            raise _wants(f"at least {format_size(at_least)} (a number without a unit is bytes)")
        return size

    return read


def _part(value: object) -> float | None:
    return value if isinstance(value, float) and 0 < value < 1 else None


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _names(value: object) -> tuple[str, ...] | None:
    names = tuple(value) if isinstance(value, list | tuple) else ()
    are_good = all(isinstance(name, str) and name for name in names) and len({*map(str, names)}) == len(names)
    return names if names and are_good else None


def _node_folder(value: object) -> object:
    return value if isinstance(value, str) and value.startswith(("/", "$", "~")) and "\0" not in value else None


def _clock_s(clock: re.Match[str]) -> int | None:
    days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds or None


_sized = _text(_SIZE, lambda size: int(float(size[1]) * (1 << 10 * (_UNITS.index(size[2].upper()) + 1))))
_seconds = _either(_text(_CLOCK, _clock_s), _text(_SPAN, lambda span: int(span[1]) * _SPAN_S[span[2].lower()] or None))
_budget = _text(_BUDGET, lambda hours: f"{hours[1]} {hours[2].lower()}-hours" if float(hours[1]) else None)
_steps = _text(_STEPS, lambda steps: f"{steps[1]} steps")

_BYTES = "a size such as 512MiB, 24G or a number of bytes"
_TIME = "a time such as 01:30:00, 2-12:00:00, 90m or 2h"
_SIZE_TEXT = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)? ?[KMGTPkmgtp]([iI]?[bB])?$"}
_TIME_TEXT = {"type": "string", "pattern": r"^(([0-9]+-)?[0-9]+:[0-5][0-9]:[0-5][0-9]|[0-9]+ ?[smhdSMHD])$"}
_BUDGET_TEXT = {"type": "string", "pattern": "^[0-9]+([.][0-9]+)? ?(gpu|core)-?hours?$"}
_STEPS_TEXT = {"type": "string", "pattern": "^[1-9][0-9]* steps?$"}
_FOLDER_TEXT = {"type": "string", "pattern": "^[/$~]"}
_COUNT, _COUNT_OR_NONE = ({"type": "integer", "minimum": least} for least in (1, 0))
_PART = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}
_NAMES = {"type": "array", "items": {"type": "string"}, "minItems": 1, "uniqueItems": True}

Size: TypeAlias = Annotated[int, _written(_size(1), _BYTES, _COUNT, _SIZE_TEXT, show=format_size)]
SizeOrNone: TypeAlias = Annotated[int, _written(_size(0), _BYTES, _COUNT_OR_NONE, _SIZE_TEXT, show=format_size)]
Memory: TypeAlias = Annotated[int, _written(_size(SMALLEST_MEMORY_BYTES), _BYTES, _COUNT, _SIZE_TEXT, show=format_size)]
AutoMemory: TypeAlias = Annotated[
    int | Literal["auto"],
    _written(_size(SMALLEST_MEMORY_BYTES), _BYTES, _COUNT, _SIZE_TEXT, auto=True, show=format_size),
]
AutoCount: TypeAlias = Annotated[
    int | Literal["auto"], _written(_whole(1), "a whole number from 1, or auto", _COUNT, auto=True)
]
AutoCountOrNone: TypeAlias = Annotated[
    int | Literal["auto"], _written(_whole(0), "a whole number from 0, or auto", _COUNT_OR_NONE, auto=True)
]
AutoFlag: TypeAlias = Annotated[
    bool | Literal["auto"], _written(_flag, "true, false or auto", {"type": "boolean"}, auto=True)
]
AutoFlagOrCount: TypeAlias = Annotated[
    bool | int | Literal["auto"],
    _written(
        _either(_flag, _whole(1)), "true, false, a whole number from 1, or auto", {"type": "boolean"}, _COUNT, auto=True
    ),
]
AutoNames: TypeAlias = Annotated[
    tuple[str, ...] | Literal["auto"],
    _written(_names, "auto, or a list of different names, such as [main, NAME]", _NAMES, auto=True, show=list),
]
Duration: TypeAlias = Annotated[int, _written(_seconds, _TIME, _TIME_TEXT, show=format_duration)]
Budget: TypeAlias = Annotated[
    str, _written(_budget, "hours of GPUs or cores, such as '500 gpu-hours' or '2000 core-hours'", _BUDGET_TEXT)
]
NodeFolder: TypeAlias = Annotated[
    str | None,
    _written(
        _node_folder, "a folder as a node knows it, such as $TMPDIR or /scratch, or null", _FOLDER_TEXT, null=True
    ),
]
ItemLimit: TypeAlias = Annotated[
    int | float | None,
    _written(
        _either(_part, _whole(1)), "items such as 1000, a part of all such as 0.25, or null", _COUNT, _PART, null=True
    ),
]
Interval: TypeAlias = Annotated[
    int | float | str,
    _written(
        _either(_part, _whole(1), _steps),
        "epochs such as 2, a part of one such as 0.25, or '500 steps'",
        _COUNT,
        _PART,
        _STEPS_TEXT,
    ),
]
Option: TypeAlias = Annotated[
    Any,
    PlainValidator(parse_option),
    WithJsonSchema({"anyOf": [{"type": list(_PLAIN)}, {"type": "array", "items": {"type": list(_PLAIN)}}]}),
]

_ENDS = {"low": {"type": "number"}, "high": {"type": "number"}, "log": {"type": "boolean"}}
Range: TypeAlias = Annotated[
    Any,
    PlainValidator(parse_range),
    WithJsonSchema({"anyOf": [{"type": "object", "properties": _ENDS}, {"type": "array", "minItems": 2}]}),
]


Name: TypeAlias = Annotated[str, StringConstraints(min_length=1)]
Line: TypeAlias = Annotated[Name, AfterValidator(parse_line)]

Conflict: TypeAlias = tuple[str, str]
CONFLICT = "conflict"  # type of errors about conflicting keys


def setting(default: Any, description: str, **constraints: Any) -> Any:
    """Return a field of a section; `...` as default: required."""
    return Field(default, description=description, **constraints)


class Section(BaseModel):
    """A frozen part of the configuration; unknown keys are errors, and values are not converted silently."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @model_validator(mode="after")
    def _keys_go_together(self) -> Self:
        for key, what in self.conflicts():
            raise PydanticCustomError(CONFLICT, "{what}", {"what": what, "key": key})
        return self

    def conflicts(self) -> Iterator[Conflict]:
        """Yield each key that conflicts with another, and why."""
        return iter(())
