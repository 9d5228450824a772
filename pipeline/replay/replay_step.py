"""Runs a failed step again on this machine, from the bundle that it left.

It runs one rank's share with the same cuts, random numbers and plan. It changes nothing in the run's or the model's
folder.
"""

from __future__ import annotations

import atexit
import gc
import json
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.codec import rebuilt
from pipeline.command_line import Command
from pipeline.config.load import read_resolved
from pipeline.device.kinds import CPU
from pipeline.errors import ConfigError, DataError, JobFailed, PipelineError, PlanInfeasible
from pipeline.files import json_object
from pipeline.journal.attempts import left_out_items
from pipeline.journal.run_folder import RunFolder
from pipeline.planning.points import named_point
from pipeline.planning.prepare import folder_of, trained_table
from pipeline.planning.rank_setup import set_allocator
from pipeline.planning.training_work import Work, configs_of_stages, least_of, target_of
from pipeline.planning.trainings import read_trainings, view_of
from pipeline.project.project import Project
from pipeline.project.run_code import blamed, module_command, package_digest
from pipeline.records import TaskContext
from pipeline.replay.replay_result import ReplayResult, Traced
from pipeline.stage_names import StageName
from pipeline.stages.train import job_of
from pipeline.training.prepared import COST, Prepared
from pipeline.training.ranks import Ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import nn

    from pipeline.memory.footprint import MemoryChoice
    from pipeline.memory.runtime.meters import Meter
    from pipeline.training.checkpoints.checkpoint import Checkpoint
    from pipeline.training.forensics.rerun import Rerun, RerunPart
    from pipeline.training.forensics.step_bundle import Bundle
    from pipeline.training.loop.train import Job
    from pipeline.training.prepared import ModelFolder
    from pipeline.training.step.exact_step import Piece
    from pipeline.training.step.step import Step
ORDER = ("nan", "poison", "oom")  # failures that end a run come before those that it survives


@dataclass(frozen=True)
class ReplayCase:
    """A bundle of a failed step, with its run, project and plan."""

    folder: RunFolder
    project: Project
    made: ModelFolder
    where: Path  # the bundle
    bundle: Bundle
    prepared: Prepared  # of the failed step
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
    """Return a sort key: first failures that ended the run, then the rank with an item that the message names."""
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
    project = Project.open(read_resolved(folder.config), beside=folder.task_root, remember=False)
    try:
        trainings = read_trainings(folder)
    except ValueError as error:
        raise _of_another_version(error, folder.plan(StageName.TRAIN)) from error
    planned = [(training, training.prepared) for training in trainings if training.prepared]
    names = [training.name for training, _ in planned]
    training, prepared = planned[named_point(point or "", names) if names != [""] else 0]
    return view_of(project, training), folder_of(project, prepared)


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
        """Read the items of a part; they must be unchanged."""
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
        """Yield the parts that had begun before the failure; whole micro-batches if the bundle has no parts."""
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
        sampler.adjust({COST: max(int(bundle.budget.get(COST, 0)), int(self._items.cost_N.max()))})
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
    sizes = trained_table(case.project, case.prepared).sizes
    keep_N = case.prepared.phases[place].keeps(sizes)
    return {name: size_N[keep_N] for name, size_N in sizes.items()}


DEFAULT_CAPABILITY = (8, 0)
RUNGS_TRACED = 2  # of the ladder; the last rung runs on the CPU and takes no card memory


