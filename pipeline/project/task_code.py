"""What is known of the user's task without importing it: its files, and the digests of what they do.

A task that was loaded once is known by the bytes of its files and of this package from then on, so that nobody waits
for torch where nothing is left to do.
"""

from __future__ import annotations

import inspect
import json
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import ConfigError
from pipeline.files import read_json, write_whole
from pipeline.keys import recipe_key
from pipeline.project.run_code import PACKAGE, digest_of, files_from, load_task, package_digest, source_digest, sources
from pipeline.protocol import ReadsFiles, Samples

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeline.config.schema import Config
    from pipeline.config.schema_train import TrainSection

PLANS = ".plans"  # of the runs: what was found out once
_SEEN: dict[str, dict[str, Any]] = {}  # by this process, perhaps before there were runs


@dataclass(frozen=True, slots=True)
class TaskCode:
    """What the user's own code of a task is; the digests are empty where there is none."""

    trains: str  # the digest of what it does to weights
    tells: str  # and of what it tells of a model
    stands: str  # the digest of its bytes
    files: tuple[tuple[str, Path], ...]
    reads: tuple[Path, ...] = ()  # files besides its items whose content decides what it says
    samples: int = 1  # answers that it draws for an item where its model is applied
    asked: str = ""  # the digest of all that it follows from; empty where that is not known

    def remembered(self, runs: Path, what: Any, make: Callable[[], int]) -> int:
        """Return a number that follows from the task and `what`, as it was found out before, or as `make` finds it."""
        if not self.asked:
            return make()
        path = runs / PLANS / f"{recipe_key('of task', {'task': self.asked, 'what': what}).hex()}.json"
        known = read_json(path)
        if not isinstance(known, int):
            known = make()
            keep(path, known)
        return known


def task_code(config: Config, beside: Path | None) -> TaskCode:
    """Return what is known of a configuration's task, which is loaded unless it was with these very files."""
    train, runs = config.train, config.cluster.runs
    named = named_files(train.task or "", beside)
    asked = _asked(config, named) if named is not None else ""
    path = runs / PLANS / f"{asked}.json"
    if asked and named is not None and (asked in _SEEN or not is_imported(train.task or "")):
        with suppress(KeyError, TypeError):  # of another version
            facts = _SEEN.get(asked) or read_json(path) or {}
            files = tuple((name, named[name]) for name in facts["files"])
            reads = tuple(map(Path, facts["reads"]))
            code = TaskCode(facts["trains"], facts["tells"], facts["stands"], files, reads, facts["samples"], asked)
            if not path.exists():
                keep(path, facts)
            return code
    was_imported = is_imported(train.task or "")
    task = load_task(train.task, train.options, beside=beside)
    _check_stages(train, beside)
    files = tuple(sources(task))
    stands = digest_of(list(files)) if files else ""
    code = TaskCode(
        source_digest(task),
        source_digest(task, without=()),
        stands,
        files,
        reads=tuple(task.files_read()) if isinstance(task, ReadsFiles) else (),
        samples=task.rows_per_item if isinstance(task, Samples) else 1,
    )
    is_ours = PACKAGE in Path(inspect.getfile(type(task))).resolve().parents
    is_whole = bool(files or is_ours) and named is not None and dict(files).items() <= named.items()
    if was_imported or not asked or not is_whole or asked != _asked(config, named_files(train.task or "", beside)):
        return code  # it is of an installed package, of elsewhere, or it changed meanwhile
    plain = {"reads": list(map(str, code.reads)), "samples": code.samples, "files": list(dict(files))}
    _SEEN[asked] = {"trains": code.trains, "tells": code.tells, "stands": code.stands, **plain}
    keep(path, _SEEN[asked])
    return replace(code, asked=asked)


def _check_stages(train: TrainSection, beside: Path | None) -> None:
    """Raise where the task does not take the options of a stage of the curriculum."""
    for name, stage in train.stages.items():
        try:
            if stage.options:
                load_task(train.task, train.options | stage.options, beside=beside)
        except ConfigError as error:
            error.where = f"train.curriculum, {name}: {error.where}"
            raise


def is_imported(task: str) -> bool:
    """Tell whether a module is imported, which may be another than one finds now; one of ours is what it is."""
    top = task.partition(":")[0].partition(".")[0]
    return top != PACKAGE.name and top in sys.modules


def named_files(task: str, beside: Path | None) -> dict[str, Path] | None:
    """Return the files that a task's module would be imported from, and of all that these import beside them."""
    module = task.partition(":")[0]
    top = module.partition(".")[0]
    if top == PACKAGE.name:
        return {}
    first = [str(beside)] if beside is not None and str(beside) not in sys.path else []
    found = PathFinder.find_spec(top, [*first, *sys.path, str(Path.cwd())]) if top else None
    places = [] if found is None else list(found.submodule_search_locations or filter(None, [found.origin]))
    if len(places) != 1 or "site-packages" in Path(places[0]).parts:
        return None  # installed packages may change in ways that their modules do not show
    return files_from(Path(places[0]).resolve().parent, module) or None


def _asked(config: Config, files: dict[str, Path] | None) -> str:
    """Return the digest of all that a task follows from."""
    stands = digest_of(sorted((files or {}).items()))
    stages = [stage.options for stage in config.train.curriculum if stage.options]
    options = json.dumps([config.train.options, *stages], sort_keys=True, default=str)
    facts = {"task": config.train.task, "options": options, "files": stands, "package": package_digest()}
    return recipe_key("task", facts | {"python": sys.version}).hex()


def keep(path: Path, found: Any) -> None:
    """Write down what was found out, where there are runs at all."""
    if path.parents[1].is_dir():
        with suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            write_whole(path, json.dumps(found))
