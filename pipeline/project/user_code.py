"""Facts about the user's task and encoder, and digests of their code, without importing them again.

Facts are remembered under the bytes of their files, of this package and, for an encoder, of its weights. So a run with
nothing to do imports no torch.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.machinery import PathFinder
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.codec import memo, recall, remember
from pipeline.encoder.embedding_recipe import LETTERS
from pipeline.encoder.engine import hugging_face
from pipeline.encoder.weights import CheckpointFacts, sha256_of
from pipeline.errors import ConfigError
from pipeline.files import FileState, state_of
from pipeline.keys import is_settled, recipe_key
from pipeline.project.run_code import (
    PACKAGE,
    digest_of,
    files_from,
    load_encoder,
    load_task,
    package_digest,
    source_digest,
    sources,
    takes,
)
from pipeline.protocol import ReadsFiles, Samples, has_cls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import ModuleType

    from pipeline.config.schema import Config
    from pipeline.config.schema_train import TrainSection
    from pipeline.protocol import Encoder

PLANS = ".plans"  # of the runs: remembered results
_SEEN: dict[str, TaskCode] = {}  # facts that this process found, perhaps before there were runs


def plans_folder(config: Config) -> Path:
    """Return the folder of remembered results."""
    return config.cluster.runs / PLANS


@dataclass(frozen=True, slots=True)
class TaskCode:
    """Facts about a task's code; digests are empty without user code."""

    weights_digest: str  # digest of the code that can change weights
    outputs_digest: str  # digest of that code and of the methods that evaluate a model
    files: tuple[tuple[str, Path], ...]
    reads: tuple[Path, ...] = ()  # files, besides its items, whose content decides its results
    samples: int = 1  # answers that it draws for an item in evaluations and predictions
    listed: str = ""  # digest of the names around the files that it reads; empty: it reads none
    asked: str = ""  # digest of everything that these facts follow from; empty if unknown

    def remembered(self, config: Config, what: Any, make: Callable[[], int]) -> int:
        """Return the remembered number for this task and `what`, or make and remember it."""
        if not self.asked:
            return make()
        return memo(plans_folder(config), "of task", {"task": self.asked, "what": what}, make, int)


def task_code(config: Config, beside: Path | None) -> TaskCode:
    """Return the facts about the configured task; load it unless its files are unchanged."""
    train, folder = config.train, plans_folder(config)
    named, was_imported = named_files(train.task or "", beside), is_imported(train.task or "")
    if named is None:
        return _loaded_task(train, beside)
    asked = _asked_of_task(config, named)
    kept = recall(folder, "task", {"of": asked}, TaskCode)
    known = _SEEN.get(asked, None if was_imported else kept)
    if known and known.listed == (known.listed and _names_around(known.reads, train)):  # it still reads the same files
        if kept is None:
            remember(folder, "task", {"of": asked}, known)
        return replace(known, files=tuple((name, named[name]) for name, _ in known.files))
    code = _loaded_task(train, beside)
    is_ours = (train.task or "").startswith(f"{PACKAGE.name}.")
    is_whole = bool(code.files or is_ours) and dict(code.files).items() <= named.items()
    if was_imported or not is_whole or asked != _asked_of_task(config, named_files(train.task or "", beside)):
        return code  # from an installed package or elsewhere, or changed meanwhile
    _SEEN[asked] = replace(code, asked=asked)
    return remember(folder, "task", {"of": asked}, _SEEN[asked])


def _loaded_task(train: TrainSection, beside: Path | None) -> TaskCode:
    """Load a task and find its facts."""
    task = load_task(train.task, train.options, beside=beside)
    _check_stages(train, beside)
    reads = tuple(task.files_read()) if isinstance(task, ReadsFiles) else ()
    return TaskCode(
        weights_digest=source_digest(task),
        outputs_digest=source_digest(task, without=()),
        files=tuple(sources(task)),
        reads=reads,
        samples=task.rows_per_item if isinstance(task, Samples) else 1,
        listed=_names_around(reads, train) if isinstance(task, ReadsFiles) else "",
    )


def _names_around(reads: Iterable[Path], train: TrainSection) -> str:
    """Return a digest of the names in all folders in which a task may have looked for files."""
    options = chain(train.options.values(), *(stage.options.values() for stage in train.curriculum))
    named = [Path(value) for value in options if isinstance(value, str) and os.sep in value]
    names = dict[str, list[str]]()
    for folder in sorted({*named, *(path.parent for path in (*named, *reads))}):
        with suppress(OSError):  # a file, a missing folder, or no permission
            names[str(folder)] = sorted(path.name for path in folder.iterdir())
    return recipe_key("names around", names).hex()


