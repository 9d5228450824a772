"""One project of one user over a cache and a data set that others use, too, and what is true of its runs."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.files import user_name
from pipeline.journal.run_folder import RunFolder, runs_in
from pipeline.journal.run_status import State
from pipeline.records import Reason
from tests.security.test_two_users import User
from tests.testkit.slurm_runs import Project, Run
from tests.weeks.scene import ENDS, ENDS_S, bits, must
from tests.weeks.twins import Files, Twins, agrees, write_settings

REFUSED = 6  # the exit code of whoever finds that the cluster does not take or know a job
DAMAGED = 4
BAD = b"no structure\n"  # the content of a file that is to be left out, and named
DAMAGE = "the cache was damaged"  # as a deed beside a run
HEARD = 12  # the last words that are told with a failure


@dataclass
class Submitted:
    """A run that goes on, and what was done to it since it was submitted."""

    run: Run
    stage: str
    settings: Mapping[str, Any]
    seen: list[Files]  # the states of the data since then
    deeds: list[str] = field(default_factory=list)
    cancelled: bool = False
    is_doubtful: bool = False  # the cache may have been damaged before
    began_s: float = field(default_factory=time.monotonic)

    @property
    def met_damage(self) -> bool:
        """Whether it may have found records damaged."""
        return self.is_doubtful or DAMAGE in self.deeds


@dataclass
class Neighbour:
    """A project of one user."""

    folder: Path
    uid: int
    settings: dict[str, Any]
    variant: dict[str, Any] = field(default_factory=dict)
    site: Path | None = None  # where the package is imported from, where it is a copy
    now: Submitted | None = None
    heard: list[str] = field(default_factory=list)
    incomplete: set[str] = field(default_factory=set)  # models that were trained while the cache was damaged

    @property
    def executor(self) -> str:
        """Where its runs are: only root is known to the accounting of the test cluster."""
        return "local" if self.uid else "slurm"

    @property
    def who(self) -> str:
        """What a record of this user's doings calls them."""
        return user_name(self.uid)

    def types(self, *words: str) -> tuple[int, str]:
        """Type a command as this user; return its exit code and what it printed. It must not break."""
        if self.uid:
            done = User(self.uid, self.folder, ENDS_S).types(*words)
            code, said = done.code, done.said
        else:
            typed = Project(self.folder, limit_s=ENDS_S).types(
                *words, **({"PYTHONPATH": str(self.site)} if self.site else {})
            )
            code, said = typed.code, typed.said
        self.heard = [
            *self.heard[-HEARD:],
            f"{self.folder.name}$ pipeline {' '.join(words)}\n{said} (exit code {code})",
        ]
        must("Traceback" not in said, f"`pipeline {words[0]}` broke", lambda: said)
        return code, said

    def runs(self) -> list[RunFolder]:
        """Return the folders of its runs, the oldest first."""
        return runs_in(self.folder / "runs") if (self.folder / "runs").exists() else []

    def writes(self, variant: dict[str, Any]) -> None:
        """Change settings."""
        self.variant = variant
        write_settings(self.folder, {**self.settings, **variant})

    def submits(self, stage: str, files: Files, *, is_doubtful: bool, was_mended: bool = False) -> str:
        """Submit a stage; return how that went."""
        code, said = self.types("submit", "--stage", stage, "--executor", self.executor)
        if refusal := refused(code, said):
            return refusal
        if code == DAMAGED:
            must(is_doubtful and "next:" in said, "damage is told, and none was done", lambda: said)
            code, said = self.types("cache", "repair", "--yes")
            must(code == 0, "a repair failed", lambda: said)
            return "met damage"
        must(code == 0, f"submit ended with {code}", lambda: said)
        run = Run(Project(self.folder), self.runs()[-1])
        settings = {**self.settings, **self.variant}
        self.now = Submitted(run, stage, settings, [files], is_doubtful=is_doubtful and not was_mended)
        return f"submit {stage}"

    def cancels(self) -> str:
        """Cancel the run that goes on; return how that went."""
        assert self.now is not None
        code, said = self.types("cancel", self.now.run.name, "--yes")
        if refusal := refused(code, said):
            return refusal
        must(code == 0, f"cancel ended with {code}", lambda: said)
        if "nothing to cancel" in said:
            return "cancel came late"
        self.now.cancelled = True
        return "cancel"

    def attends(self, twins: Twins) -> str:
        """Look after the run that goes on; judge one that has ended. Return what became of it, empty for nothing."""
        if self.now is None:
            return ""
        state = self.now.run.now().state
        if state is State.ABANDONED:
            return self._resumes()
        if state not in ENDS:
            if time.monotonic() - self.now.began_s > ENDS_S:
                late, self.now = self.now, None
                must(False, f"{late.run.name} does not end", late.run.story)
            return ""
        ended, self.now = self.now, None
        told = " ".join(self.types(*words, ended.run.name)[1] for words in (("status", "-v"), ("report",)))
        if trouble := untrue(told, state, ended, self.who):
            must(False, f"{ended.run.name} ({', '.join(ended.deeds)}): {trouble}", ended.run.story)
        if state is not State.DONE:
            if ended.met_damage:  # a later run may continue these models; its report says which items they lack
                self.incomplete |= {folder.name for folder in (self.folder / "models").glob("*")}
            return f"{state.value} run"
        self._counted(ended, told)
        if ended.stage in ("train", "all"):
            return self._trained(ended, told, twins)
        return "done run"

    def _resumes(self) -> str:
        """Take up a run that nobody looks after, as its status says."""
        assert self.now is not None
        code, said = self.types("status", self.now.run.name)
        if "orphaned" not in said.lower():  # somebody has come meanwhile
            return ""
        must(f"pipeline resume {self.now.run.name}" in said, "nobody said how an orphaned run goes on", lambda: said)
        code, said = self.types("resume", self.now.run.name)
        must(code == 0 or refused(code, said), f"resume ended with {code}", lambda: said)
        self.now.deeds.append("resumed")
        return "resume"

    def _counted(self, ended: Submitted, told: str) -> None:
        """Check that all files were counted as in a state of the data, and that each that is bad, or went, is named."""
        path = ended.run.folder.rejected
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        left_out = sorted(row["id"] for row in rows)
        missing = {row["id"] for row in rows if row["reason"] == Reason.MISSING_FILE.value}
        wrong = []
        for files in ended.seen:  # one that was removed after the scan had counted it is missing from there on
            went = {item_of(name) for name in files.keys() - ended.seen[-1].keys()} & missing
            wrong.append(uncounted(told, left_out, files, went))
        must(not all(wrong), f"{ended.run.name}: {wrong[-1]}", lambda: told)

    def _trained(self, ended: Submitted, told: str, twins: Twins) -> str:
        """Check that a model is, bit for bit, that of an undisturbed twin over a state of the data that was seen.

        One that was trained without an item, as its records were damaged meanwhile, is another; that must be told.
        """
        found = re.search(r"model: (\S+)", told)
        must(found, f"{ended.run.name}: no model is named", lambda: told)
        assert found is not None
        folder = self.folder / "models" / Path(found[1]).name
        wrong = agrees(folder.name, bits(folder), [twins.of(ended.settings, files) for files in ended.seen])
        is_known = ended.met_damage or folder.name in self.incomplete
        if wrong and is_known and re.search("skipped: (its|their) records in the cache are damaged", told):
            self.incomplete.add(folder.name)
            return "model without a damaged item"
        must(not wrong, f"{ended.run.name} ({', '.join(ended.deeds)}): {wrong}", ended.run.story)
        return "model"


