"""Stages evaluate and predict: from a checkpoint and a split to loss and metrics, or to predictions of each item.

Each pair has one small file of metrics. Predictions are a folder:

FOLDER/predictions.json    its origin and its files; written last, so a folder without it is incomplete
       predictions.csv, predictions.jsonl, NAME-00000.safetensors …    see training/evaluating/outputs.py
"""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pipeline.files import file_digest, write_whole
from pipeline.keys import content_digest
from pipeline.training.checkpoints.checkpoint import ChosenCheckpoint

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping
    from pathlib import Path

    from pipeline.records import Reason
    from pipeline.training.checkpoints.checkpoint import ChosenCheckpoint
    from pipeline.training.evaluating.evaluator import ApplyJob, ApplyResult

LETTERS = 12  # of digests, in names
EVALUATION_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class ResultOf:
    """The model and items of a result."""

    split: str  # empty: all items
    items: int  # that have one
    checkpoint: str
    step: int
    digest: str  # of the checkpoint
    made: str  # of the items
    model: str = ""  # the name of its training
    source: str = ""  # the checkpoint's folder
    data: str = ""  # the path of the data set
    rejected: Mapping[str, int] = field(default_factory=dict)
    examples: Mapping[str, str] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Figures(ResultOf):
    """Loss and metrics of a checkpoint on the items of a split."""

    figures: Mapping[str, float | None]  # loss and metrics; None: not a finite number


def evaluation_path(folder: Path, split: str | None, chosen: ChosenCheckpoint, made: str) -> Path:
    """Return the file of figures, named after the split, the checkpoint and the items."""
    return folder / f"{split or 'all'}-{chosen.digest[:LETTERS]}-{made[:LETTERS]}.json"


def evaluation_parts(path: Path) -> Path:
    """Return the folder of the outputs while figures are being made."""
    return path.with_suffix(".parts")


def read_evaluation(path: Path, chosen: ChosenCheckpoint, made: str) -> Figures | None:
    """Return the figures of a file, if they are of this checkpoint and these items and the file is intact."""
    figures = kept_figures(path)
    return figures if figures and (figures.digest, figures.made) == (chosen.digest, made) else None


