"""The status of a run, computed only from its events, so that it is the same during and after the run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from pipeline.cluster.job_spec import JobId, Limits, parse_ranges
from pipeline.cluster.machine import is_alive
from pipeline.cluster.verdict import PEER_LOST, Cause, Word, is_interruption
from pipeline.codec import plain
from pipeline.journal.attempts import SILENCE, Ask, Attempt, TaskRecord, reported
from pipeline.journal.ledger import LedgerReader
from pipeline.records import LOWEST_COSINE, Event, EventKind

Reported = TypeVar("Reported")

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.journal.run_folder import RunFolder


COUNTED = (
    "items", "refused", "unusable", "cached", "missing", "tasks", "waiting", "residues", "unkept", "unnamed", "sets",
    "encoders",
)  # fmt: skip


class State(StrEnum):
    """The state of a run, stage, task, sweep point or item; or of a stage before a run."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"
    ABANDONED = "abandoned"  # its supervisor died without recording an end
    STALLED = "stalled"  # a waiting task of an orphaned run
    CANCELLED = "cancelled"  # by a user, alone
    PRUNED = "pruned"
    INFEASIBLE = "infeasible"  # a point without a plan
    UNDONE = "not done"
    TO_DO = "to do"
    REFUSED = "refused"
    NOTHING = "nothing to do"

    @property
    def word(self) -> str:
        """The state as shown on screens; documents use its value."""
        return {State.ABANDONED: "orphaned", State.REFUSED: "rejected"}.get(self, self.value)


ENDED = frozenset({State.DONE, State.FAILED, State.STOPPED})
GOING_ON = (State.WAITING, State.RUNNING)
OOMS = "ooms"  # a figure: out-of-memory steps of a process so far
LOSS = "loss"  # the training loss; with several terms: loss.NAME
MOST_SLOTS = 400  # most time slots of a stage


