"""Resolves paths, and reads the files that a configuration names: presets and profiles of clusters."""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config.schema import SECTIONS
from pipeline.config.schema_cluster import CardSection, SlurmSection
from pipeline.config.yaml_document import Document, Problem
from pipeline.errors import ConfigError
from pipeline.files import shipped

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from pipeline.config.schema import KeyPath

_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


def anchored(text: str, base: Path) -> str:
    """Return the absolute path of `text`, which may be relative to the folder `base` and hold ~ and $VARIABLES."""
    if not text or "\0" in text:
        raise ValueError("a path cannot be empty" if not text else "a path cannot contain a NUL character")
    try:
        path = Path(_VARIABLE.sub(_variable, text)).expanduser()
    except RuntimeError as error:
        raise ValueError(f"no home folder is known for {text.partition('/')[0]}") from error
    return os.path.normpath(base / path)  # not resolve(): keeps the path as written


def _variable(match: re.Match[str]) -> str:
    """Return the value of a variable; refuse an empty one, which would turn $SCRATCH/cache into /cache."""
    name = match[1] or match[2]
    value = os.environ.get(name, "")
    if not value:
        raise ValueError(f"the environment variable {name} is not set")
    return value


PRESET: KeyPath = ("train", "preset")
PRESET_ABOVE: KeyPath = ("train",)
FOLDER = "configs/presets"


def read_preset(name: str) -> Document | None:
    """Return the entries of a preset as parts of section `train`; None if unknown, which the schema refuses."""
    path = shipped(FOLDER) / f"{name}{ENDING}"
    if not name.isidentifier() or not path.is_file():
        return None
    document = Document(f"presets/{path.name}", offset=BEFORE_THE_FILE)
    return document.read(path.read_text(encoding="utf-8"), PRESET_ABOVE)


SITE: KeyPath = ("cluster", "site")
ABOVE: KeyPath = ("cluster",)
CARDS: KeyPath = ("cluster", "slurm", "cards")
HELD = ("slurm", "supervisor")
ENDING = ".yaml"
BEFORE_THE_FILE = -(1 << 30)  # report mistakes in a profile before those of the naming file
HERE = Path("configs/sites")


def locate(site: str, base_dir: Path, config_dir: Path) -> Path:
    """Return the file of a profile; raise ValueError with the reason if there is none.

    A path is relative to `base_dir`; a name is looked up next to the configuration first.
    """
    if "/" in site or site.endswith((ENDING, ".yml")):
        return _readable(Path(anchored(site, base_dir)))
    shelves = (config_dir / "sites", Path.cwd() / HERE, shipped("configs/sites"))
    for folder in shelves:
        if os.path.lexists(path := folder / f"{site}{ENDING}"):
            return _readable(path)
    known = sorted({path.stem for folder in shelves for path in folder.glob(f"*{ENDING}")})
    raise ValueError(_unknown(site, known, shelves))


def read_site(path: Path, text: str) -> Document:
    """Return the entries of a profile as parts of the section `cluster`."""
    document = Document(_shown(path), offset=BEFORE_THE_FILE).read(text, ABOVE)
    if document.entries[ABOVE].value != {}:
        problem = "a profile must contain the keys slurm: and supervisor:"
        raise ConfigError(problem, where=document.entries[ABOVE].origin, remedy="see configs/sites/README.md")
    del document.entries[ABOVE]
    strangers = {key: entry for key, entry in document.entries.items() if key[1] not in HELD}
    for key, entry in strangers.items():
        del document.entries[key]
        if len(key) == len(ABOVE) + 1:
            document.problems.append(Problem(entry.line, f"{entry.origin}: {_misplaced(key[1])}"))
    return document


def explain_card(detail: ErrorDetails) -> str:
    """Explain that a card lacks a key or has an unknown one; empty for other mistakes."""
    if detail["loc"][: len(CARDS)] != CARDS or detail["type"] not in ("missing", "extra_forbidden"):
        return ""
    number, name = detail["loc"][len(CARDS)], str(detail["loc"][-1])
    if detail["type"] == "missing":
        return f"GPU {int(number) + 1} needs {name}: {CardSection.model_fields[name].description}"
    close = get_close_matches(name, CardSection.model_fields, n=1)
    meant = f'; did you mean "{close[0]}"?' if close else f"; choose from {', '.join(CardSection.model_fields)}"
    return f"GPU {int(number) + 1}: {name}: unknown key{meant}"


def _readable(path: Path) -> Path:
    if not os.path.isfile(path):  # noqa: PTH113 - which never raises
        raise ValueError(f"{_shown(path)} {'is not a file' if os.path.lexists(path) else 'does not exist'}")
    return path


def _unknown(site: str, known: list[str], shelves: tuple[Path, ...]) -> str:
    """Return the message for an unknown profile, with the nearest name."""
    close = get_close_matches(site, known, n=1)
    meant = f'; did you mean "{close[0]}"?' if close else ""
    there = f"; choose from {', '.join(known)}" if known else f"; none is in {', '.join(map(_shown, shelves))}"
    return f'no profile named "{site}"{meant}{there} (pipeline init writes one for this cluster)'


def _misplaced(name: str) -> str:
    """Return the right place of a key that is not one of a profile."""
    if name in SlurmSection.model_fields:
        return f"{name}: belongs below slurm:"
    if (*ABOVE, name) in SECTIONS or name in ("executor", "site", "runs", "private"):
        return f"{name}: belongs in the configuration, below cluster: (a profile holds {' and '.join(HELD)})"
    close = get_close_matches(name, HELD, n=1)
    return f"{name}: unknown key" + (f'; did you mean "{close[0]}"?' if close else f"; choose from {', '.join(HELD)}")


def _shown(path: Path) -> str:
    """Return a path relative to the current folder if it lies below it."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
