"""`pipeline doctor`: checks everything that a run needs; each problem has a remedy."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from pipeline import __version__
from pipeline.cluster import slurm_commands
from pipeline.cluster.accounting import CommandFailed
from pipeline.cluster.job_spec import Job, Request
from pipeline.command_line import DISTRIBUTION, Command, install_extra
from pipeline.config.load import find_config, missing_inputs, read_config
from pipeline.config.schema_data import MAIN
from pipeline.dataset.early_items import refuse_unknown_splits
from pipeline.dataset.reader_items import is_reader, look_at_files, read_first, reader_of, refuse_crop
from pipeline.encoder.weights import find_checkpoint
from pipeline.engine.handover import supervisor_job
from pipeline.errors import ConfigError, DataError, PipelineError, SubmissionRefused
from pipeline.memory.outlook import RunFacts, Severity, lint
from pipeline.project.container_image import digest_now, is_contained, refuse_unfit_image
from pipeline.project.project import Encoding, Project, scan_recipe_of, source_spec
from pipeline.project.run_code import load_task
from pipeline.records import Inventory, Item, Rejection
from pipeline.report.tables import plural
from pipeline.stages import table
from pipeline.stages.jobs import first_job, job_of
from pipeline.stages.script import ScriptStage
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format.disk import lay_over
from pipeline.structures.scan_items import file_mark
from pipeline.structures.sources.data_source import items
from pipeline.structures.sources.item_ids import unread_columns
from pipeline.units import first_few, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeline.cluster.site import Site
    from pipeline.cluster.slurm import SlurmExecutor
    from pipeline.config.load import LoadedConfig
    from pipeline.config.schema import Config

    Checks = tuple[tuple[str, Callable[[LoadedConfig], Iterator["CheckResult"]]], ...]
COMMANDS = ("sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo")
OWN_PLACES = ("/tmp", "/var/tmp", "/dev/shm", "/run", "/local")  # noqa: S108 - nothing is written there
NETWORKED = (
    "nfs", "lustre", "gpfs", "beegfs", "ceph", "fuse", "weka", "panfs", "pvfs", "afs", "cifs", "smb", "gluster",
)  # fmt: skip
IN_MEMORY = ("tmpfs", "ramfs", "overlay")
EDIT = "edit the configuration, or --set"
LOOKED_AT = 100  # items of the data set to read
EACH_REFUSED = str(Command.submit("scan", then="   (names each that is refused, and why)"))
LITTLE_BYTES = 5 << 30
LITTLE_INODES = 100_000
TESTED_TORCH = "2.13"  # as pinned in constraints.txt; a test compares them


class CheckVerdict(StrEnum):
    """How a check ended."""

    OK = "ok"
    NOTE = "note"
    BAD = "BAD"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One row of the report of `pipeline doctor`."""

    what: str
    verdict: CheckVerdict
    found: str
    remedy: str = ""
    exit_code: int = 0


def failed_check(what: str, error: PipelineError) -> CheckResult:
    """Return the row of an error; its command repeats the typed --config and --set."""
    error.in_project(Command.typed(sys.argv[1:]))
    place = f"{error.where}: " if error.where else ""
    return CheckResult(what, CheckVerdict.BAD, f"{place}{error.what}", error.remedy, error.exit_code)


def good_check(what: str, found: str) -> CheckResult:
    """Return the row of a check that passed."""
    return CheckResult(what, CheckVerdict.OK, found)


def noted_check(what: str, found: str, remedy: str = "") -> CheckResult:
    """Return the row of a check that needs attention but is not a failure."""
    return CheckResult(what, CheckVerdict.NOTE, found, remedy)


def refused_check(what: str, found: str, remedy: str, exit_code: int = 6) -> CheckResult:
    """Return the row of a failure. Default: the scheduler would refuse the jobs."""
    return CheckResult(what, CheckVerdict.BAD, found, remedy, exit_code)


