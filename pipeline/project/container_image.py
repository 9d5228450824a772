"""The container image of the workers: its digest, the folders that it must see, and whether it is usable."""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from pipeline import __version__
from pipeline.cluster.sbatch import PYTHON, inside, shell_word
from pipeline.codec import memo
from pipeline.command_line import ANY, DISTRIBUTION, Command
from pipeline.encoder.weights import find_checkpoint
from pipeline.errors import ConfigError, SubmissionRefused
from pipeline.files import file_digest
from pipeline.project.user_code import plans_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from pipeline.config.schema import Config

WHERE = "cluster.slurm.container"
BUILD = "rebuild it for this version as containers/pipeline.def shows"
OUTSIDE = frozenset(  # folders that belong to the image
    Path(f"/{name}")
    for name in ("", "bin", "boot", "dev", "etc", "lib", "lib64", "opt", "proc", "run", "sbin", "sys", "usr", "var")
)
# Signs that a process runs in a container: a variable that names the image, or a file.
LOOK_S = 300.0  # includes the time to unpack an image
LOOK_AGAIN = f"pipeline doctor   ({WHERE}: image, binds, env.PATH)"
NOT_HERE = 97
LOOK = f"""\
import json, sys
from importlib.metadata import PackageNotFoundError, version
found = {{"python": sys.version.split()[0]}}
for name, distribution in (("pipeline", {DISTRIBUTION!r}), ("torch", "torch")):
    try:
        found[name] = version(distribution)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class ImageContent:
    """Versions found inside an image; empty if not installed."""

    python: str = ""
    pipeline: str = ""
    torch: str = ""


def with_digest(config: Config) -> Config:
    """Return a configuration with the digest of its image; refuse an image with another digest than the named one."""
    container = config.cluster.slurm.container
    if not is_contained(config):
        return config
    digest = digest_now(config)
    if container.digest not in (None, digest):
        what = f"the image changed: its digest is {digest}, expected {container.digest}"
        remedy = "restore the image that the run started with, or submit again:   pipeline submit"
        raise SubmissionRefused(what, where=f"{WHERE}.image: {container.image}", remedy=remedy)
    slurm = config.cluster.slurm.model_copy(update={"container": container.model_copy(update={"digest": digest})})
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"slurm": slurm})})


def is_contained(config: Config) -> bool:
    """Tell whether workers run in a container."""
    return config.cluster.executor == "slurm" and config.cluster.slurm.container.image is not None


def image_of(config: Config) -> str:
    """Return the digest of the workers' image at submission; empty without an image."""
    if not is_contained(config):
        return ""
    return config.cluster.slurm.container.digest or digest_now(config)


def digest_now(config: Config) -> str:
    """Return the digest of the image; or its name, if only the nodes can look it up."""
    container, image = config.cluster.slurm.container, str(config.cluster.slurm.container.image)
    if container.runtime == "podman":
        return _digest_of_podmans(config, image)
    if not image.startswith("/"):
        return image.rpartition("@")[2]
    try:
        return _digest_of_folder(Path(image)) if Path(image).is_dir() else _digest_of_file(config, Path(image))
    except OSError as error:
        raise _no_image(image, error.strerror or str(error)) from error


def _digest_of_file(config: Config, image: Path) -> str:
    """Return the digest of an image's bytes; read them again only if the file has changed."""
    facts = image.stat()
    state = [str(image.absolute()), facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino]
    return memo(plans_folder(config), "image", {"file": state}, partial(file_digest, image), str)


def _digest_of_folder(image: Path) -> str:
    """Return the digest of an unpacked image: names, sizes and times of its files."""
    digest = xxhash.xxh3_128()
    for folder, folders, names in os.walk(image):
        folders.sort()
        for path in (Path(folder) / name for name in sorted(names)):
            facts = path.lstat()
            digest.update(os.fsencode(f"{path.relative_to(image)}\0{facts.st_size}\0{facts.st_mtime_ns}\0"))
    return digest.hexdigest()


def _digest_of_podmans(config: Config, image: str) -> str:
    """Return the id of an image in podman's local storage."""
    done = run_here(config, f"podman image inspect --format '{{{{.Id}}}}' {shell_word(image)}", "podman")
    if done.returncode == NOT_HERE:
        remedy = f'cluster.slurm.setup: ["module load podman"], or another {WHERE}.runtime'
        what = "podman is not on the PATH here, so its images cannot be checked"
        raise SubmissionRefused(what, where=WHERE, remedy=remedy)
    if done.returncode:
        raise _no_image(image, _last_line(done.stderr))
    return done.stdout.strip()


def _no_image(image: str, why: str) -> SubmissionRefused:
    remedy = Command.of("doctor").with_settings((f"{WHERE}.image", ANY))
    return SubmissionRefused(f"image not found: {why}", where=f"{WHERE}.image: {image}", remedy=remedy)


