"""Renders a job as a script for sbatch: a template from `sbatch/`, with header, setup and command filled in.

Nothing is run or queried here, so a job has the same script for `--dry-run` and for submission.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import sys
from typing import TYPE_CHECKING

from pipeline.cluster.job_spec import TASK, format_ranges
from pipeline.cluster.machine import THREADS
from pipeline.command_line import ANY
from pipeline.device.kinds import VISIBLE
from pipeline.errors import ConfigError
from pipeline.files import shipped
from pipeline.stage_names import StageName
from pipeline.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pipeline.cluster.job_spec import Job
    from pipeline.config.schema_cluster import ContainerSection, SlurmSection

GENERIC = "scan"  # template of jobs without their own
GENERIC_RANKS = "train"  # template of jobs with several processes
STARTS_RANKS = "\nranks=1"  # marks a template that starts several processes
DIRECTIVE = "#SBATCH "
PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./\[\]*-]+")  # characters that need no quotes in a header
NAME = re.compile(r"[A-Za-z0-9._+-]{1,200}")
VARIABLE = re.compile(r"(\$(?:\{[A-Za-z_][A-Za-z0-9_]*\}|[A-Za-z_][A-Za-z0-9_]*))")
OFFSET = re.compile(r"^offset=(\d+)$", re.MULTILINE)
LOG = "%A_%a"  # stem of a task's log
PYTHON = "python3"  # the interpreter inside an image
# Keep modules of other interpreters and of the home folder out of the image.
CLEAN = {"PYTHONPATH": "", "PYTHONHOME": "", "PYTHONNOUSERSITE": "1"}
# Stay in the job's cgroups, so that its memory limit holds and OOM kills are counted. Use the node's network and shared
# memory, through which ranks meet. Not --env-host: it would replace the image's PATH by the node's.
PODMAN = (
    "podman", "run", "--rm", "--cgroups=disabled", "--cgroupns=host", "--network=host", "--uts=host", "--ipc=host",
    "--entrypoint=", "--log-driver=none",
)  # fmt: skip
PASSED = ("'SLURM*'", "'NCCL_*'", "'PYTORCH_*'", VISIBLE, *THREADS, "PYTHONUNBUFFERED", "TMPDIR")  # of the environment
TEMPORARY = '"${TMPDIR:-/tmp}"'  # for bash on the node


def template(name: str, *, ranks: int = 0) -> str:
    """Return the template of a stage, or the generic one (with `ranks`, for several processes)."""
    folder = shipped("sbatch")
    path = folder / f"{name}.sbatch"
    if not (NAME.fullmatch(name) and path.is_file()):
        path = folder / f"{GENERIC_RANKS if ranks else GENERIC}.sbatch"
    return path.read_text("utf-8")


def render(text: str, job: Job, site: SlurmSection, *, highest_task: int | None = None) -> str:
    """Return the script of a job for sbatch.

    `highest_task` is the highest array index that the cluster allows.
    """
    if job.request.processes > 1 and STARTS_RANKS not in text:
        raise job.refused(f"its script starts one process, not {job.request.processes}", then=" --dry-run")
    offset = array_offset(job, highest_task)
    setup = [line for entry in site.setup for line in entry.split("\n")]
    before = inside(site.container, job.sees, gpus=job.request.gpus, variables=job.env)
    lines = _with_header(text.removesuffix("\n").split("\n"), options(job, site, offset))
    lines = _filled(lines, "command", command_lines(job, offset, before))
    lines = _filled(lines, "setup", [*setup, f"scratch={_expanding(site.scratch or '')}"])
    return "".join(_checked_line(job, line) for line in lines)


def _checked_line(job: Job, line: str) -> str:
    """Return a line of a script with its line end; refuse text that sbatch or bash could read as several lines."""
    if all(character.isprintable() or character == "\t" for character in line):
        return f"{line}\n"
    option = line.removeprefix(f"{DIRECTIVE}--").partition("=")[0] if line.startswith(DIRECTIVE) else "setup"
    setting = "cluster.runs" if option in ("output", "error") else f"cluster.slurm.{option}"
    what = f"the script of job {job.name} would contain {line!r}, which has an unprintable character"
    remedy = job.again.with_settings((setting, ANY), then="   (printable characters only)")
    raise ConfigError(what, where=setting, remedy=remedy)


def array_offset(job: Job, highest_task: int | None) -> int:
    """Return the offset from array index to task number: 0 if the cluster's limit on indexes allows it."""
    if highest_task is None or job.tasks[-1] <= highest_task:
        return 0
    first, last = job.tasks[0], job.tasks[-1]
    if last - first > highest_task:
        what = f"its tasks reach from {first} to {last}; this cluster allows {highest_task + 1} array tasks a job"
        raise job.refused(what, ("slurm.max_array_size", ANY), then="   (MaxArraySize in scontrol show config)")
    return first


