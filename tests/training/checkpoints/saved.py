"""Small trainings whose states are saved, and ways to spoil what was."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.store.format.disk import Disk
from pipeline.training.checkpoints.checkpoint import CheckpointFolder, State

IDENTITY = {"model": "abc", "recipe": {"rate": 0.1}}


class Checkpoints(CheckpointFolder):
    """The checkpoints of a training on one rank."""

    def save(self, state: State, step: int, **judged: Any) -> Path:
        """Write and publish a checkpoint."""
        return self.publish([self.write(state, step)], state.data, step, **judged)


def checkpoints(
    folder: Path, *, last: int = 2, best: int = 0, said: list[str] | None = None, disk: Disk | None = None, **more: Any
) -> Checkpoints:
    """Return a folder of checkpoints that appends to `said` what it tells."""
    tell: Callable[[str], None] = [].append if said is None else said.append
    return Checkpoints(folder, last=last, best=best, say=tell, disk=disk or Disk(), **{"identity": IDENTITY} | more)


def state_at(step: int, size: int = 40) -> State:
    """Return a state every byte of which depends on the step."""
    tensors = {
        "model.weight": torch.full((size, 3), float(step)),
        "model.half": torch.full((5,), step, dtype=torch.bfloat16),
        "optimizer.weight.step": torch.tensor(float(step)),
    }
    own = {"rng": torch.full((9,), step % 250, dtype=torch.uint8)}
    return State(tensors, {"step": step, "rate": 0.1 * step}, own, {"seed": step})


def is_state_at(loaded: Any, step: int) -> bool:
    """Say whether a loaded checkpoint is that of a step, read by way of its own loading."""
    wanted = state_at(step, loaded.tensors["model.weight"].shape[0])
    targets = {name: torch.zeros_like(one) for name, one in wanted.tensors.items()}
    loaded.load_into(targets)
    own = loaded.own(0)
    return (
        loaded.step == step
        and loaded.data == wanted.data
        and all(same_bits(one, wanted.tensors[name]) for name, one in targets.items())
        and own is not None
        and own.own_data == wanted.own_data
        and same_bits(own.own["rng"], wanted.own["rng"])
    )


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Say whether two tensors have the same type, shape and bits; NaN is what it is."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(bits(one), bits(other))


def bits(tensor: Tensor) -> Tensor:
    if tensor.numel() == 0:
        return torch.empty(0)
    plain = torch.empty(tensor.shape, dtype=tensor.dtype)
    plain.copy_(tensor.detach())
    return plain.flatten().view(torch.uint8)


def forked(work: Callable[[], None]) -> int:
    """Begin some work in a process of its own and return its id; it ends with 0 when done."""
    if child := os.fork():
        return child
    code = 1
    torch.set_num_threads(1)  # the threads of the process it was forked from are not in it, and would be waited for
    try:
        work()
        code = 0
    except BaseException:  # noqa: BLE001 - whatever it is, this copy of the test must end here
        with contextlib.suppress(Exception):
            traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(code)


def on_full_disk(limit_bytes: int, work: Callable[[], object]) -> None:
    """Do some work in a process whose files cannot be longer; fail where it does."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
        work()

    assert os.waitpid(forked(limited), 0)[1] == 0


def kill_at_each_step(work: Callable[[int], object], last: int) -> None:
    """Do some work in processes of which the n-th is killed at the n-th step of its disk, until one is done."""

    def killed_at(number: int) -> None:
        steps = count(1)
        for name in ("open_new", "write_at", "fsync", "fsync_folder", "rename"):
            call = getattr(Disk, name)

            def step(*words: Any, real: Callable[..., Any] = call) -> Any:
                if next(steps) == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*words)

            setattr(Disk, name, step)
        work(number)

    statuses = [os.waitpid(forked(partial(killed_at, number)), 0)[1] for number in range(1, last + 1)]
    assert {os.waitstatus_to_exitcode(status) for status in statuses} == {-signal.SIGKILL, 0}


def spoil(path: Path, change: Callable[[bytearray], Any]) -> None:
    """Change the bytes of a published file, which is read-only."""
    content = bytearray(path.read_bytes())
    change(content)
    path.chmod(0o600)
    path.write_bytes(content)
