"""What the accounting allows: limits of associations and QOS, from sacctmgr's text to caps on what a task may ask for.

As Slurm has it, a QOS overrides the association in whatever it limits (that of the partition goes before the job's),
but of several limits on how much is in the queue the least holds here: fewer at once cost little, a refusal does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from pipeline.cluster.slurm_words import bytes_of, limit_of
from pipeline.config.schema_parts import format_duration, format_size
from pipeline.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Cap:
    """The most of something, and the limit that says so."""

    value: int
    name: str  # such as MaxWall of QOS tiny


Caps: TypeAlias = dict[str, Cap]  # by what they limit: KINDS

TIME, MEM, MEM_ON_NODE, CPUS, GPUS, NODES, QUEUED, RUNNING = KINDS = (
    "time", "mem", "mem_on_node", "cpus", "gpus", "nodes", "queued", "running",
)  # fmt: skip
_TRES = {"cpu": CPUS, "mem": MEM, "gres/gpu": GPUS, "node": NODES}
_TALLIES = {"MaxSubmit": QUEUED, "GrpSubmit": QUEUED, "MaxJobs": RUNNING, "GrpJobs": RUNNING}
ASSOCIATION = (
    "Account", "User", "Partition", "DefaultQOS", "QOS",
    "MaxWall", "MaxTRES", "MaxTRESPerNode", "GrpTRES", "MaxSubmitJobs", "GrpSubmitJobs", "MaxJobs", "GrpJobs",
)  # fmt: skip
QOS = (
    "Name",
    "MaxWall", "MaxTRES", "MaxTRESPerNode", "MaxTRESPU", "MaxTRESPA", "GrpTRES",
    "MaxSubmitJobsPU", "MaxSubmitJobsPA", "GrpSubmitJobs", "MaxJobsPU", "MaxJobsPA", "GrpJobs",
)  # fmt: skip
SACCTMGR = ("sacctmgr", "--noheader", "--parsable2", "show")
_NAMED = re.compile(r"(?:Max|Grp)\w+")


def own_limits_of(user: str) -> tuple[str, ...]:
    """Return the command that lists the limits of what a user may charge; sacctmgr knows users by name only."""
    return (*SACCTMGR, "assoc", "where", f"user={user}", f"format={','.join(ASSOCIATION)}")


def shared_limits_of(account: str) -> tuple[str, ...]:
    """Return the command that lists the limits that all users of an account share."""
    return (*SACCTMGR, "assoc", "where", f"account={account}", "user=", f"format={','.join(ASSOCIATION)}")


def every_qos() -> tuple[str, ...]:
    """Return the command that lists the limits of every QOS."""
    return (*SACCTMGR, "qos", f"format={','.join(QOS)}")


def parse_rows(text: str, columns: Sequence[str]) -> list[dict[str, str]]:
    """Parse what one of these commands prints; malformed lines are skipped."""
    rows = (line.split("|") for line in text.splitlines())
    return [dict(zip(columns, row, strict=True)) for row in rows if len(row) == len(columns)]


def qos_caps(row: Mapping[str, str]) -> Caps:
    """Return what a QOS limits."""
    return _caps(row, f"QOS {row['Name']}")


def association_caps(row: Mapping[str, str]) -> Caps:
    """Return what an association limits."""
    return _caps(row, f"the association {'/'.join(filter(None, (row['Account'], row['User'], row['Partition'])))}")


def combined(of_qos: Iterable[Caps], of_associations: Iterable[Caps]) -> Caps:
    """Return the caps that hold for a job: of the first QOS that limits a thing, else the least of the associations."""
    qos, associations = list(of_qos), list(of_associations)
    found: Caps = {}
    for kind in KINDS:
        ruling = next(([caps[kind]] for caps in qos if kind in caps), None)
        if ruling is None or kind == QUEUED:
            ruling = [caps[kind] for caps in (*qos, *associations) if kind in caps]
        if ruling:
            found[kind] = min(ruling, key=lambda cap: cap.value)
    return found


def shown(kind: str, value: int) -> str:
    """Write an amount of a kind as the configuration takes it."""
    if kind == TIME:
        return format_duration(value)
    return str(format_size(value)) if kind in (MEM, MEM_ON_NODE) else str(value)


def _caps(row: Mapping[str, str], holder: str) -> Caps:
    """Return the least cap of each kind in a row of sacctmgr."""
    found: Caps = {}
    for column, text in row.items():
        if not _NAMED.fullmatch(column):
            continue
        for kind, value, part in _amounts(column, text):
            cap = Cap(value, f"{column}{part} of {holder}")
            found[kind] = min(found.get(kind, cap), cap, key=lambda known: known.value)
    return found


def _amounts(column: str, text: str) -> Iterable[tuple[str, int, str]]:
    """Yield what a cell limits: the kind, how much, and the part of the limit's name that says of what."""
    if column == "MaxWall":
        if (time_s := limit_of(text)) is not None and text:
            yield TIME, time_s, ""
    elif "TRES" in column:
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            amount = _amount(name, value)
            if name in _TRES and amount is not None:
                kind = MEM_ON_NODE if (name, column) == ("mem", "MaxTRESPerNode") else _TRES[name]
                yield kind, amount, f"({name})"
    elif text.isdecimal():
        yield next(kind for sign, kind in _TALLIES.items() if column.startswith(sign)), int(text), ""


def _amount(name: str, value: str) -> int | None:
    """Return an amount of a TRES; memory without a unit is in mebibytes."""
    if name != "mem":
        return int(value) if value.isdecimal() else None
    return int(value) * MIB if value.isdecimal() else bytes_of(value)
