"""What a stage of the workflow is: the contract of the stages beside this file, and how their results are counted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from pipeline.config.schema_cluster import TrainResources
from pipeline.records import StageName
from pipeline.runs.dataset import worklist
from pipeline.runs.dataset.reader_items import is_reader
from pipeline.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping
    from typing import TypeAlias

    from pipeline.config.schema import Config
    from pipeline.config.schema_cluster import StageResources
    from pipeline.journal.run_folder import RunFolder
    from pipeline.project.project import Project
    from pipeline.records import Reason, Rejection, Tell
    from pipeline.runs.dataset.worklist import Shard, StageSurvey
    from pipeline.store.store import Store

    Outcomes: TypeAlias = Generator[Reason | None, None, None]  # of one thing each: done, or rejected for a reason

LOOK_AGAIN_S = 0.5


class StageResult(Protocol):
    """What a stage has made, by the content of the store."""

    @property
    def items(self) -> int:
        """How many items were judged, accepted and rejected."""

    @property
    def accepted(self) -> int:
        """How many items can be used."""

    @property
    def undone(self) -> int:
        """How many items the store does not have everything of."""

    @property
    def first_undone(self) -> str:
        """The id of one of them."""

    @property
    def unnamed(self) -> int:
        """How many further items it does not have everything of, which the list of the run does not name."""

    def to_json(self) -> dict[str, Any]: ...


@dataclass(slots=True)
class Judged:
    """How many items can be used, how many cannot and why, and how many have still to be done."""

    items: int = 0  # those that are known: accepted and rejected
    rejected: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)
    undone: int = 0  # items of which the store does not have everything
    first_undone: str = ""
    unnamed: int = 0  # further ones, which nobody asked for

    @property
    def accepted(self) -> int:
        return self.items - sum(self.rejected.values())

    def reject(self, rejected: Rejection) -> None:
        """Count an item that was left out."""
        self.items += 1
        reason = rejected.reason.value
        self.rejected[reason] = self.rejected.get(reason, 0) + 1
        self.examples.setdefault(reason, f"{rejected.id}: {rejected.detail}")

    def miss(self, item: str, *, required: bool = True) -> None:
        """Count an item that has still to be done."""
        if not required:
            self.unnamed += 1
            return
        self.undone += 1
        self.first_undone = self.first_undone or item

    def to_json(self) -> dict[str, Any]:
        fraction = 1 - self.accepted / self.items if self.items else 0.0
        return asdict(self) | {"accepted": self.accepted, "rejected_fraction": fraction}


class Countable(Protocol):
    """What says how much is not there."""

    @property
    def undone(self) -> int:
        """How many items the store does not have everything of."""


Counted = TypeVar("Counted", bound=Countable)


def wait_until_complete(stores: Iterable[Store], count: Callable[[], Counted], within_s: float) -> Counted:
    """Recount until nothing is missing or the time is up: what other nodes wrote may be seen late."""
    stores, counted = tuple(stores), list[Counted]()

    def is_complete() -> bool:
        for store in stores:
            store.refresh()
        counted[:] = [count()]
        return not counted[0].undone

    wait_for(is_complete, within_s, LOOK_AGAIN_S)
    return counted[0]


class Stage(ABC):
    """A stage under a configuration; an instance keeps nothing, and the facts about it are those of its class."""

    name: ClassVar[StageName]
    kinds: ClassVar[tuple[str, ...]] = ()  # of records whose index is brought up to date afterwards
    needs: ClassVar[tuple[StageName, ...]] = ()  # stages that must have run before
    of_sequences: ClassVar[bool] = True  # whether it has anything to do for bare sequences
    of_entries: ClassVar[bool] = True  # and for what a reader gives, which is no structure
    process_per_gpu: ClassVar[bool] = False
    together: ClassVar[bool] = False  # its processes are ranks of one task, on as many nodes as it has
    counts_items: ClassVar[bool] = True  # else what it works through are parts of items
    may_be_empty: ClassVar[bool] = False  # no item at all is said, and no failure
    only_looks: ClassVar[bool] = False  # it leaves the records of the cache as they are
    has_tasks: ClassVar[bool] = True  # else it only judges what the stages before it have made
    lists_lines: ClassVar[bool] = False  # a task is a range of lines of its list, else of rows

    @abstractmethod
    def inspect(self, project: Project) -> object:
        """Raise when what the stage reads cannot be used as it stands."""

    @abstractmethod
    def survey(self, project: Project, folder: RunFolder | None, at_once: int) -> StageSurvey:
        """Return what is missing, in tasks, of which so many can run at once; write it down where there is a folder."""

    @abstractmethod
    def mem_bytes(self, project: Project) -> int:
        """Return the memory of a task, where the configuration says `auto`."""

    def gpu_bytes(self, project: Project) -> int:  # noqa: ARG002 - most stages need no card
        """Return the memory that a card must have at least."""
        return 0

    @abstractmethod
    def work(self, project: Project, folder: RunFolder, task: int, tell: Tell) -> Outcomes:
        """Do one task, or one process's part of it, yielding what became of each thing."""

    @abstractmethod
    def recipe(self, project: Project) -> Mapping[str, Any]:
        """Return by which choices its records are made, or its tasks measured."""

    @abstractmethod
    def judge(self, project: Project, folder: RunFolder, patience_s: float) -> StageResult:
        """Say what the stage has made, by the content of the store; wait so long for what may be seen late."""

    def check(self, project: Project, folder: RunFolder, judged: Any) -> list[str]:  # noqa: ARG002
        """Raise on what forbids going on; return what deserves a warning."""
        return []

    def halve(self, folder: RunFolder, shard: Shard) -> tuple[Shard, Shard]:
        """Cut one task's share in two."""
        return worklist.halve_lines(folder.todo(self.name), shard) if self.lists_lines else worklist.halve_rows(shard)

    def wanted(self, config: Config) -> bool:  # noqa: ARG002
        """Tell whether `all` means it, too."""
        return True

    def is_for(self, config: Config) -> bool:
        """Tell whether it has anything to do for a data set of that kind."""
        if is_reader(config):
            return self.of_entries
        return self.of_sequences or config.data.source != "fasta"

    def resources(self, config: Config) -> StageResources | TrainResources:
        """Return what the configuration gives a task."""
        resources: StageResources | TrainResources = getattr(config.cluster, self.name)
        return resources

    def processes(self, project: Project) -> int:
        """Return how many processes a task consists of."""
        resources = self.resources(project.config)
        if isinstance(resources, TrainResources):
            return resources.nodes * resources.ranks_per_node
        return max(1, resources.gpus) if self.process_per_gpu else 1
