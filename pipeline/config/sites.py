"""Profiles of clusters: where `cluster.site` is looked for, and how its keys are read.

A profile holds the sections `slurm` and `supervisor` of `cluster`. What it says are defaults: the configuration and
`--set` beat it, key by key.
"""

from __future__ import annotations

import os
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config.document import Document, Problem
from pipeline.config.paths import anchored
from pipeline.config.schema import SECTIONS
from pipeline.config.schema_cluster import Card, Slurm
from pipeline.config.shipped import shipped
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic_core import ErrorDetails

    from pipeline.config.schema import KeyPath

SITE: KeyPath = ("cluster", "site")
ABOVE: KeyPath = ("cluster",)
CARDS: KeyPath = ("cluster", "slurm", "cards")
HELD = ("slurm", "supervisor")
ENDING = ".yaml"
BEFORE_THE_FILE = 1 << 30  # mistakes in a profile come before those of the file that names it
HERE = Path("configs/sites")


def locate(site: str, base_dir: Path, config_dir: Path) -> Path:
    """Return the file of a profile; ValueError says why there is none.

    A path starts from the folder it is written in (`base_dir`); a name is looked up beside the configuration first.
    """
    if "/" in site or site.endswith((ENDING, ".yml")):
        return _readable(Path(anchored(site, base_dir)))
    shelves = _shelves(config_dir)
    for folder in shelves:
        if os.path.lexists(path := folder / f"{site}{ENDING}"):
            return _readable(path)
    known = sorted({path.stem for folder in shelves for path in folder.glob(f"*{ENDING}")})
    raise ValueError(_unknown(site, known, shelves))


def read(path: Path, text: str) -> Document:
    """Return the entries of a profile as parts of the section `cluster`."""
    document = Document(_shown(path)).read(text, ABOVE)
    if document.entries[ABOVE].value != {}:
        what = "a profile must hold the keys slurm: and supervisor:"
        raise ConfigError(what, where=document.entries[ABOVE].origin, remedy="see configs/sites/README.md")
    del document.entries[ABOVE]
    strangers = {key: entry for key, entry in document.entries.items() if key[1] not in HELD}
    for key, entry in strangers.items():
        del document.entries[key]
        if len(key) == len(ABOVE) + 1:
            document.problems.append(Problem(entry.line, f"{entry.origin}: {_misplaced(key[1])}"))
    return earlier(document)


def earlier(document: Document) -> Document:
    """Return a document whose mistakes are told before those of the file; its origins name the true lines."""
    document.entries = {
        key: replace(entry, line=entry.line - BEFORE_THE_FILE) for key, entry in document.entries.items()
    }
    document.problems = [Problem(one.line - BEFORE_THE_FILE, one.text) for one in document.problems]
    return document


def explain_card(detail: ErrorDetails) -> str:
    """Return which card lacks a key or has one that no card has; empty for any other mistake."""
    if detail["loc"][: len(CARDS)] != CARDS or detail["type"] not in ("missing", "extra_forbidden"):
        return ""
    number, name = detail["loc"][len(CARDS)], str(detail["loc"][-1])
    if detail["type"] == "missing":
        return f"card {int(number) + 1} needs {name}: {Card.model_fields[name].description}"
    close = get_close_matches(name, Card.model_fields, n=1)
    meant = f'; did you mean "{close[0]}"?' if close else f"; there are {', '.join(Card.model_fields)}"
    return f"card {int(number) + 1}: {name}: unknown key{meant}"


def _shelves(config_dir: Path) -> tuple[Path, ...]:
    """Return the folders in which a name is looked up, in their order."""
    return (config_dir / "sites", Path.cwd() / HERE, shipped("configs/sites"))


def _readable(path: Path) -> Path:
    if not os.path.isfile(path):  # noqa: PTH113 - which never raises
        raise ValueError(f"{_shown(path)} {'is no file' if os.path.lexists(path) else 'does not exist'}")
    return path


def _unknown(site: str, known: list[str], shelves: tuple[Path, ...]) -> str:
    """Say what a name might have been."""
    close = get_close_matches(site, known, n=1)
    meant = f'; did you mean "{close[0]}"?' if close else ""
    there = f"; there are {', '.join(known)}" if known else f"; none is in {', '.join(_each(shelves))}"
    return f'no profile is called "{site}"{meant}{there} (pipeline init makes one of this cluster)'


def _each(folders: tuple[Path, ...]) -> Iterator[str]:
    return (_shown(folder) for folder in folders)


def _misplaced(name: str) -> str:
    """Say what to do with a key that no profile has."""
    if name in Slurm.model_fields:
        return f"{name}: belongs below slurm:"
    if (*ABOVE, name) in SECTIONS or name in ("executor", "site", "runs", "private"):
        return f"{name}: belongs in the configuration, below cluster: (a profile holds {' and '.join(HELD)})"
    close = get_close_matches(name, HELD, n=1)
    return f"{name}: unknown key" + (f'; did you mean "{close[0]}"?' if close else f"; there are {', '.join(HELD)}")


def _shown(path: Path) -> str:
    """Return a path as people want to read it: from here, where it lies below here."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