def check_cluster(loaded: LoadedConfig) -> Iterator[CheckResult]:
    """Check the cluster if jobs go there; without its commands or its controller, skip the other checks."""
    config = loaded.config
    if config.cluster.executor != "slurm":
        if slurm_commands.is_there():
            remedy = "set cluster.executor=slurm to use it (pipeline init DIR writes a cluster profile)"
            yield noted_check("cluster", "Slurm is available, but cluster.executor is local", remedy)
        return
    if missing := [name for name in COMMANDS if shutil.which(name) is None]:
        remedy = "log in to a submit host, outside of containers, or load its module; or --set cluster.executor=local"
        yield refused_check("slurm", f"not on the PATH: {first_few(missing)}", remedy)
        return
    from pipeline.cluster.slurm import SlurmExecutor  # local runs do not need this import

    executor = SlurmExecutor(config.cluster.slurm)
    try:
        site = executor.site.refuse_silent()
    except CommandFailed as error:
        remedy = "scontrol ping   (if it is down, ask your admins); or --set cluster.executor=local"
        yield refused_check("slurm", f"the controller does not answer: {error.message}", remedy)
        return
    yield good_check("slurm", f"{site.name}, Slurm {site.version}")
    yield from check_partitions(config, site)
    yield from check_jobs(config, executor)
    if site.counts_memory is False and config.cluster.slurm.memory != "none":
        setting = f"SelectTypeParameters={site.setting('SelectTypeParameters') or 'none'}"
        what = f"Slurm does not allocate memory ({setting}): tasks on a node share it"
        yield noted_check("memory", what, f"{EDIT} cluster.slurm.memory=none")
    yield from check_folders(config)


def check_partitions(config: Config, site: Site) -> Iterator[CheckResult]:
    """Yield configured partitions that do not exist, are down, or do not accept the user's accounts."""
    cluster, slurm = config.cluster, config.cluster.slurm
    sections = {name: cluster.resources(name).partition for name in table.everything(config)}
    settings = {"slurm": slurm.partition, "supervisor": cluster.supervisor.partition, **sections}
    named = {f"cluster.{name}.partition": (text or "").split(",") for name, text in settings.items()}
    named |= {"cluster.slurm.partitions": list(slurm.partitions)}
    named |= {"cluster.slurm.cards": [card.partition or "" for card in slurm.cards]}
    known = [partition.name for partition in site.partitions]
    keys = {name: key for key, names in reversed(named.items()) for name in names if name}
    for name, key in keys.items() if known else ():
        if name not in known:
            close = get_close_matches(name, known, n=1)
            meant = f"; did you mean {close[0]}?" if close else ";"
            what = f"{name} ({key}) does not exist or is hidden from you{meant} available: {first_few(known)}"
            yield refused_check("partition", what, f"{EDIT} {key}={close[0] if close else known[0]}")
        elif why := site.bars(name):
            yield noted_check("partition", f"{why} ({key})", f"scontrol show partition {name}")


def check_jobs(config: Config, executor: SlurmExecutor) -> Iterator[CheckResult]:
    """Ask the scheduler whether it would accept the job of each stage, without submitting."""
    project = Project.open(config, remember=False)
    for name in table.everything(config):
        try:
            job = job_of(None, config, first_job(project, table.stage(name, config), executor))
        except PipelineError:  # not plannable yet: use the configured resources
            job = Job(name, ("true",), range(1), "logs", Request.of(config.cluster.resources(name)))
        yield _tested(executor, job)
    if config.cluster.supervisor.where == "job":
        yield _tested(executor, supervisor_job(None, config, "1"))


def _tested(executor: SlurmExecutor, job: Job) -> CheckResult:
    """Return the row of a job by the answer of the scheduler."""
    try:
        executor.check(job)
    except SubmissionRefused as error:
        change = error.command.change if error.command and error.command.change else error.remedy
        return refused_check(f"job {job.name}", error.what, change)
    return good_check(f"job {job.name}", "the scheduler would accept it")


def check_folders(config: Config) -> Iterator[CheckResult]:
    """Report folders that other nodes may not see; a proof is impossible here."""
    places = {
        "run folders": config.cluster.runs,
        "cache": config.cache.root,
        **{f"cache {path}": path for path in config.cache.under},
        "data": config.data.path,
        "interpreter": Path(sys.executable),
    }
    mounts = sorted(psutil.disk_partitions(all=True), key=lambda mount: len(mount.mountpoint), reverse=True)
    own: dict[str, list[str]] = {}
    for name, path in places.items():
        if why := _only_here(path, mounts):
            own.setdefault(why, []).append(name)
    for why, names in own.items():
        remedy = "choose a folder on a shared disk, unless every node has it at the same path"
        yield noted_check("shared folders", f"{first_few(names)}: {why}", remedy)
    if not own:
        yield good_check("shared folders", f"{first_few(places)} are on network disks")


