"""Write the tables of docs/scale.md from the results: `python -m benchmarks.scale_parts.page`. The prose is by hand."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.scale_parts.stages import AFTER, STAGES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = Path(__file__).resolve().parents[2]
PAGE, RESULTS = ROOT / "docs/scale.md", ROOT / "benchmarks/results/scale.json"
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
TARGET = 10_000_000
MAX_ARRAY_SIZE = 1001  # of Slurm, unless its administrators raised it
STAT_S = 1e-4, 1e-3  # of a call that a metadata server answers: a quiet one, a busy one
Result = dict[str, Any]


def rows_of(cells: Sequence[Sequence[object]]) -> str:
    """Return a table in Markdown; the first row is its head."""
    head, *rest = ([str(cell) for cell in row] for row in cells)
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rest]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines) + "\n"


def measured(result: Result) -> str:
    """Return what each stage took, size by size."""
    head = ("stage, complexes", "CPU ms an item", "wall ms an item", "supervisor MB", "largest worker MB", "files",
            "records a file", "bytes a record", "machine's day")  # fmt: skip
    rows = [
        (
            f"{stage}, {int(size):,}",
            f"{one['cpu_ms_per_item']:.2f}",
            f"{one['wall_ms_per_item']:.2f}",
            f"{one['peak_mb']['supervisor']:.0f}",
            f"{one['peak_mb'].get('worker', 0):.0f}",
            f"{one['files']:,}" if "files" in one else "",
            f"{one['records_per_file']:,}" if "files" in one else "",
            f"{one['bytes_per_record']:,}" if "files" in one else "",
            one["date"],
        )
        for stage in STAGES
        for size, stages in result["sizes"].items()
        if (one := stages.get(stage))
    ]
    return rows_of([head, *rows])


def growth(result: Result) -> str:
    """Return how the largest size stands to the smallest, what was missed in bold."""
    reach = result["reach"]
    rows = [("stage", "from, to", "memory of the largest process", "CPU an item", "wall time an item")]
    for stage, one in result["growth"].items():
        told = [_told(one["memory"], reach["memory"]), _told(one["cpu_per_item"], reach["time"])]
        wall = _told(one["wall_per_item"], reach["time"])
        rows.append((stage, f"{one['from']:,}, {one['to']:,}", *told, wall))
    rows.append(("to reach", "", f"≤ {reach['memory']}×", f"≤ {reach['time']}×", f"≤ {reach['time']}×"))
    return rows_of(rows)


def _told(ratio: float, most: float) -> str:
    return f"{ratio:.2f}×" if ratio <= most else f"**{ratio:.2f}×**"


def training(result: Result) -> str:
    """Return how a training begins and goes on."""
    rows: list[Sequence[object]] = [
        ("complexes", "first step after, s", "of it in the worker, s", "a step, ms", "items/s")
    ]
    for size, stages in result["sizes"].items():
        if one := stages.get("train"):
            told = (one["first_step_s"], one["worker_first_step_s"], one["step_ms"], one["items_per_s"])
            rows.append((f"{int(size):,}", *told))
    return rows_of(rows)


def million(result: Result) -> str:
    """Return what was measured of an index and of a plan of the most items."""
    index, plan = _largest(result["index"]), _largest(result["scheduler"])
    made, added, planned = index["made_from_tables"], index["added_to"], plan["planned"]
    rows: list[Sequence[object]] = [
        ("what", "measured"),
        ("records in the index", f"{index['records']:,}, in {index['shards']:,} shards"),
        ("bytes of the index, a record", index["index_bytes_per_record"]),
        ("making it from the shards' tables", f"{made['seconds']} s, {_memory(made)}"),
        (f"adding {index['later']:,} records to it", f"{added['seconds']} s, {added['peak_mb']} MB"),
        ("opening it and looking 1,000 keys up", f"{index['open_and_look_up_1000_ms']} ms"),
        ("items of the plan", f"{plan['items']:,}"),
        ("planning a scan of them", f"{planned['cpu_s']} CPU s, {_memory(planned)}"),
        ("array tasks, items of the largest", f"{plan['tasks']:,}, {plan['items_of_largest_task']:,}"),
        ("bytes of a run's list of items, an item", plan["list_bytes_per_item"]),
        ("and of the list of those to do", plan["todo_bytes_per_item"]),
        ("its ledger, when all tasks have ended", f"{plan['ledger_bytes'] / 1e3:,.0f} kB"),
        ("`pipeline status` then", f"{plan['status_s']} s"),
    ]  # fmt: skip
    return rows_of(rows)


def _memory(took: Result) -> str:
    return f"{took['peak_mb']} MB (the process without it: {took['base_mb']} MB)"


def on_slurm(result: Result) -> str:
    """Return what each stage took on a cluster, size by size."""
    head = ("stage, complexes", "wall ms an item", "CPU ms an item in tasks", "supervisor MB", "largest worker MB",
            "tasks", "visits", "longest visit, s", "ledger, kB", "files", "records a file")  # fmt: skip
    rows = [
        (
            f"{stage}, {int(size):,}",
            f"{one['wall_ms_per_item']:.2f}",
            f"{one['tasks_cpu_ms_per_item']:.2f}",
            *(f"{one['peak_mb'][role]:.0f}" for role in ("supervisor", "worker")),
            *(f"{one[name]:,}" for name in ("tasks", "visits", "longest_visit_s")),
            f"{one['ledger_bytes'] / 1e3:,.0f}",
            *(f"{one[name]:,}" if name in one else "" for name in ("files", "records_per_file")),
        )
        for stage in STAGES
        for size, stages in result["slurm"]["sizes"].items()
        if (one := stages.get(stage))
    ]
    return rows_of([head, *rows])


def verbs(result: Result) -> str:
    """Return what people wait for when they type a verb over a data set on a cluster: seconds, CPU seconds, MB."""
    sizes = result["slurm"]["sizes"]
    rows: list[Sequence[object]] = [("typed", *(f"{int(size):,} complexes: s, CPU s, MB" for size in sizes))]
    of_stage = [(stage, name) for stage in STAGES for name in ("submit", "status", "report")]
    took = {f"{name}, of {stage}": [sizes[size].get(stage, {}).get(name) for size in sizes] for stage, name in of_stage}
    took |= {name: [sizes[size].get("verbs", {}).get(name) for size in sizes] for name in AFTER}
    rows += [(name, *map(_took, each)) for name, each in took.items()]
    return rows_of(rows)


def _took(one: Result | None) -> str:
    return f"{one['wall_s']}, {one['cpu_s']}, {one['mb']:.0f}" if one else "not measured"


def metadata(result: Result) -> str:
    """Return the calls that name a path, an item, by stage."""
    rows: list[Sequence[object]] = [("stage", "on the structure files", "in the cache")]
    for stage, places in result["metadata"]["calls_per_item"].items():
        told = (
            ", ".join(f"{value:g} {call}" for call, value in places[place].items()) or "none"
            for place in ("inputs", "cache")
        )
        rows.append((stage, *told))
    return rows_of(rows)


def ten_million(result: Result) -> str:
    """Return what follows for ten million complexes, each figure from a measured one."""
    sizes = {int(size): stages for size, stages in result["sizes"].items()}
    large = sizes[max(sizes)]
    index, plan, share = _largest(result["index"]), _largest(result["scheduler"]), TARGET / max(sizes)
    rows: list[Sequence[object]] = [("what", "for 10,000,000 complexes", "from")]
    for stage in ("scan", "embed", "graph"):
        one = large[stage]
        records = one["records"] * share
        what = f"{records / one['records_per_file']:,.0f} files, {records * one['bytes_per_record'] / 1e9:,.0f} GB"
        rows.append((f"{stage}: files and bytes in the cache", what, "records and bytes a file"))
    records = sum(large[stage]["records"] for stage in ("scan", "embed", "graph")) * share
    size_gb = records * index["index_bytes_per_record"] / 1e9
    rows.append(("indexes", f"{size_gb:.1f} GB for {records:,.0f} records", "bytes a record"))
    tasks = -(-TARGET // plan["items_of_largest_task"])
    arrays = -(-tasks // (MAX_ARRAY_SIZE - 1))
    rows.append(
        ("array tasks of a scan", f"{tasks:,}: {arrays} array of Slurm's usual MaxArraySize", "items of a task")
    )
    times = TARGET / plan["items"]
    rows.append(("planning a scan", f"{plan['planned']['cpu_s'] * times / 60:.0f} CPU minutes", "CPU s of the plan"))
    lists = (plan["list_bytes_per_item"] + plan["todo_bytes_per_item"]) * TARGET / 1e9
    rows.append(("lists of one run", f"{lists:.1f} GB", "bytes an item"))
    on_cluster = {int(size): stages for size, stages in result["slurm"]["sizes"].items()}
    grown = "growth between the sizes on a cluster"
    rows += [(f"memory of a supervisor of {one}", _supervisor(on_cluster, one), grown) for one in STAGES[:3]]
    rows += [(f"its visit that judges {one}", _visit(on_cluster, one), "the longest visit there") for one in STAGES[:3]]
    calls = sum(sum(places["inputs"].values()) for places in result["metadata"]["calls_per_item"].values())
    hours = [calls * TARGET * each / 3600 for each in STAT_S]
    told = f"{calls * TARGET / 1e6:,.0f} million; {hours[0]:.1f} to {hours[1]:.0f} hours one by one"
    rows.append(
        (
            "calls on structure files, all stages",
            told,
            f"calls an item; {STAT_S[0] * 1e3:g} to {STAT_S[1] * 1e3:g} ms each",
        )
    )
    cpu = sum(large[stage]["cpu_ms_per_item"] for stage in ("scan", "graph")) * TARGET / 3.6e6
    rows.append(("scan and graph", f"{cpu:,.0f} CPU hours", "CPU an item, of small complexes"))
    return rows_of(rows)


def _supervisor(sizes: dict[int, Any], stage: str) -> str:
    small, large = min(sizes), max(sizes)
    first, last = (sizes[size][stage]["peak_mb"]["supervisor"] for size in (small, large))
    each = (last - first) * 1e6 / (large - small)
    return f"{(first + each * TARGET / 1e6) / 1e3:.1f} GB ({each:.0f} bytes an item)"


def _visit(sizes: dict[int, Any], stage: str) -> str:
    return f"{sizes[max(sizes)][stage]['longest_visit_s'] * TARGET / max(sizes) / 3600:.1f} hours"


def _largest(by_size: Result) -> Result:
    found: Result = by_size[max(by_size, key=int)]
    return found


TABLES: dict[str, Callable[[Result], str]] = {
    one.__name__: one for one in (measured, growth, training, million, on_slurm, verbs, metadata, ten_million)
}


def filled(text: str, result: Result) -> str:
    """Return a page with its tables made anew."""
    return BLOCK.sub(lambda block: f"{block[1]}{TABLES[block[2]](result)}{block[3]}", text)


def main() -> int:
    """Write the page."""
    PAGE.write_text(filled(PAGE.read_text(), json.loads(RESULTS.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
