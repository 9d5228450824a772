"""The frozen values that flow through the pipeline."""

from __future__ import annotations

import socket
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

SEVERAL = "PIPELINE_NODES"  # in the environment of each task on an allocation of several nodes: how many
NODE = "PIPELINE_NODE"  # in the environment of a task on several nodes: 0/2 and a name for this start
LOWEST_COSINE = "lowest cosine to"  # begins the figure that says how close embeddings are; the reference follows
NOT_FINITE = "is not finite"  # so a training that `train.nan: stop` ends says of a loss or a gradient


class Reason(StrEnum):
    """Why an item was left out; the value is what reports show and `jq` matches."""

    BAD_ID = "bad_id"
    DUPLICATE_ID = "duplicate_id"
    BAD_ROW = "bad_row"
    MISSING_FILE = "missing_file"
    UNREADABLE_FILE = "unreadable_file"
    EMPTY_FILE = "empty_file"
    TRUNCATED_FILE = "truncated_file"
    FILE_TOO_LARGE = "file_too_large"
    UNKNOWN_FORMAT = "unknown_format"
    NEEDS_EXTRA = "needs_extra"
    PARSE_ERROR = "parse_error"
    NO_ATOMS = "no_atoms"
    MISSING_MODEL = "missing_model"
    MISSING_ASSEMBLY = "missing_assembly"
    MISSING_CHAIN = "missing_chain"
    CHAIN_WITHOUT_POLYMER = "chain_without_polymer"
    AMBIGUOUS_PARTNERS = "ambiguous_partners"
    SHARED_CHAIN = "shared_chain"
    NO_POLYMER = "no_polymer"
    NO_PLDDT = "no_plddt"
    NO_PAE = "no_pae"
    BAD_PAE = "bad_pae"
    MODIFIED_RESIDUES = "modified_residues"
    INCOMPLETE_RESIDUES = "incomplete_residues"
    SEQUENCE_MISMATCH = "sequence_mismatch"
    TOO_MANY_RESIDUES = "too_many_residues"
    BAD_SEQUENCE = "bad_sequence"
    SCAN_FAILED = "scan_failed"
    SEQUENCE_TOO_LONG = "sequence_too_long"
    NOT_FINITE = "not_finite"
    DOES_NOT_FIT = "does_not_fit"
    NO_NODES = "no_nodes"
    NO_EDGES = "no_edges"
    NO_CONTACTS = "no_contacts"
    COINCIDENT_ATOMS = "coincident_atoms"
    GRAPH_FAILED = "graph_failed"
    KILLED_ITS_TASK = "killed_its_task"
    BAD_ENTRY = "bad_entry"  # of a reader's file
    DAMAGED = "damaged"  # what the cache has of it


@dataclass(frozen=True, slots=True)
class Rejection:
    """An item that was left out, and why: data, not an exception."""

    id: str
    reason: Reason
    detail: str
    origin: str = ""
    split: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Rejection:
        """Read what `to_json` wrote."""
        return cls(**{**data, "reason": Reason(data["reason"])})


class Entry(NamedTuple):
    """An item that is no structure, as a reader finds it."""

    id: str
    place: Any  # where it is, as JSON data: what `read` is given
    arrays: Mapping[str, NDArray[Any]]  # `peaks.mz` is as long as all `peaks.…`; `mass` is one an item
    split: str = ""
    origin: str = ""  # where people find it: file and line, or file and number


class Kind(StrEnum):
    """What a polymer chain is made of."""

    PROTEIN = "protein"
    DNA = "dna"
    RNA = "rna"
    OTHER = "other"  # small molecules and ions: no chain, but atoms of one


class Role(StrEnum):
    """What a part of an item is to the complex."""

    RECEPTOR = "receptor"
    LIGAND = "ligand"
    COMPLEX = "complex"  # one file whose two polymer chains become receptor and ligand when it is read
    WHOLE = "whole"  # one file that is not divided


@dataclass(frozen=True, slots=True)
class Part:
    """Chains of one structure file; no chains named means every polymer chain."""

    role: Role
    path: str
    chains: tuple[str, ...] = ()
    model: int | None = None
    optional: tuple[str, ...] = ()  # those of the chains that may be absent

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {
            "role": self.role.value,
            "path": self.path,
            "chains": self.chains,
            "model": self.model,
            "optional": self.optional,
        }


