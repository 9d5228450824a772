"""Commands to suggest to users, as values instead of texts to search or patch."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

ANY = "…"  # a value for the user to choose
DISTRIBUTION = "protein-training-pipeline"  # our name on package indexes, where `pipeline` is another project
UPGRADE = f"pip install --upgrade {DISTRIBUTION}"


@dataclass(frozen=True, slots=True)
class Command:
    """A `pipeline` command: its words, configuration, settings, and text around it."""

    words: tuple[str, ...]  # without `pipeline`
    settings: tuple[tuple[str, str], ...] = ()  # for --set
    then: str = ""  # text after it: "   (finished work is kept)", ", or --executor slurm"
    config: str = ""  # for --config
    before: str | Command = ""  # text before it: "nvidia-smi   or   ", or another command

    @classmethod
    def of(cls, words: str, *more: object, then: str = "", before: str | Command = "") -> Command:
        """Return a command of these words; those in `more` may contain spaces, such as paths."""
        return replace(cls.typed([*words.split(), *map(str, more)]), then=then, before=before)

    @classmethod
    def submit(cls, stage: str, then: str = "", before: str | Command = "") -> Command:
        """Return the command that submits a stage."""
        return cls(("submit",) if stage == "all" else ("submit", stage), then=then, before=before)

    @classmethod
    def about(cls, config: object, sets: Sequence[str]) -> Command:
        """Return --config and --set, for another command to repeat."""
        pairs = (setting.partition("=") for setting in sets)
        return cls((), tuple((key, value) for key, _, value in pairs), config=str(config or ""))

    @classmethod
    def typed(cls, line: Sequence[str]) -> Command:
        """Parse a typed command line, without `pipeline`."""
        words: list[str] = []
        given: dict[str, list[str]] = {"--set": [], "--config": [""]}
        rest = iter(line)
        for word in rest:
            option, equals, value = word.partition("=")
            if option in given:
                given[option].append(value if equals else next(rest, ""))
            else:
                words.append(word)
        if words[:2] == ["submit", "--stage"]:  # the format of earlier versions
            del words[1]
        return replace(cls.about(given["--config"][-1], given["--set"]), words=tuple(words))

    @classmethod
    def read(cls, text: str) -> Command:
        """Parse a command that this class has written."""
        try:
            return cls.typed(shlex.split(text)[1:])
        except ValueError:  # an unbalanced quote
            return cls.typed(text.split()[1:])

    @property
    def stage(self) -> str:
        """The stage that it submits; empty for other commands."""
        return (*self.words, "all")[1] if self.words[:1] == ("submit",) else ""

    def with_stage(self, stage: str) -> Command:
        """Return the command with another stage."""
        return replace(self, words=(*self.submit(stage).words, *self.words[2:]))

    def with_settings(self, *settings: tuple[str, str], then: str = "") -> Command:
        """Return the command with these settings, which replace those of the same keys."""
        keys = {key for key, _ in settings}
        kept = [setting for setting in self.settings if setting[0] not in keys]
        return replace(self, settings=(*kept, *settings), then=then or self.then)

    def in_project(self, typed: Command) -> Command:
        """Return the command with the --config and --set of a typed one."""
        own = {key for key, _ in self.settings}
        others = [setting for setting in typed.settings if setting[0] not in own]
        before = self.before.in_project(typed) if isinstance(self.before, Command) else self.before
        return replace(self, settings=(*others, *self.settings), config=self.config or typed.config, before=before)

    @property
    def change(self) -> str:
        """Its settings and the text after it."""
        said = [f"{key}={value}" if value == ANY else shlex.quote(f"{key}={value}") for key, value in self.settings]
        return " ".join(f"--set {setting}" for setting in said) + self.then

    def __str__(self) -> str:
        gap, config = " " if self.settings else "", ["--config", self.config] if self.config else []
        return f"{self.before}{shlex.join(['pipeline', *self.words, *config])}{gap}{self.change}"


def status_or_cancel(run: str) -> Command:
    """Return the command that shows a run, followed by the one that cancels it."""
    return Command.of("cancel", run, before=Command.of("status", run, then="   or   "))


def install_extra(extra: str) -> str:
    """Return the command that installs an extra of this program."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def quoted(word: object) -> str:
    """Quote a word of a command, such as a path, for a shell."""
    return shlex.quote(str(word))
