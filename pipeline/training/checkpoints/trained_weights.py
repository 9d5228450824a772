"""Trained weights: a training's checkpoint, pretrained weights in any published form, and exported models.

Pretrained are a file of torch.save (.pt, .pth, .ckpt; nothing in it is executed), a .safetensors file, a Hugging Face
folder with one or several, an exported model, or a checkpoint of ours; of that the moving averages, where it has them,
as those were evaluated. A `NameTable` says under which names another program publishes a model's weights: they are read
as ours, and written again to the bit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipeline.codec import plain, rebuilt
from pipeline.command_line import quoted
from pipeline.encoder.checkpoint_files import INDEX, SINGLE, shards_of
from pipeline.encoder.published_weights import Form, read_pt, read_safetensors
from pipeline.encoder.published_weights import renamed as renamed
from pipeline.errors import ConfigError, DataError, JobFailed, WeightsUnusable
from pipeline.protocol import FitsOptions, HasFilesBeside, HasPublishedForms
from pipeline.store.format.disk import Disk
from pipeline.training.checkpoints.checkpoint import (
    EXPORTED,
    ChosenCheckpoint,
    checkpoint_digest,
    open_checkpoint,
    read_export,
    tensor_words,
)
from pipeline.training.checkpoints.keeper import model_state, plain_name
from pipeline.training.checkpoints.sealed_folder import (
    ANOTHER,
    MANIFEST,
    TENSORS,
    FolderDamaged,
    distinct,
    write_manifest,
    write_tensors,
)
from pipeline.training.prepared import ModelFolder
from pipeline.units import first_few

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from torch import nn

    from pipeline.config.schema_train import TrainSection
    from pipeline.protocol import PublishedForm
    from pipeline.training.ranks import Ranks
    from pipeline.training.step.step import Step

TRIES = 5  # attempts to read a checkpoint: one may be damaged, or removed meanwhile
AS, WHERE = "train.pretrained_as", "train.pretrained"
NESTED = ("state_dict", "model_state_dict", "model")  # where training scripts put the weights
OTHERS = "use weights of this model"
PARTIAL = ", or load only what fits: train.pretrained_partial: true"
UNTRUSTED = "save the weights as .safetensors, or as a plain state dict: torch.save(model.state_dict(), FILE)"
FORMS = "use a .pt, .pth, .ckpt or .safetensors file, a Hugging Face folder, or a step-… folder"
_MOST_NAMED = 5  # of each kind of difference


NameTable = Form  # as users know it


def published_forms(model: nn.Module) -> Mapping[str, PublishedForm]:
    """Return the published forms that a model knows, by name."""
    return model.published_forms() if isinstance(model, HasPublishedForms) else {}


# A checkpoint that is to be used


def load_checkpoint(
    step: Step,
    ranks: Ranks,
    select: Callable[[Collection[str]], ChosenCheckpoint],
    say: Callable[[str], None],
    train: TrainSection | None = None,
) -> ChosenCheckpoint:
    """Load the checkpoint that rank 0 selects into the model of every rank: its moving averages where it has any.

    A file of weights is read as settings of `train` say. A checkpoint that is damaged, or that a training removes
    meanwhile, is skipped; `select` gets the names of those.
    """
    without: list[str] = []
    for _ in range(TRIES):
        mine = plain(select(without)) if ranks.rank == 0 else {}
        chosen = rebuilt(ChosenCheckpoint, ranks.exchange(mine)[0])
        problems = [reply["why"] for reply in ranks.exchange({"why": _load(step, chosen, train)}) if reply["why"]]
        if not problems:
            return chosen
        say(f"checkpoint {chosen.path.name} is skipped: {problems[0]}")
        without.append(chosen.path.name)
    problem = f"none of {TRIES} checkpoints could be read; the last: {problems[0]}"
    raise JobFailed(problem, where=str(chosen.path.parent), remedy=ANOTHER)


def _load(step: Step, chosen: ChosenCheckpoint, train: TrainSection | None) -> str:
    """Fill a model; return the problem if another checkpoint may work, else ""."""
    try:
        if checkpoint_digest(chosen.path) != chosen.digest:
            return "it was replaced while being read"
        load_pretrained(step.model, chosen.path, train=train)
    except (FolderDamaged, FileNotFoundError, ConfigError) as error:
        if isinstance(error, FolderDamaged):
            return f"{error.where}: {error.what}"
        if isinstance(error, ConfigError) and chosen.path.exists():
            raise
        return "it was removed"
    return ""


# Pretrained weights


@dataclass(frozen=True)
class PretrainedReport:
    """Which weights were loaded, and which were not."""

    loaded: int  # tensors of the model
    missing: tuple[str, ...] = ()  # in the model, not in the file
    unexpected: tuple[str, ...] = ()  # in the file, not in the model
    reshaped: Mapping[str, str] = field(default_factory=dict)  # in both with another shape or type, in words
    form: str = ""  # in which it was published
    left: tuple[str, ...] = ()  # in the file, and unused by this model
    fresh: tuple[str, ...] = ()  # in the model, and new with it

    @property
    def is_whole(self) -> bool:
        """Whether the model's tensors and the file's are exactly the same."""
        return not (self.missing or self.unexpected or self.reshaped)

    def lines(self) -> list[str]:
        """Return the differences as text, with a few names of each kind."""
        groups = {
            "not in the file": self.missing,
            "not in the model": self.unexpected,
            "not alike": [f"{name}: {how}" for name, how in self.reshaped.items()],
            "not used": self.left,
            "initialized randomly": self.fresh,
        }
        return [
            f"{title} ({len(names):,}): {first_few(names, _MOST_NAMED)}" for title, names in groups.items() if names
        ]


def load_pretrained(
    model: nn.Module, path: Path, *, partial: bool = False, train: TrainSection | None = None
) -> PretrainedReport:
    """Copy weights into a model: all of them or, if partial, those that fit. Nothing is changed where it fails.

    A tensor of another floating precision is converted; of tied parameters the file needs only one. Settings of `train`
    say in which form a file is.
    """
    report, fitting = fitting_weights(model, path, partial=partial, train=train)
    state = model_state(model)
    with torch.no_grad():
        for name, tensor in fitting.items():
            state[name].copy_(tensor)
    return report


def fitting_weights(
    model: nn.Module, path: Path, *, partial: bool, train: TrainSection | None = None
) -> tuple[PretrainedReport, dict[str, Tensor]]:
    """Compare weights with a model, which may be on the meta device; return how, and those that fit."""
    stored = stored_weights(path, train.pretrained_entry if train else None)
    state = model_state(model)
    form, left, tensors = ("", (), stored) if _is_ours(path) else _in_own_names(model, stored, train, path)
    tensors = _unwrapped(tensors, lambda names: any(name in state for name in names)) or tensors
    same = distinct(state)[1]
    in_file = {same.get(name, name) for name in state if name in tensors}
    reshaped = {name: how for name, mine in state.items() if name in tensors and (how := _unlike(mine, tensors[name]))}
    for alias, first in same.items():
        if {alias, first} <= tensors.keys() - reshaped.keys() and not torch.equal(tensors[alias], tensors[first]):
            reshaped[alias] = f"is tied to {first} in the model but differs from it in the file"
    fitting = {name: tensors[name] for name in state if name in tensors and name not in reshaped}
    missing = [name for name in state if same.get(name, name) not in in_file]
    may_be_fresh = published_forms(model)[form].fresh if form else ()
    fresh = tuple(name for name in missing if _is_like(name, may_be_fresh))
    report = PretrainedReport(
        loaded=len({same.get(name, name) for name in fitting}),
        missing=tuple(name for name in missing if name not in fresh),
        unexpected=tuple(name for name in tensors if name not in state),
        reshaped=reshaped,
        form=form,
        left=left,
        fresh=fresh,
    )
    if not fitting or not (report.is_whole or partial):
        problem = f"the weights do not belong to this model: {len(fitting)} of its {len(state)} tensors fit"
        remedy = f"{_fitting_options(model, stored) or OTHERS}{PARTIAL}" if fitting else OTHERS
        raise ConfigError("\n  ".join([problem, *report.lines()]), where=f"{WHERE}: {path}", remedy=remedy)
    return report, fitting


def _in_own_names(
    model: nn.Module, tensors: Mapping[str, Tensor], train: TrainSection | None, path: Path
) -> tuple[str, tuple[str, ...], Mapping[str, Tensor]]:
    """Return the form in which a file's tensors are published, which of them are left, and the rest in our names."""
    forms, wanted = published_forms(model), train.pretrained_as if train else None
    if train and train.pretrained_map:  # of the file's names to the model's, before all else
        tensors = {renamed(name, train.pretrained_map): tensor for name, tensor in tensors.items()}
    if wanted is not None and wanted not in forms:
        known = f"it supports {', '.join(forms)}" if forms else "it supports no published weights"
        remedy = f"leave out {AS}, or choose one of these" if forms else f"leave out {AS}; names: train.pretrained_map"
        raise ConfigError(f"the model does not support weights of {wanted!r}; {known}", where=AS, remedy=remedy)
    for name in forms if wanted is None else [wanted]:
        if (theirs := _unwrapped(tensors, forms[name].knows)) is not None:
            left = tuple(known for known in theirs if _is_like(known, forms[name].left))
            return name, left, forms[name].read({known: theirs[known] for known in theirs if known not in left})
    if wanted is not None:
        problem = f"these are not weights of {wanted}: their names begin with {', '.join(list(tensors)[:4])}"
        raise ConfigError(problem, where=f"{AS}: {path}", remedy=f"leave out {AS}, or name the file of {wanted}")
    return "", (), tensors


