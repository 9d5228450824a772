"""The user's own encoder: what is known of it without importing it, and how it is loaded.

Like a task, one that was loaded once is known by the bytes of its files, of this package and of its weights from then
on, so that nobody waits for torch where nothing is left to do.
"""

from __future__ import annotations

import hashlib
import json
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.encoder.checkpoints.weights import CheckpointFacts, sha256_of
from pipeline.encoder.embedding_recipe import LETTERS
from pipeline.errors import ConfigError
from pipeline.files import read_json
from pipeline.keys import is_settled, recipe_key
from pipeline.project.run_code import (
    PACKAGE,
    digest_of,
    load_encoder,
    package_digest,
    source_digest,
    sources,
    takes,
)
from pipeline.project.task_code import PLANS, is_imported, keep, named_files
from pipeline.protocol import ReadsFiles, has_cls

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.config.schema import Config
    from pipeline.protocol import Encoder

OWN = "own"  # the family of what a class encodes
_MOST = {"width": 1_000_000, "layers": 10_000, "longest": 1_000_000_000}  # beyond them a number is a mistake
_LEAST = {"width": 1, "layers": 1, "longest": 0}


@dataclass(frozen=True, slots=True)
class EncoderCode:
    """What a class that encodes is, its weights' files included."""

    facts: CheckpointFacts
    files: tuple[tuple[str, Path], ...]  # the user's own code


def encoder_code(config: Config, beside: Path | None) -> EncoderCode:
    """Return what is known of a configuration's own encoder, which is loaded unless it was with these very files."""
    embed = config.embed
    named, states = named_files(embed.encoder, beside), _states(embed.weights)
    asked = _asked(config, named, states)
    path = config.cluster.runs / PLANS / f"{asked}.json"
    was_imported = is_imported(embed.encoder)  # perhaps from other bytes than those that one finds now
    if named is not None and not was_imported:
        with suppress(KeyError, TypeError):  # of another version
            known = read_json(path) or {}
            files = tuple((name, named[name]) for name in known["files"])
            return EncoderCode(CheckpointFacts.from_json(known["facts"]), files)
    encoder = load_encoder(embed.encoder, embed.weights, embed.options, beside=beside)
    files = tuple(sources(encoder))
    code = EncoderCode(_facts(config, encoder, states), files)
    read = (*states, *_named_states(config))
    is_settled_all = all(is_settled(mtime_ns, ctime_ns) for _, _, mtime_ns, ctime_ns in read)
    is_whole = named is not None and dict(files).items() <= named.items()
    if is_settled_all and is_whole and not was_imported and asked == _asked(config, named, states):
        keep(path, {"facts": code.facts.to_json(), "files": list(dict(files))})
    return code


def _facts(config: Config, encoder: Encoder, states: list[tuple[str, int, int, int]]) -> CheckpointFacts:
    """Return the facts about an encoder as about any checkpoint; refuse impossible ones."""
    embed = config.embed
    name, weights = embed.encoder, embed.weights
    if embed.cls and not has_cls(encoder):
        what = f"{name} has no mark before a sequence whose row could be kept"
        remedy = "--pool mean (or max) for one row of each chain, and embed.cls: false"
        raise ConfigError(what, where="embed.cls", remedy=remedy)
    module, _, own = name.partition(":")
    is_weighted = takes(getattr(sys.modules[module], own), "weights")
    if is_weighted and not states:
        what = f"{name} takes weights, and there are none at this path"
        raise ConfigError(what, where=f"embed.weights: {weights}", remedy="--set embed.weights=FILE_OR_FOLDER")
    width, layers, longest = (_number(encoder, name, key) for key in ("width", "layers", "longest"))
    letters = _letters(encoder, name)
    made_of = {
        "encoder": name,
        "code": source_digest(encoder, without=()),
        "version": [getattr(encoder, "version", 0), _distribution(encoder)],
        "options": embed.options,
        "weights": [(file.name, sha256_of(file)) for file in _files(weights)] if is_weighted else [],
        "is": [width, layers, longest, letters],
    }
    if read := _read(encoder):
        made_of["reads"] = [(file.name, sha256_of(file)) for file in read]
    digest = hashlib.blake2b(json.dumps(made_of, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()
    size = sum(size for _, size, _, _ in states) if is_weighted else 0
    return CheckpointFacts(
        name, OWN, str(weights) if is_weighted else name, digest, layers, width, 1, "fp32", size, OWN, longest, letters
    )


def _read(encoder: Encoder) -> list[Path]:
    """Return the files that its options name; refuse one that is not there."""
    files = list(encoder.files_read()) if isinstance(encoder, ReadsFiles) else []
    for file in files:
        if not file.is_file():
            raise ConfigError("there is no such file", where=f"embed.options: {file}", remedy="name one that is there")
    return files


def _number(encoder: Encoder, name: str, key: str) -> int:
    """Return a whole number that an encoder says of itself."""
    value = getattr(encoder, key, None)
    if type(value) is not int or not _LEAST[key] <= value <= _MOST[key]:
        what = f"{key} of {name} is {value!r}; a whole number from {_LEAST[key]} on is wanted"
        raise ConfigError(what, where="embed.encoder", remedy="what an encoder must have: pipeline/protocol.py")
    return value


def _letters(encoder: Encoder, name: str) -> str:
    """Return the letters that an encoder reads, in order."""
    letters = getattr(encoder, "letters", None)
    if not isinstance(letters, str) or not letters or not set(letters) <= set(LETTERS):
        what = f"letters of {name} is {letters!r}; some of {LETTERS} are wanted"
        raise ConfigError(what, where="embed.encoder", remedy="what an encoder must have: pipeline/protocol.py")
    return "".join(sorted(set(letters)))


def _distribution(encoder: Encoder) -> str:
    """Return the version of the installed package that an encoder is of; empty where it is of none, or ours."""
    top = type(encoder).__module__.partition(".")[0]
    with suppress(metadata.PackageNotFoundError):
        return "" if top == PACKAGE.name else metadata.version(top)
    return ""


def _asked(config: Config, files: Mapping[str, Path] | None, states: list[tuple[str, int, int, int]]) -> str:
    """Return the digest of all that the facts follow from."""
    facts: dict[str, Any] = {
        "read": _named_states(config),
        "encoder": config.embed.encoder,
        "cls": config.embed.cls,
        "options": json.dumps(config.embed.options, sort_keys=True, default=str),
        "files": digest_of(sorted((files or {}).items())),
        "weights": states,
        "package": package_digest(),
        "python": sys.version,
    }
    return recipe_key("encoder", facts).hex()


def _named_states(config: Config) -> list[tuple[str, int, int, int]]:
    """Return the same of the files that options name, as far as one can tell before the encoder is asked."""
    named = [Path(value) for value in config.embed.options.values() if isinstance(value, str)]
    return [state for path in named if path.is_absolute() for state in _states(path)]


def _states(weights: Path) -> list[tuple[str, int, int, int]]:
    """Return the path, size and times of each file of the weights; any write changes one of them."""
    states = [(path, path.stat()) for path in _files(weights)]
    return [(str(path.absolute()), state.st_size, state.st_mtime_ns, state.st_ctime_ns) for path, state in states]


def _files(weights: Path) -> list[Path]:
    """Return the files of the weights: the one, or all in a folder that are not hidden; none where there are none."""
    if weights.is_dir():
        return sorted(path for path in weights.iterdir() if path.is_file() and not path.name.startswith("."))
    return [weights] if weights.is_file() else []
