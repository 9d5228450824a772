"""Checks a node's health before the first step, in less than a second.

On a broken node a training fails after an hour, or takes twice the time, and the next job may get the same node. A
defect ends the job before its ranks connect, and the run avoids the node from then on. The checks find only defects
that the node reports, or that show in a small computation.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import psutil
import torch

from pipeline.device.accelerator import Card, computing, is_card
from pipeline.device.kinds import VISIBLE
from pipeline.records import SEVERAL
from pipeline.units import MIB, format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE = 512  # of the matrices of the product
APART_S = 60.0  # a larger difference between clocks makes the times in logs misleading
WITHIN_S = 20.0  # nvidia-smi answers
JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", SEVERAL)  # with one of them, a task may get another node

# In the report of nvidia-smi
BROKEN = {
    "ecc_errors/volatile/sram_uncorrectable": "has had memory errors that were not corrected",
    "ecc_errors/volatile/sram_uncorrectable_parity": "has had memory errors that were not corrected",
    "ecc_errors/volatile/sram_uncorrectable_secded": "has had memory errors that were not corrected",
    "remapped_rows/remapped_row_failure": "cannot replace broken rows of its memory",
    "remapped_rows/remapped_row_pending": "must be reset: it has to replace broken rows of its memory",
    "retired_pages/pending_retirement": "must be reset: it has to leave out broken pages of its memory",
}
SLOWED = ("clocks_event_reasons/clocks_event_reason", "clocks_throttle_reasons/clocks_throttle_reason")


def may_get_another_node() -> bool:
    """Tell whether this process is in a job of a scheduler, or on one of several nodes."""
    return any(name in os.environ for name in JOBS)


def defects(device: str, host_bytes: int, card_bytes: int) -> Iterator[str]:
    """Yield the defects that make this node unfit for work that needs this much host and card memory."""
    free_bytes = psutil.virtual_memory().available
    if free_bytes < host_bytes:
        yield f"only {format_bytes(free_bytes)} of its memory are free; {format_bytes(host_bytes)} are needed"
    if why := _unwritable(Path(os.environ.get("TMPDIR") or tempfile.gettempdir())):
        yield why
    if is_card(device):
        card = Card(device)
        yield from (f"GPU {card.index} {what}" for what in _broken(_report(card)))
        free_bytes, total_bytes = card.free_and_total_bytes()
        if free_bytes < card_bytes <= total_bytes:
            needed = f"only {format_bytes(free_bytes)} are free; {format_bytes(card_bytes)} are needed"
            yield f"GPU {card.index} is used by another process: {needed}"
            return
    if not _multiplies(device):
        yield f"{computing(device).name} computes a wrong product"


def cautions(device: str, shared: Path) -> Iterator[str]:
    """Yield warnings about this node, which can still work; `shared` is a folder that all nodes see."""
    with suppress(OSError), tempfile.NamedTemporaryFile(dir=shared) as file:
        apart_s = time.time() - os.fstat(file.fileno()).st_mtime
        if abs(apart_s) > APART_S:
            way = "ahead of" if apart_s > 0 else "behind"
            yield f"its clock is {format_seconds(abs(apart_s))} {way} the shared disk's"
    if is_card(device):
        card, report = Card(device), _report(Card(device))
        if any(report.findtext(f"{prefix}_hw_slowdown") == "Active" for prefix in SLOWED):
            yield f"GPU {card.index} runs slowly: it is too hot or lacks power"


def _unwritable(folder: Path) -> str:
    """Write a little to the node's own disk and read it back; return the fault, or ''."""
    if not folder.is_dir():  # the variable is from another machine; programs then use /tmp
        return ""
    text = os.urandom(MIB)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            return "" if file.read() == text else f"{folder} returns other bytes than were written"
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror}"


def _multiplies(device: str) -> bool:
    """Multiply matrices of small whole numbers: the product is exact in each precision that torch may choose."""
    numbers = torch.arange(SIZE * SIZE, device=device).view(SIZE, SIZE)
    left, right = (numbers * 7 % 5 - 2).float(), (numbers * 11 % 3 - 1).float()
    return torch.equal((left @ right).sum(dim=1), (left * right.sum(dim=1)).sum(dim=1))


def _broken(report: ET.Element) -> list[str]:
    """Return what nvidia-smi reports as broken."""
    found = {place: (report.findtext(place) or "").strip() for place in BROKEN}
    return sorted({BROKEN[place] for place, text in found.items() if text == "Yes" or text.lstrip("0").isdecimal()})


def _report(card: Card) -> ET.Element:
    """Return what nvidia-smi reports of a card; an empty element where it reports nothing."""
    names = [name.strip() for name in os.environ.get(VISIBLE, "").split(",")]
    with suppress(OSError, subprocess.SubprocessError, ET.ParseError, IndexError):
        command = ["nvidia-smi", "--query", "--xml-format", f"--id={names[card.index] or card.index}"]
        text = subprocess.run(command, capture_output=True, check=True, timeout=WITHIN_S).stdout
        if (gpu := ET.fromstring(text).find("gpu")) is not None:  # noqa: S314 - the driver's own
            return gpu
    return ET.Element("gpu")