def kept_figures(path: Path) -> Figures | None:
    """Return the figures of a file; None where it is missing, damaged, or of another version."""
    try:
        data = json.loads(path.read_text())
        figures = Figures(**data["evaluation"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    is_whole = data.get("format") == EVALUATION_FORMAT and data.get("digest") == _json_digest(data["evaluation"])
    return figures if is_whole else None


def _write_figures(path: Path, figures: Figures) -> None:
    from pipeline.training.evaluating.outputs import publish_text

    document = asdict(figures)
    text = (
        json.dumps({"format": EVALUATION_FORMAT, "digest": _json_digest(document), "evaluation": document}, indent=1)
        + "\n"
    )
    publish_text(path, text)


def _json_digest(document: Mapping[str, Any]) -> str:
    return content_digest(json.dumps(document, sort_keys=True).encode()).hex()


def evaluate(job: ApplyJob) -> Generator[Reason | None, None, None]:
    """Evaluate a checkpoint on a split, as one rank; yield once for every item of this rank."""
    from pipeline.training.evaluating.evaluator import apply_model

    applied = yield from apply_model(job)
    if applied is None:
        return
    with job.ranks.patient("metrics"):
        values = applied.evaluation.results()
    if job.ranks.rank == 0:
        figures = Figures(
            items=len(job.table) - sum(applied.rejected.values()),
            figures={name: value if math.isfinite(value) else None for name, value in values.items()},
            **_of(job, applied),
        )
        of = job.applied
        _write_figures(evaluation_path(of.folder.evaluations, of.split, applied.chosen, of.made), figures)
        shutil.rmtree(applied.parts, ignore_errors=True)
        for name, value in figures.figures.items():
            job.say(f"{name}: {'not finite' if value is None else f'{value:.6g}'}")
    job.ranks.exchange({})


def _of(job: ApplyJob, applied: ApplyResult) -> dict[str, Any]:
    """Return which model and items a result is of."""
    chosen, of = applied.chosen, job.applied
    return {
        "split": of.split or "",
        "checkpoint": chosen.path.name,
        "step": chosen.step,
        "digest": chosen.digest,
        "made": of.made,
        "model": chosen.model or of.prepared.name,
        "source": str(chosen.path),
        "data": of.data,
        "rejected": applied.rejected,
        "examples": applied.examples,
        "note": chosen.note,
    }


PREDICTIONS_FORMAT = 2  # 1 had shapes where numbers belong
DESCRIPTION, PARTS = "predictions.json", ".parts-"


@dataclass(frozen=True, kw_only=True)
class Predictions(ResultOf):
    """The model, items and files of a folder of predictions."""

    files: Mapping[str, tuple[int, str]]  # their bytes and digests
    format: int = PREDICTIONS_FORMAT


def prediction_parts(folder: Path, chosen: ChosenCheckpoint, made: str) -> Path:
    """Return the folder of the outputs while predictions are being made."""
    return folder / f"{PARTS}{chosen.digest[:LETTERS]}-{made[:LETTERS]}"


def read_predictions(
    folder: Path, chosen: ChosenCheckpoint, made: str, verify_bytes: int | None = None
) -> Predictions | None:
    """Return what a folder holds, if it is of this checkpoint and these items; files up to `verify_bytes` are read."""
    try:
        predictions = Predictions(**json.loads((folder / DESCRIPTION).read_text()))
        if (predictions.digest, predictions.made, predictions.format) != (chosen.digest, made, PREDICTIONS_FORMAT):
            return None
        left = sum(size for size, _ in predictions.files.values()) if verify_bytes is None else verify_bytes
        for name, (size, digest) in predictions.files.items():
            path = folder / name
            if path.stat().st_size != size or (size <= left and file_digest(path) != digest):
                return None
            left -= size
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return predictions


def predict(job: ApplyJob) -> Generator[Reason | None, None, None]:
    """Predict the items of a split, as one rank; yield once for every item of this rank."""
    from pipeline.training.evaluating.evaluator import apply_model

    applied = yield from apply_model(job)
    if applied is None:
        return
    with job.ranks.patient("writing predictions"):
        if job.ranks.rank == 0 and (whole := _merged_over_tasks(job, applied)) is not None:
            _write_predictions(job, whole)
        job.ranks.exchange({})


def _merged_over_tasks(job: ApplyJob, applied: ApplyResult) -> ApplyResult | None:
    """Return the results of all tasks to the one that writes them, once all are done; None to the others.

    Each task leaves a note before it looks for the notes of the others, so at least one task finds them all. The first
    one to claim the writing does it. If it dies meanwhile, its next attempt finds its own claim.
    """
    if (share := job.share) is None:
        return applied
    own = {"rejected": dict(applied.rejected), "examples": dict(applied.examples)}
    notes = [applied.parts / f"done-{share.run}-{task:05d}" for task in range(share.tasks)]
    write_whole(notes[share.task], json.dumps(own))
    if not all(note.is_file() for note in notes):
        job.say(f"task {share.task + 1} of {share.tasks} is done; the last task writes the predictions")
        return None
    writer = applied.parts / f"written-by-{share.run}"
    try:
        with suppress(FileExistsError):
            writer.symlink_to(str(share.task))  # which is there whole or not at all
        if str(writer.readlink()) != str(share.task):
            return None
        reported = [json.loads(note.read_text()) for note in notes]
    except FileNotFoundError:  # another one has written them by now, and removed the parts
        return None
    rejected: Counter[str] = Counter()
    for report in reported:
        rejected.update(report["rejected"])
    examples = {reason: text for report in reversed(reported) for reason, text in report["examples"].items()}
    return replace(applied, rejected=dict(rejected), examples=examples)


def _write_predictions(job: ApplyJob, applied: ApplyResult) -> None:
    from pipeline.training.evaluating.outputs import GatheredOutputs, publish_text, write_tables

    folder = applied.parts.parent  # as `prediction_parts` says
    (folder / DESCRIPTION).unlink(missing_ok=True)  # its files are about to be replaced
    gathered = GatheredOutputs(applied.parts, of=applied.of)
    files = write_tables(gathered, folder, parquet=job.train.predict.parquet)
    if job.publish is not None:
        files += job.publish(folder, gathered)
    predictions = Predictions(
        items=len(gathered.numbers),
        files={str(path.relative_to(folder)): (path.stat().st_size, file_digest(path)) for path in files},
        **_of(job, applied),
    )
    publish_text(folder / DESCRIPTION, json.dumps(asdict(predictions), indent=1) + "\n")
    for parts in folder.glob(f"{PARTS}*"):  # those of other checkpoints included
        shutil.rmtree(parts, ignore_errors=True)
    job.say(f"{predictions.items:,} predictions: {folder}")
