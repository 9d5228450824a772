"""A user's training script (`train.command`): its command line, and the environment of each of its processes.

The command is split into words like in a shell, but no shell runs it: a value that fills a placeholder stays one word.
Placeholders are the fields of `Values`; `{{` and `}}` are braces.

Processes. Like torchrun, we start one process for each GPU. Each sees all GPUs of its node and gets its place in RANK,
LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; a single process gets none of them. So a script for torchrun runs
unchanged. A command with {processes} or {gpus} starts its processes itself (torchrun, accelerate, Lightning,
DataParallel); we then start it once on each node.

Batches. micro_batch * accumulation * ranks is always effective_batch. The memory of a script cannot be predicted. So
the first attempt uses train.micro_batch if it is a number, else the whole share of a rank. After a GPU ran out of
memory, the next attempt uses the largest divisor of the share that is at most half as large, and more accumulation. So
a command with {micro_batch} must also have {accumulation} or {effective_batch}.

Folder. The script runs in the folder of the configuration. {output} is the folder for its checkpoints, the same for
every attempt: a script that looks there for its last checkpoint continues.

`script_process` explains how a script ends and how it is asked to end.
"""

from __future__ import annotations

import re
import shlex
import socket
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cluster.machine import THREADS
from pipeline.errors import ConfigError, PlanInfeasible
from pipeline.memory.hardware.caching_allocator import allocator_settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


WHERE = "train.command"
PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
OPERATORS = frozenset({"|", "||", "&", "&&", ";", ">", ">>", "<", "2>", "2>&1", "&>"})
LAUNCHING = frozenset({"processes", "gpus"})  # a command with one of them starts the processes of a node itself
RANK_NAMES = (  # variables of torchrun
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
)
LOOPBACK = "127.0.0.1"
SMALLER = "… --batch_size {micro_batch} --accumulate {accumulation}   or   pipeline find-batch --max 64 -- …"


