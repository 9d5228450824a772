"""Commands for people to type next, as values, so that no code searches or patches their text."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

ANY = "…"  # a value that the reader is to choose
DISTRIBUTION = "protein-training-pipeline"  # what package indexes call it: `pipeline` is a stranger's there
UPGRADE = f"pip install --upgrade {DISTRIBUTION}"


@dataclass(frozen=True, slots=True)
class Command:
    """A command of `pipeline`: its words, its configuration and settings, and the text around it."""

    words: tuple[str, ...]  # without `pipeline`
    settings: tuple[tuple[str, str], ...] = ()  # of the configuration, as --set gives them
    then: str = ""  # follows as it stands: "   (finished work is kept)", ", or --executor slurm"
    config: str = ""  # the file that --config names
    before: str | Command = ""  # precedes it: "nvidia-smi   or   ", or another command

    @classmethod
    def of(cls, words: str, *more: object, then: str = "", before: str | Command = "") -> Command:
        """Return a command by its words; `more` are words that may hold spaces, such as paths."""
        return replace(cls.typed([*words.split(), *map(str, more)]), then=then, before=before)

    @classmethod
    def submit(cls, stage: str, then: str = "", before: str | Command = "") -> Command:
        """Return the command that submits a stage."""
        return cls(("submit",) if stage == "all" else ("submit", stage), then=then, before=before)

    @classmethod
    def about(cls, config: object, sets: Sequence[str]) -> Command:
        """Return what --config and --set say, for another command to repeat."""
        pairs = (setting.partition("=") for setting in sets)
        return cls((), tuple((key, value) for key, _, value in pairs), config=str(config or ""))

    @classmethod
    def typed(cls, line: Sequence[str]) -> Command:
        """Return the command that a user typed; the line is without `pipeline`."""
        words: list[str] = []
        given: dict[str, list[str]] = {"--set": [], "--config": [""]}
        rest = iter(line)
        for word in rest:
            option, equals, value = word.partition("=")
            if option in given:
                given[option].append(value if equals else next(rest, ""))
            else:
                words.append(word)
        if words[:2] == ["submit", "--stage"]:  # as earlier versions wrote it
            del words[1]
        return replace(cls.about(given["--config"][-1], given["--set"]), words=tuple(words))

    @classmethod
    def read(cls, text: str) -> Command:
        """Return the command that this class once wrote."""
        try:
            return cls.typed(shlex.split(text)[1:])
        except ValueError:  # a quote without its other half
            return cls.typed(text.split()[1:])

    @property
    def stage(self) -> str:
        """What it submits; empty where it is another command."""
        return (*self.words, "all")[1] if self.words[:1] == ("submit",) else ""

    def with_stage(self, stage: str) -> Command:
        """Return the same for another stage."""
        return replace(self, words=(*self.submit(stage).words, *self.words[2:]))

    def with_settings(self, *settings: tuple[str, str], then: str = "") -> Command:
        """Return the command with settings in the place of what it said of their keys."""
        keys = {key for key, _ in settings}
        kept = [setting for setting in self.settings if setting[0] not in keys]
        return replace(self, settings=(*kept, *settings), then=then or self.then)

    def in_project(self, typed: Command) -> Command:
        """Return the command about the project of a typed one: with its configuration, and its other settings."""
        own = {key for key, _ in self.settings}
        others = [setting for setting in typed.settings if setting[0] not in own]
        before = self.before.in_project(typed) if isinstance(self.before, Command) else self.before
        return replace(self, settings=(*others, *self.settings), config=self.config or typed.config, before=before)

    @property
    def change(self) -> str:
        """What it says beside what it does: its settings, and what follows."""
        said = [f"{key}={value}" if value == ANY else shlex.quote(f"{key}={value}") for key, value in self.settings]
        return " ".join(f"--set {setting}" for setting in said) + self.then

    def __str__(self) -> str:
        gap, config = " " if self.settings else "", ["--config", self.config] if self.config else []
        return f"{self.before}{shlex.join(['pipeline', *self.words, *config])}{gap}{self.change}"


def status_or_cancel(run: str) -> Command:
    """Return the two commands about a run that is in the way: look at it, or end it."""
    return Command.of("cancel", run, before=Command.of("status", run, then="   or   "))


def install_extra(extra: str) -> str:
    """Return the command that installs an extra of this program."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def quoted(word: object) -> str:
    """Return a word of a command, such as a path, as a shell takes it."""
    return shlex.quote(str(word))
