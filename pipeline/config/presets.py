"""What `train.preset` stands for: a file of keys of `train`, below everything that was written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.config.document import Document
from pipeline.config.shipped import shipped
from pipeline.config.sites import ENDING, earlier

if TYPE_CHECKING:
    from pipeline.config.schema import KeyPath

PRESET: KeyPath = ("train", "preset")
ABOVE: KeyPath = ("train",)
FOLDER = "configs/presets"


def read(name: str) -> Document | None:
    """Return the entries of a preset as parts of the section `train`; None where there is none: the schema says so."""
    path = shipped(FOLDER) / f"{name}{ENDING}"
    if not name.isidentifier() or not path.is_file():
        return None
    return earlier(Document(f"presets/{path.name}").read(path.read_text(encoding="utf-8"), ABOVE))
