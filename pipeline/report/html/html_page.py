"""The whole page: one file that needs nothing else, and that a browser lets do nothing else."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.report.html import memory_section, stage_section, training_section, trouble_section
from pipeline.report.html.html_text import Html, badge, error_box, figure, hours, joined, moment, note, section, tag
from pipeline.report.stage_lines import DAMAGED, UNIT, found_damage
from pipeline.report.tables import duration, plural, size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HERE = Path(__file__).parent


def page(facts: Mapping[str, Any]) -> str:
    """Return the page of a run."""
    parts = [
        ("overview", "Overview", overview(facts)),
        ("stages", "Stages", stage_section.stages(facts)),
        ("events", "Failures", trouble_section.troubles(facts)),
        ("throughput", "Throughput", stage_section.throughput(facts)),
        ("memory", "Memory", memory_section.memory(facts)),
        ("training", "Training", training_section.training(facts["training"])),
        ("rejections", "Rejections", trouble_section.rejections(facts)),
        ("cache", "Cache", trouble_section.cache(facts)),
        ("efficiency", "Efficiency", memory_section.efficiency(facts)),
    ]
    shown = [(key, title) for key, title, part in parts if part]
    body = tag(
        "body", header(facts), contents(shown), tag("main", *(part for _, _, part in parts)),
        tag("footer", "Times are UTC. Every table sorts by a click on a column's name."),
        tag("script", _file("page.js")),
    )  # fmt: skip
    return f'<!DOCTYPE html>\n<html lang="en">{_head(facts)}{body}</html>\n'


def _head(facts: Mapping[str, Any]) -> Html:
    """Return the head; nothing but this page's own style and script is allowed by it."""
    policy = (
        f"default-src 'none'; style-src '{_digest('page.css')}'; script-src '{_digest('page.js')}';"
        " base-uri 'none'; form-action 'none'"
    )
    return tag(
        "head", Html('<meta charset="utf-8">'), _meta("Content-Security-Policy", policy),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html('<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">'),
        tag("title", f"{facts['run']['name']}: {state_of(facts)}"), tag("style", _file("page.css")),
    )  # fmt: skip


def _meta(name: str, content: str) -> Html:
    from html import escape

    return Html(f'<meta http-equiv="{name}" content="{escape(content, quote=True)}">')


@cache
def _file(name: str) -> Html:
    """Return a file of ours as it is: neither of them holds what would end its element."""
    return Html((HERE / name).read_text(encoding="utf-8"))


