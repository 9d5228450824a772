"""Plays events one after the other, and says of each whether all held that must hold."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.testkit.cluster import Cluster
from tests.weeks import files, people, scheduler
from tests.weeks.neighbours import Neighbours, beside
from tests.weeks.scene import Scene, prepared, weights

Event = Callable[[Scene], None]
EVENTS: dict[str, Event] = {event.__name__: event for room in (files, people, scheduler) for event in room.EVENTS}


class Stage:
    """The cluster, the project of which copies are played with, and how its model ends undisturbed."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.template = prepared(folder / "template")
        quiet = self._scene("undisturbed", 0)
        run = quiet.trains(quiet.project())
        quiet.ends(run)
        quiet.nothing_left()
        self.quiet = weights(run.project)

    def plays(self, name: str, seed: int) -> str:
        """Play an event; return what did not hold, empty where all did."""
        scene = self._scene(name, seed)
        try:
            EVENTS[name](scene)
            scene.nothing_left()
        except Exception:  # noqa: BLE001 - whatever it is, it is told, and the play goes on
            return traceback.format_exc()
        finally:
            (self.folder / f"{name}-{seed}.txt").write_text("\n\n".join(scene.heard))
            scene.leaves()
        shutil.rmtree(scene.folder)
        return ""

    def _scene(self, name: str, seed: int) -> Scene:
        folder = self.folder / f"{name}-{seed}"
        folder.mkdir(parents=True)
        quiet = getattr(self, "quiet", {})
        return Scene(self.cluster, self.template, folder, random.Random(f"{name} {seed}"), quiet)


@dataclass
class Played:
    """What was played, and what of it failed."""

    events: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    steps: Counter[str] = field(default_factory=Counter)  # of the neighbours

    def beside(self, neighbours: Neighbours | None) -> Played:
        """Return this with what neighbours did meanwhile, and what of that failed."""
        if neighbours is None:
            return self
        failed = [f"neighbours: {failure.splitlines()[0]}" for failure in neighbours.failures]
        return replace(self, steps=Counter(neighbours.steps), failed=[*self.failed, *failed])


def play(cluster: Cluster, seed: int, minutes: float, only: Sequence[str] = (), *, alone: bool = False) -> Played:
    """Play events in an order by the seed, every one once before any twice, beside neighbours unless `alone`."""
    began, played = time.monotonic(), Played()
    with on_cluster(cluster), tempfile.TemporaryDirectory(prefix="weeks-", ignore_cleanup_errors=True) as folder:
        stage = Stage(cluster, Path(folder))
        cluster.settle()
        with nullcontext() if alone else beside(cluster, seed) as neighbours:
            for number, name in enumerate(only or sequence(seed)):
                if not only and time.monotonic() - began > 60 * minutes:
                    break
                cluster.settle(alone=alone)
                from_s = time.monotonic()
                trouble = stage.plays(name, seed * 1000 + number)
                print(f"{name}: {'FAILED' if trouble else 'held'} after {time.monotonic() - from_s:.0f} s", flush=True)  # noqa: T201
                played.events[name] += 1
                if trouble:
                    print(trouble, flush=True)  # noqa: T201
                    played.failed.append(name)
    return played.beside(neighbours)


def sequence(seed: int) -> Iterator[str]:
    """Yield the names of events for ever, in an order that the seed decides."""
    rng = random.Random(seed)
    while True:
        names = sorted(EVENTS)
        rng.shuffle(names)
        yield from names


@contextmanager
def on_cluster(cluster: Cluster) -> Iterator[None]:
    """Have a cluster run, named to all that is started."""
    ran_before = cluster.is_running()
    cluster.start()
    before = dict(os.environ)
    os.environ.update(cluster.env())
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        if not ran_before:
            cluster.stop()
