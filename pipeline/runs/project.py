"""What a configuration means to the rooms below: specifications, recipes and stores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.stages.scan import Shelves
from pipeline.store.cache import Cache
from pipeline.structures.inventory import Recipe
from pipeline.structures.policy import Policy
from pipeline.structures.read import Reading
from pipeline.structures.sources import SourceSpec

if TYPE_CHECKING:
    from pipeline.config.schema import Config


def source_spec(config: Config) -> SourceSpec:
    """Return where the items come from."""
    data = config.data
    return SourceSpec(
        source=data.source,
        path=data.path,
        pattern=data.pattern,
        structures_dir=data.structures_dir,
        splits=data.splits,
        state=data.state,
        receptor_chains=data.receptor_chains,
        ligand_chains=data.ligand_chains,
        partners=data.partners,
        limit=data.limit,
    )


def recipe_of(config: Config) -> Recipe:
    """Return how structures become inventories."""
    chosen = config.structures
    return Recipe(
        reading=Reading(chosen.model, chosen.chain_names, chosen.assembly, seqres=chosen.sequence == "seqres"),
        policy=Policy(chosen.altlocs, chosen.modified, chosen.require, chosen.incomplete),
        max_residues=chosen.max_residues,
        max_file_bytes=chosen.max_file_bytes,
    )


@dataclass(frozen=True, slots=True)
class Project:
    """A configuration, what it means, and its cache."""

    config: Config
    source: SourceSpec
    recipe: Recipe
    shelves: Shelves

    @classmethod
    def open(cls, config: Config) -> Project:
        """Open the cache of a configuration; it is made when something is first stored."""
        cache = Cache(config.cache.root)
        shelves = Shelves(cache.kind("scan"), cache.kind("files"), config.cache.shard_bytes)
        return cls(config, source_spec(config), recipe_of(config), shelves)
