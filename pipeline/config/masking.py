"""What is nobody's to read, masked in whatever is printed or written down.

That is passwords in URLs, values of names that say that they are secrets, and values of environment variables of such
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
    """Return a text without the secrets in it."""
    for value in _in_the_environment():
        text = text.replace(value, MASK)
    text = _ALONE_IN_URL.sub(MASK, _IN_URL.sub(rf"\1:{MASK}", text))
    return _SAID.sub(rf"\1{MASK}", text)


def without_secrets_in(value: Any, name: str = "") -> Any:
    """Return plain JSON data without the secrets in it."""
    if isinstance(value, dict):
        return {key: without_secrets_in(one, str(key)) for key, one in value.items()}
    if isinstance(value, list | tuple):
        before = ["", *value]  # of a command: what follows --token is one
        return [without_secrets_in(one, _option(word) or name) for word, one in zip(before, value, strict=False)]
    if not isinstance(value, str):
        return value
    return MASK if value and _ENDS_SO.search(name) else without_secrets(value)


def _option(word: Any) -> str:
    """Return the name of an option, if that is what a word is."""
    return word if isinstance(word, str) and word.startswith("-") else ""


def _in_the_environment() -> list[str]:
    """Return the values of variables that are named like secrets, the longest first."""
    values = {value for name, value in os.environ.items() if _VARIABLE.search(name) and len(value) >= SHORTEST}
    return sorted(values, key=len, reverse=True)
