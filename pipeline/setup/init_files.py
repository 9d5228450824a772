"""`pipeline init`: writes the configuration of a new project, and a profile of the cluster."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.cluster.site import QUEUED
from pipeline.errors import ConfigError
from pipeline.files import shipped
from pipeline.memory.hardware.gpus import SizesGib, names_a_model, nearest_sizes, sizes_gib, sizes_said
from pipeline.units import first_few, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from jinja2 import Template

    from pipeline.cluster.site import NodeKind, Partition, Site


LOCAL = """\
  # This machine. `slurm`, with `site: NAME` of a profile in sites/, is a cluster.
  executor: local
"""
SLURM = """\
  # The cluster that sites/{name}.yaml describes; local: this machine.
  executor: slurm
  site: {word}
"""
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_RESERVED = ("null", "true", "false")


def write_init_files(folder: Path, site: Site | None, recipe: str | None = None) -> tuple[Path, Path | None]:
    """Write the configuration and, on a cluster, its profile; return both. Existing files are never overwritten."""
    text = config_text(site) if recipe is None else recipe_text(recipe, site)
    config = folder / "pipeline.yaml"
    profile = None if site is None else folder / "sites" / f"{file_name(site.name)}.yaml"
    for path in filter(None, (config, profile)):
        if os.path.lexists(path):
            remedy = f"pipeline init NEWDIR   (then copy what you need), or move {path.name} away"
            raise ConfigError("already exists, and init overwrites no file", where=str(path), remedy=remedy)
    begun: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if profile is not None and site is not None:
            profile.parent.mkdir(exist_ok=True)
            _create(profile, profile_text(site), begun)
        _create(config, text, begun)
    except OSError as error:
        for path in begun:  # so that the next try writes them again
            path.unlink()
        what = f"cannot write: {error.strerror}"
        raise ConfigError(what, where=str(error.filename or folder), remedy="pipeline init DIR") from error
    return config, profile


def recipe_text(name: str, site: Site | None) -> str:
    """Return the configuration of a recipe, for this machine or a cluster."""
    folder = shipped("configs/recipes")
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in known:
        close = get_close_matches(name, known, n=1)
        what = f"no recipe is called {name}" + (f"; did you mean {close[0]}?" if close else "")
        raise ConfigError(what, where="--recipe", remedy=f"pipeline init --recipe {' | '.join(known)}")
    text = (folder / f"{name}.yaml").read_text(encoding="utf-8")
    return text.replace("\ncluster:\n", f"\ncluster:\n{where_text(site)}", 1)


def config_text(site: Site | None) -> str:
    """Return the short configuration that a new project starts with."""
    with_gpus = [kind for kind in gpu_kinds(site) if not all(map(site.bars, kind.partitions))] if site else []
    home, elsewhere = _home(site) if site else None, ""
    if site and home and with_gpus and not any(home.name in kind.partitions for kind in with_gpus):
        elsewhere = best_partition(site, [name for kind in with_gpus for name in kind.partitions])
    about = {"site": site, "where": where_text(site), "home": home}
    return _template("project").render(**about, with_gpus=with_gpus, elsewhere=elsewhere)


def where_text(site: Site | None) -> str:
    """Return the lines of a configuration on where jobs run."""
    return LOCAL if site is None else SLURM.format(name=file_name(site.name), word=yaml_word(file_name(site.name)))


def profile_text(site: Site) -> str:
    """Return the profile of a cluster, with comments on found and missing facts."""
    home, by_partition = _home(site), {partition.name: site.nodes_of(partition.name) for partition in site.partitions}
    bare = [name for name, alike in by_partition.items() if alike and not any(nodes.gpus for nodes in alike)]
    capped = [(f"account {association.account}", association.caps) for association in site.associations]
    capped += [(f"QOS {name}", caps) for name, caps in site.qos.items()]
    return _template("profile").render(
        site=site,
        file=file_name(site.name),
        table=list(_table(site)),
        home=home,
        names=list(by_partition),
        accounts=sorted({association.account for association in site.associations}),
        qos=sorted({name for association in site.associations for name in association.qos}),
        modules=list(filter(None, os.environ.get("LOADEDMODULES", "").split(":"))),
        limits=[f"{caps[QUEUED].value:,} in {scope}" for scope, caps in capped if QUEUED in caps],
        largest_bytes=max((nodes.mem_bytes or 0 for nodes in site.nodes), default=0),
        cards=[_card(site, kind, home.name if home else "") for kind in gpu_kinds(site)],
        bare=bare if 0 < len(bare) < len(site.partitions) else [],
    )


def _template(name: str) -> Template:
    """Return a template of a file; the filters `line` and `word` quote text that Slurm reports."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # imported late: slow

    loader = FileSystemLoader(Path(__file__).parent)
    made = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)  # noqa: S701 - no HTML
    made.keep_trailing_newline = True
    made.filters |= {"line": _one_line, "word": yaml_word, "size": format_bytes}
    made.filters["join_some"] = lambda names: _one_line(first_few(names))
    return made.get_template(f"{name}.yaml.jinja")


