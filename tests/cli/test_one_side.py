"""Naming the chains of one side alone is a mistake in the configuration: every verb says so, with the line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.testkit.command import Command
from tests.testkit.project import make_project

TABLE: dict[str, Any] = {"data__source": "manifest", "data__path": "table.csv"}


@pytest.mark.parametrize("side", ["receptor", "ligand"])
def test_chains_of_one_side_alone_are_refused_with_their_line(pipeline: Command, side: str) -> None:
    make_project(Path.cwd(), 1, **{f"data__{side}_chains": ["A"]})
    for verb in ("config check", "plan scan", "submit scan --dry-run", "submit scan --follow"):
        refused = pipeline(*verb.split())
        assert (refused.code, f"pipeline.yaml:4: data.{side}_chains: " in refused.err) == (2, True), (verb, refused.err)
    assert pipeline("doctor").code == 2


@pytest.mark.parametrize("more", [{"data__partners": "none"}, {"data__ligand_chains": ["B"]}, TABLE])
def test_chains_are_taken_of_undivided_files_of_both_sides_or_where_a_table_may_name_the_others(
    pipeline: Command, more: dict[str, Any]
) -> None:
    make_project(Path.cwd(), 1, data__receptor_chains=["A"], **more)
    Path("table.csv").write_text("id,path,ligand_chains\nc0,data/c0.pdb,B\n")
    assert pipeline("config", "check").code == 0
