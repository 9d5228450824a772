"""Model families that the planner's authors had not in mind, as people write them."""

from __future__ import annotations

from pathlib import Path

from pipeline.memory.footprint import MemoryChoice, MicroFootprint, live_peak_bytes
from pipeline.runs.model.training_work import Work, target_of
from pipeline.training.step.optimizers import StepSettings
from tests.memory.tracing.traced import true_peak
from tests.zoo.strangers import architectures, derivatives, ways

FAMILIES = {**architectures.FAMILIES, **ways.FAMILIES, **derivatives.FAMILIES}
LEAST, ROWS = {"items": 64}, {"items": 1024}  # of the smallest batch, and of one that is planned


def planned(name: str, folder: Path) -> tuple[MicroFootprint, int]:
    """Return what is planned of a family's micro-batch, and the live peak of a step of two, without a margin."""
    work = Work(FAMILIES[name](), StepSettings(way="foreach"), device="cpu")
    oracle, choice = work.oracle(LEAST, target_of(None), padded=False, kept=folder), MemoryChoice()
    micro, standing = oracle.micro(choice, ROWS), oracle.standing(choice)
    return micro, live_peak_bytes(standing, micro, accumulate=True)


def real(name: str) -> int:
    """Return the live peak of such a step that is really taken."""
    return true_peak(FAMILIES[name](), ROWS, 2)