class Apart(Ranks):
    """`Ranks` for one rank of several that runs without the others."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world


def replay_document(case: ReplayCase, *, device: str | None = None) -> dict[str, Any]:
    """Run a step again and return the result as JSON data; a step that killed its process runs in a child."""
    if case.bundle.kind.value != "poison":
        return replay_here(case, device=device).to_json()
    chosen = here(device)
    command = [*module_command(__name__), str(case.folder.path), str(case.where), chosen]
    on: tuple[str, ...] = ()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            message = json_object(line)
            if "found" in message:
                document: dict[str, Any] = message["found"]
                return document
            if "error" in message:
                raise JobFailed(message["error"], where=str(case.where), remedy=message["remedy"])
            on = tuple(message.get("on", on))
    if child.returncode == 1:  # an exception: its traceback is above
        raise JobFailed("replaying failed", where=str(case.where), remedy="pipeline --debug replay …, and report it")
    died = f"was ended by {_ending(child.returncode)}"
    return ReplayResult(
        case.folder.name, case.bundle, str(case.where), chosen, "", is_exact=False, died=died, on=on
    ).to_json()


def _ending(code: int) -> str:
    """Return how a process ended, in words."""
    return signal.Signals(-code).name if code < 0 else f"with exit code {code}"


def main(words: Sequence[str]) -> int:
    """Run a step again in this process; print messages to stdout, a line of JSON each."""
    atexit.register(gc.freeze)  # saves half a second of garbage collection over torch at exit
    from pipeline.training.forensics import step_bundle

    folder, where, device = RunFolder(Path(words[0])), Path(words[1]), words[2]
    out, sys.stdout = sys.stdout, sys.stderr  # output of the task goes to stderr

    def tell(message: Mapping[str, Any]) -> None:
        print(json.dumps(message), file=out, flush=True)

    try:
        project, made = project_of_run(folder)
        bundle = step_bundle.read_bundle(where)
        case = ReplayCase(folder, project, made, where, bundle, read_training_plan(bundle.plan, where), ())
        tell({"found": replay_here(case, device=device, begin=lambda part: tell({"on": part.ids})).to_json()})
    except PipelineError as error:
        tell({"error": error.what, "remedy": error.remedy})
    return 0


def here(device: str | None) -> str:
    """Return the device to run on: a GPU where there is one."""
    from pipeline.device.accelerator import card_here, located

    if device is None or device == "auto":
        return card_here() or CPU
    if (found := located(device)) is None:
        raise ConfigError("torch finds no usable GPU", where="--device", remedy="--device cpu")
    return found


def replay_here(
    case: ReplayCase,
    *,
    device: str | None = None,
    meter: Meter | None = None,
    begin: Callable[[RerunPart], None] = lambda _: None,
) -> ReplayResult:
    """Run a rank's share of a step again in this process, and find where it goes wrong."""
    from pipeline.device.accelerator import RngState
    from pipeline.memory.runtime.meters import meter_of
    from pipeline.training.forensics import step_bundle
    from pipeline.training.forensics.rerun import rerun

    chosen = here(device)
    if case.prepared.allocator and chosen != CPU:
        set_allocator(case.prepared.allocator)
    work = Work.of(case.project.config, beside=case.project.beside)
    with blamed(work.task):
        job = _job(case, work, chosen)
        step, weights, is_exact = _loaded_step(case, job)
        result = ReplayResult(case.folder.name, case.bundle, str(case.where), chosen, weights, is_exact)
        result.notes += _notes(case)
        if work.is_contrastive and case.bundle.world > 1:
            result.notes.append("items of this rank are compared only with each other, not with other ranks")
        share = ReplayedShare(case, job)
        step.task = job.stage_tasks.get(share.stage, job.task)
        result.notes += share.notes
        rng = RngState(step_bundle.read_rng(case.where), chosen)
        result.rerun = rerun(step, share.parts, share.read, rng, meter or meter_of(chosen), begin=begin)
        result.suspects = _suspects(step, result.rerun, share)
        if case.bundle.kind is step_bundle.BundleKind.OOM:
            result.traced = _traced(case, share, result.notes)
    return result


def _job(case: ReplayCase, work: Work, device: str) -> Job:
    """Return the training job of that rank, on this device."""
    bundle = case.bundle
    context = TaskContext(lambda _key, _reason, _detail: None, careful=bool(bundle.state.get("careful")))
    alone = Apart(-1, 1)  # no rank: it writes nothing into the model's folder
    job: Job = job_of(case.project, case.folder, case.prepared, context, alone, device=device)
    ranks, choice = Apart(bundle.rank, bundle.world), _choice(case.prepared)

    def made(begin: Callable[[nn.Module], None]) -> Step:
        return work.begun(choice, device=device, begin=begin)

    return replace(job, ranks=ranks, make_step=made, validation=None)


def _choice(prepared: Prepared, rung: int = 0) -> MemoryChoice:
    from pipeline.memory.footprint import EVERY_BLOCK, MemoryChoice

    return MemoryChoice(
        precision=prepared.precision,
        checkpointing=EVERY_BLOCK if rung >= 1 else prepared.checkpointing,
        offload=prepared.offload or rung >= 2,
    )


def _loaded_step(case: ReplayCase, job: Job) -> tuple[Step, str, bool]:
    """Return a step with its weights and its optimizer's state, which weights these are, and whether they are exact."""
    from pipeline.device.accelerator import out_of_memory_error
    from pipeline.training.loop.train import fresh_step

    made: list[tuple[Step, str, bool]] = []

    def make() -> None:
        step = fresh_step(job)
        words, is_exact = _load(case, step)
        step.make_state()
        made.append((step, words, is_exact))

    if out_of_memory_error(make) is not None:
        what = "the model and its optimizer alone do not fit on this device"
        raise PlanInfeasible(what, where="--device", remedy="--device cpu")
    return made[0]


# The weights


