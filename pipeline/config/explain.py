"""A refused value in words: what was wanted, what stands there, and what was probably meant."""

from __future__ import annotations

import json
from difflib import get_close_matches
from typing import TYPE_CHECKING, Literal, get_args, get_origin

from pipeline.config.quantities import WANTS
from pipeline.config.schema import FIELDS, LEAVES
from pipeline.config.section import CONFLICT

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from pipeline.config.schema import KeyPath

_KINDS = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list, such as [A, B]",
    "model_type": "keys below it",
}
_BOUNDS = {
    "greater_than_equal": "at least {ge:g}",
    "less_than_equal": "at most {le:g}",
    "greater_than": "more than {gt:g}",
    "less_than": "less than {lt:g}",
    "string_too_short": "some text",
    "too_short": "a list that is not empty",
}


def explain(key: KeyPath, detail: ErrorDetails) -> str:
    """Return why the value at `key` was refused."""
    kind = detail["type"]
    if kind == "extra_forbidden":
        return "unknown key" + _meant(key)
    if kind == "missing":
        return f"is required. {FIELDS[key].description}" if key in FIELDS else "is required"
    if kind == CONFLICT:
        return detail["msg"]
    return f"{_wanted(key, detail)}, got {_shown(detail['input'])}{_advice(key, kind, detail['input'])}"


def _wanted(key: KeyPath, detail: ErrorDetails) -> str:
    """Say what would have been right."""
    kind = detail["type"]
    if kind == "literal_error":
        return f"wants one of {', '.join(_choices(key))}"
    if kind in _KINDS:
        return f"wants {_KINDS[kind]}"
    if kind == "string_pattern_mismatch" and key == ("train", "task"):
        return "wants package.module:Name"
    if kind in _BOUNDS:
        return f"wants {_BOUNDS[kind].format(**detail['ctx'])}"
    return f"wants {detail['msg']}" if kind == WANTS else detail["msg"]


def _advice(key: KeyPath, kind: str, value: object) -> str:
    """Name the nearest choice, or explain quotes: missing where YAML reads something else, or too many."""
    if kind == "literal_error":
        return _suggestion(str(value), _choices(key))
    if kind == "string_type" and isinstance(value, bool | int | float | None):
        return f": unquoted, YAML reads {_kind(value)}; put it in quotes"
    if kind in ("int_type", "float_type", "bool_type") and isinstance(value, str) and _is_plain(value):
        return ": leave the quotes out"
    return ""


def _meant(key: KeyPath) -> str:
    """Suggest a sibling with a similar name, or the section that does have this key."""
    siblings = [field[-1] for field in FIELDS if field[:-1] == key[:-1]]
    elsewhere = [".".join(leaf) for leaf in LEAVES if leaf[-1] == key[-1]]
    known = f"; there are {', '.join(siblings)}" if siblings else ""
    return _suggestion(key[-1], siblings) or _suggestion(".".join(key), elsewhere, cutoff=0.0) or known


def _suggestion(word: str, names: list[str], cutoff: float = 0.6) -> str:
    close = get_close_matches(word, names, n=1, cutoff=cutoff)
    return f'; did you mean "{close[0]}"?' if close else ""


def _choices(key: KeyPath) -> list[str]:
    annotation = FIELDS[key].annotation if key in FIELDS else None
    either = (annotation, *get_args(annotation))  # a choice, or a choice or nothing
    return [str(choice) for one in either if get_origin(one) is Literal for choice in get_args(one)]


def _is_plain(text: str) -> bool:
    """Tell whether text without its quotes would be a number or a truth value."""
    try:
        return not isinstance(json.loads(text), dict | list | str)
    except ValueError:
        return False


def _kind(value: object) -> str:
    if value is None:
        return "nothing"
    return "a truth value" if isinstance(value, bool) else "a number"


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
