"""What a data set was found to need, kept so that what is missing of it can be told in an instant.

Whoever judges a stage meets every key anyway. Nothing relies on it: it is as old as that judgement.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.store.wanted import Wanted, recall, remember

if TYPE_CHECKING:
    from typing import Any

    from pipeline.config.schema import Config
    from pipeline.runs.project import Project
    from pipeline.store.cache import Cache

KINDS = ("scan", "embed", "graph")


def keep(project: Project, kind: str, keys: bytearray) -> None:
    """Write down the keys of the records of a kind that the data set needs; that it cannot be is no failure."""
    remember(project.cache.disk, project.cache.root, kind, _asked(project.config, kind), keys)


def known(cache: Cache, config: Config, kind: str) -> Wanted | None:
    """Return what the data set of a configuration was last found to need of a kind; None where nobody has looked."""
    return recall(cache.disk, cache.root, kind, _asked(config, kind))


def _asked(config: Config, kind: str) -> dict[str, Any]:
    """Return what decides which records are needed, as the configuration says it."""
    asked: dict[str, Any] = {
        "data": config.data.model_dump(mode="json", exclude={"max_rejected_fraction", "on_leak"}),
        "structures": config.structures.model_dump(mode="json"),
    }
    if kind == "embed":
        asked["embed"] = config.embed.model_dump(mode="json", exclude={"batch"})
        asked["gpus"] = config.cluster.embed.gpus > 0
    if kind == "graph":
        asked["graph"] = config.graph.model_dump(mode="json")
    return asked
