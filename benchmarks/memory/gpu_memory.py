"""The planner against a card: predicted memory beside what torch reserves, epochs under limits, allocator histories.

    python benchmarks/memory/gpu_memory.py [--only compare,plan,history] [--members NAMES] [--out FILE] [--fixtures DIR]
    python benchmarks/memory/gpu_memory.py --dry       # the CPU stands in for the card: proves that the script runs

- compare: for every model of tests/zoo, in fp32, bf16 and fp16, one step size on a card of 24, one of 40 and one of
  80 GB, played by `set_per_process_memory_fraction`: the zoo's sizes, with so many more items that they fill the
  share of SHARES. Predicted are reserved memory, cuBLAS's workspaces and the context; measured are
  `max_memory_reserved` and what else is in use. The largest of a model's sizes is then recorded as a profile is, and
  corrects the predictions of the others.
- plan: for every model and card, a data set is planned and an epoch of it is trained as planned.
- history: what torch's allocator was asked, as plain tapes (`--fixtures`), and what our simulator makes of each.

Each case runs in a process of its own; those of `compare` have the card to themselves. What is not begun after
`--minutes` is left out, and told.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.circumstances import write  # noqa: E402 - the project is found only now
from benchmarks.gpu_memory_parts.cards import card_facts  # noqa: E402
from benchmarks.gpu_memory_parts.cases import (  # noqa: E402
    HISTORIES,
    PRECISIONS,
    SHRINK,
    compare_cases,
    history_cases,
    plan_cases,
    played,
)
from benchmarks.gpu_memory_parts.histories import recorded  # noqa: E402
from benchmarks.gpu_memory_parts.judging import judge_compare, judge_history, judge_plan, profiled_table, told_of  # noqa: E402
from benchmarks.gpu_memory_parts.measuring import compared, trained  # noqa: E402
from benchmarks.gpu_memory_parts.predicting import planned, predicted  # noqa: E402
from benchmarks.gpu_memory_parts.processes import Bench, Room  # noqa: E402
from pipeline.errors import ConfigError  # noqa: E402
from pipeline.memory.hardware.gpus import device  # noqa: E402
from pipeline.memory.history.step_history import torch_version  # noqa: E402

PARTS = ("compare", "plan", "history")
SLOW = ("recurrent_depth", "equivariant")  # to trace; begun first


def child() -> None:
    """Do what the first line says, and say what came of it in one line."""
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed goes to the log
    case = json.loads(sys.stdin.readline())

    def ready() -> None:
        print("ready", file=told, flush=True)
        sys.stdin.readline()

    try:
        said = KINDS[case["kind"]](case, ready)
    except Exception as error:  # noqa: BLE001 - a failing member is a row
        said = {"error": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"}
    print(json.dumps(said), file=told, flush=True)
    os._exit(0)  # the card is free sooner


KINDS: dict[str, Callable[[Mapping[str, Any], Callable[[], None]], dict[str, Any]]] = {
    "card": card_facts,
    "predict": predicted,
    "plan": planned,
    "compare": compared,
    "train": trained,
    "history": recorded,
}


JUDGES = {"compare": judge_compare, "plan": judge_plan, "history": judge_history}


def work_list(bench: Bench, typed: argparse.Namespace) -> Iterator[Iterator[Callable[[], dict[str, Any]]]]:
    """Yield what predicts, the slowest first; each yields what measures."""
    members = sorted(typed.members, key=lambda name: name not in SLOW)
    if "history" in typed.only:
        typed.fixtures.mkdir(parents=True, exist_ok=True)
        yield from (history_cases(bench, name, typed.fixtures) for name in HISTORIES if name in members)
    for names in ([one for one in members if one in SLOW], [one for one in members if one not in SLOW]):
        if "compare" in typed.only:
            yield from (compare_cases(bench, name, kind) for kind in typed.precisions for name in names)
        if "plan" in typed.only:
            yield from (plan_cases(bench, name, card) for card in played(bench).values() for name in names)


def run_all(bench: Bench, typed: argparse.Namespace, keep: Callable[[list[dict[str, Any]]], None]) -> None:
    """Predict on many cores, measure as predictions come, and keep every row at once."""
    cores = len(os.sched_getaffinity(0))
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        thinkers = stack.enter_context(ThreadPoolExecutor(max(1, cores - 4)))
        runners = stack.enter_context(ThreadPoolExecutor(max(1, min(6, cores // 2))))
        thoughts = [thinkers.submit(list, cases) for cases in work_list(bench, typed)]
        runs: list[Future[dict[str, Any]]] = []
        taken = threading.Lock()

        def done(future: Future[dict[str, Any]]) -> None:
            with taken:
                rows.append(future.result())
                print(f"{time.monotonic() - typed.began:5.0f} s  {told_of(rows[-1])}", flush=True)
                keep(rows)

        for thought in as_completed(thoughts):
            for run in thought.result():
                runs.append(runners.submit(run))
                runs[-1].add_done_callback(done)


def options() -> argparse.Namespace:
    """Return what was typed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between")
    parser.add_argument("--members", default="", help="models of the zoo, with commas between; all unless told")
    parser.add_argument("--precisions", default=",".join(PRECISIONS))
    parser.add_argument("--minutes", type=float, default=9.0, help="after which no further case begins")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--fixtures", type=Path, help="folder for allocator histories; without it none is recorded")
    parser.add_argument("--dry", action="store_true", help="the CPU stands in for the card; nothing is measured")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    typed = parser.parse_args()
    typed.began, typed.only, typed.precisions = time.monotonic(), typed.only.split(","), typed.precisions.split(",")
    if unknown := (set(typed.only) - set(PARTS)) | (set(typed.precisions) - set(PRECISIONS)):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if typed.fixtures is None and "history" in typed.only:
        typed.only.remove("history")
    return typed


