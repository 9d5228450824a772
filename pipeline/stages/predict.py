"""Stage predict: a checkpoint and items in; what the model says of each out, as tables and safetensors.

FOLDER/predictions.json    of what it is, and its files; written last: without it nothing is done
       predictions.csv, predictions.jsonl, arrays-00000.safetensors …    see training/predictions.py
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import xxhash

from pipeline.store.format.disk import Disk

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping
    from pathlib import Path

    from pipeline.records import Reason
    from pipeline.training.checkpoints.checkpoint_choice import ChosenCheckpoint
    from pipeline.training.evaluating.apply_model import ApplyJob, ApplyResult

LETTERS = 12  # of digests, in names
FORMAT = 1
TOLD, PARTS = "predictions.json", ".parts-"
PIECE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Predictions:
    """What a folder of predictions is of."""

    model: str
    split: str  # empty: all items
    items: int  # that have predictions
    checkpoint: str
    step: int
    digest: str  # of the checkpoint
    made: str  # of the items
    files: Mapping[str, tuple[int, str]]  # their bytes and digests
    rejected: Mapping[str, int] = field(default_factory=dict)
    examples: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    format: int = FORMAT


def prediction_parts(folder: Path, chosen: ChosenCheckpoint, made: str) -> Path:
    """Return where the outputs are while predictions are in the making."""
    return folder / f"{PARTS}{chosen.digest[:LETTERS]}-{made[:LETTERS]}"


def read_predictions(
    folder: Path, chosen: ChosenCheckpoint, made: str, verify_bytes: int | None = None
) -> Predictions | None:
    """Return what is said of a folder, if it is of this, and its files are whole: up to so many bytes they are read."""
    try:
        found = Predictions(**json.loads((folder / TOLD).read_text()))
        if (found.digest, found.made, found.format) != (chosen.digest, made, FORMAT):
            return None
        left = sum(size for size, _ in found.files.values()) if verify_bytes is None else verify_bytes
        for name, (size, digest) in found.files.items():
            path = folder / name
            if path.stat().st_size != size or (size <= left and _file_digest(path) != digest):
                return None
            left -= size
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found


def _file_digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def predict(job: ApplyJob, folder: Path, model: str, split: str | None) -> Generator[Reason | None, None, None]:
    """Predict the items of a split, as one rank; yield once for every item of this rank."""
    from pipeline.training.evaluating.apply_model import apply_model

    applied = yield from apply_model(job)
    if applied is None:
        return
    with job.ranks.patient("writing predictions"):
        if job.ranks.rank == 0:
            _write_predictions(job, applied, folder, model, split)
        job.ranks.exchange({})


def remove_parts(folder: Path) -> None:
    """Remove outputs in the making, those of other checkpoints, too."""
    for parts in folder.glob(f"{PARTS}*"):
        shutil.rmtree(parts, ignore_errors=True)


def _write_predictions(job: ApplyJob, applied: ApplyResult, folder: Path, model: str, split: str | None) -> None:
    from pipeline.training.evaluating.output_parts import publish_text
    from pipeline.training.evaluating.outputs import GatheredOutputs, write_tables

    (folder / TOLD).unlink(missing_ok=True)  # what it tells of is about to be replaced
    tables = write_tables(GatheredOutputs(applied.parts, of=applied.of), folder)
    files = (tables.csv, tables.jsonl, *tables.arrays)
    told = Predictions(
        model=model,
        split=split or "",
        items=tables.items,
        checkpoint=applied.chosen.path.name,
        step=applied.chosen.step,
        digest=applied.chosen.digest,
        made=job.made,
        files={path.name: (path.stat().st_size, _file_digest(path)) for path in files},
        rejected=applied.rejected,
        examples=applied.examples,
        note=applied.chosen.note,
    )
    publish_text(Disk(), folder / TOLD, json.dumps(asdict(told), indent=1) + "\n")
    remove_parts(folder)
    job.say(f"predictions of {tables.items:,} items: {folder}")
