"""The C++ part is built where it can be, once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.testkit.limited import device
from tests.testkit.limited.device import built


def test_two_may_build_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(built, [tmp_path, tmp_path])
    assert one == other
    assert list(tmp_path.iterdir()) == [one]


def test_without_a_compiler_the_reason_is_told_and_ci_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no C++ compiler" in device.why_not()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no C"):
        device.need()
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match="no C"):
        device.need()
