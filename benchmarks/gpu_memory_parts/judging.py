"""What the rows of each part come to, in figures and in lines."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_memory_parts.predicting import MICROS
from benchmarks.gpu_memory_parts.processes import Bench
from pipeline.memory.footprint import REPEATED, margin_of
from pipeline.memory.history.step_history import Peak, PeakHistory, sizes_text, torch_version

FIRST, PROFILED = 0.08, 0.02  # to reach
MIB = 1 << 20


def judge_compare(bench: Bench, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Correct each model's predictions by its largest size, recorded as a profile; return the figures in short."""
    measured = [row for row in rows if "measured_bytes" in row and not row["died"]]
    with tempfile.TemporaryDirectory() as folder:
        peaks = PeakHistory(Path(folder))
        for key in dict.fromkeys((row["member"], row["precision"]) for row in measured):
            group = [row for row in measured if (row["member"], row["precision"]) == key]
            _corrected(bench, peaks, group)
    surest = [row for row in measured if row["origin"] == "traced"]
    profiled = [row for row in measured if "profiled" in row]
    return {
        "reach": f"total within {FIRST:.0%} at first contact, {PROFILED:.0%} after one profile",
        "cases": len(rows),
        "measured": len(measured),
        "died": [_name(row) for row in rows if row.get("died")],
        "failed": [[_name(row), row["error"]] for row in rows if "error" in row and not row.get("died")],
        "worst_first": max((abs(row["first"]) for row in surest), default=None),
        "most_below_first": min((row["first"] for row in surest), default=None),
        "missed_first": [[_name(row), row["first"]] for row in surest if abs(row["first"]) > FIRST],
        "not_traced": [[_name(row), row["origin"], row["first"]] for row in measured if row["origin"] != "traced"],
        "worst_profiled": max((abs(row["profiled"]) for row in profiled), default=None),
        "missed_profiled": [[_name(row), row["profiled"]] for row in profiled if abs(row["profiled"]) > PROFILED],
    }


def _corrected(bench: Bench, peaks: PeakHistory, group: Sequence[dict[str, Any]]) -> None:
    profile = max(group, key=lambda row: row["measured_bytes"])
    for row in group:
        row["is_profile"] = row is profile
    asked_bytes = profile["reserve_bytes"] + profile["workspace_bytes"]  # what `max_memory_reserved` is of
    peak = Peak(
        model=profile["model"],
        card=profile["card"],
        gpu=bench.gpu,
        torch=torch_version(),
        driver=bench.driver,
        allocator=profile["allocator"],
        sizes=f"{MICROS} x {sizes_text(profile['sizes'])}",
        predicted_bytes=asked_bytes,
        measured_bytes=profile["reserved_bytes"],
        died=False,
        outside_bytes=profile["outside_bytes"],
        predicted_s=0.0,
        step_s=profile["step_s"],
        at=time.time(),
    )
    peaks.record("benchmark", f"{profile['member']}-{profile['precision']}", [peak])
    ratios = peaks.ratios(profile["model"], bench.gpu)
    factor = margin_of(_origin(profile), ratios).factor / (1 + REPEATED)  # as plans are corrected, without their margin
    for row in group:
        if row is not profile:
            corrected = factor * (row["reserve_bytes"] + row["workspace_bytes"]) + profile["outside_bytes"]
            row["profiled"] = round(corrected / row["measured_bytes"] - 1, 4)


def _origin(row: Mapping[str, Any]) -> Any:
    from pipeline.memory.footprint import Provenance

    return Provenance(row["origin"])


def _name(row: Mapping[str, Any]) -> str:
    return " ".join(str(row[key]) for key in ("member", "precision", "card") if row.get(key))


def judge_plan(_: Bench, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of the trained epochs in short."""
    done = [row for row in rows if "used" in row]
    return {
        "reach": "no OOM",
        "cases": len(rows),
        "trained": len(done),
        "ooms": sum(row["ooms"] for row in done),
        "with_ooms": [_name(row) for row in done if row["ooms"]],
        "with_retries": [[_name(row), row["retries"]] for row in done if row["retries"]],
        "not_whole": [_name(row) for row in done if row["steps"] < row["steps_planned"]],
        "used_least": min((row["used"] for row in done), default=None),
        "used_median": float(np.median([row["used"] for row in done])) if done else None,
        "failed": [[_name(row), row["error"]] for row in rows if "error" in row],
    }


def judge_history(_: Bench, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return in short how our simulator did on what was recorded."""
    done = [row for row in rows if "events" in row]
    ratio = [row["simulated_reserved_bytes"] / max(1, row["history_reserved_bytes"]) - 1 for row in done]
    return {
        "files": [row["file"] for row in done],
        "worst": max(map(abs, ratio), default=None),
        "equal_throughout": sum(row["differs_from_event"] < 0 for row in done),
        "failed": [[row["file"], row["error"]] for row in rows if "error" in row],
    }


def told_of(row: Mapping[str, Any]) -> str:
    """Return a row as a line."""
    name = f"{row['part']:8}{row['member']:25}{row.get('precision', ''):6}{row.get('card', ''):7}"
    if "error" in row:
        return f"{name}{row['error']}"
    if row["part"] == "compare":
        sizes = f"predicted {row['predicted_bytes'] / MIB:9,.0f}  measured {row['measured_bytes'] / MIB:9,.0f} MiB"
        return f"{name}{sizes}  {row['first']:+7.2%}  live {row['live']:+7.2%}  {row['origin']}, {row['wall_s']} s"
    if row["part"] == "plan":
        done = f"{row['steps']}/{row['steps_planned']} steps, {row['micros']} micro-batches"
        used = f"used {row['used']:6.1%} (predicted {row['predicted_used']:6.1%})"
        return f"{name}{row['ooms']} OOMs  {used}  {row['retries']} retries  {done}, {row['wall_s']} s; {row['filled']}"
    both = (
        f"{row['history_reserved_bytes'] / MIB:,.0f} reserved, {row['simulated_reserved_bytes'] / MIB:,.0f} simulated"
    )
    return f"{name}{row['file']}: {row['kept_events']:,} of {row['events']:,} events; MiB: {both}"


def profiled_table(rows: Iterable[Mapping[str, Any]]) -> None:
    """Print what one profile makes of the other sizes."""
    print(f"\n{'member':25}{'precision':10}{'card':7}{'first':>9}{'profiled':>10}")
    for row in rows:
        if "first" in row:
            after = f"{row['profiled']:+.2%}" if "profiled" in row else "profile" if row.get("is_profile") else ""
            print(f"{row['member']:25}{row['precision']:10}{row['card']:7}{row['first']:>+9.2%}{after:>10}")
