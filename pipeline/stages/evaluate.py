"""Stage evaluate: a checkpoint and a split in; its loss and metrics out, one small file for each pair of them."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.keys import content_digest
from pipeline.store.format.disk import Disk

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping
    from pathlib import Path

    from pipeline.records import Reason
    from pipeline.training.checkpoints.checkpoint_choice import ChosenCheckpoint
    from pipeline.training.evaluating.apply_model import ApplyJob

LETTERS = 12  # of digests, in names
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Figures:
    """What a checkpoint comes to on the items of a split."""

    split: str  # empty: all items
    items: int  # that were looked at
    checkpoint: str
    step: int
    digest: str  # of the checkpoint
    made: str  # of the items
    figures: Mapping[str, float | None]  # loss and metrics; None: not a finite number
    rejected: Mapping[str, int] = field(default_factory=dict)
    examples: Mapping[str, str] = field(default_factory=dict)
    note: str = ""


def evaluation_path(folder: Path, split: str | None, chosen: ChosenCheckpoint, made: str) -> Path:
    """Return where figures are: in a name all that they are of."""
    return folder / f"{split or 'all'}-{chosen.digest[:LETTERS]}-{made[:LETTERS]}.json"


def evaluation_parts(path: Path) -> Path:
    """Return where the outputs are while figures are in the making."""
    return path.with_suffix(".parts")


def read_evaluation(path: Path, chosen: ChosenCheckpoint, made: str) -> Figures | None:
    """Return the figures of a file, if they are of this, and its bytes are those that were written."""
    try:
        data = json.loads(path.read_text())
        found = Figures(**data["evaluation"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    is_whole = data.get("format") == FORMAT and data.get("digest") == _json_digest(data["evaluation"])
    return found if is_whole and (found.digest, found.made) == (chosen.digest, made) else None


def _write_figures(path: Path, figures: Figures) -> None:
    from pipeline.training.evaluating.output_parts import publish_text

    told = asdict(figures)
    text = json.dumps({"format": FORMAT, "digest": _json_digest(told), "evaluation": told}, indent=1) + "\n"
    publish_text(Disk(), path, text)


def _json_digest(told: Mapping[str, Any]) -> str:
    return content_digest(json.dumps(told, sort_keys=True).encode()).hex()


def evaluate(job: ApplyJob, folder: Path, split: str | None) -> Generator[Reason | None, None, None]:
    """Evaluate a checkpoint on a split, as one rank; yield once for every item of this rank."""
    from pipeline.training.evaluating.apply_model import apply_model

    applied = yield from apply_model(job)
    if applied is None:
        return
    with job.ranks.patient("metrics"):
        found = applied.evaluation.losses() | applied.evaluation.metrics()
    if job.ranks.rank == 0:
        figures = Figures(
            split=split or "",
            items=len(job.table) - sum(applied.rejected.values()),
            checkpoint=applied.chosen.path.name,
            step=applied.chosen.step,
            digest=applied.chosen.digest,
            made=job.made,
            figures={name: value if math.isfinite(value) else None for name, value in found.items()},
            rejected=applied.rejected,
            examples=applied.examples,
            note=applied.chosen.note,
        )
        _write_figures(evaluation_path(folder, split, applied.chosen, job.made), figures)
        shutil.rmtree(applied.parts, ignore_errors=True)
        for name, value in figures.figures.items():
            job.say(f"{name}: {'not finite' if value is None else f'{value:.6g}'}")
    job.ranks.exchange({})
