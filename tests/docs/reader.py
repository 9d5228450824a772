"""Somebody who reads a page and does what it says, from the first block to the last."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from pipeline.config.load import read_config
from tests.docs.blocks import Block, Page
from tests.docs.shown import is_shown

ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "100"}
ENVIRONMENT.pop("PIPELINE_CONFIG", None)


@dataclass
class Reader:
    """Follows pages in a folder; `typing` are the markers whose commands are typed."""

    folder: Path
    typing: tuple[str, ...] = ("run",)
    patient: bool = True  # whether blocks that take long are typed
    environment: Mapping[str, str] = field(default_factory=lambda: ENVIRONMENT)
    printed: str = ""  # by the last command that was typed
    typed: int = 0

    def follow(self, page: Page) -> None:
        """Do what each block says; an assertion names page and line of the one that fails."""
        for block in page.blocks:
            where = f"{page.path.name}:{block.line}"
            if block.what == "file":
                path = self.folder / block.argument
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.body)
            elif block.what == "settings":
                self._check(block)
            elif block.what in (*self.typing, "fails"):
                if self.patient or block.argument != "slow":
                    self._type(block, where)
            elif block.what == "output" and not block.argument:
                assert is_shown(block.body, self.printed), f"{where}: it shows what is not printed:\n{self.printed}"

    def _type(self, block: Block, where: str) -> None:
        wanted = int(block.argument) if block.what == "fails" else 0
        for command in block.commands:
            done = self.run(command, python=block.language == "python")
            self.printed, self.typed = done.stdout + done.stderr, self.typed + 1
            assert done.returncode == wanted, f"{where}: {command}\nended with {done.returncode}\n{self.printed}"
            self.after(command)

    def run(self, command: str, *, python: bool = False) -> subprocess.CompletedProcess[str]:
        """Type one command, or give Python a script."""
        return subprocess.run(
            [sys.executable, "-c", command] if python else ["bash", "-c", command],
            cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False,
        )  # fmt: skip

    def after(self, command: str) -> None:
        """Wait for what a command left going; on a cluster somebody does."""

    def _check(self, block: Block) -> None:
        """Load settings that are a part of a configuration."""
        part = yaml.safe_load(block.body)
        path = self.folder / "settings-of-a-page.yaml"
        path.write_text(yaml.safe_dump({**part, "data": {"path": ".", **part.get("data", {})}}))
        read_config(path)
        path.unlink()
