"""A day on a card in one command: all that only a GPU can tell, in order of worth, within so many minutes.

    python benchmarks/gpu.py --minutes 120 [--out FOLDER] [--only smoke,memory] [--device auto|TYPE]
    python benchmarks/gpu.py --rehearse --device cpu     # toy sizes; proves that everything runs, from end to end

Parts: smoke (does everything run?), embeddings, memory (reserved, against plan), speed (against the guides' settings),
oom (forced, survived), epochs (30, flat), time (predicted, measured).

Each case is a process of its own with a time limit, so that one that crashes or hangs costs only itself. A part's
results are in FOLDER/PART.json as soon as there are any, what failed in FOLDER/logs, the page in FOLDER/README.md. Run
again, it takes up what is missing or has failed. It needs no internet and no root, and says at its start what it lacks.
Any accelerator of torch's will do (`--device auto`).
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.gpu_parts.day import Day, Part

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.figures import RESULTS  # noqa: E402 - the project is found only now
from benchmarks.gpu_parts import children  # noqa: E402

FACTS_S = 120.0
SCRATCH_BYTES = 12 << 30  # a checkpoint of 650 million parameters, data sets, models
REHEARSED_MINUTES = 30.0


def options() -> argparse.Namespace:
    """Return what was typed."""
    from benchmarks.gpu_parts.cards import NOT_CARDS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--minutes", type=float, help=f"for all of it; needed but for a rehearsal ({REHEARSED_MINUTES:g})"
    )
    parser.add_argument("--device", default="auto", help="auto, or a type of torch's: cuda, xpu …; cpu to rehearse")
    parser.add_argument("--rehearse", action="store_true", help="toy sizes, on whatever there is")
    parser.add_argument("--out", type=Path, help=f"folder of results ({RESULTS.relative_to(ROOT) / 'gpu'})")
    parser.add_argument("--only", default="", help="parts, with commas between; all unless told")
    typed = parser.parse_args()
    if typed.device in NOT_CARDS and not typed.rehearse:
        parser.error(f"{typed.device} is no card: --rehearse shows that everything runs")
    if typed.minutes is None and not typed.rehearse:
        parser.error("--minutes N: how long may all of it take?")
    typed.minutes = typed.minutes or REHEARSED_MINUTES
    if typed.out is None:
        typed.out = Path(tempfile.mkdtemp(prefix="gpu-rehearsal-")) if typed.rehearse else RESULTS / "gpu"
    return typed


def parts_of(only: str) -> Sequence[Part]:
    """Return the parts in order of worth, or those that are named."""
    from benchmarks.gpu_parts import embeddings, memory, smoke, speed, training

    parts = (smoke.PART, embeddings.PART, memory.PART, speed.PART, *training.PARTS)
    names = [one for one in only.split(",") if one]
    if unknown := set(names) - {part.name for part in parts}:
        sys.exit(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(part.name for part in parts)}")
    return [part for part in parts if not names or part.name in names]


def day_of(typed: argparse.Namespace, scratch: Path, began: float) -> Day | str:
    """Look at the card; return the day, or why there is none."""
    from benchmarks.gpu_parts.day import Day

    typed.out.mkdir(parents=True, exist_ok=True)
    asked = {"device": typed.device, "rehearsal": typed.rehearse}
    about = children.ask("benchmarks.gpu_parts.cards:facts", asked, FACTS_S, typed.out / "logs" / "card.log")
    if "error" in about:
        return f"{about['error']}: nothing was measured (--rehearse --device cpu shows that everything runs)"
    return Day(typed.out.absolute(), scratch, about, began + 60 * typed.minutes)


def run_day(day: Day, parts: Sequence[Part]) -> None:
    """Give each part its share of the time, in order of worth; then what is left to those that are not whole."""
    began, whole = time.monotonic(), set[str]()
    weights = sum(part.share for part in parts)
    for turn in ("its share", "what is left"):
        until = began
        for part in parts:
            until += part.share / weights * (day.end - began)
            if part.name not in whole and time.monotonic() < day.end:
                print(f"{part.name}: {part.what} ({turn} of the time)", flush=True)
                if day.run(part, until if turn == "its share" else day.end):
                    whole.add(part.name)


def end_of(day: Day) -> Callable[..., None]:
    """Return what to do when somebody ends the day: what runs is ended, the rest left out, and the page written."""

    def end(*_: object) -> None:
        day.end = time.monotonic()
        children.end_running()

    return end


def lacks_of(day: Day, parts: Sequence[Part]) -> list[str]:
    """Return what there is not enough of, and what is not installed."""
    from benchmarks.gpu_parts.day import lacking

    free = shutil.disk_usage(day.scratch).free
    disk = [
        f"disk: {free >> 30} GiB are free in {day.scratch.parent}, some parts may need {SCRATCH_BYTES >> 30} (TMPDIR)"
    ]
    found = disk if free < SCRATCH_BYTES and not day.rehearsal else []
    for part in parts:
        found += [f"{name}: without it no part {part.name}" for name in lacking(part.needs)]
        found += [f"{name}: without it less of the part {part.name}" for name in lacking(part.likes)]
    return found


def main() -> int:
    """Run the day; fail where there is no card, or where anything did."""
    warnings.simplefilter("ignore")
    if sys.argv[1:] == [children.CHILD]:
        children.child()
    began, typed = time.monotonic(), options()
    parts = parts_of(typed.only)
    from benchmarks.gpu_parts.day import trouble
    from benchmarks.gpu_parts.day_page import PAGE, day_page

    with tempfile.TemporaryDirectory(prefix="gpu-day-") as scratch:
        day = day_of(typed, Path(scratch), began)
        if isinstance(day, str):
            print(day, file=sys.stderr)
            return 2
        if other := day.others(part.name for part in parts):
            print(f"{other}: --out another folder, so that results of two days are not mixed", file=sys.stderr)
            return 2
        print(
            f"{day.about['card']}, driver {day.about['driver'] or 'not told'}, torch {day.about['torch']}", flush=True
        )
        for one in lacks_of(day, parts):
            print(f"lacks {one}", flush=True)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, end_of(day))
        try:
            run_day(day, parts)
        finally:
            (day.folder / PAGE).write_text(day_page(day, parts_of("")))
            print(f"{time.monotonic() - began:.0f} s; {day.folder / PAGE} is written", flush=True)
    results = [day.read(part.name) for part in parts]
    failed = any(one.get("broken") or any(map(trouble, one.get("cases", {}).values())) for one in results)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
