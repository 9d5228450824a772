"""The real cluster that the tests of this folder run on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.testkit.cluster import Cluster, why_not
from tests.testkit.cluster.cluster import DEFAULT_FOLDER
from tests.testkit.slurm_runs import Project, make_project


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """Return a running cluster, named by SLURM_CONF; one that ran before goes on, ours ends with the last of its tests.

    PIPELINE_TEST_SLURM names the folder of another one than the default, for two sessions at once; processes of one
    session have one each.
    """
    if reason := why_not():
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"no Slurm here: {reason}")
    cluster = Cluster(_folder())
    ran_before = cluster.is_running()
    cluster.start()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.env().items():
            patch.setenv(name, value)
        yield cluster
    if not ran_before:
        cluster.stop()


def _folder() -> Path:
    folder, process = os.environ.get("PIPELINE_TEST_SLURM", str(DEFAULT_FOLDER)), os.environ.get("PYTEST_XDIST_WORKER")
    return Path(f"{folder}-{process}" if process else folder)


@pytest.fixture
def healthy(cluster: Cluster) -> Cluster:
    """Return the cluster with every node idle and no job left."""
    cluster.settle()
    return cluster


@pytest.fixture
def make(tmp_path: Path, healthy: Cluster) -> Iterator[Callable[..., Project]]:
    """Return a function that makes a project; tasks that linger in it are let go at the end."""

    def made(*given: Any, **settings: Any) -> Project:
        return make_project(tmp_path / "project", *given, **settings)

    yield made
    (tmp_path / "project" / "mischief" / "go").touch()
