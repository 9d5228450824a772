"""What is left out of a run because its tasks died of it: a rejection of this run, tried anew by the next."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from pipeline.records import Reason
from pipeline.runs.folder import writing

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pipeline.runs.folder import RunFolder

Why = tuple[Reason, str]


def leave_out(folder: RunFolder, stage: str, names: Iterable[str], reason: Reason, detail: str) -> None:
    """Write down what a stage goes on without."""
    with writing(folder.left_out), folder.left_out.open("ab") as file:
        for name in names:
            line = {"stage": stage, "name": name, "reason": reason.value, "detail": detail}
            file.write(json.dumps(line).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def left_out(folder: RunFolder | None, stage: str) -> dict[str, Why]:
    """Return what a stage goes on without, and why."""
    found: dict[str, Why] = {}
    if folder is None or not folder.left_out.exists():
        return found
    for line in folder.left_out.read_text().splitlines():
        try:
            data = json.loads(line)
        except ValueError:  # a full disk has cut it
            continue
        if data["stage"] == stage:
            found[data["name"]] = (Reason(data["reason"]), data["detail"])
    return found
