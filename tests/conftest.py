"""What every test may ask for."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command import Command

ROOT = Path(__file__).resolve().parent.parent
NOBODY = 65534
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup` has it ignored, in every process that a test starts, too
SHARED = ROOT.parent / "shared" / "structures"


@pytest.fixture(scope="session")
def shared_structures() -> Path:
    """Return the folder of real structures that stands beside the project."""
    if not SHARED.is_dir():
        pytest.skip("the real structures (../shared/structures) are not beside this checkout")
    return SHARED


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """Be nobody in particular for the time of a test, in a folder that anybody may write: root ignores permissions."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    if is_root := os.geteuid() == 0:
        os.seteuid(NOBODY)
    yield folder
    if is_root:
        os.seteuid(0)
    shutil.rmtree(folder)


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """Return a function that types `pipeline` commands in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PIPELINE_CONFIG", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    return Command(monkeypatch, capsys)