def refused(code: int, said: str) -> str:
    """Return how a command was refused because the cluster does not answer, which it must tell; empty if it was not."""
    if code != REFUSED:
        return ""
    must(
        "next:" in said and re.search("answer|squeue|sbatch|controller|sinfo", said),
        "a refusal without a reason",
        lambda: said,
    )
    return "refused"


def untrue(told: str, state: State, ended: Submitted, who: str) -> str:
    """Return what of the end of a run was told wrongly; empty if nothing."""
    if (state is State.STOPPED) != ended.cancelled:
        return f"it {'was' if ended.cancelled else 'was not'} cancelled, and is {state.value}"
    if ended.cancelled and f"cancelled by {who}" not in told:
        return f"nobody said that it was cancelled by {who}: {told}"
    if state is State.FAILED and not ended.deeds:
        return f"it failed, and nothing had been done to it: {told}"
    if state is State.FAILED and "next:" not in told:
        return f"it failed, and nobody said what to do next: {told}"
    return ""


def uncounted(told: str, left_out: list[str], files: Files, went: Set[str] = frozenset()) -> str:
    """Return what a report says wrongly of the files of a data set, of which some items went; empty if nothing."""
    bad = sorted({item_of(name) for name, content in files.items() if content == BAD} | went)
    if left_out != bad:
        return f"left out are {left_out}, and bad are {bad}"
    if f"{len(files) - len(bad)} usable, {len(bad)} rejected" not in told:
        return f"nobody said that {len(files) - len(bad)} items were accepted, and {len(bad)} not"
    return "".join(f"nobody named {name}" for name in bad if name not in told)


def item_of(name: str) -> str:
    """Return the item that a file of this name is."""
    return name.removesuffix(".pdb")