def _only_here(path: Path, mounts: Sequence[Any]) -> str:
    """Return why other nodes may not see a path; empty for a network disk."""
    real = Path(os.path.realpath(path))
    own = [*OWN_PLACES, *filter(None, (os.environ.get("TMPDIR"),))]
    if place := next((place for place in own if real.is_relative_to(place)), ""):
        return f"below {place}, which is local to each machine"
    kind = next((mount.fstype for mount in mounts if real.is_relative_to(mount.mountpoint)), "")
    if kind.startswith(NETWORKED):
        return ""
    if kind in IN_MEMORY:
        return f"on {kind}, which is local to each machine"
    return f"on {kind}, a disk of this machine" if kind else "on an unknown kind of disk"


SIGNS = {CheckVerdict.OK: "✓", CheckVerdict.NOTE: "!", CheckVerdict.BAD: "✗"}


def run_checks(config_file: Path | None, sets: Sequence[str]) -> list[CheckResult]:
    """Return the findings of every check; later checks run after a failure, too."""
    python = f"{sys.version.split()[0]} ({sys.executable})"
    findings = [good_check("python", python), good_check("pipeline", __version__), _torch()]
    try:
        loaded = read_config(find_config(config_file), sets)
    except PipelineError as error:
        findings.append(failed_check("config", error))
        return findings
    findings.append(good_check("config", str(loaded.path)))
    there: Checks = (("cluster", check_cluster), ("container", _container))
    return [*findings, *_found((*INPUTS, ("cache", _cache), *SETTINGS, *there), loaded)]


def findings_lines(findings: Sequence[CheckResult], *, verbose: bool = False) -> list[str]:
    """Return a line for each problem with its fix, and the number of passed checks; `verbose`: all checks."""
    shown = [finding for finding in findings if verbose or finding.verdict is not CheckVerdict.OK]
    width = max((len(finding.what) for finding in shown), default=0)
    lines = []
    for finding in shown:
        found, *more = finding.found.splitlines()
        found = " ".join([found, *([", ".join(map(str.strip, more))] if more else [])])
        fix = f" → {finding.remedy}" if finding.remedy else ""
        lines.append(f"{SIGNS[finding.verdict]} {finding.what.ljust(width)}  {found}{fix}")
    passed = sum(finding.verdict is CheckVerdict.OK for finding in findings)
    return [*lines, f"✓ {plural(passed, 'check')} passed{'' if verbose else ' (-v to list)'}"]


def check_configuration(loaded: LoadedConfig) -> list[CheckResult]:
    """Return notes on a configuration; raise if a run would fail because of it."""
    findings = _found((*INPUTS, *SETTINGS), loaded)
    if bad := [finding for finding in findings if finding.verdict is CheckVerdict.BAD]:
        *others, last = bad
        lines = [f"{finding.found}\n  next: {finding.remedy}" for finding in others if finding.remedy != last.remedy]
        lines += [finding.found for finding in others if finding.remedy == last.remedy]
        kind = DataError if last.exit_code == DataError.exit_code else ConfigError
        raise kind("\n".join([*lines, last.found]), remedy=last.remedy)
    return [finding for finding in findings if finding.verdict is CheckVerdict.NOTE]


def _found(checks: Checks, loaded: LoadedConfig) -> list[CheckResult]:
    """Return the findings of checks, each problem once; later checks run after a failure, too."""
    findings = list[CheckResult]()
    for name, look in checks:
        try:
            findings += look(loaded)
        except PipelineError as error:
            findings.append(failed_check(name, error))
    bad = {finding.found: finding for finding in reversed(findings) if finding.verdict is CheckVerdict.BAD}
    return [finding for finding in findings if bad.get(finding.found, finding) is finding]


def _container(loaded: LoadedConfig) -> Iterator[CheckResult]:
    """Check that the image of the workers exists, starts, and holds this version."""
    config = loaded.config
    if not is_contained(config):
        return
    container = config.cluster.slurm.container
    try:
        digest = digest_now(config)
        notes = list(refuse_unfit_image(config))
    except SubmissionRefused as error:
        yield failed_check("container", error)
        return
    yield good_check("container", f"{container.runtime}: {container.image}, digest {digest}")
    yield from (noted_check("container", note) for note in notes)


