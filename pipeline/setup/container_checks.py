"""The checks of `pipeline doctor` about containers: the one it runs in, and the one that workers are to run in."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from pipeline.errors import SubmissionRefused
from pipeline.project.container_image import digest_now, image_around, is_contained, refuse_unfit_image
from pipeline.setup.slurm_checks import CheckResult, failed_check, good_check, noted_check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeline.config.load import LoadedConfig


def check_around() -> Iterator[CheckResult]:
    """Tell that this runs in a container, and what cannot be done from within."""
    around = image_around()
    if not around:
        return
    if shutil.which("sbatch") is None:
        what = f"this runs in {around}, without sbatch: jobs can be neither submitted nor followed from here"
        remedy = "type it outside; workers alone run inside by cluster.slurm.container.image"
        yield noted_check("inside", what, remedy)
    else:
        yield good_check("inside", f"this runs in {around}, which has sbatch")


def check_container(loaded: LoadedConfig) -> Iterator[CheckResult]:
    """Look at the image that workers are to run in: whether it is there, starts, and holds this version."""
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
