"""Finds the largest micro-batch of a user's script by running it, and remembers the answer.

The command is as in `train.command`, with {micro_batch} for the size to find. It starts its ranks itself (torchrun,
srun, accelerate), so a size does not fit if any rank runs out of memory: among unequal GPUs the smallest decides. A
size fits if the command succeeds. It also fits if the command has printed `pipeline: {"step": n}` often enough, or has
run for the allowed time; then it gets a SIGTERM.

The answer is kept next to the project, under the command, the files that it names, the GPUs and torch.
"""

from __future__ import annotations

import math
import os
import signal
import tempfile
import time
from bisect import bisect_right
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Any

from pipeline.cluster.machine import card_names
from pipeline.cluster.verdict import GO_ON
from pipeline.codec import recall, remember
from pipeline.command_line import quoted
from pipeline.errors import ConfigError, JobFailed, PlanInfeasible
from pipeline.script.command import Script, Values, parse_command, process_words
from pipeline.script.script_process import STEP, run_script

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

WHERE = "pipeline find-batch"
FOLDER = ".pipeline-tune"  # in the current folder: the answers, and the output of the last try
CLOSE = 16  # precision of the answer: a sixteenth
LAST_LINES = 5
SILENT_S = 60.0  # seconds without a step before a note is printed


@dataclass(frozen=True, slots=True)
class Try:
    """A tried size, and why it did not fit."""

    micro_batch: int
    fits: bool
    reason: str = ""


def largest_that_fits(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """Return the largest of ascending sizes that fits, to within a sixteenth, or None.

    Halve from the largest size down until one fits: most of the time goes into starting.
    """
    too_large, size = len(sizes), len(sizes) - 1
    while not fits(sizes[size]):
        too_large = size
        if not size:
            return None
        size = max(0, min(size, bisect_right(sizes, sizes[size] // 2)) - 1)
    while too_large - size > 1 and sizes[too_large - 1] > sizes[size] * (1 + 1 / CLOSE):
        middle = (size + too_large) // 2
        if fits(sizes[middle]):
            size = middle
        else:
            too_large = middle
    return sizes[size]


def find_batch(
    command: str,
    sizes: Sequence[int],
    *,
    steps: int,
    seconds: float | None = None,
    again: bool = False,
    on_try: Callable[[Try], None] = lambda _: None,
    waits: Callable[[int], None] = lambda _: None,
) -> tuple[int, bool]:
    """Return the largest micro-batch among ascending sizes that a command can run, and whether it was remembered.

    `waits` is called with a size whose script has printed no step for a minute.
    """
    script = parse_command(command)
    if "micro_batch" not in script.names:
        remedy = "pipeline find-batch --max 64 -- python train.py --batch {micro_batch}"
        raise ConfigError(f"{command!r} does not contain {{micro_batch}}", where=WHERE, remedy=remedy)
    asked = _asked(script, sizes)
    known = None if again else recall(Path(FOLDER), "batch", asked, int)
    if known is not None:
        return known, True
    tries: list[Try] = []

    def fits(size: int) -> bool:
        tries.append(_tried(script, size, steps, seconds or math.inf, waits))
        on_try(tries[-1])
        return tries[-1].fits

    found = largest_that_fits(sizes, fits)
    if found is None:
        problem = f"even a micro-batch of {sizes[0]} does not fit: {tries[-1].reason}"
        raise PlanInfeasible(
            problem, where=WHERE, remedy="use a smaller model, activation checkpointing or a larger GPU"
        )
    return remember(Path(FOLDER), "batch", asked, found), False


def _asked(script: Script, sizes: Sequence[int]) -> dict[str, Any]:
    """Return everything known here that an answer depends on."""
    files = [sha256(Path(word).read_bytes()).hexdigest() if Path(word).is_file() else "" for word in script.words]
    machine = [card_names(), os.environ.get("SLURM_JOB_PARTITION"), version("torch")]
    return {"words": script.words, "files": files, "sizes": repr(sizes), "machine": machine}


def _tried(script: Script, size: int, steps: int, seconds: float, waits: Callable[[int], None]) -> Try:
    """Run the command with a size to find out whether it fits; raise if it fails for another reason."""
    Path(FOLDER).mkdir(exist_ok=True)
    log, begun_s = Path(FOLDER, "last.log"), time.monotonic()
    silence = Timer(SILENT_S, waits, [size])
    silence.daemon = True

    def note_step(figures: Mapping[str, float]) -> None:
        silence.cancel()
        if figures.get(STEP, 0) >= steps:
            os.kill(os.getpid(), signal.SIGTERM)  # passed on to the script, which then ends

    with tempfile.TemporaryDirectory() as folder, log.open("wb") as out:
        place = Path(folder)
        values = Values(
            effective_batch=size, micro_batch=size, accumulation=1, run=place, output=place, config=place / "none"
        )
        words = process_words(script, values)
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        silence.start()
        try:
            run = partial(
                run_script, words, environment=environment, cwd=Path.cwd(), on_figures=note_step, longest_s=seconds
            )
            ended = run(out=out.fileno(), err=out.fileno())
        finally:
            silence.cancel()
    if "oom" in ended.trouble:
        return Try(size, fits=False, reason=ended.reason)
    if ended.handled_signal == signal.SIGTERM and ended.step < steps and time.monotonic() - begun_s < seconds:
        raise JobFailed(f"was stopped while trying {size}", where=WHERE, remedy="run the same command again")
    if ended.exit_code in (0, GO_ON) or ended.handled_signal == signal.SIGTERM:
        return Try(size, fits=True)
    last = "\n".join(f"    {line}" for line in ended.last_lines[-LAST_LINES:])
    problem = f"with a micro-batch of {size} {ended.what}\n{last}"
    raise JobFailed(problem, where=WHERE, remedy=f"less {quoted(log)}   (memory is not the cause)")
