"""Trainings that go on with other code than they began with: as the change was accepted, or is none.

A model's folder records the digests of code that was accepted for it (`accepted_code.json`), each with its time.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pipeline.command_line import Command
from pipeline.errors import ConfigError
from pipeline.files import write_whole
from pipeline.journal.run_folder import writing_run
from pipeline.training.prepared import ModelFolder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from pipeline.training.prepared import Prepared

FLAG = "--accept-code"


def with_accepted_code(prepared: Prepared, models: Path) -> Prepared:
    """Return the plan of the training for which this code was accepted, if there is one, else the plan as it is."""
    code = prepared.recipe["code"]
    for folder, recipe in _alike(prepared, models):
        if code in _accepted(folder):
            return replace(prepared, name=folder.path.name, recipe=recipe)
    return prepared


def accept_code(prepared: Prepared, models: Path) -> str:
    """Record that the newest training that differs in nothing but its code goes on with this one; return its name."""
    others = [folder for folder, recipe in _alike(prepared, models) if recipe["code"] != prepared.recipe["code"]]
    newest = max(others, key=lambda folder: folder.prepared.stat().st_mtime, default=None)
    if newest is None:
        what = "there is no training that differs from this one in nothing but its code"
        raise ConfigError(what, where=FLAG, remedy=Command.of("submit train", then="   (says what changed)"))
    _record(newest, prepared.recipe["code"], f"accepted with {FLAG}")
    return newest.path.name


def _alike(prepared: Prepared, models: Path) -> Iterator[tuple[ModelFolder, dict[str, Any]]]:
    """Yield the trainings whose recipes differ from this one's in the code at most."""
    mine = _without_code(json.loads(json.dumps(prepared.recipe)))
    for path in sorted(models.glob(f"{prepared.name.rpartition('-')[0]}-*/prepared.json")):
        with suppress(OSError, ValueError, KeyError):  # it is being written, or of another version
            recipe = json.loads(path.read_text())["recipe"]
            if _without_code(recipe) == mine:
                yield ModelFolder(path.parent), recipe


def _without_code(recipe: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in recipe.items() if name != "code"}


def _accepted(folder: ModelFolder) -> list[str]:
    try:
        return [entry["code"] for entry in json.loads(folder.accepted_code.read_text())]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _record(folder: ModelFolder, code: str, why: str) -> None:
    """Write down that a training goes on with some code."""
    entries = json.loads(folder.accepted_code.read_text()) if folder.accepted_code.exists() else []
    entries.append({"code": code, "at": datetime.now(UTC).isoformat(timespec="seconds"), "why": why})
    with writing_run(folder.path, "train.models"):
        write_whole(folder.accepted_code, json.dumps(entries, indent=1))
