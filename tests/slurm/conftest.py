"""The real cluster that the tests of this folder run on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testkit.cluster import Cluster, why_not
from tests.testkit.cluster.cluster import DEFAULT_FOLDER


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