def _load(case: ReplayCase, step: Step) -> tuple[str, bool]:
    """Load the checkpoint nearest to the step; return which it is, and whether it is the step's own."""
    from pipeline.training.checkpoints.keeper import model_key, unpack
    from pipeline.training.checkpoints.sealed_folder import FolderDamaged

    before, recorded = case.bundle.step - 1, case.bundle.checkpoint
    named = Path(recorded["path"]).name if recorded else ""
    gone: list[str] = []
    for checkpoint in _earlier_checkpoints(case):
        name = checkpoint.name
        checkpoint.sealed.refuse_stranger({"model": model_key(step.model), "recipe": case.prepared.name})
        try:
            checkpoint.sealed.verify()
            unpack(checkpoint, step)
        except FolderDamaged:
            gone.append(f"{name} is damaged")
            continue
        if named and name != named and checkpoint.step != before and not gone:
            gone.append(f"{named} is missing")
        return _weights_meaning(f"checkpoint {name}", checkpoint.step, before, gone)
    if recorded is not None and not gone:
        gone.append(f"{named} is missing")
    return _weights_meaning("fresh ones", 0, before, gone)


def _earlier_checkpoints(case: ReplayCase) -> list[Checkpoint]:
    """Return earlier checkpoints: that right before the step, the recorded one, then the older ones."""
    from pipeline.training.checkpoints.checkpoint import checkpoints_in

    before, recorded = case.bundle.step - 1, case.bundle.checkpoint
    named = Path(recorded["path"]).name if recorded else ""
    older = [checkpoint for checkpoint in checkpoints_in(case.made.checkpoints) if checkpoint.step <= before]
    return sorted(older, key=lambda it: (it.step == before, it.name == named, it.step, it.serial), reverse=True)


def _weights_meaning(what: str, step: int, before: int, gone: list[str]) -> tuple[str, bool]:
    """Return what the loaded weights mean for a replay, and whether they are exact."""
    lost = f"{'; '.join(gone)}; " if gone else ""
    if step == before:
        return f"{lost}{what}, as they were before that step", True
    after = f", after step {step:,}" if step else ", as before the first step"
    return f"{lost}{what}{after}, not {before:,}: memory use is the same, values differ", False


def _notes(case: ReplayCase) -> list[str]:
    """Return how this replay differs from the run."""
    bundle, notes = case.bundle, []
    if case.folder.code.exists() and Path(case.folder.code.read_text()).name != package_digest():
        notes.append("this is another version of pipeline than the run's: values and memory may differ slightly")
    if case.project.config.train.compile:
        notes.append("the run compiled the model; replay does not, which needs more memory")
    if case.prepared.sharded:
        notes.append("the run sharded the model; replay does not, which needs more memory")
    if bundle.world > 1:
        notes.append(f"only rank {bundle.rank}'s share of {bundle.world}: losses are weighted by its own items only")
    if case.others:
        notes.append(f"this step has further bundles: {', '.join(case.others)} (--rank chooses)")
    return notes


# The cause of the failure


def _suspects(step: Step, result: Rerun, share: ReplayedShare) -> list[Any]:
    """Search for where numbers that are not finite come from."""
    from pipeline.training.forensics.rerun import PartOutcome, suspects

    bad = result.of(PartOutcome.NOT_FINITE)
    if bad:
        return suspects(step, bad, share.read)
    return suspects(step, result.of(PartOutcome.FITS), share.read, backward=True) if result.gradients else []


def _traced(case: ReplayCase, share: ReplayedShare, notes: list[str]) -> Traced | None:
    """Trace the part that ran out of memory, for the card that the run was on."""
    from pipeline.memory.footprint import live_peak_bytes
    from pipeline.protocol import ITEMS

    bundle = case.bundle
    failed = [part for part in share.parts if list(part.numbers) == bundle.state.get("items")]
    part = failed[0] if failed else max(share.parts, key=lambda part: part.cost_bytes, default=None)
    if part is None or part.rung > RUNGS_TRACED:
        return None
    card = bundle.state.get("card") or {}
    on_card = bundle.device != CPU
    capability = tuple(card.get("capability") or DEFAULT_CAPABILITY) if on_card else None
    config = configs_of_stages(case.project.config).get(share.stage, case.project.config)
    meant = Work.of(config, beside=case.project.beside, on_gpu=on_card)
    oracle = meant.oracle(least_of(share.sizes), target_of(capability), padded=share.padded)
    choice, sizes = _choice(case.prepared, part.rung), {ITEMS: len(part.ids), **part.sizes}
    try:
        standing, micro = oracle.standing(choice), oracle.micro(choice, sizes)
    except PlanInfeasible as error:
        notes.append(error.what)
        return None
    return Traced(
        ids=part.ids,
        live_bytes=live_peak_bytes(standing, micro, accumulate=len(share.parts) > 1),
        card=str(card.get("name") or ("the run's GPU" if on_card else "a processor")),
        limit_bytes=case.prepared.limit_bytes,
        origin=micro.origin.value,
    )