@dataclass(frozen=True, slots=True)
class Item:
    """One complex (or one sequence) of the data set, before anything of it was read."""

    id: str
    parts: tuple[Part, ...] = ()
    bound: tuple[Part, ...] = ()  # where labels come from when `parts` are unbound structures
    sequence: str | None = None  # a FASTA entry has this and no parts
    split: str = ""
    cluster: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    origin: str = ""  # file and line that named it, for messages

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data; by hand, as a data set has many of them."""
        plain = {
            "id": self.id,
            "parts": [part.to_json() for part in self.parts],
            "bound": [part.to_json() for part in self.bound],
            "sequence": self.sequence,
            "split": self.split,
            "cluster": self.cluster,
            "labels": self.labels,
            "origin": self.origin,
        }
        return {key: value for key, value in plain.items() if value}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Item:
        """Read what `to_json` wrote."""
        return cls(**{**data, "parts": _parts(data.get("parts", ())), "bound": _parts(data.get("bound", ()))})


def _parts(data: Iterable[Mapping[str, Any]]) -> tuple[Part, ...]:
    """Read parts from plain JSON data."""
    return tuple(
        Part(Role(one["role"]), one["path"], tuple(one["chains"]), one["model"], tuple(one["optional"])) for one in data
    )


FROM_STEP = "from_step"  # a figure: the step of the checkpoint from which a training began


class EventKind(StrEnum):
    """What happened in a run."""

    RUN_STARTED = "run_started"
    VISIT = "visit"  # a supervisor began to work
    SUCCESSOR = "successor"  # the next visit is in the queue, and begins when this one is over
    HANDED_OVER = "handed_over"  # a visit is over, and the next one waits for the jobs of tasks
    WAITING = "waiting"  # jobs wait for what does not pass by itself
    WAITED = "waited"  # and do so no longer
    STAGE_SUBMITTED = "stage_submitted"
    JOB_SUBMITTING = "job_submitting"  # written before, so that a job whose id was lost is found by its tag
    JOB_SUBMITTED = "job_submitted"
    JOB_REFUSED = "job_refused"
    TRIAL_ASKED = "trial_asked"  # a search chose the settings of its next point; its task comes after
    TRIAL_ENDED = "trial_ended"
    TASK_SPLIT = "task_split"
    TASK_GIVEN_UP = "task_given_up"
    TASK_CANCELLED = "task_cancelled"  # by hand, and alone: the others go on
    LEFT_OUT = "left_out"  # something that killed its task
    TASK_STARTED = "task_started"
    PROGRESS = "progress"
    REFUSED = "refused"  # a part of an item could not be used, which only the work itself could tell
    RESTARTED = "restarted"  # a training's processes begin again in their job: one of them died or hung
    CAUGHT_UP = "caught_up"  # a start of a training has come further than the one before it
    TASK_FINISHED = "task_finished"
    TASK_FAILED = "task_failed"
    TASK_ENDED = "task_ended"  # how an attempt ended: the verdict on what executor, worker and log say
    STAGE_ENDED = "stage_ended"
    RUN_ENDED = "run_ended"


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a run's ledger."""

    kind: EventKind
    at: float
    writer: str
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class NodePlace:
    """The node of this process among those of its task, and a name for this start of the task."""

    number: int = 0
    nodes: int = 1
    meeting: str = ""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> NodePlace:
        """Read what the executor of an allocation says; by default a task has one node."""
        place, _, meeting = environment.get(NODE, "0/1").partition(" ")
        number, _, nodes = place.partition("/")
        return cls(int(number), int(nodes), meeting)


