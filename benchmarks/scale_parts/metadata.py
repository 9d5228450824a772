"""What the stages ask of a file system's metadata servers: calls that name a path, counted by strace, an item."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from typing import TYPE_CHECKING, Any

from benchmarks.scale_parts.data import PIPELINE, make_project

if TYPE_CHECKING:
    from pathlib import Path

STAGES = ("scan", "embed", "graph")
FEWER, MORE = 256, 1024  # complexes of two projects; what both take costs nothing an item
CALL = re.compile(r"^(?:\d+ +)?(\w+)\(")
PLACES = {"inputs": "data/structures/", "cache": "cache/"}  # a run's folder costs something a task, not an item


def metadata_side(folder: Path, fewer: int = FEWER, more: int = MORE) -> dict[str, Any]:
    """Return how many calls an item costs in each stage, on the inputs and in the cache."""
    if shutil.which("strace") is None:
        raise SystemExit("strace is not there: nothing was counted")
    counted = [_counted(folder / str(size), size) for size in (fewer, more)]
    return {
        "from": fewer,
        "to": more,
        "calls_per_item": {
            stage: {
                place: {
                    call: round(value, 3) for call, value in _slope(small[place], large[place], more - fewer).items()
                }
                for place in PLACES
            }
            for stage, small, large in ((stage, counted[0][stage], counted[1][stage]) for stage in STAGES)
        },
    }


def _slope(small: Counter[str], large: Counter[str], items: int) -> dict[str, float]:
    """Return what each further item costs, of calls that it costs at all."""
    slopes = {call: (large[call] - small[call]) / items for call in sorted(large)}
    return {call: value for call, value in slopes.items() if abs(value) >= 0.01}


def _counted(folder: Path, complexes: int) -> dict[str, dict[str, Counter[str]]]:
    """Run the stages of a project under strace; return the calls by stage, by place."""
    folder.mkdir()
    make_project(folder, complexes)
    found = {}
    for stage in STAGES:
        trace = folder / f"{stage}.trace"
        words = ["strace", "-f", "-qq", "-e", "trace=%file", "-s", "256", "-o", str(trace), str(PIPELINE)]
        words += ["submit", "--stage", stage, "--only", "--executor", "local", "--follow"]
        subprocess.run(words, cwd=folder, check=True, capture_output=True)
        calls = {place: Counter[str]() for place in PLACES}
        with trace.open(errors="replace") as lines:
            for line in lines:
                called = CALL.match(line)
                place = next((name for name, part in PLACES.items() if f"{folder}/{part}" in line), None)
                if called and place:
                    calls[place][called[1]] += 1
        found[stage] = calls
    return found
