"""The blocks of a page of documentation: files that a reader writes, commands that they type, output that they see."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

MARKED = re.compile(
    r"(?:^<!-- (?P<what>[a-z ]+)(?:: (?P<argument>[^>]*?))? -->\n)?^ *```(?P<language>\w*)\n(?P<body>.*?)^ *```$",
    re.DOTALL | re.MULTILINE,
)
START = re.compile(r"^<!-- starts from: (\w+) -->$", re.MULTILINE)
TOLD = ("console", "bash", "yaml", "python")  # the languages whose blocks say what becomes of them
MARKERS = ("run", "slow", "fails", "cluster", "file", "output", "settings", "demo", "not run")


@dataclass(frozen=True)
class Block:
    """What stands between two fences, and the comment in the line above them."""

    what: str  # a marker, or nothing
    argument: str
    language: str
    body: str
    line: int

    @property
    def commands(self) -> list[str]:
        """Return what is typed, without prompt and comment; a block of Python is one command."""
        if self.language == "python":
            return [self.body]
        return [line[2:].split("  #")[0].strip() for line in self.body.splitlines() if line.startswith("$ ")]

    @property
    def problem(self) -> str:
        """Say what is wrong with how it is marked."""
        if self.what and self.what not in MARKERS:
            return f"{self.what!r} is no marker: {', '.join(MARKERS)}"
        if self.language in TOLD and not self.what:
            return f"a block of {self.language} says in the line above it what becomes of it"
        if self.what in ("file", "not run") and not self.argument:
            return f"<!-- {self.what}: … --> wants its name, or why"
        lines = self.body.splitlines()
        if self.what not in ("", "not run") and self.language == "console" and any(line[:2] != "$ " for line in lines):
            return "every line of a console block begins with '$ '; what is printed goes into an output block"
        return ""


@dataclass(frozen=True)
class Page:
    """A page of documentation."""

    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def blocks(self) -> list[Block]:
        """Return every block, in order."""
        return [
            Block(
                what=found["what"] or "",
                argument=found["argument"] or "",
                language=found["language"],
                body=found["body"],
                line=self.text.count("\n", 0, found.start("body")),
            )
            for found in MARKED.finditer(self.text)
        ]

    @property
    def start(self) -> str:
        """Return what the reader's folder holds when the page begins."""
        found = START.search(self.text)
        return found[1] if found else "nothing"

    @property
    def prose(self) -> str:
        """Return the page without its blocks."""
        return MARKED.sub("", self.text)

    def files(self) -> dict[str, str]:
        """Return the files that a reader writes, by name."""
        return {block.argument: block.body for block in self.blocks if block.what == "file"}

    def has(self, *what: str) -> bool:
        """Tell whether any block is marked so."""
        return any(block.what in what for block in self.blocks)

    def problems(self) -> list[str]:
        """Return what is wrong with the marks of the blocks, by line."""
        return [f"{self.path.name}:{block.line}: {block.problem}" for block in self.blocks if block.problem]
