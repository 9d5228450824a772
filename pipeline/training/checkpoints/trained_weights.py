"""Weights that were trained before: a training's checkpoint, chosen and loaded, or pretrained weights of any form.

Pretrained are a file of torch.save (.pt, .pth, .ckpt; nothing in it is executed), a .safetensors file, a Hugging Face
folder with one or several, or a checkpoint of ours; of that the moving averages, where it has them, as those were
evaluated.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipeline.command_line import quoted
from pipeline.encoder.checkpoint_files import INDEX, SINGLE, shards_of
from pipeline.encoder.published_weights import read_pt, read_safetensors
from pipeline.errors import ConfigError, DataError, JobFailed, WeightsUnusable
from pipeline.protocol import FitsOptions
from pipeline.training.checkpoints.checkpoint import fill, in_one_part, open_checkpoint, tensor_words
from pipeline.training.checkpoints.chosen_checkpoint import (
    EXPORTED,
    ChosenCheckpoint,
    checkpoint_digest,
    checkpoint_weights,
    read_export,
)
from pipeline.training.checkpoints.published_names import USUAL, in_own_names, without_prefix, wrapping_prefix
from pipeline.training.checkpoints.sealed_folder import ANOTHER, MANIFEST, FolderDamaged, distinct
from pipeline.training.checkpoints.training_state import model_key, model_state, model_targets, plain_name
from pipeline.training.prepared import ModelFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from torch import nn

    from pipeline.training.checkpoints.published_names import NamedWeights, WeightsReading
    from pipeline.training.ranks.rank_protocol import Ranks
    from pipeline.training.step.step import Step

TRIES = 5  # attempts to read a checkpoint: one may be damaged, or removed meanwhile


def load_checkpoint(
    step: Step,
    ranks: Ranks,
    select: Callable[[Collection[str]], ChosenCheckpoint],
    say: Callable[[str], None],
    reading: WeightsReading = USUAL,
) -> ChosenCheckpoint:
    """Load the checkpoint that rank 0 selects into the model of every rank: its moving averages where it has any.

    A file of weights is read as `reading` says. One that is damaged, or that a training removes meanwhile, is skipped;
    `select` gets the names of those.
    """
    without: list[str] = []
    for _ in range(TRIES):
        mine = select(without).to_json() if ranks.rank == 0 else {}
        chosen = ChosenCheckpoint.from_json(ranks.exchange(mine)[0])
        replies = ranks.exchange({"why": _load(step, chosen, reading)})
        problems = [reply["why"] for reply in replies if reply["why"]]
        if not problems:
            return chosen
        say(f"checkpoint {chosen.path.name} is skipped: {problems[0]}")
        without.append(chosen.path.name)
    problem = f"none of {TRIES} checkpoints could be read; the last: {problems[0]}"
    raise JobFailed(problem, where=str(chosen.path.parent), remedy=ANOTHER)


def _load(step: Step, chosen: ChosenCheckpoint, reading: WeightsReading) -> str:
    """Fill a model; return what went wrong where another checkpoint may work, else ""."""
    try:
        if checkpoint_digest(chosen.path) != chosen.digest:
            return "it was replaced while being read"
        if chosen.path.is_file():
            load_pretrained(step.model, chosen.path, reading=reading)
            return ""
        if ModelFolder(chosen.path).export.is_file():
            sealed = read_export(chosen.path)
            fill(model_state(step.model), in_one_part(sealed.tensors(EXPORTED)), chosen.path)
            return ""
        loaded = open_checkpoint(chosen.path)
        # Of any training, as long as the model is the same.
        loaded.sealed.refuse_stranger({**loaded.sealed.identity, "model": model_key(step.model)})
        loaded.load_into(model_targets(step.model, loaded.tensors))
    except (FolderDamaged, FileNotFoundError) as error:
        return f"{error.where}: {error.what}" if isinstance(error, FolderDamaged) else "it was removed"
    return ""


WHERE = "train.pretrained"
NESTED = ("state_dict", "model_state_dict", "model")  # where training scripts put the weights
OTHERS = "use weights of this model"
PARTIAL = ", or load only what fits: train.pretrained_partial: true"
UNTRUSTED = "save the weights as .safetensors, or as a plain state dict: torch.save(model.state_dict(), FILE)"
FORMS = "use a .pt, .pth, .ckpt or .safetensors file, a Hugging Face folder, or a step-… folder"
_MOST_LINES = 5  # of each group
_MOST_COMPARED = 2_000  # names; looking for similar ones among more takes too long
_NEAR = 0.6


@dataclass(frozen=True)
class PretrainedReport:
    """Which weights were loaded, and which were not."""

    path: str
    loaded: int  # tensors of the model
    missing: tuple[str, ...] = ()  # in the model, not in the file
    unexpected: tuple[str, ...] = ()  # in the file, not in the model
    reshaped: Mapping[str, str] = field(default_factory=dict)  # in both, but different: a text that says how
    converted: int = 0  # of another precision in the file
    averages: int = 0  # moving averages among what was loaded
    prefix: str = ""  # of every name in the file, not of the model's
    form: str = ""  # in which it was published
    left: tuple[str, ...] = ()  # in the file, of no use to this model
    fresh: tuple[str, ...] = ()  # in the model, and new with it

    @property
    def is_whole(self) -> bool:
        """Whether the model's tensors and the file's are exactly the same."""
        return not (self.missing or self.unexpected or self.reshaped)

    def lines(self) -> list[str]:
        """Return the differences as text: a few names of each kind, with a similar one of the file where missing."""
        near = _nearest(self.missing, self.unexpected)
        missing = [f"{name}   (the file has {near[name]})" if name in near else name for name in self.missing]
        reshaped = [f"{name}: {how}" for name, how in self.reshaped.items()]
        groups = {
            "not in the file": missing, "not in the model": self.unexpected, "not alike": reshaped,
            "not used": self.left, "initialized randomly": self.fresh,
        }  # fmt: skip
        return [line for title, names in groups.items() for line in _group(title, names)]


@dataclass(frozen=True)
class StoredWeights:
    """The tensors of a file by name, memory-mapped where the form allows."""

    tensors: Mapping[str, Tensor]
    averages: frozenset[str] = frozenset()  # names of the moving averages among them


def load_pretrained(
    model: nn.Module, path: Path, *, partial: bool = False, reading: WeightsReading = USUAL
) -> PretrainedReport:
    """Copy weights into a model: all of them or, if partial, those that fit. Nothing is changed where it fails.

    A tensor of another floating precision is converted; of tied parameters the file needs only one.
    """
    report, fitting = fitting_weights(model, path, partial=partial, reading=reading)
    state = model_state(model)
    with torch.no_grad():
        for name, tensor in fitting.items():
            state[name].copy_(tensor)
    return report


def fitting_weights(
    model: nn.Module, path: Path, *, partial: bool, reading: WeightsReading = USUAL
) -> tuple[PretrainedReport, dict[str, Tensor]]:
    """Compare weights with a model, which may be on the meta device; return how, and those that fit."""
    stored = stored_weights(path, reading.entry)
    named = in_own_names(model, stored.tensors, reading, str(path))
    state = model_state(model)
    prefix = wrapping_prefix(named.tensors, lambda names: any(name in state for name in names)) or ""
    tensors = without_prefix(named.tensors, prefix)
    report, fitting = _compared(state, tensors, named)
    report = replace(report, path=str(path), prefix=prefix, averages=len(stored.averages.intersection(fitting)))
    if not fitting:
        raise _misfit("do not belong to this model: none of its tensors fits", report, OTHERS)
    if not report.is_whole and not partial:
        remedy = f"{_fitting_options(model, stored.tensors) or OTHERS}{PARTIAL}"
        raise _misfit(f"do not belong to this model: {len(fitting)} of its {len(state)} tensors fit", report, remedy)
    return report, {name: tensors[name] for name in fitting}


def _fitting_options(model: nn.Module, tensors: Mapping[str, Tensor]) -> str:
    """Return the options that make the model fit a published file; "" where its shapes do not say so."""
    try:
        options = model.fitting_options(tensors) if isinstance(model, FitsOptions) else {}
    except (KeyError, ValueError, IndexError):
        return ""
    return " ".join(f"--set train.options.{name}={json.dumps(value)}" for name, value in options.items())


def stored_weights(path: Path, entry: str | None = None) -> StoredWeights:
    """Read every tensor of a file or a folder, by its name without wrappers such as torch.compile's.

    `entry` names those of a file with several, such as ema_state_dict.
    """
    if not path.exists():
        raise ConfigError("weights not found", where=f"{WHERE}: {path}", remedy=f"ls -ldL {quoted(path)}")
    if (path / MANIFEST).is_file():
        return StoredWeights(*checkpoint_weights(path))
    try:
        if path.is_dir():
            tensors = read_safetensors(_files_of(path))
        else:
            is_plain = path.suffix == ".safetensors"
            tensors = read_safetensors([path]) if is_plain else _state_dict(read_pt(path, foreign=True), path, entry)
    except WeightsUnusable as error:
        where = f"{WHERE}: {error.where or path}"
        if "run code" in error.what:  # nothing is wrong with the file: it is another that must be named
            raise ConfigError(error.what, where=where, remedy=UNTRUSTED) from error
        raise DataError(error.what, where=where, remedy=FORMS) from error
    return StoredWeights({plain_name(name): tensor for name, tensor in tensors.items()})


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
    """Return the state dict in what torch.save wrote: the whole content, or under a usual name in it."""
    looked = NESTED if entry is None else (entry,)
    held = content if isinstance(content, Mapping) else {}
    nested = next((held[name] for name in looked if isinstance(held.get(name), Mapping)), None)
    named = nested if nested is not None else held if entry is None else {}
    tensors = {name: value for name, value in named.items() if isinstance(name, str) and isinstance(value, Tensor)}
    if tensors:
        return tensors
    kind = f"a dict of {', '.join(map(str, list(held)[:8]))}" if held else type(content).__name__
    problem = f"holds no weights but {kind}; searched for named tensors, also under {', '.join(looked)}"
    raise DataError(problem, where=f"{WHERE}: {path}", remedy=UNTRUSTED)


def _compared(
    state: Mapping[str, Tensor], stored: Mapping[str, Tensor], named: NamedWeights
) -> tuple[PretrainedReport, list[str]]:
    """Return the difference between a model and a file, and the names that fit."""
    _, same = distinct(state)
    in_file = {same.get(name, name) for name in state if name in stored}
    reshaped = {name: how for name, mine in state.items() if name in stored and (how := _unlike(mine, stored[name]))}
    reshaped |= _untied(same, stored, reshaped)
    fitting = [name for name in state if name in stored and name not in reshaped]
    missing = [name for name in state if same.get(name, name) not in in_file]
    report = PretrainedReport(
        path="",
        loaded=len({same.get(name, name) for name in fitting}),
        missing=tuple(name for name in missing if not named.may_be_fresh(name)),
        unexpected=tuple(name for name in stored if name not in state),
        reshaped=reshaped,
        converted=sum(stored[name].dtype != state[name].dtype for name in fitting),
        form=named.form,
        left=named.left,
        fresh=tuple(name for name in missing if named.may_be_fresh(name)),
    )
    return report, fitting


def _unlike(mine: Tensor, stored: Tensor) -> str:
    """Describe why one tensor cannot take another's values; "" where it can."""
    is_convertible = mine.is_floating_point() and stored.is_floating_point()
    if mine.shape == stored.shape and (is_convertible or mine.dtype == stored.dtype):
        return ""
    return f"{tensor_words(stored)} in the file, {tensor_words(mine)} in the model"


