"""A step that went wrong: its bundle, its run, and the parts of the share that is to be run again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.codec import rebuilt
from pipeline.command_line import Command
from pipeline.config.load import read_resolved
from pipeline.device.kinds import CPU
from pipeline.errors import ConfigError, DataError
from pipeline.journal.attempts import left_out_items
from pipeline.planning.prepare import folder_of, task_sizes, trained_table
from pipeline.planning.trainings import named_point, read_trainings, view_of
from pipeline.project.project import Project
from pipeline.stage_names import StageName
from pipeline.training.prepared import COST, Prepared

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from pipeline.journal.run_folder import RunFolder
    from pipeline.training.forensics.rerun import RerunPart
    from pipeline.training.forensics.step_bundle import Bundle
    from pipeline.training.loop.train import Job
    from pipeline.training.prepared import ModelFolder
    from pipeline.training.step.exact_step import Piece

ORDER = ("nan", "poison", "oom")  # what ended a run comes before what it survived


@dataclass(frozen=True)
class ReplayCase:
    """A bundle of a failed step, with its run, project and plan."""

    folder: RunFolder
    project: Project
    made: ModelFolder
    where: Path  # the bundle
    bundle: Bundle
    prepared: Prepared  # when it went wrong
    others: tuple[str, ...]  # bundles of the same step


def find_case(folder: RunFolder, step: int, rank: int | None = None, point: str | None = None) -> ReplayCase:
    """Return the bundle of a step of a run; of several, the one that ended the run, or of the named rank."""
    from pipeline.training.forensics import step_bundle

    if not folder.plan(StageName.TRAIN).exists():
        what = f"run {folder.name} has not trained: no step to replay"
        raise ConfigError(what, where=str(folder.path), remedy=Command.submit("train"))
    project, made = project_of_run(folder, point)
    bundles = {path: step_bundle.read_bundle(path) for path in step_bundle.find_bundles(made.bundles, step, rank)}
    where, *rest = sorted(bundles, key=lambda path: _preference(bundles[path]))
    bundle, others = bundles[where], tuple(path.name for path in rest)
    return ReplayCase(folder, project, made, where, bundle, read_training_plan(bundle.plan, where), others)


def read_training_plan(plan: Mapping[str, Any], where: Path) -> Prepared:
    """Read a plan; refuse one of another version of this package, which cannot be replayed."""
    try:
        return rebuilt(Prepared, plan)
    except ValueError as error:
        raise _of_another_version(error, where) from error


def _of_another_version(error: ValueError, where: Path) -> DataError:
    what = f"the plan was written by another version of pipeline ({error})"
    return DataError(what, where=str(where), remedy="replay it with the version of pipeline that trained it")


def _preference(bundle: Bundle) -> tuple[int, bool, int]:
    """Return a sort key: first what ended the run, then the rank that has an item which the message names."""
    names = {name for cut in bundle.cuts for name in cut.ids}
    named = any(word.strip("(),:") in names for word in bundle.message.split())
    return ORDER.index(bundle.kind.value), not named, bundle.rank


def steps_with_bundles(folder: RunFolder, point: str | None = None) -> list[int]:
    """Return the steps of a run's training, or of a point of its sweep, that left a bundle."""
    from pipeline.training.forensics import step_bundle

    if not folder.plan(StageName.TRAIN).exists():
        return []
    made = project_of_run(folder, point)[1]
    return sorted({step_bundle.read_bundle(path).step for path in step_bundle.bundles_in(made.bundles)})


def project_of_run(folder: RunFolder, point: str | None = None) -> tuple[Project, ModelFolder]:
    """Return a run's project, by its frozen configuration, and the folder of what it, or a point of it, trains."""
    config = read_resolved(folder.config)
    project = Project.open(config, beside=folder.task_root, remember=False)
    try:
        trainings = read_trainings(folder)
    except ValueError as error:
        raise _of_another_version(error, folder.plan(StageName.TRAIN)) from error
    plans = {training.name: training.prepared for training in trainings if training.prepared}
    names = list(plans)
    name = names[named_point(point or "", names)] if names != [""] else ""
    return view_of(project, name), folder_of(project, plans[name])


# The share


