"""The base class of the workflow's stages, and how their results are counted."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

from pipeline.dataset import worklist
from pipeline.dataset.blocks import BlockTally, add_up
from pipeline.dataset.columns import in_files
from pipeline.dataset.reader_items import is_reader
from pipeline.files import csv_lines, replacing
from pipeline.journal.run_folder import writing_run
from pipeline.stage_names import StageName
from pipeline.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from pipeline.config.schema import Config
    from pipeline.config.schema_cluster import StageResources, TrainResources
    from pipeline.dataset.worklist import Shard, StageSurvey
    from pipeline.journal.run_folder import RunFolder
    from pipeline.project.project import Project
    from pipeline.records import Reason, Rejection, TaskContext
    from pipeline.store.store import Store

    Outcomes: TypeAlias = Generator[Reason | None, None, None]  # for each item None, or why it was rejected

LOOK_AGAIN_S = 0.5


@dataclass(slots=True)
class Judged:
    """The result of a stage by the content of the store: accepted, rejected (with reasons) and missing items."""

    items: int = 0  # accepted and rejected
    rejected: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)
    undone: int = 0  # items with missing records
    first_undone: str = ""
    unnamed: int = 0  # missing items that the run was not asked to make

    @property
    def accepted(self) -> int:
        return self.items - sum(self.rejected.values())

    def reject(self, rejected: Rejection) -> None:
        """Count a rejected item."""
        self.items += 1
        reason = rejected.reason.value
        self.rejected[reason] = self.rejected.get(reason, 0) + 1
        self.examples.setdefault(reason, f"{rejected.id}: {rejected.detail}")

    def miss(self, item: str, *, required: bool = True) -> None:
        """Count a missing item."""
        if not required:
            self.unnamed += 1
            return
        self.undone += 1
        self.first_undone = self.first_undone or item

    def to_json(self) -> dict[str, Any]:
        fraction = 1 - self.accepted / self.items if self.items else 0.0
        rejected = dict(Counter(self.rejected).most_common())
        return asdict(self) | {"rejected": rejected, "accepted": self.accepted, "rejected_fraction": fraction}


Counted = TypeVar("Counted", bound=Judged)


@dataclass
class StageTally(BlockTally, Judged):
    """The counts of a stage for a block of the data set, or for all of it."""

    LISTS: ClassVar[Mapping[str, Sequence[str]]] = {"rejected": ()}  # lists in the run → columns of a table

    def reject(self, rejected: Rejection) -> None:
        """Count and list a rejected item."""
        super().reject(rejected)
        self.add_lines("rejected", json.dumps(rejected.to_json()).encode() + b"\n")

    def add_lines(self, name: str, lines: bytes) -> None:
        """Add lines to one of the lists."""
        self.lines.setdefault(name, bytearray()).extend(lines)

    def result(self, of: type[Counted], **more: Any) -> Counted:
        """Return what was counted as the result of the stage."""
        known = {part.name: getattr(self, part.name) for part in fields(of) if hasattr(self, part.name)}
        return of(**known | more)


Tally = TypeVar("Tally", bound=StageTally)


def add_blocks(total: Tally, folder: RunFolder, tallies: Iterable[Tally], required: Callable[[Any], bool]) -> Tally:
    """Add up the tallies of the blocks, and write the lists of the stage; return the total.

    The total keeps its columns in files, with the keys of the kinds that it names.
    """
    in_files(total, folder.path)
    with ExitStack() as opened:
        files = {name: list_file(getattr(folder, name), columns) for name, columns in total.LISTS.items()}
        lists = {name: opened.enter_context(file) for name, file in files.items()}
        for tally in tallies:
            add_up(total, tally)
            for kind, keys in total.keys.items():
                keys.extend(tally.keys.get(kind, b""))
            for name, lines in tally.lines.items():
                lists[name](lines)
            for known in tally.absent:
                total.miss(known.item.id, required=required(known))
    return total


@contextmanager
def list_file(path: Path, columns: Sequence[str] = ()) -> Iterator[Callable[[bytes | bytearray], Any]]:
    """Yield what adds lines to a list of a run, below a header; the file appears whole or not at all."""
    with writing_run(path), replacing(path) as aside, aside.open("wb") as file:
        if columns:
            file.write(csv_lines([columns]))
        yield file.write


def wait_until_complete(stores: Iterable[Store], count: Callable[[], Counted], within_s: float) -> Counted:
    """Recount until nothing is missing or the time is up: files of other nodes may appear late."""
    stores, counted = tuple(stores), list[Counted]()

    def is_complete() -> bool:
        for store in stores:
            store.refresh()
        counted[:] = [count()]
        return not counted[0].undone

    wait_for(is_complete, within_s, LOOK_AGAIN_S)
    return counted[0]


class Stage(ABC):
    """A stage of the workflow. Instances have no state; class attributes describe the stage."""

    name: ClassVar[StageName]
    kinds: ClassVar[tuple[str, ...]] = ()  # kinds of records that it makes; their indexes are updated afterwards
    needs: ClassVar[tuple[StageName, ...]] = ()  # stages that must run before it
    of_sequences: ClassVar[bool] = True  # whether it applies to bare sequences
    of_entries: ClassVar[bool] = True  # whether it applies to a reader's items
    together: ClassVar[bool] = False  # its processes are ranks of one task, on as many nodes as it has
    counts_items: ClassVar[bool] = True  # False: its progress is counted in other units
    unit: ClassVar[str] = "item"  # name of what is judged at the end
    may_be_empty: ClassVar[bool] = False  # having no items is not a failure
    only_looks: ClassVar[bool] = False  # it changes no record of the cache
    is_script: ClassVar[bool] = False  # it runs a script of the user's, whose processes see all GPUs of their node
    has_tasks: ClassVar[bool] = True  # False: it only judges the results of earlier stages
    lists_lines: ClassVar[bool] = False  # a task is a range of lines of its list; False: of rows

    @abstractmethod
    def inspect(self, project: Project) -> object:
        """Raise if the input of the stage cannot be used."""

    def plan(self, project: Project) -> None:  # noqa: B027
        """Plan what its tasks need, which may take minutes and is remembered; most stages compute it at once."""

    @abstractmethod
    def survey(self, project: Project, folder: RunFolder | None, at_once: int) -> StageSurvey:
        """Return the missing work, cut into tasks of which `at_once` run at a time; list it in the folder, if any."""

    @abstractmethod
    def mem_bytes(self, project: Project) -> int:
        """Return the planned memory of a task, used if the configuration says `auto`."""

    def gpu_bytes(self, project: Project) -> int:  # noqa: ARG002 - most stages need no GPU
        """Return the memory that a GPU must have at least."""
        return 0

    @abstractmethod
    def work(self, project: Project, folder: RunFolder, task: int, context: TaskContext) -> Outcomes:
        """Do one task, or one process's part of it, yielding the outcome of each item."""

    @abstractmethod
    def recipe(self, project: Project) -> Mapping[str, Any]:
        """Return the choices that decide its records, or under which its tasks' measurements are kept."""

    def recipes(self, project: Project) -> Sequence[Mapping[str, Any]]:
        """Return the recipes of the records that it makes."""
        return [self.recipe(project)]

    @abstractmethod
    def judge(self, project: Project, folder: RunFolder, patience_s: float) -> Judged:
        """Return the result of the stage by the content of the store; wait up to `patience_s` for late files."""

    def at(self, project: Project, name: str) -> Project:  # noqa: ARG002 - most tasks are all of one configuration
        """Return the project of a task; tasks of one of several encoders or points have a name."""
        return project

    def check(self, project: Project, folder: RunFolder, judged: Any) -> list[str]:  # noqa: ARG002
        """Raise if the run cannot continue with this result; return warnings."""
        return []

    def halve(self, folder: RunFolder, shard: Shard) -> tuple[Shard, Shard]:
        """Cut one task's share of the work in two."""
        return worklist.halve_lines(folder.todo(self.name), shard) if self.lists_lines else worklist.halve_rows(shard)

    def needed(self, config: Config) -> tuple[StageName, ...]:  # noqa: ARG002
        """Return the stages that must have run before, under a configuration."""
        return self.needs

    def wanted(self, config: Config) -> bool:  # noqa: ARG002
        """Tell whether `submit all` includes this stage."""
        return True

    def are_apart(self, config: Config) -> bool:  # noqa: ARG002
        """Tell whether tasks are independent: the failure of one does not stop the others."""
        return False

    def is_for(self, config: Config) -> bool:
        """Tell whether it applies to the configured kind of data set."""
        if is_reader(config):
            return self.of_entries
        return self.of_sequences or config.data.source != "fasta"

    def resources(self, config: Config) -> StageResources | TrainResources:
        """Return the configured resources of a task."""
        return config.cluster.resources(self.name)

    def sharing(self, project: Project) -> int:  # noqa: ARG002
        """Return how many of its tasks run side by side in one job, sharing its GPU."""
        return 1

    def parallel(self, config: Config) -> int:
        """Return the most tasks that run at once on a cluster."""
        return self.resources(config).parallel

    def processes(self, project: Project) -> int:
        """Return the number of processes of a task."""
        return self.resources(project.config).nodes * self.starts_on_node(project.config)

    def starts_on_node(self, config: Config) -> int:
        """Return how many processes are started on each node."""
        return self.resources(config).ranks_per_node
