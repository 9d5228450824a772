"""Only `pipeline/device` knows one kind of GPU from another; every other room asks it."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "pipeline"
# What is about one kind of GPU by its nature: the room itself, GPUs by name, and the imitation of CUDA's kernels.
KNOW_CARDS = ("device/", "memory/hardware/", "memory/tracing/")
# What people write or read, in the words of torch and of Slurm: these quote, and never ask a GPU.
EXCUSED = {
    "memory/outlook.py": "the variables that set CUDA's allocator, and what is wrong with them",
    "config/familiar_words.yaml": "a word that people write where ours is another",
    "setup/profile.yaml.jinja": "the name of an environment module",
}
NAMED = re.compile(r"cuda", re.IGNORECASE)
ASKED = re.compile(r"torch\.(accelerator|xpu|hip|get_device_module)\b|\bcurrent_accelerator\b")


def lines_with(pattern: re.Pattern[str], *, outside: Collection[str]) -> list[str]:
    """Return the lines of the package that a pattern matches, but for those in some folders and files."""
    files = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*"))}
    return [
        f"{place}:{number}: {line.strip()}"
        for place, path in files.items()
        if path.suffix in {".py", ".jinja", ".sh", ".js", ".css"} and not place.startswith(tuple(outside))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]


def test_no_other_room_names_a_kind_of_card() -> None:
    assert lines_with(NAMED, outside=(*KNOW_CARDS, *EXCUSED)) == []
    for excused in EXCUSED:
        text = (PACKAGE / excused).read_text()
        assert NAMED.search(text), excused
        asks = re.search(r'\.is_cuda|(?<![\w/.])torch\.cuda\.|"cuda"', text.replace("generated/torch.cuda.", ""))
        assert not asks, excused


def test_only_the_room_asks_torch_for_a_card() -> None:
    assert lines_with(ASKED, outside=("device/",)) == []
