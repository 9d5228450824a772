"""The checks of `pipeline doctor` about a Slurm cluster: would it accept the jobs, and what affects them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cluster import slurm_commands
from pipeline.cluster.accounting import CommandFailed
from pipeline.cluster.allowances import shown
from pipeline.cluster.site_facts import Partition, Site, last_line, look_at_site
from pipeline.cluster.slurm_facts import Facts
from pipeline.command_line import Command
from pipeline.config.schema_parts import format_duration
from pipeline.engine.handover import supervisor_spec
from pipeline.errors import PipelineError, SubmissionRefused
from pipeline.project.project import Project
from pipeline.stages import table
from pipeline.stages.jobs import first_job, spec_of
from pipeline.units import first_few

if TYPE_CHECKING:
    from pipeline.cluster.job_spec import JobSpec
    from pipeline.cluster.slurm import SlurmExecutor
    from pipeline.config.load import LoadedConfig
    from pipeline.config.schema import Config
    from pipeline.config.schema_cluster import SlurmSection


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
SACCT = ("sacct", "--noheader", "--parsable2", "--allocations", "--starttime=now-1minute", "--format=JobID")
STATES = ("sinfo", "--noheader", "--format=%R|%D|%T")
SACCT_S = 20.0
UP = ("idle", "alloc", "mix", "comp", "planned", "reserved")  # states begin with these words, and may end in ~ or #
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
    if loaded.config.cluster.executor != "slurm":
        if slurm_commands.is_there():
            remedy = "set cluster.executor=slurm to use it (pipeline init DIR writes a cluster profile)"
            yield noted_check("cluster", "Slurm is available, but cluster.executor is local", remedy)
        return
    if missing := [name for name in COMMANDS if shutil.which(name) is None]:
        remedy = "log in to a submit host or load its module; or --set cluster.executor=local"
        yield refused_check("slurm", f"not on the PATH: {first_few(missing)}", remedy)
        return
    try:
        site = look_at_site(slurm_commands.run_command, slurm_commands.my_name())
    except CommandFailed as error:
        remedy = "scontrol ping   (if it is down, ask your admins); or --set cluster.executor=local"
        yield refused_check("slurm", f"the controller does not answer: {last_line(error.what)}", remedy)
        return
    yield good_check("slurm", f"{site.name}, Slurm {site.version}")
    for rows in (
        check_partitions,
        check_charging,
        check_setup,
        check_jobs,
        check_accounting,
        check_memory,
        check_preemption,
        check_limits,
        check_folders,
    ):
        yield from rows(loaded.config, site)


def check_partitions(config: Config, site: Site) -> Iterator[CheckResult]:
    """Check that each named partition exists, is up, and allows the requested time."""
    states = _states()
    for name, keys in _wanted(config).items():
        partition = site.partition(name) if name else site.default
        if not site.partitions:
            yield noted_check("partition", "sinfo lists no partitions: cannot check yours", "sinfo")
            return
        if partition is None:
            yield _no_partition(name, keys, site)
            continue
        yield _standing(partition, states.get(partition.name, ()))
        yield from _too_long(config, partition, name)


def check_charging(config: Config, site: Site) -> Iterator[CheckResult]:
    """Check that this user may use the account and the QOS."""
    slurm = config.cluster.slurm
    accounts = sorted({association.account for association in site.associations})
    qos = sorted({name for association in site.associations for name in association.qos})
    enforced = any(word in site.setting("AccountingStorageEnforce").lower() for word in ("associations", "all", "1"))
    asked = ", ".join(filter(None, (slurm.account and f"account {slurm.account}", slurm.qos and f"QOS {slurm.qos}")))
    if not site.associations and (enforced or asked):
        what = f"{asked or 'the default account'}: the accounting lists no account of yours"
        yield noted_check("account", what, "sacctmgr show assoc user=$USER   (the job checks ask the scheduler itself)")
    elif slurm.account and slurm.account not in accounts:
        yield _not_yours("account", slurm.account, accounts)
    elif slurm.qos and qos and slurm.qos not in qos:
        yield _not_yours("qos", slurm.qos, qos)
    elif site.associations:
        yield good_check("account", asked or f"your default, {site.default_account or accounts[0]}")


def check_setup(config: Config, _site: Site) -> Iterator[CheckResult]:
    """Run the setup lines of jobs on this machine; nodes may differ."""
    lines = config.cluster.slurm.setup
    if not lines:
        return
    try:
        words = ["bash", "-eo", "pipefail", "-c", "\n".join(lines)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=SETUP_S, check=False)
    except subprocess.TimeoutExpired:
        yield noted_check(
            "setup",
            f"the setup lines take longer than {SETUP_S:.0f} s on this machine",
            "correct cluster.slurm.setup, or ignore this if only the nodes can run it",
        )
        return
    if done.returncode:
        message = last_line(done.stderr) or f"exit code {done.returncode}"
        yield noted_check(
            "setup",
            f"the setup lines of every job fail on this machine: {message}",
            "correct cluster.slurm.setup, or ignore this if only the nodes can run it",
        )
    else:
        yield good_check("setup", f"{len(lines)} lines run on this machine")


def check_jobs(config: Config, _site: Site) -> Iterator[CheckResult]:
    """Ask the scheduler whether it would accept the job of each stage; nothing is submitted."""
    from pipeline.cluster.slurm import SlurmExecutor  # local runs do not need this import

    project = Project.open(config, remember=False)
    executor = SlurmExecutor(config.cluster.slurm)
    for name in table.everything(config):
        try:
            spec = spec_of(None, config, first_job(project, table.stage(name, config), executor).job)
        except PipelineError as error:
            why = error.what.splitlines()[0].rstrip(":")
            yield noted_check(f"job {name}", f"cannot be planned yet: {why}", error.remedy)
        else:
            yield _tested(executor, spec)
    if config.cluster.supervisor.where == "job":
        yield _tested(executor, supervisor_spec(None, config, "1"))


def check_accounting(_config: Config, site: Site) -> Iterator[CheckResult]:
    """Check that sacct answers: it knows peak memory and how tasks ended."""
    without = "the queue and the tasks report how tasks end, but not their peak memory"
    if "none" in site.setting("AccountingStorageType"):
        yield noted_check("accounting", f"no accounting on this cluster: {without}")
        return
    try:
        slurm_commands.run_command(SACCT, SACCT_S)
        yield good_check("accounting", "sacct answers")
    except CommandFailed as error:
        yield noted_check("accounting", f"{error.what}; {without}", "run sacct to see its error (runs work without it)")


def check_memory(config: Config, site: Site) -> Iterator[CheckResult]:
    """Check whether Slurm stops a task that exceeds its requested memory."""
    asked = config.cluster.slurm.memory != "none"
    if site.counts_memory is False and asked:
        setting = f"SelectTypeParameters={site.setting('SelectTypeParameters') or 'none'}"
        what = f"Slurm does not allocate memory ({setting}): tasks on a node share it"
        yield noted_check("memory", what, f"{EDIT} cluster.slurm.memory=none")
    elif site.limits_memory is False or not asked:
        what = "a task that exceeds its requested memory is not stopped, and may fill its node"
        yield noted_check("memory", what, "request generously: cluster.STAGE.mem")
    elif site.limits_memory is None:
        yield noted_check("memory", "unknown whether Slurm stops a task that exceeds its memory")
    else:
        yield good_check("memory", "a task that exceeds its memory is stopped, and retried with more")


def check_preemption(config: Config, site: Site) -> Iterator[CheckResult]:
    """Report what happens to preempted tasks."""
    if site.setting("JobRequeue") == "0":
        yield noted_check("requeue", "JobRequeue=0: Slurm does not requeue jobs by default; ours use --requeue")
    if site.setting("PreemptType") in ("", "preempt/none"):
        return
    used = [site.partition(name) if name else site.default for name in _wanted(config)]
    signalled = "send_user_signal" in site.setting("PreemptParameters")
    for partition in dict.fromkeys(filter(None, used)):
        mode = (partition.preempt_mode or site.setting("PreemptMode")).upper()
        if mode in ("", "OFF"):
            continue
        how = "the signal we ask for" if signalled else "SIGTERM"
        what = f"{partition.name}: {mode}: preempted tasks get {how} and {partition.grace_s} s to stop"
        remedy = (
            "none needed: unfinished items are done again" if partition.grace_s < config.cluster.slurm.grace else ""
        )
        yield noted_check("preemption", what, remedy)


def check_limits(config: Config, site: Site) -> Iterator[CheckResult]:
    """Report how many tasks fit in an array and in the queue."""
    slurm = config.cluster.slurm
    size = site.max_array_size if slurm.max_array_size == "auto" else slurm.max_array_size
    arrays = f"arrays of {size:,} tasks" if size else "arrays of unknown size"
    facts = Facts(slurm)
    caps, most = facts.caps(), facts.limits().queued_tasks
    queue = "no known limit on queued tasks" if most is None else f"{most:,} of your tasks in the queue"
    yield good_check("limits", f"{arrays}; {queue}; larger stages are split or submitted in waves")
    if known := [f"{cap.name}: {shown(kind, cap.value)}" for kind, cap in caps.items()]:
        yield good_check("allowances", f"{'; '.join(known)}; no task requests more")


def check_folders(config: Config, _site: Site) -> Iterator[CheckResult]:
    """Report folders that other nodes may not see; that they do see them cannot be proven here."""
    places = {
        "run folders": config.cluster.runs,
        "cache": config.cache.root,
        **{f"cache {path}": path for path in config.cache.under},
        "data": config.data.path,
        "interpreter": Path(sys.executable),
    }
    mounts = _mounts()
    own = {name: why for name, path in places.items() if (why := _only_here(path, mounts))}
    if not own:
        yield good_check("shared folders", f"{first_few(places)} are on network disks")
    for why in dict.fromkeys(own.values()):
        names = [name for name in own if own[name] == why]
        remedy = "choose a folder on a shared disk, unless every node has it at the same path"
        yield noted_check("shared folders", f"{first_few(names)}: {why}", remedy)


def _wanted(config: Config) -> dict[str, list[str]]:
    """Return the partitions of all jobs (empty: the default), each with the settings that name it."""
    cluster, wanted = config.cluster, dict[str, list[str]]()
    sections = {name: cluster.resources(name).partition for name in table.everything(config)}
    if cluster.supervisor.where == "job":
        sections["supervisor"] = cluster.supervisor.partition
    named = {f"cluster.{name}.partition": partition for name, partition in sections.items()}
    several, one = cluster.slurm.partitions, (cluster.slurm.partition or "").split(",")
    for key, names in named.items():
        is_supervisor = key == "cluster.supervisor.partition"
        common = one if not several or (is_supervisor and one != [""]) else several
        for name in names.split(",") if names else common:
            wanted.setdefault(name, []).append(key if names else _key(name, cluster.slurm))
    for card in cluster.slurm.cards:
        if card.partition:
            wanted.setdefault(card.partition, []).append("cluster.slurm.cards")
    return wanted


def _key(partition: str, slurm: SlurmSection) -> str:
    """Return the setting that names a partition for all stages."""
    return f"cluster.slurm.{'partitions' if partition in slurm.partitions else 'partition'}"


def _no_partition(name: str, keys: list[str], site: Site) -> CheckResult:
    """Return the row of a partition that does not exist."""
    names = [partition.name for partition in site.partitions]
    if not name:
        what = f"no partition is set, and the cluster has no default; available: {first_few(names)}"
        return refused_check("partition", what, f"{EDIT} cluster.slurm.partition={names[0]}")
    close = get_close_matches(name, names, n=1)
    meant = f"; did you mean {close[0]}?" if close else ";"
    what = f"{name} ({keys[0]}) does not exist or is hidden from you{meant} available: {first_few(names)}"
    return refused_check("partition", what, f"{EDIT} {keys[0]}={close[0] if close else names[0]}")


def _states() -> dict[str, list[tuple[int, str]]]:
    """Return the number of nodes in each state, by partition; empty if sinfo fails."""
    try:
        rows = [line.split("|") for line in slurm_commands.run_command(STATES, SACCT_S).splitlines()]
    except CommandFailed:
        return {}
    states: dict[str, list[tuple[int, str]]] = {}
    for name, count, state in (row for row in rows if len(row) == 3 and row[1].isdecimal()):
        states.setdefault(name, []).append((int(count), state))
    return states


def _standing(partition: Partition, nodes: Sequence[tuple[int, str]]) -> CheckResult:
    """Return the row of an existing partition: whether it is up, and its time limit."""
    if not partition.is_up:
        what = f"{partition.name} is not UP: jobs would wait"
        return noted_check("partition", what, f"scontrol show partition {partition.name}")
    if nodes and not any(state.startswith(UP) for _, state in nodes):
        standing = first_few(f"{count} {state}" for count, state in nodes)
        return noted_check(
            "partition", f"{partition.name}: no node can run jobs now ({standing})", "sinfo --list-reasons"
        )
    longest = "no time limit" if partition.time_s is None else f"at most {format_duration(partition.time_s)}"
    count = sum(count for count, _ in nodes) or partition.nodes or 0
    return good_check("partition", f"{partition.name} is up: {count} nodes, {longest}")


def _too_long(config: Config, partition: Partition, name: str) -> Iterator[CheckResult]:
    """Yield the stages that request more time than a partition allows."""
    for stage in table.everything(config):
        resources = config.cluster.resources(stage)
        slurm = config.cluster.slurm
        where = resources.partition or (slurm.partition or "" if not slurm.partitions else None)
        if where == name and partition.time_s is not None and resources.time > partition.time_s:
            most = format_duration(partition.time_s)
            what = f"{stage} requests {format_duration(resources.time)}, {partition.name} allows {most}"
            yield refused_check("time", what, f"{EDIT} cluster.{stage}.time={most}")


def _not_yours(kind: str, name: str, known: list[str]) -> CheckResult:
    close = get_close_matches(name, known, n=1)
    what = f"{kind} {name} is not one of yours: {first_few(known)}"
    return refused_check("account", what, f"{EDIT} cluster.slurm.{kind}={close[0] if close else known[0]}")


def _tested(executor: SlurmExecutor, spec: JobSpec) -> CheckResult:
    """Return the row of a job by the answer of the scheduler."""
    try:
        start = executor.starts(spec)
    except SubmissionRefused as error:
        change = error.command.change if error.command and error.command.change else error.remedy
        return refused_check(f"job {spec.name}", error.what, change)
    except CommandFailed as error:
        return noted_check(f"job {spec.name}", f"could not be checked: {error.what}", "scontrol ping")
    if start is None:
        return good_check(f"job {spec.name}", "the scheduler would accept it")
    when = datetime.fromtimestamp(start, tz=UTC).astimezone()
    return good_check(f"job {spec.name}", f"the scheduler would accept it, and start it about {when:%Y-%m-%d %H:%M}")


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
