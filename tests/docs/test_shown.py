"""What a page shows is compared with what is printed, but for what differs each time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import Page
from tests.docs.reader import Reader
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


def test_a_reader_writes_files_types_commands_and_compares(tmp_path: Path) -> None:
    text = (
        "<!-- file: sub/a.txt -->\n```text\none\ntwo\n```\n"
        "<!-- run -->\n```console\n$ cat sub/a.txt    # both\n```\n<!-- output -->\n```text\none\n…\n```\n"
        "<!-- fails: 3 -->\n```console\n$ exit 3\n```\n<!-- run -->\n```python\nopen('made', 'w')\n```\n"
        "<!-- settings -->\n```yaml\ntrain: {epochs: 3}\n```\n<!-- not run: never -->\n```console\n$ touch never\n```\n"
    )
    reader = Reader(tmp_path)
    reader.follow(page(tmp_path, text))
    assert (reader.typed, (tmp_path / "made").exists(), (tmp_path / "never").exists()) == (3, True, False)
    for wrong in (
        "<!-- run -->\n```console\n$ false\n```\n",
        "<!-- fails: 2 -->\n```console\n$ true\n```\n",
        "<!-- run -->\n```console\n$ echo one\n```\n<!-- output -->\n```text\ntwo\n```\n",
        "<!-- settings -->\n```yaml\ntrain: {epoch: 3}\n```\n",
    ):
        with pytest.raises((AssertionError, Exception), match=r"ended with|shows what|epoch"):
            Reader(tmp_path).follow(page(tmp_path, wrong))