@cache
def _digest(name: str) -> str:
    digest = hashlib.sha256(_file(name).encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


CLOCK = "%Y-%m-%d %H:%M:%S UTC"


def header(facts: Mapping[str, Any]) -> Html:
    """Return the name of the run, its state, and when the page was made."""
    run = facts["run"]
    made = tag("time", moment(run["made_at"], CLOCK), class_="made", data_at=f"{run['made_at']:.0f}")
    return tag(
        "header",
        tag("p", "pipeline report", class_="eyebrow"),
        tag("h1", tag("span", run["name"]), " ", badge(state_of(facts))),
        tag("p", "as of ", made, tag("span", class_="age"), class_="asof"),
        *_banners(facts),
    )


def state_of(facts: Mapping[str, Any]) -> str:
    """Return where the run stands, in a word or three."""
    damaged = any(found_damage(stage) for stage in facts["stages"])
    return DAMAGED if damaged else str(facts["run"]["state"])


def _banners(facts: Mapping[str, Any]) -> list[Html]:
    """Say what somebody should do something about."""
    run = facts["run"]
    name, shown = run["name"], []
    if run["goes_on"]:
        watch = tag("code", f"pipeline status {name} --watch")
        said = "It had not begun" if run["state"] == "waiting" else "This run goes on"
        shown.append(note(said, ": the page shows it as it was at the time above. Reload it for news, or ", watch))
    if run["state"] == "abandoned":
        again = tag("code", f"pipeline resume {name}")
        shown.append(note("Nobody looks after this run any more; finished work is kept. Next: ", again, kind="bad"))
    if run["state"] == "stopped":
        shown.append(note("It was stopped; finished work is kept. Go on: ", tag("code", run["again"]), kind="warn"))
    if run["error"]:
        shown.append(error_box(run["error"]))
    shown += [note("looked after by: ", run["supervisor"])] if run["supervisor"] else []
    shown += [note("the queue could not be asked: ", run["trouble"], kind="warn")] if run["trouble"] else []
    shown += [note("not on this page: ", one, kind="warn") for one in facts["notes"]]
    return shown


def overview(facts: Mapping[str, Any]) -> Html:
    """Return the figures that matter most."""
    tiles = [one for one in (_took(facts), _stages(facts), *_items(facts), _attempts(facts), *_used(facts)) if one]
    tiles += _best(facts["training"])
    again = facts["run"]["again"]
    typed = tag("p", "Typed: ", tag("code", again), class_="typed") if again else ""
    place = tag("p", "Folder: ", tag("code", facts["run"]["folder"]), class_="typed")
    return section("overview", "Overview", tag("dl", *tiles, class_="tiles"), typed, place)


def _tile(name: str, value: str, more: str = "", kind: str = "") -> Html:
    return tag("div", tag("dt", name), tag("dd", tag("b", value), tag("small", more)), class_=f"tile {kind}".strip())


def _took(facts: Mapping[str, Any]) -> Html:
    run, span = facts["run"], facts["time"]
    name = "Took" if run["ended_at"] else "So far"
    begun = moment(span["from"], "began %Y-%m-%d %H:%M UTC")
    return _tile(name, duration(span["to"] - span["from"]), begun)


def _stages(facts: Mapping[str, Any]) -> Html:
    planned = list(dict.fromkeys([*facts["run"]["planned"], *(stage["name"] for stage in facts["stages"])]))
    done = sum(stage["state"] == "done" for stage in facts["stages"])
    begun = {stage["name"] for stage in facts["stages"]}
    later = [name for name in planned if name not in begun]
    more = f"not begun: {', '.join(later)}" if later else ", ".join(planned)
    return _tile("Stages done", f"{done} of {len(planned)}", more, "bad" if facts["run"]["state"] == "failed" else "")


def _items(facts: Mapping[str, Any]) -> list[Html]:
    """Say how many items the newest stage that judged a data set could use."""
    judged = [stage["census"] for stage in facts["stages"] if stage["name"] in ("scan", "embed", "graph")]
    census = next((one for one in reversed(judged) if one), None)
    if census is None:
        return []
    rejected = census["items"] - census["accepted"]
    more = f"{rejected:,} rejected ({census['rejected_fraction']:.1%})"
    more += f", {census['undone']:,} not done" if census["undone"] else ""
    return [_tile("Items accepted", f"{census['accepted']:,}", more, "warn" if rejected else "")]


def _attempts(facts: Mapping[str, Any]) -> Html:
    troubles = facts["troubles"]
    total = sum(stage["attempts"] for stage in facts["stages"])
    failed = troubles["total"]
    kind = "bad" if troubles["open"] else "warn" if failed else ""
    more = "all of them ended well" if total and not failed else ""
    if failed:
        memory = sum(one["times"] for one in troubles["causes"] if one["cause"] in ("host_oom", "gpu_oom"))
        more = f"{failed:,} did not end well" + (f", {memory:,} for memory" if memory else "")
    return _tile("Attempts at tasks", f"{total:,}", more or "none has ended", kind)


def _used(facts: Mapping[str, Any]) -> list[Html]:
    """Say what the run used of cores and memory."""
    stages: Sequence[Mapping[str, Any]] = facts["efficiency"]
    if not stages:
        return []
    tiles = [_tile("Core hours", hours(sum(one["core_hours"] for one in stages)), _busiest(stages))]
    peak = max(stages, key=lambda one: one["peak_bytes"] or 0)
    if peak["peak_bytes"]:
        more = f"{peak['stage']}, of {size(peak['asked_bytes'])} asked for" if peak["asked_bytes"] else peak["stage"]
        tiles.append(_tile("Highest memory of a task", size(peak["peak_bytes"]), more))
    gpu = max(stages, key=lambda one: one["gpu_peak_bytes"] or 0)
    if gpu["gpu_peak_bytes"]:
        tiles.append(_tile("Highest memory of a GPU", size(gpu["gpu_peak_bytes"]), gpu["stage"]))
    return tiles


def _busiest(stages: Sequence[Mapping[str, Any]]) -> str:
    most = max(stages, key=lambda one: one["core_hours"])
    done = plural(most["items"], UNIT[most["stage"]])  # of tasks that have ended well, of which there may be none
    return f"most for {most['stage']}" + (f": {done}" if most["items"] else "")


def _best(training: Mapping[str, Any] | None) -> list[Html]:
    """Say how far a training is and what its best epoch came to."""
    if not training or not training["rows"]:
        return []
    name, lower = training["monitor"], training["lower_is_better"]
    tiles = [
        _tile("Epochs", f"{training['rows'][-1]['epoch']:,} of {training['planned']['epochs']:,}", "trained so far")
    ]
    known = [one for one in training["epochs"] if one["validation"].get(name) is not None]
    if known:
        best = (min if lower else max)(known, key=lambda one: one["validation"][name])
        tiles.append(_tile(f"Best {name}", figure(best["validation"][name]), f"epoch {best['epoch']:,}"))
    return tiles


def contents(keys: Sequence[tuple[str, str]]) -> Html:
    """Return links to the parts of the page."""
    return tag("nav", joined(tag("a", title, href=f"#{key}") for key, title in keys), aria_label="parts of this page")
