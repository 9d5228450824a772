"""The types of settings, such as sizes and times as people write them: 512MiB, 24G, 01:30:00, 90m."""

from __future__ import annotations

import re
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    PlainSerializer,
    PlainValidator,
    StringConstraints,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

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


def parse_auto_count(value: object, *, at_least: int) -> int | Literal["auto"]:
    """Return a whole number or `auto`."""
    if value == "auto":
        return "auto"
    if isinstance(value, int) and not isinstance(value, bool) and value >= at_least:
        return value
    raise _wants(f"a whole number from {at_least}, or auto")


def parse_auto_flag(value: object) -> bool | Literal["auto"]:
    """Return true, false or `auto`."""
    if isinstance(value, bool):
        return value
    if value == "auto":
        return "auto"
    raise _wants("true, false or auto")


def parse_auto_names(value: object) -> tuple[str, ...] | Literal["auto"]:
    """Return distinct names, in their order, or `auto`."""
    if value == "auto":
        return "auto"
    names = tuple(value) if isinstance(value, list | tuple) else ()
    if names and all(isinstance(name, str) and name for name in names) and len(set(names)) == len(names):
        return names
    raise _wants("auto, or a list of different names, such as [main, NAME]")


def parse_auto_memory(value: object) -> int | Literal["auto"]:
    """Return bytes of memory or `auto`."""
    return "auto" if value == "auto" else parse_size(value, at_least=SMALLEST_MEMORY_BYTES)


def parse_interval(value: object) -> int | float | str:
    """Return an interval of a training: whole epochs, a part of one, or a number of steps as `500 steps`."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    if isinstance(value, float) and 0 < value < 1:
        return value
    if isinstance(value, str) and (steps := _STEPS.fullmatch(value)):
        return f"{steps[1]} steps"
    raise _wants("epochs such as 2, a part of one such as 0.25, or '500 steps'")


def parse_budget(value: object) -> str:
    """Return a budget as `500 gpu-hours` or `200 core-hours`."""
    match = _BUDGET.fullmatch(value) if isinstance(value, str) else None
    if match is None or float(match[1]) <= 0:
        raise _wants("hours of GPUs or cores, such as '500 gpu-hours' or '2000 core-hours'")
    return f"{match[1]} {match[2].lower()}-hours"


def parse_limit(value: object) -> int | float | None:
    """Return how many items are taken at most: a number of them, a part of all, or all."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if value is None or is_count or (isinstance(value, float) and 0 < value < 1):
        return value  # type: ignore[return-value]
    raise _wants("items such as 1000, a part of all such as 0.25, or null")


def parse_node_folder(value: object) -> str | None:
    """Return a folder as it is written; its variables are expanded on the node."""
    if value is None or (isinstance(value, str) and value.startswith(("/", "$", "~")) and "\0" not in value):
        return value
    raise _wants("a folder as a node knows it, such as $TMPDIR or /scratch, or null")


def parse_line(value: str) -> str:
    """Return a text that a script can hold in one line."""
    if not value.isprintable():
        raise _wants("one line of printable characters")
    return value


def format_auto_memory(value: int | Literal["auto"]) -> str | int:
    """Write bytes of memory or `auto`."""
    return "auto" if value == "auto" else format_size(value)


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


_SIZE_SCHEMA = [
    {"type": "integer", "minimum": 1},
    {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)? ?[KMGTPkmgtp]([iI]?[bB])?$"},
]
_TIME_SCHEMA = {"type": "string", "pattern": r"^(([0-9]+-)?[0-9]+:[0-5][0-9]:[0-5][0-9]|[0-9]+ ?[smhdSMHD])$"}
_AUTO_SCHEMA = {"const": "auto"}

Size: TypeAlias = Annotated[
    int,
    PlainValidator(parse_size),
    PlainSerializer(format_size, when_used="json"),
    WithJsonSchema({"anyOf": _SIZE_SCHEMA}),
]
SizeOrNone: TypeAlias = Annotated[
    int,
    PlainValidator(partial(parse_size, at_least=0)),
    PlainSerializer(format_size, when_used="json"),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, _SIZE_SCHEMA[1]]}),
]
Memory: TypeAlias = Annotated[
    int,
    PlainValidator(partial(parse_size, at_least=SMALLEST_MEMORY_BYTES)),
    PlainSerializer(format_size, when_used="json"),
    WithJsonSchema({"anyOf": _SIZE_SCHEMA}),
]
AutoMemory: TypeAlias = Annotated[
    int | Literal["auto"],
    PlainValidator(parse_auto_memory),
    PlainSerializer(format_auto_memory, when_used="json"),
    WithJsonSchema({"anyOf": [*_SIZE_SCHEMA, _AUTO_SCHEMA]}),
]
AutoCount: TypeAlias = Annotated[
    int | Literal["auto"],
    PlainValidator(partial(parse_auto_count, at_least=1)),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, _AUTO_SCHEMA]}),
]
AutoFlag: TypeAlias = Annotated[
    bool | Literal["auto"],
    PlainValidator(parse_auto_flag),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, _AUTO_SCHEMA]}),
]
AutoNames: TypeAlias = Annotated[
    tuple[str, ...] | Literal["auto"],
    PlainValidator(parse_auto_names),
    PlainSerializer(lambda names: names if names == "auto" else list(names)),
    WithJsonSchema(
        {"anyOf": [{"type": "array", "items": {"type": "string"}, "minItems": 1, "uniqueItems": True}, _AUTO_SCHEMA]}
    ),
]
AutoCountOrNone: TypeAlias = Annotated[
    int | Literal["auto"],
    PlainValidator(partial(parse_auto_count, at_least=0)),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, _AUTO_SCHEMA]}),
]
Duration: TypeAlias = Annotated[
    int,
    PlainValidator(parse_duration),
    PlainSerializer(format_duration, when_used="json"),
    WithJsonSchema(_TIME_SCHEMA),
]
Budget: TypeAlias = Annotated[
    str,
    PlainValidator(parse_budget),
    WithJsonSchema({"type": "string", "pattern": "^[0-9]+([.][0-9]+)? ?(gpu|core)-?hours?$"}),
]
NodeFolder: TypeAlias = Annotated[
    str | None,
    PlainValidator(parse_node_folder),
    WithJsonSchema({"anyOf": [{"type": "string", "pattern": "^[/$~]"}, {"type": "null"}]}),
]
ItemLimit: TypeAlias = Annotated[
    int | float | None,
    PlainValidator(parse_limit),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 1},
                {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
                {"type": "null"},
            ]
        }
    ),
]
Interval: TypeAlias = Annotated[
    int | float | str,
    PlainValidator(parse_interval),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 1},
                {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
                {"type": "string", "pattern": "^[1-9][0-9]* steps?$"},
            ]
        }
    ),
]
Option: TypeAlias = Annotated[
    Any,
    PlainValidator(parse_option),
    WithJsonSchema({"anyOf": [{"type": list(_PLAIN)}, {"type": "array", "items": {"type": list(_PLAIN)}}]}),
]


Name: TypeAlias = Annotated[str, StringConstraints(min_length=1)]
Line: TypeAlias = Annotated[Name, AfterValidator(parse_line)]

CONFLICT = "conflict"  # the type of the errors about keys that do not go together


class Section(BaseModel):
    """A frozen part of the configuration; unknown keys are errors, and nothing is converted silently."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def conflict(key: str, what: str) -> PydanticCustomError:
    """Return the validation error for a key that does not go with another."""
    return PydanticCustomError(CONFLICT, "{what}", {"what": what, "key": key})
