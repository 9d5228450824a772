"""What a page shows is compared with what is printed, but for what differs each time."""

from __future__ import annotations

from pathlib import Path

from tests.docs.blocks import Page
from tests.docs.shown import is_shown

PRINTED = "run 20260101-abcd: done\n\nscan: done in 1.3 s: 25 items\nnothing else\nthe end   \n"


def test_times_and_names_of_runs_may_differ_and_lines_be_left_out_and_nothing_else() -> None:
    for shown in (
        PRINTED,
        "scan: done in 4 min: 25 items\n",
        "run 20271231-0000: done\n…\nthe end\n",
        "…\nthe end\n",
    ):
        assert is_shown(shown, PRINTED), shown
    for shown in ("scan: done in 1.3 s: 26 items\n", "scan: done\n", "the end\n…\nnothing else\n"):
        assert not is_shown(shown, PRINTED), shown


def page(folder: Path, text: str) -> Page:
    (folder / "page.md").write_text(text)
    return Page(folder / "page.md")


def test_a_block_that_nobody_would_run_is_a_problem(tmp_path: Path) -> None:
    for text in (
        "```console\n$ ls\n```\n",
        "* a list\n  ```yaml\n  a: 1\n  ```\n",
        "<!-- not run -->\n```python\n1\n```\n",
        "<!-- runs -->\n```console\n$ ls\n```\n",
        "<!-- run -->\n```console\n$ ls\npage.md\n```\n",
    ):
        assert len(page(tmp_path, text).problems()) == 1, text
