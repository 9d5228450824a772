"""Words that people bring from other tools, and what they are called here: the table is familiar_words.yaml."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import yaml

NOTHING = "nothing to set"


@cache
def answers() -> dict[str, str]:
    """Return what each word of another tool is here."""
    table: dict[str, str] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {word: answer.replace("{word}", word) for answer, words in table.items() for word in words.split()}


def familiar(word: str) -> str:
    """Return, as the end of a sentence, what a word of other tools is here; empty for a word that is not known."""
    answer = answers().get(word.lower().lstrip("-").replace("-", "_"), "")
    return f"here {'there is' if answer.startswith(NOTHING) else 'it is'} {answer}" if answer else ""
