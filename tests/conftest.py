"""What every test may ask for."""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from tests.testkit import changed, cost
from tests.testkit.caches import cached as cached
from tests.testkit.command import Command
from tests.testkit.once import shelf as shelf
from tests.testkit.project import project_of as project_of
from tests.testkit.project import tiny_project as tiny_project
from tests.testkit.trained import docking as docking
from tests.testkit.trained import trained as trained

pytest_plugins = ["pytester"]
ROOT = Path(__file__).resolve().parent.parent
NOBODY = 65534
CHILD_S = 600.0  # no child that a test starts is waited for longer, whoever forgot to say so
# `nohup` has the one ignored, a shell that starts things in the background the other; so would every process of a test.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
# Other work may share the machine: no property is judged by how long an example took.
# The gate tries the same examples every time; the night tries others.
UNHURRIED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("gate", derandomize=True, **UNHURRIED)
settings.register_profile("night", **UNHURRIED)
settings.load_profile(os.environ.get("PIPELINE_TEST_EXAMPLES", "gate"))

# Tests on the cluster wait more than they work: they begin first, in two shares, each with a cluster of its own.
WHOLE_RUNS = {"contract", "faults", "runs", "scripted", "shapes", "sweeps", "training"}
LONGEST = ("slurm", "pages", "tests/users/", "tests/recipes/", "tests/memory/")


class _Child(subprocess.Popen[Any]):
    """A child that ends when it was waited for too long by whoever did not say how long."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait within the caller's limit, or that of all tests."""
        return self._limited(super().wait, timeout)

    def communicate(self, input: Any = None, timeout: float | None = None) -> tuple[Any, Any]:  # noqa: A002 - Popen's word
        """Talk to it within the caller's limit, or that of all tests."""
        return self._limited(partial(super().communicate, input), timeout)

    def _limited(self, wait: Callable[..., Any], timeout: float | None) -> Any:
        try:
            return wait(timeout=CHILD_S if timeout is None else timeout)
        except subprocess.TimeoutExpired:
            if timeout is None:
                self.kill()
            raise


subprocess.Popen = _Child  # type: ignore[misc]


class Shares(LoadScopeScheduling):
    """Gives each process whole files, so that what a file makes once is made once."""

    def _split_scope(self, nodeid: str) -> str:
        """Return whom a test goes with."""
        return share_of(nodeid)


def share_of(nodeid: str) -> str:
    """Return the name of the share of a test: its file, a cluster, or what it uses together with other files."""
    file = nodeid.partition("::")[0]
    about = Path(file).stem.removeprefix("test_")
    if file.startswith("tests/slurm/") or file == "tests/cluster/test_contract.py":
        return "slurm, whole runs" if about in WHOLE_RUNS else "slurm"
    if file == "tests/card/test_on_card.py":
        return nodeid  # each is a process of its own
    return "pages, which share a demo" if file.startswith("tests/docs/") else file


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of `make test-changed`."""
    parser.addoption("--changed-since", metavar="COMMIT", help="only tests that what changed since COMMIT can reach")


def pytest_configure(config: pytest.Config) -> None:
    """Meter the tests."""
    config.pluginmanager.register(cost, "cost")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Shares:
    """Hand tests out as `share_of` says, in the order of their collection."""
    config.option.loadscopereorder = False
    return Shares(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with what takes longest as a whole; of a change, only what it can reach."""
    if base := config.getoption("changed_since"):
        changed.select(config, items, base)
    items.sort(key=lambda item: not share_of(item.nodeid).startswith(LONGEST))


@pytest.fixture(scope="session")
def structures() -> Path:
    """Return the folder of real structures: complexes, pairs and varied files."""
    folder = ROOT / "tests" / "reference" / "structures"
    assert folder.is_dir(), f"reference data is missing: {folder}"
    return folder


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """Be nobody in particular for the time of a test, in a folder that anybody may write: root ignores permissions."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    importlib.import_module("pydantic")  # of what it imports, much may lie where only root may read
    if is_root := os.geteuid() == 0:
        os.seteuid(NOBODY)
    yield folder
    if is_root:
        os.seteuid(0)
    shutil.rmtree(folder)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Have torch on one thread: some kernels take memory for each."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def quick() -> Iterator[None]:
    """One thread, for there is little to do; and every replay collects garbage, which torch itself is not."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """Return a function that types `pipeline` commands in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PIPELINE_CONFIG", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    return Command(monkeypatch, capsys)
