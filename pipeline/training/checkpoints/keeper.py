"""Saving a training's state by all ranks together, in the background where memory allows, and resuming from it.

    model.NAME                 parameters and persistent buffers
    optimizer.NAME.KEY         its state of a parameter, by the parameter's name; without a gradient so far, none
    ema.NAME                   moving averages

Names leave out wrappers of a model or a part of it (torch.compile, activation checkpoints).
"""

from __future__ import annotations

import json
import re
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from pipeline.codec import rebuilt
from pipeline.device.accelerator import RngState, computing, is_card, release_pinned, unless_out_of_memory
from pipeline.device.batch_transfer import bytes_on_host
from pipeline.errors import ConfigError, JobFailed
from pipeline.keys import recipe_key
from pipeline.memory.hardware.host_memory import pinned_layout
from pipeline.training.checkpoints.checkpoint import NotSaved, State, StoredTensor, tensor_words
from pipeline.training.checkpoints.sealed_folder import DTYPE_NAMES, OTHER_MODEL, distinct
from pipeline.training.state import TRAINING, TrainingState
from pipeline.units import first_few

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from torch import nn

    from pipeline.memory.runtime.meters import HostMeter
    from pipeline.training.checkpoints.checkpoint import Checkpoint, CheckpointFolder, Receipt
    from pipeline.training.ranks import Ranks
    from pipeline.training.step.step import Step

ROOM = 0.8  # share of the host's memory limit that may be in use with the copies of a checkpoint
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module)\.")
_MOST_NAMED = 6
# The optimizer's implementation follows this attempt's plan; all other hyperparameters come from the checkpoint.
_NOT_KEPT = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})


def pack(step: Step) -> State:
    """Return the whole state of a training between two steps, without copying tensors."""
    names, tensors, others = _names(step.model), _model_tensors(step), dict[str, Any]()
    for parameter, state in step.optimizer.state.items():
        for key, value in state.items():
            kind = tensors if isinstance(value, Tensor) else others
            kind[f"optimizer.{names[id(parameter)]}.{key}"] = value
    groups = [
        {key: value for key, value in group.items() if key not in _NOT_KEPT} for group in step.optimizer.param_groups
    ]
    optimizer = {**_trained(step), "groups": groups, "others": others}
    return State(tensors, {"optimizer": optimizer, "scaler": step.scaler.state_dict()})


def unpack(checkpoint: Checkpoint, step: Step) -> None:
    """Restore what `pack` returned, in place; saved tensors and targets must match one to one.

    Nothing is changed where anything is refused.
    """
    saved, optimizer = checkpoint.data["optimizer"], step.optimizer
    _refuse_other_optimizer(_trained(step), saved)
    targets, state = _model_tensors(step), dict[Tensor, dict[str, Any]]()
    pairs = ((parameter, group) for group in optimizer.param_groups for parameter in group["params"])
    owners = dict(zip(chain(*saved["trained"]), pairs, strict=True))
    for name, value in {**checkpoint.tensors, **saved["others"]}.items():
        kind, _, rest = name.partition(".")
        if kind != "optimizer":
            continue
        owner, _, key = rest.rpartition(".")
        parameter, group = owners[owner]
        if isinstance(value, StoredTensor):
            now = optimizer.state.get(parameter, {}).get(key)
            if now is None or tensor_words(now) != tensor_words(value):
                now = _unfilled(value, key, parameter, group)
            targets[name] = now
        state.setdefault(parameter, {})[key] = targets.get(name, value)
    if left := [name for name in checkpoint.tensors if name not in targets]:
        problem = f"the checkpoint has unused entries: {first_few(left, _MOST_NAMED)}"
        raise ConfigError(problem, where=str(checkpoint.path), remedy=OTHER_MODEL)
    checkpoint.load_into(targets)
    optimizer.state.clear()
    optimizer.state.update(state)
    for group, kept in zip(optimizer.param_groups, saved["groups"], strict=True):
        group |= {key: tuple(value) if isinstance(value, list) else value for key, value in kept.items()}
    if checkpoint.data["scaler"]:  # empty where the training needed none
        step.scaler.load_state_dict(dict(checkpoint.data["scaler"]))


