"""Loads a configuration from a file, the command line and defaults; reports all mistakes at once, with places."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from pipeline.command_line import Command
from pipeline.config import site_profiles
from pipeline.config.masking import without_secrets_in
from pipeline.config.schema import LEAVES, OTHERS, PATH_LISTS, PATHS, SECTIONS, Config, schema_key, value_at
from pipeline.config.schema_parts import CONFLICT
from pipeline.config.site_profiles import PRESET, SITE, anchored
from pipeline.config.yaml_document import MAX_BYTES, REMEDY, Document, Problem, WrittenValue, explain
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pydantic_core import ErrorDetails

    from pipeline.config.schema import KeyPath

ENVIRONMENT = "PIPELINE_CONFIG"
PLACES = (Path("pipeline.yaml"), Path("configs/pipeline.yaml"))
AFTER_THE_FILE = 1 << 30
INPUTS = (  # other folders are made on first use
    ("data", "path"), ("data", "structures_dir"), ("data", "splits"), ("train", "sampling", "table"),
)  # fmt: skip
UNDER = ("cache", "under")
IMAGE = ("cluster", "slurm", "container", "image")
NEW_RUN = Command.submit("all", then="   (starts a new run)")


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration, and the origin of each value."""

    config: Config
    path: Path | None  # None: the defaults alone
    origins: Mapping[str, str]  # "data.limit" → "default", "pipeline.yaml:12" or "--set"
    base_dir: Path  # base of relative paths in the file


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of `config show`."""

    key: str
    value: Any  # plain JSON data; sizes and times as people write them
    origin: str
    meaning: str


def find_config(explicit: Path | None) -> Path:
    """Return the file to read: the given one, $PIPELINE_CONFIG, or the one in the current folder."""
    if explicit is not None:
        return _present(explicit, "--config")
    if named := os.environ.get(ENVIRONMENT):
        return _present(Path(named), f"${ENVIRONMENT}")
    for place in PLACES:
        if place.is_file():
            return place
    problem = f"no configuration: neither {' nor '.join(map(str, PLACES))} exists here"
    remedy = "pipeline init   (writes one here; or pass --config FILE; pipeline demo DIR creates a whole project)"
    raise ConfigError(problem, where=str(Path.cwd()), remedy=remedy)


def is_configured(explicit: Path | None) -> bool:
    """Tell whether a configuration is named, or is in the current folder."""
    return explicit is not None or bool(os.environ.get(ENVIRONMENT)) or any(place.is_file() for place in PLACES)


def read_config(path: Path | None, sets: Sequence[str] = ()) -> LoadedConfig:
    """Read a file (None: the defaults) and apply `--set`; relative paths start from where they are written."""
    here = Path.cwd()
    base_dir = here if path is None else path.absolute().parent
    written = [] if path is None else [(Document(str(path)).read(_text(path)), base_dir)]
    written += [(_typed(words, nth), here) for nth, words in enumerate(sets)]
    problems: list[Problem] = []
    below = [*_profile(written, base_dir, problems), *_preset(written, base_dir)]
    entries = _defaults(base_dir, str(path or ""))
    for document, base in (*below, *written):
        _add(document, base, entries, problems)
    try:
        config = Config.model_validate_json(json.dumps(_nested(entries)), strict=True)
    except ValidationError as error:
        details = error.errors(include_url=False)
        if odd := _not_utf8(entries):
            raise _refusal([odd]) from error
        problems += [_problem(detail, entries) for detail in details if not _is_reported(detail, entries)]
        raise _refusal(problems) from error
    if problems:
        raise _refusal(problems)
    origins_written = {key: entry.origin for key, entry in entries.items() if entry.line}
    origins = {".".join(key): origins_written.get(key, "default") for key in LEAVES}
    return LoadedConfig(config, path, origins, base_dir)


def settings_shown(loaded: LoadedConfig) -> list[Setting]:
    """Return every key with its value (secrets masked) and origin."""
    plain = loaded.config.model_dump(mode="json")
    settings = []
    for key, info in LEAVES.items():
        name = ".".join(key)
        value = without_secrets_in(reduce(getitem, key, plain), name)
        settings.append(Setting(name, value, loaded.origins[name], info.description or ""))
    return settings


def missing_inputs(loaded: LoadedConfig) -> list[str]:
    """Return a line for each configured input that cannot be read here."""
    missing = []
    named = [(key, value_at(loaded.config, key)) for key in INPUTS]
    for key, path in (*named, *((UNDER, path) for path in loaded.config.cache.under)):
        name = ".".join(key)
        if path is not None and not os.access(path, os.R_OK):
            missing.append(f"{loaded.origins[name]}: {name}: {path} does not exist or is not readable")
    return missing


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of the file, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}


def dump_resolved(config: Config) -> str:
    """Return a configuration as JSON with all values."""
    return config.model_dump_json(indent=2) + "\n"


def with_settings(plain: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration (JSON data) with these settings, by full key."""
    changed: dict[str, Any] = json.loads(json.dumps(plain))
    for key, value in settings.items():
        *sections, last = key.split(".")
        place = changed
        for section in sections:
            inner = place.get(section)  # options may lack the section
            place[section] = place = inner if isinstance(inner, dict) else {}
        place[last] = value
    return changed


