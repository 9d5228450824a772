"""Turns a configuration into data sources, recipes, stores and executors."""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial, update_wrapper
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, Generic, ParamSpec, TypeVar

from pipeline.cluster.local import LocalExecutor
from pipeline.cluster.machine import Machine
from pipeline.command_line import quoted
from pipeline.config.schema_data import MAIN
from pipeline.device.kinds import CARD, CPU
from pipeline.encoder import embed_texts as embed
from pipeline.encoder.checkpoint_files import ESM1B, FAMILIES
from pipeline.encoder.embedding_recipe import BF16_PRODUCTS
from pipeline.encoder.embedding_recipe import EmbeddingRecipe as EmbeddingRecipe
from pipeline.encoder.engine.token_batches import EngineSettings
from pipeline.encoder.weights import CheckpointFacts, find_checkpoint, identify
from pipeline.errors import ConfigError
from pipeline.graphs.item_graph import GraphRecipe as GraphRecipe
from pipeline.memory.history import Profiles
from pipeline.project.container_image import image_of
from pipeline.project.restriction import EVERYTHING, Only
from pipeline.project.run_code import load_encoder
from pipeline.project.user_code import encoder_code
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.store import WholeRecords
from pipeline.structures.inventory import ScanRecipe
from pipeline.structures.parsing.read_structure import FileReading
from pipeline.structures.policy import Policy
from pipeline.structures.scan_items import ScanShelves
from pipeline.structures.sources.item_ids import SourceSpec
from pipeline.training.checkpoints.checkpoint import read_export
from pipeline.training.prepared import ModelFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Mapping
    from typing import Any

    from pipeline.cluster.job_spec import Executor
    from pipeline.config.schema import Config
    from pipeline.config.schema_cluster import Resources, SlotsSection
    from pipeline.config.schema_parts import Section
    from pipeline.encoder.engine.encoder_source import EncoderSource
    from pipeline.store.store import Store


log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


def _chosen(kind: type[T], section: Section, **more: Any) -> T:
    """Return a value whose fields are the settings of the same names in a section, and `more`."""
    names = {entry.name for entry in fields(kind)} - more.keys()  # type: ignore[arg-type]  # a dataclass
    return kind(**{name: getattr(section, name) for name in names}, **more)


def source_spec(config: Config) -> SourceSpec:
    """Return the specification of the data set."""
    return _chosen(SourceSpec, config.data)


def scan_recipe_of(config: Config) -> ScanRecipe:
    """Return the recipe by which structures are scanned."""
    chosen = config.structures
    reads = {"seqres": chosen.sequence == "seqres", "b_factors": chosen.plddt != "none"}
    return ScanRecipe(
        reading=_chosen(FileReading, chosen, **reads),
        policy=_chosen(Policy, chosen),
        max_residues=chosen.max_residues,
        max_file_bytes=chosen.max_file_bytes,
        ligand=config.data.ligand,
    )


@dataclass(frozen=True, slots=True)
class Encoding:
    """The section `embed`: weights, recipe, engine settings and stores."""

    weights: CheckpointFacts
    recipe: EmbeddingRecipe
    settings: EngineSettings
    shelves: embed.EmbedShelves
    verify_bytes: int
    source: Callable[[], EncoderSource]  # loads the encoder
    named: Container[bytes] = ()  # records that a damage list names

    def verifier(self) -> embed.EmbeddingVerifier:
        """Return the verified look-up of embeddings by sequence."""
        records = WholeRecords(self.shelves.embeddings, self.verify_bytes, self.named)
        return embed.EmbeddingVerifier(self.recipe, records)

    @classmethod
    def open(
        cls,
        config: Config,
        cache: CacheFolder,
        *,
        remember: bool,
        named: Container[bytes] = (),
        beside: Path | None = None,
    ) -> Encoding:
        """Find the weights or the user's encoder, and resolve the section."""
        if config.embed.is_own:
            weights, source = encoder_code(config, beside).facts, partial(own_source, config, beside)
        else:
            weights = identify(_checkpoint(config, beside), cache.kind("weights"), remember=remember)
            source = partial(esm_source, weights)
            refuse_other_family(config.embed.encoder, weights)
        shelves = embed.EmbedShelves(
            embeddings=cache.kind("embed"),
            weights=cache.kind("weights"),
            parity=cache.kind("parity"),
            shard_bytes=config.cache.shard_bytes,
        )
        recipe, settings = embedding_recipe(config, weights), settings_of(config)
        return cls(weights, recipe, settings, shelves, config.cache.verify_bytes, source, named)


def _checkpoint(config: Config, beside: Path | None) -> Path:
    """Return the encoder's checkpoint; if an exported model lacks it, the error names the right one."""
    try:
        return find_checkpoint(config.embed.weights)
    except ConfigError as error:
        if beside is None or not ModelFolder(beside).export.is_file():
            raise
        card = read_export(beside).data
        width = f", of {card['options']['embedding_dim']} numbers" if "embedding_dim" in card["options"] else ""
        takes = ", ".join(f"{name} {value}" for name, value in card["encoder"].items())
        what = f"{error.what}\n  the model takes {takes}{width}"
        path = quoted(config.embed.weights)
        remedy = f"pipeline weights import FILE --out {path}   (pipeline weights check FILE shows its digest)"
        raise ConfigError(what, where=error.where, remedy=remedy) from error


