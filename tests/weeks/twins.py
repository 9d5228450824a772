"""Undisturbed twins: for each configuration and state of the data, the model that a private copy ends with."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.testkit.project import nested, settle
from tests.testkit.slurm_runs import Project
from tests.weeks.scene import ENDS_S, bits, model, must

Files = dict[str, bytes]  # a state of the data: the content of each file by its name
OWN_CODE = ("held.py", "esm2_small.pt")  # what a project has besides its configuration


@dataclass(frozen=True)
class Twin:
    """A model of which nothing was disturbed."""

    name: str
    weights: Mapping[str, bytes]


@dataclass
class Twins:
    """Makes each twin once, in an empty folder with a cache of its own."""

    folder: Path
    own: Path  # the folder that has the task's code and the weights
    made: dict[str, Twin] = field(default_factory=dict)

    def of(self, settings: Mapping[str, Any], files: Files) -> Twin:
        """Return what a training ends with that is disturbed by nobody."""
        digest = digest_of(settings, files)
        if digest not in self.made:
            self.made[digest] = self._trains(self.folder / digest, settings, files)
        return self.made[digest]

    def _trains(self, folder: Path, settings: Mapping[str, Any], files: Files) -> Twin:
        project = Project(folder / "project", limit_s=ENDS_S)
        project.folder.mkdir(parents=True)
        (folder / "data").mkdir()
        for name, content in files.items():
            (folder / "data" / name).write_bytes(content)
        settle(folder / "data")
        for name in OWN_CODE:
            shutil.copy(self.own / name, project.folder)
        write_settings(project.folder, {**settings, "cache__root": "cache"})
        done = project.types("submit", "--stage", "train", "--executor", "local", "--follow")
        must(done.code == 0, "a twin could not be trained", lambda: done.said)
        found = model(project)
        twin = Twin(found.name, bits(found))
        shutil.rmtree(folder)
        return twin


def agrees(name: str, weights: Mapping[str, bytes], twins: list[Twin]) -> str:
    """Return what is wrong with a model that must equal the one of these twins that has its name; empty if nothing."""
    known = {twin.name: twin.weights for twin in twins}
    if name not in known:
        return f"{name} is the model of none of the data that its run can have seen: {sorted(known)}"
    wrong = sorted(tensor for tensor in {*weights, *known[name]} if weights.get(tensor) != known[name].get(tensor))
    return f"{name} has other bits than its twin in {wrong}" if wrong else ""


def digest_of(settings: Mapping[str, Any], files: Files) -> str:
    """Return a name for a configuration and a state of the data."""
    told = [json.dumps(dict(settings), sort_keys=True).encode()]
    told += [name.encode() + b"\0" + hashlib.sha256(content).digest() for name, content in sorted(files.items())]
    return hashlib.sha256(b"\n".join(told)).hexdigest()[:12]


def write_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write the configuration of a project; __ stands for the dot."""
    (folder / "pipeline.yaml").write_text(json.dumps(nested(settings), indent=1))
