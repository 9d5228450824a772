"""Processes that die by SIGKILL, in a program of its own: it forks, and a test process may have threads.

    python -m tests.faults.deaths FOLDER steps STRIDE          at each so-manieth step of every work, in turn before,
                                                               halfway through and after it; a step goes by many times
    python -m tests.faults.deaths FOLDER moments KILLS SEED    at any moment, while they write, index, compact, sweep,
                                                               repair, validate and read one cache at once

Prints a JSON line for each round of deaths: how many died, and what there is to complain about.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count, cycle
from pathlib import Path

from pipeline.errors import PipelineError
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.maintenance import checking, shard_plans
from pipeline.store.users import sorted_keys
from tests.faults.judged import KIND, aftermath, complaints, is_of_gone, served
from tests.faults.works import HEADER_BYTES, NAME, WORKS, Work
from tests.store.content import key_of, put
from tests.store.faulty_disks import KillingDisk

MOMENTS = ("before", "halfway", "after")
SETTLE_S = 0.05
LONGEST_LIFE_S = 0.25
TURNS_A_CACHE = 12
NUMBERS_A_TURN = 300
FIRST_NEEDLESS = 10_000  # numbers from here on are of records that nobody needs
Tell = Callable[[Iterable[str]], None]


def forked(do: Callable[[Tell], object]) -> tuple[int, int]:
    """Do something in a child that tells lines; return its number and where to read them."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    try:
        os.close(reading)
        do(lambda lines: os.write(writing, "".join(f"{line}\n" for line in lines).encode()))
    except BaseException:  # noqa: BLE001 - a child must not come back into its parent's code
        os.write(writing, f"failed: {json.dumps(traceback.format_exc())}\n".encode())
    finally:
        os._exit(0)


def died(child: int, reading: int) -> tuple[bool, list[str]]:
    """Wait for a child; return whether it was killed, and the lines that it told, whole ones only."""
    with os.fdopen(reading) as pipe:
        lines = pipe.read().split("\n")[:-1]
    status = os.waitpid(child, 0)[1]
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, lines


def steps_of(work: Work, folder: Path) -> int:
    """Return how many steps of a work change the disk."""
    disk = KillingDisk()
    work.run(folder, CacheFolder(work.begin(folder), disk))
    return disk.steps


def at_steps(folder: Path, stride: int) -> Iterator[dict[str, object]]:
    """Kill a work at one step after the other, and judge what it leaves."""
    moments = cycle(MOMENTS)
    for work in WORKS:
        for step in range(1, steps_of(work, folder / work.name) + 1, stride):
            place, moment = folder / f"{work.name}-{step}", next(moments)
            root = work.begin(place)

            def do(tell: Tell, work=work, place=place, root=root, step=step, moment=moment) -> None:
                cache = CacheFolder(root, KillingDisk(step, moment))
                work.run(place, cache, lambda keys: tell(key.hex() for key in keys))

            killed, lines = died(*forked(do))
            found = aftermath(work, place, {*work.live, *map(bytes.fromhex, lines)})
            yield {"work": work.name, "step": step, "moment": moment, "killed": int(killed), "complaints": found}
            shutil.rmtree(place)


def at_moments(folder: Path, kills: int, seed: int) -> Iterator[dict[str, object]]:
    """Kill processes that do everything at once to one cache, again and again, and judge what they leave."""
    chance, killed = random.Random(seed), 0
    for turn in count():
        if turn % TURNS_A_CACHE == 0:
            turmoil = Turmoil(folder / f"{turn}" / NAME)
        dead, found = turmoil.strike(turn % TURNS_A_CACHE, chance)
        killed += dead
        yield {"turn": turn, "killed": dead, "records": len(turmoil.safe), "complaints": found}
        if killed >= kills:
            return
        if turn % TURNS_A_CACHE == TURNS_A_CACHE - 1:
            shutil.rmtree(turmoil.root.parent)


