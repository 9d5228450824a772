"""`pipeline init`: the configuration that a project starts with, and the profile of the cluster it was made on."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING

from pipeline.cluster.site_facts import join
from pipeline.config.site_profiles import shipped
from pipeline.errors import ConfigError
from pipeline.memory.hardware.gpus import SizesGib, names_a_model, nearest_sizes, sizes_gib, sizes_said
from pipeline.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from pipeline.cluster.site_facts import Partition, Site, SiteNodes


CONFIG = """\
# What `pipeline` is told about this project. {head}
#   pipeline config check      is everything in here right?
#   pipeline config show       every setting, also those not in here, and where it is from
#   pipeline doctor            is everything there that a run needs?
#   pipeline submit --stage all
# Relative paths start from the folder of this file. `--set data.limit=100` beats what it says.

data:
  # manifest: a CSV, TSV or JSONL table with the columns id, path, receptor_chains, ligand_chains, and if you like
  # split, cluster and labels. Others: pairs (ID_r_b.pdb and ID_l_b.pdb), sabdab, pinder, glob (a folder), fasta.
  source: manifest
  # The table, or the folder. PUT YOURS HERE.
  path: data/manifest.csv
  # Items that cannot be used are left out and counted; more than this fraction of them stops the run.
  max_rejected_fraction: 0.05
  # limit: 100               # the first 100 only, for a trial

embed:
  # The ESM-2 checkpoint: `pipeline weights fetch` puts it here, or name yours.
  weights: weights/esm2_t33_650M_UR50D.pt

graph:
  # residue: a node at each CA; atom: a node at each atom.
  nodes: residue
  # Edges from each residue's nearest ones.
  neighbours: 20
  # Å between heavy atoms of a native contact, which is the label; null: no labels.
  contacts: 5.0

cache:
  # Where results are kept; what is in it is never computed twice. Share it between projects if you like.{shared}
  root: cache

cluster:
{cluster}  runs: runs
{stages}"""
LOCAL = """\
  # This machine. `slurm`, with `site: NAME` of a profile in sites/, is a cluster.
  executor: local
"""
SLURM = """\
  # The cluster that sites/{name}.yaml describes; local: this machine.
  executor: slurm
  site: {word}
"""
SHARED = """
  # On a cluster: a disk that all nodes see."""
STAGES = """\
  # What one task asks for. Memory is planned; `mem: 16GiB` pins it.
  embed:
    # 0: on CPU cores.
    gpus: {gpus}
    time: "01:00:00"
"""
PROFILE = """\
# The cluster {name}, as `pipeline init` found it (Slurm {version}). Check it, and fill in what could not be told.
# A configuration takes it by `cluster: {{site: {word}}}`; what that says itself beats it, key by key. Keys that are
# not in here have their defaults: `pipeline config show` lists them all.
#
{table}
{silent}
slurm:
  name: {word}

{lines}"""
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_RESERVED = ("null", "true", "false")


@dataclass(frozen=True, slots=True)
class InitFiles:
    """The files that were written."""

    config: Path
    profile: Path | None


def write_init_files(folder: Path, site: Site | None, recipe: str | None = None) -> InitFiles:
    """Write the configuration and, on a cluster, its profile; existing files are never overwritten."""
    text = config_text(site) if recipe is None else recipe_text(recipe, site)
    config = folder / "pipeline.yaml"
    profile = None if site is None else folder / "sites" / f"{file_name(site.name)}.yaml"
    for path in filter(None, (config, profile)):
        if os.path.lexists(path):
            remedy = f"pipeline init NEWFOLDER, and take from it what you need; or move {path.name} away"
            raise ConfigError("exists already, and is left as it is", where=str(path), remedy=remedy)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if profile is not None and site is not None:
            profile.parent.mkdir(exist_ok=True)
            _create(profile, profile_text(site))
        _create(config, text)
    except OSError as error:
        what = f"cannot write: {error.strerror}"
        raise ConfigError(what, where=str(error.filename or folder), remedy="pipeline init DIR") from error
    return InitFiles(config, profile)


def recipe_text(name: str, site: Site | None) -> str:
    """Return the configuration of a recipe, for this machine or a cluster."""
    folder = shipped("configs/recipes")
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in known:
        close = get_close_matches(name, known, n=1)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(
            f"no recipe is called {name}{meant}", where="--recipe", remedy=f"pipeline init --recipe {' | '.join(known)}"
        )
    text = (folder / f"{name}.yaml").read_text(encoding="utf-8")
    where = LOCAL if site is None else SLURM.format(name=file_name(site.name), word=yaml_word(file_name(site.name)))
    return text.replace("\ncluster:\n", f"\ncluster:\n{where}", 1)