def _untied(same: Mapping[str, str], stored: Mapping[str, Tensor], reshaped: Mapping[str, str]) -> dict[str, str]:
    """Describe names that are tied in the model, but have different values in the file."""
    pairs = {alias: first for alias, first in same.items() if alias in stored and first in stored}
    return {
        alias: f"is tied to {first} in the model but differs from it in the file"
        for alias, first in pairs.items()
        if not {alias, first} & set(reshaped) and not torch.equal(stored[alias], stored[first])
    }


def _misfit(problem: str, report: PretrainedReport, remedy: str) -> ConfigError:
    text = "\n  ".join([f"the weights {problem}", *report.lines()])
    return ConfigError(text, where=f"{WHERE}: {report.path}", remedy=remedy)


def _nearest(missing: Sequence[str], unexpected: Sequence[str]) -> dict[str, str]:
    """Return for the missing names that are shown the most similar one of the file, if any is."""
    matches = {
        name: difflib.get_close_matches(name, unexpected[:_MOST_COMPARED], 1, _NEAR) for name in missing[:_MOST_LINES]
    }
    return {name: found[0] for name, found in matches.items() if found}


def _group(title: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    more = [f"  … and {len(names) - _MOST_LINES:,} more"] if len(names) > _MOST_LINES else []
    return [f"{title} ({len(names):,}):", *(f"  {name}" for name in names[:_MOST_LINES]), *more]
