"""Events of disks: full, read-only, purged, cleaned by another project, and a package that changes under a run."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from pipeline.journal.run_status import State
from tests.conftest import ROOT
from tests.security.test_two_users import BOB, GROUPS, LAB, UMASKS, User
from tests.testkit.slurm_runs import Project
from tests.weeks.scene import Scene, must

SMALL_DISK = "24m"
WHOSE = "belongs to root"


def disk_fills(scene: Scene) -> None:
    """The disk of a project is full from the middle of a training on: it is said, and room lets it end."""
    with _mounted(scene.folder / "small", "-t", "tmpfs", "-o", f"size={SMALL_DISK}", "tmpfs") as small:
        run = scene.held(folder=small)
        with _kept_full(small):
            scene.lets_go(run)
            told = scene.ends(run, State.FAILED, State.ABANDONED)
            scene.says(told, "No space left on device|disk is full", "next: pipeline|pipeline resume")
        scene.ends(scene.goes_on(run))
        scene.trained(run)


def disk_is_full_for_a_while(scene: Scene) -> None:
    """The disk of a project is full for some steps of a training: it goes on without that checkpoint."""
    first = scene.rng.randrange(6, 12)
    with _mounted(scene.folder / "small", "-t", "tmpfs", "-o", f"size={SMALL_DISK}", "tmpfs") as small:
        run = scene.held(first, first + 10, folder=small)
        _fill(small)
        scene.lets_go(run)
        scene.arrives(run, first + 10)
        (small / "filler").unlink()
        scene.lets_go(run)
        scene.says(scene.ends(run), "could not be saved: .*No space left on device")
        scene.trained(run)


def checkpoints_become_read_only(scene: Scene) -> None:
    """The folder of checkpoints becomes read-only in mid-training: why is said, and what helps; then it goes on."""
    run = scene.held()
    (folder,) = (run.project.folder / "models").glob("*/checkpoints")
    with _mounted(folder, "--bind", str(folder)):
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
        scene.lets_go(run)
        told = scene.ends(run, State.FAILED, State.DONE)
        scene.says(told, "could not be saved: .*Read-only file system", "findmnt")
    scene.ends(scene.goes_on(run))
    scene.trained(run)


def cache_is_read_only(scene: Scene) -> None:
    """The cache stands on a disk that nobody may write: a training reads it, and scans say what is wrong."""
    project = scene.project()
    cache = project.folder / "cache"
    with _mounted(cache, "--bind", str(cache)):
        subprocess.run(["mount", "-o", "remount,bind,ro", cache], check=True)
        run = scene.trains(project)
        scene.ends(run)
        scene.trained(run)
        done = scene.types(
            project, "submit", "--stage", "scan", "--executor", "slurm", "--set=structures.altlocs=first"
        )
        if done.code == 0:
            scene.says(scene.ends(scene.follows(project.newest), State.FAILED), "Read-only file system")
        else:
            scene.says(done.said, "Read-only file system")


def purge_eats_the_cache(scene: Scene) -> None:
    """A purge deletes every shard under a training, which may have to begin again: all is made anew, or it is said."""
    run = scene.held()
    for shard in (run.project.folder / "cache").glob("*/shards/*"):
        shard.unlink()
    if scene.rng.random() < 0.7:
        _kill(scene.process(run))
    scene.lets_go(run)
    told = scene.ends(run, State.DONE, State.FAILED)
    if run.now().state is State.FAILED:
        scene.says(told, "pipeline submit")
        scene.ends(scene.goes_on(run))
    scene.trained(run)


def another_project_cleans(scene: Scene) -> None:
    """Another project cleans and compacts the cache while one trains from it: nothing goes that the training reads."""
    run = scene.held()
    project, other = run.project, Project(scene.folder / "other")
    shutil.copytree(scene.template.folder, other.folder, ignore=shutil.ignore_patterns("cache", "runs", "models"))
    shared = f"--set=cache.root={project.folder / 'cache'}"
    before = project.records()
    for words in (("--yes",), ("--yes", "--older-than", "1m"), ("--yes", "--all")):
        scene.types(other, "cache", "clean", *words, shared, "--set=graph.neighbours=5")
    scene.types(other, "cache", "compact", "--yes", shared)
    must(project.records() == before, "cleaning took what a running training reads")
    scene.lets_go(run)
    scene.ends(run)
    scene.trained(run)


def another_user_cleans(scene: Scene) -> None:
    """Another user, who shares the cache or may not, cleans it under a training: nothing goes, or it is refused."""
    with _open_to_all() as place:
        run = scene.held(folder=place)
        cache, other = run.project.folder / "cache", User(BOB, place / "other")
        shutil.copytree(scene.template.folder, other.folder, ignore=shutil.ignore_patterns("cache", "runs", "models"))
        is_shared = scene.rng.random() < 0.5
        for path in (cache, *cache.rglob("*")):
            os.chown(path, 0, LAB)
            path.chmod((GROUPS if path.is_dir() else 0o660) if is_shared else (0o700 if path.is_dir() else 0o600))
        for path in (other.folder, *other.folder.rglob("*")):
            os.chown(path, BOB, BOB)
        before, shared = run.project.records(), (f"--set=cache.root={cache}", "--set=graph.neighbours=5")
        unknown = "whether their runs are active is unknown"  # those of a project that is closed to this user
        answers = {"--yes": (0, "") if is_shared else (2, WHOSE), "--all": (2, unknown if is_shared else WHOSE)}
        for word, (code, answer) in answers.items():
            done = other.types("cache", "clean", "--yes", word, *shared, umask=scene.rng.choice(UMASKS))
            scene.heard.append(f"$ (as {BOB}) pipeline cache clean {word}\n{done.said} (exit code {done.code})")
            must(done.code == code and answer in done.said, f"{word} of another ended with {done.code}: {done.said}")
        must(run.project.records() == before, "another user's cleaning took what a running training reads")
        scene.lets_go(run)
        scene.ends(run)
        scene.trained(run)


@contextmanager
def _open_to_all() -> Iterator[Path]:
    """Yield a folder that every user may pass through."""
    place = Path(tempfile.mkdtemp(prefix="weeks-"))
    place.chmod(0o755)
    before = os.umask(0o022)
    try:
        yield place
    finally:
        os.umask(before)
        shutil.rmtree(place)


def package_changes(scene: Scene) -> None:
    """The package is upgraded to something broken while a run goes on: the run keeps the code it was submitted with."""
    site = scene.folder / "site"
    for name in ("pipeline", "sbatch", "configs"):
        shutil.copytree(ROOT / name, site / name, ignore=shutil.ignore_patterns("__pycache__"))
    run = scene.held(path=str(site))
    for path in site.rglob("*.py"):
        path.write_text("raise SystemError('half an upgrade')\n")
    _kill(scene.process(run))
    scene.lets_go(run)
    scene.ends(run)
    scene.trained(run)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, 9)


@contextmanager
def _kept_full(folder: Path) -> Iterator[None]:
    """Have others take all room on a disk, and what becomes free, for the time of a block."""
    is_over = threading.Event()

    def take() -> None:
        while not is_over.wait(0.02):
            _fill(folder)

    with ThreadPoolExecutor(1) as others:
        others.submit(take)
        try:
            yield
        finally:
            is_over.set()
    (folder / "filler").unlink()


def _fill(folder: Path) -> None:
    """Take all room on a disk."""
    with (folder / "filler").open("ab", buffering=0) as file, suppress(OSError):
        for size in (1 << 20, 1 << 12, 1):
            with suppress(OSError):
                while True:
                    file.write(b"x" * size)


@contextmanager
def _mounted(place: Path, *words: str) -> Iterator[Path]:
    """Have something mounted for the time of a block."""
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", *words, place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


EVENTS = (
    disk_fills,
    disk_is_full_for_a_while,
    checkpoints_become_read_only,
    cache_is_read_only,
    purge_eats_the_cache,
    another_project_cleans,
    another_user_cleans,
    package_changes,
)
