"""What a check of `pipeline doctor` ends in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.errors import PipelineError


class Verdict(str, Enum):
    """How a check ended."""

    OK = "ok"
    NOTE = "note"
    BAD = "BAD"


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the report."""

    what: str
    verdict: Verdict
    found: str
    remedy: str = ""
    exit_code: int = 0


def failed(what: str, error: PipelineError) -> Finding:
    """Return the finding that an error is."""
    place = f"{error.where}: " if error.where else ""
    return Finding(what, Verdict.BAD, f"{place}{error.what}", error.remedy, error.exit_code)


def good(what: str, found: str) -> Finding:
    """Return the finding that all is well."""
    return Finding(what, Verdict.OK, found)


def note(what: str, found: str, remedy: str = "") -> Finding:
    """Return what is worth knowing, and no failure."""
    return Finding(what, Verdict.NOTE, found, remedy)


def refused(what: str, found: str, remedy: str) -> Finding:
    """Return what the scheduler would refuse."""
    return Finding(what, Verdict.BAD, found, remedy, exit_code=6)
