"""Masks secrets in printed and written text.

These are passwords in URLs, values of names such as token and password, and values of environment variables with such
names. The frozen configuration of a run is not masked: jobs need it, and its folder is the user's alone.
"""

from __future__ import annotations

import os
import re
from typing import Any

MASK = "***"
SHORTEST = 6  # a shorter value may be a common word or number
_OF_TEXTS = ("mask", "pad", "eos", "bos", "unk", "sep", "cls")  # names of tokens of a model's alphabet
_TOKEN = "".join(f"(?<!{kind}[_-])" for kind in _OF_TEXTS) + "token"
_NAME = (
    rf"(?:{_TOKEN}|secret|password|passwd|passphrase|credentials?|authorization|signature|webhook(?:[_-]?url)?"
    r"|(?:api|access|secret|private|auth|wandb|signing)[_-]?key)"
)
_PLACES = [  # keeps the group; tries a long word only from its start, for linear time
    re.compile(text, re.IGNORECASE)
    for text in (
        rf"('[\w.-]*{_NAME}=)(?:[^'\n]|'\"'\"')+(?=')",  # a setting that the shell needs in quotes, to its end
        r"(://[^\s/@:]*:)[^\s/@]+(?=@)",
        r"(://)[^\s/@:]{20,}(?=@)",  # a token in place of a user name; user names are shorter
        rf"(https?://[^\s\"']{{0,200}}?hook[^\s/\"']*/)[^\s\"']{{{SHORTEST},}}",
        rf"((?<![\w.-])[\w.-]*{_NAME}[\"']?\s*[=:]\s*[\"']?(?:(?:Bearer|Basic)\s+)?)[^\s\"',}}&]{{{SHORTEST},}}",
        rf"((?<![\w.-])--[\w-]*{_NAME}[\s=]+[\"']?)[^\s\"',}}&]+",
        rf"(\bwandb login\s+(?:-\S+\s+)*)[^\s-]\S{{{SHORTEST - 1},}}",
        r"(\b(?:curl|wget)\b[^\n]{0,500}?\s(?:-u|--user)[\s=]*[\"']?[^\s:\"']+:)[^\s\"']+",
        r"((?<![\w-])(?:hf_|gh[opsru]_))[a-z0-9]{16,}(?!\w)",  # and not hf_esm2_t33_650M_UR50D
        r"((?<![\w-])(?:Bearer\s+|github_pat_|glpat-|sk-|xox[abprs]-)(?=\S*\d))[\w.~+/=-]{16,}",
    )
]
_ENDS_SO = re.compile(rf"{_NAME}$", re.IGNORECASE)
_USER = ("-u", "--user")  # of curl, before NAME:PASSWORD
_IS_SIZE = re.compile(r"(?:^|\.)token$")  # if its value is a number
_VARIABLE = re.compile(r"(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$")


def without_secrets(text: str) -> str:
    """Return a text with its secrets masked."""
    values = {value for name, value in os.environ.items() if _VARIABLE.search(name) and len(value) >= SHORTEST}
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, MASK)
    for place in _PLACES:
        text = place.sub(rf"\1{MASK}", text)
    return text


def without_secrets_in(value: Any, name: str = "") -> Any:
    """Return JSON data with its secrets masked; `name` is the key that holds the value."""
    is_secret = _ENDS_SO.search(name) is not None
    if isinstance(value, dict):
        return {key: without_secrets_in(part, name if is_secret else str(key)) for key, part in value.items()}
    if isinstance(value, list | tuple):  # in a command, the word after --token is a secret
        before = (str(word) if str(word).startswith("-") else name for word in ("", *value))
        pairs = zip(before, value, strict=False)
        return [MASK if key in _USER and ":" in str(part) else without_secrets_in(part, key) for key, part in pairs]
    if is_secret and value and not isinstance(value, bool):
        return MASK if isinstance(value, str) or not _IS_SIZE.search(name) else value
    return without_secrets(value) if isinstance(value, str) else value
