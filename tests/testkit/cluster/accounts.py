"""Who may submit what: written into a fresh accounting database."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

from tests.testkit.cluster.config import ACCOUNT, TINY_MAX_SUBMIT


def register(run: Callable[..., subprocess.CompletedProcess[str]], cluster: str) -> None:
    """Make the cluster known, with an account for root and a quality of service that refuses a fifth job."""
    for words in (
        ["cluster", cluster],
        ["qos", "tiny", f"MaxSubmitJobsPerUser={TINY_MAX_SUBMIT}"],
        ["account", ACCOUNT, "Description=tests", "Organization=tests"],
        ["user", "root", f"Account={ACCOUNT}", f"DefaultAccount={ACCOUNT}", "QOS=normal,tiny"],
    ):
        done = run("sacctmgr", "-i", "add", *words)
        if done.returncode != 0:
            raise RuntimeError(f"sacctmgr add {' '.join(words)}: {done.stdout}{done.stderr}")
