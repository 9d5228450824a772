"""An image of folders alone, and the settings by which the workers of a project run in it.

Nothing can be fetched here, so Python and its packages come from this machine, by binds; an image that people use has
them itself. What is not bound, such as this checkout, is not there inside.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LENT = dict.fromkeys(["/usr", os.path.realpath(sys.base_prefix), sys.base_prefix, sys.prefix])  # the interpreter's


def why_no_namespaces() -> str:
    """Say why the kernel gives no mount namespace, without which nothing is isolated; empty where it does."""
    done = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True, timeout=30, check=False)
    return done.stderr.strip()


def make_image(folder: Path) -> Path:
    """Make the image: a root with the names that programs look for, and no program."""
    for name in ("usr", "etc", "proc", "sys", "dev", "tmp", "var/tmp", "run", "root", ".singularity.d"):
        (folder / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (folder / name).symlink_to(f"usr/{name}")
    for name in ("passwd", "group", "hosts"):
        shutil.copy(f"/etc/{name}", folder / "etc" / name)
    return folder


def why_no_podman() -> str:
    """Say why podman runs nothing here; empty where it is installed."""
    return "" if all(shutil.which(name) for name in ("podman", "crun")) else "podman and crun are not installed"


def import_image(image: Path, folder: Path, name: str) -> str:
    """Import an image into a store of its own for podman, and return the shell line that names the store."""
    store = folder / "storage.conf"
    places = f'graphroot = "{folder}/store"\nrunroot = "{folder}/run"\n'
    store.write_text(f'[storage]\ndriver = "vfs"\n{places}')
    packed = subprocess.run(["tar", "-C", image, "-c", "."], capture_output=True, timeout=60, check=True)
    known = {**os.environ, "CONTAINERS_STORAGE_CONF": str(store)}
    subprocess.run([HERE / "podman", "import", "-", name], input=packed.stdout, env=known, timeout=120, check=True)
    return f"export CONTAINERS_STORAGE_CONF={store}"


def contained(project: Path, image: str | Path, **settings: Any) -> dict[str, Any]:
    """Return the settings of a project whose workers run in an image, with a scratch disk of their own.

    In a setting's name, __ stands for the dot.
    """
    scratch = project.with_name("scratch")
    scratch.mkdir(parents=True)
    environment = {"PATH": f"{sys.prefix}/bin:/usr/bin:/bin", "PYTHONPATH": str(project / "mischief")}
    return {
        "cluster__slurm__container__image": str(image),
        "cluster__slurm__container__binds": [f"{place}:{place}:ro" for place in LENT],
        "cluster__slurm__container__env": environment,
        "cluster__slurm__scratch": str(scratch),
        "cluster__slurm__setup": [f"export PATH={HERE}:$PATH"],  # as a module does
        **settings,
    }
