"""What every result records beside its figures: the machine that they are from, and the day."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def circumstances() -> dict[str, str]:
    """Return the machine and the date."""
    return {"machine": machine(), "date": f"{datetime.now(UTC):%Y-%m-%d}"}


def machine() -> str:
    """Return cores and model of the processor, system and Python."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text().splitlines() if told.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{os.cpu_count()} cores of {model}, {platform.system()}, Python {platform.python_version()}"


def write(path: Path | None, result: Mapping[str, Any]) -> None:
    """Write a result as JSON where there is a place for it, and under which circumstances it was found."""
    if path is not None:
        path.write_text(json.dumps({**result, **circumstances()}, indent=1) + "\n")