def _is_like(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _unwrapped(tensors: Mapping[str, Tensor], fits: Callable[[Collection[str]], bool]) -> Mapping[str, Tensor] | None:
    """Return tensors without the prefix of what wraps a whole model, such as `module.` of DDP; None: none fits."""
    while not fits(tensors):
        first = next(iter(tensors), "").partition(".")[0] + "."
        if not all(name.startswith(first) and name != first for name in tensors) or not tensors:
            return None
        tensors = {name.removeprefix(first): tensor for name, tensor in tensors.items()}
    return tensors


def _fitting_options(model: nn.Module, tensors: Mapping[str, Tensor]) -> str:
    """Return the options that make the model fit a published file; "" where its shapes do not say so."""
    try:
        options = model.fitting_options(tensors) if isinstance(model, FitsOptions) else {}
    except (KeyError, ValueError, IndexError):
        return ""
    return " ".join(f"--set train.options.{name}={json.dumps(value)}" for name, value in options.items())


def _unlike(mine: Tensor, stored: Tensor) -> str:
    """Describe why one tensor cannot take another's values; "" where it can."""
    is_convertible = mine.is_floating_point() and stored.is_floating_point()
    if mine.shape == stored.shape and (is_convertible or mine.dtype == stored.dtype):
        return ""
    return f"{tensor_words(stored)} in the file, {tensor_words(mine)} in the model"


def _is_ours(path: Path) -> bool:
    return (path / MANIFEST).is_file() or ModelFolder(path).export.is_file()


def stored_weights(path: Path, entry: str | None = None) -> dict[str, Tensor]:
    """Read every tensor of a file or a folder, by its name without wrappers such as torch.compile's.

    `entry` names those of a file with several, such as ema_state_dict.
    """
    if not path.exists():
        raise ConfigError("weights not found", where=f"{WHERE}: {path}", remedy=f"ls -ldL {quoted(path)}")
    if _is_ours(path):
        is_export = ModelFolder(path).export.is_file()
        return read_export(path).tensors(EXPORTED) if is_export else checkpoint_weights(path)
    try:
        if path.is_dir():
            tensors = read_safetensors(_files_of(path))
        else:
            is_plain = path.suffix == TENSORS
            tensors = read_safetensors([path]) if is_plain else _state_dict(read_pt(path, foreign=True), path, entry)
    except WeightsUnusable as error:
        where = f"{WHERE}: {error.where or path}"
        if "run code" in error.what:  # the file is intact, but another one must be named
            raise ConfigError(error.what, where=where, remedy=UNTRUSTED) from error
        raise DataError(error.what, where=where, remedy=FORMS) from error
    return {plain_name(name): tensor for name, tensor in tensors.items()}


def _files_of(folder: Path) -> list[Path]:
    """Return the .safetensors files of a Hugging Face folder."""
    if (folder / INDEX).is_file():
        return list(shards_of(folder))
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    names = sorted(path.name for path in folder.iterdir())
    problem = f"the folder holds neither {SINGLE} nor {INDEX}; it holds {', '.join(names[:8]) or 'nothing'}"
    raise ConfigError(problem, where=f"{WHERE}: {folder}", remedy=FORMS)


def _state_dict(content: Any, path: Path, entry: str | None) -> dict[str, Tensor]:
    """Return the state dict in a torch.save file: the whole content, or the entry of a usual name."""
    looked = NESTED if entry is None else (entry,)
    held = content if isinstance(content, Mapping) else {}
    nested = [held[name] for name in looked if isinstance(held.get(name), Mapping)]
    named = nested[0] if nested else held if entry is None else {}
    tensors = {name: value for name, value in named.items() if isinstance(name, str) and isinstance(value, Tensor)}
    if tensors:
        return tensors
    kind = f"a dict of {', '.join(map(str, list(held)[:8]))}" if held else type(content).__name__
    problem = f"holds no weights but {kind}; searched for named tensors, also under {', '.join(looked)}"
    raise DataError(problem, where=f"{WHERE}: {path}", remedy=UNTRUSTED)


def checkpoint_weights(path: Path) -> dict[str, Tensor]:
    """Return a checkpoint's weights by the model's own names: moving averages where it has them."""
    kinds: dict[str, dict[str, Tensor]] = {"model": {}, "ema": {}, "optimizer": {}}
    for stored_name, stored in open_checkpoint(path).tensors.items():
        kind, _, name = stored_name.partition(".")
        if kind != "optimizer":
            kinds[kind][name] = stored.whole()
    return kinds["model"] | kinds["ema"]


# Exported models


def write_export(folder: Path, tensors: Mapping[str, Tensor], card: Mapping[str, Any]) -> dict[str, Any]:
    """Write weights and then the card, completed by facts about the weights; return the card."""
    written = write_tensors(folder / (name := f"{EXPORTED}{TENSORS}"), tensors, Disk())
    parameters = sum(tensor.numel() for tensor in tensors.values())
    weights = {"bytes": written.bytes, "digest": written.digest, "tensors": len(tensors), "parameters": parameters}
    whole = {**card, "weights": weights}
    write_manifest(ModelFolder(folder).export, {name: written}, whole, {}, Disk())
    return whole


def write_published(folder: Path, form: str, network: nn.Module, weights: Mapping[str, Tensor]) -> Path:
    """Write weights under another program's names: whole ones, a tied one as often as it has names.

    They are `FORM.safetensors`, or, where text files belong to them, a folder of this form. Return its path; raise
    where the model knows no such program.
    """
    from safetensors.torch import save_file

    forms = published_forms(network)
    if form not in forms:
        supported = f"its task supports {', '.join(forms)}" if forms else "its task supports no published names"
        remedy = f"--as {next(iter(forms))}" if forms else "leave out --as   (docs/how-to/model.md: published_forms)"
        raise ConfigError(f"no names of {form!r} for this model; {supported}", where="--as", remedy=remedy)
    known = forms[form]
    whole = {name: tensor.contiguous().clone() for name, tensor in known.write(weights).items()}
    texts = known.beside() if isinstance(known, HasFilesBeside) else {}
    for name, text in texts.items():
        (folder / form).mkdir(exist_ok=True)
        (folder / form / name).write_text(text, encoding="utf-8")
    metadata = {"format": "pt"} if texts else None  # without it transformers refuses a folder's weights
    place = folder / form if texts else folder / f"{form}{TENSORS}"
    save_file(whole, place / f"{EXPORTED}{TENSORS}" if texts else place, metadata=metadata)
    return place