def read_resolved(path: Path) -> Config:
    """Read the frozen configuration of a run."""
    try:
        return from_resolved(path.read_bytes(), str(path))
    except OSError as error:
        problem = f"the run's frozen configuration cannot be read: {error.strerror}"
        raise ConfigError(problem, where=str(path), remedy=NEW_RUN) from error


def from_resolved(text: str | bytes, where: str = "") -> Config:
    """Read back what `dump_resolved` wrote."""
    try:
        return Config.model_validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        problem = f"this frozen configuration is from another version: {key}: {first['msg']}"
        raise ConfigError(problem, where=where, remedy=NEW_RUN) from error


def _present(path: Path, said_by: str) -> Path:
    """Return a readable configuration file, by its path or its folder."""
    readable = os.access(path, os.R_OK)
    found = next((path / place for place in PLACES if (path / place).is_file()), None) if path.is_dir() else path
    if not readable or found is None:
        problem = f"is a directory without {PLACES[0]}" if readable else "does not exist or is not readable"
        raise ConfigError(f"the configuration {path} {problem}", where=said_by, remedy="name an existing YAML file")
    return found


def _text(path: Path) -> str:
    """Return the text of a configuration file, which is small and UTF-8."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration: {error.strerror}", where=str(path), remedy=REMEDY) from error
    if len(data) > MAX_BYTES:
        problem = f"larger than {MAX_BYTES >> 10} KiB: not a configuration"
        raise ConfigError(problem, where=str(path), remedy="name the YAML file with --config FILE")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        problem = f"not UTF-8: byte 0x{data[error.start]:02x}"
        raise ConfigError(problem, where=f"{path}:{line}", remedy="save the file as UTF-8") from error


def _typed(words: str, nth: int) -> Document:
    """Read the words after --set; add mistakes to the problems of the document."""
    name, equals, value = words.partition("=")
    shown = name + equals + without_secrets_in(value, name.strip())
    document = Document("--set", shown, offset=AFTER_THE_FILE + nth)
    key = tuple(name.strip().split("."))
    try:
        if "=" not in words or not all(key):
            raise ConfigError("expected KEY=VALUE, such as data.limit=10", where=f"--set {shown}")
        return document.read(value, key)
    except ConfigError as error:
        document.problems.append(Problem(document.offset, f"{error.where}: {error.what}"))
        return document


def _profile(
    written: Sequence[tuple[Document, Path]], config_dir: Path, problems: list[Problem]
) -> list[tuple[Document, Path]]:
    """Return the profile that `cluster.site` names, if any; all other sources override it."""
    base_dir = next((base for document, base in reversed(written) if SITE in document.entries), config_dir)
    named = _named(written, SITE)
    if named is None or not isinstance(named.value, str) or not named.value:  # the schema checks it
        return []
    try:
        path = site_profiles.locate(named.value, base_dir, config_dir)
    except ValueError as error:
        problems.append(Problem(named.line, f"{named.place(SITE)}: {error}"))
        return []
    return [(site_profiles.read_site(path, _text(path)), path.parent)]


def _preset(written: Sequence[tuple[Document, Path]], config_dir: Path) -> list[tuple[Document, Path]]:
    """Return the settings of `train.preset`, if it names a preset."""
    named = _named(written, PRESET)
    preset = site_profiles.read_preset(named.value) if named is not None and isinstance(named.value, str) else None
    return [(preset, config_dir)] if preset else []


def _named(written: Sequence[tuple[Document, Path]], key: KeyPath) -> WrittenValue | None:
    """Return the value written at a key; later documents override earlier ones."""
    entries: dict[KeyPath, WrittenValue] = {}
    for document, _ in written:
        for other, entry in document.entries.items():
            _lay_over(entries, other, entry)
    return entries.get(key)


def _defaults(base: Path, name: str) -> dict[KeyPath, WrittenValue]:
    """Return the entries below everything written: empty sections, and default folders below `base`."""
    folders = {key: info.default for key, info in LEAVES.items() if isinstance(info.default, Path)}
    values: dict[KeyPath, Any] = {key: {} for key in SECTIONS}
    values |= {key: str(base / folder) for key, folder in folders.items()}
    return {key: WrittenValue(value, name, line=0) for key, value in values.items()}


def _add(document: Document, base: Path, entries: dict[KeyPath, WrittenValue], problems: list[Problem]) -> None:
    """Apply a document to the earlier entries; make its paths absolute."""
    problems += document.problems
    for key, entry in document.entries.items():
        value = entry.value
        try:
            if (schema_key(key) in PATHS and isinstance(value, str)) or _looks_like_path(key, value):
                value = anchored(value, base)
            elif key in PATH_LISTS and isinstance(value, list):
                value = [anchored(path, base) if isinstance(path, str) else path for path in value]
        except ValueError as error:
            problems.append(Problem(entry.line, f"{entry.place(key)}: {error}"))
        _lay_over(entries, key, replace(entry, value=value))


def _looks_like_path(key: KeyPath, value: Any) -> bool:
    """Recognize a path by its start in places without a type: options of a task, and the image."""
    may_be = key == IMAGE or (key[0] == "train" and "options" in key[:-1])
    return may_be and isinstance(value, str) and value.startswith(("./", "../", "~/"))


def _lay_over(entries: dict[KeyPath, WrittenValue], key: KeyPath, entry: WrittenValue) -> None:
    """Set an entry: a section is merged with a section, anything else replaces the earlier value."""
    both_sections = entry.value == {} and key in entries and entries[key].value == {}
    for other in [] if both_sections else list(entries):
        is_below = other[: len(key)] == key
        is_value_above = key[: len(other)] == other and entries[other].value != {}
        if is_below or is_value_above:
            del entries[other]
    entries[key] = entry


def _nested(entries: Mapping[KeyPath, WrittenValue]) -> dict[str, Any]:
    """Return the entries as nested mappings."""
    root: dict[str, Any] = {}
    for key in sorted(entries, key=len):
        parent = root
        for name in key[:-1]:
            parent = parent.setdefault(name, {})
        parent[key[-1]] = {} if entries[key].value == {} else entries[key].value
    return root


def _not_utf8(entries: Mapping[KeyPath, WrittenValue]) -> Problem | None:
    """Return the first value with bytes that are not UTF-8, such as in a path."""
    for key, entry in entries.items():
        try:
            json.dumps(entry.value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            value = ascii(without_secrets_in(entry.value, key[-1]))
            return Problem(entry.line, f"{entry.place(key)}: {value} is not UTF-8; rename the file or folder")
    return None


def _problem(detail: ErrorDetails, entries: Mapping[KeyPath, WrittenValue]) -> Problem:
    """Turn an error of pydantic into a message with place and reason."""
    names = tuple(part for part in detail["loc"] if isinstance(part, str))
    key = (*names, detail["ctx"]["key"]) if detail["type"] == CONFLICT else names
    entry = _nearest(entries, key)
    text = f"{entry.place(key)}: {site_profiles.explain_card(detail) or explain(key, detail)}"
    if entry.line >= AFTER_THE_FILE and text.endswith("put it in quotes"):  # the shell would remove them
        typed = "" if detail["input"] is None else without_secrets_in(detail["input"], key[-1])  # --set KEY=
        text += f""": --set '{".".join(key)}="{typed}"'"""
    return Problem(entry.line, text)


def _is_reported(detail: ErrorDetails, entries: Mapping[KeyPath, WrittenValue]) -> bool:
    """Tell whether a mistake was reported already: by the YAML parser, or for section embed."""
    key = tuple(part for part in detail["loc"] if isinstance(part, str))
    if detail["input"] is None and key in entries and entries[key].refused:
        return True
    return key[:2] == OTHERS and len(key) > 3 and not any(other[:4] == key[:4] for other in entries)


def _nearest(entries: Mapping[KeyPath, WrittenValue], key: KeyPath) -> WrittenValue:
    """Return the entry at a key, else the first below it, else the nearest section above it."""
    at = [key] if key in entries else [other for other in entries if other[: len(key)] == key]
    above = (key[:length] for length in range(len(key) - 1, 0, -1) if key[:length] in entries)
    return entries[at[0] if at else next(above)]


def _refusal(problems: list[Problem]) -> ConfigError:
    """Return one error for all problems, in the order of the file."""
    lines = [problem.text for problem in sorted(problems)]
    if len(lines) > 1:
        lines = [f"{len(lines)} problems in the configuration", *(f"  {line}" for line in lines)]
    return ConfigError("\n".join(lines), remedy=REMEDY)
