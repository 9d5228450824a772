"""The image of workers where no node is needed: its digest, and the folders it has to see."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.load import read_config
from pipeline.config.schema import Config
from pipeline.errors import ConfigError, SubmissionRefused
from pipeline.files import file_digest
from pipeline.planning.probe import torch_of
from pipeline.project.container_image import folders_inside, image_of, with_digest
from pipeline.project.project import cluster_name

IMAGE = "cluster.slurm.container.image"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a project with an image beside it, and stand in it."""
    for name in ("lab/project/data", "lab/else where", "images", "far/models"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "images/pipeline.sif").write_bytes(b"SIF" * 1000)
    (tmp_path / "lab/project/pipeline.yaml").write_text("data: {source: glob, path: data}\n")
    monkeypatch.chdir(tmp_path / "lab/project")
    return tmp_path


def configured(*sets: str, image: str = "../../images/pipeline.sif") -> Config:
    """Return the configuration of the project, whose jobs go to a cluster."""
    words = ["cluster.executor=slurm", *([f"{IMAGE}={image}"] if image else []), *sets]
    return read_config(Path("pipeline.yaml"), words).config


def test_without_an_image_or_a_cluster_nothing_is_another_than_before(project: Path) -> None:
    for config, cluster in ((configured(image=""), "slurm"), (configured("cluster.executor=local"), "local")):
        assert (image_of(config), folders_inside(config), cluster_name(config)) == ("", (), cluster)
    assert with_digest(configured(image="")) == configured(image="")
    assert not (project / "lab/project/runs").exists()


def test_the_digest_is_that_of_the_file_and_is_part_of_the_names_of_measurements(project: Path) -> None:
    digest = file_digest(project / "images/pipeline.sif")
    config = configured()
    assert config.cluster.slurm.container.image == str(project / "images/pipeline.sif")
    assert image_of(config) == torch_of(config) == digest
    assert not (project / "lab/project/runs").exists()
    assert cluster_name(config) == f"slurm in {digest}"
    assert with_digest(config).cluster.slurm.container.digest == digest
    assert with_digest(with_digest(config)) == with_digest(config)


def test_another_image_than_a_run_began_with_is_refused(project: Path) -> None:
    begun = with_digest(configured())
    (project / "images/pipeline.sif").write_bytes(b"another")
    with pytest.raises(SubmissionRefused, match="the image changed"):
        with_digest(begun)
    (project / "images/pipeline.sif").unlink()
    with pytest.raises(SubmissionRefused, match="image not found"):
        with_digest(begun)


def test_an_unpacked_image_is_another_when_a_file_in_it_is(project: Path) -> None:
    (project / "images/dir/etc").mkdir(parents=True)
    digests = {image_of(configured(image=str(project / "images/dir")))}
    (project / "images/dir/etc/passwd").write_text("root")
    digests.add(image_of(configured(image=str(project / "images/dir"))))
    (project / "images/dir/etc/passwd").write_text("roots")
    digests.add(image_of(configured(image=str(project / "images/dir"))))
    assert len(digests) == 3


def test_a_name_that_only_nodes_look_up_counts_by_its_digest_or_itself(project: Path) -> None:
    for name, digest in {"lab#pipeline:1": "lab#pipeline:1", "docker://lab/pipeline@sha256:ab": "sha256:ab"}.items():
        assert image_of(configured("cluster.slurm.container.runtime=pyxis", image=name)) == digest


def test_every_folder_that_is_named_is_seen_and_none_twice(project: Path) -> None:
    command = f"{project}/lab/tool.py --table {project}/far/models/t.csv"
    seen = folders_inside(
        configured(
            f"train.command={command}",
            f"cache.root={project}/lab/else where/cache",  # is made later
            f"train.models={project}/far/models",
            f"cluster.runs={project}/lab/project/runs",
        ),
        project / "lab/project",
    )
    assert set(seen) == {str(project / "far/models"), str(project / "lab")}


def test_a_link_is_seen_as_it_is_written_and_where_it_leads(project: Path) -> None:
    (project / "lab/project/data").rmdir()
    (project / "lab/project/data").symlink_to(project / "far/models")
    assert {str(project / "lab/project"), str(project / "far/models")} <= set(folders_inside(configured()))


def test_no_folder_is_seen_that_an_image_has_for_itself(project: Path) -> None:
    seen = folders_inside(configured("data.structures_dir=/usr", "cache.root=/nowhere/cache", "train.models=/etc/m"))
    assert not {"/", "/usr", "/etc", "/nowhere"} & set(seen)


def test_what_cannot_be_meant_is_refused(project: Path) -> None:
    (project / "a:b").mkdir()
    with pytest.raises(SubmissionRefused):
        folders_inside(configured(f"train.models={project}/a:b"))
    for setting in ("binds=['relative']", "binds=['/a:/b:rx']", "binds=['/a,/b']", "env={'A B': x}", "runtime=docker"):
        with pytest.raises(ConfigError):
            configured(f"cluster.slurm.container.{setting}")