def plain_name(name: str) -> str:
    """Return a parameter's name without wrappers."""
    return _WRAPPERS.sub("", name)


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, not copied; tied ones under each of their names."""
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor) or value.layout != torch.strided or str(value.dtype) not in DTYPE_NAMES:
            what = f"{value.dtype}, {value.layout}" if isinstance(value, Tensor) else type(value).__name__
            problem = f"the model's {name} cannot be saved in a checkpoint: it is {what}"
            raise ConfigError(
                problem, where="train.task", remedy="use a plain tensor, or keep it out of the state_dict"
            )
        state[plain_name(name)] = value.detach()
    return state


def model_key(model: nn.Module) -> str:
    """Return a digest of the names, dtypes and shapes of a model's state, for a checkpoint's `identity`."""
    state = model_state(model).items()
    return recipe_key("model", {name: [DTYPE_NAMES[str(value.dtype)], *value.shape] for name, value in state}).hex()


def _names(model: nn.Module) -> dict[int, str]:
    """Return the name of each parameter by its id(); of tied ones the first."""
    return {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}


def _model_tensors(step: Step) -> dict[str, Tensor]:
    """Return the tensors of a model, and the moving averages of its parameters where they are kept."""
    names = _names(step.model)
    averages = zip(step.trained, step.averages, strict=bool(step.averages))
    of_model = {f"model.{name}": tensor for name, tensor in model_state(step.model).items()}
    return of_model | {f"ema.{names[id(parameter)]}": average.detach() for parameter, average in averages}


def _trained(step: Step) -> dict[str, Any]:
    """Return an optimizer's kind, and the names of the parameters in each of its groups."""
    names = _names(step.model)
    trained = [[names[id(parameter)] for parameter in group["params"]] for group in step.optimizer.param_groups]
    return {"kind": type(step.optimizer).__name__, "trained": trained}


def _refuse_other_optimizer(here: Mapping[str, Any], there: Mapping[str, Any]) -> None:
    if here["kind"] != there["kind"]:
        problem = f"the checkpoint's optimizer is {there['kind']}, this one is {here['kind']}"
        raise ConfigError(problem, where="train.optimizer", remedy=OTHER_MODEL)
    if here["trained"] != there["trained"]:
        differing = set(chain(*here["trained"])) ^ set(chain(*there["trained"]))
        trained = first_few(sorted(differing), _MOST_NAMED) or "the same in other groups"
        problem = f"the checkpoint's optimizer trains different parameters: {trained}"
        raise ConfigError(problem, where="train.frozen", remedy=OTHER_MODEL)