def bench_of(typed: argparse.Namespace) -> tuple[Bench, dict[str, Any]]:
    """Look at the card, or take an H200 for one that the CPU stands in for."""
    until = typed.began + 60 * typed.minutes
    if typed.dry:
        card = device("h200-141gb-sxm")
        total = card.usable_bytes // SHRINK
        return Bench(card, "cpu", "", total, dry=True, until=until, room=Room(total, until)), {
            "card": "the CPU in its place"
        }
    nobody = Bench(device("24GiB"), "", "", 0, dry=False, until=until, room=Room(1, until))
    facts = nobody.ask({"kind": "card"}, on_card=True)
    if "error" in facts:
        return nobody, facts
    try:
        card = device(facts["name"])
    except ConfigError:
        card = device(f"{facts['total_bytes'] >> 20}MiB")
    card = replace(card, capability=tuple(facts["capability"]))
    total = facts["total_bytes"] - 2 * facts["taken_bytes"]
    about = {"card": facts["name"], "driver": facts["driver"], "context_bytes": facts["taken_bytes"]}
    room, whole = Room(total, until), facts["total_bytes"]
    return Bench(card, facts["gpu"], facts["driver"], whole, False, until, room, facts["taken_bytes"]), about  # noqa: FBT003


def main() -> int:
    """Measure, print as it goes, write all figures; fail where nothing ran on a card."""
    typed = options()
    warnings.simplefilter("ignore")
    if typed.child:
        child()
    from tests.zoo import ZOO

    typed.members = typed.members.split(",") if typed.members else list(ZOO)
    if unknown := set(typed.members) - set(ZOO):
        print(f"the zoo has no {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    bench, about = bench_of(typed)
    if "error" in about:
        print(f"{about['error']}: nothing was measured (--dry lets the CPU stand in)", file=sys.stderr)
        return 2
    about |= {"torch": torch_version(), "dry": typed.dry}
    result: dict[str, Any] = {"card": about}

    def keep(rows: list[dict[str, Any]]) -> None:
        for part in typed.only:
            result[part] = {"rows": [row for row in rows if row["part"] == part]}
        write(None if typed.dry else typed.out, result)

    print(json.dumps(about), flush=True)
    keep([])
    run_all(bench, typed, keep)
    for part in typed.only:
        result[part] |= JUDGES[part](bench, result[part]["rows"])
    if "compare" in typed.only:
        profiled_table(sorted(result["compare"]["rows"], key=lambda row: (row["member"], row["precision"])))
    about["took_s"] = round(time.monotonic() - typed.began, 1)
    brief = {part: {name: value for name, value in result[part].items() if name != "rows"} for part in typed.only}
    print(json.dumps(brief, indent=1))
    if typed.dry:
        print("dry: the script runs; these figures are of the CPU in a card's place, and --out was not written")
        return 0
    write(typed.out, result)
    ran = {"compare": "measured_bytes", "plan": "used", "history": "events"}
    return 0 if all(any(ran[part] in row for row in result[part]["rows"]) for part in typed.only) else 1


if __name__ == "__main__":
    sys.exit(main())