def _check_stages(train: TrainSection, beside: Path | None) -> None:
    """Raise if the task does not take the options of a phase of the curriculum."""
    for name, stage in train.stages.items():
        try:
            if stage.options:
                load_task(train.task, train.options | stage.options, beside=beside)
        except ConfigError as error:
            error.where = f"train.curriculum, {name}: {error.where}"
            raise


def is_imported(task: str) -> bool:
    """Tell whether a user's module is imported: its file may have changed since."""
    top = task.partition(":")[0].partition(".")[0]
    return top != PACKAGE.name and top in sys.modules


def named_files(task: str, beside: Path | None) -> dict[str, Path] | None:
    """Return the files that a task's module would be imported from, with their imports from the same root."""
    module = task.partition(":")[0]
    top = module.partition(".")[0]
    if top == PACKAGE.name:
        return {}
    first = [str(beside)] if beside is not None and str(beside) not in sys.path else []
    found = PathFinder.find_spec(top, [*first, *sys.path, str(Path.cwd())]) if top else None
    places = [] if found is None else list(found.submodule_search_locations or filter(None, [found.origin]))
    if len(places) != 1 or "site-packages" in Path(places[0]).parts:
        return None  # installed packages may change without a change of these files
    return files_from(Path(places[0]).resolve().parent, module) or None


def _asked_of_task(config: Config, files: dict[str, Path] | None) -> str:
    """Return the digest of all that a task follows from."""
    stands = digest_of(sorted((files or {}).items()))
    stages = [stage.options for stage in config.train.curriculum if stage.options]
    options = json.dumps([config.train.options, *stages], sort_keys=True, default=str)
    facts = {"task": config.train.task, "options": options, "files": stands, "package": package_digest()}
    return recipe_key("task", facts | {"python": sys.version}).hex()


OWN = "own"  # the family of encoders that are classes
_MOST = {"width": 1_000_000, "layers": 10_000, "longest": 1_000_000_000}  # a larger number is a mistake
_LEAST = {"width": 1, "layers": 1, "longest": 0}


@dataclass(frozen=True, slots=True)
class EncoderCode:
    """Facts about an encoder class and its weights' files."""

    facts: CheckpointFacts
    files: tuple[tuple[str, Path], ...]  # the user's own code
    reads: tuple[FileState, ...]  # files that its options name


def encoder_code(config: Config, beside: Path | None) -> EncoderCode:
    """Return the facts about the configured encoder class; load it unless its files are unchanged."""
    embed, folder = config.embed, plans_folder(config)
    named, states = named_files(embed.encoder, beside), _states(embed.weights)
    asked = _asked_of_encoder(config, named, states)
    was_imported = is_imported(embed.encoder)  # perhaps from older bytes
    if named is not None and not was_imported:
        known = recall(folder, "encoder", asked, EncoderCode)
        if known and _states_of(Path(path) for path, *_ in known.reads) == list(known.reads):
            return replace(known, files=tuple((name, named[name]) for name, _ in known.files))
    encoder = load_encoder(embed.encoder, embed.weights, embed.options, beside=beside)
    reads = _states_of(map(Path.absolute, _read(encoder)))
    code = EncoderCode(_facts(config, encoder, states), tuple(sources(encoder)), tuple(reads))
    read = (*states, *_named_states(config), *reads)
    is_settled_all = all(is_settled(mtime_ns, ctime_ns) for *_, mtime_ns, ctime_ns in read)
    is_whole = named is not None and dict(code.files).items() <= named.items()
    if is_settled_all and is_whole and not was_imported and asked == _asked_of_encoder(config, named, states):
        remember(folder, "encoder", asked, code)
    return code