def config_text(site: Site | None) -> str:
    """Return the short configuration that a new project starts with."""
    if site is None:
        return CONFIG.format(head="Next:", shared="", cluster=LOCAL, stages=STAGES.format(gpus=0))
    name = file_name(site.name)
    with_gpus = [kind for kind in gpu_kinds(site) if not all(map(site.bars, kind.partitions))]
    stages = STAGES.format(gpus=1 if with_gpus else 0)
    home = _home(site)
    if with_gpus and home is not None and not any(home.name in kind.partitions for kind in with_gpus):
        best = best_partition(site, [name for kind in with_gpus for name in kind.partitions])
        stages += f"    # Where the GPUs are; {_one_line(home.name)} has none.\n    partition: {yaml_word(best)}\n"
    return CONFIG.format(
        head="Next:", shared=SHARED, cluster=SLURM.format(name=name, word=yaml_word(name)), stages=stages
    )


def profile_text(site: Site) -> str:
    """Return the profile of a cluster, with what was found and what was not as comments."""
    blocks = (_partition(site), _charging(site), _asking(site), _jobs(), _limits(site), _cards(site), _supervisor(site))
    return PROFILE.format(
        name=_one_line(site.name),
        word=yaml_word(file_name(site.name)),
        version=_one_line(site.version),
        table="\n".join(f"# {line}".rstrip() for line in _table(site)),
        silent="".join(f"# Could not be asked: {_one_line(why)}\n" for why in site.silent),
        lines="\n".join(blocks),
    )


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


def _create(path: Path, text: str) -> None:
    with path.open("x", encoding="utf-8") as file:
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
        yield "No partition was told."
        return
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield _one_line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
    if site.default is not None:
        yield "* the default"
    for why in filter(None, (site.bars(partition.name) for partition in site.partitions)):
        yield _one_line(f"{why}.")


def _row(first: tuple[str, str], nodes: SiteNodes) -> tuple[str, str, str, str, str, str, str]:
    """Return a line of the table."""
    gpus = " + ".join(f"{gpu.count} {gpu.type or 'gpu'}" for gpu in nodes.gpus)
    memory = format_bytes(nodes.mem_bytes) if nodes.mem_bytes else "?"
    return (first[0], str(nodes.count), str(nodes.cpus or "?"), memory, gpus, first[1], join(nodes.features, 6))


def _home(site: Site) -> Partition | None:
    """Return the partition for jobs: the default, else the best; None where there is none."""
    names = [partition.name for partition in site.partitions]
    return site.default or (site.partition(best_partition(site, names)) if names else None)


def _partition(site: Site) -> str:
    home = _home(site)
    names = join(_one_line(partition.name) for partition in site.partitions)
    if site.default is not None:
        return f"  # null: {_one_line(site.default.name)}, the default. There are {names}.\n  partition: null\n"
    if home is None:
        return "  # No partition was told: say which.\n  partition: null\n"
    return f"  # There is no default here, so one must be named: {names}.\n  partition: {yaml_word(home.name)}\n"


def _charging(site: Site) -> str:
    """Return the lines about account and QOS."""
    accounts = sorted({association.account for association in site.associations})
    qos = sorted({name for association in site.associations for name in association.qos})
    if accounts:
        default = f"your default, {site.default_account}" if site.default_account else "your default"
        about = f"null: {default}. You may charge {join(accounts)}."
    else:
        about = "Not told (`sacctmgr show assoc user=$USER` lists yours). null: your default."
    also = f"null: the default. You may ask for {join(qos)}." if qos else "Not told. null: the default."
    return f"  # {_one_line(about)}\n  account: null\n  # {_one_line(also)}\n  qos: null\n"


def _asking(site: Site) -> str:
    """Return the lines about how GPUs and memory are asked for."""
    how = {
        True: ("The scheduler gives memory out ({}). mem-per-cpu, if this site refuses --mem.", "mem"),
        False: ("The scheduler does not give memory out ({}): jobs do not ask for it.", "none"),
        None: ("Whether the scheduler gives memory out was not told. mem, mem-per-cpu or none.", "mem"),
    }
    about, memory = how[site.counts_memory]
    about = about.format(_one_line(site.setting("SelectTypeParameters") or "no SelectTypeParameters"))
    return f"""\
  # gres (--gres=gpu:TYPE:1) or gpus-per-node: this cannot be found out, and most sites take both.
  gpus: gres
  # {about}
  memory: {memory}
"""


def _jobs() -> str:
    """Return the lines about what jobs run first."""
    loaded = [_one_line(name) for name in os.environ.get("LOADEDMODULES", "").split(":") if name]
    now = f" Loaded here now:\n  #   module load {' '.join(loaded)}" if loaded else ""
    return f"""\
  # Shell lines that every job runs first, such as [module load cuda, source ~/env.sh]. The interpreter needs no
  # activation: jobs use the one that submitted them.{now}
  setup: []
  # Folder on the node for temporary files, such as $TMPDIR; null: as the node says.
  scratch: null
"""


def _limits(site: Site) -> str:
    """Return the lines about limits."""
    arrays = f"auto: {site.max_array_size:,}" if site.max_array_size else "Not told; set it to what your site says"
    limits = [(association.max_submit, f"account {association.account}") for association in site.associations]
    limits += [(limit, f"QOS {name}") for name, limit in site.qos_max_submit.items()]
    known = [f"{limit:,} in {scope}" for limit, scope in limits if limit is not None]
    submit = _one_line(f"auto: {join(known)}") if known else "auto: no limit was told"
    mem_bytes = max((nodes.mem_bytes or 0 for nodes in site.nodes), default=0)
    largest = f"auto: {format_bytes(mem_bytes)}, if it is in the partition" if mem_bytes else "Not told"
    return f"""\
  # MaxArraySize. {arrays}.
  max_array_size: auto
  # Tasks you may have in the queue. {submit}.
  max_submit: auto
  # Memory of the largest node. {largest}.
  largest_mem: auto
"""


