"""The schema of the configuration: every setting with its type, default and description.

Long sections have their own files, `schema_*.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pipeline.config.schema_cluster import ClusterSection
from pipeline.config.schema_data import MAIN, DataSection, EmbedSection, GraphSection, StructuresSection
from pipeline.config.schema_parts import NodeFolder, Section, Size, SizeOrNone, setting
from pipeline.config.schema_train import TrainSection
from pipeline.device.kinds import CARD

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeline.config.schema_parts import Conflict

KeyPath: TypeAlias = tuple[str, ...]
OTHERS: KeyPath = ("embed", "also")


class CacheSection(Section):
    """Where results are stored."""

    root: Path = setting(Path("cache"), "Folder of the cache. Share it between runs.")
    under: tuple[Path, ...] = setting(
        (), "Further caches to read after this one, in this order. They are never written."
    )
    stage: NodeFolder = setting(
        None, "Folder on the node's disk to which training copies its records first. null: no copy."
    )
    shard_bytes: Size = setting(256 << 20, "Close a cache file at this size and start the next.")
    verify_bytes: SizeOrNone = setting(
        8 << 30, "Bytes of cached embeddings and graphs to verify at each submit. 0: none."
    )
    check: Literal["quick", "full", "semantic"] = setting(
        "full", "Depth of `submit validate`: file structure, every byte, or also a sample of rebuilt records."
    )
    sample: float = setting(0.02, "Share of the records to rebuild and compare, for check: semantic.", ge=0, le=1)
    visibility_s: float = setting(10.0, "Seconds to wait for files that another node has just written.", ge=0, le=3600)


class Config(Section):
    """All settings of a run."""

    data: DataSection
    structures: StructuresSection = StructuresSection()
    embed: EmbedSection = EmbedSection()
    graph: GraphSection = GraphSection()
    train: TrainSection = TrainSection()
    cache: CacheSection = CacheSection()
    cluster: ClusterSection = ClusterSection()

    def conflicts(self) -> Iterator[Conflict]:
        on_card = any(encoder.device == CARD for encoder in (self.embed, *self.embed.also.values()))
        if on_card and self.cluster.embed.gpus == 0:
            yield "embed", f"device is {CARD}, but cluster.embed.gpus is 0: request a GPU, or set device: auto"
        named, known = self.train.embeddings, [MAIN, *self.embed.also]
        if named != "auto" and self.data.source == "reader":
            yield "train", "embeddings names encoders, but items of a reader have no embeddings: set it to auto"
        if unknown := [name for name in named if name not in known] if named != "auto" else []:
            problem = f"embeddings: unknown encoder {unknown[0]}; choose from {', '.join(known)}"
            yield "train", f"{problem} (embed.also adds others)"
        if self.graph.cross_neighbours or self.graph.cross_radius is not None:
            remove = "remove cross_neighbours and cross_radius"
            if self.data.state == "unbound":
                yield "graph", f"cross edges need bound partners, but data.state is unbound: {remove}"
            if self.data.partners == "none":
                yield "graph", f"cross edges need two partners, but data.partners is none: {remove}"
        if self.structures.ligands == "keep" and self.graph.nodes != "atom":
            yield "structures", "ligands is keep, but only graphs with graph.nodes: atom hold them"
        if self.structures.pae != "none" and self.graph.nodes != "residue":
            yield "structures", f"pae is {self.structures.pae}, but only graphs with graph.nodes: residue hold it"

    def of_encoder(self, name: str) -> Config:
        """Return the configuration with only this encoder."""
        embed = self.embed if name == MAIN else self.embed.also[name]
        return self.model_copy(update={"embed": embed.model_copy(update={"also": {}})})

    @property
    def encoders(self) -> tuple[str, ...]:
        """The names of all encoders: that of section embed first, then the others in alphabetical order."""
        return (MAIN, *sorted(self.embed.also))

    @property
    def encoders_read(self) -> tuple[str, ...]:
        """The names of the encoders whose embeddings items carry, in their order."""
        return (MAIN,) if self.train.embeddings == "auto" else self.train.embeddings


def _walk(section: type[BaseModel], above: KeyPath = ()) -> dict[KeyPath, FieldInfo]:
    fields: dict[KeyPath, FieldInfo] = {}
    for name, info in section.model_fields.items():
        key = (*above, name)
        fields[key] = info
        if is_section(info):
            fields |= _walk(info.annotation, key)  # type: ignore[arg-type]
    return fields


def is_section(info: FieldInfo) -> bool:
    """Tell whether a field is a section."""
    return isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)


FIELDS: dict[KeyPath, FieldInfo] = _walk(Config)
SECTIONS: dict[KeyPath, FieldInfo] = {key: info for key, info in FIELDS.items() if is_section(info)}
LEAVES: dict[KeyPath, FieldInfo] = {key: info for key, info in FIELDS.items() if not is_section(info)}
PATHS = frozenset(key for key, info in LEAVES.items() if info.annotation in (Path, Path | None))
PATH_LISTS = frozenset(key for key, info in LEAVES.items() if info.annotation == tuple[Path, ...])


def schema_key(key: KeyPath) -> KeyPath:
    """Return the key in the schema: keys below a name in embed.also are those of section embed."""
    return (OTHERS[0], *key[3:]) if key[:2] == OTHERS and len(key) > 3 else key


def value_at(config: Config, key: KeyPath) -> Any:
    """Return the value of a key."""
    value: Any = config
    for name in key:
        value = getattr(value, name)
    return value