def _facts(config: Config, encoder: Encoder, states: list[FileState]) -> CheckpointFacts:
    """Return the facts about an encoder as about any checkpoint; refuse impossible ones."""
    embed = config.embed
    name, weights = embed.encoder, embed.weights
    if embed.cls and not has_cls(encoder):
        what = f"{name} has no CLS token whose embedding could be kept"
        remedy = "--pool mean (or max) for one row of each chain, and embed.cls: false"
        raise ConfigError(what, where="embed.cls", remedy=remedy)
    module, _, own = name.partition(":")
    is_weighted = takes(getattr(sys.modules[module], own), "weights")
    if is_weighted and not states:
        what = f"{name} needs weights, and there are none at this path"
        raise ConfigError(what, where=f"embed.weights: {weights}", remedy="--set embed.weights=FILE_OR_FOLDER")
    width, layers, longest = (_number(encoder, name, key) for key in ("width", "layers", "longest"))
    letters = _letters(encoder, name)
    made_of = {
        "encoder": name,
        "code": source_digest(encoder, without=()),
        "version": [getattr(encoder, "version", 0), _distribution(encoder)],
        "options": embed.options,
        "weights": [(_name_in(weights, file), sha256_of(file)) for file in _files(weights)] if is_weighted else [],
        "is": [width, layers, longest, letters],
    }
    if isinstance(encoder, hugging_face.HuggingFace):  # their code makes the tokens and the rows
        made_of["library"] = hugging_face.library_version()
    if read := _read(encoder):
        made_of["reads"] = [(file.name, sha256_of(file)) for file in read]
    digest = hashlib.blake2b(json.dumps(made_of, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()
    size = sum(size for _, _, size, _, _ in states) if is_weighted else 0
    return CheckpointFacts(
        name, OWN, str(weights) if is_weighted else name, digest, layers, width, 1, "fp32", size, OWN, longest, letters
    )


def _read(encoder: Encoder) -> list[Path]:
    """Return the files that its options name; refuse one that is not there."""
    files = list(encoder.files_read()) if isinstance(encoder, ReadsFiles) else []
    for file in files:
        if not file.is_file():
            raise ConfigError("file not found", where=f"embed.options: {file}", remedy="correct the path")
    return files


def _number(encoder: Encoder, name: str, key: str) -> int:
    """Return a whole number that an encoder reports."""
    value = getattr(encoder, key, None)
    if type(value) is not int or not _LEAST[key] <= value <= _MOST[key]:
        what = f"{key} of {name} is {value!r}; it must be a whole number of at least {_LEAST[key]}"
        raise ConfigError(what, where="embed.encoder", remedy="an encoder's methods: python -m pydoc pipeline.protocol")
    return value


def _letters(encoder: Encoder, name: str) -> str:
    """Return the letters that an encoder reads, in order."""
    letters = getattr(encoder, "letters", None)
    if not isinstance(letters, str) or not letters or not set(letters) <= set(LETTERS):
        what = f"letters of {name} is {letters!r}; it must contain some of {LETTERS}"
        raise ConfigError(what, where="embed.encoder", remedy="an encoder's methods: python -m pydoc pipeline.protocol")
    return "".join(sorted(set(letters)))


def _distribution(encoder: Encoder) -> str:
    """Return the version of the installed package that has the encoder; empty for ours and local modules."""
    top = type(encoder).__module__.partition(".")[0]
    if top == PACKAGE.name:
        return ""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(top)
    if sources(encoder):
        return ""
    names = sorted(metadata.packages_distributions().get(top, ()))  # fair-esm is imported as esm
    return " ".join(f"{name} {metadata.version(name)}" for name in names) or _of_unnamed(sys.modules[top])


def _of_unnamed(package: ModuleType) -> str:
    """Return the digest of an installed package without a version."""
    folders = list(getattr(package, "__path__", ()))
    files = [path for folder in folders for path in sorted(Path(folder).rglob("*.py"))]
    return digest_of([(path.name, path) for path in files or [Path(inspect.getfile(package))]])


def _asked_of_encoder(config: Config, files: Mapping[str, Path] | None, states: list[FileState]) -> dict[str, Any]:
    """Return everything that the facts follow from."""
    return {
        "read": _named_states(config),
        "encoder": config.embed.encoder,
        "cls": config.embed.cls,
        "library": hugging_face.library_version(),
        "options": json.dumps(config.embed.options, sort_keys=True, default=str),
        "files": digest_of(sorted((files or {}).items())),
        "weights": states,
        "package": package_digest(),
        "python": sys.version,
    }


def _named_states(config: Config) -> list[FileState]:
    """Return the states of the files that options seem to name."""
    named = [Path(value) for value in config.embed.options.values() if isinstance(value, str)]
    return [state for path in named if path.is_absolute() for state in _states(path)]


def _states(weights: Path) -> list[FileState]:
    """Return the state of each file of the weights."""
    return _states_of(path.absolute() for path in _files(weights))


def _states_of(paths: Iterable[Path]) -> list[FileState]:
    """Return the states of files; None for a missing one."""
    return [state_of(path, path.stat()) for path in paths if path.is_file()]


def _files(weights: Path) -> list[Path]:
    """Return the files of the weights: a file, or all visible ones in a folder tree; empty if missing."""
    if weights.is_dir():
        below = sorted(path for path in weights.iterdir() if not path.name.startswith("."))
        return [file for path in below for file in _files(path)]
    return [weights] if weights.is_file() else []


def _name_in(weights: Path, file: Path) -> str:
    """Return the name of a file of the weights, within their folder if they are one."""
    return file.name if file == weights else file.relative_to(weights).as_posix()
