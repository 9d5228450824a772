"""Publishes records over and over in child processes that kill themselves at a chosen step; run as a program.

Prints a JSON line per child: where it was killed and which keys it had acknowledged. `python -m tests.store.publisher
FOLDER` covers every step at every moment once; with a number it goes round until so many children have died.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from pathlib import Path

from pipeline.store.cache import Cache
from tests.store.content import put
from tests.store.faulty_disks import KillingDisk

MOMENTS = ("before", "halfway", "after")


def publish_all(root: Path, disk: KillingDisk, acknowledge: int) -> None:
    """Write three shards and two indexes, saying on the pipe which keys are safe as soon as they are."""
    store = Cache(root, disk).kind("scan")
    with store.writer() as writer:
        for first in (0, 10, 20):
            put(writer, *range(first, first + 4))
            os.write(acknowledge, b"".join(key.hex().encode() + b"\n" for key in writer.flush()))
            if first:
                store.write_index()


def run_child(root: Path, disk: KillingDisk) -> tuple[bool, list[str]]:
    """Publish in a forked child; return whether it was killed and what it acknowledged."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        publish_all(root, disk, writer)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        acknowledged = pipe.read().split()
    status = os.waitpid(child, 0)[1]
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, acknowledged


def count_steps(folder: Path) -> int:
    disk = KillingDisk()
    publish_all(folder / "counted", disk, os.open(os.devnull, os.O_WRONLY))
    return disk.steps


def main(folder: Path, kills: int | None) -> None:
    rounds = itertools.product(range(1, count_steps(folder) + 1), MOMENTS)
    chosen = rounds if kills is None else itertools.islice(itertools.cycle(rounds), 2 * kills)
    died = 0
    for number, (step, moment) in enumerate(chosen):
        root = folder / f"{number}"
        killed, acknowledged = run_child(root, KillingDisk(step, moment))
        died += killed
        death = {"root": root.name, "step": step, "moment": moment, "killed": killed, "safe": acknowledged}
        sys.stdout.write(json.dumps(death) + "\n")
        if died == kills:
            break


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