class Turmoil:
    """A cache on which processes do all there is to do, until they are killed."""

    needed = tuple(key_of(number) for number in range(TURNS_A_CACHE * NUMBERS_A_TURN))
    needless = tuple(key_of(FIRST_NEEDLESS + number) for number in range(TURNS_A_CACHE * NUMBERS_A_TURN))
    live = shard_plans.Live(keys=sorted_keys(b"".join(needed)))

    def __init__(self, root: Path) -> None:
        self.root = root
        self.safe: set[bytes] = set()

    def strike(self, turn: int, chance: random.Random) -> tuple[int, list[str]]:
        """Let all of them begin, kill each at some moment; return how many died so, and the complaints."""
        children = [forked(partial(self.forever, role, turn)) for role in ROLES]
        for child, _ in chance.sample(children, len(children)):
            time.sleep(
                chance.uniform(0, 2 * LONGEST_LIFE_S / len(children))
            )  # waits for nothing: the moment is the fault
            os.kill(child, signal.SIGKILL)
        ends = [died(*one) for one in children]
        told = [line.split(" ", 1) for _, lines in ends for line in lines]
        self.safe.update(bytes.fromhex(key) for word, key in told if word == "safe")
        found = [" ".join(line) for line in told if line[0] != "safe"]
        found += complaints(self.root, self.safe, self.needed + self.needless, finish=False)
        return sum(killed for killed, _ in ends), found

    def forever(self, role: Role, turn: int, tell: Tell) -> None:
        """Do one thing again and again."""
        random.seed()
        for first in count(turn * NUMBERS_A_TURN, 3):
            try:
                role(self, CacheFolder(self.root), range(first, min(first + 3, (turn + 1) * NUMBERS_A_TURN)), tell)
            except PipelineError as error:
                tell([f"failed: {role.__name__}: {error!r}"])


def write(turmoil: Turmoil, cache: CacheFolder, numbers: range, tell: Tell) -> None:
    with cache.kind(KIND).writer(header_bytes=HEADER_BYTES) as writer:
        put(writer, *numbers)
        tell(f"safe {key.hex()}" for key in writer.flush())


def write_needless(turmoil: Turmoil, cache: CacheFolder, numbers: range, tell: Tell) -> None:
    with cache.kind(KIND).writer(header_bytes=HEADER_BYTES) as writer:
        put(writer, *(FIRST_NEEDLESS + number for number in numbers))


def index(turmoil: Turmoil, cache: CacheFolder, numbers: range, tell: Tell) -> None:
    cache.kind(KIND).write_index()


def pack(turmoil: Turmoil, cache: CacheFolder, numbers: range, tell: Tell) -> None:
    list(shard_plans.apply(shard_plans.plan_compaction(cache.kind(KIND)).small, settle_s=SETTLE_S))


def clean(turmoil: Turmoil, cache: CacheFolder, numbers: range, tell: Tell) -> None:
    marked = shard_plans.mark(cache.kind(KIND), turmoil.live, time.time() + 60)
    for fate in (shard_plans.Fate.GOES, shard_plans.Fate.REWRITTEN):
        list(shard_plans.apply(marked.of(fate), settle_s=SETTLE_S))


def mend(turmoil: Turmoil, cache: CacheFolder, numbers: range, tell: Tell) -> None:
    shard_plans.repair(cache)


def validate(turmoil: Turmoil, cache: CacheFolder, numbers: range, tell: Tell) -> None:
    store = cache.kind(KIND)
    for finding in (finding for checked in checking.check(store) for finding in checked.findings):
        if not is_of_gone(store, finding) or (finding.lost and bytes.fromhex(finding.key) in turmoil.safe):
            tell([f"accused: {finding}"])


def read(turmoil: Turmoil, cache: CacheFolder, numbers: range, tell: Tell) -> None:
    store = cache.kind(KIND)
    for key in random.sample(sorted(turmoil.safe), min(len(turmoil.safe), 50)):
        right = served(store, key)
        if not right:
            tell([f"{'lost' if right is None else 'wrong'}: {key.hex()}, says a reader"])


Role = Callable[[Turmoil, CacheFolder, range, Tell], object]
ROLES: tuple[Role, ...] = (write, write_needless, index, pack, clean, mend, validate, read)


def main(folder: Path, how: str, *numbers: str) -> None:
    for told in (at_steps if how == "steps" else at_moments)(folder, *map(int, numbers)):
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
