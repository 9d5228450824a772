"""Commands that people are told to type next, as values: nobody searches or patches their text."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace

ANY = "…"  # a value that the reader is to choose


@dataclass(frozen=True, slots=True)
class Command:
    """A command of `pipeline`: its words, the settings that it overrides, and what is said after it."""

    words: tuple[str, ...]  # without `pipeline`
    settings: tuple[tuple[str, str], ...] = ()  # of the configuration, as --set gives them
    then: str = ""  # follows as it stands: "   (finished work is kept)", ", or --executor slurm"

    @classmethod
    def submit(cls, stage: str, then: str = "", **options: str) -> Command:
        """Return the command that submits a stage; of its options each is named as `stage` is."""
        named = [word for name, value in options.items() for word in (f"--{name}", value)]
        return cls(("submit", "--stage", stage, *named), then=then)

    @classmethod
    def read(cls, text: str) -> Command:
        """Return the command that somebody typed, or that this class once wrote."""
        try:
            typed = shlex.split(text)
        except ValueError:  # a quote without its other half
            typed = text.split()
        words: list[str] = []
        settings: list[tuple[str, str]] = []
        rest = iter(typed[1:])
        for word in rest:
            option, equals, value = word.partition("=")
            if option == "--set":
                key, _, chosen = (value if equals else next(rest, "")).partition("=")
                settings.append((key, chosen))
            else:
                words.append(word)
        return cls(tuple(words), tuple(settings))

    @property
    def stage(self) -> str:
        """What it submits; empty where it is another command."""
        return self.words[2] if self.words[:2] == ("submit", "--stage") and len(self.words) > 2 else ""

    def with_stage(self, stage: str) -> Command:
        """Return the same for another stage."""
        return replace(self, words=(*self.words[:2], stage, *self.words[3:]))

    def with_settings(self, *settings: tuple[str, str], then: str = "") -> Command:
        """Return the command with settings in the place of what it said of their keys."""
        keys = {key for key, _ in settings}
        kept = [setting for setting in self.settings if setting[0] not in keys]
        return replace(self, settings=(*kept, *settings), then=then)

    @property
    def change(self) -> str:
        """What it says beside what it does: its settings, and what follows."""
        said = [f"{key}={value}" if value == ANY else shlex.quote(f"{key}={value}") for key, value in self.settings]
        return " ".join(f"--set {setting}" for setting in said) + self.then

    def __str__(self) -> str:
        gap = " " if self.settings else ""
        return f"{shlex.join(['pipeline', *self.words])}{gap}{self.change}"