def file_name(name: str) -> str:
    """Return a cluster's name as a file name."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name).lstrip("-") or "slurm"


def yaml_word(text: str) -> str:
    """Return text quoted as YAML needs it."""
    is_plain = _PLAIN.fullmatch(text) and text.lower() not in _RESERVED
    return text if is_plain else json.dumps(text, ensure_ascii=not text.isprintable())


def time_limit_text(time_s: int | None) -> str:
    """Return a time limit as Slurm writes it."""
    from pipeline.config.schema_parts import format_duration

    return "unlimited" if time_s is None else format_duration(time_s)


def _create(path: Path, text: str, begun: list[Path]) -> None:
    with path.open("x", encoding="utf-8") as file:
        begun.append(path)
        file.write(text)


def _one_line(text: str) -> str:
    """Return foreign text without line ends and control characters, for a comment."""
    return "".join(char if char.isprintable() else " " for char in text)


def _table(site: Site) -> Iterator[str]:
    """Yield a table of the partitions, a line for each kind of node."""
    rows = [("partition", "nodes", "cores", "memory", "GPUs", "longest job", "features")]
    for partition in site.partitions:
        first = (f"{partition.name}{'*' if partition.is_default else ''}", time_limit_text(partition.time_s))
        alike = site.nodes_of(partition.name)
        rows += [_row(first, nodes) for nodes in alike] or [(first[0], "0", "", "", "", first[1], "")]
    if len(rows) == 1:
        yield "Slurm reports no partitions."
        return
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    if site.default is not None:
        yield "* the default"
    for why in filter(None, (site.bars(partition.name) for partition in site.partitions)):
        yield f"{why}."


def _row(first: tuple[str, str], nodes: NodeKind) -> tuple[str, str, str, str, str, str, str]:
    """Return a line of the table."""
    gpus = " + ".join(f"{gpu.count} {gpu.type or 'gpu'}" for gpu in nodes.gpus)
    memory = format_bytes(nodes.mem_bytes) if nodes.mem_bytes else "?"
    return (first[0], str(nodes.count), str(nodes.cpus or "?"), memory, gpus, first[1], first_few(nodes.features, 6))


def _home(site: Site) -> Partition | None:
    """Return the partition for jobs: the default, else the best, or None."""
    names = [partition.name for partition in site.partitions]
    return site.default or (site.partition(best_partition(site, names)) if names else None)


def _card(site: Site, kind: GpuKind, home: str) -> dict[str, Any]:
    """Return the entry of a kind of GPU and its notes; with unknown memory the entry is a comment."""
    where = home if home in kind.partitions else best_partition(site, kind.partitions)
    keys = {"gres": kind.gres, "feature": kind.feature, "partition": "" if where == home else where}
    guess = f"{kind.sizes_gib[0]}GiB" if kind.sizes_gib else "?GiB"
    entry = ", ".join([*(f"{key}: {yaml_word(value)}" for key, value in keys.items() if value), f"mem: {guess}"])
    others, barred = [name for name in kind.partitions if name != where], site.bars(where)
    notes = [f"also in {first_few(others)}"] if others else []
    notes = [barred, *notes] if barred else notes
    if len(kind.sizes_gib) != 1:
        sizes = " or ".join(f"{size_gib}GiB" for size_gib in kind.sizes_gib[1:])
        notes.insert(0, f"or {sizes}: Slurm does not report which" if sizes else "Slurm does not report its memory")
    return {"entry": entry, "notes": notes, "is_known": len(kind.sizes_gib) == 1 and not barred}


@dataclass(slots=True)
class GpuKind:
    """A kind of GPU, and the partitions that have it."""

    gres: str
    feature: str
    sizes_gib: SizesGib  # possible sizes; empty: unknown
    partitions: list[str] = field(default_factory=list)
    count: int = 0


def gpu_kinds(site: Site) -> list[GpuKind]:
    """Return the kinds of GPU of a cluster, distinguished by type, and by feature if types are equal."""
    kinds: dict[tuple[str, str, SizesGib], GpuKind] = {}
    for nodes in site.nodes:
        for kind in _of_nodes(nodes):
            same = kinds.setdefault((kind.gres, kind.feature, kind.sizes_gib), kind)
            same.count = max(same.count, kind.count)
            if nodes.partition not in same.partitions:
                same.partitions.append(nodes.partition)
    every = sorted(kinds.values(), key=lambda kind: (kind.gres, kind.feature))
    for kind in every:
        if kind.gres and sum(other.gres == kind.gres for other in every) == 1:
            kind.feature = ""  # the type alone says it
    return every


def best_partition(site: Site, names: Sequence[str]) -> str:
    """Return the best partition for a job: usable, without preemption, with the longest time limit."""
    known = [partition for name in names if (partition := site.partition(name)) is not None]
    return max(known, key=lambda partition: _merit(site, partition)).name if known else names[0]


def _merit(site: Site, partition: Partition) -> tuple[bool, bool, bool, float]:
    is_left_alone = partition.preempt_mode.upper() in ("", "OFF")
    time_s = float("inf") if partition.time_s is None else partition.time_s
    return (not site.bars(partition.name), partition.is_default, is_left_alone, time_s)


def _of_nodes(nodes: NodeKind) -> Iterator[GpuKind]:
    """Yield the kinds of GPU that nodes have."""
    for gpus in nodes.gpus:
        sizes, feature = sizes_gib(gpus.type), ""
        if not gpus.type:
            feature = next((name for name in nodes.features if names_a_model(name)), "")
            sizes = sizes_gib(feature)
        elif len(sizes) > 1:
            feature, sizes = _size_by_feature(nodes.features, sizes)
        yield GpuKind(gpus.type, feature, sizes, count=gpus.count)


def _size_by_feature(features: Sequence[str], sold: SizesGib) -> tuple[str, SizesGib]:
    """Return the node feature that names one of several memory sizes of a GPU, and that size."""
    for feature in features:
        named = sizes_gib(feature) if names_a_model(feature) else ()
        near = tuple(size for size in sold if size in named) or nearest_sizes(sold, sizes_said(feature))
        if len(near) == 1:
            return feature, near
    return "", sold
