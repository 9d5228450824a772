"""The frozen values that flow through the pipeline."""

from __future__ import annotations

import socket
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

SEVERAL = "PIPELINE_NODES"  # number of nodes, in the environment of each task on an allocation
NODE = "PIPELINE_NODE"  # "0/2" and a name for this start, in the environment of a task on several nodes
LOWEST_COSINE = "lowest cosine to"  # prefix of a figure; the name of the reference follows
NOT_FINITE = "is not finite"  # in the message of a training that `train.nan: stop` ends


class Reason(StrEnum):
    """Why an item was rejected; reports and JSON show the value."""

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
    DAMAGED = "damaged"  # its record in the cache


@dataclass(frozen=True, slots=True)
class Rejection:
    """A rejected item and the reason: data, not an exception."""

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
    """An item of a reader."""

    id: str
    place: Any  # its place as JSON data, for `read`
    arrays: Mapping[str, NDArray[Any]]  # `peaks.mz` is as long as all `peaks.…`; `mass` is one an item
    split: str = ""
    origin: str = ""  # its place for people: file and line, or file and number


class Kind(StrEnum):
    """What a polymer chain is made of."""

    PROTEIN = "protein"
    DNA = "dna"
    RNA = "rna"
    OTHER = "other"  # small molecules and ions


class Role(StrEnum):
    """The role of a part of an item in the complex."""

    RECEPTOR = "receptor"
    LIGAND = "ligand"
    COMPLEX = "complex"  # one file whose two polymer chains become receptor and ligand when it is read
    WHOLE = "whole"  # one file that is not divided


@dataclass(frozen=True, slots=True)
class Part:
    """Chains of one structure file; without names all polymer chains."""

    role: Role
    path: str
    chains: tuple[str, ...] = ()
    model: int | None = None
    optional: tuple[str, ...] = ()  # chains that may be absent

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
    """One complex (or one sequence) of the data set, before its files are read."""

    id: str
    parts: tuple[Part, ...] = ()
    bound: tuple[Part, ...] = ()  # where labels come from when `parts` are unbound structures
    sequence: str | None = None  # a FASTA entry has this and no parts
    split: str = ""
    cluster: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    origin: str = ""  # its file and line in the source, for messages

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data; written by hand for speed, as a data set has many items."""
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


FROM_STEP = "from_step"  # a figure: the step of the checkpoint from which a training started


class EventKind(StrEnum):
    """What happened in a run."""

    RUN_STARTED = "run_started"
    VISIT = "visit"  # a supervisor has started
    SUCCESSOR = "successor"  # the next visit is in the queue and starts when this one has ended
    HANDED_OVER = "handed_over"  # a visit has ended, and the next one waits for the jobs of tasks
    WAITING = "waiting"  # jobs wait for something that needs a person
    WAITED = "waited"  # that wait has ended
    STAGE_SUBMITTED = "stage_submitted"
    JOB_SUBMITTING = "job_submitting"  # written before submission, so that a job with a lost id is found by its tag
    JOB_SUBMITTED = "job_submitted"
    JOB_REFUSED = "job_refused"
    TRIAL_ASKED = "trial_asked"  # a search has chosen the settings of its next point
    TRIAL_ENDED = "trial_ended"
    TASK_SPLIT = "task_split"
    TASK_GIVEN_UP = "task_given_up"
    TASK_CANCELLED = "task_cancelled"  # a user cancelled this task; the others continue
    LEFT_OUT = "left_out"  # items that killed their task
    TASK_STARTED = "task_started"
    PROGRESS = "progress"
    REFUSED = "refused"  # a part of an item was found unusable during the work
    RESTARTED = "restarted"  # a training's processes restart in their job: one of them died or hung
    CAUGHT_UP = "caught_up"  # a start of a training has passed the progress of the previous one
    TASK_FINISHED = "task_finished"
    TASK_FAILED = "task_failed"
    TASK_ENDED = "task_ended"  # the verdict on an attempt
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
    """The index of this node within its task, and a name for this start of the task."""

    number: int = 0
    nodes: int = 1
    meeting: str = ""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> NodePlace:
        """Read the variables that the executor of an allocation sets. Default: one node."""
        place, _, meeting = environment.get(NODE, "0/1").partition(" ")
        number, _, nodes = place.partition("/")
        return cls(int(number), int(nodes), meeting)


@dataclass(frozen=True)
class RankPlace:
    """The rank of this process, the world size, and the name of this start of the ranks."""

    rank: int
    world: int
    local_rank: int = 0  # rank within its node
    nodes: int = 1
    meeting: str = ""  # unique name of this start
    host: str = field(default_factory=socket.gethostname)

    @classmethod
    def parse(cls, part: str, meeting: str, nodes: int = 1) -> RankPlace:
        """Parse our launcher's arguments: `1/3` and a name for the start; all nodes have equally many ranks."""
        rank, _, world = part.partition("/")
        if not (rank.isdigit() and world.isdigit() and int(rank) < int(world)):
            raise ValueError(f"`{part}` is not a rank and how many there are, as in 0/2")
        return cls(int(rank), int(world), int(rank) % (int(world) // nodes), nodes, meeting)

    @classmethod
    def by_slurm(cls, environment: Mapping[str, str], attempt: int = 1) -> RankPlace | None:
        """Return the rank in a Slurm step of several tasks, else None.

        Read the variables of the step: those of the job also reach processes that srun has not started.
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
    """The report of a process on its task, besides the outcomes that it yields."""

    figures: dict[str, float] = field(default_factory=dict)
    warnings: dict[Hashable, str] = field(default_factory=dict)  # key → the newest warning
    ended_by: int = 0  # the signal that ended the work early, in good order; 0: none
    moved: bool = False  # whether it made progress before that


@dataclass(frozen=True, slots=True)
class TaskContext:
    """The context of the work on a task: its limits, its rank, and where to report."""

    refuse: Callable[[str, Reason, str], None]  # takes the key (hex) of a record, the reason, details
    on: Callable[[Sequence[str]], None] = lambda _names: None  # takes the names of the items in work from now on
    ending: Callable[[], int] = lambda: 0  # the signal that asked the process to end; 0: none
    mem_bytes: int = 0  # memory of this task; 0: as configured
    shrink: int = 0  # how often to halve the batch budget
    careful: bool = False  # process one item at a time
    attempt: int = 1  # 1 is the first
    place: RankPlace = field(default_factory=lambda: RankPlace(0, 1))
    report: TaskReport = field(default_factory=TaskReport)


@dataclass(frozen=True, slots=True)
class ChainSummary:
    """A polymer chain of a partner, or a kept molecule, in the inventory."""

    name: str
    kind: Kind
    sequence: str  # the sequence for the encoder: observed residues or SEQRES
    residues: int  # observed residues
    nodes: int  # observed residues with the atoms that a node needs
    atoms: int


@dataclass(frozen=True, slots=True)
class Partner:
    """One side of a complex: chains of one file."""

    role: Role
    content: str  # hex digest of the file's bytes; empty for a bare sequence
    chains: tuple[ChainSummary, ...]
    notes: Mapping[str, int] = field(default_factory=dict)
    left_out: tuple[tuple[str, str, str, str], ...] = ()  # residues that are not nodes: chain, name, number, atoms

    @property
    def residues(self) -> int:
        """The observed residues."""
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
    """The result of scanning one item, or why it was rejected."""

    partners: tuple[Partner, ...] = ()
    bound: tuple[Partner, ...] = ()
    reason: Reason | None = None
    detail: str = ""

    def sides(self) -> list[tuple[str, Partner]]:
        """Return the partners, and those of the bound structures, with names for people."""
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
