"""The checks of `pipeline doctor` about a Slurm cluster: would it accept the jobs, and what affects them."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cluster import slurm_commands
from pipeline.cluster.accounting import CommandFailed
from pipeline.cluster.job_spec import Job, Request
from pipeline.command_line import Command
from pipeline.engine.handover import supervisor_job
from pipeline.errors import PipelineError, SubmissionRefused
from pipeline.project.project import Project
from pipeline.stages import table
from pipeline.stages.jobs import first_job, job_of
from pipeline.units import first_few

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeline.cluster.site import Site
    from pipeline.cluster.slurm import SlurmExecutor
    from pipeline.config.load import LoadedConfig
    from pipeline.config.schema import Config


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
    """Return the row for an error; its next command repeats the typed --config and --set."""
    error.in_project(Command.typed(sys.argv[1:]))
    place = f"{error.where}: " if error.where else ""
    return CheckResult(what, CheckVerdict.BAD, f"{place}{error.what}", error.remedy, error.exit_code)


def good_check(what: str, found: str) -> CheckResult:
    """Return the row of a check that passed."""
    return CheckResult(what, CheckVerdict.OK, found)


def noted_check(what: str, found: str, remedy: str = "") -> CheckResult:
    """Return the row of a check that needs attention and is no failure."""
    return CheckResult(what, CheckVerdict.NOTE, found, remedy)


def refused_check(what: str, found: str, remedy: str, exit_code: int = 6) -> CheckResult:
    """Return the row of a failure; by default the scheduler would refuse the jobs."""
    return CheckResult(what, CheckVerdict.BAD, found, remedy, exit_code)


COMMANDS = ("sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo")
MOUNTS = Path("/proc/mounts")
OWN_PLACES = ("/tmp", "/var/tmp", "/dev/shm", "/run", "/local")  # noqa: S108 - nothing is written there
NETWORKED = (
    "nfs", "lustre", "gpfs", "beegfs", "ceph", "fuse", "weka", "panfs", "pvfs", "afs", "cifs", "smb", "gluster",
)  # fmt: skip
IN_MEMORY = ("tmpfs", "ramfs", "overlay")
SETUP_S = 60.0
EDIT = "edit the configuration, or --set"


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
    yield from check_setup(config)
    yield from check_jobs(config, executor)
    if site.counts_memory is False and config.cluster.slurm.memory != "none":
        setting = f"SelectTypeParameters={site.setting('SelectTypeParameters') or 'none'}"
        what = f"Slurm does not allocate memory ({setting}): tasks on a node share it"
        yield noted_check("memory", what, f"{EDIT} cluster.slurm.memory=none")
    yield from check_folders(config)


def check_partitions(config: Config, site: Site) -> Iterator[CheckResult]:
    """Check that each partition that a setting names exists and is up; time and size are up to the scheduler."""
    cluster, slurm = config.cluster, config.cluster.slurm
    sections = {name: cluster.resources(name).partition for name in table.everything(config)}
    settings = {"slurm": slurm.partition, "supervisor": cluster.supervisor.partition, **sections}
    named = {f"cluster.{name}.partition": (text or "").split(",") for name, text in settings.items()}
    named |= {"cluster.slurm.partitions": list(slurm.partitions)}
    named |= {"cluster.slurm.cards": [card.partition or "" for card in slurm.cards]}
    known = [partition.name for partition in site.partitions]
    keys = {name: key for key, names in reversed(named.items()) for name in names if name}
    for name, key in keys.items() if known else ():
        partition = site.partition(name)
        if partition is None:
            close = get_close_matches(name, known, n=1)
            meant = f"; did you mean {close[0]}?" if close else ";"
            what = f"{name} ({key}) does not exist or is hidden from you{meant} available: {first_few(known)}"
            yield refused_check("partition", what, f"{EDIT} {key}={close[0] if close else known[0]}")
        elif not partition.is_up:
            what = f"{name} is not UP: jobs would wait"
            yield noted_check("partition", what, f"scontrol show partition {name}")
        else:
            yield good_check("partition", f"{name} is up")


def check_setup(config: Config) -> Iterator[CheckResult]:
    """Run the setup lines of jobs on this machine; nodes may differ."""
    lines = config.cluster.slurm.setup
    if not lines:
        return
    remedy = "correct cluster.slurm.setup, or ignore this if only the nodes can run it"
    try:
        slurm_commands.run_command(["bash", "-eo", "pipefail", "-c", "\n".join(lines)], SETUP_S)
    except CommandFailed as error:
        yield noted_check("setup", f"the setup lines of every job fail on this machine: {error.message}", remedy)
    else:
        yield good_check("setup", f"{len(lines)} lines run on this machine")


def check_jobs(config: Config, executor: SlurmExecutor) -> Iterator[CheckResult]:
    """Ask the scheduler whether it would accept the job of each stage; nothing is submitted."""
    project = Project.open(config, remember=False)
    for name in table.everything(config):
        try:
            job = job_of(None, config, first_job(project, table.stage(name, config), executor))
        except PipelineError:  # it cannot be planned yet: then what is configured
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
    """Report folders that other nodes may not see; that they do cannot be proven here."""
    places = {
        "run folders": config.cluster.runs,
        "cache": config.cache.root,
        **{f"cache {path}": path for path in config.cache.under},
        "data": config.data.path,
        "interpreter": Path(sys.executable),
    }
    mounts = _mounts()
    own: dict[str, list[str]] = {}
    for name, path in places.items():
        if why := _only_here(path, mounts):
            own.setdefault(why, []).append(name)
    for why, names in own.items():
        remedy = "choose a folder on a shared disk, unless every node has it at the same path"
        yield noted_check("shared folders", f"{first_few(names)}: {why}", remedy)
    if not own:
        yield good_check("shared folders", f"{first_few(places)} are on network disks")


def _mounts() -> list[tuple[Path, str]]:
    """Return mount points and their kinds of disk, the innermost first."""
    try:
        rows = [line.split() for line in MOUNTS.read_text().splitlines()]
    except OSError:
        return []
    mounts = [(Path(row[1].replace("\\040", " ")), row[2]) for row in rows if len(row) > 2]
    return sorted(mounts, key=lambda mount: len(mount[0].parts), reverse=True)


def _only_here(path: Path, mounts: list[tuple[Path, str]]) -> str:
    """Return why other machines may not see a path; empty for a network disk."""
    real = Path(os.path.realpath(path))
    own = [*OWN_PLACES, *filter(None, (os.environ.get("TMPDIR"),))]
    if place := next((place for place in own if real.is_relative_to(place)), ""):
        return f"below {place}, which is local to each machine"
    kind = next((kind for folder, kind in mounts if real.is_relative_to(folder)), "")
    if kind.startswith(NETWORKED):
        return ""
    if kind in IN_MEMORY:
        return f"on {kind}, which is local to each machine"
    return f"on {kind}, a disk of this machine" if kind else "on an unknown kind of disk"
