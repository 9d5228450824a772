"""How far a look at a cache is, is said without a terminal, too."""

from __future__ import annotations

import pytest

from pipeline.report import live_status
from pipeline.store.maintenance.damage_report import Checked


def test_a_long_look_says_now_and_then_how_far_and_how_fast_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 5.0, 5.0, 11.0, 11.0, 12.0, 12.0])
    monkeypatch.setattr(live_status.time, "monotonic", lambda: next(clock))
    with live_status.CheckBars("full", 9) as progress:
        for number in range(3):
            progress.take(Checked("graph", f"{number}", read_bytes=11 << 20))
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "full: 2 of 9 files, 22.0 MiB, 2.0 MiB/s, 0 wrong\n")