@dataclass(frozen=True)
class RankPlace:
    """The rank of this process, the world size, and the start of the ranks that it belongs to."""

    rank: int
    world: int
    local_rank: int = 0  # among those of its node
    nodes: int = 1
    meeting: str = ""  # the name of this start: no other of the same run has it
    host: str = field(default_factory=socket.gethostname)

    @classmethod
    def parse(cls, part: str, meeting: str, nodes: int = 1) -> RankPlace:
        """Parse our launcher's arguments: `1/3`, and a name for the start; as many ranks are on each node."""
        rank, _, world = part.partition("/")
        if not (rank.isdigit() and world.isdigit() and int(rank) < int(world)):
            raise ValueError(f"`{part}` is not a rank and how many there are, as in 0/2")
        return cls(int(rank), int(world), int(rank) % (int(world) // nodes), nodes, meeting)

    @classmethod
    def by_slurm(cls, environment: Mapping[str, str], attempt: int = 1) -> RankPlace | None:
        """Return the place in a Slurm step of several tasks, None in any other.

        The variables of a step are read, not those of the job: these reach processes that no srun has started.
        """
        world = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
        if world == 1 or "SLURM_PROCID" not in environment:
            return None
        start = [environment.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")]
        return cls(
            rank=int(environment["SLURM_PROCID"]),
            world=world,
            local_rank=int(environment.get("SLURM_LOCALID", "0")),
            nodes=int(environment.get("SLURM_STEP_NUM_NODES", "1")),
            meeting="-".join([*start, str(attempt)]),
            host=environment.get("SLURMD_NODENAME") or socket.gethostname(),
        )


@dataclass(slots=True)
class TaskReport:
    """What a process says of its work on a task besides the outcomes that it yields."""

    figures: dict[str, float] = field(default_factory=dict)
    warnings: dict[Hashable, str] = field(default_factory=dict)  # what people must know of, each in its newest words
    ended_by: int = 0  # the signal by which the work ended, in order, before it was done; 0: none
    moved: bool = False  # whether it came any further before


@dataclass(frozen=True, slots=True)
class TaskContext:
    """What the work on a task is given: its limits, its place among processes, and whom it reports to."""

    refuse: Callable[[str, Reason, str], None]  # the key in hex of what cannot be made, why, and the details
    on: Callable[[Sequence[str]], None] = lambda _names: None  # names the items in work from now on
    ending: Callable[[], int] = lambda: 0  # by which signal the process was asked to end; 0: by none
    mem_bytes: int = 0  # of this task; 0: as configured
    shrink: int = 0  # how often to halve the budget of a batch
    careful: bool = False  # one thing at a time
    attempt: int = 1  # 1 is the first
    place: RankPlace = field(default_factory=lambda: RankPlace(0, 1))  # of this process among those of the task
    report: TaskReport = field(default_factory=TaskReport)


@dataclass(frozen=True, slots=True)
class ChainSummary:
    """A polymer chain of a partner, or a molecule that was kept, as the inventory remembers it."""

    name: str
    kind: Kind
    sequence: str  # what an encoder reads: observed residues or SEQRES, as configured
    residues: int  # observed ones
    nodes: int  # observed ones with the atoms a node needs
    atoms: int


@dataclass(frozen=True, slots=True)
class Partner:
    """One side of a complex: chains of one file."""

    role: Role
    content: str  # hex digest of the file's bytes; empty for a bare sequence
    chains: tuple[ChainSummary, ...]
    notes: Mapping[str, int] = field(default_factory=dict)
    left_out: tuple[tuple[str, str, str, str], ...] = ()  # residues that are no nodes: chain, name, number, their atoms

    @property
    def residues(self) -> int:
        """Count the observed residues."""
        return sum(chain.residues for chain in self.chains)

    @property
    def nodes(self) -> int:
        """Count the residues that become nodes."""
        return sum(chain.nodes for chain in self.chains)

    @property
    def atoms(self) -> int:
        """Count the atoms of the observed residues."""
        return sum(chain.atoms for chain in self.chains)


@dataclass(frozen=True, slots=True)
class Inventory:
    """What scanning found in one item; or why it was left out."""

    partners: tuple[Partner, ...] = ()
    bound: tuple[Partner, ...] = ()
    reason: Reason | None = None
    detail: str = ""

    def sides(self) -> list[tuple[str, Partner]]:
        """Return the partners, and those of the bound structures, with the names by which people know them."""
        bound = ((f"bound {partner.role.value}", partner) for partner in self.bound)
        return [*((partner.role.value, partner) for partner in self.partners), *bound]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {key: value for key, value in asdict(self).items() if value}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Inventory:
        """Read what `to_json` wrote."""
        return cls(
            partners=_partners(data.get("partners", ())),
            bound=_partners(data.get("bound", ())),
            reason=Reason(data["reason"]) if "reason" in data else None,
            detail=data.get("detail", ""),
        )


def _partners(data: Iterable[Mapping[str, Any]]) -> tuple[Partner, ...]:
    """Read partners from plain JSON data."""
    return tuple(
        Partner(
            role=Role(one["role"]),
            content=one["content"],
            chains=tuple(ChainSummary(**{**chain, "kind": Kind(chain["kind"])}) for chain in one["chains"]),
            notes=one["notes"],
            left_out=tuple((chain, name, number, atoms) for chain, name, number, atoms in one.get("left_out", ())),
        )
        for one in data
    )
