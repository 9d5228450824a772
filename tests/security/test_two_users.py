"""Two users, two projects, one cache: the folder's mode decides who reads and writes, whatever the umask.

The users are numbers that nobody else has; each command is typed in a process of its own, as one of them.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.config.load import read_config
from pipeline.engine.lifecycle import new_run
from pipeline.files import is_mine
from pipeline.journal.ledger import Ledger
from pipeline.records import EventKind
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format.cache_layout import PARTIAL_SUFFIX, KindLayout
from pipeline.store.users import User as CacheUser
from pipeline.store.users import register
from pipeline.structures.synthetic import complex_pdb
from tests.testkit.command import Command, Typed
from tests.testkit.project import PIPELINE, MakeProject, settle, to_do

ROOT = Path(__file__).parents[2]
ALICE, BOB, LAB = 64101, 64102, 64100
GRAPHS = ("submit", "--stage", "graph", "--executor", "local", "--follow")
GROUPS, PRIVATE, READ_ONLY, STICKY = 0o2770, 0o700, 0o2750, 0o3770
UMASKS = (0o077, 0o002)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")


@dataclass(frozen=True)
class User:
    """A user with a project of their own, over the cache that both use."""

    uid: int
    folder: Path
    limit_s: float | None = None  # of a command

    def types(self, *words: str, umask: int = 0o077) -> Typed:
        """Type a command as this user, who is in the group of both."""
        known = {"PATH": f"{PIPELINE.parent}:/usr/bin:/bin", "HOME": str(self.folder), "PYTHONPATH": str(ROOT)}
        known |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "200"}
        become = f"setpriv --reuid={self.uid} --regid={self.uid} --groups={LAB}"
        doors = let_in(self.folder.parent)
        script = "\n".join([*doors, f"umask {umask:03o}", f'exec {become} "$@"'])
        typed = [*(["unshare", "--mount"] if doors else []), "sh", "-ec", script, "sh", str(PIPELINE), *words]
        done = subprocess.run(
            typed, cwd=self.folder, env=known, capture_output=True, text=True, check=False, timeout=self.limit_s
        )
        return Typed(done.returncode, done.stdout, done.stderr)

    def run(self) -> Path:
        """Return the folder of the newest run."""
        return max((self.folder / "runs").glob("2*"))


def let_in(place: Path) -> list[str]:
    """Return shell lines that show others, in a name space of mounts, our checkout and Python below closed folders."""
    needed = {path.resolve() for path in (ROOT, Path(sys.prefix), Path(sys.base_prefix))}
    above = {path: [folder for folder in path.parents if not folder.stat().st_mode & stat.S_IXOTH] for path in needed}
    hidden = {path: closed[-1] for path, closed in above.items() if closed}
    held = {path: place / f"held-{number}" for number, path in enumerate(hidden)}
    for folder in held.values():
        folder.mkdir(exist_ok=True)
    return [
        *(f"mount --bind {path} {folder}" for path, folder in held.items()),
        *(f"mount -t tmpfs -o mode=755 tmpfs {closed}" for closed in sorted(set(hidden.values()))),
        *(f"mkdir -p {path} && mount --bind {folder} {path}" for path, folder in held.items()),
    ]


@dataclass(frozen=True)
class Lab:
    """Two users, and the folder of their cache."""

    alice: User
    bob: User
    cache: Path
    data: Path

    def shares(self, mode: int, owner: int = ALICE) -> None:
        """Make the folder of the cache, with such a mode."""
        self.cache.mkdir()
        os.chown(self.cache, owner, LAB)
        self.cache.chmod(mode)

    def paths(self) -> list[Path]:
        return [self.cache, *self.cache.rglob("*")]


@pytest.fixture
def lab() -> Iterator[Lab]:
    """Yield two projects with a data set of three complexes, which name one cache."""
    place = Path(tempfile.mkdtemp())
    place.chmod(0o755)
    (place / "data").mkdir()
    for number in range(3):
        adds(place / "data", number)
    users = []
    for uid in (ALICE, BOB):
        folder = place / str(uid)
        folder.mkdir()
        config = {"data": {"source": "glob", "path": "../data"}, "cache": {"root": "../cache"}}
        (folder / "pipeline.yaml").write_text(json.dumps(config | {"cluster": {"private": False}}))
        for path in (folder, *folder.rglob("*")):
            os.chown(path, uid, uid)
        users.append(User(uid, folder))
    if (begun := users[0].types("--help")).code:
        _without(place, f"another user cannot be let in to this checkout or its Python: {begun.said[:200]}")
    yield Lab(users[0], users[1], place / "cache", place / "data")
    shutil.rmtree(place)


def adds(data: Path, number: int) -> None:
    (data / f"c{number}.pdb").write_bytes(complex_pdb(number, 20, 21))
    settle(data)


def _without(place: Path, why: str) -> None:
    shutil.rmtree(place)
    (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(why)


def submits(user: User, umask: int = 0o077) -> Typed:
    done = user.types(*GRAPHS, umask=umask)
    assert done.code == 0, done.said
    return done


@pytest.mark.nightly
@pytest.mark.parametrize("umask", UMASKS)
def test_a_groups_folder_makes_files_the_groups_whatever_the_umask(lab: Lab, umask: int) -> None:
    lab.shares(GROUPS)
    submits(lab.alice, umask)
    assert to_do(lab.alice.folder)["scan"] == (0, 3)
    adds(lab.data, 3)
    submits(lab.bob, umask)
    assert to_do(lab.bob.folder)["scan"] == (3, 1), "what the other has made is used"
    assert {path.stat().st_uid for path in lab.paths()} == {ALICE, BOB}, "and what is missing is added"
    for path in lab.paths():
        mode = path.stat().st_mode
        assert path.stat().st_gid == LAB, path
        assert mode & stat.S_IRGRP, path
        if path.is_dir():
            assert mode & stat.S_ISGID, path
            assert mode & stat.S_IWGRP, path
        assert umask != 0o077 or not mode & stat.S_IRWXO or path.name.startswith("."), path
    assert "nothing to do" in submits(lab.alice, umask).said


@pytest.mark.nightly
@pytest.mark.parametrize("umask", UMASKS)
def test_default_acls_of_the_folder_are_kept(lab: Lab, umask: int) -> None:
    if shutil.which("setfacl") is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("setfacl is not installed (package acl)")
    lab.shares(PRIVATE)
    entry = f"g:{LAB}:rwx"
    words = ["setfacl", "-m", entry, "-d", "-m", entry, str(lab.cache)]
    if refused := subprocess.run(words, capture_output=True, text=True, check=False).stderr:
        pytest.skip(f"the file system of temporary files has no ACLs: {refused.strip()}")
    submits(lab.alice, umask)
    adds(lab.data, 3)
    submits(lab.bob, umask)
    assert to_do(lab.bob.folder)["scan"] == (3, 1)
    for path in lab.paths():
        words = ["getfacl", "--numeric", "--omit-header", "--absolute-names", str(path)]
        told = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        assert f"group:{LAB}:rwx" in told, (path, told)
        assert "mask::r" in told, (path, told)


@pytest.mark.nightly
def test_a_private_cache_stays_private_and_says_whose_it_is(lab: Lab) -> None:
    lab.shares(PRIVATE)
    submits(lab.alice, 0o002)
    done = lab.bob.types(*GRAPHS)
    assert done.code == 2
    assert f"belongs to user {ALICE}, group {LAB}, mode drwx------" in done.said
    assert "next:" in done.said


@pytest.mark.nightly
def test_a_cache_that_may_only_be_read_serves_what_it_has_and_refuses_the_rest_at_submission(lab: Lab) -> None:
    lab.shares(READ_ONLY)
    submits(lab.alice)
    assert "nothing to do" in submits(lab.bob).said
    adds(lab.data, 3)
    done = lab.bob.types(*GRAPHS)
    assert done.code == 2
    assert f"belongs to user {ALICE}" in done.said
    assert "cache.under" in done.said
    (stage,) = json.loads(lab.bob.types("status", "--json").out)["stages"]
    assert (stage["name"], stage["cached"], stage["missing"], stage["jobs"]) == ("scan", 3, 1, []), "no task began"


@pytest.mark.nightly
def test_anothers_run_can_be_read_where_it_may_and_is_not_resumed_or_cancelled(lab: Lab) -> None:
    lab.shares(GROUPS)
    submits(lab.alice, 0o022)
    run = lab.alice.run()
    for words in (("status",), ("report",), ("logs",)):
        assert lab.bob.types(*words, str(run)).code == 0, words
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    for verb in ("resume", "cancel", "replay"):
        refused = lab.bob.types(verb, str(run))
        assert refused.code == 2
        assert f"belongs to user {ALICE}" in refused.said
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    assert lab.alice.types(*GRAPHS, "--set", "cluster.private=true").code == 0
    assert lab.bob.types("status", str(lab.alice.run())).code == 2


def test_a_path_is_ones_own_too_where_the_file_system_knows_users_by_other_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (mine := tmp_path / "mine").mkdir()
    (others := tmp_path / "others").mkdir()
    os.chown(others, ALICE, ALICE)
    assert [is_mine(mine), is_mine(others)] == [True, False]
    monkeypatch.setattr(os, "geteuid", lambda: BOB)  # whose files a mount shows as root's
    assert [is_mine(mine), is_mine(others)] == [True, False]


@pytest.mark.parametrize("lists", [True, False])
def test_cleaning_a_shared_cache_loads_no_code_of_anothers_run_and_keeps_its_records(
    pipeline: Command, make_project: MakeProject, tmp_path: Path, lists: bool
) -> None:
    mine, loaded = make_project(1), tmp_path / "loaded"
    (theirs := tmp_path / "theirs").mkdir()
    (theirs / "their_encoder.py").write_text(f"open({str(loaded)!r}, 'w')")
    cache, tag = CacheFolder(mine / "cache"), b"tag!"
    with cache.kind("graph").writer() as writer:
        for key in (tag + bytes(12), b"another recipe's"):
            writer.put(key, {})
    config = read_config(mine / "pipeline.yaml", [f"cluster.runs={theirs}"]).config
    run = new_run(config, ["graph"], tags=[("graph", tag)] if lists else None)
    run.config.write_text(run.config.read_text().replace('"encoder": "auto"', '"encoder": "their_encoder:Encoder"'))
    run.task_code.write_text(str(theirs))
    about = {"host": socket.gethostname(), "pid": os.getpid()}
    Ledger(run, "supervisor-000001").emit(EventKind.RUN_STARTED, stages=["graph"], **about)
    assert register(cache.disk, cache.root, CacheUser(str(theirs / "pipeline.yaml"), str(theirs), frozenset()))
    assert "their_encoder" in run.config.read_text()
    for words in ((), ("--yes",)):
        assert pipeline("cache", "clean", "--older-than", "0", *words).code == 0
    assert not loaded.exists()
    assert len(set(CacheFolder(cache.root).kind("graph").keys())) == (1 if lists else 2)


def shards(lab: Lab, owner: int) -> list[Path]:
    return [path for path in lab.cache.glob("graph/shards/*.safetensors") if path.stat().st_uid == owner]


@pytest.mark.nightly
def test_what_is_damaged_of_one_users_is_made_anew_by_another(lab: Lab) -> None:
    lab.shares(GROUPS)
    submits(lab.alice)
    (shard,) = shards(lab, ALICE)
    data = bytearray(shard.read_bytes())
    data[len(data) // 2 :: 97] = bytes(len(data[len(data) // 2 :: 97]))
    shard.write_bytes(data)
    assert lab.bob.types("cache", "validate").code == 4
    repaired = lab.bob.types("cache", "repair", "--yes")
    assert repaired.code == 0, repaired.said
    submits(lab.bob)
    assert lab.bob.types("cache", "validate").code == 0
    assert "nothing to do" in submits(lab.alice).said


@pytest.mark.nightly
@pytest.mark.parametrize("mode", [GROUPS, STICKY])
def test_what_a_dead_process_of_another_left_is_cleaned_where_the_folder_lets_one(lab: Lab, mode: int) -> None:
    lab.shares(mode)
    submits(lab.alice)
    adds(lab.data, 3)
    submits(lab.bob)
    left = KindLayout(lab.cache / "graph").partials / f"20260101T000000Z-dead-1-{'0' * 16}{PARTIAL_SUFFIX}"
    left.parent.mkdir(exist_ok=True)
    left.write_bytes(b"torn")
    os.utime(left, (0, 0))
    os.chown(left, ALICE, LAB)
    left.chmod(0o600)
    os.chown(left.parent, ALICE, LAB)
    left.parent.chmod(mode)
    cleaned = lab.bob.types("cache", "clean", "--older-than", "0", "--yes")
    assert cleaned.code == 0, cleaned.said
    assert left.exists() == (mode == STICKY)
    assert mode != STICKY or f"it is user {ALICE}'s: only its owner may remove it" in cleaned.said
    assert "nothing to do" in submits(lab.alice).said, "what the other's project needs has stayed"
