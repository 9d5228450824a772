"""Naming the chains of one side alone is a mistake in the configuration: every verb says so, with the line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.testkit.command import Command
    from tests.testkit.project import MakeProject

VERBS = ("config check", "plan --stage scan", "submit --stage scan --dry-run", "submit --stage scan --follow")


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("side", ["receptor", "ligand"])
def test_chains_of_one_side_alone_are_refused_with_their_line(
    make_project: MakeProject, pipeline: Command, monkeypatch: pytest.MonkeyPatch, verb: str, side: str
) -> None:
    monkeypatch.chdir(make_project(1, **{f"data__{side}_chains": ["A"]}))
    refused = pipeline(*verb.split())
    other = "ligand" if side == "receptor" else "receptor"
    assert refused.code == 2
    assert (
        f"pipeline.yaml:5: data.{side}_chains: names one side of a complex; name data.{other}_chains, too"
        in refused.err
    )


def test_doctor_says_so_in_a_row(make_project: MakeProject, pipeline: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(make_project(1, data__receptor_chains=["A"]))
    told = pipeline("doctor")
    assert (told.code, "names one side of a complex" in " ".join(told.out.split())) == (2, True)


@pytest.mark.parametrize("other", [{"data__partners": "none"}, {"data__ligand_chains": ["B"]}])
def test_chains_of_files_that_are_not_divided_and_of_both_sides_are_taken(
    make_project: MakeProject, pipeline: Command, monkeypatch: pytest.MonkeyPatch, other: dict[str, object]
) -> None:
    monkeypatch.chdir(make_project(1, data__receptor_chains=["A"], **other))
    assert pipeline("config", "check").code == 0


def test_a_table_may_name_the_other_side(
    tmp_path: Path, make_project: MakeProject, pipeline: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(make_project(1))
    Path("table.csv").write_text("id,path,ligand_chains\nc0,data/c0.pdb,B\n")
    assert (
        pipeline(
            "config",
            "check",
            "--set",
            "data.source=manifest",
            "--set",
            "data.path=table.csv",
            "--set",
            "data.receptor_chains=[A]",
        ).code
        == 0
    )
