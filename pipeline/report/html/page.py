"""The whole page: one file that needs nothing else, and that a browser lets do nothing else."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.report.html import memory, overview, stages, training, troubles
from pipeline.report.html.text import Html, tag

if TYPE_CHECKING:
    from collections.abc import Mapping

HERE = Path(__file__).parent


def page(facts: Mapping[str, Any]) -> str:
    """Return the page of a run."""
    parts = [
        ("overview", "Overview", overview.overview(facts)),
        ("stages", "Stages", stages.stages(facts)),
        ("events", "Failures", troubles.troubles(facts)),
        ("throughput", "Throughput", stages.throughput(facts)),
        ("memory", "Memory", memory.memory(facts)),
        ("training", "Training", training.training(facts["training"])),
        ("rejections", "Rejections", troubles.rejections(facts)),
        ("cache", "Cache", troubles.cache(facts)),
        ("efficiency", "Efficiency", memory.efficiency(facts)),
    ]
    shown = [(key, title) for key, title, part in parts if part]
    body = tag(
        "body", overview.header(facts), overview.contents(shown), tag("main", *(part for _, _, part in parts)),
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
        tag("title", f"{facts['run']['name']}: {overview.state_of(facts)}"), tag("style", _file("page.css")),
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