@dataclass(frozen=True, slots=True)
class StageJob:
    """A job of a stage, as it was submitted."""

    tag: str
    stage: str
    tasks: str  # ranges
    attempt: int
    ask: Ask
    id: JobId = ""
    cpus: int = 1
    gpus: int = 0
    partition: str = ""
    constraint: str = ""
    card: str = ""
    parallel: int = 0  # tasks at once; 0: as configured
    why: str = ""  # the source of its memory request
    planned_bytes: int = 0  # memory of a task, before correction by measurements
    recipe: str = ""  # key of its remembered measurements
    where: str = ""  # why its tasks use their partition
    nodes: int = 1  # of a task, as the next
    ranks: int = 1  # processes on each node, each with so many cpus
    sharing: int = 1  # tasks that run side by side and share the GPUs
    at: float = 0.0

    @property
    def groups(self) -> list[list[int]]:
        """The tasks that run side by side; the executor knows each group by its first task."""
        tasks = parse_ranges(self.tasks)
        return [tasks[first : first + self.sharing] for first in range(0, len(tasks), self.sharing)]

    @property
    def cores(self) -> int:
        """Cores of one task, on all of its nodes."""
        return self.cpus * self.ranks * self.nodes

    @property
    def cards(self) -> float:
        """GPUs of one task, on all of its nodes."""
        return self.gpus * self.nodes / self.sharing

    @property
    def shared(self) -> str:
        """Describe how many tasks share a GPU; empty without sharing."""
        return f"{self.sharing} a {'GPU' if self.gpus else 'job'}" if self.sharing > 1 else ""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data; the time of submission is that of the event."""
        return {name: value for name, value in plain(self).items() if name != "at"}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], at: float = 0.0) -> StageJob:
        """Return the job that `to_json` wrote, submitted at a time."""
        return replace(reported(cls, data), at=at)


NO_JOB = StageJob("", "", "", 0, Ask(0, 0))  # default for a ledger without a job: one core, no GPU


@dataclass(slots=True)
class TimeSlots:
    """Counts over time, in any order of events. Slots double their width instead of becoming too many."""

    width_s: int = 1
    counts: Counter[int] = field(default_factory=Counter)
    totals: dict[str, int] = field(default_factory=dict)  # process → its count in the present attempt

    def count(self, at: float, process: str, total: int) -> None:
        """Add the count of a process at a time; repeated work counts again."""
        if (more := total - self.totals.get(process, 0)) <= 0:
            return
        self.totals[process] = total
        self.counts[int(at) // self.width_s] += more
        while len(self.counts) > MOST_SLOTS:
            wider = Counter[int]()
            for slot, known in self.counts.items():
                wider[slot // 2] += known
            self.width_s, self.counts = 2 * self.width_s, wider


@dataclass(frozen=True, slots=True)
class Trial:
    """A point of a search: its settings, and how it ended."""

    number: int
    name: str
    settings: Mapping[str, Any]
    task: int | None = None  # None: nothing was trained
    state: State = State.RUNNING
    value: float | None = None  # the best one of the monitored metric
    epochs: int = 0  # epochs trained
    why: str = ""


@dataclass(slots=True)
class StageStatus:
    """One stage of a run."""

    name: str
    state: State = State.RUNNING
    items: int = 0
    refused: int = 0
    unusable: int = 0
    cached: int = 0
    missing: int = 0
    tasks: int = 0
    names: list[str] = field(default_factory=list)  # of tasks: an encoder, or a point of a sweep
    parts: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # encoder → counts, if there are several
    of: str = ""  # the encoder, if this is a part
    waiting: int = 0  # items waiting for an earlier stage
    residues: int = 0  # to do
    unkept: int = 0  # graphs built on reading, never stored
    unnamed: int = 0  # missing, but not on the run's damage list
    sets: int = 0  # whole data sets, if items cannot be counted before a reader has read them
    encoders: int = 0  # if several: the counts are of embeddings, not sequences
    cost: float = 0.0  # work to do, in the unit of the figure `cost_done`
    planned: StageJob | None = None  # the job of first attempts; None before the stage begins
    own: dict[str, StageJob] = field(default_factory=dict)  # task name → job, for tasks with their own plans
    search: Mapping[str, Any] = field(default_factory=dict)  # trials, monitor, lower; empty: not a search
    asked: dict[int, Trial] = field(default_factory=dict)  # trials of a search, by number
    limits: Limits | None = None  # limits used for that plan, if known
    done: dict[str, int] = field(default_factory=dict)  # process → items
    rejected: dict[str, Mapping[str, int]] = field(default_factory=dict)  # process → reason → items
    figures: dict[str, Mapping[str, float]] = field(default_factory=dict)  # process → its latest figures
    work: dict[int, TaskRecord] = field(default_factory=dict)  # task number → its record
    jobs: dict[JobId, StageJob] = field(default_factory=dict)
    sent: int = 0  # jobs so far; more than len(jobs) if a controller lost its state and reused ids
    intents: dict[str, StageJob] = field(default_factory=dict)  # tag → an announced job that may be queued or not
    left_out: list[Mapping[str, Any]] = field(default_factory=list)
    census: Mapping[str, Any] | None = None
    judged: list[str] = field(default_factory=list)  # warnings of the stage's end
    warned: dict[str, Sequence[str]] = field(default_factory=dict)  # process → its warnings
    error: str = ""
    submitted: bool = False
    started_at: float = 0.0
    ended_at: float = 0.0
    lost_s: float = 0.0  # seconds from a process's end until its training progressed again
    ooms: TimeSlots = field(default_factory=TimeSlots)  # out-of-memory steps over time; only in a deep view

    def task(self, number: int) -> TaskRecord:
        """Return the record of a task, a new one if there is none."""
        if number not in self.work:
            self.work[number] = TaskRecord(number)
        return self.work[number]

    @property
    def title(self) -> str:
        return f"{self.name} {self.of}".rstrip()

    def by_part(self) -> list[StageStatus]:
        """Return the status of each encoder if there are several, else only this one."""
        return [self._part(name) for name in self.parts] or [self]

    def _part(self, name: str) -> StageStatus:
        """Return the counts and the tasks of one encoder."""
        work = {number: task for number, task in self.work.items() if self.name_of(number) == name}

        def mine(reported: dict[str, Reported]) -> dict[str, Reported]:
            return {process: value for process, value in reported.items() if int(process.split("-")[1]) in work}

        part = replace(self, of=name, parts={}, census=None, work=work, planned=self.own.get(name))
        part.done, part.rejected, part.figures = mine(self.done), mine(self.rejected), mine(self.figures)
        for column, count in self.parts[name].items():
            setattr(part, column, count)
        part.tasks = sum(not task.split for task in work.values())
        return part

    @property
    def is_swept(self) -> bool:
        """Whether its tasks are points of a sweep."""
        return bool(self.names or self.search) and not self.parts

    @property
    def best_trial(self) -> Trial | None:
        """The first trial with the best value so far."""
        known = [trial for trial in self.asked.values() if trial.value is not None]
        return min(known, key=lambda trial: (trial.value or 0.0) * (1 if self.search["lower"] else -1), default=None)

    def plan_of(self, number: int, shared: StageJob) -> StageJob:
        """Return the planned job of a task: that of its encoder or trial; points of a grid share one."""
        return self.own.get(self.name_of(number), shared) if self.parts or self.search else shared

    def name_of(self, number: int) -> str:
        """Return the name of a task's encoder or point; empty without names."""
        return self.names[number] if number < len(self.names) else ""

    def label(self, number: int) -> str:
        """Return a task's number and encoder, or the name of its point."""
        name = self.name_of(number)
        if name and self.is_swept:
            return name
        return f"{number} of {name}" if name else f"{number}"

    def called(self, number: int) -> str:
        """Return the name of a task for messages."""
        return self.label(number) if self.is_swept else f"task {self.label(number)}"

    def give_name(self, number: int, name: str) -> None:
        """Set the name of a task."""
        self.names += [""] * (number + 1 - len(self.names))
        self.names[number] = name

    def split(self, number: int, into: Sequence[int], ask: Ask, why: str) -> None:
        """Replace a task by its parts; forget its progress, which they repeat."""
        if self.task(number).split:
            return
        self.task(number).then[self.task(number).attempt] = why
        self.task(number).split = tuple(into)
        self.tasks += len(into) - 1
        for part in into:
            self.task(part).first = ask
            if name := self.name_of(number):
                self.give_name(part, name)
        process = f"{self.name}-{number:06d}"
        for name in [name for name in self.done if name == process or name.startswith(f"{process}-")]:
            for counts in (self.done, self.rejected, self.figures):
                counts.pop(name, None)

    @property
    def warnings(self) -> list[str]:
        """Warnings of its processes and of its end."""
        return list(dict.fromkeys(chain(*self.warned.values(), self.judged)))

    def counts(self) -> dict[str, int]:
        """Return the counts from the submission of the stage."""
        return {name: getattr(self, name) for name in COUNTED}

    @property
    def items_done(self) -> int:
        """Items that the tasks have finished, at most all."""
        undone = int((self.census or {}).get("undone", 0))
        return min(sum(self.done.values()), max(0, self.missing - undone)) if undone else sum(self.done.values())

    @property
    def reasons(self) -> Counter[str]:
        """Rejections so far, by reason."""
        counted = Counter[str]()
        for reasons in self.rejected.values():
            for reason, items in reasons.items():
                counted[reason] += items
        return counted

    @property
    def failures(self) -> list[Attempt]:
        """Failed attempts: all first ones, then all second ones."""
        failed = [
            attempt
            for task in self.work.values()
            for attempt in task.ended
            if attempt.cause not in ((Cause.DONE, Cause.CANCELLED) if task.cancelled else (Cause.DONE,))
        ]
        return sorted(failed, key=lambda attempt: (attempt.number, attempt.task))

    @property
    def restarts(self) -> list[Attempt]:
        """Starts that were followed by a restart in their jobs."""
        return [start for task in self.work.values() for start in task.restarts]

    @property
    def cancelled(self) -> dict[str, str]:
        """The points that users cancelled → who cancelled each."""
        return {self.name_of(number): task.cancelled for number, task in self.work.items() if task.cancelled}

    def use(self) -> dict[str, int | None]:
        """Return the most memory that a task requested, and the most that one used."""
        ended = [attempt for task in self.work.values() for attempt in task.ended]
        sizes = {
            "asked_bytes": (task.ask.mem_bytes for task in self.work.values() if task.ask),
            "peak_bytes": (attempt.peak_rss_bytes for attempt in ended if attempt.peak_rss_bytes),
            "gpu_peak_bytes": (attempt.gpu_peak_bytes for attempt in ended if attempt.gpu_peak_bytes),
        }
        return {name: max(each, default=None) for name, each in sizes.items()}

    def highest(self, figure: str) -> int:
        """Return the highest value of a figure over all processes; 0 if none reports it."""
        return max((int(figures.get(figure, 0)) for figures in self.figures.values()), default=0)

    @property
    def loss(self) -> float | None:
        """The latest loss that a process reported, as the sum of its terms."""
        for figures in reversed(self.figures.values()):
            if terms := [value for name, value in figures.items() if name.startswith(f"{LOSS}.")]:
                return sum(terms)
            if named := [figures[name] for name in (LOSS, f"script.{LOSS}") if name in figures]:
                return named[0]
        return None

    @property
    def live(self) -> list[JobId]:
        """Jobs with tasks that have not ended."""
        return list(dict.fromkeys(task.job for task in self.work.values() if task.job))

    def cancelled_groups(self, job: JobId) -> list[int]:
        """Return the first task of each group of a job whose unfinished tasks a user has all cancelled.

        A single task of a group is ended by the process that started it.
        """
        found = []
        for group in self.jobs[job].groups:
            going = [task for number in group if (task := self.task(number)).job == job]
            found += group[:1] if going and all(task.cancelled for task in going) else []
        return found

    def task_states(self) -> dict[State, int]:
        """Count the tasks by state; a split task counts by its parts."""
        return dict(Counter(self.state_of(task) for task in self.work.values() if not task.split))

    def state_of(self, task: TaskRecord) -> State:
        """Return the state of a task: by its worker's reports until a supervisor has judged its attempt."""
        word, is_judged = task.word, task.job is None
        if task.good or (word.finished and not is_judged):
            return State.DONE
        if task.cancelled and not word.finished:
            return State.CANCELLED
        left_off = is_interruption(word.exit_code or 0)  # Slurm or a supervisor restarts it
        if (is_judged and task.ended) or (not is_judged and word.exit_code and not left_off):
            return State.FAILED
        if not is_judged and self.state is State.STOPPED:  # by the end of its run
            return State.STOPPED
        if not is_judged and word.started and not left_off:
            return State.RUNNING
        return State.STALLED if self.state is State.ABANDONED else State.WAITING

    def measured(self) -> dict[str, float]:
        """Combine the figures of all processes."""
        running = sum(not self.task(int(process["task"])).good for process in self.figures.values())
        return summary(list(self.figures.values()), self.cost, running)

    def to_json(self) -> dict[str, Any]:
        shown = {column.name: getattr(self, column.name) for column in fields(self) if column.name not in PRIVATE}
        failures = [
            plain(attempt) | {"then": self.task(attempt.task).then.get(attempt.number, "")} for attempt in self.failures
        ]
        return shown | {
            "state": self.state.value,
            "items_done": self.items_done,
            "warnings": self.warnings,
            "reasons": dict(self.reasons),
            "measured": self.measured(),
            "task_states": self.task_states(),
            "failures": failures,
            "restarts": plain(self.restarts),
            "jobs": [job.to_json() for job in self.jobs.values()],
            "left_out": list(self.left_out),
            "asked": plain(list(self.asked.values())),
        }


