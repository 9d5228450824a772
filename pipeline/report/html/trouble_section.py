"""What went wrong and what was done about it: attempts, memory that ended, items that were left out, the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.report.html.html_text import (  # fmt: skip
    UNKNOWN,
    Cell,
    Html,
    at_cell,
    badge,
    bytes_cell,
    code_cell,
    count,
    left_out,
    moment,
    note,
    percent_cell,
    section,
    table,
    tag,
    time_cell,
)
from pipeline.report.tables import plural, size

if TYPE_CHECKING:
    from collections.abc import Mapping

ATTEMPTS = (
    "stage",
    "task",
    "attempt",
    "cause",
    "what happened",
    "then",
    "task now",
    "log",
    "memory",
    "peak",
    "after",
    "node",
    "ended",
)


def troubles(facts: Mapping[str, Any]) -> Html:
    """Return what did not end well."""
    told, training = facts["troubles"], facts["training"]
    parts = [
        _attempts(told, facts["run"]["name"]),
        *_left_out(told),
        *_survived(training),
        *_bundles(training, facts["run"]["name"]),
    ]
    shown = [part for part in parts if part]
    so_far = "nothing so far" if facts["run"]["goes_on"] else "nothing"
    quiet = note(f"{so_far}: every attempt that has ended, ended well, and no step ran out of memory", kind="good")
    return section("events", "Failures, out-of-memory and retries", *(shown or [quiet]))


def _attempts(told: Mapping[str, Any], run: str) -> Html:
    """Return the attempts that did not end well, each with its cause and its log."""
    if not told["total"]:
        return Html("")
    often = [[one["stage"], _badged(one["cause"], "cause"), count(one["times"])] for one in told["causes"]]
    said = (
        f"{plural(told['total'], 'attempt')} did not end well; {told['survived']:,} of them of tasks that are done now"
    )
    said += f"; {plural(told['open'], 'task')} failed for good or wait for a decision" if told["open"] else ""
    logs = tag("code", f"pipeline logs {run} --failed")
    return tag(
        "div", note(said, ". Their logs: ", logs, kind="bad" if told["open"] else "warn"),
        table(("stage", "cause", "attempts"), often, caption="how often"),
        table(ATTEMPTS, map(_attempt, told["attempts"]), caption="attempts that did not end well"),
        left_out(told["more"], "attempts"),
    )  # fmt: skip


def _attempt(one: Mapping[str, Any]) -> list[Any]:
    said = one["reason"] + (f"\nit said: {one['said']}" if one["said"] else "")
    said += f"\nit was on {', '.join(one['on'])}" if one["on"] else ""
    now = {"done": "done", "running again": "running", "not done": "failed"}[one["now"]]
    return [
        one["stage"], count(one["task"]), count(one["attempt"]),
        _badged(one["cause"], "cause"), _long(said), _long(one["then"]),
        _badged(one["now"], now), _path(one["log"]), bytes_cell(one["asked_bytes"] or None),
        bytes_cell(one["gpu_peak_bytes"] if one["cause"] == "gpu_oom" else one["peak_bytes"]),
        time_cell(one["elapsed_s"]),
        one["node"], at_cell(one["ended_at"]),
    ]  # fmt: skip


def _badged(word: str, kind: str) -> Cell:
    return Cell(badge(word, kind), word, is_number=False)


def _long(said: str) -> Cell:
    return Cell(tag("div", said or UNKNOWN, class_="long"), said, is_number=False)


def _path(path: str) -> Cell:
    return Cell(tag("div", tag("code", path), class_="long") if path else UNKNOWN, path, is_number=False)


def _left_out(told: Mapping[str, Any]) -> list[Html]:
    """Return what runs go on without since it killed its task."""
    rows = [
        [one["stage"], ", ".join(one["names"]) + (f" and {one['more']:,} more" if one["more"] else ""), one["why"]]
        for one in told["left_out"]
    ]
    return [table(("stage", "left out", "why"), rows, caption="left out since a task died of it")] if rows else []


def _survived(training: Mapping[str, Any] | None) -> list[Html]:
    """Return the epochs in which steps ran out of memory and went on with smaller micro-batches."""
    rows = [
        [
            count(one["epoch"]), count(one["ooms"]),
            ", ".join(f"{items:,} by {rung}" for rung, items in one["remedied"].items()),
            count(one["rejected"]), bytes_cell(one["peak_bytes"]),
        ]
        for one in (training["rows"] if training else ())
        if one["ooms"] or one["remedied"]
    ]  # fmt: skip
    columns = ("epoch", "out of memory", "items by what helped", "rejected items", "peak")
    return [table(columns, rows, caption="steps that ran out of memory, and went on")] if rows else []


def _bundles(training: Mapping[str, Any] | None, run: str) -> list[Html]:
    """Return the steps that can be run again."""
    told: Mapping[str, Any] = training["bundles"] if training else {"rows": [], "more": 0}
    rows = [
        [count(one["step"]), _badged(one["kind"], "cause"), count(one["rank"]),
         code_cell(f"pipeline replay {run} --step {one['step']}")]
        for one in told["rows"]
    ]  # fmt: skip
    shown = table(("step", "what", "rank", "to run it again"), rows, caption="recorded steps of this model")
    return [shown, left_out(told["more"], "recorded steps")] if rows else []


def rejections(facts: Mapping[str, Any]) -> Html:
    """Return why items were left out."""
    told = facts["rejections"]
    if not told or not (told["rows"] or told["items"]):
        return section("rejections", "Rejections", note("none: no item was left out so far", kind="good"))
    rows = [
        [one["reason"] + (" (so far)" if one["so_far"] else ""), one["stage"], count(one["items"]), one["example"]]
        for one in told["rows"]
    ]
    parts = [table(("reason", "stage", "items", "for example"), rows, caption="by reason")] if rows else []
    return section("rejections", "Rejections", *parts, *_items(told))


def _items(told: Mapping[str, Any]) -> list[Html]:
    names = ("id", "reason", "detail", "split", "origin")
    if not told["items"]:
        return []
    shown = table(names, [[one[name] for name in names] for one in told["items"]], caption="items that were left out")
    return [shown, left_out(told["more"], "items", told["file"])]


def cache(facts: Mapping[str, Any]) -> Html:
    """Return what the cache holds and what this run found in it."""
    told = facts["cache"]
    reused = [
        [stage["name"], count(stage["items"]), count(stage["cached"]), count(stage["missing"]), _share(stage)]
        for stage in facts["stages"]
        if stage["name"] in ("scan", "embed", "graph")
    ]
    found = ("stage", "items", "cached", "to do", "share cached")
    parts = [table(found, reused, caption="found by this run")] if reused else []
    if not told or not told["is_there"]:
        return section("cache", "Cache", *parts, note("no cache is there"))
    rows = [
        [
            one["kind"], count(one["records"]), bytes_cell(one["bytes"]),
            bytes_cell(one["bytes"] / max(1, one["records"])),
            count(one["shards"]), count(len(one["unreadable"])), one["index"], at_cell(one["newest"] or None),
        ]
        for one in told["kinds"]
        if isinstance(one, dict)
    ]  # fmt: skip
    columns = ("kind", "records", "size", "each", "files", "unreadable", "index", "newest")
    total = sum(one["bytes"] for one in told["kinds"] if isinstance(one, dict))
    lead = f"{told['root']}: {size(total)} when this page was made."
    return section("cache", "Cache", *parts, table(columns, rows, caption="what it holds"), *_found(told), lead=lead)


def _share(stage: Mapping[str, Any]) -> Cell:
    both = stage["cached"] + stage["missing"]
    return percent_cell(stage["cached"] / both if both else None)


def _found(told: Mapping[str, Any]) -> list[Html]:
    """Return what is missing, what the last validation found, and what was put aside."""
    missing = [
        [one["kind"], count(one["needed"]), count(one["missing"]), at_cell(one["at"])] for one in told["missing"]
    ]
    parts = (
        [table(("kind", "needed", "missing", "looked at"), missing, caption="what the data set needs")]
        if missing
        else []
    )
    last = told["last_validation"]
    if last:
        found = (
            f"{plural(last['findings'], 'finding')}, {plural(last['lost'], 'record')} lost"
            if last["findings"]
            else "all well"
        )
        then = [" Next: ", tag("code", last["remedy"])] if last["remedy"] else []
        said = f"Last validated {moment(last['begun'])} UTC ({last['how']}): {found}."
        parts.append(note(said, *then, kind="bad" if last["findings"] else "good"))
    aside = told["quarantine"]
    if aside["files"]:
        parts.append(
            note(f"Quarantine: {plural(aside['files'], 'damaged file')}, {size(aside['bytes'])}.", kind="warn")
        )
    return parts
