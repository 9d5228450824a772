"""What a project uses of a cache: by which recipes its records are made; and telling others of it."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from pipeline.errors import PipelineError
from pipeline.keys import recipe_tag
from pipeline.runs import embedding, graphing, scanning, workflow
from pipeline.runs.entering import is_reader
from pipeline.store.users import User, register, who_am_i
from pipeline.structures.inventory import plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path
    from typing import Any

    from pipeline.encoder.recipe import Recipe
    from pipeline.runs.project import Project

log = logging.getLogger(__name__)

RECIPE_KINDS = (scanning.NAME, embedding.NAME, graphing.NAME)  # of records whose keys begin with a recipe's tag
Recipes = dict[tuple[str, bytes], "Mapping[str, Any]"]  # kind and tag → the recipe


def recipes_of(project: Project, kinds: Iterable[str] = RECIPE_KINDS) -> Recipes:
    """Return every recipe by which records of some kinds are made that a project reads."""
    if is_reader(project.config):  # which makes no such records
        return {}
    of_kind: dict[str, Callable[[], list[Mapping[str, Any]]]] = {
        scanning.NAME: lambda: [plain(project.recipe)],
        embedding.NAME: lambda: list(embeddings(project.encoding.recipe)),
        graphing.NAME: lambda: [project.graphs.recipe.plain()],
    }
    return {(kind, recipe_tag(kind, recipe)): recipe for kind in kinds for recipe in of_kind[kind]()}


def embeddings(recipe: Recipe) -> Iterator[Mapping[str, Any]]:
    """Yield the recipe that is wanted, and those of what will do in its place, for short sequences and for long."""
    for residues in (1, recipe.length + 1):
        for variant in recipe.accepted(residues):
            yield recipe.plain(variant)


def tell(project: Project, stages: Iterable[str], file: Path | None) -> None:
    """Leave word in the cache that a configuration uses it, before anything relies on what is there."""
    config, tags, stages = project.config, set[tuple[str, bytes]](), list(stages)
    fills = any(workflow.stage(stage).kinds for stage in stages)
    by_reader = is_reader(config)
    wanted = set[str]() if by_reader else {name for stage in stages for name in workflow.up_to(stage, config)}
    for kind in RECIPE_KINDS:
        with suppress(PipelineError):  # what cannot be told is not used either: a script may do without weights
            tags |= recipes_of(project, [kind] if kind in wanted else ()).keys()
    if not tags and not by_reader:  # whose tables are kept for the runs that name them
        return
    user = user_of(config_name(file), str(config.cluster.runs.absolute()), tags)
    for cache in (project.cache, *project.cache.under):
        is_there = fills or cache.root.is_dir()  # what is not there, and stays so, has nothing to keep
        if is_there and not register(cache.disk, cache.root, user):
            what = "it cannot be written down that this project uses the cache: who cleans it does not know"
            log.warning("%s: %s", cache.root, what)


def user_of(config: str, runs: str, tags: Iterable[tuple[str, bytes]]) -> User:
    """Return a project as others are told of it."""
    return User(config, runs, frozenset((kind, tag.hex()) for kind, tag in tags), time.time(), who_am_i())


def config_name(file: Path | None) -> str:
    """Return the name of a configuration, wherever it is typed."""
    return str(file.absolute()) if file else ""
