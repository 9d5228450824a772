"""Real processes that are ranks of one group: forked from a process that has imported torch already, to be quick."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pipeline.device.accelerator import is_card, select_card
from pipeline.device.kinds import CPU
from pipeline.errors import PipelineError
from pipeline.records import RankPlace
from pipeline.training.ranks.process_group import join_process_group
from pipeline.training.ranks.rank_monitor import HangLimits

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.process import BaseProcess

DEADLINE_S = 300.0  # other work may share the machine
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([__name__])


@dataclass
class Crew:
    """Processes that were started as ranks 0, 1, … of one group."""

    folder: Path
    processes: list[BaseProcess]

    def wait(self, within_s: float = DEADLINE_S) -> list[int | None]:
        """Wait for all; return their exit codes, None for one that had to be ended."""
        until = time.monotonic() + within_s
        for process in self.processes:
            process.join(max(0.0, until - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        self.end()
        return codes

    def results(self, within_s: float = DEADLINE_S) -> list[Any]:
        """Wait for all, which must end well; return what each part returned."""
        codes = self.wait(within_s)
        assert codes == [0] * len(codes), "".join(self.err(rank) for rank in range(len(codes)))
        return [self.result(rank) for rank in range(len(codes))]

    def end(self) -> None:
        """End all."""
        for process in self.processes:
            process.kill()
            process.join(DEADLINE_S)
            process.close()

    def err(self, rank: int) -> str:
        """Return what a rank wrote to its stderr."""
        return self.folder.joinpath(f"{rank}.err").read_text()

    def result(self, rank: int) -> Any:
        """Return what the part of a rank returned."""
        return json.loads(self.folder.joinpath(f"{rank}.json").read_text())

    def pid(self, rank: int) -> int:
        """Return the number of a rank's process."""
        pid = self.processes[rank].pid
        assert pid is not None
        return pid


def crew(
    folder: Path,
    world: int,
    part: Callable[..., Any],
    *words: Any,
    limits: HangLimits | None = None,
    meeting: str = "test",
    meeting_folder: Path | None = None,
    nodes: int = 1,
    device: str = CPU,
) -> Crew:
    """Start ranks that each do a part: a function of a module, called with its group and the words."""
    folder.mkdir(exist_ok=True)
    where = meeting_folder or folder
    processes = [
        _context.Process(
            target=_be,
            args=(f"{rank}/{world}", nodes, device, folder, where, meeting, limits, part, words),
            daemon=True,
        )
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    return Crew(folder, list(processes))


def await_file(path: Path) -> None:
    """Wait until another process has made a file."""
    until = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < until, path
        time.sleep(0.005)


def _be(
    part: str,
    nodes: int,
    device: str,
    folder: Path,
    where: Path,
    meeting: str,
    limits: HangLimits | None,
    do: Callable[..., Any],
    words: tuple[Any, ...],
) -> None:
    """Be a rank: like a worker, but for what it does."""
    place = replace(RankPlace.parse(part, meeting), nodes=nodes)
    os.dup2(os.open(folder / f"{place.rank}.err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), 2)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    why = ""
    group = None
    try:
        if is_card(device):
            select_card(place.local_rank)
        group = join_process_group(place, where, device=device, limits=limits, within_s=120)
        result = do(group, *words)
        folder.joinpath(f"{place.rank}.json").write_text(json.dumps(result))
    except PipelineError as error:
        why = str(error)
        os.write(2, f"error: {error}\n".encode())
        sys.exit(error.exit_code)
    except Exception as error:  # noqa: BLE001 - it is to be read in the test's output
        why = str(error)
        traceback.print_exc()
        sys.exit(1)
    finally:
        if group is not None:
            group.close(why)