@dataclass(frozen=True, slots=True)
class Script:
    """A command, split into words, with its placeholders."""

    words: tuple[str, ...]
    names: frozenset[str]  # its placeholders

    @property
    def launches(self) -> bool:
        """Whether it starts the processes of a node."""
        return bool(self.names & LAUNCHING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """The values of the placeholders, in one process of one attempt."""

    effective_batch: int
    micro_batch: int
    accumulation: int
    ranks: int = 1  # of all nodes
    rank: int = 0
    local_rank: int = 0  # rank on its node
    processes: int = 1  # of a node
    gpus: int = 0  # of a node
    nodes: int = 1
    node: int = 0
    master_address: str = LOOPBACK
    master_port: int = 0
    precision: str = "fp32"
    seed: int = 0
    epochs: int = 1
    attempt: int = 1
    run: Path  # the folder of the run
    output: Path  # where checkpoints belong
    config: Path  # the configuration, resolved and frozen


KNOWN = tuple(field.name for field in fields(Values))


def parse_command(command: str) -> Script:
    """Parse a command; raise ConfigError if it cannot be run."""
    try:
        split = tuple(shlex.split(command))
    except ValueError as error:
        raise _refused(f"cannot be split into words: {error}") from error
    if not split:
        raise _refused("is empty")
    _refuse_shell(split)
    return Script(split, frozenset(name for word in split for name in _names(word)))


def _refuse_shell(split: tuple[str, ...]) -> None:
    """Refuse shell syntax: no shell would interpret it."""
    for word in split:
        if word in OPERATORS:
            raise _refused(f"has {word!r}, which needs a shell", "bash -c '…'")
    if ASSIGNMENT.match(split[0]):
        raise _refused(f"starts with {split[0]!r}, which needs a shell", f"env {split[0]} …")


def _names(word: str) -> Iterator[str]:
    """Yield the placeholders in a word."""
    for match in PLACEHOLDER.finditer(word):
        if match[0] in ("{", "}"):
            raise _refused(f"has a single {match[0]!r} in {word!r}", f"{match[0] * 2} for a brace")
        name = match[1]
        if name is not None and name not in KNOWN:
            known = ", ".join(f"{{{placeholder}}}" for placeholder in KNOWN)
            raise _refused(f"has {{{name}}}, which is unknown; known: {known}", "{{ and }} for braces")
        if name is not None:
            yield name


def process_words(script: Script, values: Values) -> list[str]:
    """Return the command line of one process; refuse a command that would change the batch size of a step."""
    refuse_other_batch(script, values.micro_batch, values.accumulation)
    texts = {name: _text(value) for name, value in asdict(values).items()}
    return [PLACEHOLDER.sub(lambda match: texts.get(match[1], match[0][0]), word) for word in script.words]


def _text(value: str | float | Path) -> str:
    """Return a value as text; paths are made absolute."""
    return str(value.absolute()) if isinstance(value, Path) else str(value)


def refuse_other_batch(script: Script, micro_batch: int, accumulation: int) -> None:
    """Refuse a command that ignores a necessary accumulation: its steps would have too few items."""
    if accumulation > 1 and "micro_batch" in script.names and not script.names & {"accumulation", "effective_batch"}:
        what = f"names {{micro_batch}} (now {micro_batch}) and not {{accumulation}} (now {accumulation})"
        raise _refused(what, SMALLER)


def batches(effective_batch: int, ranks: int, micro_batch: int | str, shrink: int = 0) -> tuple[int, int]:
    """Return micro_batch and accumulation with which a step has exactly `effective_batch` items.

    `shrink` counts how often memory was too small: each time, micro_batch becomes the largest divisor of a rank's
    share that is at most half of the previous one.
    """
    share, remainder = divmod(effective_batch, ranks)
    if remainder:
        what = f"{effective_batch} items cannot be divided equally among {ranks} processes"
        remedy = f"--set train.effective_batch={(share + 1) * ranks}"
        raise ConfigError(what, where="train.effective_batch", remedy=remedy)
    items = share if isinstance(micro_batch, str) else micro_batch
    if share % items:
        what = f"micro-batches of {items} items never add up to {share}, a process's share of train.effective_batch"
        raise ConfigError(what, where="train.micro_batch", remedy=f"--set train.micro_batch={_divisor(share, items)}")
    for _ in range(shrink):
        if items == 1:
            what = "not enough memory for a micro-batch of one item"
            remedy = "request a larger GPU (cluster.train.constraint)   or node (cluster.train.partition)"
            raise PlanInfeasible(what, where=WHERE, remedy=remedy)
        items = _divisor(share, items // 2)
    return items, share // items


def refuse_blind(script: Script, shrink: int) -> None:
    """Refuse to retry after GPU memory ran out if the command does not name {micro_batch}."""
    if shrink and "micro_batch" not in script.names:
        what = "the GPU ran out of memory, and the command does not contain {micro_batch} to reduce"
        raise PlanInfeasible(what, where=WHERE, remedy=SMALLER)


def script_environment(
    script: Script, values: Values, base: Mapping[str, str], *, threads: int = 1, allocator: str = ""
) -> dict[str, str]:
    """Return the environment of a script: ours, with the rank variables of torchrun."""
    kept = {name: value for name, value in base.items() if name not in RANK_NAMES}
    variables = {
        "PYTHONUNBUFFERED": "1",  # so that output appears at once
        "PIPELINE_RUN": _text(values.run),
        "PIPELINE_OUTPUT": _text(values.output),
        "PIPELINE_CONFIG": _text(values.config),
        "PIPELINE_ATTEMPT": str(values.attempt),
        **dict.fromkeys(THREADS, str(threads)),
        **allocator_settings(allocator, base),
    }
    return {**kept, **variables, **({} if script.launches or values.ranks == 1 else _place(values))}


def _place(values: Values) -> dict[str, str]:
    """Return torchrun's variables; the last one keeps Lightning from starting processes."""
    places = (
        *(values.rank, values.ranks, values.local_rank, values.processes, values.node, values.nodes),
        *(values.master_address, values.master_port, f"{values.run.name}-{values.attempt}"),
    )
    return dict(zip(RANK_NAMES, map(str, places), strict=True))


@contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a free port of this machine for a script's rank 0, until the script has ended.

    The socket is bound but does not listen: no other process gets the port, but torch's store can listen on it, as it
    also sets SO_REUSEADDR.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        yield int(held.getsockname()[1])


def _divisor(share: int, most: int) -> int:
    """Return the largest divisor of a share up to `most`."""
    return next((divisor for divisor in range(min(most, share), 0, -1) if share % divisor == 0), 1)


def _refused(what: str, remedy: str = "") -> ConfigError:
    hint = remedy or "python scripts/train.py --batch_size {micro_batch} --accumulate {accumulation}"
    return ConfigError(what, where=WHERE, remedy=hint)
