"""The user's own task and encoder: what they are, without importing them, and digests of their code.

One that was loaded once is known from then on by the bytes of its files, of this package and, of an encoder, of its
weights, so that torch is not imported when nothing is left to do.
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
_SEEN: dict[str, TaskCode] = {}  # by this process, perhaps before there were runs


def plans_folder(config: Config) -> Path:
    """Return the folder of remembered results."""
    return config.cluster.runs / PLANS


@dataclass(frozen=True, slots=True)
class TaskCode:
    """What the user's own code of a task is; the digests are empty where there is none."""

    weights_digest: str  # the digest of what it does to weights
    outputs_digest: str  # and of what it outputs_digest of a model
    files: tuple[tuple[str, Path], ...]
    reads: tuple[Path, ...] = ()  # files besides its items whose content decides what it says
    samples: int = 1  # answers that it draws for an item where its model is applied
    listed: str = ""  # the digest of the names around the files that it reads; empty: it reads none
    asked: str = ""  # the digest of all that it follows from; empty where that is not known

    def remembered(self, config: Config, what: Any, make: Callable[[], int]) -> int:
        """Return a number that follows from the task and `what`, as it was found out before, or as `make` finds it."""
        if not self.asked:
            return make()
        return memo(plans_folder(config), "of task", {"task": self.asked, "what": what}, make, int)


def task_code(config: Config, beside: Path | None) -> TaskCode:
    """Return a configuration's task, which is loaded unless it was before with the same files."""
    train, folder = config.train, plans_folder(config)
    named, was_imported = named_files(train.task or "", beside), is_imported(train.task or "")
    if named is None:
        return _loaded_task(train, beside)
    asked = _asked_of_task(config, named)
    kept = recall(folder, "task", {"of": asked}, TaskCode)
    known = _SEEN.get(asked, None if was_imported else kept)
    if known and known.listed == (known.listed and _names_around(known.reads, train)):  # it reads no other files now
        if kept is None:
            remember(folder, "task", {"of": asked}, known)
        return replace(known, files=tuple((name, named[name]) for name, _ in known.files))
    code = _loaded_task(train, beside)
    is_ours = (train.task or "").startswith(f"{PACKAGE.name}.")
    is_whole = bool(code.files or is_ours) and dict(code.files).items() <= named.items()
    if was_imported or not is_whole or asked != _asked_of_task(config, named_files(train.task or "", beside)):
        return code  # it is of an installed package, of elsewhere, or it changed meanwhile
    _SEEN[asked] = replace(code, asked=asked)
    return remember(folder, "task", {"of": asked}, _SEEN[asked])


def _loaded_task(train: TrainSection, beside: Path | None) -> TaskCode:
    """Load a task and return what it is."""
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
    """Return a digest of the names in all folders that a task may have listed for the files that it reads."""
    options = chain(train.options.values(), *(stage.options.values() for stage in train.curriculum))
    named = [Path(value) for value in options if isinstance(value, str) and os.sep in value]
    names = dict[str, list[str]]()
    for folder in sorted({*named, *(path.parent for path in (*named, *reads))}):
        with suppress(OSError):  # it is a file, is not there, or this user may not look
            names[str(folder)] = sorted(path.name for path in folder.iterdir())
    return recipe_key("names around", names).hex()


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


def _asked_of_task(config: Config, files: dict[str, Path] | None) -> str:
    """Return the digest of all that a task follows from."""
    stands = digest_of(sorted((files or {}).items()))
    stages = [stage.options for stage in config.train.curriculum if stage.options]
    options = json.dumps([config.train.options, *stages], sort_keys=True, default=str)
    facts = {"task": config.train.task, "options": options, "files": stands, "package": package_digest()}
    return recipe_key("task", facts | {"python": sys.version}).hex()


OWN = "own"  # the family of what a class encodes
_MOST = {"width": 1_000_000, "layers": 10_000, "longest": 1_000_000_000}  # beyond them a number is a mistake
_LEAST = {"width": 1, "layers": 1, "longest": 0}


@dataclass(frozen=True, slots=True)
class EncoderCode:
    """What a class that encodes is, its weights' files included."""

    facts: CheckpointFacts
    files: tuple[tuple[str, Path], ...]  # the user's own code
    reads: tuple[FileState, ...]  # files that its options name


def encoder_code(config: Config, beside: Path | None) -> EncoderCode:
    """Return a configuration's own encoder, which is loaded unless it was before with the same files."""
    embed, folder = config.embed, plans_folder(config)
    named, states = named_files(embed.encoder, beside), _states(embed.weights)
    asked = _asked_of_encoder(config, named, states)
    was_imported = is_imported(embed.encoder)  # perhaps from other bytes than those that one finds now
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
    if isinstance(encoder, hugging_face.HuggingFace):  # their code makes the tokens, and the rows
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
    """Return a whole number that an encoder says of itself."""
    value = getattr(encoder, key, None)
    if type(value) is not int or not _LEAST[key] <= value <= _MOST[key]:
        what = f"{key} of {name} is {value!r}; it must be a whole number of at least {_LEAST[key]}"
        raise ConfigError(what, where="embed.encoder", remedy="an encoder's methods: pipeline/protocol.py")
    return value


def _letters(encoder: Encoder, name: str) -> str:
    """Return the letters that an encoder reads, in order."""
    letters = getattr(encoder, "letters", None)
    if not isinstance(letters, str) or not letters or not set(letters) <= set(LETTERS):
        what = f"letters of {name} is {letters!r}; it must contain some of {LETTERS}"
        raise ConfigError(what, where="embed.encoder", remedy="an encoder's methods: pipeline/protocol.py")
    return "".join(sorted(set(letters)))


def _distribution(encoder: Encoder) -> str:
    """Return the version of the installed package that an encoder is of; empty where it is of none, or ours."""
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
    """Return all that the facts follow from."""
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
    """Return the same of the files that options name, as far as one can tell before the encoder is asked."""
    named = [Path(value) for value in config.embed.options.values() if isinstance(value, str)]
    return [state for path in named if path.is_absolute() for state in _states(path)]


def _states(weights: Path) -> list[FileState]:
    """Return the state of each file of the weights."""
    return _states_of(path.absolute() for path in _files(weights))


def _states_of(paths: Iterable[Path]) -> list[FileState]:
    """Return the states of files; of one that is not there, none."""
    return [state_of(path, path.stat()) for path in paths if path.is_file()]


def _files(weights: Path) -> list[Path]:
    """Return the files of the weights: the one, or all below a folder that are not hidden; none where none is."""
    if weights.is_dir():
        below = sorted(path for path in weights.iterdir() if not path.name.startswith("."))
        return [file for path in below for file in _files(path)]
    return [weights] if weights.is_file() else []


def _name_in(weights: Path, file: Path) -> str:
    """Return the name of a file of the weights, of one in a folder its place there."""
    return file.name if file == weights else file.relative_to(weights).as_posix()
