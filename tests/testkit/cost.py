"""The one rule of the two tiers: a test above 5 CPU-seconds is nightly, unless it proves a promise.

The rule holds itself: a test of the gate that takes more than three times as much fails. What is made once for many
tests (`stages.finished`, a cluster) is not charged to the test that happens to come first.
"""

from __future__ import annotations

import re
import resource
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

LIMIT_S = 5.0
FAR = 3.0  # machines differ and are shared: only what is far above the limit fails
ROOT = Path(__file__).resolve().parents[2]
PROMISES = (ROOT / "README.md", ROOT / "docs/guarantees.md")
PROOF = re.compile(r'\]\((?:\.\./)*(tests/[\w/]+\.py) "(\w+)"\)')
SPENT = pytest.StashKey[float]()
_uncounted_s = 0.0


@cache
def proofs() -> frozenset[tuple[str, str]]:
    """Return the tests that the promises link, as (file, name)."""
    return frozenset(proof for page in PROMISES for proof in PROOF.findall(page.read_text()))


def is_proof(item: pytest.Item) -> bool:
    """Say whether a promise links this test."""
    file, _, rest = item.nodeid.partition("::")
    return (file, rest.rpartition("::")[2].partition("[")[0]) in proofs()


def cpu_s() -> float:
    """Return the CPU time of this process and its finished children, less what is shared."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used) - _uncounted_s


@contextmanager
def uncounted() -> Iterator[None]:
    """Charge no test for what many share."""
    global _uncounted_s
    before = cpu_s()
    try:
        yield
    finally:
        _uncounted_s += cpu_s() - before


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Reset the meter of a test."""
    item.stash[SPENT] = 0.0
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    """Count what a test's own fixtures take."""
    return (yield from _metered(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Count what a test takes, and fail one of the gate that has outgrown it."""
    result = yield from _metered(item)
    spent = item.stash[SPENT]
    item.user_properties.append(("cpu_s", round(spent, 2)))
    if spent > FAR * LIMIT_S and not is_proof(item) and item.get_closest_marker("nightly") is None:
        pytest.fail(f"took {spent:.1f} CPU-seconds; above {LIMIT_S:.0f} a test is marked nightly", pytrace=False)
    return result


def _metered(item: pytest.Item) -> Generator[None, Any, Any]:
    before = cpu_s()
    try:
        return (yield)
    finally:
        item.stash[SPENT] += cpu_s() - before
