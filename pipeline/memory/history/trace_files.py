"""Answers of an oracle about a model's memory, kept in files: a plan made again, or for other cards, asks nothing anew.

A file is a NumPy archive without pickled objects: the tapes as arrays, all else as JSON. The caller names the folder by
everything that the answers follow from; files that cannot be read count as absent.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from contextlib import suppress
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from pipeline.files import replacing
from pipeline.keys import recipe_key
from pipeline.memory.footprint import (
    Category,
    Evaluates,
    MemoryPart,
    MicroFootprint,
    Provenance,
    StandingFootprint,
    Tape,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pipeline.memory.footprint import MemoryChoice, Oracle, Sizes

MOST_MODELS = 32  # whose answers are kept; the oldest go
_ENDING = ".npz"
_UNREADABLE = (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile)

Answer = TypeVar("Answer", StandingFootprint, MicroFootprint)


class RememberedOracle:
    """An `Oracle` that asks another, made when needed, only what no file answers."""

    def __init__(self, folder: Path, make: Callable[[], Oracle]) -> None:
        """Take the folder of a model with all its options, and a function that makes the oracle to ask."""
        self._folder, self._make = folder, make
        self._oracle: Oracle | None = None
        self._answers: dict[str, StandingFootprint | MicroFootprint] = {}

    def standing(self, choice: MemoryChoice) -> StandingFootprint:
        """Return the memory that does not depend on the batch."""
        return self._answer(StandingFootprint, "standing", choice, lambda oracle: oracle.standing(choice))

    def micro(self, choice: MemoryChoice, sizes: Sizes) -> MicroFootprint:
        """Return the memory of a micro-batch of these sizes."""
        return self._answer(MicroFootprint, "micro", choice, lambda oracle: oracle.micro(choice, sizes), sizes)

    def evaluation(self, choice: MemoryChoice, sizes: Sizes) -> MicroFootprint:
        """Return the memory of a batch without gradients."""

        def ask(oracle: Oracle) -> MicroFootprint:
            assert isinstance(oracle, Evaluates)
            return oracle.evaluation(choice, sizes)

        return self._answer(MicroFootprint, "evaluation", choice, ask, sizes)

    def _answer(
        self,
        kind: type[Answer],
        what: str,
        choice: MemoryChoice,
        ask: Callable[[Oracle], Answer],
        sizes: Sizes | None = None,
    ) -> Answer:
        """Return the answer to a question: as it is known, as a file has it, or as the oracle gives it."""
        question = {"what": what, "choice": asdict(choice), "sizes": dict(sizes or {})}
        name = recipe_key("trace", question).hex()
        answer = self._answers.get(name) or read_answer(self._folder / f"{name}{_ENDING}", kind)
        if answer is None:
            self._oracle = self._oracle or self._make()
            answer = ask(self._oracle)
            with suppress(OSError):  # what cannot be kept is asked again
                write_answer(self._folder / f"{name}{_ENDING}", answer)
        self._answers[name] = answer
        assert isinstance(answer, kind)
        return answer


def write_answer(path: Path, answer: StandingFootprint | MicroFootprint) -> None:
    """Write an answer to a file; the first of a model takes the place of the oldest model's where there are many."""
    values = {field.name: getattr(answer, field.name) for field in fields(answer)}
    arrays: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Tape):
            arrays |= {f"{name}.blocks": value.block_E, f"{name}.bytes": value.bytes_E}
    rest = {name: value for name, value in values.items() if not isinstance(value, Tape)}
    if not path.parent.exists():
        path.parent.mkdir(parents=True)
        drop_oldest(path.parent.parent)
    with replacing(path) as aside, aside.open("wb") as file:
        np.savez_compressed(file, rest=np.array(json.dumps(rest, default=asdict)), **arrays)


def drop_oldest(folder: Path) -> None:
    """Remove the answers about all models but the newest."""
    with suppress(OSError):
        models = sorted(folder.iterdir(), key=lambda model: model.stat().st_mtime_ns, reverse=True)
        for model in models[MOST_MODELS:]:
            shutil.rmtree(model, ignore_errors=True)


def read_answer(path: Path, kind: type[Answer]) -> Answer | None:
    """Return the answer in a file; None where there is none that can be read."""
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            values = json.loads(str(file["rest"]))
            tapes = {name.removesuffix(".blocks") for name in file.files if name.endswith(".blocks")}
            values |= {name: Tape(file[f"{name}.blocks"], file[f"{name}.bytes"]) for name in tapes}
        values |= {name: _parts(rows) for name, rows in values.items() if name.endswith("parts")}
        return kind(**{**values, "origin": Provenance(values["origin"]), "notes": tuple(values["notes"])})
    except _UNREADABLE:
        return None


def _parts(rows: list[dict[str, Any]]) -> tuple[MemoryPart, ...]:
    return tuple(MemoryPart(Category(row["category"]), row["name"], row["bytes"]) for row in rows)
