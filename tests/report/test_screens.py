"""What `plan`, `doctor` and `report` print on terminals and in a pipe, frozen in `screens`.

`python -m tests.report.test_screens` writes the frozen screens again.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from pipeline.errors import ConfigError
from pipeline.journal.run_status import RunStatus, State
from pipeline.memory.footprint import Provenance
from pipeline.memory.outlook import LintFinding, Severity
from pipeline.memory.planning.memory_plan import PlannedOffer
from pipeline.report.plan_tables import Estimate, stages_report, training_answer
from pipeline.report.tables import show_parts
from pipeline.setup.checkup import failed_check, findings_lines, good_check, noted_check
from pipeline.units import GIB, MIB
from pipeline.views.efficiency import StageUse, Suggested, use_report
from tests.cli.test_screens import Terminal, screen_of

SCREENS = Path(__file__).parent / "screens"
WIDTHS = {"80": 80, "120": 120, "200": 200, "pipe": 0}
NONE = dict.fromkeys(("items", "refused", "unusable", "cached", "missing", "waiting", "tasks"), 0)


def outlook(*cards: str, **more: Any) -> Any:
    """Return what is read of a plan for these GPUs, or for a CPU without any."""
    reserved = Provenance.SIMULATED if cards else Provenance.TRACED
    margin = SimpleNamespace(factor=1.08 if cards else 1.02, origin=Provenance.ASSUMED)
    offers = []
    for at, card in enumerate(cards or ("cpu",), 1):
        plan: Any = SimpleNamespace(
            total=SimpleNamespace(value=50 * MIB * at), limit_bytes=22.8 * GIB, cards=(card,), remedies=(),
            request=SimpleNamespace(ranks=1, batch=4), cuts=SimpleNamespace(steps_most=1, items_most=4),
            reserved=SimpleNamespace(origin=reserved), margin=margin, oversize=(), crop={},
            gpu_hours=SimpleNamespace(value=0.25 * at),
        )  # fmt: skip
        offer: Any = SimpleNamespace(name=card, cards=(SimpleNamespace(caching=bool(cards)),), ranks=1)
        offers.append(PlannedOffer(offer, plan))
    return SimpleNamespace(
        plan=offers[0].plan, offer=offers[0].offer, alternatives=offers[1:] and offers, gpus=len(cards[:1]), cpus=3,
        nodes=1, mem=SimpleNamespace(mem_bytes=2.9 * GIB), time_s=7200, epoch_s=0.4, train_s=95.0, pace=None, items=16,
        sizes_from="", ignores_sizes=False, probed=(), waits_s={"a100-80gb-sxm": 5400.0}, **{"findings": ()} | more,
    )  # fmt: skip


SLOW = ("2 loader threads on 1 CPU", "loading may be slower than training", "raise cluster.train.cpus")
WARNED = LintFinding("cpus", Severity.WARNING, *SLOW, "")
DUE, LATER = {"items": 1200, "cached": 200, "missing": 1000}, {"waiting": 25, "refused": 1}
STAGES = [
    Estimate("scan", NONE | {"items": 25, "cached": 25}, 0, 1, 1, 0, "", 0, 3600, 0, None, 0.0, {}),
    Estimate("embed", NONE | DUE, 4, 2, 2, 1, "", 3 * GIB, 3600, GIB, 60.0, 130.0, {}),
    Estimate("graph", NONE | LATER, 0, 1, 1, 0, "", GIB, 3600, 0, None, None, {}),
    Estimate("train", NONE | {"unplanned": 1}, 1, 1, 1, 0, "", GIB, 3600, 0, None, None, {}),
]
BETTER = (
    Suggested("cluster.train.time", 3600, 300, "1.5 × the longest task"),
    Suggested("cluster.train.cpus", 4, 1, "used"),
)
USE = StageUse(
    "train", 1, 1, 24, {"done": 1}, 4, 0, 896 * MIB, 896 * MIB, 401 * MIB, 401 * MIB, 0.45, 0.2, 3600, 95.0, 95.0, 0.03,
    None, None, None, 6.7, 0.1, 0.0, 800 * MIB, "estimated (no earlier runs)", BETTER, ("used 1 of 4 CPUs",),
)  # fmt: skip
SMALL = replace(USE, stage="scan", peak_bytes=None, mem_used=None, cpu_used=None, suggested=(), advice=())
DAMAGED = replace(USE, causes={"done": 1, "host_oom": 2}, attempts=3)
MISSING = ConfigError("checkpoint not found. Searched:\n  nope.pt", remedy="pipeline weights fetch esm2_t33_650M_UR50D")
LOCAL = ("Slurm is available, but cluster.executor is local", "set cluster.executor=slurm to use it")
CHECKS = [good_check("python", "3.11.7"), failed_check("weights", MISSING), noted_check("cluster", *LOCAL)]
RUN = RunStatus("20261128-6cd9", State.DONE)

SHOWN: dict[str, Callable[[], Sequence[Any]]] = {
    "plan train": lambda: training_answer(outlook()),
    "plan train --gpu rtx4090": lambda: training_answer(outlook("rtx-4090", findings=(WARNED,)), "gpu"),
    "plan train --gpu rtx4090 --gpu a100-80gb": lambda: training_answer(outlook("rtx-4090", "a100-80gb-sxm")),
    "plan": lambda: stages_report(STAGES),
    "plan scan": lambda: stages_report(STAGES[:1]),
    "doctor": lambda: findings_lines(CHECKS),
    "doctor -v": lambda: findings_lines(CHECKS, verbose=True),
    "report": lambda: use_report(RUN, [SMALL, USE]),
    "report -v": lambda: use_report(RUN, [DAMAGED], verbose=True),
}


def screens(width: int) -> str:
    """Return all screens on a terminal, or in a pipe where it has no width."""
    blocks = []
    with mock.patch.dict("os.environ", {"COLUMNS": str(width or 80), "TERM": "xterm"}, clear=True):
        for typed, parts in SHOWN.items():
            stream = Terminal() if width else io.StringIO()
            with redirect_stdout(stream):
                show_parts(*parts())
            lines = screen_of(stream.getvalue())
            assert not width or all(len(line) <= width for line in lines), lines
            assert width or "\x1b" not in stream.getvalue()
            blocks.append(f"$ pipeline {typed}\n" + "\n".join(lines).rstrip() + "\n")
    return "\n".join(blocks)


@pytest.mark.parametrize("width", WIDTHS)
def test_screens_are_as_frozen(width: str) -> None:
    frozen = (SCREENS / f"{width}.txt").read_text()
    assert screens(WIDTHS[width]) == frozen, "if meant: python -m tests.report.test_screens"


if __name__ == "__main__":
    SCREENS.mkdir(exist_ok=True)
    for name, columns in WIDTHS.items():
        (SCREENS / f"{name}.txt").write_text(screens(columns))
