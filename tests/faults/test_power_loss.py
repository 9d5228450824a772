"""A power loss at any moment: every state that POSIX allows then is opened as a new process would."""

from __future__ import annotations

import random
import shutil
from itertools import chain

import pytest

from pipeline.store.cache_folder import CacheFolder
from tests.faults.judged import KIND, complaints
from tests.faults.power import FileSystem, losses
from tests.faults.recorded import RecordingDisk, Step, put_tree, tree_of, unknown_changes
from tests.faults.works import NAME, WORKS
from tests.store.content import put

pytestmark = pytest.mark.fault
each_work = pytest.mark.parametrize("work", WORKS, ids=lambda work: work.name)


def recorded(work, folder, disk_of=RecordingDisk):
    """Do the work in a folder of its own, and return the disk that saw it."""
    work.begin(folder)
    disk = disk_of(folder)
    work.run(folder, CacheFolder(folder / NAME, disk), disk.acknowledge)
    return disk


def judged(work, disk, folder, *, last_first=False):
    """Yield for each state that a power loss may leave what there is to complain about."""
    left = losses(disk.before, disk.steps, safe=work.live, at_most=16)
    for loss in reversed(list(left)) if last_first else left:
        put_tree(folder, loss.tree)
        said = [*work.judge(folder, False), *complaints(folder / NAME, loss.safe, work.known, work.torn)]
        yield [f"{one} (after step {loss.after})" for one in said]
        shutil.rmtree(folder)


def convicted(work, disk, folder, complaint):
    """Say whether anything of this sort is wrong in any state."""
    found = chain.from_iterable(judged(work, disk, folder, last_first=True))
    return any(one.startswith(f"{complaint}: ") for one in found)


def test_the_recording_knows_every_step_that_changes_a_disk():
    assert unknown_changes() == set()


@each_work
def test_the_recorded_steps_lead_to_what_is_on_the_disk(work, tmp_path):
    disk = recorded(work, tmp_path / "real")
    there = tree_of(tmp_path / "real")
    system = FileSystem(disk.before)
    for step in (*disk.steps, *(Step("fsync_folder", name or ".") for name in ("", *there) if not there.get(name))):
        system.take(step)
    assert list(system.losses(1, random.Random(0))) == [there]


@each_work
def test_a_power_loss_at_any_moment_loses_and_tears_nothing(work, tmp_path, record_property):
    disk = recorded(work, tmp_path / "real")
    found = list(judged(work, disk, tmp_path / "left"))
    record_property("faults", len(found))
    assert list(chain.from_iterable(found)) == []
    assert len(found) > len(disk.steps)


class WithoutFsync(RecordingDisk):
    def fsync(self, fd):
        pass


class WithoutFolders(RecordingDisk):
    """Forgets that a name is sure only when its folder was written."""

    def fsync_folder(self, path):
        pass


class WithoutNewFolders(RecordingDisk):
    """Forgets that a new folder is a name, too."""

    made = None

    def new_folder(self, path):
        super().new_folder(path)
        self.made = path.parent

    def fsync_folder(self, path):
        if path != self.made:
            super().fsync_folder(path)
        self.made = None


class FirstTheName(RecordingDisk):
    """Publishes the name, and makes the bytes safe only then."""

    def fsync(self, fd):
        self.late = fd

    def link(self, source, target):
        super().link(source, target)
        super().fsync(self.late)

    def rename(self, source, target):
        super().rename(source, target)
        super().fsync(self.late)


WRONG = [
    (WithoutFsync, "publish", "torn"),
    (WithoutFsync, "publish", "refused"),
    (WithoutFolders, "publish", "lost"),
    (WithoutFolders, "repair", "lost"),
    (WithoutNewFolders, "publish", "lost"),
    (FirstTheName, "index", "torn"),
    (WithoutFsync, "seal", "torn"),
]


@pytest.mark.parametrize(("disk_of", "name", "complaint"), WRONG, ids=lambda part: getattr(part, "__name__", part))
def test_a_wrong_publisher_is_convicted(disk_of, name, complaint, tmp_path):
    (work,) = (work for work in WORKS if work.name == name)
    disk = recorded(work, tmp_path / "real", disk_of)
    assert convicted(work, disk, tmp_path / "left", complaint)


def test_who_acknowledges_too_early_is_convicted(tmp_path):
    def act(folder, cache, say):
        with cache.kind(KIND).writer() as writer:
            say(put(writer, 0))

    work = next(work for work in WORKS if work.name == "publish")
    disk = RecordingDisk(tmp_path / "real")
    act(tmp_path, CacheFolder(tmp_path / "real" / NAME, disk), disk.acknowledge)
    assert convicted(work, disk, tmp_path / "left", "lost")