def _unfilled(stored: StoredTensor, key: str, parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Return an empty tensor for a parameter's state, where torch keeps it: step counts are on the CPU."""
    on_cpu = key == "step" and not (group.get("capturable") or group.get("fused"))
    if not on_cpu and tuple(parameter.shape) == stored.shape:
        return torch.empty_like(parameter, dtype=stored.dtype, requires_grad=False)
    return torch.empty(stored.shape, dtype=stored.dtype, device="cpu" if on_cpu else parameter.device)


class StagingBuffers:
    """Copies of tensors in a few blocks of host memory, which are reused for tensors of the same sizes.

    Blocks are pinned for tensors on a card, as long as the host can pin them.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._places = pinned_layout([], pinned=False).places
        self._runs: list[Tensor] = []

    @property
    def held_bytes(self) -> int:
        return sum(map(len, self._runs))

    def missing_bytes(self, tensors: Mapping[str, Tensor]) -> int:
        """Return how much more memory copies of tensors would take."""
        sizes, pinned = _sizes_of(distinct(tensors)[0].values())
        return max(0, pinned_layout(sizes, pinned=pinned).bytes - self.held_bytes)

    def copied(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies, valid until the next call; tied tensors stay tied."""
        kept, same = distinct(tensors)
        sizes, pinned = _sizes_of(kept.values())
        if sizes != self._sizes:
            self._make(sizes, pinned=pinned)
        copies = {}
        for (name, tensor), size, place in zip(kept.items(), sizes, self._places, strict=True):
            run = self._runs[place.run] if size else bytes_on_host(0, pin=False)
            copies[name] = run[place.start : place.start + size].view(tensor.dtype).view(tensor.shape)
            copies[name].copy_(tensor.detach(), non_blocking=True)
        for device in {tensor.device for tensor in kept.values()}:
            computing(device).synchronize()
        return copies | {alias: copies[first] for alias, first in same.items()}

    def _make(self, sizes: list[int], *, pinned: bool) -> None:
        """Make runs; unpinned ones where no more can be pinned."""
        if self._runs:
            self._sizes, self._runs = [], []  # frees the old ones first
            if pinned:
                release_pinned()
        layout = pinned_layout(sizes, pinned=pinned)
        runs = unless_out_of_memory(lambda: [bytes_on_host(size, pin=pinned) for size in layout.runs])
        if runs is None:
            layout = pinned_layout(sizes, pinned=False)
            runs = [bytes_on_host(size, pin=False) for size in layout.runs]
        self._sizes, self._places, self._runs = sizes, layout.places, runs


def _sizes_of(tensors: Iterable[Tensor]) -> tuple[list[int], bool]:
    """Return the bytes of tensors, and whether copies of them are pinned: where one is on a card."""
    known = list(tensors)
    sizes = [tensor.numel() * tensor.element_size() for tensor in known]
    return sizes, any(is_card(tensor.device) for tensor in known)


@dataclass(eq=False)
class Keeper:
    """Saves and resumes a training; every rank makes the same calls.

    keeper.save(…)               each rank writes its part in a thread
    keeper.advance(…)            between later steps: once all ranks have written, rank 0 publishes, in its thread
    keeper.finish()              wait for all of that
    """

    checkpoints: CheckpointFolder
    ranks: Ranks
    fresh: Callable[[Step], None]  # resets a step to the start of its training
    say: Callable[[str], None]  # prints what happens now
    warn: Callable[[str], None] = lambda _warning: None  # records a warning for the whole run
    behind: bool | Literal["auto"] = False  # train on while a checkpoint is written; auto: if copies fit in memory
    host: HostMeter | None = None
    unsaved: list[NotSaved] = field(default_factory=list, init=False)  # on rank 0

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._staging, self._own_staging = StagingBuffers(), StagingBuffers()
        self._writing: Future[Receipt] | None = None
        self._publish: Callable[[Sequence[Receipt]], Path] | None = None
        self._publishing: Future[Path] | None = None

    @property
    def folder(self) -> Path:
        return self.checkpoints.folder

    @property
    def is_written(self) -> bool:
        """Whether this rank has written its part of the checkpoint in progress."""
        return self._writing is not None and self._writing.done()

    def save(
        self,
        training: TrainingState,
        step: Step,
        *,
        own: Mapping[str, Any],
        metric: float | None,
        lower: bool = True,
        wait: bool = True,
    ) -> bool:
        """Save a checkpoint; return whether it was saved or, without `wait`, at least started.

        A failure becomes a warning; training continues.
        """
        self.finish()
        state = self._packed(step, training, own)
        behind = not wait and self._has_room_for_copies(state)
        if behind:
            tensors, own_tensors = self._staging.copied(state.tensors), self._own_staging.copied(state.own)
            state = replace(state, tensors=tensors, own=own_tensors)
        computing(step.device).synchronize()  # the thread has a stream of its own
        self._publish = partial(
            self.checkpoints.publish, data=state.data, step=training.done, metric=metric, lower_is_better=lower
        )
        self._writing = self._thread.submit(self.checkpoints.write, state, training.done, rank=self.ranks.rank)
        if behind:
            return True
        failed = len(self.unsaved)
        self.finish()
        return bool(self.ranks.exchange({"saved": len(self.unsaved) == failed})[0]["saved"])

    def finish(self) -> None:
        """Wait until the checkpoint in progress is saved; report a failure."""
        self.advance(all_written=True, wait=True)

    def advance(self, *, all_written: bool, wait: bool = False) -> None:
        """Let rank 0 publish a checkpoint that all ranks have written, in the background; report a failure."""
        if all_written and self._writing is not None:
            written, self._writing = self._writing, None
            receipts = self.ranks.exchange(written.result())
            if self.ranks.rank == 0 and self._publish is not None:
                self._publishing = self._thread.submit(self._publish, receipts)
        if self._publishing is None or not (wait or self._publishing.done()):
            return
        published, self._publishing = self._publishing, None
        try:
            published.result()
        except NotSaved as error:
            self.unsaved.append(error)
            self.say(f"WARNING: {error}\n  training continues; the last good checkpoint is kept")
            count = len(self.unsaved)
            many = f"{count} checkpoints could not be saved; the last error: " if count > 1 else ""
            self.warn(f"{many}{error.what}   ({error.remedy})")

    def close(self) -> None:
        """Free threads and copies; waits for this rank's writing, but for no other rank."""
        self._thread.shutdown()
        self._staging, self._own_staging = StagingBuffers(), StagingBuffers()

    def _packed(self, step: Step, training: TrainingState, own: Mapping[str, Any]) -> State:
        """Return a snapshot of all data, with uncopied tensors; shared ones on rank 0 only."""
        state = pack(step)
        buffers = _buffers(step) if self.ranks.rank else {}  # rank 0's are among the shared tensors
        data = json.loads(json.dumps({**state.data, TRAINING: training.to_json()}))
        own_tensors = {**RngState.capture(step.device).tensors(), **buffers}
        state = State(state.tensors, data, own_tensors, json.loads(json.dumps(own))).parted
        return replace(state, tensors={}) if self.ranks.rank else state

    def _has_room_for_copies(self, state: State) -> bool:
        """Tell whether all ranks have room for copies of what they save."""
        if self.behind is False:
            return False
        has_room, host = self.behind is True, self.host.read() if self.host else None
        if not has_room and host is not None and host.limit_bytes is not None:
            needed = self._staging.missing_bytes(state.tensors) + self._own_staging.missing_bytes(state.own)
            has_room = host.used_bytes + needed <= ROOM * host.limit_bytes
        return all(reply["room"] for reply in self.ranks.exchange({"room": has_room}))

    def resume(self, step: Step, *, of_all: bool = False) -> tuple[TrainingState, Mapping[str, Any]]:
        """Restore a step from the newest checkpoint, or reset it; return the training's state and this rank's own data.

        With `of_all`, checkpoints that were made after items were skipped do not count.
        """
        self.finish()
        newest, lost = None, ("", "", "")
        if self.ranks.rank == 0:
            try:
                newest = self.checkpoints.newest(of_all=of_all)
            except JobFailed as error:  # all ranks end with it
                lost = (error.what, error.where, error.remedy)
        found = self.ranks.exchange({"name": newest.name if newest else "", "lost": lost})[0]
        what, where, remedy = found["lost"]
        if what:
            raise JobFailed(what, where=where, remedy=remedy)
        name = found["name"]
        if not name:
            self.fresh(step)
            return TrainingState(), {}
        loaded = newest or self.checkpoints.open(name)
        unpack(loaded, step)
        if (own := loaded.own(self.ranks.rank)) is not None:
            RngState(own.own, step.device).restore()
            with torch.no_grad():
                for name, buffer in _buffers(step).items():
                    if name in own.own:
                        buffer.copy_(own.own[name])
        if len(loaded.ranks) != self.ranks.world:
            self.say(f"{loaded.name} is of {len(loaded.ranks)} ranks, now {self.ranks.world}: steps stay the same")
        own = own or loaded.own(0)  # a rank that did not exist starts from rank 0's data
        return rebuilt(TrainingState, loaded.data[TRAINING]), own.own_data if own else {}


def _buffers(step: Step) -> dict[str, Tensor]:
    """Return the buffers, such as running means, which differ between ranks, under names of their own."""
    parameters = {plain_name(name) for name, _ in step.model.named_parameters(remove_duplicate=False)}
    return {f"buffer.{name}": tensor for name, tensor in model_state(step.model).items() if name not in parameters}
