"""What no recipe can use, through the commands that a user types: named, counted, and never a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.recipes.conftest import Scanned
from tests.recipes.projects import RNA, SPECTRA, ran, write
from tests.testkit.command import Command
from tests.testkit.project import settle

pytestmark = pytest.mark.timeout(900)


def spectrum(name: str, *peaks: tuple[float, float]) -> str:
    """Return a spectrum of MGF."""
    lines = "".join(f"{mz} {height}\n" for mz, height in peaks)
    return f"BEGIN IONS\nTITLE={name}\nPEPMASS=500.0\nCHARGE=2+\nSPLIT=train\nTARGET=1.0\n{lines}END IONS\n\n"


def rejected_in(folder: Path) -> dict[str, str]:
    """Return why each item of the newest run was refused."""
    newest = max(folder.glob("runs/*/rejected.jsonl"))
    rows = [json.loads(line) for line in newest.read_text().splitlines()]
    return {row["id"]: row["detail"] for row in rows}


@pytest.mark.nightly
def test_spectra_that_cannot_be_used_are_rejected_by_name_and_the_run_goes_on(
    pipeline: Command, tmp_path: Path
) -> None:
    folder = write(SPECTRA, tmp_path)
    path = folder / "data" / "spectra.mgf"
    bad = [
        spectrum("empty"),
        spectrum("below", (-100.0, 5.0), (200.0, 6.0)),
        spectrum("crowd", *((100 + place / 10, 1.0) for place in range(10_000))),
    ]
    path.write_text("".join(bad) + path.read_text())  # the first three, which are what is looked at beforehand
    settle(folder / "data")
    checked = pipeline("config", "check", *SPECTRA.sets())
    assert checked.code == 0, checked.err
    few = ran(pipeline, SPECTRA.sets(), stage="scan")
    assert few.code == 3
    count = path.read_text().count("BEGIN IONS")
    assert f"3 of {count} items cannot be used, more than data.max_rejected_fraction" in few.err
    done = ran(pipeline, SPECTRA.sets("data.max_rejected_fraction=0.2"), stage="scan")
    assert done.code == 0, done.err
    found = rejected_in(folder)
    assert found.keys() == {"empty", "below", "crowd"}
    assert "peak" in found["empty"]
    assert "-100" in found["below"]
    assert "10,000" in found["crowd"]


def test_a_data_set_of_which_nothing_can_be_used_is_told_so(pipeline: Command, tmp_path: Path) -> None:
    folder = write(SPECTRA, tmp_path)
    (folder / "data" / "spectra.mgf").write_text(spectrum("empty"))
    checked = pipeline("config", "check", *SPECTRA.sets())
    assert checked.code == 3
    assert "none of the first 1 items can be used" in checked.err
    assert "train.task" not in checked.err  # which is not to blame


@pytest.mark.parametrize("command", ["check", "submit"])
def test_irreps_that_do_not_parse_are_refused_by_their_key(pipeline: Command, scanned: Scanned, command: str) -> None:
    scanned(RNA)
    words = RNA.sets("train.options.hidden_irreps=32x0e+banana")
    refused = pipeline("config", "check", *words) if command == "check" else ran(pipeline, words, "train")
    assert refused.code == 2
    assert "train.options.hidden_irreps" in refused.err
    assert "banana" in refused.err
    assert "Traceback" not in refused.err
