"""What runs a command when it is unpickled."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class Evil:
    """A pickle of this makes a file when it is read by Python itself."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.made}",)