def _torch() -> CheckResult:
    """Compare the installed torch with the tested version, without importing it."""
    try:
        found = version("torch")
    except PackageNotFoundError:
        return refused_check("torch", "is not installed", f"pip install {DISTRIBUTION}", exit_code=2)
    if found.startswith(f"{TESTED_TORCH}."):
        return good_check("torch", f"{found} (tested)")
    remedy = f"pip install 'torch=={TESTED_TORCH}.*'   (plans depend on torch's internals: check one with --probe)"
    return noted_check("torch", f"{found} is installed, but only {TESTED_TORCH} is tested", remedy)


def _data(loaded: LoadedConfig) -> Iterator[CheckResult]:
    """List the first items of the data set, and check their files."""
    if missing := missing_inputs(loaded):
        remedy = f"edit {loaded.path}, or use --set KEY=VALUE"
        yield from (refused_check("data", line, remedy, exit_code=2) for line in missing)
        return
    config = loaded.config
    if is_reader(config):
        refuse_crop(config)
        yield _entries(Project.open(config, remember=False, beside=loaded.base_dir.absolute()))
        return
    listed = list(islice(items(source_spec(config)), LOOKED_AT))
    good = [item for item in listed if isinstance(item, Item)]
    bad = [item for item in listed if isinstance(item, Rejection)]
    recipe = scan_recipe_of(config)
    absent = [path for item in good for path in recipe.paths(item) if isinstance(file_mark(path, recipe), Inventory)]
    if not good:
        what = f"no usable item at {config.data.path}" + (f"; {bad[0].id}: {bad[0].detail}" if bad else "")
        yield refused_check("data", what, "pipeline config show   (see data.*)", exit_code=3)
    elif absent:
        what = f"{len(absent)} files of the first {len(good)} items are missing or unreadable, for example {absent[0]}"
        yield refused_check("data", what, "correct data.path or data.structures_dir", exit_code=3)
    else:
        count = f"the first {LOOKED_AT}" if len(listed) == LOOKED_AT else f"all {len(listed)}"
        refused = f", {len(bad)} rejected ({bad[0].id}: {bad[0].detail})" if bad else ""
        found = f"{config.data.path}: {count} items listed{refused}"
        yield noted_check("data", found, EACH_REFUSED) if bad else good_check("data", found)
        if unread := unread_columns(good[0], config.data.labels):
            yield noted_check("data", unread, str(Command.of("config show", then="   (see data.labels)")))


def _entries(project: Project) -> CheckResult:
    """Read the first items of a reader's data set."""
    look_at_files(reader_of(project))
    taken, path = read_first(reader_of(project), LOOKED_AT), project.config.data.path
    if not len(taken.table):
        what = f"no usable item among the first {taken.entries} at {path}"
        return refused_check("data", what, "pipeline config show   (see data.*)", exit_code=3)
    found = f"{path}: {len(taken.table)} of the first {taken.entries} items are usable"
    return good_check("data", found) if len(taken.table) == taken.entries else noted_check("data", found, EACH_REFUSED)


def _weights(loaded: LoadedConfig) -> Iterator[CheckResult]:
    """Check the encoders; only embedding needs them."""
    config = loaded.config
    if is_reader(config):
        return
    for name in config.encoders:
        yield _weights_of(loaded, config.of_encoder(name), "" if name == MAIN else f" {name}")


def _weights_of(loaded: LoadedConfig, config: Config, of: str) -> CheckResult:
    """Check the checkpoint or the class of one encoder."""
    if not (of or config.embed.is_own) and loaded.origins["embed.weights"] == "default":
        try:
            find_checkpoint(config.embed.weights)
        except ConfigError as error:
            return noted_check(f"weights{of}", f"{error.what}; needed by the stage embed", error.remedy)
    weights = Encoding.open(config, _opened(config), remember=False, beside=loaded.base_dir.absolute()).weights
    sizes = f"{weights.layers} layers of {weights.dim}, {weights.precision}, {format_bytes(weights.bytes)}"
    return good_check(f"weights{of}", f"{weights.path}: {sizes}")


def _cache(loaded: LoadedConfig) -> Iterator[CheckResult]:
    """Check that the cache is readable and writable, that run folders can be made, and that there is room."""
    root, cache = loaded.config.cache.root, _opened(loaded.config)
    writable = _writable("cache folder", root)
    if writable.verdict is CheckVerdict.BAD and cache.is_there:  # a complete cache needs no writing
        remedy = lay_over([root, *loaded.config.cache.under])
        writable = replace(writable, verdict=CheckVerdict.NOTE, remedy=str(remedy), exit_code=0)
    yield writable
    yield _writable("run folders", loaded.config.cluster.runs)
    yield _room(root)


