"""The blocks of a page of documentation: files that a reader writes, commands that they type, output that they see."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

BLOCK = re.compile(r"<!-- (?P<what>[a-z ]+)(?:: (?P<name>[^>]*?))? -->\n```\w+\n(?P<body>.*?)```", re.DOTALL)
CONSOLE = re.compile(r"```console\n(.*?)```", re.DOTALL)
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "100"}


@dataclass(frozen=True)
class Page:
    """A page of documentation."""

    path: Path

    @property
    def text(self) -> str:
        return self.path.read_text()

    def blocks(self, what: str) -> list[re.Match[str]]:
        """Return the blocks that are marked so."""
        return [block for block in BLOCK.finditer(self.text) if block["what"] == what]

    def commands(self) -> list[str]:
        """Return every command of the blocks that are run, without prompt and comment."""
        lines = [line for block in self.blocks("run") for line in block["body"].splitlines()]
        return [line[2:].split("  #")[0].strip() for line in lines if line.startswith("$ ")]

    def files(self) -> dict[str, str]:
        """Return the files that a reader writes, by name."""
        return {block["name"]: block["body"] for block in self.blocks("file")}

    def write_files(self, folder: Path) -> None:
        """Write them."""
        for name, body in self.files().items():
            (folder / name).write_text(body)

    def unmarked(self) -> list[str]:
        """Return the console blocks of which nobody says whether they are run."""
        marked = [block["body"] for block in BLOCK.finditer(self.text)]
        return [body for body in CONSOLE.findall(self.text) if body not in marked]
