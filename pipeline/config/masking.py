"""Masks secrets in whatever is printed or written down.

These are passwords in URLs, values of names such as token and password, and values of environment variables with such
names. The frozen configuration of a run is not masked: jobs need it, and its folder is the user's alone.
"""

from __future__ import annotations

import os
import re
from typing import Any

MASK = "***"
SHORTEST = 6  # a shorter value is a number or a word that would be masked all over a text
_NAME = r"(?:token|secret|password|passwd|credentials?|(?:api|access|secret|private)[_-]?key|signature)"
_IN_URL = re.compile(r"(?<=://)([^\s/@:]*):[^\s/@]+(?=@)")
_ALONE_IN_URL = re.compile(r"(?<=://)[^\s/@:]{20,}(?=@)")  # a token in the place of a name; names are shorter
_SAID = re.compile(  # a long word is gone through once: it is looked at from its beginning only
    rf"((?<![\w.-])(?:--[\w-]*{_NAME}\s+|[\w.-]*{_NAME}[\"']?\s*[=:]\s*)[\"']?)[^\s\"',}}&]{{{SHORTEST},}}",
    re.IGNORECASE,
)
_ENDS_SO = re.compile(rf"{_NAME}$", re.IGNORECASE)
_VARIABLE = re.compile(r"(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$")


def without_secrets(text: str) -> str:
    """Return a text with its secrets masked."""
    for value in _in_the_environment():
        text = text.replace(value, MASK)
    text = _ALONE_IN_URL.sub(MASK, _IN_URL.sub(rf"\1:{MASK}", text))
    return _SAID.sub(rf"\1{MASK}", text)


def without_secrets_in(value: Any, name: str = "") -> Any:
    """Return JSON data with its secrets masked; `name` is the key that holds the value."""
    if isinstance(value, dict):
        return {key: without_secrets_in(part, str(key)) for key, part in value.items()}
    if isinstance(value, list | tuple):
        pairs = zip(["", *value], value, strict=False)  # in a command, the word after --token is a secret
        return [without_secrets_in(part, _option(previous) or name) for previous, part in pairs]
    if not isinstance(value, str):
        return value
    return MASK if value and _ENDS_SO.search(name) else without_secrets(value)


def _option(word: Any) -> str:
    """Return a word that is the name of an option, else an empty text."""
    return word if isinstance(word, str) and word.startswith("-") else ""


def _in_the_environment() -> list[str]:
    """Return the values of environment variables that are named like secrets, the longest first."""
    values = {value for name, value in os.environ.items() if _VARIABLE.search(name) and len(value) >= SHORTEST}
    return sorted(values, key=len, reverse=True)
