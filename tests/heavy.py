"""Which tests take most of the time: `python -m tests.heavy LOG --within S` chooses them anew, and writes heavy.txt.

LOG is what `pytest --durations=0 -vv` printed. Left to `make test` is what takes S seconds in sum, of all workers.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

LIST = Path(__file__).with_name("heavy.txt")
HEAD = "# Not in `make test`, but in `make test-most`. Chosen by what each took: python -m tests.heavy LOG\n"
LINE = re.compile(r"(\d+\.\d+)s (setup|call|teardown) +([^:\s]+)(::\S.*)")
LEAST_S = 1.0  # nothing shorter is worth a line


def heavy_tests() -> frozenset[str]:
    """Return the tests, without parameters, and the files that are heavy as a whole."""
    lines = LIST.read_text().splitlines() if LIST.exists() else []
    return frozenset(line for line in lines if line and not line.startswith("#"))


def is_heavy(nodeid: str, heavy: frozenset[str]) -> bool:
    """Tell whether a test is heavy, or its file."""
    return nodeid.partition("[")[0] in heavy or nodeid.partition("::")[0] in heavy


def seconds_of(lines: Iterable[str]) -> Counter[str]:
    """Return what each test took, all its parameters together; what is made for several counts for their file."""
    took = Counter[str]()
    for seconds, phase, file, test in (match.groups() for match in map(LINE.match, lines) if match):
        took[file if phase == "setup" and float(seconds) > LEAST_S else file + test.partition("[")[0]] += float(seconds)
    return took


def chosen(took: Counter[str], within_s: float) -> list[str]:
    """Return what is heavy, the longest first, so that the rest takes no longer than asked; a file with its tests."""
    left, heavy = took.copy(), list[str]()
    for name, _ in took.most_common():
        if left.total() <= within_s or took[name] < LEAST_S:
            break
        if name not in left:
            continue
        heavy.append(name)
        for one in [one for one in left if one == name or one.startswith(f"{name}::")]:
            del left[one]
    return sorted(heavy)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log", type=Path)
    parser.add_argument("--within", type=float, required=True, metavar="S")
    told = parser.parse_args(words)
    with told.log.open(errors="replace") as log:
        took = seconds_of(log)
    names = chosen(took, told.within)
    LIST.write_text(HEAD + "".join(f"{name}\n" for name in names))
    sys.stdout.write(f"{len(names)} of {len(took)} are heavy; all took {took.total():,.0f} s\n")


if __name__ == "__main__":
    main()
