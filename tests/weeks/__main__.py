"""`python -m tests.weeks --seed N --minutes M`: events by chance, one after the other, until the time is over."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tests.testkit.cluster import Cluster, why_not
from tests.testkit.cluster.cluster import DEFAULT_FOLDER
from tests.weeks.play import EVENTS, play


def main() -> int:
    """Play and return the exit code."""
    given = argparse.ArgumentParser(prog="python -m tests.weeks", description=__doc__)
    given.add_argument("--seed", type=int, default=1, help="which events in which order, and all their choices")
    given.add_argument("--minutes", type=float, default=5.0, help="no event begins after so long")
    given.add_argument("--only", action="append", metavar="NAME", choices=sorted(EVENTS), help="this event, repeatable")
    given.add_argument("--cluster", type=Path, default=DEFAULT_FOLDER, help="the folder of the test cluster")
    given.add_argument("--alone", action="store_true", help="without neighbours, who share a cache beside the events")
    given.add_argument("--list", action="store_true", help="name the events")
    typed = given.parse_args()
    if typed.list:
        print(*(f"{name}: {event.__doc__}" for name, event in EVENTS.items()), sep="\n")  # noqa: T201
        return 0
    if reason := why_not():
        sys.exit(f"no test cluster here: {reason}")
    played = play(Cluster(typed.cluster), typed.seed, typed.minutes, typed.only or (), alone=typed.alone)
    did = {"events": played.events, "steps of neighbours": played.steps, "failed": played.failed}
    print(json.dumps(did, indent=1))  # noqa: T201
    return 1 if played.failed else 0


if __name__ == "__main__":
    sys.exit(main())
