"""Which checkpoint of a training is used: the best, the last or one that is named; and how it comes into a model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import ConfigError, JobFailed
from pipeline.keys import content_digest
from pipeline.store.format.disk import Disk
from pipeline.training.checkpoints import checkpoint_reader
from pipeline.training.checkpoints.checkpoint_folder import by_figure
from pipeline.training.checkpoints.checkpoint_reader import MANIFEST, open_checkpoint
from pipeline.training.checkpoints.tensor_file import ANOTHER, CheckpointDamaged
from pipeline.training.checkpoints.training_state import model_key, model_targets

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from pipeline.training.checkpoints.checkpoint_reader import Manifest
    from pipeline.training.ranks.rank_protocol import Ranks
    from pipeline.training.step.step import Step

BEST, LAST = "best", "last"
TRIES = 5  # checkpoints that are gone or damaged when they are read


@dataclass(frozen=True, slots=True)
class ChosenCheckpoint:
    """A checkpoint that is to be used."""

    path: Path
    step: int
    model: str  # what its training is called
    digest: str  # of all that it says of itself, the digests of its files included
    note: str = ""  # where it is not the one that was asked for

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"path": str(self.path)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ChosenCheckpoint:
        return cls(**{**data, "path": Path(data["path"])})


def choose_checkpoint(folder: Path, wanted: str, without: Collection[str] = ()) -> ChosenCheckpoint | None:
    """Return a checkpoint of a training by what is said of each, of its tensors none is read; None: there is none.

    `wanted` is best, last, or the name or the path of a folder; `without` are names of those that proved unusable.
    """
    if wanted not in (BEST, LAST):
        return _named(folder, wanted, without)
    known = [told for told in _all(folder) if told.name not in without]
    newest = max(known, key=lambda told: told.serial, default=None)
    if newest is None:
        return None
    best = by_figure(known)
    if wanted == LAST or best:
        return _chosen(folder / (newest if wanted == LAST else best[0]).name)
    return _chosen(folder / newest.name, note="no checkpoint has a figure of a validation: the last one is used")


def _named(folder: Path, wanted: str, without: Collection[str]) -> ChosenCheckpoint:
    path = folder / wanted if (folder / wanted).is_dir() else Path(wanted).absolute()
    if path.name in without:
        raise JobFailed("is damaged, or no longer there", where=str(path), remedy=ANOTHER)
    if not (path / MANIFEST).is_file():
        remedy = f"best, last, or a folder such as those of   ls {folder}"
        raise ConfigError("there is no such checkpoint", where=wanted, remedy=remedy)
    return _chosen(path)


def _all(folder: Path) -> list[Manifest]:
    """Return what is told of each checkpoint that can be read."""
    disk, known = Disk(), list[checkpoint_reader.Manifest]()
    for name in disk.list_folder(folder):
        if name.startswith("step-"):
            try:
                known.append(checkpoint_reader.read_manifest(disk, folder / name))
            except CheckpointDamaged:  # or removed meanwhile, for newer ones
                continue
    return known


def _chosen(path: Path, note: str = "") -> ChosenCheckpoint:
    told = checkpoint_reader.read_manifest(Disk(), path)
    return ChosenCheckpoint(path, told.step, str(told.identity.get("recipe", "")), _digest(path), note)


def _digest(path: Path) -> str:
    return content_digest((path / MANIFEST).read_bytes()).hex()


def load_checkpoint(
    step: Step, ranks: Ranks, select: Callable[[Collection[str]], ChosenCheckpoint], say: Callable[[str], None]
) -> ChosenCheckpoint:
    """Bring the checkpoint that the first rank selects into the model of every rank; moving averages where it has any.

    One that is damaged, or that a training removes meanwhile, is passed over; `select` is told of those.
    """
    without: list[str] = []
    for _ in range(TRIES):
        mine = select(without).to_json() if ranks.rank == 0 else {}
        chosen = ChosenCheckpoint.from_json(ranks.exchange(mine)[0])
        told = ranks.exchange({"why": _load(step, chosen)})
        whys = [one["why"] for one in told if one["why"]]
        if not whys:
            return chosen
        say(f"checkpoint {chosen.path.name} is passed over: {whys[0]}")
        without.append(chosen.path.name)
    what = f"none of {TRIES} checkpoints could be read; the last: {whys[0]}"
    raise JobFailed(what, where=str(chosen.path.parent), remedy=ANOTHER)


def _load(step: Step, chosen: ChosenCheckpoint) -> str:
    """Fill a model; return why that could not be, where another checkpoint may do."""
    try:
        if _digest(chosen.path) != chosen.digest:
            return "it is another one by now"
        identity = {
            **checkpoint_reader.read_manifest(Disk(), chosen.path).identity,
            "model": model_key(step.model),
        }  # of any training
        loaded = open_checkpoint(chosen.path, identity, verified=True)  # by what is read now, every byte
        if loaded.is_divided:
            from pipeline.training.checkpoints.sharded_checkpoint import assembled  # which is slow to import

            loaded = assembled(loaded)
        loaded.load_into(model_targets(step.model, loaded.specs))
    except (CheckpointDamaged, FileNotFoundError) as error:
        return f"{error.where}: {error.what}" if isinstance(error, CheckpointDamaged) else "it is gone"
    return ""