def _layers(loaded: LoadedConfig) -> Iterator[CheckResult]:
    """Check the caches in cache.under."""
    return (failed_check("cache under it", error) for error in _opened(loaded.config).left_out)


def _opened(config: Config) -> CacheFolder:
    """Open the cache of a configuration."""
    return CacheFolder.over(config.cache.root, config.cache.under)


def _existing(path: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    return next(folder for folder in (path, *path.parents) if os.path.exists(folder))  # noqa: PTH110 - which never raises


def _writable(what: str, folder: Path) -> CheckResult:
    """Check that a file can be created in the folder."""
    place = _existing(folder)
    try:
        with tempfile.TemporaryFile(dir=place):
            return good_check(what, f"{folder} is writable")
    except OSError as error:
        remedy = "choose another folder in the configuration, or get write permission"
        return refused_check(what, f"{folder} cannot be written: {error.strerror}", remedy, exit_code=2)


def _room(root: Path) -> CheckResult:
    """Check free bytes and inodes; quotas are invisible."""
    place = _existing(root)
    free_bytes, inodes = shutil.disk_usage(place).free, os.statvfs(place).f_favail
    summary = f"{format_bytes(free_bytes)} free, room for {inodes:,} files"
    if free_bytes < LITTLE_BYTES or 0 < inodes < LITTLE_INODES:
        return noted_check("disk", summary, "free space, or set cache.root to a larger disk")
    return good_check("disk", summary)


def settings_findings(loaded: LoadedConfig) -> Iterator[CheckResult]:
    """Yield harmful settings; check that trackers, the task or the script are usable."""
    facts = RunFacts(environment=dict(os.environ), empty_cache_every=loaded.config.train.empty_cache_every)
    for problem in lint(facts):
        bad = problem.severity is Severity.ERROR
        verdict, remedy = CheckVerdict.BAD if bad else CheckVerdict.NOTE, f"{problem.remedy}   ({problem.source})"
        yield CheckResult("settings", verdict, f"{problem.what}: {problem.why}", remedy, exit_code=2 if bad else 0)
    for tracker in loaded.config.train.trackers:
        if find_spec(tracker) is None:
            what = f"{loaded.origins['train.trackers']}: train.trackers: {tracker} is not installed"
            yield refused_check("trackers", what, install_extra(tracker), exit_code=2)
    if loaded.config.train.task is not None:
        try:
            unweighted = _try_task(loaded)
        except PipelineError as error:
            yield failed_check("task", error)
        else:
            yield good_check("task", loaded.config.train.task)
            if unweighted:
                what = f"loss() returns {', '.join(unweighted)}, and the task has no weights(): each step first runs"
                yield noted_check("task", f"{what} the model without gradients", "add weights(batch) to skip that pass")
    if loaded.config.train.command is not None:
        try:
            ScriptStage().inspect(Project.open(loaded.config, remember=False))
        except PipelineError as error:
            yield failed_check("script", error)
        else:
            yield good_check("script", loaded.config.train.command)


def _try_task(loaded: LoadedConfig) -> list[str]:
    """Try the task on tensors without data, and on a few items if graphs exist; return the terms without weights."""
    from pipeline.planning.prepare import size_names, some_items
    from pipeline.planning.search import refuse_unsearchable
    from pipeline.planning.task_contract import breaches, unweighted_terms
    from pipeline.stages.train import refuse_misfits

    train, beside = loaded.config.train, loaded.base_dir.absolute()
    task = load_task(train.task or "", train.options, beside=beside)
    project = Project.open(loaded.config, remember=False, beside=beside)
    if train.sweep.is_search:
        refuse_unsearchable(loaded.config)
    sizes = size_names(project)
    items, padded = some_items(project), train.batching == "padded"
    refuse_unknown_splits(project)
    refuse_misfits(project, task)
    if problems := list(breaches(task, items=items, seed=train.seed, item_sizes=sizes, padded=padded)):
        remedy = Command.of("config check", before="correct the task, then: ")
        raise ConfigError("\n".join(problems), where=f"train.task: {train.task}", remedy=remedy)
    return unweighted_terms(task, items, item_sizes=sizes, padded=padded)


INPUTS: Checks = (("data", _data), ("weights", _weights), ("cache", _layers))
SETTINGS: Checks = (("settings", settings_findings),)