def offset_of(script: str) -> int | None:
    """Return the array offset in a rendered script; None if it has none."""
    match = OFFSET.search(script)
    return int(match[1]) if match else None


def job_name(job: Job) -> str:
    """Return the job's name in the queue: its tag, without characters that some command refuses."""
    name = job.tag or f"pipeline-{job.name}"
    if NAME.fullmatch(name):
        return name
    digest = hashlib.blake2b(os.fsencode(name), digest_size=6).hexdigest()
    return f"{re.sub('[^A-Za-z0-9._+-]', '_', name)[:100]}-{digest}"


def options(job: Job, site: SlurmSection, offset: int = 0) -> list[str]:
    """Return the sbatch options of a job, as header lines take them."""
    out, err = (log_pattern(job, end) for end in ("out", "err"))
    pairs: list[tuple[str, str | None]] = [
        ("job-name", job_name(job)),
        ("array", array(job.tasks, offset, job.max_parallel)),
        ("partition", job.request.partition or site.partition),
        ("account", site.account),
        ("qos", job.request.qos or site.qos),
        ("reservation", site.reservation),
        ("constraint", job.request.constraint or site.constraint),
        ("exclude", ",".join(job.exclude)),
        ("nodes", str(job.request.nodes)),
        ("ntasks", str(job.request.processes)),
        ("ntasks-per-node", str(job.request.ranks) if job.request.ranks else None),
        ("cpus-per-task", str(job.request.cpus)),
        _gpus(job, site),
        _memory(job, site),
        ("time", slurm_clock(job.request.time_s) if job.request.time_s else None),
        ("signal", _signal(job, site)),
        ("dependency", dependency(job)),
        ("begin", f"now+{job.begin_s}" if job.begin_s else None),
        ("output", out),
        ("error", err),
    ]
    filled = [f"--{name}={header_word(value)}" for name, value in pairs if value]
    return [*filled, "--open-mode=append", "--requeue", *map(_whole, site.options)]


def array(tasks: Sequence[int], offset: int = 0, max_parallel: int | None = None) -> str:
    """Return the value of `--array` with ranges, such as 0-4,7,9-11%8."""
    text = format_ranges([task - offset for task in tasks])
    return text + (f"%{max_parallel}" if max_parallel and max_parallel < len(tasks) else "")