@dataclass(frozen=True, slots=True)
class Graphs:
    """The section `graph`: the recipe and the store of graphs."""

    recipe: GraphRecipe
    store: Store
    verify_bytes: int
    named: Container[bytes] = ()  # records that a damage list names

    def verifier(self, *, limited: bool) -> WholeRecords:
        """Return the verified look-up of graphs; `limited` verifies at most `cache.verify_bytes`."""
        return WholeRecords(self.store, self.verify_bytes if limited else sys.maxsize, self.named)


def graph_recipe(config: Config) -> GraphRecipe:
    """Return the recipe by which structures become graphs."""
    atom = config.graph.atom
    return _chosen(GraphRecipe, config.graph, atom_radius=atom.radius, hops=atom.hops, hydrogens=atom.hydrogens)


def embedding_recipe(config: Config, weights: CheckpointFacts) -> EmbeddingRecipe:
    """Return the recipe by which sequences become embeddings, with every `auto` resolved."""
    chosen = config.embed
    precision: str = chosen.precision
    if precision == "auto":
        precision = "fp16" if device_of(config) != CPU else "fp32"
    storage = precision if chosen.storage == "auto" else chosen.storage
    if precision == "bf16" and device_of(config) == CPU and not chosen.is_own:
        precision = BF16_PRODUCTS
    layer = weights.layers if chosen.layer == "auto" else int(chosen.layer)
    if layer > weights.layers:
        what = f"embed.layer is {layer}, but these weights have {weights.layers} layers"
        raise ConfigError(what, where=weights.path, remedy=f"--set embed.layer={weights.layers}, or auto")
    return EmbeddingRecipe(
        weights=weights.digest,
        layer=layer,
        context=chosen.context,
        precision=precision,
        storage=storage,
        on_oom=chosen.on_oom,
        half_fallback=chosen.half_fallback == "fp32",
        letters=weights.letters,
        cls=chosen.cls,
        **_long_sequences(config, weights),
    )