class ReplayedShare:
    """The parts of a rank's share of a step, and their items."""

    def __init__(self, case: ReplayCase, job: Job) -> None:
        self.notes: list[str] = []
        self._case, self._bundle = case, case.bundle
        place = case.prepared.phase_of(self._bundle.epoch)
        phase, self._items = job.phases[place]
        self.stage = phase.name
        self.sizes = _sizes(case, place)
        self.padded = job.train.batching == "padded"
        self._loader = job.loader(
            self._items, phase, device=CPU, shuffle=True, batch=job.train.effective_batch, threads=1
        )
        cuts = self._bundle.cuts
        self._ids = {number: name for cut in cuts for name, number in zip(cut.ids, cut.numbers, strict=True)}
        begun = list(self._begun_parts())
        self.parts = [*begun, *self._remaining_parts(1 + max((part.micro for part in begun), default=-1))]

    def read(self, part: RerunPart) -> Piece:
        """Read the items of a part, which must be the same as they were then."""
        from pipeline.training.sampling import BatchOrigin
        from pipeline.training.step.exact_step import Piece

        bundle = self._bundle
        origin = BatchOrigin(bundle.epoch, bundle.epoch_step, part.micro, max(1, len(bundle.cuts)))
        batch = self._loader.fetch(part.numbers, origin, ahead=True)  # memory may have ended in `collate`
        if batch.ids != part.ids:
            lost = sorted(set(part.ids) - set(batch.ids)) or list(part.ids)
            what = f"{', '.join(lost[:3])} no longer has its content of that step"
            raise DataError(
                what, where="the cache", remedy=Command.submit("graph", then="   (rebuilds missing records)")
            )
        return Piece(batch, 0, len(batch), part.rung)

    def cost(self, numbers: tuple[int, ...]) -> int:
        """Return what items cost together, as planned."""
        costs = self._items.cost_N[list(numbers)]
        return int(costs.max() * len(costs) if self.padded else costs.sum())

    def _part(self, micro: int, numbers: tuple[int, ...], rung: int = 0) -> RerunPart:
        from pipeline.training.forensics.rerun import RerunPart

        ids = tuple(self._ids.get(number, self._items.table.ids[number]) for number in numbers)
        sizes = {name: int(self._size_of_batch(size_N[list(numbers)])) for name, size_N in self.sizes.items()}
        return RerunPart(micro, ids, numbers, rung, self.cost(numbers), sizes)

    def _size_of_batch(self, size_K: Any) -> Any:
        return size_K.max() if self.padded else size_K.sum()

    def _begun_parts(self) -> Iterator[RerunPart]:
        """Yield the parts that had begun when it went wrong; the whole micro-batches if the bundle has no parts."""
        bundle = self._bundle
        pieces = bundle.state.get("pieces") or [{"numbers": cut.numbers, "rung": 0} for cut in bundle.cuts]
        for piece in pieces:
            numbers = tuple(piece["numbers"])
            micro = next((at for at, cut in enumerate(bundle.cuts) if set(numbers) <= set(cut.numbers)), 0)
            if numbers:
                yield self._part(micro, numbers, piece["rung"])

    def _remaining_parts(self, begun: int) -> Iterator[RerunPart]:
        """Yield the micro-batches after those that had begun, cut as they would have been."""
        bundle, sampler = self._bundle, self._loader.sampler
        if begun >= int(bundle.state.get("micro_batches", 0)):
            return
        budget = max(int(bundle.budget.get(COST, 0)), int(self._items.cost_N.max()))
        sampler.adjust({COST: budget})
        micros = sampler.micros(bundle.epoch, bundle.epoch_step)
        pairs = zip(bundle.cuts, micros, strict=False)
        if any(not set(cut.numbers) <= set(micro.items.tolist()) for cut, micro in pairs):
            self.notes.append("later micro-batches are unknown and skipped")
            return
        out, ids = left_out_items(self._case.folder, StageName.TRAIN), self._items.table.ids
        for micro in micros[begun:]:
            numbers = tuple(number for number in micro.items.tolist() if ids[number] not in out)
            if numbers:
                yield self._part(micro.index, numbers)


def _sizes(case: ReplayCase, place: int) -> Mapping[str, Any]:
    """Return the sizes of the items of a phase, as the task says them."""
    sizes = task_sizes(case.project, case.prepared, trained_table(case.project, case.prepared))
    keep_N = case.prepared.phases[place].keeps(sizes)
    return {name: size_N[keep_N] for name, size_N in sizes.items()}