def _cards(site: Site) -> str:
    """Return the lines about kinds of GPU; one whose memory is not known stays a comment."""
    kinds = gpu_kinds(site)
    if not kinds:
        return "  # No GPUs were found.\n  cards: []\n"
    about = "  # Kinds of GPU, and the memory that programs have of each, by its name; nvidia-smi on a node tells it.\n"
    home = _home(site)
    lines = [_card(site, kind, home.name if home else "") for kind in kinds]
    known = any(line.startswith("    -") for line in lines)
    more = "" if known else "  # Take away the # where you know the memory, and the brackets after `cards:`.\n"
    return f"{about}{more}  cards:{'' if known else ' []'}\n" + "".join(lines)


def _card(site: Site, kind: GpuKind, home: str) -> str:
    """Return a kind of GPU as an entry, or as a comment where its memory is unknown."""
    where = home if home in kind.partitions else best_partition(site, kind.partitions)
    keys = {"gres": kind.gres, "feature": kind.feature, "partition": "" if where == home else where}
    guess = f"{kind.sizes_gib[0]}GiB" if kind.sizes_gib else "?GiB"
    entry = ", ".join([*(f"{key}: {yaml_word(value)}" for key, value in keys.items() if value), f"mem: {guess}"])
    others = [name for name in kind.partitions if name != where]
    notes = [f"also in {join(others)}"] if others else []
    if barred := site.bars(where):
        notes.insert(0, barred)
    elif len(kind.sizes_gib) == 1:
        return f"    - {{{entry}}}" + _comment(notes) + "\n"
    other_sizes = " or ".join(f"{size_gib}GiB" for size_gib in kind.sizes_gib[1:])
    if len(kind.sizes_gib) != 1:
        notes.insert(0, f"or {other_sizes}: which of them is not told" if other_sizes else "its memory is not told")
    return f"    # - {{{entry}}}" + _comment(notes) + "\n"


def _comment(notes: list[str]) -> str:
    return _one_line(f"   # {'; '.join(notes)}") if notes else ""


def _supervisor(site: Site) -> str:
    """Return the section about the supervisor."""
    by_partition = {partition.name: site.nodes_of(partition.name) for partition in site.partitions}
    bare = [name for name, alike in by_partition.items() if alike and not any(nodes.gpus for nodes in alike)]
    hint = f" Without GPUs: {_one_line(join(bare))}." if 0 < len(bare) < len(site.partitions) else ""
    return f"""\
supervisor:
  # job: small jobs that the run submits for itself; login: a process that stays where you submit.
  where: job
  # A partition for small jobs; null: that of the others.{hint}
  partition: null
"""


@dataclass(slots=True)
class GpuKind:
    """A kind of GPU, and the partitions that have it."""

    gres: str
    feature: str
    sizes_gib: SizesGib  # one: known; several: it may be any; none: unknown
    partitions: list[str] = field(default_factory=list)
    count: int = 0


def gpu_kinds(site: Site) -> list[GpuKind]:
    """Return the kinds of GPU of a cluster, told apart by type and, where that is not enough, by feature."""
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
    """Return the best partition for a job: one that it may use, without preemption, with the longest time limit."""
    known = [partition for name in names if (partition := site.partition(name)) is not None]
    return max(known, key=lambda partition: _merit(site, partition)).name if known else names[0]


def _merit(site: Site, partition: Partition) -> tuple[bool, bool, bool, float]:
    is_left_alone = partition.preempt_mode.upper() in ("", "OFF")
    time_s = float("inf") if partition.time_s is None else partition.time_s
    return (not site.bars(partition.name), partition.is_default, is_left_alone, time_s)


def _of_nodes(nodes: SiteNodes) -> Iterator[GpuKind]:
    """Yield the kinds of GPU that nodes have."""
    for gpus in nodes.gpus:
        sizes, feature = sizes_gib(gpus.type), ""
        if not gpus.type:
            feature = next((name for name in nodes.features if names_a_model(name)), "")
            sizes = sizes_gib(feature)
        elif len(sizes) > 1:
            feature, sizes = _told_by_feature(nodes.features, sizes)
        yield GpuKind(gpus.type, feature, sizes, count=gpus.count)


def _told_by_feature(features: Sequence[str], sold: SizesGib) -> tuple[str, SizesGib]:
    """Return the node feature that tells which of several memory sizes a GPU has, and that size."""
    for feature in features:
        named = sizes_gib(feature) if names_a_model(feature) else ()
        near = tuple(size for size in sold if size in named) or nearest_sizes(sold, sizes_said(feature))
        if len(near) == 1:
            return feature, near
    return "", sold
