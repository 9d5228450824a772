"""Runs that version 0.1 made are shown, reported and resumed by this one.

`runs_of_0_1.tar.xz` is a project as it lay on a disk: a run that ended (scan to evaluate, 25 items), and one of whose
training every process was killed after 3 of 16 steps; with the code that both froze. `@PROJECT@` stands for its folder.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from tests.testkit.command import Command

ARCHIVE = Path(__file__).with_name("runs_of_0_1.tar.xz")
ENDED, KILLED = "20261123-121824-4c67-evaluate", "20261123-124532-b11f-train"
STEPS, WITHIN_S = 16, 240


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pipeline: Command) -> Path:
    """Return the old project, as if this machine had made it and every process of it were gone."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    project = tmp_path / "project"
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(60)
    for path in (*project.glob("runs/2*/**/*"), *project.glob("cache/_users/*.json")):
        if (path.is_file() and b"@PROJECT@" in (content := path.read_bytes())) or path.suffix == ".jsonl":
            times = path.stat()
            content = path.read_bytes().replace(b"@PROJECT@", bytes(project))
            path.write_bytes(_of_this_machine(content, gone.pid) if path.parent.name == "events" else content)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    monkeypatch.chdir(project)
    return project


def _of_this_machine(events: bytes, pid: int) -> bytes:
    """Let the events of a run be of processes that were here."""
    lines = [json.loads(line) for line in events.splitlines()]
    for event in lines:
        event |= {"host": socket.gethostname()} if "host" in event else {}
        event |= {"pid": pid} if "pid" in event else {}
    return b"".join(json.dumps(event).encode() + b"\n" for event in lines)


@pytest.mark.parametrize("run", [ENDED, KILLED])
def test_an_old_run_is_shown_and_reported(run: str, old: Path, pipeline: Command) -> None:
    shown = pipeline("status", run)
    assert (shown.code, shown.err) == (0, "")
    assert ("train: done" if run == ENDED else "train: abandoned") in shown.out
    document = json.loads(pipeline("status", run, "--json").out)
    assert {stage["name"] for stage in document["stages"]} >= {"scan", "embed", "graph", "train"}
    assert pipeline("logs", run).code == 0
    report = pipeline("report", run, "--html", "page.html")
    assert (report.code, report.err) == (0, "")
    page = (old / "page.html").read_text()
    assert run in page
    assert "contact_auroc" in page


@pytest.mark.nightly
def test_an_old_run_whose_processes_were_killed_is_resumed_to_its_end(old: Path, pipeline: Command) -> None:
    resumed = pipeline("resume", KILLED)
    assert resumed.code == 0, resumed.err
    try:
        until = time.monotonic() + WITHIN_S
        while "train: done" not in (shown := pipeline("status", KILLED).out):
            assert "train: failed" not in shown, shown
            assert time.monotonic() < until, shown
            time.sleep(0.5)
    finally:
        pipeline("cancel", KILLED, "--yes")  # nothing outlives the test, whatever became of it
    assert f"{STEPS} of {STEPS} done" in shown
    (model,) = old.glob("models/*")
    epochs = [json.loads(line) for line in (model / "epochs.jsonl").read_text().splitlines()]
    assert [epoch["epoch"] for epoch in epochs] == list(range(1, STEPS + 1))


def test_nothing_that_goes_on_with_an_old_run_asks_for_the_name_that_was_installed_then() -> None:
    asks = re.compile(rb"\b(?:version|requires|distribution)\(.pipeline.\)")
    with tarfile.open(ARCHIVE) as archive:
        files = [(member.name, archive.extractfile(member)) for member in archive if member.name.endswith(".py")]
        asking = {name.partition("/pipeline/")[2] for name, file in files if file and asks.search(file.read())}
    assert len(files) > 100
    assert asking == {"runs/checkup.py"}, "`pipeline doctor`, which no run executes"
