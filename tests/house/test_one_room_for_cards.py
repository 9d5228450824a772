"""Whoever wants something of a card asks `pipeline/device`: no other room knows one kind of card from another."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.house.names import PACKAGE

# What is about one kind of card by its nature: the room itself, cards by name, and the imitation of CUDA's kernels.
KNOW_CARDS = ("device/", "memory/hardware/", "memory/tracing/")
# What people write or read, in the words of torch and of Slurm.
EXCUSED = {
    "memory/lint/lint_facts.py": "the variables by which CUDA's allocator is set",
    "memory/lint/lint_rules.py": "what is wrong with them, and where that is said",
    "config/familiar_words.py": "a word that people write where ours is another",
    "setup/profile.yaml.jinja": "the name of an environment module",
}
SPOKEN = re.compile(r"cuda", re.IGNORECASE)
FILES = sorted(path for path in PACKAGE.rglob("*") if path.suffix in {".py", ".jinja", ".sh", ".js", ".css"})


def place(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def lines_of(path: Path) -> list[str]:
    return [f"{place(path)}:{number}: {line.strip()}" for number, line in enumerate(path.read_text().splitlines(), 1)]


def test_no_other_room_names_a_kind_of_card() -> None:
    others = [path for path in FILES if not place(path).startswith(KNOW_CARDS) and place(path) not in EXCUSED]
    assert [line for path in others for line in lines_of(path) if SPOKEN.search(line)] == []


@pytest.mark.parametrize("excused", sorted(EXCUSED))
def test_what_is_excused_only_quotes_and_never_asks_a_card(excused: str) -> None:
    text = (PACKAGE / excused).read_text()
    assert SPOKEN.search(text)
    assert not re.search(r'\.is_cuda|(?<![\w/.])torch\.cuda\.|"cuda"', text.replace("generated/torch.cuda.", ""))


def test_only_the_room_asks_torch_for_a_card() -> None:
    asked = re.compile(r"torch\.(accelerator|xpu|hip|get_device_module)\b|\bcurrent_accelerator\b")
    others = [path for path in FILES if not place(path).startswith("device/")]
    assert [line for path in others for line in lines_of(path) if asked.search(line)] == []