def slurm_clock(time_s: int) -> str:
    """Return a time limit in sbatch's format, rounded up to minutes."""
    minutes = -(-time_s // 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:00"


def dependency(job: Job) -> str:
    """Return the value of `--dependency`."""
    return ":".join(("afterany", *job.after_any)) if job.after_any else ""


def log_pattern(job: Job, end: str) -> str:
    """Return the file name pattern of a job's logs."""
    folder = os.path.abspath(job.log_dir)  # noqa: PTH100 - a link in it stays one
    if "\\" in folder:
        what = f"its log folder contains a backslash ({folder!r}), which sbatch cannot handle"
        raise job.refused(what, ("runs", "FOLDER"))
    return f"{folder.replace('%', '%%')}/{LOG}.{end}"


def header_word(value: str) -> str:
    """Return a value quoted for an #SBATCH line."""
    if PLAIN.fullmatch(value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def command_lines(job: Job, offset: int = 0, before: Sequence[str] = ()) -> list[str]:
    """Return the lines that define a task's command: one quoted argument a line, not expanded by the shell.

    `before` are the quoted words that start it in a container, where the image's interpreter runs it.
    """
    argv = [PYTHON if before and word == sys.executable else word for word in job.argv]
    words = [*before, *('"$task"' if word == TASK else shell_word(word) for word in argv)]
    exports = [f"export {name}={shell_word(value)}" for name, value in job.env.items()]
    numbers = [f"offset={offset}", "task=$((SLURM_ARRAY_TASK_ID + offset))"]
    ranks = [f"ranks={job.request.processes}"] if job.request.ranks else []
    restarts = ["restarts=yes"] if job.name == StageName.TRAIN else []
    return [*numbers, *ranks, *restarts, *exports, "command=(", *(f"  {word}" for word in words), ")"]


def inside(
    container: ContainerSection, sees: Sequence[str], *, gpus: int = 0, variables: Iterable[str] = ()
) -> list[str]:
    """Return the prefix, quoted for bash, that starts a command in an image; empty without an image.

    The command sees its folders at their usual paths, and the node's folder for temporary files. For pyxis these are
    options of srun. Only podman needs the names of the job's `variables`.
    """
    if container.image is None or not sees:
        return []
    image, options, place = shell_word(container.image), map(shell_word, container.options), '"$PWD"'
    folders = [*map(shell_word, sees), TEMPORARY]
    ours = (bind if ":" in bind else f"{bind}:{bind}" for bind in container.binds)
    binds = [*(f"{folder}:{folder}" for folder in folders), *map(_expanding, ours)]
    environment = ["env", *(shell_word(f"{name}={value}") for name, value in {**CLEAN, **container.env}.items())]
    if container.runtime == "pyxis":
        words = [f"--container-image={image}", f"--container-mounts={','.join(binds)}", f"--container-workdir={place}"]
        return [*words, *options, *environment]
    if container.runtime == "apptainer":
        binding = [word for bind in binds for word in ("--bind", bind)]
        cards = ["--nv"] if gpus else []
        return ["apptainer", "exec", *binding, "--pwd", place, *cards, *options, image, *environment]
    binding = [word for name in (*PASSED, *variables) for word in ("--env", name)]
    binding += [word for bind in binds for word in ("--volume", bind)]
    cards = ["--device", "nvidia.com/gpu=all"] if gpus else []
    own_id = ["--userns=keep-id"] if os.geteuid() else []  # root neither needs nor may use it
    return [*PODMAN, *own_id, *binding, "--workdir", place, *cards, *options, image, *environment]


def shell_word(text: str) -> str:
    """Quote a text for bash; characters that sbatch or a locale might refuse are escaped."""
    if all(character.isprintable() for character in text):
        return shlex.quote(text)
    return "$'" + "".join(map(_spelled, os.fsencode(text))) + "'"


def _spelled(byte: int) -> str:
    """Escape a byte inside $'...'."""
    character = chr(byte)
    return character if " " <= character <= "~" and character not in "\\'" else f"\\x{byte:02x}"


def _expanding(text: str) -> str:
    """Quote a text for bash; its variables are expanded on the node."""
    words = filter(None, VARIABLE.split(text))
    return "".join(f'"${{{word.strip("${}")}:-}}"' if VARIABLE.match(word) else shell_word(word) for word in words)


def _gpus(job: Job, site: SlurmSection) -> tuple[str, str | None]:
    """Return the option that requests GPUs on this site."""
    kind = f"{job.request.card}:" if job.request.card else ""
    if not job.request.gpus:
        return "gres", None
    return (
        ("gres", f"gpu:{kind}{job.request.gpus}")
        if site.gpus == "gres"
        else ("gpus-per-node", f"{kind}{job.request.gpus}")
    )


def _memory(job: Job, site: SlurmSection) -> tuple[str, str | None]:
    """Return the option that requests memory on this site."""
    if job.request.mem_bytes is None or site.memory == "none":
        return "mem", None
    shares = job.request.cpus_on_node if site.memory == "mem-per-cpu" else 1
    return site.memory, f"{-(-job.request.mem_bytes // (MIB * shares))}M"


def _signal(job: Job, site: SlurmSection) -> str | None:
    """Return the value of `--signal`."""
    before_s = warning_s(site, job.request.time_s)
    return f"USR2@{before_s}" if before_s > 0 else None


def warning_s(site: SlurmSection, time_s: int | None) -> int:
    """Return how long before its time limit a task is warned, at most a part of that limit."""
    return int(site.grace) if time_s is None else min(int(site.grace), time_s // 4)


def _whole(option: str) -> str:
    """Return one of the site's own options, quoted for the header."""
    name, equals, value = option.partition("=")
    name = name if name.startswith("-") else f"--{name}"
    return f"{name}={header_word(value)}" if equals else name


def _with_header(lines: Sequence[str], options: Iterable[str]) -> list[str]:
    """Replace the #SBATCH lines of a script."""
    place = next((number for number, line in enumerate(lines) if line.startswith(DIRECTIVE)), 1)
    kept = [line for line in lines[place:] if not line.startswith(DIRECTIVE)]
    return [*lines[:place], *(DIRECTIVE + option for option in options), *kept]


def _filled(lines: list[str], place: str, filling: Iterable[str]) -> list[str]:
    """Replace the text between the two marks of a section of the script."""
    opens = next(number for number, line in enumerate(lines) if line.startswith(f"# >>> {place}"))
    return [*lines[: opens + 1], *filling, *lines[lines.index(f"# <<< {place}") :]]