def _long_sequences(config: Config, weights: CheckpointFacts) -> dict[str, Any]:
    """Return the part of a recipe about long sequences.

    By default, sequences too long for the encoder are cut into windows.
    """
    long, longest = config.embed.long, weights.longest
    if not longest:
        return {"long": long.policy, "length": long.length, "overlap": long.overlap}
    if longest < long.length != type(long).model_fields["length"].default:
        what = f"embed.long.length is {long.length:,}, and {weights.name} takes {longest:,} residues at once"
        raise ConfigError(what, where="embed.long.length", remedy=f"--set embed.long.length={longest}")
    length = min(long.length, longest)
    policy = {"long": "windows", "whole": longest} if long.policy == "full" else {"long": long.policy}
    return policy | {"length": length, "overlap": min(long.overlap, length // 2)}


def refuse_other_family(encoder: str, weights: CheckpointFacts) -> None:
    """Refuse weights of another family than the configuration names."""
    if encoder != "auto" and {"esm1v": ESM1B}.get(encoder, encoder) != weights.family:
        what = f"embed.encoder is {encoder}, and these weights are {FAMILIES[weights.family]}"
        raise ConfigError(what, where=weights.path, remedy="--set embed.encoder=auto, or choose other weights")


def esm_source(weights: CheckpointFacts) -> EncoderSource:
    """Return the checkpoint, read."""
    from pipeline.encoder.engine.encoder_source import EsmSource

    return EsmSource.at(Path(weights.path))


def own_source(config: Config, beside: Path | None) -> EncoderSource:
    """Return the user's own encoder."""
    from pipeline.encoder.engine.encoder_source import OwnSource

    chosen = config.embed
    encoder = load_encoder(chosen.encoder, chosen.weights, chosen.options, beside=beside)
    return OwnSource(chosen.encoder, encoder, lambda: encoder_code(config, beside).facts.digest)


def device_of(config: Config) -> str:
    """Return the device that embedding is planned for."""
    if config.embed.device != "auto":
        return config.embed.device
    return CARD if config.cluster.embed.gpus else CPU


def settings_of(config: Config) -> EngineSettings:
    """Return the settings of embedding that change its speed but no result."""
    batch, resources = config.embed.batch, config.cluster.embed
    return EngineSettings(
        policy=batch.policy,
        cap=batch.cap,
        budget=batch.budget,
        device=device_of(config),
        threads=max(1, resources.cpus // max(1, resources.gpus)),
    )


def asked_bytes(resources: Resources, planned_bytes: int) -> int:
    """Return the memory of a task: configured (for the task or each GPU), else planned."""
    if resources.mem_per_gpu is not None:
        return int(resources.mem_per_gpu) * resources.gpus
    return planned_bytes if resources.mem == "auto" else int(resources.mem)


@dataclass(frozen=True)
class Project:
    """A configuration with its recipes, cache and executor, for the stages."""

    config: Config
    source: SourceSpec
    recipe: ScanRecipe
    shelves: ScanShelves
    cache: CacheFolder
    remember: bool  # whether look-ups may be recorded in the cache
    beside: Path | None = None  # folder of the user's own modules
    only: Only = EVERYTHING  # records that a run may make
    executor: Executor | None = None  # the open executor, if any
    made_once: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        config: Config,
        *,
        remember: bool = True,
        beside: Path | None = None,
        strict: bool = False,
        only: Only = EVERYTHING,
        executor: Executor | None = None,
    ) -> Project:
        """Open the cache of a configuration; its folder is created with the first record.

        If a cache of `cache.under` is unusable: raise if `strict`, else skip it with a warning.
        """
        cache = CacheFolder.over(config.cache.root, config.cache.under)
        for error in cache.left_out:
            if strict:
                raise error
            log.warning("%s: %s: skipped", error.where, error.what)
        shelves = ScanShelves(cache.kind("scan"), cache.kind("files"), config.cache.shard_bytes)
        source, recipe = source_spec(config), scan_recipe_of(config)
        return cls(config, source, recipe, shelves, cache, remember, beside, only=only, executor=executor)

    @contextmanager
    def open_executor(self) -> Iterator[Executor]:
        """Yield the open executor, or open one for the block."""
        if self.executor is not None:
            yield self.executor
            return
        with open_executor(self.config) as executor:
            yield executor

    @cached_property
    def graphs(self) -> Graphs:
        verify_bytes, named = self.config.cache.verify_bytes, self.only.of("graph")
        return Graphs(graph_recipe(self.config), self.cache.kind("graph"), verify_bytes, named)

    @cached_property
    def encoding(self) -> Encoding:
        """The resolved section embed; its first use reads the weights."""
        named = self.only.of("embed")
        return Encoding.open(self.config, self.cache, remember=self.remember, named=named, beside=self.beside)

    @cached_property
    def encoders(self) -> Mapping[str, Project]:
        """Each encoder's project by name, as if that were the only encoder."""
        if not self.config.embed.also:
            return {MAIN: self}
        return {name: replace(self, config=self.config.of_encoder(name), made_once={}) for name in self.config.encoders}

    @property
    def encoders_read(self) -> list[Project]:
        """The projects of the encoders whose embeddings items carry, in order."""
        return [self.encoders[name] for name in self.config.encoders_read]


class once(Generic[P, T]):  # noqa: N801 - a decorator
    """Cache the results of a function in the project that is its first argument."""

    def __init__(self, make: Callable[Concatenate[Project, P], T]) -> None:
        self._make = make
        update_wrapper(self, make)

    def __call__(self, project: Project, /, *more: P.args, **named: P.kwargs) -> T:
        key = (self, *more, *named.items())
        if key not in project.made_once:
            project.made_once[key] = self._make(project, *more, **named)
        made: T = project.made_once[key]
        return made

    def known(self, project: Project, /, *more: P.args, **named: P.kwargs) -> T | None:
        """Return the cached value, or None."""
        return project.made_once.get((self, *more, *named.items()))


def local_machine(slots: SlotsSection) -> Machine:
    """Return the part of this machine that the configuration lets tasks use."""
    settings = {"cpus": slots.cpus, "gpus": slots.gpus, "mem_bytes": slots.mem}
    return Machine.detect(**{name: value for name, value in settings.items() if value != "auto"})


def stays(config: Config) -> bool:
    """Tell whether the supervisor is a process for the whole run, instead of a sequence of jobs (visits)."""
    return config.cluster.executor != "slurm" or config.cluster.supervisor.where == "login"


def open_executor(config: Config, poll_s: float | None = None) -> Executor:
    """Return the executor of a configuration; `poll_s` overrides the polling interval."""
    if config.cluster.executor == "slurm":
        from pipeline.cluster.slurm import SlurmExecutor

        return SlurmExecutor(config.cluster.slurm, poll_s=poll_s)
    if config.cluster.executor == "allocation":
        from pipeline.cluster.allocation import AllocationExecutor

        return AllocationExecutor(config.cluster.allocation, config.cluster.slots, config.cluster.runs / ".nodes")
    return LocalExecutor(local_machine(config.cluster.slots))


def profiles_of(config: Config) -> Profiles:
    """Return the history of measurements of earlier runs."""
    return Profiles(config.cluster.runs / ".profiles" / "tasks.jsonl")


def cluster_name(config: Config) -> str:
    """Return the name of the cluster, or `local`, under which measurements are kept; each image has its own."""
    name = config.cluster.slurm.name if config.cluster.executor == "slurm" else "local"
    image = image_of(config)
    return f"{name} in {image}" if image else name