def run_here(config: Config, words: str, program: str) -> subprocess.CompletedProcess[str]:
    """Run a command as jobs do, after the setup lines; exit with NOT_HERE if its program is not on the PATH."""
    lines = [*config.cluster.slurm.setup, f"command -v {program} >/dev/null || exit {NOT_HERE}", words]
    command = ["bash", "-eo", "pipefail", "-c", "\n".join(lines)]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LOOK_S, check=False
    )


def look_inside(config: Config) -> ImageContent | None:
    """Start the image here, as workers are started, and return its content; None without its runtime here.

    Raise SubmissionRefused if it does not start.
    """
    container = config.cluster.slurm.container
    binds = tuple(bind for bind in container.binds if "$" not in bind.partition(":")[0])
    words = inside(container.model_copy(update={"binds": binds}), folders_inside(config))
    try:
        done = run_here(config, " ".join([*words, PYTHON, "-c", shell_word(LOOK)]), container.runtime)
    except subprocess.TimeoutExpired as error:
        what = f"{container.runtime} did not start it within {LOOK_S:.0f} s"
        raise SubmissionRefused(what, where=f"{WHERE}.image: {container.image}", remedy=LOOK_AGAIN) from error
    if done.returncode == NOT_HERE:
        return None
    try:
        return ImageContent(**json.loads(done.stdout.splitlines()[-1]))
    except (ValueError, TypeError, IndexError):
        what = f"no {PYTHON} starts in the image: {_last_line(done.stderr) or f'exit code {done.returncode}'}"
        raise SubmissionRefused(what, where=f"{WHERE}.image: {container.image}", remedy=LOOK_AGAIN) from None


def refuse_unfit_image(config: Config) -> Iterator[str]:
    """Refuse an image that workers cannot run in; yield the checks that are impossible here."""
    container = config.cluster.slurm.container
    for bind in container.binds:
        source = bind.partition(":")[0]
        if "$" not in source and not os.path.exists(source):  # noqa: PTH110 - which never raises
            remedy = "correct the path; write folders that exist only on nodes with a variable, such as $TMPDIR"
            raise SubmissionRefused("folder not found here", where=f"{WHERE}.binds: {source}", remedy=remedy)
    if container.runtime == "pyxis":
        yield from _look_for_pyxis(config)
        return
    found = look_inside(config)
    if found is None:
        yield f"{container.runtime} is not on the PATH here, so the image could not be checked"
        return
    if found.pipeline != __version__:
        has = f"pipeline {found.pipeline}" if found.pipeline else "no pipeline"
        what = f"the image has {has}, this is {__version__}: a task's dependencies may be missing or differ"
        raise SubmissionRefused(what, where=f"{WHERE}.image: {container.image}", remedy=BUILD)
    if found.torch != (here := version("torch")):
        yield f"the image has torch {found.torch or '(none)'}, but plans use {here}: verify them with a probe"


def _look_for_pyxis(config: Config) -> Iterator[str]:
    """Refuse pyxis if srun does not know it; only a job could look into the image."""
    if "--container-image" not in run_here(config, "srun --help", "srun").stdout:
        remedy = f"--set {WHERE}.runtime=apptainer, or ask the site for pyxis"
        what = "srun has no option --container-image here"
        raise SubmissionRefused(what, where=f"{WHERE}.runtime: pyxis", remedy=remedy)
    yield "pyxis starts images only in jobs, so this one could not be checked"


def folders_inside(config: Config, beside: Path | None = None) -> tuple[str, ...]:
    """Return the folders that workers must see in an image: the current one, the runs, and all that settings name.

    `beside` is the folder of the user's modules. None without an image.
    """
    if not is_contained(config):
        return ()
    plain = config.model_dump(mode="json")
    plain["cluster"] = {"runs": str(config.cluster.runs)}  # the other placeholders are the scheduler's
    named = [str(Path.cwd()), str(beside or ""), *_texts(plain)]
    for embed in (config.embed, *config.embed.also.values()):
        with suppress(ConfigError):  # missing: the stage that needs it reports it
            named.append(str(find_checkpoint(embed.weights)))
    words = chain(named, *(text.split() for text in named))  # a command may name several paths
    folders = {folder for word in words if word.startswith("/") for folder in _to_bind(Path(word))}
    for folder in folders:
        if set(str(folder)) & set(":,"):
            remedy = "use a folder without a colon or comma in its name"
            raise SubmissionRefused("this folder cannot be mounted into a container", where=str(folder), remedy=remedy)
    return tuple(str(folder) for folder in sorted(folders) if not folders & set(folder.parents))


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in a document."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from chain.from_iterable(map(_texts, value.values()))
    elif isinstance(value, list):
        yield from chain.from_iterable(map(_texts, value))


def _to_bind(path: Path) -> Iterator[Path]:
    """Yield the folder of a path as written and resolved; never a folder that belongs to the image.

    A path that does not exist yet will be made in its nearest existing parent.
    """
    with suppress(OSError, ValueError):
        for place in {path, Path(os.path.realpath(path))}:
            folder = next(folder for folder in (place, *place.parents) if folder.is_dir())
            if folder not in OUTSIDE:
                yield folder
            elif place.exists() and place not in OUTSIDE:
                yield place


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
