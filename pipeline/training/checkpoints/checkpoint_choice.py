"""Choosing a training's checkpoint (best, last or by name) and loading it into a model."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import ConfigError, JobFailed
from pipeline.keys import content_digest
from pipeline.store.format.disk import Disk
from pipeline.training.checkpoints import checkpoint_reader
from pipeline.training.checkpoints.checkpoint_folder import by_figure
from pipeline.training.checkpoints.checkpoint_reader import MANIFEST, open_checkpoint
from pipeline.training.checkpoints.exported_model import EXPORT, load_export, read_export
from pipeline.training.checkpoints.tensor_file import ANOTHER, CheckpointDamaged
from pipeline.training.checkpoints.training_state import model_key, model_targets

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from pipeline.training.checkpoints.checkpoint_reader import Manifest
    from pipeline.training.ranks.rank_protocol import Ranks
    from pipeline.training.step.step import Step

BEST, LAST = "best", "last"
TRIES = 5  # attempts to read a checkpoint: one may be damaged, or removed meanwhile


@dataclass(frozen=True, slots=True)
class ChosenCheckpoint:
    """A checkpoint that is to be used."""

    path: Path
    step: int
    model: str  # name of its training
    digest: str  # of its manifest, which has the digests of its files
    note: str = ""  # why it is not the one that was asked for

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"path": str(self.path)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ChosenCheckpoint:
        return cls(**{**data, "path": Path(data["path"])})


def choose_checkpoint(folder: Path, wanted: str, without: Collection[str] = ()) -> ChosenCheckpoint | None:
    """Choose a checkpoint of a training from the manifests, without reading tensors; None: there is none.

    `wanted` is best, last, or a folder's name or path; `without` has the names of those that proved unusable.
    """
    if wanted not in (BEST, LAST):
        return _exported(Path(wanted)) if (Path(wanted) / EXPORT).is_file() else _named(folder, wanted, without)
    known = [manifest for manifest in _all(folder) if manifest.name not in without]
    newest = max(known, key=lambda manifest: manifest.serial, default=None)
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
    """Return the manifest of each checkpoint that can be read."""
    disk, known = Disk(), list[checkpoint_reader.Manifest]()
    for name in disk.list_folder(folder):
        if name.startswith("step-"):
            with suppress(CheckpointDamaged):  # or removed meanwhile, for newer ones
                known.append(checkpoint_reader.read_manifest(disk, folder / name))
    return known


def _chosen(path: Path, note: str = "") -> ChosenCheckpoint:
    manifest = checkpoint_reader.read_manifest(Disk(), path)
    return ChosenCheckpoint(path, manifest.step, str(manifest.identity.get("recipe", "")), _digest(path), note)


def _exported(path: Path) -> ChosenCheckpoint:
    card = read_export(path)
    return ChosenCheckpoint(path, card["step"], card["name"], _digest(path))


def _digest(path: Path) -> str:
    """Return the digest of what names all of a checkpoint's bytes: its manifest, or an exported model's card."""
    card = path / EXPORT
    return content_digest((card if card.is_file() else path / MANIFEST).read_bytes()).hex()


def load_checkpoint(
    step: Step, ranks: Ranks, select: Callable[[Collection[str]], ChosenCheckpoint], say: Callable[[str], None]
) -> ChosenCheckpoint:
    """Load the checkpoint that rank 0 selects into the model of every rank: its moving averages where it has any.

    One that is damaged, or that a training removes meanwhile, is skipped; `select` gets the names of those.
    """
    without: list[str] = []
    for _ in range(TRIES):
        mine = select(without).to_json() if ranks.rank == 0 else {}
        chosen = ChosenCheckpoint.from_json(ranks.exchange(mine)[0])
        replies = ranks.exchange({"why": _load(step, chosen)})
        problems = [reply["why"] for reply in replies if reply["why"]]
        if not problems:
            return chosen
        say(f"checkpoint {chosen.path.name} is passed over: {problems[0]}")
        without.append(chosen.path.name)
    problem = f"none of {TRIES} checkpoints could be read; the last: {problems[0]}"
    raise JobFailed(problem, where=str(chosen.path.parent), remedy=ANOTHER)


def _load(step: Step, chosen: ChosenCheckpoint) -> str:
    """Fill a model; return what went wrong where another checkpoint may work, else ""."""
    try:
        if _digest(chosen.path) != chosen.digest:
            return "it is another one by now"
        if (chosen.path / EXPORT).is_file():
            load_export(chosen.path, step.model)
            return ""
        # Of any training, as long as the model is the same.
        identity = checkpoint_reader.read_manifest(Disk(), chosen.path).identity
        identity = {**identity, "model": model_key(step.model)}
        loaded = open_checkpoint(chosen.path, identity, verified=True)  # loading digests every byte
        if loaded.is_divided:
            from pipeline.training.checkpoints.sharded_checkpoint import assembled  # which is slow to import

            loaded = assembled(loaded)
        loaded.load_into(model_targets(step.model, loaded.specs))
    except (CheckpointDamaged, FileNotFoundError) as error:
        return f"{error.where}: {error.what}" if isinstance(error, CheckpointDamaged) else "it is gone"
    return ""