PRIVATE = (
    "of",
    "judged", "warned", "work", "jobs", "intents", "submitted", "sent", "left_out", "planned", "limits", "own", "names",
    "ooms",
)  # fmt: skip


def summary(figures: Sequence[Mapping[str, float]], cost: float, running: int) -> dict[str, float]:
    """Combine the figures of processes, of which `live` still run, into those of their stage."""
    busy = [process for process in figures if process.get("forward_s")]
    if not busy:
        return {}

    def total(name: str) -> float:
        return sum(process[name] for process in busy)

    left, lowest = max(0.0, cost - total("cost_done")), dict[str, float]()  # the lowest cosine to each reference
    for name, cosine in (figure for process in busy for figure in process.items()):
        if name.startswith(LOWEST_COSINE):
            lowest[name] = min(cosine, lowest.get(name, cosine))
    return {
        "residues_per_s": total("residues") / total("forward_s"),  # of one process
        "pad_factor": total("tokens") / max(1, total("encoded_residues")),
        "left_s": left / (total("cost_done") / total("forward_s") * max(1, running)) if total("cost_done") else 0.0,
        "peak_rss_bytes": max(process["host_peak_bytes"] for process in busy),
        "peak_gpu_bytes": max(process["device_peak_bytes"] for process in busy),
        "splits": total("splits"),
        **lowest,
    }


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait of jobs for something that needs a person, and its duration."""

    of: str  # a stage, or `supervise`
    reason: str  # Slurm's word for the reason
    number: int = 1  # ordinal of this wait for the same reason
    words: str = ""
    remedy: str = ""
    tasks: int = 0
    since: float = 0.0
    until: float = 0.0

    @property
    def is_over(self) -> bool:
        return self.until > 0

    def lasted_s(self, now: float) -> float:
        """Return the duration of the wait in seconds."""
        return max(0.0, (self.until or now) - self.since)


@dataclass(slots=True)
class RunStatus:
    """One run."""

    name: str
    state: State = State.WAITING
    stages: dict[str, StageStatus] = field(default_factory=dict)
    host: str = ""
    pid: int = 0
    uid: int | None = None  # user of its process
    born: float = 0.0  # when it was created
    seen: float = 0.0  # when it was seen at work
    until: float = float("inf")  # latest possible end of its last supervisor
    visits: int = 0
    unfinished: int = 0  # visits since the last one that handed over
    successors: tuple[JobId, ...] = ()  # the jobs of the present visit, if it is one, and of the next
    waits: list[Wait] = field(default_factory=list)
    planned: tuple[str, ...] = ()  # the stages to run
    error: str = ""
    exit_code: int = 0
    started_at: float = 0.0
    ended_at: float = 0.0
    names: dict[JobId, str] = field(default_factory=dict)  # supervisor job → its unique name in the queue
    cluster: str = ""  # Slurm's name of the cluster that has its jobs
    deep: bool = False  # whether to count over time

    def apply(self, event: Event) -> None:
        """Update the status by an event."""
        data = event.data
        if "stage" in data:
            self._apply_to_stage(event)
        elif event.kind is EventKind.RUN_STARTED:
            self.state, self.started_at = State.RUNNING, self.started_at or event.at
            self.planned = tuple(data["stages"])
            self._look_after(event)
            self.error, self.exit_code, self.ended_at = "", 0, 0.0
        elif event.kind is EventKind.VISIT:
            self.visits, self.unfinished = data["number"], self.unfinished + 1
            self._look_after(event)
            if data.get("job"):
                self.names.setdefault(data["job"], data.get("name", ""))
                self.successors = tuple(dict.fromkeys((data["job"], *self.successors)))
        elif event.kind in (EventKind.SUCCESSOR, EventKind.HANDED_OVER):
            self.successors = tuple(data["jobs"])
            self.names = dict(zip(data["jobs"], data.get("names", ()), strict=False))
            if event.kind is EventKind.HANDED_OVER:
                self.unfinished = 0
        elif event.kind in (EventKind.WAITING, EventKind.WAITED):
            self._wait(event)
        elif event.kind is EventKind.RUN_ENDED:
            self.state, self.ended_at = State(data["state"]), event.at
            self.error, self.exit_code, self.successors = data["error"], data["exit_code"], ()
            self.settle()

    def _wait(self, event: Event) -> None:
        """Record that a wait has begun or ended."""
        new = reported(Wait, event.data)
        known = self.open_wait(new)
        if known is not None:
            self.waits[self.waits.index(known)] = replace(known, until=new.until)
        elif not new.is_over:
            before = sum((wait.of, wait.reason) == (new.of, new.reason) for wait in self.waits)
            self.waits.append(replace(new, number=before + 1))

    def _look_after(self, event: Event) -> None:
        self.host, self.pid, self.uid = event.data["host"], event.data["pid"], event.data.get("uid")
        self.born, self.seen = event.data.get("born", 0.0), event.at
        self.cluster = event.data.get("cluster") or self.cluster
        self.until = event.data.get("until") or float("inf")

    @property
    def queued_as(self) -> dict[JobId, str]:
        """The jobs that may not have ended, each with its unique name in the queue."""
        own = {job: self.names.get(job, "") for job in self.successors}
        return own | {job: row.jobs[job].tag for row in self.stages.values() for job in row.live}

    def elsewhere(self, here: str) -> str:
        """Return a note if the run belongs to another cluster than `here`, else an empty text."""
        if not self.cluster or here in ("", self.cluster):
            return ""
        return f"run {self.name} belongs to Slurm cluster {self.cluster}; this machine uses cluster {here}"

    def open_wait(self, like: Wait) -> Wait | None:
        """Return the open wait of the same jobs for the same reason, or None."""
        alike = (wait for wait in self.waits if (wait.of, wait.reason) == (like.of, like.reason))
        return next((wait for wait in alike if not wait.is_over), None)

    @property
    def has_process(self) -> bool:
        """Whether the process of its last supervisor lives; to be asked on its host."""
        return is_alive(self.pid, self.born, seen=self.seen, uid=self.uid)

    def abandon(self) -> None:
        """Mark the run as one without a supervisor."""
        self.state = State.ABANDONED
        self.settle()

    def settle(self) -> None:
        """Give running stages the state of the run, which has ended."""
        for stage in self.stages.values():
            if stage.state is State.RUNNING:
                stage.state = self.state

    def _apply_to_stage(self, event: Event) -> None:
        """Update the status by an event of a stage or of one of its tasks."""
        data = event.data
        stage = self.stages.get(data["stage"])
        if stage is None:
            stage = self.stages[data["stage"]] = StageStatus(data["stage"], started_at=event.at)
        if event.kind in WORDS:
            _take_report(stage, event)
            if self.deep:
                _count(stage, event)
        elif event.kind is EventKind.TASK_GIVEN_UP:
            stage.task(data["task"]).then[data["attempt"]] = data["why"]
        elif event.kind is EventKind.TASK_CANCELLED:
            stage.task(data["task"]).cancelled = data["why"]
        elif event.kind is EventKind.CAUGHT_UP:
            stage.lost_s += data["lost_s"]
        elif event.kind is EventKind.TASK_ENDED:
            _end(stage, reported(Attempt, data))
        elif event.kind is EventKind.STAGE_SUBMITTED:
            _begin(stage, event)
        elif event.kind is EventKind.TRIAL_ASKED:
            _ask(stage, data)
        elif event.kind is EventKind.TRIAL_ENDED:
            stage.asked[data["number"]] = reported(Trial, data)
        elif event.kind is EventKind.STAGE_ENDED:
            stage.state, stage.ended_at = State(data["state"]), event.at
            stage.census, stage.judged, stage.error = data["census"], data["warnings"], data["error"]
        elif event.kind in (EventKind.JOB_SUBMITTING, EventKind.JOB_SUBMITTED, EventKind.JOB_REFUSED):
            _submit(stage, event)
        elif event.kind is EventKind.LEFT_OUT:
            stage.left_out.append(dict(data))
        elif event.kind is EventKind.TASK_SPLIT:
            stage.split(data["task"], data["into"], Ask(**data["ask"]), data["why"])

    def to_json(self) -> dict[str, Any]:
        shown = {column.name: getattr(self, column.name) for column in fields(self) if column.name not in INTERNAL}
        return shown | {
            "state": self.state.value,
            "waits": plain(self.waits),
            "stages": [stage.to_json() for stage in self.in_order()],
        }

    def in_order(self) -> list[StageStatus]:
        """Return the stages in the order in which they began."""
        return sorted(self.stages.values(), key=lambda stage: stage.started_at)


INTERNAL = ("born", "seen", "until", "uid", "unfinished", "names", "deep")  # only for this package


def _begin(stage: StageStatus, event: Event) -> None:
    """Record the counts and the plan of a stage that begins."""
    for name in (*COUNTED, "cost"):
        setattr(stage, name, event.data.get(name, 0))
    if "job" in event.data:
        stage.planned = StageJob.from_json(event.data["job"])
        stage.limits = Limits(**event.data["limits"]) if event.data["limits"] else None
    stage.state, stage.submitted, stage.started_at = State.RUNNING, True, event.at
    for number in range(stage.tasks):
        stage.task(number)
    stage.parts, stage.search = event.data.get("parts", {}), event.data.get("search", {})
    for name, job in event.data.get("jobs", {}).items():
        _plan(stage, name, job)


def _plan(stage: StageStatus, name: str, job: Mapping[str, Any]) -> None:
    """Record the planned job of the tasks of an encoder or of a point."""
    stage.own[name] = StageJob.from_json(job)
    for number in parse_ranges(job["tasks"]):
        stage.give_name(number, name)
        stage.task(number).first = stage.own[name].ask


def _ask(stage: StageStatus, data: Mapping[str, Any]) -> None:
    """Add a trial, and the task that trains it."""
    trial = reported(Trial, data)
    if trial.number in stage.asked:  # two visits may add it
        return
    stage.asked[trial.number] = trial
    for name, count in data["counts"].items():
        setattr(stage, name, getattr(stage, name) + count)
    if trial.task is not None:
        _plan(stage, trial.name, data["job"])


def _submit(stage: StageStatus, event: Event) -> None:
    """Record that a job is about to be submitted, was submitted, or was refused."""
    job = StageJob.from_json(event.data, event.at)
    stage.intents.pop(job.tag, None)
    if event.kind is EventKind.JOB_SUBMITTING:
        stage.intents[job.tag] = job
    elif event.kind is EventKind.JOB_SUBMITTED:
        stage.jobs[job.id], stage.sent = job, stage.sent + 1
        for number in parse_ranges(job.tasks):
            task = stage.task(number)
            task.job, task.ask, task.attempt = job.id, job.ask, job.attempt
            task.then[job.attempt - 1] = job.why


def _end(stage: StageStatus, attempt: Attempt) -> None:
    """Record how an attempt ended."""
    task = stage.task(attempt.task)
    if (attempt.number, attempt.job) not in (
        (known.number, known.job) for known in task.ended
    ):  # two visits may report it
        task.ended.append(attempt)
    if task.job == attempt.job:
        task.job = None


def _take_report(stage: StageStatus, event: Event) -> None:
    """Record what a worker reports of its task."""
    data, task = event.data, stage.task(event.data["task"])
    attempt = data.get("attempt", 1)
    if event.kind in (EventKind.PROGRESS, EventKind.TASK_FINISHED) and not task.split:
        stage.done[event.writer] = data["done"]
        stage.rejected[event.writer] = data["rejected"]
        if data.get("figures"):
            stage.figures[event.writer] = {**data["figures"], "task": data["task"]}
        if data.get("warnings"):
            stage.warned[event.writer] = data["warnings"]
    word = task.words.get(attempt, SILENCE)
    if event.kind is EventKind.RESTARTED:
        task.restarts.append(reported(Attempt, data))
        stage.lost_s += data["lost_s"]
    began = max(word.began, event.at) if event.kind in STARTS else word.began
    is_fault = event.kind is EventKind.TASK_FAILED and event.at >= began and word.exit_code == PEER_LOST
    if event.at < word.at and not is_fault:  # a newer report from another file was read before
        if began > word.began:
            task.say(attempt, began=began)
    elif event.kind in STARTS:
        # a new start: requeued, or restarted in its job
        task.words[attempt] = Word(started=True, at=event.at, began=began)
    elif event.kind is EventKind.TASK_FINISHED:
        task.words[attempt] = Word(started=True, finished=True, at=event.at, began=began)
    elif event.kind is EventKind.TASK_FAILED and not (data["exit_code"] == PEER_LOST and word.exit_code):
        task.say(
            attempt,
            started=True,
            exit_code=data["exit_code"],
            what=data["what"],
            kind=data.get("trouble", ""),
            at=max(event.at, word.at),
        )


def _count(stage: StageStatus, event: Event) -> None:
    """Count the out-of-memory steps of a process over time."""
    if event.kind is EventKind.TASK_STARTED:
        stage.ooms.totals[event.writer] = 0
    elif event.kind in (EventKind.PROGRESS, EventKind.TASK_FINISHED):
        stage.ooms.count(event.at, event.writer, int(event.data.get("figures", {}).get(OOMS, 0)))


STARTS = (EventKind.TASK_STARTED, EventKind.RESTARTED)
WORDS = (*STARTS, EventKind.PROGRESS, EventKind.TASK_FINISHED, EventKind.TASK_FAILED)


class StatusReader:
    """Keeps the status of a run up to date with its ledger."""

    def __init__(self, folder: RunFolder, *, deep: bool = False) -> None:
        self.folder, self.status = folder, RunStatus(folder.name, deep=deep)
        self.ledger = LedgerReader(folder, whole=deep)

    def read(self) -> RunStatus:
        """Apply the events since the last call; return the status."""
        for event in self.ledger.fresh():
            self.status.apply(event)
        return self.status
